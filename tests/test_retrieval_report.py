"""The table, `reranking.json` and the picture, of a model that looks things up."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mm_utils.flops import FlopCounts, Quadratic
from mm_utils.intervals import mean_interval
from mm_utils.metrics import EvaluationArguments, RetrievalEvaluator
from mm_utils.retrieval_report import direction_figures, report_retrieval, scoring_costs
from tests.truthful_model import ACCELERATOR, TruthfulModel

MAIN: Any = SimpleNamespace(is_main_process=True)
FLOPS = FlopCounts(
    10**9, 3 * 10**9, Quadratic(0, 10**9, 0), Quadratic(0, 2 * 10**9, 0), vision_trained=True, text_trained=True
)


def evaluated(top_k: int = 6) -> tuple[RetrievalEvaluator, dict[str, float]]:
    model: Any = TruthfulModel()
    model.logits = 4 * torch.randn(23, len(model.owner), generator=torch.Generator().manual_seed(0))
    evaluator = RetrievalEvaluator(EvaluationArguments(rerank_top_k=top_k))
    return evaluator, evaluator(model, model.batches(5), ACCELERATOR)


def test_files_hold_what_was_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    evaluator, metrics = evaluated()
    with caplog.at_level(logging.INFO, "mm_utils"):
        report_retrieval(MAIN, evaluator, FLOPS, str(tmp_path))
    found = json.loads((tmp_path / "reranking.json").read_text())
    for direction in ("text_to_image", "image_to_text"):
        figures = found[direction]
        for k in (1, 5, 10):
            name = f"recall@{k}"
            assert figures["dual_encoder"][name]["value"] == metrics[f"{direction}_{name}"]
            assert figures["reranked"][name]["value"] == metrics[f"rerank_{direction}_{name}"]
            gain = metrics[f"rerank_{direction}_{name}"] - metrics[f"{direction}_{name}"]
            assert figures["difference"][name]["value"] == pytest.approx(gain)
            curve = {row["candidates"]: row[name]["value"] for row in figures["curve"]}
            assert list(curve) == [1, 2, 4, 6]
            assert curve[1] == metrics[f"{direction}_{name}"]
            assert curve[6] == metrics[f"rerank_{direction}_{name}"]
        ceilings = [row["ceiling"]["value"] for row in figures["curve"]]
        assert ceilings == sorted(ceilings)
        assert ceilings[0] == metrics[f"{direction}_recall@1"]
        shown = figures["reranked"]["recall@5"]
        assert f"{shown['value']:.3f} ± {shown['half_width_95']:.3f}" in caplog.text
        assert f"{figures['difference']['recall@1']['value']:+.3f} ±" in caplog.text
    assert (tmp_path / "reranking.png").stat().st_size > 10_000
    assert "pairs at" in caplog.text


def test_a_paired_difference_is_known_better_than_its_sides() -> None:
    evaluator, _ = evaluated(2)
    figures = direction_figures(evaluator.directions["text_to_image"])
    of = evaluator.directions["text_to_image"]
    paired = mean_interval((of.reranked_Q <= 1).double() - (of.cosine_Q <= 1).double(), of.image_key_Q)
    difference = figures["difference"]["recall@1"]
    assert (difference["value"], difference["half_width_95"]) == paired


def test_costs() -> None:
    evaluator, _ = evaluated()
    assert evaluator.match is not None
    costs = scoring_costs(evaluator.match, FLOPS)
    assert costs["pairs"] == len(evaluator.match.pairs)
    assert costs["pairs_per_second"] == pytest.approx(costs["pairs"] / costs["seconds"])
    assert costs["keys_values_bytes_per_image"] == 8
    assert 3 <= costs["text_tokens"] <= 11
    assert costs["gflop_per_pair"] == 2 * round(costs["text_tokens"])
    assert costs["gflop_per_text"] == round(costs["text_tokens"])
    assert costs["gflop_per_image"] == 3


def test_without_a_head_there_is_the_table_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    evaluator, metrics = evaluated(0)
    with caplog.at_level(logging.INFO, "mm_utils"):
        report_retrieval(MAIN, evaluator, FLOPS, str(tmp_path))
    assert f"{metrics['text_to_image_recall@1']:.3f} ±" in caplog.text
    assert "re-ranked" not in caplog.text
    assert not list(tmp_path.iterdir())


def test_other_processes_are_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other: Any = SimpleNamespace(is_main_process=False)
    with caplog.at_level(logging.INFO, "mm_utils"):
        report_retrieval(other, evaluated()[0], FLOPS, str(tmp_path))
    assert not caplog.text
    assert not list(tmp_path.iterdir())
