"""Interpolate between the weights before and after training (WiSE-FT, arXiv 2109.01903).

Training on few data often loses what a pretrained model knew; interpolated weights keep some of both, at no cost when the
model is used. Weights that are new have no values before, so they are never interpolated.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from mm_utils import distributed
from mm_utils.evaluation.retrieval import Evaluate
from mm_utils.files import write_atomic
from mm_utils.model.adapt import merged
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel

logger = logging.getLogger(__name__)

TENTHS = tuple(step / 10 for step in range(11))
QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)


def weights_of_start(model: FusionDualEncoderModel, added: Collection[str] = ()) -> dict[str, Tensor]:
    """Return a copy of the weights to interpolate, with adapters merged.

    They are all but a classifier's, a head's that never was trained, and those that terms have added for this run.
    """
    new = ("classifier.", *added) if model.voices else ("classifier.", "fusion.", *added)
    weights = merged(model.state_dict())
    return {name: value.detach().clone() for name, value in weights.items() if not name.startswith(new)}


def interpolate(start: Mapping[str, Tensor], end: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """Return start + alpha (end - start); integers and weights of `end` alone stay."""
    return {
        name: torch.lerp(start[name].to(value), value, alpha)
        if name in start and value.is_floating_point()
        else value.clone()
        for name, value in end.items()
    }


def choose_between(
    start: Mapping[str, Tensor],
    model: FusionDualEncoderModel,
    evaluate: Evaluate,
    loader: Iterable,
    accelerator: Accelerator,
    name: str,
    folder: Path,
    alphas: Sequence[float] = QUARTERS,
    save: Callable[[Path], Any] | None = None,
    greater_is_better: bool = True,
) -> dict[str, float]:
    """Measure weights between `start` and those in `model`; load and save the chosen ones.

    Writes the model and `wise_ft.json`. Called on all ranks, which all get the metrics of the chosen weights,
    with `wise_ft_alpha`.

    Args:
        start: the weights before training, of `weights_of_start`.
        name: the metric of `evaluate` that chooses, after re-ranking where that is measured; among equals, the highest alpha wins.
        alphas: the places to measure.
        greater_is_better: a higher value of it is better.
        save: writes the model, on the main process; default: `model.save_pretrained`.
    """
    end = {name: value.detach().clone() for name, value in model.state_dict().items()}
    measured: dict[float, dict[str, float]] = {}
    for alpha in alphas:
        model.load_state_dict(interpolate(start, end, alpha))
        measured[alpha] = evaluate(model, loader, accelerator)
        metric = f"rerank_{name}" if f"rerank_{name}" in measured[alpha] else name
        logger.info("alpha %.2f: %s %.4f", alpha, metric, measured[alpha][metric])
    sign = 1 if greater_is_better else -1
    chosen = max(alphas, key=lambda alpha: (sign * measured[alpha][metric], alpha))
    model.load_state_dict(interpolate(start, end, chosen))
    evaluate(model, loader, accelerator)  # so that the evaluator holds the predictions of the chosen weights

    def write() -> None:
        (save or model.save_pretrained)(folder)
        rows = [{"alpha": alpha, **metrics} for alpha, metrics in measured.items()]
        report = {"metric": metric, "saved_alpha": chosen, "measured": rows}
        write_atomic(folder / "wise_ft.json", json.dumps(report, indent=2) + "\n")

    distributed.on_first(write)
    return {**measured[chosen], "wise_ft_alpha": chosen}
