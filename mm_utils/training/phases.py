"""The two parts of a run with a fusion head: first its encoders learn, then its head, on encoders that stay as they are.

All that the parts differ in stands here: which steps train what and at which rate, which figure judges an evaluation, whose
weights the head's part begins with, and which weights are saved. A figure that chooses is one of what it chooses: the encoders
are judged by their own recall, heads by the recall after re-ranking. Where both encoders are frozen, or with `--head_share 0`, the
whole run is the head's part. A run without a term of the head has the first part alone.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mm_utils.model.adapt import WeightAverage
from mm_utils.model.modeling_fusion_dual_encoder import is_trained
from mm_utils.objectives.joint import PARTS, Objective
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.optim import OptimizerArguments, schedule

logger = logging.getLogger(__name__)

HEAD_RATE = 2.0  # of the peak rate, in the head's part of a run
_OF_ENCODERS = ("text_to_image_", "image_to_text_")  # how their figures begin; of re-ranking there are the same

Row = Mapping[str, Any]


def head_start(objective: Objective, head_share: float, max_steps: int) -> int:
    """Return the step from which the fusion head is trained: 0 for everything at once, `max_steps` for never."""
    if not objective.pairs_per_image:
        return max_steps
    model = objective.model
    if is_trained(model.vision_model) or is_trained(model.text_model):
        return round((1 - head_share) * max_steps) if head_share else 0
    return 0


@dataclass(frozen=True)
class Choice:
    """The checkpoint that is saved at the end.

    Attributes:
        step, part, figure, value, of: its step, "encoders" or "head", what chose it of how many evaluations, and its value; without
            a figure the last one is chosen.
    """

    step: int
    part: str
    figure: str | None
    value: float | None
    of: int

    def __str__(self) -> str:
        what = "with the fusion head of" if self.part == "head" else "of"
        if self.figure is None:
            return f"Saved is the model {what} step {self.step}, the last one, as no evaluation measured re-ranking."
        best = f"the best of {self.of} evaluations by {self.figure} ({self.value:.4g})"
        return f"Saved is the model {what} step {self.step}, {best}."


class Phases:
    """What each step of a run trains, and what judges it.

    Args:
        objective: the unwrapped objective.
        args, optimizer_args: the run's arguments.
        max_steps: the number of steps of the whole run.

    Attributes:
        head_from: the step from which the head is trained; `max_steps` without a term of the head.
        is_split: True if the encoders are trained before that, and not from there on.
    """

    def __init__(
        self, objective: Objective, args: TrainingArguments, optimizer_args: OptimizerArguments, max_steps: int
    ):
        model = objective.model
        self.args, self.optimizer_args, self.max_steps = args, optimizer_args, max_steps
        self.has_head, self.head_from = (
            objective.pairs_per_image > 0,
            head_start(objective, optimizer_args.head_share, max_steps),
        )
        trains_encoders = is_trained(model.vision_model) or is_trained(model.text_model)
        self.is_split = self.has_head and trains_encoders and optimizer_args.head_share > 0
        self.keeps_encoders = self.has_head and (self.is_split or not trains_encoders)
        self.is_new = any(name.startswith("fusion.") for name in objective.added)
        if self.has_head and not trains_encoders and optimizer_args.head_share:
            logger.info(
                "Both encoders are frozen, so the fusion head is trained from the first step on: --head_share %g plays no part",
                optimizer_args.head_share,
            )

    # -- what a step trains -----------------------------------------------------------------------------------------

    def part(self, step: int) -> str | None:
        """Return which of `mm_utils.objectives.joint.PARTS` a step trains; None for all."""
        return ("head" if step >= self.head_from else "encoders") if self.is_split else None

    def set_rates(self, groups: Sequence[dict[str, Any]], step: int, growth: float) -> None:
        """Set the optimizer's rates: each part has a schedule of its own, the head's at a higher rate.

        Args:
            groups: the optimizer's groups.
            step: the step.
            growth: by what rates grow with the batch.
        """
        of_head = self.is_split and step >= self.head_from
        begin = self.head_from if of_head else 0
        end = self.head_from if self.is_split and not of_head else self.max_steps
        rate = growth * schedule(step - begin, end - begin, self.optimizer_args)
        for group in groups:
            factor = (0.0 if group.get("backbone") else HEAD_RATE) if of_head else 1.0
            group["lr"] = group["peak_lr"] * rate * factor

    # -- what judges an evaluation ----------------------------------------------------------------------------------

    def metric(self, step: int) -> str:
        """Return the figure of what was trained up to a step: encoders, or the head, by what it adds to them."""
        name = self.args.metric_for_best_model
        if not self._in_head(step):
            return name
        return (
            "head_mean_recall"
            if name == "mean_recall"
            else f"rerank_{name}"
            if name.startswith(_OF_ENCODERS)
            else name
        )

    def needs_metric(self, step: int) -> bool:
        """Return whether an evaluation must have `metric`: heads need not be re-ranked with."""
        return not self._in_head(step) or self.metric(step) == self.args.metric_for_best_model

    def evaluates(self, step: int) -> bool:
        """Return whether an evaluation is due on the way, or because the encoders' part ends."""
        every = self.args.eval_steps
        return every > 0 and (step % every == 0 or (self.is_split and step == self.head_from))

    def best_of_part(self, history: Sequence[Row], step: int) -> int | None:
        """Return the best step of the part that a step belongs to, of those in the log; None before its first evaluation."""
        rows = {at: row for at, row in _evaluations(history).items() if self._in_head(at) == self._in_head(step)}
        return next(iter(self._ranked(rows, self.metric(step))), None)

    def best(self, history: Sequence[Row]) -> list[int]:
        """Return the steps in the log whose weights may be saved at the end, the best first.

        Once a head has been trained these are the steps with a trained head: no figure of encoders chooses among heads.
        """
        rows = _evaluations(history)
        return self._ranked(self._with_head(rows) or rows, self._final_metric(rows))

    def best_encoders(self, history: Sequence[Row]) -> list[int]:
        """Return the steps in the log by their encoders alone, the best first."""
        return self._ranked(_evaluations(history), self.args.metric_for_best_model)

    def kept(self, history: Sequence[Row]) -> list[int]:
        """Return the steps whose checkpoints are kept because they are the best."""
        limit = int(self.args.keeps_best)
        encoders = self.best_encoders(history)[:limit] if self.keeps_encoders else []
        return list(dict.fromkeys([*self.best(history)[:limit], *encoders]))

    def choice(self, history: Sequence[Row], step: int) -> Choice:
        """Return what chose a step among those of `best`."""
        rows = _evaluations(history)
        with_head, figure = self._with_head(rows), f"eval_{self._final_metric(rows)}"
        measured = [row for row in (with_head or rows).values() if figure in row]
        value = rows[step].get(figure)
        return Choice(step, "head" if with_head else "encoders", figure if measured else None, value, len(measured))

    def lost_recall(self, history: Sequence[Row], step: int, reranks: bool) -> int | None:
        """Return the step of better encoders than those of `step` are, re-ranked where that is on; None if there is none.

        In the head's part projections go on learning. Where that cost more than the head gains, the earlier ones are put back.
        """
        name = self.args.metric_for_best_model
        if not self.keeps_encoders or not (name == "mean_recall" or name.startswith(_OF_ENCODERS)):
            return None
        rows, found = _evaluations(history), self.best_encoders(history)
        if not found or not self._in_head(step):
            return None
        own = rows[step].get(f"eval_{'rerank_' if reranks else ''}{name}", rows[step][f"eval_{name}"])
        sign = 1 if self.args.greater_is_better else -1
        return found[0] if sign * own < sign * rows[found[0]][f"eval_{name}"] else None

    def _in_head(self, step: int) -> bool:
        return self.has_head and step > self.head_from

    def _with_head(self, rows: Mapping[int, Row]) -> dict[int, Row]:
        """Return the evaluations of a head that was trained, in this run or before it."""
        return {at: row for at, row in rows.items() if self.has_head and (not self.is_new or self._in_head(at))}

    def _final_metric(self, rows: Mapping[int, Row]) -> str:
        return self.metric(self.head_from + 1 if self._with_head(rows) else 0)

    def _ranked(self, rows: Mapping[int, Row], metric: str) -> list[int]:
        """Return steps, the best first: of equal ones the first, of heads the longest trained."""
        sign, name = 1 if self.args.greater_is_better else -1, f"eval_{metric}"
        found = {at: sign * row[name] for at, row in rows.items() if name in row}
        of_head = metric != self.args.metric_for_best_model
        if of_head and not found:
            return sorted(rows, reverse=True)
        return sorted(found, key=lambda at: (-found[at], -at if of_head else at))


@contextmanager
def same_head(model: nn.Module, average: WeightAverage | None) -> Iterator[None]:
    """Put the head's weights back at the end of a `with` block that loads others."""
    names = [name for name, _ in model.named_parameters() if name.startswith(PARTS["head"])]
    places: list[Mapping[str, torch.Tensor]] = [dict(model.named_parameters())]
    if average is not None:
        places.append(average.values)
    held = [{name: place[name].detach().clone() for name in names} for place in places]
    yield
    with torch.no_grad():
        for place, values in zip(places, held, strict=True):
            for name, value in values.items():
                place[name].copy_(value)


def _evaluations(history: Sequence[Row]) -> dict[int, Row]:
    return {int(row["step"]): row for row in history if "loss" not in row}
