"""Measure regions: finding a phrase in the image.

Pointing (the pointing game, arXiv 1608.00507): the model points at the cell of the image's grid whose embedding has the highest
cosine with the phrase. It is a hit if the cell's centre lies in the phrase's box. Chance is the mean share of the image that
boxes cover. Ties and NaN count against the model.

Shape letters: R regions of a batch, N of the split, h x w cells, E embedding width.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm

from mm_utils import distributed
from mm_utils.evaluation.metrics import mean_interval
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.grounding.regions import RegionReader, Regions, regions_of
from mm_utils.objectives.terms import Evaluator


class PointingEvaluator(Evaluator):
    """Measure pointing; all ranks get the same metrics."""

    readers = (RegionReader(),)

    @torch.no_grad()
    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Return the metrics of `region_metrics` for batches with regions."""
        device = accelerator.device
        found = [torch.empty(0, 2, dtype=torch.long, device=device)]
        areas = [torch.empty(0, dtype=torch.double, device=device)]
        for batch, regions, count, cells_bhwE, phrase_RE in grounded(model, loader, accelerator, "Pointing"):
            heat_Rhw = torch.einsum("re,rhwe->rhw", phrase_RE, cells_bhwE[regions.image])
            is_hit_R, row_R = hits(heat_Rhw, regions.boxes), batch["rows"][regions.image]
            found.append(torch.stack([row_R, is_hit_R.long()], 1)[:count])
            areas.append((regions.boxes[:, 2:] - regions.boxes[:, :2]).prod(1).double()[:count])
        sizes = distributed.gather_sizes(sum(map(len, found)), device)
        return region_metrics(distributed.gather(torch.cat(found), sizes), distributed.gather(torch.cat(areas), sizes))


def grounded(
    model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator, title: str
) -> Iterator[tuple[dict[str, Any], Regions, int, Tensor, Tensor]]:
    """Yield each batch with rows, its regions, their number, cells `[b, h, w, E]`, phrases `[R, E]`."""
    for batch in tqdm(loader, desc=title, leave=False, disable=not accelerator.is_main_process, delay=2):
        if not len(batch["rows"]):
            continue
        regions, count = regions_of(batch)
        with accelerator.autocast():
            _, taps = model.vision_features(batch["pixel_values"], with_taps=True)
            cells_bhwE = model.cell_embeds(taps).float()
            phrase_RE = model.encode_text(regions.input_ids, regions.attention_mask)[0].float()
        yield batch, regions, count, cells_bhwE, phrase_RE


def region_metrics(found_N2: Tensor, area_N: Tensor) -> dict[str, float]:
    """Return `pointing_accuracy`, its interval (`_low`, `_high`), and `pointing_chance`; without regions, nothing.

    Args:
        found_N2: columns image, is hit.
        area_N: area of each box.
    """
    if not len(found_N2):
        return {}
    row_N, is_hit_N = found_N2.unbind(1)
    return {**mean_with_interval("pointing_accuracy", is_hit_N, row_N), "pointing_chance": area_N.mean().item()}


def hits(heat_Rhw: Tensor, boxes: Tensor) -> Tensor:
    """Return whether the centre of the highest cell lies in the box, bool `[R]`."""
    height, width = heat_Rhw.shape[1:]
    down, across = ((torch.arange(size, device=boxes.device) + 0.5) / size for size in (height, width))
    in_rows = (boxes[:, 1, None] <= down) & (down <= boxes[:, 3, None])
    in_columns = (boxes[:, 0, None] <= across) & (across <= boxes[:, 2, None])
    inside_Rn = (in_rows[:, :, None] & in_columns[:, None]).flatten(1)
    heat_Rn = heat_Rhw.flatten(1)
    best, rival = (heat_Rn.masked_fill(~mask, -torch.inf).amax(1) for mask in (inside_Rn, ~inside_Rn))
    return best > rival


def mean_with_interval(name: str, value_N: Tensor, group_N: Tensor) -> dict[str, float]:
    """Return a mean of shares as `name`, its interval's ends, in 0 to 1, as `_low` and `_high`."""
    mean, half = mean_interval(value_N, group_N)
    return {name: mean, f"{name}_low": max(0.0, mean - half), f"{name}_high": min(1.0, mean + half)}
