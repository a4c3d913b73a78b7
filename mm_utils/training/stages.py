"""A run is a list of stages: first its encoders learn, then its fusion head, on encoders that stay as they are.

Each stage is taken by an ordinary `Trainer`, with its own schedule, best figure, early stopping and checkpoints. It begins with
the best weights of the stage before it. Projections learn in both. With frozen encoders, with `--head_share 0`, or without a
term of the head, a run is one stage.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from mm_utils.checkpointing.files import step_of
from mm_utils.checkpointing.state import RUN_FILE
from mm_utils.files import read_json
from mm_utils.objectives.objective import Objective
from mm_utils.training.arguments import TrainingArguments, greater_is_better

logger = logging.getLogger(__name__)

HEAD = ("model.fusion.", "model.token_head.", "model.caption_adapter.")
ENCODERS = ("model.vision_model.", "model.text_model.")
HEAD_RATE = 2.0  # of the peak rate, on encoders that stay as they are
_OF_ENCODERS = ("text_to_image_", "image_to_text_")  # how their figures begin; of re-ranking there are the same


@dataclass(frozen=True)
class Stage:
    """What a `Trainer` trains, in which steps of the run, and what judges it."""

    name: str  # "encoders", or "head" if the head is trained
    begin: int  # steps are counted over the whole run; checkpoints are named by them
    end: int
    trains: Mapping[str, int]  # the objective's parameters that learn, by name, and their sizes
    metric: str  # chooses the best evaluation: encoders are judged by their own figure, heads by what they add to it
    is_last: bool = True
    # the metric that `metric` stands in for; where that is not measured, the last head is best
    asked: str | None = None
    judges_start: bool = True  # the weights at `begin` may be the best
    rate: float = 1.0  # a factor of the peak rates

    def freeze_others(self, objective: nn.Module) -> None:
        """Let the stage's parameters alone get gradients; called before the optimizer is built."""
        shards = [module for module in objective.modules() if isinstance(module, FSDPModule)]
        for gather in (True, False):  # FSDP2 has other parameters while it has gathered the weights
            for module in shards:
                module.unshard() if gather else module.reshard()
            for name, parameter in objective.named_parameters():
                parameter.requires_grad_(name in self.trains)

    def ranked(self, history: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the evaluated steps, the best first: of equal ones the first, of heads the longest trained."""
        values = self._values(history)
        sign = 1 if greater_is_better(self.metric) else -1
        if self.asked and not values:
            return sorted(self._candidates(history), reverse=True)
        return sorted(values, key=lambda step: (-sign * values[step], -step if self.asked else step))

    def choice(self, history: Sequence[Mapping[str, Any]], step: int) -> tuple[str | None, str]:
        """Return the figure that chose a step of `ranked`, None for the last step without one, and a sentence."""
        what = "with the fusion head of" if self.name == "head" else "of"
        values = self._values(history)
        name = f"eval_{self.metric}"
        if not values:
            return None, f"The model {what} step {step} is saved, the last one, as no evaluation measured re-ranking."
        several = f"the best of {len(values)} evaluations" if len(values) > 1 else "the only one that was evaluated,"
        best = f"{several} by {name} ({values[step]:.4g})"
        if step != (first := self.ranked(history)[0]):
            best = (
                f"with {name} {values[step]:.4g}, as the checkpoint of step {first} ({values[first]:.4g}) is not there"
            )
        return name, f"The model {what} step {step} is saved, {best}."

    def lost_recall(self, history: Sequence[Mapping[str, Any]], step: int, reranks: bool) -> bool:
        """Return whether the projections of a step, re-ranked where that is on, are worse than those at `begin` alone."""
        rows = evaluations(history)
        trains_encoders = any(name.startswith(ENCODERS) for name in self.trains)
        if self.begin not in rows or self.asked is None or trains_encoders or self.name != "head":
            return False
        sign = 1 if greater_is_better(self.asked) else -1
        name = f"eval_{self.asked}"
        value = rows[step].get(f"eval_rerank_{self.asked}", rows[step][name]) if reranks else rows[step][name]
        return sign * value < sign * rows[self.begin][name]

    def _candidates(self, history: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
        return {step: row for step, row in evaluations(history).items() if self.judges_start or step > self.begin}

    def _values(self, history: Sequence[Mapping[str, Any]]) -> dict[int, float]:
        """Return the figures that the stage is judged by, by step."""
        name = f"eval_{self.metric}"
        return {step: row[name] for step, row in self._candidates(history).items() if name in row}


def evaluations(history: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Return the rows of a log that are of evaluations, by step."""
    # a row of training steps has `loss`; the figures of an evaluation begin with eval_
    return {int(row["step"]): row for row in history if "loss" not in row}


def stages_of(objective: Objective, args: TrainingArguments, head_share: float, num_rows: int) -> list[Stage]:
    """Return the stages of a run.

    Args:
        objective: whose parameters need a gradient if they are trained in any stage.
        head_share: `--head_share`, the share of the steps, the last, in which the head learns; 0 for all at once.
    """
    steps = args.total_steps(num_rows)
    metric = args.metric_for_best_model
    trained = {name: weight.numel() for name, weight in objective.named_parameters() if weight.requires_grad}
    if not objective.pairs_per_image:
        return [Stage("encoders", 0, steps, trained, metric)]
    of_head = "head_mean_recall" if metric in ("mean_recall", "loss") else metric  # the head changes neither
    # 'text_to_image_recall@1' -> 'rerank_text_to_image_recall@1'
    of_head = f"rerank_{metric}" if metric.startswith(_OF_ENCODERS) else of_head
    is_new = any(name.startswith("fusion.") for name in objective.added)
    head = Stage(
        "head", 0, steps, trained, of_head, asked=metric if of_head != metric else None, judges_start=not is_new
    )
    if head_share and not any(name.startswith(ENCODERS) for name in trained):
        logger.info("Both encoders are frozen; the head is trained from the first step on, without --head_share")
        head_share = 0.0
    if not head_share:
        return [head]
    begin = round((1 - head_share) * steps)
    without_head = {name: size for name, size in trained.items() if not name.startswith(HEAD)}
    without_encoders = {name: size for name, size in trained.items() if not name.startswith(ENCODERS)}
    encoders = Stage("encoders", 0, begin, without_head, metric, begin == steps)
    head = replace(head, begin=begin, trains=without_encoders, rate=HEAD_RATE)
    # of a single step, round(0.5) = 0 leaves the head's stage alone
    return [stage for stage in (encoders, head) if stage.begin < stage.end]


def remaining(stages: Sequence[Stage], checkpoint: Path | None) -> list[Stage]:
    """Return the stages from that of a checkpoint on; a stage that had begun keeps its begin if the run is longer now."""
    if checkpoint is None:
        return list(stages)
    stored = read_json(checkpoint / RUN_FILE)["stage"]
    place = next((place for place, stage in enumerate(stages) if stage.name == stored["name"]), 0)
    begun = replace(stages[place], begin=stored["begin"])
    later = stages[place + 1 :]
    return [begun, *(replace(stage, begin=max(stage.begin, step_of(checkpoint))) for stage in later)]
