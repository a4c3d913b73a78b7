"""The table and `reranking.json`, for a model that looks up its answers."""

import json
import logging
from pathlib import Path

import pytest

from mm_utils.evaluation.metrics import mean_interval
from mm_utils.evaluation.retrieval import EvaluationArguments, RetrievalEvaluator
from mm_utils.extras.flops.counts import FlopCounts, Quadratic
from mm_utils.extras.measured.report import direction_figures, report_retrieval, scoring_costs
from tests.kit.truthful_model import ACCELERATOR, MAIN_PROCESS, TruthfulModel

FLOPS = FlopCounts(
    10**9, 3 * 10**9, Quadratic(0, 10**9, 0), Quadratic(0, 2 * 10**9, 0), vision_trained=True, text_trained=True
)


def evaluated(top_k: int = 6) -> tuple[RetrievalEvaluator, dict[str, float]]:
    model = TruthfulModel.with_noise(0)
    evaluator = RetrievalEvaluator(EvaluationArguments(rerank_top_k=top_k))
    return evaluator, evaluator(model, model.batches(5), ACCELERATOR)


def test_files_hold_what_was_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    evaluator, metrics = evaluated()
    with caplog.at_level(logging.INFO, "mm_utils"):
        report_retrieval(MAIN_PROCESS, evaluator, metrics, FLOPS, "image", "test", str(tmp_path))
    found, written = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("reranking", "metrics"))
    for direction in ("text_to_image", "image_to_text"):
        figures = found[direction]
        for name in ("ndcg@10", "mrr@10"):
            assert figures["dual_encoder"][name]["value"] == pytest.approx(metrics[f"{direction}_{name}"])
            assert figures["reranked"][name]["value"] == pytest.approx(metrics[f"rerank_{direction}_{name}"])
        for name in ("recall@1", "recall@5", "recall@10"):
            before, after = metrics[f"{direction}_{name}"], metrics[f"rerank_{direction}_{name}"]
            assert figures["dual_encoder"][name]["value"] == before
            assert figures["reranked"][name]["value"] == after
            assert figures["difference"][name]["value"] == pytest.approx(after - before)
            curve = {row["candidates"]: row[name]["value"] for row in figures["curve"]}
            assert list(curve) == [1, 2, 4, 6]
            assert (curve[1], curve[6]) == (before, after)
        ceilings = [row["ceiling"]["value"] for row in figures["curve"]]
        assert ceilings == sorted(ceilings)
        assert ceilings[0] == metrics[f"{direction}_recall@1"]
        for name in ("recall@1", "ndcg@10", "mrr@10"):
            half = figures["reranked"][name]["half_width_95"]
            assert written[f"rerank_{direction}_{name}_half_width_95"] == half
        assert f"R@5 {metrics[f'rerank_{direction}_recall@5']:.3f} (" in caplog.text
    assert (tmp_path / "reranking.png").stat().st_size > 10_000
    shown = caplog.messages[0].splitlines()
    assert shown[1].startswith("Retrieval on the ")
    assert len(shown) < 14


def test_the_interval_of_a_difference_is_that_of_paired_queries() -> None:
    ranks = evaluated(2)[0].directions["text_to_image"]
    paired = mean_interval((ranks.reranked_Q <= 1).double() - (ranks.cosine_Q <= 1).double(), ranks.queries.group)
    difference = direction_figures(ranks)["difference"]["recall@1"]
    assert (difference["value"], difference["half_width_95"]) == paired


def test_costs() -> None:
    evaluator, _ = evaluated()
    assert evaluator.scores is not None
    costs = scoring_costs(evaluator.scores, FLOPS)
    assert costs["pairs"] == len(evaluator.scores.pairs)
    assert costs["pairs_per_second"] == pytest.approx(costs["pairs"] / costs["seconds"])
    assert costs["keys_values_bytes_per_image"] == 8
    assert 3 <= costs["text_tokens"] <= 11
    assert costs["gflop_per_pair"] == 2 * round(costs["text_tokens"])
    assert costs["gflop_per_text"] == round(costs["text_tokens"])
    assert costs["gflop_per_image"] == 3


def test_without_a_head_there_are_recalls_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    evaluator, metrics = evaluated(0)
    with caplog.at_level(logging.INFO, "mm_utils"):
        report_retrieval(MAIN_PROCESS, evaluator, metrics, FLOPS, "image", "test", str(tmp_path))
    assert f"R@1 {metrics['text_to_image_recall@1']:.3f} (" in caplog.text
    assert "re-ranked" not in caplog.text
    assert not (tmp_path / "reranking.json").exists()


def test_other_processes_are_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mm_utils"):
        report_retrieval(ACCELERATOR, *evaluated(), FLOPS, "image", "test", str(tmp_path))
    assert not caplog.text
    assert not list(tmp_path.iterdir())
