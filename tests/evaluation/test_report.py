"""The table and `reranking.json`, for a model that looks up its answers."""

import json
import logging
from pathlib import Path

import pytest

from mm_utils.evaluation.metrics import mean_interval
from mm_utils.evaluation.report import direction_figures, recall_by_width, report_retrieval
from mm_utils.evaluation.retrieval import EvaluationArguments, RetrievalEvaluator
from tests.kit.truthful_model import ACCELERATOR, MAIN_PROCESS, TruthfulModel


def evaluated(top_k: int = 6) -> tuple[RetrievalEvaluator, dict[str, float]]:
    model = TruthfulModel.with_noise(0)
    evaluator = RetrievalEvaluator(EvaluationArguments(rerank_top_k=top_k))
    return evaluator, evaluator(model, model.batches(5), ACCELERATOR)


def test_files_hold_what_was_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    evaluator, metrics = evaluated()
    with caplog.at_level(logging.INFO, "mm_utils"):
        report_retrieval(MAIN_PROCESS, evaluator, metrics, str(tmp_path))
    found = json.loads((tmp_path / "reranking.json").read_text())
    for direction in ("text_to_image", "image_to_text"):
        figures = found[direction]
        for name in ("ndcg@10", "mrr@10"):
            assert figures["dual_encoder"][name]["value"] == pytest.approx(metrics[f"{direction}_{name}"])
            assert figures["reranked"][name]["value"] == pytest.approx(metrics[f"rerank_{direction}_{name}"])
            assert name.upper().replace("NDCG", "nDCG") in caplog.text
        for name in ("recall@1", "recall@5", "recall@10"):
            before, after = metrics[f"{direction}_{name}"], metrics[f"rerank_{direction}_{name}"]
            assert figures["dual_encoder"][name]["value"] == before
            assert figures["reranked"][name]["value"] == after
            assert figures["difference"][name]["value"] == pytest.approx(after - before)
        assert figures["candidates"] == 6
        assert figures["reranked"]["recall@1"]["value"] <= figures["ceiling"]["value"]
        shown = figures["reranked"]["recall@5"]
        assert f"{shown['value']:.3f} ± {shown['half_width_95']:.3f}" in caplog.text
        assert f"{figures['difference']['recall@1']['value']:+.3f} ±" in caplog.text
    assert evaluator.split is not None
    shown = recall_by_width(evaluator.split)
    assert shown in caplog.text
    assert shown.endswith(f" {metrics['text_to_image_recall@1']:.3f}")


def test_the_interval_of_a_difference_is_that_of_paired_queries() -> None:
    ranks = evaluated(2)[0].directions["text_to_image"]
    paired = mean_interval((ranks.reranked_Q <= 1).double() - (ranks.cosine_Q <= 1).double(), ranks.queries.group)
    difference = direction_figures(ranks)["difference"]["recall@1"]
    assert (difference["value"], difference["half_width_95"]) == paired


def test_without_a_head_there_is_the_table_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    evaluator, metrics = evaluated(0)
    with caplog.at_level(logging.INFO, "mm_utils"):
        report_retrieval(MAIN_PROCESS, evaluator, metrics, str(tmp_path))
    assert f"{metrics['text_to_image_recall@1']:.3f} ±" in caplog.text
    assert "re-ranked" not in caplog.text
    assert not (tmp_path / "reranking.json").exists()


def test_probes_have_a_table(caplog: pytest.LogCaptureFixture) -> None:
    evaluator, metrics = evaluated()
    probes = {"order_accuracy": 0.625, "order_accuracy_low": 0.41, "order_accuracy_high": 0.8}
    probes |= {f"rerank_{name}": value + 0.125 for name, value in probes.items()}
    with caplog.at_level(logging.INFO, "mm_utils"):
        report_retrieval(MAIN_PROCESS, evaluator, {**metrics, **probes, "order_blind": 0.5, "order_rows": 16}, None)
    line = next(line for line in caplog.text.splitlines() if "order" in line)
    assert " ".join(line.split()) == "order 0.625 (0.410 to 0.800) 0.750 (0.535 to 0.925) 0.500 16"


def test_other_processes_are_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mm_utils"):
        report_retrieval(ACCELERATOR, *evaluated(), str(tmp_path))
    assert not caplog.text
    assert not list(tmp_path.iterdir())
