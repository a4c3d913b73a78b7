"""What a finished run says: what its figures rest on, and the picture of what captions find."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset, Features, Value
from PIL import Image

from mm_utils.evaluation.retrieval import EvaluationArguments, RetrievalEvaluator
from mm_utils.plots import RetrievalExample
from mm_utils.run import finish
from tests.kit.fault_images import save
from tests.kit.truthful_model import ACCELERATOR, TruthfulModel

draw_examples = finish.draw_examples  # a fixture leaves the drawing out


def evaluated(top_k: int) -> RetrievalEvaluator:
    model = TruthfulModel.with_noise(0)
    evaluator = RetrievalEvaluator(EvaluationArguments(rerank_top_k=top_k))
    evaluator(model, model.batches(5), ACCELERATOR)
    return evaluator


@pytest.mark.parametrize("top_k", [6, 0])
def test_examples_are_in_the_order_that_was_measured(
    top_k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = evaluated(top_k)
    split, ranks = evaluator.split, evaluator.directions["text_to_image"]
    assert split is not None
    captions = [int((split.caption_key_T == key).sum()) for key in split.image_key_M]
    images = [{"bytes": save(Image.new("RGB", (8, 8))), "path": None}] * len(captions)
    features = Features({"image": datasets.Image(decode=False), "captions": datasets.List(Value("string"))})
    rows = Dataset.from_dict({"image": images, "captions": [["a"] * count for count in captions]}, features)
    drawn: list[RetrievalExample] = []
    monkeypatch.setattr(finish, "draw_retrieval", lambda examples, path: drawn.extend(examples))
    draw_examples(rows, evaluator, tmp_path / "retrieval.png")
    rank_Q = ranks.reranked_Q if top_k else ranks.cosine_Q
    queries = [len(split.text_TE) * place // 6 for place in range(6)]
    assert len(drawn) == 6
    for query, example in zip(queries, drawn, strict=True):
        rank = int(rank_Q[query])
        assert example.correct == [place == rank for place in range(1, 6)]
        assert example.scores == sorted(example.scores, reverse=True)
        assert f"right image: place {rank}" in example.note
        assert example.note.endswith(f"{int(ranks.cosine_Q[query])} of {len(images)}")


@pytest.mark.parametrize(("groups", "counted"), [(30, 30), (20, 20), (19, 0)])
def test_intervals_count_groups_of_equal_captions(groups: int, counted: int) -> None:
    split: Any = SimpleNamespace(group_M=torch.arange(60) % groups)
    said, queries = finish.independent_queries(split, 60, "sound")
    assert queries == counted
    assert ("group of sounds with equal captions" in said) if counted else f"{groups} independent groups" in said
    assert finish.independent_queries(None, 5, "sound") == (
        "95 % intervals in brackets, counting one query per sound",
        5,
    )
