"""Each metric equals its definition, whatever the batches, the rows that cannot be read, ties, NaN and the number of processes."""

from statistics import mean
from typing import Any, NamedTuple

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from mm_utils.distributed import RunError
from mm_utils.evaluation import embeddings, reranking, retrieval
from mm_utils.evaluation.arguments import EvaluationArguments
from mm_utils.evaluation.embeddings import Embeddings, count_right
from mm_utils.evaluation.metrics import retrieval_metrics, wilson_interval
from mm_utils.evaluation.reranking import rank_directions
from mm_utils.evaluation.retrieval import RetrievalEvaluator
from mm_utils.finetuning import evaluator as classification
from mm_utils.finetuning import zero_shot
from mm_utils.finetuning.arguments import ZeroShotArguments
from mm_utils.finetuning.evaluator import ClassificationEvaluator
from mm_utils.finetuning.zero_shot import LabelledImages, ZeroShotEvaluator
from mm_utils.model.processor import train_tokenizer
from tests.kit.processes import run_on_ranks
from tests.kit.truthful_model import (
    ACCELERATOR,
    TruthfulModel,
    evaluation_batches,
    figures_of_lists,
    lists_by_sorting,
    split_of,
)

DIRECTIONS = ("text_to_image", "image_to_text")
NAN = float("nan")
Figures = dict[str, float]


class Case(NamedTuple):
    images: int = 23
    batch_size: int = 5
    unreadable: tuple[int, ...] = ()
    cache: float = 8.0  # gigabytes for the head's keys and values
    spoiled: str = ""

    @property
    def readable(self) -> list[int]:
        return [image for image in range(self.images) if image not in self.unreadable]


CASES = {
    "as they come": Case(),
    "a row a batch": Case(batch_size=1),
    "one batch": Case(batch_size=64),
    "unreadable": Case(unreadable=(0, 1, 2, 3, 12)),
    "a rank without rows": Case(batch_size=3, unreadable=tuple(range(12))),
    "one image": Case(1, 4),
    "two images": Case(2, 1),
    "memory for five": Case(batch_size=2, cache=40e-9),
    "memory for none": Case(unreadable=(0, 1, 2, 3, 12), cache=1e-9),
    "ties": Case(spoiled="ties"),
    "NaN": Case(spoiled="NaN"),
}


# -- retrieval ----------------------------------------------------------------------------------------------------------
def by_definition(cosine: Tensor, right: Tensor, prefix: str = "", *head: Any) -> Figures:
    """Figures of both directions, from the scores of texts and images `[T, M]`, and which belong together."""
    found = {}
    for direction, turn in zip(DIRECTIONS, (lambda matrix: matrix, lambda matrix: matrix.T), strict=True):
        more = (turn(head[0]), *head[1:]) if head else ()
        figures = figures_of_lists(lists_by_sorting(turn(cosine), turn(right), *more))
        found |= {f"{prefix}{direction}_{name}": value for name, value in figures.items()}
    recalls = [value for name, value in found.items() if "_recall@" in name]
    return {**found, f"{prefix}mean_recall": mean(recalls)}


def spoiled(case: Case) -> Any:
    model = TruthfulModel.with_noise(5, case.images)
    if case.spoiled == "ties":
        model.image = torch.eye(6)[torch.arange(case.images) % 6]
        model.text = model.image[torch.tensor(model.owner)]
    if case.spoiled == "NaN":
        model.image[3] = NAN
    return model


def seen(model: Any, case: Case) -> tuple[Tensor, Tensor, list[int]]:
    """Cosines `[T, M]` of what can be read, which belong together, and the texts."""
    texts = [text for text, image in enumerate(model.owner) if image in case.readable]
    right = torch.tensor(model.owner)[texts][:, None] == torch.tensor(case.readable)
    return model.text[texts] @ model.image[case.readable].T, right, texts


def towers(case: Case) -> tuple[Figures, Figures]:
    model = spoiled(case)
    found = RetrievalEvaluator()(model, model.batches(case.batch_size, case.unreadable), ACCELERATOR)
    cosine, right, _ = seen(model, case)
    assert not any(name.startswith("rerank") for name in found)
    return found, by_definition(cosine, right) | {"text_to_image_chance@1": 1 / len(case.readable)}


def head(case: Case, top_k: int = 5, weight: float = 1.0) -> tuple[Figures, Figures]:
    model = spoiled(case)
    if case.spoiled == "NaN":  # of some cosines the sorting has no order; the head's scores are spoiled instead
        model = TruthfulModel.with_noise(5, case.images)
        case = case._replace(spoiled="")
        model.logits[:] = NAN
    top_k = 1000 if case.spoiled == "ties" else top_k  # else it is chance which are among the first
    measure = RetrievalEvaluator(EvaluationArguments(rerank_top_k=top_k))
    model.config.rerank_weights = {"match": weight}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "CACHE_GB", case.cache)
        found = measure(model, model.batches(case.batch_size, case.unreadable), ACCELERATOR)
    cosine, right, texts = seen(model, case)
    if model.logits.isnan().all():
        return found, {f"rerank_{direction}_recall@1": 0.0 for direction in DIRECTIONS}
    logits = model.logits.T[texts][:, case.readable]
    return found, by_definition(cosine, right, "rerank_", logits, top_k, model.logit_scale.exp().item() / weight)


# -- classes ------------------------------------------------------------------------------------------------------------
CLASSES = ["cat", "dog", "sea lion", "owl", "goat", "ant", "bee"]
TEMPLATES = ["a photo of a {}.", "{}", "one large {} beside a small {} again"]
TOKENIZER = train_tokenizer([template.replace("{}", name) for name in CLASSES for template in TEMPLATES], 200)


class BagModel:
    """Texts are the sum of their tokens' vectors; the number of an image fills its pixels. Its classifier's logits are cosines."""

    def __init__(self, case: Case):
        generator = torch.Generator().manual_seed(3)
        self.token = torch.randn(len(TOKENIZER), 6, generator=generator)
        self.image = normalize(torch.randn(case.images, 6, generator=generator), dim=1)
        self.label = torch.randint(0, 6, (case.images,), generator=generator)  # the last one has no image
        if case.spoiled == "ties":
            self.token[:] = torch.eye(6)[0]
        if case.spoiled == "NaN":
            self.token[TOKENIZER.convert_tokens_to_ids("cat")] = NAN
        examples = [{"input_ids": [], "caption_keys": []} for _ in self.image]
        self.batches = evaluation_batches(examples, case.batch_size, case.unreadable)
        self.cosine = self.image @ torch.stack([self.mean_of(name) for name in CLASSES]).T

    def mean_of(self, name: str) -> Tensor:
        """The direction of the mean of a class's texts."""
        texts = [TOKENIZER(template.replace("{}", name)).input_ids for template in TEMPLATES]
        return normalize(torch.stack([normalize(self.token[ids].sum(0), dim=0) for ids in texts]).mean(0), dim=0)

    def encode_image(self, pixel_values: Tensor, with_keys_values: bool) -> tuple[Tensor, None]:
        return self.image[pixel_values[:, 0, 0, 0].round().long()], None

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        states = self.token[input_ids]
        return normalize((states * attention_mask[..., None]).sum(1), dim=1), states

    def classify(self, pixel_values: Tensor) -> Tensor:
        return self.cosine[pixel_values[:, 0, 0, 0].round().long()]


def by_names(case: Case) -> tuple[Figures, Figures]:
    model = BagModel(case)
    images = LabelledImages(datasets.Dataset.from_dict({}), model.label, CLASSES, "test")
    evaluator = ZeroShotEvaluator(images, TOKENIZER, 32, ZeroShotArguments(templates=TEMPLATES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_shot, "TEXTS", 4)
        found, guesses = evaluator(model, model.batches, ACCELERATOR)
    label = model.label[case.readable]
    hits = torch.eye(len(CLASSES))[model.label[case.readable]].bool()
    ranks = [row.index(True) + 1 for row in lists_by_sorting(model.cosine[case.readable], hits)]
    guess = guesses[:, 1].tolist()
    assert [one == right for one, right in zip(guess, label.tolist(), strict=True)] == [rank == 1 for rank in ranks]
    first = torch.tensor(ranks) == 1
    low, high = wilson_interval(int(first.sum()), len(ranks))
    return found, {
        "accuracy@1": mean(map(float, first)), "accuracy@1_low": low, "accuracy@1_high": high,
        "accuracy@5": mean(float(rank <= 5) for rank in ranks), "chance@1": 1 / 7,
        "macro_accuracy@1": mean(first[label == number].double().mean().item() for number in set(label.tolist())),
        "majority@1": max(label.tolist().count(number) for number in range(7)) / len(label),
    }  # fmt: skip


def by_classifier(case: Case) -> tuple[Figures, Figures]:
    """A label of -1 is of no class."""
    model = BagModel(case)
    labels = [-1 if row % 5 == 4 else label for row, label in enumerate(model.label.tolist())]
    rows = datasets.Dataset.from_dict({"label": labels})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classification, "FusionDualEncoderForClassification", BagModel)
        patch.setattr(classification, "classify", lambda model, batch: model.classify(batch["pixel_values"]))
        found = ClassificationEvaluator(rows)(model, model.batches, ACCELERATOR)
    guesses = [int(model.cosine[row].argmax()) for row in case.readable]
    pairs = [(labels[row], guess) for row, guess in zip(case.readable, guesses, strict=True)]
    right = [label == guess for label, guess in pairs]
    scores = []
    for number in {number for pair in pairs for number in pair} - {-1}:
        hits = pairs.count((number, number))
        times = sum((label == number) + (guess == number) for label, guess in pairs)
        scores.append(2 * hits / times)
    low, high = wilson_interval(sum(right), len(right))
    known = [label for label, _ in pairs if label >= 0]
    return found, {
        "accuracy": mean(right), "accuracy_low": low, "accuracy_high": high, "macro_f1": mean(scores),
        "majority": max(map(known.count, known), default=0) / len(pairs),
    }  # fmt: skip


METRICS = {
    "towers": towers, "head": head, "names of classes": by_names, "classifier": by_classifier,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_equals_its_definition(metric: str, case: str) -> None:
    if case == "NaN" and metric in ("towers", "names of classes"):
        with pytest.raises(RunError, match="not finite"):
            METRICS[metric](CASES[case])
        return
    found, expected = METRICS[metric](CASES[case])
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def every_case() -> list[list[tuple[str, float]]]:
    return [
        sorted(measure(case)[0].items())
        for measure in METRICS.values()
        for case in map(
            CASES.__getitem__, ("as they come", "unreadable", "a rank without rows", "two images", "memory for five")
        )
    ]


def test_the_number_of_processes_changes_nothing() -> None:
    assert run_on_ranks(3, every_case) == [every_case()] * 3


@pytest.mark.parametrize("metric", METRICS)
def test_a_split_without_a_row_that_can_be_read_is_an_error(metric: str) -> None:
    with pytest.raises(ValueError, match=r"no (row|image) .*could be (read|decoded); .* image 0: broken"):
        METRICS[metric](Case(5, 2, tuple(range(5))))


# -- any scores, by drawing ---------------------------------------------------------------------------------------------
def random_split(images: int, most_captions: int, width: int, seed: int, levels: int | None = None) -> Embeddings:
    """With `levels`, coordinates are small integers, so that scores tie."""
    generator = torch.Generator().manual_seed(seed)
    counts = [int(torch.randint(1, most_captions + 1, (), generator=generator)) for _ in range(images)]
    owner = [image for image, count in enumerate(counts) for _ in range(count)]
    image = torch.randn(images, width, generator=generator)
    text = torch.randn(len(owner), width, generator=generator)
    if levels:
        return split_of((image * levels / 3).round(), (text * levels / 3).round(), owner)
    return split_of(normalize(image, dim=1), normalize(text + image[torch.tensor(owner)], dim=1), owner)


@given(
    st.integers(1, 25), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**20), st.sampled_from([None, 1, 2]),
    st.integers(1, 9), st.integers(0, 8),
)  # fmt: skip
def test_ranks_equal_sorting(
    images: int, captions: int, width: int, seed: int, levels: int | None, block: int, kinds: int
) -> None:
    """Of `kinds` texts that several captions share, 0 for none: all images that have such a caption are right."""
    split = random_split(images, captions, width, seed, levels)
    right = split.caption_key_T[:, None] == split.image_key_M
    if kinds:
        split.text_key_T = torch.randint(kinds, (len(split.text_TE),), generator=torch.Generator().manual_seed(seed))
        columns = []
        for key in split.image_key_M:
            columns.append(torch.isin(split.text_key_T, split.text_key_T[split.caption_key_T == key]))
        right = torch.stack(columns, 1)
    expected = by_definition(split.text_TE @ split.image_ME.T, right)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embeddings, "BLOCK", block)
        found = retrieval_metrics(split, rank_directions(split))
        counts = {name: count_right(*sides).tolist() for name, sides in split.directions.items()}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert counts == {"text_to_image": right.sum(1).tolist(), "image_to_text": right.sum(0).tolist()}


@given(st.integers(1, 40), st.sampled_from([0.5, 1.0, 3.0]), st.integers(1, 60), st.integers(1, 30))
def test_every_number_of_candidates_equals_sorting_again(top_k: int, weight: float, pairs: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reranking, "PAIRS", pairs)
        patch.setattr(embeddings, "BLOCK", block)
        found, expected = head(Case(), top_k, weight)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
