"""The closed-form start of projections, and interpolation between the start and the end, as callbacks of a run."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from mm_utils.arguments import Parsed, arg
from mm_utils.checkpointing.state import write_model
from mm_utils.data.training_data import TrainingData
from mm_utils.training.callbacks import RunCallback

IMAGES = 10_000  # of training, from which the closed form is computed
FEWEST_IMAGES = 8  # of the closed form's cross-validation in four parts


class ClosedFormStart(RunCallback):
    """Start new projections between two pretrained towers from closed form, before the first step."""

    scripts = ("pretrain",)
    flag = "text_model_name_or_path"

    def __init__(self, vision_name: str | None):
        self.vision_name = vision_name

    @classmethod
    def attach(cls, given: Parsed) -> "ClosedFormStart | None":
        """Return the callback where new projections join two pretrained towers."""
        vision, text = (given[f"{tower}_model_name_or_path"] for tower in ("vision", "text"))
        joins = bool(text and (vision or given["model_name_or_path"]))
        return cls(vision) if joins else None

    def has_baseline(self, data: TrainingData) -> bool:
        """Return whether there are rows enough; a stream has none at hand."""
        rows = len(data.splits["train"]) if "train" in data.splits else 0
        return min(rows, IMAGES) >= FEWEST_IMAGES

    def on_start(self, run: Any) -> None:
        """Fit the projections, unless a checkpoint holds them and nothing is compared with the start."""
        from mm_utils.training.starts.projection_start import start_projections

        if run.resume_from is not None and not run.given["wise_ft"]:
            return
        if not self.has_baseline(run.data):
            return
        rows = min(len(run.data.splits["train"]), IMAGES)
        work = partial(start_projections, IMAGES, self.vision_name, run.data, run.model, run.run.accelerator)
        run.timed_pass("the closed form", rows, IMAGES, work)


@dataclass
class InterpolationArguments:
    """Interpolation between the weights before and after training."""

    wise_ft: bool = arg(
        False,
        "Measure weights between the start (alpha 0) and the end (alpha 1) on the validation split, and save the best.",
    )


class WiseFT(RunCallback):
    """Keep the weights of the start, and save the best between them and those of the end."""

    flag = "wise_ft"
    arguments = InterpolationArguments

    @classmethod
    def attach(cls, given: Parsed) -> "WiseFT":
        """Return the callback, where a run starts from a model."""
        joins = given["vision_model_name_or_path"] and given["text_model_name_or_path"]
        closed_form = joins and not given["streaming"]
        if not (given["model_name_or_path"] or closed_form):
            raise ValueError(
                "--wise_ft is set; the run does not start from a model that could be forgotten. Give --model_name_or_path, or "
                "--vision_model_name_or_path and --text_model_name_or_path without --streaming, or drop --wise_ft."
            )
        return cls()

    def on_start(self, run: Any) -> None:
        """Copy the weights; they are measured as alpha 0 at the end."""
        from mm_utils.training.starts.interpolation import QUARTERS, TENTHS, weights_of_start

        self.start = weights_of_start(run.model, run.objective.added)
        self.alphas = QUARTERS if run.run.name == "pretrain" else TENTHS
        run.final_evaluations += len(self.alphas) + 1  # the last, of the chosen weights, leaves their predictions
        run.evaluates_start = False

    def on_finish(self, run: Any) -> None:
        """Measure, choose and save."""
        from mm_utils.training.starts.interpolation import choose_between

        place, accelerator, data = run.run.output_dir, run.run.accelerator, run.data
        run.model = type(run.model).from_pretrained(place).to(accelerator.device).eval()
        retrieves = run.run.name == "pretrain"
        found = choose_between(
            self.start,
            run.model,
            run.evaluate,
            data.evaluation("validation"),
            accelerator,
            run.run.args.metric_for_best_model,
            place,
            self.alphas,
            partial(write_model, model=run.model, processor=data.processor) if retrieves else None,
            run.run.args.greater_is_better,
        )
        run.metrics = {f"eval_{name}": value for name, value in found.items()}
