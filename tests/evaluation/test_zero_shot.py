"""Classes from their names: against plain loops, figures by hand, and other numbers of processes."""

import csv
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from mm_utils import zero_shot
from mm_utils.data.batches import Collator
from mm_utils.data.labelled import LabelledImages
from mm_utils.data.order import EvaluationBatches
from mm_utils.wordpiece import train_tokenizer
from mm_utils.zero_shot import (
    ClassFigures,
    Predictions,
    ZeroShotArguments,
    ZeroShotEvaluator,
    class_figures,
    judge,
    report_classes,
    wilson_interval,
)
from tests.test_ranks import run_on_ranks

ACCELERATOR: Any = SimpleNamespace(device=torch.device("cpu"), is_main_process=True, autocast=nullcontext)
CLASSES = ["cat", "dog", "sea lion", "owl", "goat", "ant", "bee"]
TEMPLATES = ["a photo of a {}.", "{}", "one large {} beside a small {} again"]
TOKENIZER = train_tokenizer([template.replace("{}", name) for name in CLASSES for template in TEMPLATES], 200)


class BagModel:
    """Texts are the sum of their tokens' vectors; the number of an image fills its pixels."""

    config = SimpleNamespace(projection_dim=6)
    logit_scale = torch.tensor(2.0)
    fusion: Any = True

    def __init__(self, images: int = 23):
        generator = torch.Generator().manual_seed(3)
        self.token = torch.randn(len(TOKENIZER), 6, generator=generator)
        self.image = normalize(torch.randn(images, 6, generator=generator), dim=1)
        self.label = torch.randint(0, len(CLASSES) - 1, (images,), generator=generator)  # the last one has no image

    def encode_image(self, pixel_values: Tensor, with_keys_values: bool) -> tuple[Tensor, Any]:
        image_bE = self.image[pixel_values[:, 0, 0, 0].round().long()]
        return image_bE, (image_bE[None, :, None].expand(2, -1, 1, 6),) if with_keys_values else None

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        states = self.token[input_ids]
        return normalize((states * attention_mask[..., None]).sum(1), dim=1), states

    def match_pairs(self, keys_values: tuple[Tensor, ...], text_states: Tensor, attention_mask: Tensor) -> Tensor:
        image_pE = keys_values[0][0, :, 0].flip(1)  # an opinion of its own
        return 3 * (image_pE[:, None] * text_states).sum(2).mul(attention_mask).sum(1)

    def labelled(self) -> LabelledImages:
        return LabelledImages(datasets.Dataset.from_dict({}), self.label, CLASSES, "test")

    def batches(self, batch_size: int, unreadable: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """This rank's share, as `Loaders.evaluation` gives it."""
        examples = [
            {"skipped": f"image {number}: broken"}
            if number in unreadable
            else {
                "row": number,
                "image_id": str(number),
                "image_key": number,
                "pixel_values": torch.full((3, 2, 2), number, dtype=torch.uint8),
                "input_ids": [],
                "caption_keys": [],
            }
            for number in range(len(self.image))
        ]
        collate = Collator(pad_token_id=0, image_size=2)
        batches = EvaluationBatches(len(self.image), batch_size)
        return [collate([examples[row] for row, _ in draws]) for draws in batches]

    def by_loops(self, top_k: int) -> tuple[list[int], list[int], list[int]]:
        """Per image: the rank of its class, the first class, and the rank after the head has ordered the first k."""
        found: tuple[list[int], list[int], list[int]] = ([], [], [])
        texts = [[TOKENIZER(template.replace("{}", name)).input_ids for template in TEMPLATES] for name in CLASSES]
        sums = [[self.token[ids].sum(0) for ids in of_class] for of_class in texts]
        means = [normalize(torch.stack([normalize(one, dim=0) for one in row]).mean(0), dim=0) for row in sums]
        for image, label in zip(self.image, self.label.tolist(), strict=True):
            cosines = [float(image @ mean) for mean in means]
            order = sorted(range(len(CLASSES)), key=lambda number: -cosines[number])
            matches = [sum(float(3 * image.flip(0) @ one) for one in row) / len(row) for row in sums]
            scores = [float(self.logit_scale.exp()) * cosines[c] + matches[c] for c in range(len(CLASSES))]
            again = sorted(order[:top_k], key=lambda number: -scores[number]) + order[top_k:]
            found[0].append(order.index(label) + 1)
            found[1].append(order[0])
            found[2].append(again.index(label) + 1)
        return found


def evaluator_of(model: BagModel, top_k: int = 0) -> ZeroShotEvaluator:
    args = ZeroShotArguments(templates=TEMPLATES, rerank_top_k=top_k)
    return ZeroShotEvaluator(model.labelled(), TOKENIZER, 32, args)


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_equals_plain_loops(batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_shot, "TEXTS", 4)
    model: Any = BagModel()
    evaluator = evaluator_of(model)
    found = evaluator(model, model.batches(batch_size), ACCELERATOR)
    rank, guess, _ = model.by_loops(0)
    assert evaluator.predictions is not None
    assert evaluator.predictions.row.tolist() == list(range(23))
    assert evaluator.predictions.label.tolist() == model.label.tolist()
    assert evaluator.predictions.rank.tolist() == rank
    assert evaluator.predictions.guess.tolist() == guess
    assert found["accuracy@1"] == pytest.approx(rank.count(1) / 23)
    assert found["accuracy@5"] == pytest.approx(sum(one <= 5 for one in rank) / 23)
    of_class = [[one == 1 for one, of in zip(rank, model.label, strict=True) if of == c] for c in range(6)]
    assert found["macro_accuracy@1"] == pytest.approx(sum(sum(hits) / len(hits) for hits in of_class) / 6)
    assert found["chance@1"] == 1 / 7
    assert found["majority@1"] == pytest.approx(max(map(len, of_class)) / 23)
    assert not any(name.startswith("rerank") for name in found)


@pytest.mark.parametrize("top_k", [1, 3, 100])
@pytest.mark.parametrize("pairs", [2, 256])
def test_the_head_orders_the_first_classes(top_k: int, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_shot, "PAIRS", pairs)
    model: Any = BagModel(200)
    found = evaluator_of(model, top_k)(model, model.batches(30), ACCELERATOR)
    rank, _, reranked = model.by_loops(top_k)
    assert found["accuracy@1"] == pytest.approx(rank.count(1) / 200)
    assert found["rerank_accuracy@1"] == pytest.approx(reranked.count(1) / 200)
    assert found["rerank_accuracy@5"] == pytest.approx(sum(one <= 5 for one in reranked) / 200)
    model.fusion = None
    assert not any(name.startswith("rerank") for name in evaluator_of(model, 3)(model, model.batches(30), ACCELERATOR))


def test_ties_and_scores_that_are_no_number_count_against_the_model() -> None:
    nan = float("nan")
    scores = torch.tensor([[2.0, 2.0, 1.0], [nan, 1.0, 0.0], [nan, nan, nan], [0.0, 3.0, 1.0]])
    rank, guess = judge(scores, torch.tensor([0, 1, 2, 1]))
    assert rank.tolist() == [2, 2, 3, 1]
    assert guess.tolist()[:2] == [1, 0]
    assert guess.tolist()[2] != 2
    assert guess.tolist()[3] == 1


def test_unreadable_images_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = BagModel()
    evaluator = evaluator_of(model)
    evaluator(model, model.batches(4, (0, 1, 2, 3, 9)), ACCELERATOR)
    assert evaluator.predictions is not None
    assert evaluator.predictions.row.tolist() == [row for row in range(23) if row not in (0, 1, 2, 3, 9)]
    assert "5 images were left out" in caplog.text
    with pytest.raises(ValueError, match=r"no image could be decoded; .* image 0: broken"):
        evaluator(model, model.batches(4, tuple(range(23))), ACCELERATOR)


def test_wilson_interval_by_hand() -> None:
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Brown, Cai and DasGupta's formula
    assert wilson_interval(0, 20)[0] == 0
    assert wilson_interval(20, 20)[1] == 1


def test_table_of_classes_by_hand() -> None:
    label, guess = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0, 2, 2, 1, 1, 1])
    found = Predictions(torch.arange(6), label, torch.where(label == guess, 1, 2), guess)
    rows = class_figures(found, ["cat", "dog", "owl"])
    assert rows == [
        ClassFigures("cat", 4, 0.25, "owl", 2),
        ClassFigures("dog", 2, 1.0, "", 0),
        ClassFigures("owl", 0, None, "", 0),
    ]


def test_table_and_picture_are_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mm_utils")
    model: Any = BagModel()
    evaluator = evaluator_of(model)
    evaluator(model, model.batches(5), ACCELERATOR)
    report_classes(ACCELERATOR, evaluator, str(tmp_path))
    with open(tmp_path / "classes.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == CLASSES
    assert sum(int(row["images"]) for row in rows) == 23
    assert rows[-1]["accuracy"] == ""
    assert (tmp_path / "confusion.png").stat().st_size > 1000
    assert "least accurate classes" in caplog.text


def test_templates_are_checked_and_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "templates.txt"
    file.write_text("a {}\n\n the {} \n")
    assert ZeroShotArguments(templates=[str(file)]).templates == ["a {}", "the {}"]
    for templates, message in ((["a photo"], "--templates is a photo; "), ([], "--templates is an empty file; ")):
        with pytest.raises(ValueError, match=message):
            ZeroShotArguments(templates=templates)
    with pytest.raises(ValueError, match="--rerank_top_k is -1"):
        ZeroShotArguments(rerank_top_k=-1)


# -- between processes --------------------------------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    {"images": 23},
    {"images": 23, "unreadable": (0, 1, 2, 3, 12)},
    {"images": 23, "unreadable": tuple(range(12))},  # nothing left for the first of two
    {"images": 1},  # nothing for some rank from the beginning
]


def evaluate_cases() -> list[tuple[dict[str, float], list[list[int]]]]:
    found = []
    for case in CASES:
        model: Any = BagModel(case["images"])
        evaluator = evaluator_of(model, 3)
        figures = evaluator(model, model.batches(5, case.get("unreadable", ())), ACCELERATOR)
        assert evaluator.predictions is not None
        found.append((figures, [column.tolist() for column in evaluator.predictions]))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_the_number_of_processes_changes_nothing(world: int) -> None:
    alone = evaluate_cases()
    for found in run_on_ranks(world, evaluate_cases):
        assert found == alone
