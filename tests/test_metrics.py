"""Recalls and ranks against a full matrix, hand-made figures, and the `evaluate` metric."""

from pathlib import Path
from typing import Any

import evaluate
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from mm_utils import metrics, ranking
from mm_utils.metrics import EvaluationArguments, RetrievalEvaluator, retrieval_metrics
from mm_utils.ranking import summarise_ranks
from mm_utils.split_embeddings import Embeddings, embed_split
from tests.truthful_model import ACCELERATOR, TruthfulModel, in_languages, split_of

DIRECTIONS = ("text_to_image", "image_to_text")
FIGURES = ("recall@1", "recall@5", "recall@10", "mean_rank", "median_rank")


def split_with_scores(scores: list[list[float]], owner: list[int]) -> Embeddings:
    """Whose text t has a similarity of `scores[t][i]` to image i."""
    return split_of(torch.eye(len(scores[0])), torch.tensor(scores), owner)


def full_matrix(split: Embeddings) -> dict[str, float]:
    """The definition: sort every row, wrong items before right ones of the same score."""
    scores = split.text_TE @ split.image_ME.T
    right = split.caption_key_T[:, None] == split.image_key_M
    found: dict[str, float] = {}
    for direction, matrix, is_right in (("text_to_image", scores, right), ("image_to_text", scores.T, right.T)):
        places = []
        for row, hits in zip(matrix.tolist(), is_right.tolist(), strict=True):
            order = sorted(zip(row, hits, strict=True), key=lambda item: (-item[0], item[1]))
            places.append([hit for _, hit in order].index(True) + 1)
        # Further right items do not push the first one down, so that only wrong ones stand before it.
        found |= {f"{direction}_recall@{k}": sum(place <= k for place in places) / len(places) for k in (1, 5, 10)}
        places.sort()
        middle = len(places) // 2
        found[f"{direction}_mean_rank"] = sum(places) / len(places)
        found[f"{direction}_median_rank"] = (places[middle] + places[~middle]) / 2
    return found


def random_split(images: int, most_captions: int, width: int, seed: int, levels: int | None = None) -> Embeddings:
    """With `levels`, coordinates are small integers, and scores tie."""
    generator = torch.Generator().manual_seed(seed)
    owner = [
        i for i in range(images) for _ in range(int(torch.randint(1, most_captions + 1, (), generator=generator)))
    ]
    image, text = (torch.randn(count, width, generator=generator) for count in (images, len(owner)))
    if levels:
        image, text = (image * levels / 3).round(), (text * levels / 3).round()
    else:
        text = normalize(text + image[torch.tensor(owner)], dim=1)
        image = normalize(image, dim=1)
    return split_of(image, text, owner)


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
def test_equals_the_full_matrix(
    images: int, captions: int, width: int, seed: int, levels: int | None, block: int
) -> None:
    split = random_split(images, captions, width, seed, levels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "BLOCK", block)
        found = retrieval_metrics(split)
    assert found.pop("text_to_image_chance@1") == 1 / images
    assert found == pytest.approx(full_matrix(split))


@pytest.mark.parametrize("captions", [1, 5])
def test_a_perfect_model_scores_one(captions: int) -> None:
    image = normalize(torch.randn(30, 16, generator=torch.Generator().manual_seed(0)), dim=1)
    owner = [place for place in range(30) for _ in range(captions)]
    found = retrieval_metrics(split_of(image, image[torch.tensor(owner)], owner))
    for direction in DIRECTIONS:
        assert [found[f"{direction}_{figure}"] for figure in FIGURES] == [1.0] * 5


def test_by_hand() -> None:
    scores = [[0.9, 0.1, 0.2], [0.8, 0.7, 0.6], [0.3, 0.2, 0.1], [0.1, 0.5, 0.4]]
    found = retrieval_metrics(split_with_scores(scores, [0, 1, 2, 2]))
    # Texts find their image at rank 1, 2, 3, 2; images their first text at 1, 1, 2.
    assert found["text_to_image_recall@1"] == 0.25
    assert found["text_to_image_recall@5"] == 1
    assert found["text_to_image_mean_rank"] == 2
    assert found["text_to_image_median_rank"] == 2
    assert found["image_to_text_recall@1"] == pytest.approx(2 / 3)
    assert found["image_to_text_mean_rank"] == pytest.approx(4 / 3)
    assert found["image_to_text_median_rank"] == 1


def test_ties_count_against_the_model() -> None:
    constant = retrieval_metrics(split_with_scores([[0.5] * 4] * 4, [0, 1, 2, 3]))
    for direction in DIRECTIONS:
        assert constant[f"{direction}_recall@1"] == 0
        assert constant[f"{direction}_mean_rank"] == 4
    one_tie = retrieval_metrics(split_with_scores([[0.5, 0.5], [0.1, 0.9]], [0, 1]))
    assert one_tie["text_to_image_recall@1"] == 0.5


def test_a_model_that_diverged_finds_nothing() -> None:
    for scores in ([[float("nan")] * 3] * 3, [[1.0, 0.0, 0.0], [0.0, float("nan"), 0.0], [0.0, 0.0, 1.0]]):
        found = retrieval_metrics(split_with_scores(scores, [0, 1, 2]))
        assert found["text_to_image_recall@1"] < 1
        assert found["image_to_text_recall@1"] < 1
    assert retrieval_metrics(split_with_scores([[float("nan")] * 3] * 3, [0, 1, 2]))["text_to_image_mean_rank"] == 3


def test_pictures_that_occur_twice_are_both_right() -> None:
    split = split_with_scores([[0.2, 0.9, 0.1], [0.9, 0.2, 0.1], [0.0, 0.1, 0.5]], [0, 1, 2])
    split.image_key_M[1] = split.image_key_M[0]
    split.caption_key_T[1] = split.image_key_M[0]
    assert retrieval_metrics(split)["text_to_image_recall@1"] == 1


def test_summary_of_ranks() -> None:
    found = summarise_ranks(torch.tensor([1, 2, 5, 6, 10, 11]), "x_")
    assert found == pytest.approx(
        {"x_recall@1": 1 / 6, "x_recall@5": 0.5, "x_recall@10": 5 / 6, "x_mean_rank": 35 / 6, "x_median_rank": 5.5}
    )


def test_evaluate_metric_agrees() -> None:
    metric = evaluate.load(str(Path(metrics.__file__).with_name("retrieval_recall")))
    for seed in (0, 1):
        split = random_split(30 + seed, 3, 4, seed)
        found = retrieval_metrics(split)
        scores = split.text_TE @ split.image_ME.T
        owner = (split.caption_key_T[:, None] == split.image_key_M).long().argmax(1)
        by_text = metric.compute(predictions=scores.argsort(1, descending=True), references=owner[:, None].tolist())
        assert by_text == pytest.approx({figure: found[f"text_to_image_{figure}"] for figure in FIGURES})
        texts = [(owner == image).nonzero()[:, 0].tolist() for image in range(len(split.image_ME))]
        by_image = metric.compute(predictions=scores.T.argsort(1, descending=True), references=texts)
        # A second right text before the first wrong one does not change the first's place.
        assert by_image == pytest.approx({figure: found[f"image_to_text_{figure}"] for figure in FIGURES})


def test_evaluate_metric_by_hand() -> None:
    metric = evaluate.load(str(Path(metrics.__file__).with_name("retrieval_recall")))
    found = metric.compute(predictions=[[3, 1, 2], [2, 3, 1], [5]], references=[[1], [1, 3], [9]], k=[1, 2])
    assert found == pytest.approx({"recall@1": 0, "recall@2": 2 / 3, "mean_rank": 2, "median_rank": 2})


# -- by language --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 20), st.integers(1, 4), st.integers(0, 2**20), st.sampled_from([None, 1]), st.data())
@settings(max_examples=60)
def test_a_language_is_measured_as_a_split_of_its_own(
    images: int, captions: int, seed: int, levels: int | None, data: st.DataObject
) -> None:
    split = random_split(images, captions, 4, seed, levels)
    texts = len(split.text_TE)
    languages = data.draw(st.lists(st.sampled_from(["en", "de", ""]), min_size=texts, max_size=texts))
    found = retrieval_metrics(in_languages(split, languages))
    known = set(languages) - {""}
    assert {name.partition("recall_")[2].partition("@")[0] for name in found if "recall_" in name} == (
        known if len(known) > 1 else set()
    )
    for language in known if len(known) > 1 else ():
        of_language = torch.tensor([code == language for code in languages])
        alone = random_split(images, captions, 4, seed, levels)
        alone.text_TE, alone.caption_key_T = split.text_TE[of_language], split.caption_key_T[of_language]
        expected = retrieval_metrics(alone)
        for k in (1, 5, 10):
            assert found[f"text_to_image_recall_{language}@{k}"] == expected[f"text_to_image_recall@{k}"]
        shown = torch.isin(alone.image_key_M, alone.caption_key_T)
        alone.image_ME, alone.image_key_M = alone.image_ME[shown], alone.image_key_M[shown]
        expected = retrieval_metrics(alone)
        for k in (1, 5, 10):
            assert found[f"image_to_text_recall_{language}@{k}"] == expected[f"image_to_text_recall@{k}"]


def test_languages_by_hand() -> None:
    scores = [[0.9, 0.1], [0.5, 0.6], [0.2, 0.3], [0.1, 0.2]]
    found = retrieval_metrics(in_languages(split_with_scores(scores, [0, 0, 1, 1]), ["en", "de", "en", "de"]))
    assert found["text_to_image_recall_en@1"] == 1
    assert found["text_to_image_recall_de@1"] == 0.5
    assert found["image_to_text_recall_en@1"] == 1
    assert found["image_to_text_recall_de@1"] == 0.5  # "de" of image 0 scores 0.6 with image 1, its own 0.2
    assert found["image_to_text_recall@1"] == 0.5


def test_only_the_ten_most_frequent_languages_are_measured() -> None:
    languages = [f"l{number:02d}" for number in range(15) for _ in range(15 - number)]
    split = in_languages(random_split(len(languages), 1, 4, 0), languages)
    assert list(split.languages) == [f"l{number:02d}" for number in range(10)]
    assert [int(mask.sum()) for mask in split.languages.values()] == list(range(15, 5, -1))


def test_names_of_languages_suit_every_tracker() -> None:
    split = in_languages(random_split(4, 1, 4, 0), ["zh_Hant", "a/b c", "é" * 100, ""])
    assert list(split.languages) == ["-" * 35, "a-b-c", "zh_Hant"]


# -- through a loader --------------------------------------------------------------------------------------------------


def test_evaluator_sees_what_the_loader_gives() -> None:
    model: Any = TruthfulModel()
    evaluator = RetrievalEvaluator()
    found = evaluator(model, model.batches(5), ACCELERATOR)
    assert found == pytest.approx(retrieval_metrics(model.split()))
    assert not any(name.startswith("rerank") for name in found)
    split = evaluator.split
    assert split is not None
    assert split.keys_values is None
    assert torch.equal(split.image_ME, model.image)
    assert torch.equal(split.text_TE, model.text)
    assert split.rows_M.tolist() == list(range(23))
    assert split.input_ids[:, :3].tolist() == [[1, text, image] for text, image in enumerate(model.owner)]
    assert split.attention_mask.sum(1).tolist() == [3 + text % 9 for text in range(len(model.owner))]
    assert split.skipped == []
    assert list(split.languages) == ["en", "de-DE", "zh-Hant"]
    for name, mask in split.languages.items():
        texts = [model.language_of(text).replace("/", "-") == name for text in range(len(model.owner))]
        assert mask.tolist() == texts


def test_unreadable_images_leave_with_their_captions() -> None:
    model: Any = TruthfulModel()
    split = embed_split(model, model.batches(4, unreadable=(0, 5, 6, 7, 8)), ACCELERATOR)
    kept = [number for number in range(23) if number not in (0, 5, 6, 7, 8)]
    assert split.rows_M.tolist() == kept
    assert torch.equal(split.image_ME, model.image[kept])
    assert (split.caption_key_T - 10**12).tolist() == [image for image in model.owner if image in kept]
    assert split.skipped == [f"image {number}: broken" for number in (0, 5, 6, 7, 8)]
    with pytest.raises(ValueError, match=r"no image .* could be decoded; .* image 0: broken"):
        embed_split(model, model.batches(4, unreadable=tuple(range(23))), ACCELERATOR)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"rerank_top_k": -1}, "--rerank_top_k is -1"),
        ({"rerank_weight": -0.5}, "--rerank_weight is -0.5"),
        ({"rerank_weight": float("nan")}, "--rerank_weight is nan"),
        ({"rerank_cache_gb": 0.0}, "--rerank_cache_gb is 0.0"),
    ],
)
def test_mistakes_in_the_flags(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluationArguments(**flags)
