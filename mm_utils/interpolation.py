"""Between the weights that fine-tuning began with and those it ended with (WiSE-FT, arXiv 2109.01903).

What a model knew before is often lost to what it is fine-tuned on; weights in between keep some of both, and are no dearer
to run. The classifier is new and has no weights before, so it is that of the end throughout.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch import Tensor

from mm_utils.arguments import arg
from mm_utils.metrics import Evaluate
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderForClassification
from mm_utils.reporting import BLUE, INK, MUTED, ORANGE, new_figure, small_legend, style_axes

logger = logging.getLogger(__name__)

ALPHAS = tuple(step / 10 for step in range(11))
_CLASSIFIER = "classifier."


@dataclass
class InterpolationArguments:
    """Whether weights between the start and the end are tried."""

    wise_ft: bool = arg(
        False, "Measure weights between the start (alpha 0) and the end (1) on validation, and save the best of them."
    )
    wise_ft_alpha: float | None = arg(
        None, "Save the weights of this alpha, whatever is best on validation: 0.5 serves data that has shifted."
    )

    def __post_init__(self) -> None:
        if self.wise_ft_alpha is not None and not 0 <= self.wise_ft_alpha <= 1:
            raise ValueError(f"--wise_ft_alpha is {self.wise_ft_alpha}; give a number in [0, 1].")
        if self.wise_ft_alpha is not None and not self.wise_ft:
            raise ValueError(f"--wise_ft_alpha is {self.wise_ft_alpha}; it goes with --wise_ft. Give both.")


def interpolate(start: Mapping[str, Tensor], end: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """(1 - alpha) start + alpha end, of all that is both and has fractions; the rest, and the classifier, of the end."""
    return {
        name: value.detach().clone()
        if name.startswith(_CLASSIFIER) or name not in start or not value.is_floating_point()
        else torch.lerp(start[name].to(value), value.detach(), alpha)
        for name, value in end.items()
    }


def choose_between(
    args: InterpolationArguments,
    start: Mapping[str, Tensor],
    model: FusionDualEncoderForClassification,
    evaluate: Evaluate,
    loader: Iterable,
    accelerator: Accelerator,
    metric: str,
    folder: Path,
) -> dict[str, float]:
    """Measure `model`, which holds the weights of the end, with others in between; leave the chosen ones in it and in `folder`.

    Writes `wise_ft.json` and `wise_ft.png`. All ranks call it, and get the figures of the chosen weights, `alpha` included.

    Args:
        start: the state dict at the start.
        metric: of `evaluate`, that decides; of equally good weights those nearest to the end.
    """
    end = {name: value.detach().clone() for name, value in model.state_dict().items()}
    alphas = sorted({*ALPHAS, *([args.wise_ft_alpha] if args.wise_ft_alpha is not None else [])})
    measured: dict[float, dict[str, float]] = {}
    for alpha in alphas:
        model.load_state_dict(interpolate(start, end, alpha))
        measured[alpha] = evaluate(model, loader, accelerator)
        logger.info("alpha %.2f: %s %.4f", alpha, metric, measured[alpha][metric])
    best = max(alphas, key=lambda alpha: (measured[alpha][metric], alpha))
    chosen = best if args.wise_ft_alpha is None else args.wise_ft_alpha
    model.load_state_dict(interpolate(start, end, chosen))
    evaluate(model, loader, accelerator)  # so that the evaluator's predictions are those of the chosen weights
    if accelerator.is_main_process:
        model.save_pretrained(folder)
        rows = [{"alpha": alpha, **figures} for alpha, figures in measured.items()]
        report = {"metric": metric, "best_alpha": best, "saved_alpha": chosen, "measured": rows}
        (folder / "wise_ft.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        draw_interpolation({alpha: figures[metric] for alpha, figures in measured.items()}, chosen, metric, folder)
    accelerator.wait_for_everyone()
    return {**measured[chosen], "wise_ft_alpha": chosen}


def draw_interpolation(values: Mapping[float, float], chosen: float, metric: str, folder: Path) -> None:
    """Draw `wise_ft.png`: the metric over alpha, the saved weights marked."""
    figure = new_figure(5.2, 3.4)
    ax = figure.add_subplot()
    style_axes(ax)
    ax.plot(list(values), list(values.values()), color=BLUE, linewidth=1.8, marker="o", markersize=3.5)
    ax.plot([chosen], [values[chosen]], color=ORANGE, marker="o", markersize=8, linestyle="", label="saved")
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0, the start", "0.25", "0.5", "0.75", "1, the end"])
    ax.set_xlabel("alpha", fontsize=8, color=MUTED)
    title = metric.replace("_", " ").capitalize()
    ax.set_title(f"{title} between start and end", loc="left", fontsize=10, fontweight="bold", color=INK)
    small_legend(ax, loc="best")
    FigureCanvasAgg(figure).print_png(str(folder / "wise_ft.png"))
