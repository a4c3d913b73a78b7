"""Measure moments: finding the span of a phrase in a clip or a sound.

The model's cells along time have a cosine each with a phrase. Their softmax, at the model's temperature, is the profile of the
phrase over time; the box function that is nearest to it by least squares is the span that is found: no threshold and no parameter.
Its overlap with the true span is their intersection over union (IoU). Spans are measured in shares of the window of time that
the model is shown, the middle of a longer medium, which leaves the IoU what it is in seconds. What stands beside every figure:

    _chance   the span of another phrase of the split in place of the one found: what the lengths of spans tell
    _fixed    the one span for all phrases that is best on this very split: no answer that ignores phrase and medium beats it

The interval of 95 % is one over media, as of recalls. Ties and NaN count against the model.

Shape letters: R phrases of a batch, N of the split, O other spans, T cells along time, E embedding width.
"""

from collections.abc import Callable, Iterable

import datasets
import torch
from accelerate import Accelerator
from torch import Tensor

from mm_utils import distributed
from mm_utils.data.media.medium import kind_of
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.grounding.pointing import grounded, mean_with_interval
from mm_utils.objectives.grounding.regions import RegionReader
from mm_utils.objectives.terms import Evaluator

MOST_OTHERS = 500  # spans of other phrases that each one is compared with
GRID = 40  # steps of the best fixed span

MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "moment_iou0.5": lambda overlap: (overlap >= 0.5).double(),
    "moment_iou0.7": lambda overlap: (overlap >= 0.7).double(),
    "moment_miou": lambda overlap: overlap,
}
"""What is averaged over the phrases, as a function of their IoU."""


class MomentEvaluator(Evaluator):
    """Measure moments; all ranks get the same metrics."""

    readers = (RegionReader(),)

    @torch.no_grad()
    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Return the metrics of `moment_metrics` for batches with moments."""
        device = accelerator.device
        if model.region_head is None:  # it was not trained to find moments
            return {}
        rows = [torch.empty(0, dtype=torch.long, device=device)]
        columns = [torch.empty(0, 4, dtype=torch.double, device=device)]
        scale = distributed.full_tensor(model.logit_scale.detach()).float().exp()
        for batch, moments, count, cells_bhTE, phrase_RE in grounded(model, loader, accelerator, "Moments"):
            cosine_R1T = torch.einsum("re,rhte->rht", phrase_RE, cells_bhTE[moments.image])
            profile_RT = (scale * cosine_R1T[:, 0]).softmax(1)
            true_R2, found_R2 = moments.boxes[:, ::2].double(), fit_span(profile_RT).double()
            rows.append(batch["rows"][moments.image][:count])
            columns.append(torch.cat([true_R2, found_R2], 1)[:count])
        sizes = distributed.gather_sizes(sum(map(len, rows)), device)
        return moment_metrics(
            distributed.gather(torch.cat(rows), sizes), distributed.gather(torch.cat(columns), sizes)
        )


def of_split(rows: datasets.Dataset) -> MomentEvaluator | None:
    """Return what measures a trained model on a split with moments."""
    has_moments = kind_of(rows.features) != "image" and "moments" in rows.column_names
    return MomentEvaluator() if has_moments else None


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
    may_be = (length > 0) & ((length < cells) | (cells == 1))
    best_R = score.masked_fill(~may_be, -1.0).flatten(1).argmax(1)
    found_R2 = torch.stack([best_R // (cells + 1), best_R % (cells + 1)], 1) / cells
    is_told = profile_RT.isfinite().all(1) & ((profile_RT.amax(1) > profile_RT.amin(1)) | (cells == 1))
    return found_R2.where(is_told[:, None], 0.0)


def overlaps(one: Tensor, other: Tensor) -> Tensor:
    """Return the intersection over union of spans `[..., 2]`; 0 for an empty one."""
    shared = (torch.minimum(one[..., 1], other[..., 1]) - torch.maximum(one[..., 0], other[..., 0])).clamp(min=0)
    lengths = (one[..., 1] - one[..., 0]) + (other[..., 1] - other[..., 0])
    return shared / (lengths - shared).clamp(min=1e-9)


def moment_metrics(row_N: Tensor, columns_N4: Tensor) -> dict[str, float]:
    """Return `MEASURES` with intervals; without moments, nothing.

    Args:
        row_N: the medium of each phrase.
        columns_N4: start and end of the true span, and of the one found.
    """
    if not len(row_N):
        return {}
    true_N2, found_N2 = columns_N4[:, :2], columns_N4[:, 2:]
    others, fixed = _by_other_spans(true_N2), _by_fixed_span(true_N2)
    metrics: dict[str, float] = {}
    overlap_N = overlaps(found_N2, true_N2)
    for name, measure in MEASURES.items():
        metrics |= mean_with_interval(name, measure(overlap_N), row_N)
        metrics |= {f"{name}_chance": others[name], f"{name}_fixed": fixed[name]}
    return {**metrics, "moment_phrases": len(row_N)}


def _by_other_spans(true_N2: Tensor) -> dict[str, float]:
    """Return each measure's mean over pairs of other phrases, at most `MOST_OTHERS` of them."""
    count = len(true_N2)
    other_O = torch.arange(0, count, -(-count // MOST_OTHERS), device=true_N2.device)
    is_other_NO = torch.arange(count, device=true_N2.device)[:, None] != other_O
    overlap = overlaps(true_N2[:, None], true_N2[other_O])[is_other_NO]
    return {name: measure(overlap).mean().item() if len(overlap) else 0.0 for name, measure in MEASURES.items()}


def _by_fixed_span(true_N2: Tensor) -> dict[str, float]:
    """Return each measure's best mean by one span for all, on a grid of `GRID` steps."""
    best, ends = dict.fromkeys(MEASURES, 0.0), torch.arange(1, GRID + 1, dtype=torch.double, device=true_N2.device)
    for start in range(GRID):
        spans = torch.stack([torch.full_like(ends[start:], start), ends[start:]], 1) / GRID
        overlap = overlaps(true_N2[:, None], spans)
        for name, measure in MEASURES.items():
            best[name] = max(best[name], measure(overlap).mean(0).max().item())
    return best
