"""Recalls and ranks against sorting, by hand, and against the `evaluate` metric; order accuracy against a loop."""

import math
from pathlib import Path
from typing import Any

import datasets
import evaluate
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

import mm_utils
from mm_utils.data.scenes import load_scenes
from mm_utils.evaluation import embeddings
from mm_utils.evaluation.embeddings import Embeddings, Keyed, Texts, embed_split
from mm_utils.evaluation.metrics import embedding_health, retrieval_metrics, wilson_interval
from mm_utils.evaluation.probes import Probes, caption_probes
from mm_utils.evaluation.reranking import rank_directions
from mm_utils.evaluation.retrieval import EvaluationArguments, RetrievalEvaluator, in_turn
from mm_utils.model.processor import train_tokenizer
from tests.kit.ranks import run_on_ranks
from tests.kit.truthful_model import (
    ACCELERATOR,
    TruthfulModel,
    figures_of_lists,
    lists_by_sorting,
    split_of,
)

DIRECTIONS = ("text_to_image", "image_to_text")
FIGURES = ("recall@1", "recall@5", "recall@10", "mean_rank", "median_rank")
NAN = float("nan")


def metrics_of(split: Embeddings) -> dict[str, float]:
    return retrieval_metrics(split, rank_directions(split))


def split_with_scores(scores: list[list[float]], owner: list[int]) -> Embeddings:
    """A split whose text t has a similarity of `scores[t][i]` to image i."""
    return split_of(torch.eye(len(scores[0])), torch.tensor(scores), owner)


def by_definition(split: Embeddings) -> dict[str, float]:
    scores = split.text_TE @ split.image_ME.T
    right = split.caption_key_T[:, None] == split.image_key_M
    found: dict[str, float] = {"text_to_image_chance@1": 1 / len(split.image_ME)}
    for direction, cosine, is_right in (("text_to_image", scores, right), ("image_to_text", scores.T, right.T)):
        figures = figures_of_lists(lists_by_sorting(cosine, is_right))
        found |= {f"{direction}_{name}": value for name, value in figures.items()}
    found["mean_recall"] = sum(value for name, value in found.items() if "_recall@" in name) / 6
    return found


def random_split(images: int, most_captions: int, width: int, seed: int, levels: int | None = None) -> Embeddings:
    """With `levels`, coordinates are small integers, so that scores tie."""
    generator = torch.Generator().manual_seed(seed)
    counts = [int(torch.randint(1, most_captions + 1, (), generator=generator)) for _ in range(images)]
    owner = [image for image, count in enumerate(counts) for _ in range(count)]
    image, text = (torch.randn(count, width, generator=generator) for count in (images, len(owner)))
    if levels:
        return split_of((image * levels / 3).round(), (text * levels / 3).round(), owner)
    return split_of(normalize(image, dim=1), normalize(text + image[torch.tensor(owner)], dim=1), owner)


# -- ranks by cosine ----------------------------------------------------------------------------------------------------
@given(
    st.integers(1, 25),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(0, 2**20),
    st.sampled_from([None, 1, 2]),
    st.integers(1, 9),
)
@settings(max_examples=80)
def test_ranks_equal_the_definition(
    images: int, captions: int, width: int, seed: int, levels: int | None, block: int
) -> None:
    split = random_split(images, captions, width, seed, levels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embeddings, "BLOCK", block)
        assert metrics_of(split) == pytest.approx(by_definition(split))


def test_metrics_by_hand() -> None:
    scores = [[0.9, 0.1, 0.2], [0.8, 0.7, 0.6], [0.3, 0.2, 0.1], [0.1, 0.5, 0.4]]
    found = metrics_of(split_with_scores(scores, [0, 1, 2, 2]))
    # Texts find their image at rank 1, 2, 3, 2; images their first text at 1, 1, 2.
    assert [found[f"text_to_image_{figure}"] for figure in FIGURES] == [0.25, 1, 1, 2, 2]
    assert [found[f"image_to_text_{figure}"] for figure in FIGURES] == pytest.approx([2 / 3, 1, 1, 4 / 3, 1])


def test_nan_counts_against_the_model() -> None:
    for scores in ([[NAN] * 3] * 3, [[1.0, 0.0, 0.0], [0.0, NAN, 0.0], [0.0, 0.0, 1.0]]):
        found = metrics_of(split_with_scores(scores, [0, 1, 2]))
        assert found["text_to_image_recall@1"] < 1
        assert found["image_to_text_recall@1"] < 1
    assert metrics_of(split_with_scores([[NAN] * 3] * 3, [0, 1, 2]))["text_to_image_mean_rank"] == 3


@given(st.integers(1, 12), st.integers(1, 3), st.integers(1, 8), st.integers(0, 2**20), st.integers(1, 9))
@settings(max_examples=40)
def test_equal_captions_equal_the_definition(images: int, captions: int, kinds: int, seed: int, block: int) -> None:
    split = random_split(images, captions, 3, seed, 2)
    split.text_key_T = torch.randint(kinds, (len(split.text_TE),), generator=torch.Generator().manual_seed(seed))
    texts_of = [split.text_key_T[split.caption_key_T == key].tolist() for key in split.image_key_M]
    right = torch.tensor([[key in keys for keys in texts_of] for key in split.text_key_T.tolist()])
    scores = split.text_TE @ split.image_ME.T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embeddings, "BLOCK", block)
        found = metrics_of(split)
        counts = {name: embeddings.count_right(*sides).tolist() for name, sides in split.directions.items()}
    for direction, cosine, is_right in zip(DIRECTIONS, (scores, scores.T), (right, right.T), strict=True):
        for name, value in figures_of_lists(lists_by_sorting(cosine, is_right)).items():
            assert found[f"{direction}_{name}"] == pytest.approx(value), name
        assert counts[direction] == is_right.sum(1).tolist()


@pytest.mark.parametrize(
    ("block", "tile", "expected"), [(4, 1 << 26, [4, 4, 1]), (2048, 27, [3, 3, 3]), (2048, 1, [1] * 9)]
)
def test_a_block_has_fewer_queries_where_there_are_more_items(
    block: int, tile: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, items = random_split(9, 1, 4, seed=0, levels=2).directions["text_to_image"]
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
    for seed in (0, 1):
        split = random_split(30 + seed, 3, 4, seed)
        found = metrics_of(split)
        scores = split.text_TE @ split.image_ME.T
        owner = (split.caption_key_T[:, None] == split.image_key_M).long().argmax(1)
        texts = [(owner == image).nonzero()[:, 0].tolist() for image in range(len(split.image_ME))]
        rankings = (scores.argsort(1, descending=True), scores.T.argsort(1, descending=True))
        for direction, ranking, right in zip(DIRECTIONS, rankings, (owner[:, None].tolist(), texts), strict=True):
            by_metric = metric.compute(predictions=ranking, references=right)
            assert by_metric == pytest.approx({figure: found[f"{direction}_{figure}"] for figure in FIGURES})
    found = metric.compute(predictions=[[3, 1, 2], [2, 3, 1], [5]], references=[[1], [1, 3], [9]], k=[1, 2])
    assert found == pytest.approx({"recall@1": 0, "recall@2": 2 / 3, "mean_rank": 2, "median_rank": 2})


# -- through a loader ---------------------------------------------------------------------------------------------------
def test_the_evaluator_embeds_what_the_loader_yields() -> None:
    model: Any = TruthfulModel()
    evaluator = RetrievalEvaluator()
    found = evaluator(model, model.batches(5), ACCELERATOR)
    assert found == pytest.approx(metrics_of(model.split()) | embedding_health(model.split()))
    assert not any(name.startswith("rerank") for name in found)
    split = evaluator.split
    assert split is not None
    assert split.keys_values is None
    assert torch.equal(split.image_ME, model.image)
    assert torch.equal(split.text_TE, model.text)
    assert split.rows_M.tolist() == list(range(23))
    assert split.texts.input_ids[:, :3].tolist() == [[1, text, image] for text, image in enumerate(model.owner)]
    assert split.texts.attention_mask.sum(1).tolist() == [3 + text % 9 for text in range(len(model.owner))]
    assert split.skipped == []


def test_unreadable_images_are_left_out_with_their_captions() -> None:
    model: Any = TruthfulModel()
    split = embed_split(model, model.batches(4, unreadable=(0, 5, 6, 7, 8)), ACCELERATOR)
    kept = [number for number in range(23) if number not in (0, 5, 6, 7, 8)]
    assert split.rows_M.tolist() == kept
    assert torch.equal(split.image_ME, model.image[kept])
    assert (split.caption_key_T - 10**12).tolist() == [image for image in model.owner if image in kept]
    assert split.skipped == [f"image {number}: broken" for number in (0, 5, 6, 7, 8)]
    with pytest.raises(ValueError, match=r"no image .* could be decoded; .* image 0: broken"):
        embed_split(model, model.batches(4, unreadable=tuple(range(23))), ACCELERATOR)


# -- word order ---------------------------------------------------------------------------------------------------------
IMAGES = 23


def probes_of(model: Any) -> Probes:
    """Yield, of image i, its first caption as the true one, and the first of the next image as the false one."""
    first = [model.owner.index(image) for image in range(IMAGES)]
    rows = [[1, first[image], image] for image in range(IMAGES)]
    ids = [row for image in range(IMAGES) for row in (rows[image], rows[(image + 1) % IMAGES])]
    texts = Texts(torch.tensor(ids), torch.ones(2 * IMAGES, 3, dtype=torch.long))
    return Probes(texts, torch.arange(IMAGES))


def measured(top_k: int = 4, unreadable: tuple[int, ...] = (), with_probes: bool = True) -> dict[str, float]:
    model = TruthfulModel.with_noise(4, IMAGES)
    evaluator = RetrievalEvaluator(EvaluationArguments(rerank_top_k=top_k), probes_of(model) if with_probes else None)
    return evaluator(model, model.batches(5, unreadable), ACCELERATOR)


@pytest.mark.parametrize("unreadable", [(), (0, 7, 8)])
def test_accuracy_of_probes_equals_a_loop(unreadable: tuple[int, ...]) -> None:
    found = measured(unreadable=unreadable)
    model = TruthfulModel.with_noise(4, IMAGES)
    cosine = model.logit_scale.exp() * model.image @ model.text.T
    readable = [image for image in range(IMAGES) if image not in unreadable]
    blind = (model.image[readable].mean(0) @ model.text.T).expand(IMAGES, -1)
    for key, scores in (
        ("order_accuracy", cosine),
        ("rerank_order_accuracy", cosine + model.logits),
        ("order_blind", blind),
    ):
        right = [
            bool(scores[image, model.owner.index(image)] > scores[image, model.owner.index((image + 1) % IMAGES)])
            for image in readable
        ]
        assert found[key] == pytest.approx(sum(right) / len(right))
        assert found["order_rows"] == len(right)
        if "accuracy" in key:
            assert (found[f"{key}_low"], found[f"{key}_high"]) == wilson_interval(sum(right), len(right))


def test_ties_and_nan_count_against_the_model() -> None:
    model: Any = TruthfulModel(IMAGES)
    evaluator = RetrievalEvaluator(EvaluationArguments(rerank_top_k=2), probes_of(model))
    model.text[:] = model.text[0]
    model.logits = torch.full((IMAGES, len(model.owner)), torch.nan)
    found = evaluator(model, model.batches(5), ACCELERATOR)
    assert found["order_accuracy"] == found["rerank_order_accuracy"] == 0


def measured_several() -> list[dict[str, float]]:
    return [measured(), measured(unreadable=(0, 7, 8)), measured(unreadable=tuple(range(12))), measured(top_k=0)]


def test_the_number_of_processes_changes_nothing() -> None:
    assert run_on_ranks(3, measured_several) == [measured_several()] * 3


def test_scenes_have_probes(tmp_path: Any) -> None:
    rows = load_scenes(num_train=1, num_eval=30, cache_dir=tmp_path)["validation"]
    tokenizer: Any = train_tokenizer([caption for row in rows["captions"] for caption in row], 400)
    probes = caption_probes(rows, tokenizer, 64)
    texts = probes.texts
    ids = [row[mask.bool()].tolist() for row, mask in zip(texts.input_ids, texts.attention_mask, strict=True)]
    assert ids == [tokenizer(pair[side]).input_ids for pair in rows["order_pair"] for side in ("true", "false")]
    for others in (rows.remove_columns("order_pair"), datasets.Dataset.from_dict({"order_pair": ["something else"]})):
        assert len(caption_probes(others, tokenizer, 64).row_P) == 0
    # Captions cut to their common beginning are not a probe.
    assert len(caption_probes(rows, tokenizer, 3).row_P) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("math.hypot, math.dist", ""),
        ("math.no_such", "--evaluators has math.no_such; .*no_such"),
        ("no_such_file.measure", "Put no_such_file.py in the current folder, with measure in it"),
        ("measure", "--evaluators has measure; "),
        ("math.pi", "--evaluators has math.pi; that is not a function. Name one"),
        ("pathlib.Path", "--evaluators has pathlib.Path; that is not a function. Name one"),
    ],
)
def test_evaluators_of_ones_own_are_functions(given: str, message: str) -> None:
    if not message:
        assert EvaluationArguments(evaluators=given).own_evaluators() == [math.hypot, math.dist]
        return
    with pytest.raises(ValueError, match=message):
        EvaluationArguments(evaluators=given)


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
