"""Classes from their names against plain loops, by hand, and on any number of processes."""

import copy
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from mm_utils.finetuning import zero_shot
from mm_utils.finetuning.zero_shot import (
    LabelledImages,
    ZeroShotArguments,
    ZeroShotEvaluator,
    rank_and_guess,
    unknown_names,
)
from mm_utils.model.processor import train_tokenizer
from tests.kit.ranks import run_on_ranks
from tests.kit.truthful_model import MAIN_PROCESS, evaluation_batches

CLASSES = ["cat", "dog", "sea lion", "owl", "goat", "ant", "bee"]
TEMPLATES = ["a photo of a {}.", "{}", "one large {} beside a small {} again"]
TOKENIZER = train_tokenizer([template.replace("{}", name) for name in CLASSES for template in TEMPLATES], 200)


class BagModel:
    """Texts are the sum of their tokens' vectors; the number of an image fills its pixels."""

    def __init__(self, images: int = 23):
        generator = torch.Generator().manual_seed(3)
        self.token = torch.randn(len(TOKENIZER), 6, generator=generator)
        self.image = normalize(torch.randn(images, 6, generator=generator), dim=1)
        self.label = torch.randint(0, len(CLASSES) - 1, (images,), generator=generator)  # the last one has no image

    def encode_image(self, pixel_values: Tensor, with_keys_values: bool) -> tuple[Tensor, None]:
        return self.image[pixel_values[:, 0, 0, 0].round().long()], None

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        states = self.token[input_ids]
        return normalize((states * attention_mask[..., None]).sum(1), dim=1), states

    def batches(self, batch_size: int, unreadable: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        examples: list[dict[str, Any]] = [{"input_ids": [], "caption_keys": []} for _ in self.image]
        return evaluation_batches(examples, batch_size, unreadable)

    def evaluator(self) -> ZeroShotEvaluator:
        images = LabelledImages(datasets.Dataset.from_dict({}), self.label, CLASSES, "test")
        return ZeroShotEvaluator(images, TOKENIZER, 32, ZeroShotArguments(templates=TEMPLATES))

    def by_loops(self) -> tuple[list[int], list[int]]:
        """Per image: the rank of its class, and the first class."""
        found: tuple[list[int], list[int]] = ([], [])
        texts = [[TOKENIZER(template.replace("{}", name)).input_ids for template in TEMPLATES] for name in CLASSES]
        sums = [[self.token[ids].sum(0) for ids in of_class] for of_class in texts]
        means = [normalize(torch.stack([normalize(one, dim=0) for one in row]).mean(0), dim=0) for row in sums]
        for image, label in zip(self.image, self.label.tolist(), strict=True):
            cosines = [float(image @ mean) for mean in means]
            order = sorted(range(len(CLASSES)), key=lambda number: -cosines[number])
            found[0].append(order.index(label) + 1)
            found[1].append(order[0])
        return found


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_metrics_equal_plain_loops(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_shot, "TEXTS", 4)
    model: Any = BagModel()
    evaluator = model.evaluator()
    found = evaluator(model, model.batches(batch_size), MAIN_PROCESS)
    rank, guess = model.by_loops()
    assert [column.tolist() for column in evaluator.predictions] == [
        list(range(23)),
        model.label.tolist(),
        rank,
        guess,
    ]
    assert found["accuracy@1"] == pytest.approx(rank.count(1) / 23)
    assert found["accuracy@5"] == pytest.approx(sum(one <= 5 for one in rank) / 23)
    of_class = [[one == 1 for one, of in zip(rank, model.label, strict=True) if of == c] for c in range(6)]
    assert found["macro_accuracy@1"] == pytest.approx(sum(sum(hits) / len(hits) for hits in of_class) / 6)
    assert found["chance@1"] == 1 / 7
    assert found["majority@1"] == pytest.approx(max(map(len, of_class)) / 23)


def test_ties_and_nan_count_against_the_model() -> None:
    nan = float("nan")
    scores = torch.tensor([[2.0, 2.0, 1.0], [nan, 1.0, 0.0], [nan, nan, nan], [0.0, 3.0, 1.0]])
    rank, guess = rank_and_guess(scores, torch.tensor([0, 1, 2, 1]))
    assert rank.tolist() == [2, 2, 3, 1]
    assert guess[[0, 1, 3]].tolist() == [1, 0, 1]
    assert guess[2] != 2


def test_unreadable_images_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = BagModel()
    evaluator = model.evaluator()
    evaluator(model, model.batches(4, (0, 1, 2, 3, 9)), MAIN_PROCESS)
    assert evaluator.predictions.row.tolist() == [row for row in range(23) if row not in (0, 1, 2, 3, 9)]
    assert "5 rows were left out" in caplog.text
    with pytest.raises(ValueError, match=r"no row could be read; .* image 0: broken"):
        evaluator(model, model.batches(4, tuple(range(23))), MAIN_PROCESS)


def test_names_that_the_tokenizer_does_not_know_are_named(caplog: pytest.LogCaptureFixture) -> None:
    stock = copy.deepcopy(TOKENIZER)
    stock.unk_token = stock.sep_token  # as CLIP's
    for tokenizer, unknown in ((TOKENIZER, ["жзж", "a 象", ""]), (stock, [""])):
        assert unknown_names(tokenizer, [*CLASSES, "жзж", "a 象", ""], 32) == unknown
    images = LabelledImages(datasets.Dataset.from_dict({}), torch.tensor([0]), ["cat", "жзж"], "test")
    ZeroShotEvaluator(images, TOKENIZER, 32, ZeroShotArguments())
    assert "1 of 2 classes have words that the tokenizer does not know, and are not found by them: жзж" in caplog.text


def test_templates_are_checked_and_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "templates.txt"
    file.write_text("a {}\n\n the {} \n")
    assert ZeroShotArguments(templates=[str(file)]).templates == ["a {}", "the {}"]
    for templates, message in ((["a photo"], "--templates is a photo; "), ([], "--templates is an empty file; ")):
        with pytest.raises(ValueError, match=message):
            ZeroShotArguments(templates=templates)


def evaluate_cases() -> list[tuple[dict[str, float], list[list[int]]]]:
    found = []
    # The third case leaves nothing for the first of two ranks, the last nothing for some rank from the beginning.
    for images, unreadable in ((23, ()), (23, (0, 1, 2, 3, 12)), (23, tuple(range(12))), (1, ())):
        model: Any = BagModel(images)
        evaluator = model.evaluator()
        metrics = evaluator(model, model.batches(5, unreadable), MAIN_PROCESS)
        found.append((metrics, [column.tolist() for column in evaluator.predictions]))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_the_number_of_processes_changes_nothing(world: int) -> None:
    assert run_on_ranks(world, evaluate_cases) == [evaluate_cases()] * world
