"""Pointing against loops, on any number of processes; the loss of regions."""

from typing import Any

import pytest
import torch

from mm_utils.evaluation.retrieval import in_turn
from mm_utils.objectives.grounding.pointing import PointingEvaluator, hits
from mm_utils.objectives.grounding.terms import RegionPointing
from mm_utils.objectives.terms import Encoded
from tests.kit.truthful_model import ACCELERATOR
from tests.objectives.grid_model import CELLS, IMAGES, SLOTS, GridModel, batches, whole_batch


def by_hand() -> tuple[list[tuple[int, int, bool]], float]:
    """(row, key, hit) of every region, and the mean area of their boxes."""
    whole, found, areas = whole_batch(), [], []
    for place in range(IMAGES):
        for slot in range(SLOTS):
            if not whole["region_attention_mask"][place, slot].any():
                continue
            phrase = whole["region_input_ids"][place, slot].float()
            left, top, right, bottom = whole["region_boxes"][place, slot].tolist()
            cells = [(x, y) for x in range(CELLS) for y in range(CELLS)]
            best = max(cells, key=lambda cell: float(whole["pixel_values"][place, :, cell[1], cell[0]] @ phrase))
            x, y = ((index + 0.5) / CELLS for index in best)
            hit = left <= x <= right and top <= y <= bottom
            found.append((int(whole["rows"][place]), int(whole["region_keys"][place, slot]), hit))
            areas.append((right - left) * (bottom - top))
    return found, sum(areas) / len(areas)


@pytest.mark.parametrize("size", [1, 4, 20])
def test_pointing_equals_a_loop(size: int) -> None:
    expected, chance = by_hand()
    evaluator = PointingEvaluator()
    metrics = evaluator(GridModel(), batches(size), ACCELERATOR)  # type: ignore[arg-type]
    accuracy = sum(hit for _, _, hit in expected) / len(expected)
    assert 0 < accuracy < 1
    assert metrics["pointing_accuracy"] == pytest.approx(accuracy)
    assert metrics["pointing_chance"] == pytest.approx(chance)
    assert 0 <= metrics["pointing_accuracy_low"] < accuracy < metrics["pointing_accuracy_high"] <= 1


def test_the_loss_is_the_probability_of_pointing_outside() -> None:
    """Against a loop over the cells: of each, which share of its points lies in the box, and how likely it is."""
    batch, model, scale = whole_batch(), GridModel(), torch.tensor(3.0)
    taps = (batch["pixel_values"],)
    encoded = Encoded({"image": torch.zeros(IMAGES, 3)}, scale, None, torch.zeros(0), (), taps)
    nothing: Any = None
    loss, right = RegionPointing().part(model, encoded, batch, nothing, 0)  # type: ignore[arg-type]
    expected, told = 0.0, 0
    for place, slot in batch["region_attention_mask"].any(-1).nonzero().tolist():
        left, top, end, bottom = (CELLS * batch["region_boxes"][place, slot]).tolist()
        chance = (scale * model.cell_embeds(taps)[place] @ batch["region_input_ids"][place, slot].float()).flatten()
        chance = chance.double().softmax(0).view(CELLS, CELLS)
        inside = torch.zeros(CELLS, CELLS)
        for y in range(CELLS):
            for x in range(CELLS):
                width, height = min(end, x + 1) - max(left, x), min(bottom, y + 1) - max(top, y)
                inside[y, x] = max(0, width) * max(0, height)
        expected -= (chance * inside).sum().log().item()
        told += int(inside.flatten()[chance.argmax()] > 0.5)
    assert (loss.item(), right.item()) == (pytest.approx(expected, rel=1e-4), told)


def test_ties_and_nan_count_against_the_model() -> None:
    heat, box = torch.zeros(4, 2, 2), torch.tensor([[0.0, 0.0, 0.4, 0.4]]).expand(4, -1)
    heat[1, 0, 0] = 1.0
    heat[2, 0, 0] = torch.nan
    heat[3, 1, 1] = torch.nan
    assert hits(heat, box).tolist() == [False, True, False, False]
    everywhere, nowhere = torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([[0.4, 0.4, 0.6, 0.6]])
    assert hits(heat[:1], everywhere).item()
    assert not hits(heat[1:2], nowhere).item()


def test_without_regions_there_are_no_metrics() -> None:
    blank = [{**batch, "region_attention_mask": 0 * batch["region_attention_mask"]} for batch in batches(4)]
    assert PointingEvaluator()(GridModel(), blank, ACCELERATOR) == {}  # type: ignore[arg-type]


def test_pointing_is_measured_with_retrieval() -> None:
    pointing: Any = lambda *_: {"pointing_accuracy": 1.0}  # noqa: E731
    measure = in_turn(lambda *_: {"recall": 0.5}, pointing)
    assert measure(GridModel(), [], ACCELERATOR) == {"recall": 0.5, "pointing_accuracy": 1.0}  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [{"recall": 0.4}, {"own": "good"}, {"own": None}])
def test_a_metric_is_a_number_and_has_one_source(value: dict[str, Any]) -> None:
    measure = in_turn(lambda *_: {"recall": 0.5}, lambda *_: value)
    with pytest.raises(ValueError, match=next(iter(value))):
        measure(GridModel(), [], ACCELERATOR)  # type: ignore[arg-type]
