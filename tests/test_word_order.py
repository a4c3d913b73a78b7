"""Order accuracy: whose texts, what counts, and that the number of processes changes nothing."""

from typing import Any

import datasets
import pytest
import torch

from mm_utils.data import sources
from mm_utils.data.scenes import load_scenes
from mm_utils.intervals import wilson_interval
from mm_utils.metrics import EvaluationArguments, RetrievalEvaluator
from mm_utils.split_embeddings import Texts
from mm_utils.word_order import order_accuracy, order_texts
from mm_utils.wordpiece import train_tokenizer
from tests.test_ranks import run_on_ranks
from tests.truthful_model import ACCELERATOR, TruthfulModel

IMAGES = 23


def texts_of(model: Any) -> Texts:
    """Of image i, its first caption as the true one, and the first of the next image as the false one."""
    first = [model.owner.index(image) for image in range(IMAGES)]
    rows = [[1, first[image], image] for image in range(IMAGES)]
    ids = [row for image in range(IMAGES) for row in (rows[image], rows[(image + 1) % IMAGES])]
    return Texts(torch.tensor(ids), torch.ones(2 * IMAGES, 3, dtype=torch.long))


def measured(top_k: int = 4, unreadable: tuple[int, ...] = (), batch_size: int = 5) -> dict[str, float]:
    model: Any = TruthfulModel(IMAGES)
    model.logits = 3 * torch.randn(IMAGES, len(model.owner), generator=torch.Generator().manual_seed(4))
    args = EvaluationArguments(rerank_top_k=top_k)
    return RetrievalEvaluator(args, texts_of(model))(model, model.batches(batch_size, unreadable), ACCELERATOR)


def measured_several() -> list[dict[str, float]]:
    return [measured(), measured(unreadable=(0, 7, 8)), measured(unreadable=tuple(range(12))), measured(top_k=0)]


@pytest.mark.parametrize("unreadable", [(), (0, 7, 8)])
def test_equals_a_loop(unreadable: tuple[int, ...]) -> None:
    found = measured(unreadable=unreadable)
    model: Any = TruthfulModel(IMAGES)
    logits = 3 * torch.randn(IMAGES, len(model.owner), generator=torch.Generator().manual_seed(4))
    cosine, match = model.image @ model.text.T, logits
    for prefix, scores in (("", cosine), ("rerank_", match)):
        right = []
        for image in range(IMAGES):
            true, false = model.owner.index(image), model.owner.index((image + 1) % IMAGES)
            if image not in unreadable:
                right.append(bool(scores[image, true] > scores[image, false]))
        assert found[f"{prefix}order_accuracy"] == pytest.approx(sum(right) / len(right))
        low, high = wilson_interval(sum(right), len(right))
        assert (found[f"{prefix}order_accuracy_low"], found[f"{prefix}order_accuracy_high"]) == (low, high)


def test_it_changes_no_other_figure() -> None:
    model: Any = TruthfulModel(IMAGES)
    model.logits = 3 * torch.randn(IMAGES, len(model.owner), generator=torch.Generator().manual_seed(4))
    alone = RetrievalEvaluator(EvaluationArguments(rerank_top_k=4))(model, model.batches(5), ACCELERATOR)
    assert {name: value for name, value in measured().items() if "order" not in name} == alone


def test_without_a_head_the_towers_are_measured() -> None:
    assert {name for name in measured(top_k=0) if "order" in name} == set(order_accuracy(torch.ones(1)))


def test_ties_and_no_number_count_against_the_model() -> None:
    model: Any = TruthfulModel(IMAGES)
    evaluator = RetrievalEvaluator(EvaluationArguments(rerank_top_k=2), texts_of(model))
    model.text[:] = model.text[0]
    model.logits = torch.full((IMAGES, len(model.owner)), torch.nan)
    found = evaluator(model, model.batches(5), ACCELERATOR)
    assert found["order_accuracy"] == found["rerank_order_accuracy"] == 0


@pytest.mark.parametrize("world", [2, 3])
def test_the_number_of_processes_changes_nothing(world: int) -> None:
    alone = measured_several()
    assert run_on_ranks(world, measured_several) == [alone] * world


def test_scenes_have_such_captions(tmp_path: Any) -> None:
    rows = load_scenes(num_train=1, num_eval=6, cache_dir=tmp_path)["validation"]
    tokenizer: Any = train_tokenizer([caption for row in rows["captions"] for caption in row], 400)
    texts = order_texts(rows, tokenizer, 64)
    assert texts is not None
    assert len(texts) == 12
    for row, pair in enumerate(rows["order_pair"]):
        for side, place in (("true", 2 * row), ("false", 2 * row + 1)):
            assert (
                texts.input_ids[place][texts.attention_mask[place].bool()].tolist() == tokenizer(pair[side]).input_ids
            )
    assert order_texts(rows.remove_columns("order_pair"), tokenizer, 64) is None
    assert order_texts(datasets.Dataset.from_dict({"order_pair": ["something else"]}), tokenizer, 64) is None


def test_the_column_is_still_there_when_rows_are_loaded_for_training(monkeypatch: Any, tmp_path: Any) -> None:
    scenes = load_scenes(num_train=20, num_eval=6, cache_dir=tmp_path)
    monkeypatch.setattr(sources, "load_scenes", lambda: scenes)
    rows = sources.load_pairs(sources.DataArguments(max_eval_samples=5))["validation"]
    assert list(rows["order_pair"]) == list(scenes["validation"]["order_pair"])[:5]
    assert list(rows["captions"]) == list(scenes["validation"]["captions"])[:5]
