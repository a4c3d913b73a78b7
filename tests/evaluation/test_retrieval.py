"""Blocks of queries, the `evaluate` metric, probes of scenes, and evaluators of one's own; figures: tests/contracts/test_metrics.py."""

import math
from pathlib import Path
from typing import Any

import datasets
import evaluate
import pytest
import torch

import mm_utils
from mm_utils.data.scenes import load_scenes
from mm_utils.evaluation import embeddings
from mm_utils.evaluation.embeddings import Keyed
from mm_utils.evaluation.metrics import summarise_ranks
from mm_utils.evaluation.probes import caption_probes
from mm_utils.evaluation.retrieval import EvaluationArguments, in_turn
from mm_utils.model.processor import train_tokenizer
from tests.kit.truthful_model import TruthfulModel


@pytest.mark.parametrize(
    ("block", "tile", "expected"), [(4, 1 << 26, [4, 4, 1]), (2048, 27, [3, 3, 3]), (2048, 1, [1] * 9)]
)
def test_a_block_has_fewer_queries_where_there_are_more_items(
    block: int, tile: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TruthfulModel(9)
    items, queries = model.split().directions["image_to_text"]
    queries = queries.take(torch.arange(9))
    whole, held, right_items = embeddings.cosine_ranks(queries, items), list[int](), embeddings.right_items

    def recorded(queries: Keyed, items: Keyed) -> torch.Tensor:
        held.append(len(queries.key))
        return right_items(queries, items)

    for name, value in (("BLOCK", block), ("TILE", tile), ("right_items", recorded)):
        monkeypatch.setattr(embeddings, name, value)
    in_blocks, counts = embeddings.cosine_ranks(queries, items), embeddings.count_right(queries, items)
    assert held == 2 * expected
    assert torch.equal(in_blocks, whole)
    assert counts.tolist() == (queries.key[:, None] == items.key).sum(1).tolist()


def test_the_evaluate_metric_agrees() -> None:
    metric = evaluate.load(str(Path(mm_utils.__file__).with_name("retrieval_recall")))
    model = TruthfulModel(30)
    ranking = (model.text @ model.image.T).argsort(1, descending=True)
    rank_Q = (ranking == torch.tensor(model.owner)[:, None]).long().argmax(1) + 1
    found = metric.compute(predictions=ranking, references=[[image] for image in model.owner])
    assert found == pytest.approx(summarise_ranks(rank_Q) | {})
    found = metric.compute(predictions=[[3, 1, 2], [2, 3, 1], [5]], references=[[1], [1, 3], [9]], k=[1, 2])
    assert found == pytest.approx({"recall@1": 0, "recall@2": 2 / 3, "mean_rank": 2, "median_rank": 2})


def test_scenes_have_probes(tmp_path: Any) -> None:
    rows = load_scenes(num_train=1, num_eval=30, cache_dir=tmp_path)["validation"]
    tokenizer: Any = train_tokenizer([caption for row in rows["captions"] for caption in row], 400)
    probes = caption_probes(rows, tokenizer, 64)
    texts = probes.texts
    ids = [row[mask.bool()].tolist() for row, mask in zip(texts.input_ids, texts.attention_mask, strict=True)]
    assert ids == [tokenizer(pair[side]).input_ids for pair in rows["order_pair"] for side in ("true", "false")]
    for others in (rows.remove_columns("order_pair"), datasets.Dataset.from_dict({"order_pair": ["something else"]})):
        assert len(caption_probes(others, tokenizer, 64).image_P) == 0
    # Captions cut to their common beginning are not a probe.
    assert len(caption_probes(rows, tokenizer, 3).image_P) == 0


def test_evaluators_of_ones_own_are_functions() -> None:
    assert EvaluationArguments(evaluators="math.hypot, math.dist").own_evaluators() == [math.hypot, math.dist]
    with pytest.raises(ValueError, match=r"--evaluators has math\.pi; that is not a function\. Name one"):
        EvaluationArguments(evaluators="math.pi")


@pytest.mark.parametrize("value", [{"recall": 0.4}, {"own": "good"}, {"own": None}])
def test_a_metric_is_a_number_and_has_one_source(value: dict[str, Any]) -> None:
    nothing: Any = None
    assert in_turn(lambda *_: {"recall": 0.5}, lambda *_: {"own": 1})(nothing, [], nothing) == {
        "recall": 0.5,
        "own": 1,
    }
    measure = in_turn(lambda *_: {"recall": 0.5}, lambda *_: value)
    with pytest.raises(ValueError, match=next(iter(value))):
        measure(nothing, [], nothing)
