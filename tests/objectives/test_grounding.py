"""Pointing and spans of phrases against loops and brute force, on any number of processes; the losses of regions and moments."""

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from mm_utils import distributed
from mm_utils.objectives.grounding.evaluation import MomentEvaluator, PointingEvaluator, hits
from mm_utils.objectives.grounding.terms import MomentCovering, RegionPointing
from mm_utils.objectives.terms import Encoded, RowPlan
from tests.kit.processes import run_on_ranks
from tests.kit.truthful_model import ACCELERATOR

IMAGES = 11
SLOTS = 3
CELLS = 4


class GridModel:
    """The pixels of an image are the embeddings of its cells, and the ids of a phrase are its embedding."""

    region_head: Any = True

    def vision_features(self, pixel_values: Tensor, with_taps: bool) -> tuple[None, tuple[Tensor]]:
        return None, (pixel_values,)

    def cell_embeds(self, taps: tuple[Tensor]) -> Tensor:
        return taps[0].permute(0, 2, 3, 1)

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, None]:
        return torch.nn.functional.pad(input_ids.float(), (0, 3 - input_ids.shape[1])), None


def whole_batch() -> dict[str, Any]:
    """Images of none to three regions; the fourth cannot be decoded, so it is not a row."""
    generator = torch.Generator().manual_seed(4)
    counts = torch.randint(0, SLOTS + 1, (IMAGES,), generator=generator)
    mask = (torch.arange(SLOTS) < counts[:, None]).long()[..., None].expand(-1, -1, 3)
    boxes = torch.rand(IMAGES, SLOTS, 2, 2, generator=generator).sort(2).values.flatten(2)
    return {
        "pixel_values": torch.randn(IMAGES, 3, CELLS, CELLS, generator=generator),
        "rows": torch.tensor([row for row in range(IMAGES + 1) if row != 3]),
        "region_boxes": boxes,
        "region_input_ids": torch.randint(-9, 9, (IMAGES, SLOTS, 3), generator=generator) * mask,
        "region_attention_mask": mask,
        "region_keys": torch.arange(IMAGES * SLOTS).view(IMAGES, SLOTS),
    }


def batches(size: int, rank: int = 0, world: int = 1) -> list[dict[str, Any]]:
    whole = whole_batch()
    mine = distributed.share(IMAGES, rank, world)
    starts = range(mine.start, mine.stop, size)
    parts = [slice(low, min(low + size, mine.stop)) for low in starts]
    found = []
    for part in (*parts, slice(0, 0)):
        found.append({name: value[part] for name, value in whole.items()})
    return found


# -- regions --
def regions_by_hand() -> tuple[list[tuple[int, int, bool]], float]:
    """(row, key, hit) of every region, and the mean area of their boxes."""
    whole = whole_batch()
    found = []
    areas = []
    for place in range(IMAGES):
        for slot in range(SLOTS):
            if not whole["region_attention_mask"][place, slot].any():
                continue
            phrase = whole["region_input_ids"][place, slot].float()
            left, top, right, bottom = whole["region_boxes"][place, slot].tolist()
            cells = [(x, y) for x in range(CELLS) for y in range(CELLS)]
            best = max(cells, key=lambda cell: float(whole["pixel_values"][place, :, cell[1], cell[0]] @ phrase))
            x = (best[0] + 0.5) / CELLS
            y = (best[1] + 0.5) / CELLS
            hit = left <= x <= right and top <= y <= bottom
            found.append((int(whole["rows"][place]), int(whole["region_keys"][place, slot]), hit))
            areas.append((right - left) * (bottom - top))
    return found, sum(areas) / len(areas)


def test_pointing_equals_a_loop() -> None:
    expected, chance = regions_by_hand()
    evaluator = PointingEvaluator()
    metrics = evaluator(GridModel(), batches(4), ACCELERATOR)  # type: ignore[arg-type]
    accuracy = sum(hit for _, _, hit in expected) / len(expected)
    assert 0 < accuracy < 1
    assert metrics["pointing_accuracy"] == pytest.approx(accuracy)
    assert metrics["pointing_chance"] == pytest.approx(chance)
    assert 0 <= metrics["pointing_accuracy_low"] < accuracy < metrics["pointing_accuracy_high"] <= 1


def test_ties_and_nan_count_against_the_model() -> None:
    heat = torch.zeros(4, 2, 2)
    box = torch.tensor([[0.0, 0.0, 0.4, 0.4]]).expand(4, -1)
    heat[1, 0, 0] = 1.0
    heat[2, 0, 0] = torch.nan
    heat[3, 1, 1] = torch.nan
    assert hits(heat, box).tolist() == [False, True, False, False]
    everywhere = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    nowhere = torch.tensor([[0.4, 0.4, 0.6, 0.6]])
    assert hits(heat[:1], everywhere).item()
    assert not hits(heat[1:2], nowhere).item()


# -- moments --
class TimeModel(GridModel):
    """The first row of the pixels are the embeddings of its cells along time."""

    logit_scale = torch.tensor(0.5)

    def cell_embeds(self, taps: tuple[Tensor]) -> Tensor:
        return super().cell_embeds(taps)[:, :1]


def in_time(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch whose boxes are as high as the window."""
    boxes = batch["region_boxes"].clone()
    boxes[..., 1] = 0
    boxes[..., 3] = 1
    return {**batch, "region_boxes": boxes}


def iou(one: list[float], other: list[float]) -> float:
    shared = max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
    return shared / (one[1] - one[0] + other[1] - other[0] - shared)


def distance(profile: list[float], start: int, end: int) -> float:
    """The squared distance of a box, whose heights inside and outside are means; none that is lower inside is a box."""
    inside = profile[start:end]
    outside = profile[:start] + profile[end:]
    if not outside or sum(inside) / len(inside) < sum(outside) / len(outside):
        return math.inf
    return round(sum((value - sum(part) / len(part)) ** 2 for part in (inside, outside) for value in part), 9)


def nearest_box(profile: list[float]) -> tuple[int, int]:
    ends = range(1, len(profile) + 1)
    return min(((start, end) for end in ends for start in range(end)), key=lambda box: (distance(profile, *box), box))


def moments_by_hand() -> list[tuple[int, list[float], list[float]]]:
    """(row, true span, span found) of every moment."""
    whole = in_time(whole_batch())
    found = []
    for place, slot in whole["region_attention_mask"].any(-1).nonzero().tolist():
        phrase = whole["region_input_ids"][place, slot].float()
        logits = TimeModel.logit_scale.exp() * (phrase @ whole["pixel_values"][place, :, 0])
        span = [edge / CELLS for edge in nearest_box(logits.softmax(0).tolist())]
        found.append((int(whole["rows"][place]), whole["region_boxes"][place, slot, ::2].tolist(), span))
    return found


def in_space_and_time(size: int) -> dict[str, float]:
    loader = map(in_time, batches(size, distributed.rank(), distributed.world_size()))
    found = PointingEvaluator()(GridModel(), batches(size, distributed.rank(), distributed.world_size()), ACCELERATOR)  # type: ignore[arg-type]
    return found | MomentEvaluator()(TimeModel(), loader, ACCELERATOR)  # type: ignore[arg-type]


def test_metrics_equal_a_loop() -> None:
    expected = moments_by_hand()
    evaluator = MomentEvaluator()
    metrics = evaluator(TimeModel(), map(in_time, batches(4)), ACCELERATOR)  # type: ignore[arg-type]
    values = [iou(true, found) for _, true, found in expected]
    assert metrics["moment_miou"] == pytest.approx(sum(values) / len(values), rel=1e-5)
    for level in (0.5, 0.7):
        share = sum(value >= level for value in values) / len(values)
        low = metrics[f"moment_iou{level}_low"]
        high = metrics[f"moment_iou{level}_high"]
        assert metrics[f"moment_iou{level}"] == pytest.approx(share)
        assert 0 <= low <= share <= high <= 1
    spans = [true for _, true, _ in expected]
    hits = []
    for start, end in combinations(range(41), 2):
        hits.append(sum(iou([start / 40, end / 40], span) >= 0.5 for span in spans))
    assert metrics["moment_iou0.5_fixed"] == pytest.approx(max(hits) / len(spans))
    assert metrics["moment_phrases"] == len(expected)


def test_the_number_of_processes_changes_nothing() -> None:
    """Neither of moments nor of regions."""
    alone = in_space_and_time(4)
    for found in run_on_ranks(2, in_space_and_time, 2):
        assert found == pytest.approx(alone)


def test_without_phrases_there_are_no_metrics() -> None:
    blank = [{**batch, "region_attention_mask": 0 * batch["region_attention_mask"]} for batch in batches(4)]
    assert MomentEvaluator()(TimeModel(), blank, ACCELERATOR) == {}  # type: ignore[arg-type]
    assert PointingEvaluator()(GridModel(), blank, ACCELERATOR) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize("term", [RegionPointing(), MomentCovering()])
def test_the_loss_is_that_of_a_loop_over_the_cells(term: RegionPointing) -> None:
    """Of each cell, which share of its points lies in the box, and how likely it is; of moments, half is covering."""
    is_moment = isinstance(term, MomentCovering)
    batch, model = (in_time(whole_batch()), TimeModel()) if is_moment else (whole_batch(), GridModel())
    taps = (batch["pixel_values"],)
    expected = 0.0
    told = 0
    encoded = Encoded({"image": torch.zeros(IMAGES, 3)}, torch.tensor(3.0), None, torch.zeros(0), (), taps)
    sums = term.rows(model, encoded, batch, RowPlan(torch.tensor(1)))  # type: ignore[arg-type]
    cells_bhwE = model.cell_embeds(taps).double()
    rows = cells_bhwE.shape[1]
    for place, slot in batch["region_attention_mask"].any(-1).nonzero().tolist():
        left, top, end, bottom = batch["region_boxes"][place, slot].double().tolist()
        phrase = batch["region_input_ids"][place, slot].double()
        inside = torch.zeros(rows, CELLS, dtype=torch.double)
        chance = (3 * cells_bhwE[place] @ phrase).flatten().softmax(0)
        for y in range(rows):
            for x in range(CELLS):
                width = min(CELLS * end, x + 1) - max(CELLS * left, x)
                height = min(rows * bottom, y + 1) - max(rows * top, y)
                inside[y, x] = max(0.0, width) * max(0.0, height)
        share = inside.flatten()
        pointing = -(chance * share).sum().log().item()
        covering = -(share * chance.log()).sum().item() / share.sum().item()
        expected += (pointing + covering) / 2 if is_moment else pointing
        told += int(share[chance.argmax()] > 0.5)
    assert (sums.loss.item(), sums.right.item()) == (pytest.approx(expected, rel=1e-4), told)
