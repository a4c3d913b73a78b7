"""Measure grounding: finding a phrase in its image, or in the time of its clip or sound.

Pointing (the pointing game, arXiv 1608.00507): the model points at the cell of the image's grid whose embedding has the highest
cosine with the phrase. It is a hit if the cell's centre lies in the phrase's box. Chance is the mean share of the image that
boxes cover.

Moments: the softmax of the cosines of cells along time, at the model's temperature, is the profile of the phrase over time; the box
function that is nearest to it by least squares is the span that is found: no threshold and no parameter. Its overlap with the true
span is their intersection over union (IoU). Spans are measured in shares of the window of time that the model is shown, the
middle of a longer medium, which leaves the IoU what it is in seconds. Beside every figure stands `_fixed`, that of the one span
for all phrases that is best on this very split: no answer that ignores phrase and medium beats it.

Intervals of 95 % are over media, as of recalls. Ties and NaN count against the model.

Shape letters: R phrases of a batch, N of the split, h x w cells, T cells along time, E embedding width.
"""

from collections.abc import Callable, Iterable

import datasets
import torch
from accelerate import Accelerator
from torch import Tensor

from mm_utils import distributed
from mm_utils.data.media.medium import kind_of
from mm_utils.evaluation.metrics import mean_interval
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.grounding.regions import RegionReader, regions_of
from mm_utils.objectives.terms import Evaluator
from mm_utils.sharding import full_tensor

GRID = 40  # steps of the best fixed span

MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "moment_iou0.5": lambda overlap: (overlap >= 0.5).double(),
    "moment_iou0.7": lambda overlap: (overlap >= 0.7).double(),
    "moment_miou": lambda overlap: overlap,
}
"""What is averaged over the phrases, as a function of their IoU."""


class PointingEvaluator(Evaluator):
    """Measure pointing in images; all ranks get the same metrics."""

    readers = (RegionReader(),)
    title = "Pointing"
    width = 2

    @torch.no_grad()
    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Return the metrics of batches with regions; without a region, or a head that was trained on them, nothing."""
        if model.region_head is None:
            return {}
        rows = [torch.empty(0, dtype=torch.long, device=accelerator.device)]
        columns = [torch.empty(0, self.width, dtype=torch.double, device=accelerator.device)]
        for batch in distributed.progress(loader, self.title):
            if not len(batch["rows"]):
                continue
            regions, count = regions_of(batch)
            with accelerator.autocast():
                _, taps = model.vision_features(batch["pixel_values"], with_taps=True)
                cells_bhwE = model.cell_embeds(taps).float()
                phrase_RE = model.encode_text(regions.input_ids, regions.attention_mask)[0].float()
            cosine_Rhw = torch.einsum("re,rhwe->rhw", phrase_RE, cells_bhwE[regions.image])
            rows.append(batch["rows"][regions.image][:count])
            columns.append(self.judge(model, cosine_Rhw, regions.boxes)[:count])
        sizes = distributed.gather_sizes(sum(map(len, rows)), accelerator.device)
        row_N = distributed.gather(torch.cat(rows), sizes)
        column_NC = distributed.gather(torch.cat(columns), sizes)
        return self.metrics(row_N, column_NC) if len(row_N) else {}

    def judge(self, model: FusionDualEncoderModel, cosine_Rhw: Tensor, boxes: Tensor) -> Tensor:
        """Return whether each phrase hits, and the area of its box, `[R, 2]`."""
        return torch.stack([hits(cosine_Rhw, boxes).double(), (boxes[:, 2:] - boxes[:, :2]).prod(1).double()], 1)

    def metrics(self, row_N: Tensor, column_NC: Tensor) -> dict[str, float]:
        """Return `pointing_accuracy`, its interval (`_low`, `_high`), and `pointing_chance`."""
        accuracy = _mean_with_interval("pointing_accuracy", column_NC[:, 0], row_N)
        return {**accuracy, "pointing_chance": column_NC[:, 1].mean().item()}


class MomentEvaluator(PointingEvaluator):
    """Measure moments of clips and sounds."""

    title = "Moments"
    width = 4

    def judge(self, model: FusionDualEncoderModel, cosine_Rhw: Tensor, boxes: Tensor) -> Tensor:
        """Return the true span of each phrase and the one found, `[R, 4]`."""
        scale = full_tensor(model.logit_scale.detach()).float().exp()
        found_R2 = fit_span((scale * cosine_Rhw[:, 0]).softmax(1))
        return torch.cat([boxes[:, ::2].double(), found_R2.double()], 1)

    def metrics(self, row_N: Tensor, column_NC: Tensor) -> dict[str, float]:
        """Return `MEASURES` with intervals and what stands beside them."""
        true_N2 = column_NC[:, :2]
        metrics = dict[str, float]()
        overlap_N = overlaps(column_NC[:, 2:], true_N2)
        # 820 spans: 0 to 1/40, 0 to 2/40, ..., 39/40 to 1
        spans = torch.combinations(torch.arange(GRID + 1.0, dtype=torch.double, device=true_N2.device)) / GRID
        fixed = [overlaps(true_N2, span) for span in spans]
        for name, measure in MEASURES.items():
            metrics |= _mean_with_interval(name, measure(overlap_N), row_N)
            metrics[f"{name}_fixed"] = max(measure(overlap_by_fixed).mean().item() for overlap_by_fixed in fixed)
        return {**metrics, "moment_phrases": len(true_N2)}


def of_split(rows: datasets.Dataset) -> MomentEvaluator | None:
    """Return what measures a trained model on a split with moments."""
    has_moments = kind_of(rows.features) != "image" and "moments" in rows.column_names
    return MomentEvaluator() if has_moments else None


def hits(heat_Rhw: Tensor, boxes: Tensor) -> Tensor:
    """Return whether the centre of the highest cell lies in the box, bool `[R]`."""
    height, width = heat_Rhw.shape[1:]
    down = (torch.arange(height, device=boxes.device) + 0.5) / height
    across = (torch.arange(width, device=boxes.device) + 0.5) / width
    in_rows = (boxes[:, 1, None] <= down) & (down <= boxes[:, 3, None])
    in_columns = (boxes[:, 0, None] <= across) & (across <= boxes[:, 2, None])
    inside_Rn = (in_rows[:, :, None] & in_columns[:, None]).flatten(1)
    heat_Rn = heat_Rhw.flatten(1)
    best = heat_Rn.masked_fill(~inside_Rn, -torch.inf).amax(1)
    rival = heat_Rn.masked_fill(inside_Rn, -torch.inf).amax(1)
    return best > rival  # not argmax, which would give a tie to the first cell


def fit_span(profile_RT: Tensor) -> Tensor:
    """Return the span of cells nearest to each profile, `[R, 2]`, in shares of the window.

    Among functions that are one constant within a span and a lower one outside, it has the least squared distance: it maximises
    (sum of the centred profile within)^2 / (n (1 - n / T)) for n cells. A profile that is flat, or has NaN, has the empty span 0
    to 0.
    """
    cells = profile_RT.shape[1]
    centred_RT = (profile_RT - profile_RT.mean(1, keepdim=True)).double()
    sums = torch.cat([centred_RT.new_zeros(len(centred_RT), 1), centred_RT.cumsum(1)], 1)
    place = torch.arange(cells + 1, device=sums.device)
    length = place - place[:, None]
    rise = (sums[:, None, :] - sums[:, :, None]).clamp(min=0)  # [R, start, end]
    score = rise**2 / (length * (1 - length / cells)).clamp(min=1e-6)
    # all cells are no span, as nothing is left outside; but of a single cell, nothing else can be
    may_be = (length > 0) & ((length < cells) | (cells == 1))
    # The place in a flat [start, end] of (T + 1)^2 entries
    best_R = score.masked_fill(~may_be, -1.0).flatten(1).argmax(1)
    found_R2 = torch.stack([best_R // (cells + 1), best_R % (cells + 1)], 1) / cells
    is_told = profile_RT.isfinite().all(1) & ((profile_RT.amax(1) > profile_RT.amin(1)) | (cells == 1))
    return found_R2.where(is_told[:, None], 0.0)


def overlaps(one: Tensor, other: Tensor) -> Tensor:
    """Return the intersection over union of spans `[..., 2]`; 0 for an empty one."""
    shared = (torch.minimum(one[..., 1], other[..., 1]) - torch.maximum(one[..., 0], other[..., 0])).clamp(min=0)
    lengths = (one[..., 1] - one[..., 0]) + (other[..., 1] - other[..., 0])
    return shared / (lengths - shared).clamp(min=1e-9)


def _mean_with_interval(name: str, value_N: Tensor, group_N: Tensor) -> dict[str, float]:
    """Return a mean of shares as `name`, its interval's ends, in 0 to 1, as `_low` and `_high`."""
    mean, half = mean_interval(value_N, group_N)
    return {name: mean, f"{name}_low": max(0.0, mean - half), f"{name}_high": min(1.0, mean + half)}
