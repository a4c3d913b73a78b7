"""Recalls and ranks against a full matrix, hand-made figures, the `evaluate` metric, and other numbers of processes."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import evaluate
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from mm_utils import metrics, ranks
from mm_utils.data.batches import Collator
from mm_utils.data.order import EvaluationBatches
from mm_utils.metrics import Embeddings, RetrievalEvaluator, embed_split, retrieval_metrics, summarise_ranks
from tests.test_ranks import run_on_ranks

ACCELERATOR: Any = SimpleNamespace(device=torch.device("cpu"), is_main_process=False, autocast=nullcontext)
DIRECTIONS = ("text_to_image", "image_to_text")
FIGURES = ("recall@1", "recall@5", "recall@10", "mean_rank", "median_rank")


def split_of(image: Tensor, text: Tensor, owner: list[int]) -> Embeddings:
    """A split of which text t belongs to image `owner[t]`."""
    keys = 1000 + 7 * torch.arange(len(image))
    nothing = torch.zeros(len(text), 1, dtype=torch.long)
    return Embeddings(
        image, text, keys, keys[torch.tensor(owner)], torch.arange(len(image)), None, range(0), nothing, nothing
    )


def split_with_scores(scores: list[list[float]], owner: list[int]) -> Embeddings:
    """Whose text t has a similarity of `scores[t][i]` to image i."""
    return split_of(torch.eye(len(scores[0])), torch.tensor(scores), owner)


def in_languages(split: Embeddings, languages: list[str]) -> Embeddings:
    """As `embed_split` gives it for captions of these languages."""
    sizes = ranks.gather_sizes(len(languages), torch.device("cpu"))
    split.languages = metrics._gather_languages([*languages], sizes, torch.device("cpu"))
    return split


def full_matrix(split: Embeddings) -> dict[str, float]:
    """The definition: sort every row, wrong items before right ones of the same score."""
    scores = split.text_TE @ split.image_ME.T
    right = split.caption_key_T[:, None] == split.image_key_M
    found = {}
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
        patch.setattr(metrics, "BLOCK", block)
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


# -- through a loader and a head ----------------------------------------------------------------------------------------


LANGUAGES_OF_TEXTS = ("en", "de-DE", "en", "", "zh/Hant")


class TruthfulModel:
    """Looks embeddings up by the number that an image shows and a caption says; its head knows which belong together.

    The number of image i fills its pixels; caption t is the tokens [1, t, image of t].
    """

    config = SimpleNamespace(projection_dim=6)
    logit_scale = torch.tensor(2.0)
    fusion: Any = True

    def __init__(self, images: int = 23, truth: float = 1000.0, owner: list[int] | None = None):
        generator = torch.Generator().manual_seed(9)
        counts = torch.randint(1, 4, (images,), generator=generator)
        self.owner = torch.repeat_interleave(torch.arange(images), counts).tolist()
        self.image, self.text = (
            normalize(torch.randn(count, 6, generator=generator), dim=1) for count in (images, len(self.owner))
        )
        self.truth, self.scored = truth, 0

    def encode_image(self, pixel_values: Tensor, with_keys_values: bool) -> tuple[Tensor, Any]:
        number = pixel_values[:, 0, 0, 0].round().long()
        keys_values = (number.float()[None, :, None, None, None].expand(2, -1, 1, 1, 1),)
        return self.image[number], keys_values if with_keys_values else None

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        assert (attention_mask[:, :3] == 1).all()
        return self.text[input_ids[:, 1]], input_ids[:, :, None].float()

    def match_pairs(self, keys_values: tuple[Tensor, ...], text_states: Tensor, attention_mask: Tensor) -> Tensor:
        assert len(text_states) == len(attention_mask) == keys_values[0].shape[1]
        self.scored += len(text_states)
        same = keys_values[0][0, :, 0, 0, 0] == text_states[:, 2, 0]
        return torch.where(same, self.truth, -self.truth)

    def batches(self, batch_size: int, unreadable: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """This rank's share, as `Loaders.evaluation` gives it."""
        examples = []
        for number in range(len(self.image)):
            texts = [text for text, image in enumerate(self.owner) if image == number]
            examples.append(
                {"skipped": f"image {number}: broken"}
                if number in unreadable
                else {
                    "row": number,
                    "image_id": str(number),
                    "image_key": 10**12 + number,
                    "pixel_values": torch.full((3, 2, 2), number, dtype=torch.uint8),
                    "input_ids": [[1, text, number, *[5] * (text % 9)] for text in texts],
                    "caption_keys": texts,
                    "languages": [self.language_of(text) for text in texts],
                }
            )
        collate = Collator(pad_token_id=0, image_size=2)
        return [
            collate([examples[row] for row, _ in draws]) for draws in EvaluationBatches(len(self.image), batch_size)
        ]

    def language_of(self, text: int) -> str:
        return LANGUAGES_OF_TEXTS[text % len(LANGUAGES_OF_TEXTS)]

    def split(self) -> Embeddings:
        split = split_of(self.image, self.text, self.owner)
        return in_languages(split, list(map(self.language_of, range(len(self.owner)))))


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


@pytest.mark.parametrize("top_k", [1, 3, 10, 1000])
@pytest.mark.parametrize("pairs", [3, 256])
def test_a_head_that_knows_the_truth(top_k: int, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything it may look at is put right; what lies below the first k keeps its rank."""
    monkeypatch.setattr(metrics, "PAIRS", pairs)
    monkeypatch.setattr(metrics, "BLOCK", 7)
    model: Any = TruthfulModel()
    found = RetrievalEvaluator(top_k)(model, model.batches(5), ACCELERATOR)
    scores = model.text @ model.image.T
    right = torch.tensor(model.owner)[:, None] == torch.arange(23)
    for direction, matrix, is_right in (("text_to_image", scores, right), ("image_to_text", scores.T, right.T)):
        best = matrix.masked_fill(~is_right, -torch.inf).amax(1, keepdim=True)
        place = 1 + ((matrix >= best) & ~is_right).sum(1)
        reached = (matrix > best).sum(1) < top_k
        expected = summarise_ranks(torch.where(reached, 1, place), f"rerank_{direction}_")
        assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["rerank_text_to_image_recall@1"] >= found["text_to_image_recall@1"]


def test_the_head_is_measured_by_language_without_further_scores() -> None:
    model: Any = TruthfulModel()
    found = RetrievalEvaluator(1000)(model, model.batches(5), ACCELERATOR)
    names = {name for name in found if name.startswith("rerank") and "recall_" in name}
    assert names == {
        f"rerank_text_to_image_recall_{code}@{k}" for code in ("en", "de-DE", "zh-Hant") for k in (1, 5, 10)
    }
    assert {found[name] for name in names} == {1.0}
    assert model.scored == len(model.image) * len(model.text)


def test_a_head_that_lies() -> None:
    model: Any = TruthfulModel(truth=-1000.0)
    found = RetrievalEvaluator(10)(model, model.batches(5), ACCELERATOR)
    assert found["rerank_text_to_image_recall@1"] == 0


def test_a_head_without_an_opinion_changes_nothing() -> None:
    model: Any = TruthfulModel(truth=0.0)
    found = RetrievalEvaluator(4)(model, model.batches(5), ACCELERATOR)
    for direction in DIRECTIONS:
        for figure in FIGURES:
            assert found[f"rerank_{direction}_{figure}"] == pytest.approx(found[f"{direction}_{figure}"])


def test_ties_count_against_the_head_too() -> None:
    model: Any = TruthfulModel(truth=0.0)
    model.image = torch.eye(6)[torch.arange(23) % 6]
    model.text = model.image[torch.tensor(model.owner)]
    found = RetrievalEvaluator(1000)(model, model.batches(5), ACCELERATOR)
    assert found["text_to_image_recall@1"] == found["rerank_text_to_image_recall@1"] == 0
    assert found["image_to_text_mean_rank"] == found["rerank_image_to_text_mean_rank"] > 4


def test_every_pair_is_scored_once() -> None:
    model: Any = TruthfulModel()
    RetrievalEvaluator(5)(model, model.batches(5), ACCELERATOR)
    by_text = (model.text @ model.image.T).topk(5, 1).indices
    by_image = (model.image @ model.text.T).topk(5, 1).indices
    pairs = {(int(image), text) for text, images in enumerate(by_text) for image in images}
    pairs |= {(image, int(text)) for image, texts in enumerate(by_image) for text in texts}
    assert model.scored == len(pairs)


def test_reranking_is_left_out_where_it_cannot_be() -> None:
    model: Any = TruthfulModel()
    model.fusion = None
    assert not any(name.startswith("rerank") for name in RetrievalEvaluator(5)(model, model.batches(5), ACCELERATOR))


# -- between processes --------------------------------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    {"images": 23, "batch_size": 5},
    {"images": 23, "batch_size": 5, "unreadable": (0, 1, 2, 3, 12)},
    {"images": 23, "batch_size": 3, "unreadable": tuple(range(12))},  # nothing left for the first of two
    {"images": 1, "batch_size": 4},  # nothing for some rank from the beginning
    {"images": 2, "batch_size": 1},
]


def evaluate_cases() -> list[dict[str, float]]:
    found = []
    for case in CASES:
        model: Any = TruthfulModel(case["images"], truth=1.0)
        batches = model.batches(case["batch_size"], case.get("unreadable", ()))
        found.append(RetrievalEvaluator(4)(model, batches, ACCELERATOR))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_the_number_of_processes_changes_nothing(world: int) -> None:
    assert ranks.world_size() == 1
    alone = evaluate_cases()
    for found in run_on_ranks(world, evaluate_cases):
        for case, expected in zip(found, alone, strict=True):
            assert case == pytest.approx(expected, rel=1e-12)
