"""Warn once for each cause if a run does not learn.

Most failures share one sign: a contrastive loss at chance, which has a value. InfoNCE over N pairs: ln N. The sigmoid loss: N
binary entropies of 1/N, ln N + (N - 1) ln(N / (N - 1)), so about ln N + 1, with all logits at -ln(N - 1). Similarities that
know nothing of the pairing cannot be below either, in expectation (Jensen). Pairs that share an image or a caption are no
negatives of each other and lower chance a little.
"""

import logging
import math
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from mm_utils import distributed
from mm_utils.training.arguments import OptimizerArguments
from mm_utils.training.optim import warmup_steps

logger = logging.getLogger(__name__)

Row = dict[str, float]

SHARE = 0.1  # of the run that a finding must last
MAX_STEPS = 500  # that it must last at most
MIN_ROWS = 5  # of the log that it must last
NEAR = 0.02  # a loss within this share of chance is at chance, and a loss that falls by less does not fall
ONE_POINT = 0.01  # spread, which is a mean cosine of 0.99
COLLAPSED = 0.01  # within this share of chance,
STILL = 0.01  # at a gradient norm below this,
COLLAPSE_STEPS = 50  # for so many steps


def chance_loss(pairs: int, sigmoid: bool) -> float:
    """Return the contrastive loss of a global batch whose pairs all look alike."""
    # of 64 pairs 4.16, and 5.15 with the sigmoid loss
    return math.log(pairs) + ((pairs - 1) * math.log(pairs / (pairs - 1)) if sigmoid else 0.0)


class CollapseWarning(TrainerCallback):
    """Read the log, and warn once for each cause: a contrastive loss that stays at chance after warm-up, and a zero gradient."""

    def __init__(self, optimizer_args: OptimizerArguments):
        self.optimizer_args = optimizer_args

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Forget an earlier run; read a resumed one's log, and log again what still holds."""
        # of 10,000 steps that are logged every 10: the last 50 rows
        self.lines = max(MIN_ROWS, int(min(SHARE * state.max_steps, MAX_STEPS) / max(1, args.logging_steps)))
        self.rows: list[Row] = []
        self.still_since: float | None = None  # the first step of those at chance without a gradient
        self.said: set[str] = set()
        for row in state.log_history:
            list(self._read(row, args, state))

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Judge the newest row; stop a run that has collapsed: all is embedded alike, and no gradient is left to part it.

        Chance alone does not say so: a run may stay there for 20 steps before it learns, at a gradient norm of 0.1 and more.

        Raises:
            distributed.RunError: if it has.
        """
        row = kwargs["logs"]
        for cause, message in self._read(row, args, state):
            if cause not in self.said and state.is_world_process_zero:
                logger.warning("%s", message)
            self.said.add(cause)
        if self.still_since is None or not self.rows:
            return
        is_point = max(row.get(f"eval_{side}_spread", math.inf) for side in ("image", "text")) < ONE_POINT
        if is_point or ("loss" in row and row["step"] - self.still_since >= COLLAPSE_STEPS):
            last = self.rows[-1]
            raise distributed.RunError(
                f"contrastive_loss is {last['contrastive_loss']:.4g} at step {last['step']:.0f}, which is chance, and grad_norm is "
                f"{last['grad_norm']:.1g}; all images, or all texts, are embedded alike, and so small a gradient does not part them "
                "again. Start anew with a lower rate: leave --learning_rate and --warmup_ratio out, which then fit the encoders, or "
                "give a tenth of it; or start from pretrained encoders."
            )

    def _read(self, row: Row, args: Any, state: TrainerState) -> Iterator[tuple[str, str]]:
        """Add a row of the log; yield causes and messages."""
        if row.get("grad_norm") == 0 and row.get("contrastive_loss") == 0:
            yield (
                "captions",
                f"contrastive_loss and grad_norm are 0 at step {row['step']}; the captions of a batch are equal, at least as far as they "
                "are read, so no image has a wrong one. Give captions that tell the images apart.",
            )
        elif row.get("grad_norm") == 0:
            yield (
                "gradient",
                f"grad_norm is 0 at step {row['step']}; no trained parameter influences the loss, or the gradient underflows. "
                "Check --freeze_vision, --freeze_text and the weights of --objectives, or train in bf16 instead of fp16.",
            )
        is_judged = row["step"] > warmup_steps(state.max_steps, self.optimizer_args)
        if not is_judged or not math.isfinite(row.get("contrastive_loss", math.nan)):
            return
        chance = chance_loss(args.batch_sizes.at(int(row["step"]) - 1), "logit_bias" in row)
        if self.rows and self.rows[-1]["chance"] != chance:  # losses of another batch size are of another kind
            self.rows = []
        ratio = row["contrastive_loss"] / chance
        # the newest `lines` rows
        self.rows = [*self.rows[1 - self.lines :], {**row, "chance": chance, "ratio": ratio}]
        is_still = ratio > 1 - COLLAPSED and 0 < row.get("grad_norm", math.inf) < STILL
        self.still_since = (self.still_since or row["step"]) if is_still else None
        ratios = [row["ratio"] for row in self.rows]
        half = sum(ratios[: self.lines // 2])
        later = sum(ratios[-(self.lines // 2) :])
        if len(ratios) == self.lines and min(ratios) > 1 - NEAR and later > (1 - NEAR) * half:
            mean = sum(row["contrastive_loss"] for row in self.rows) / self.lines
            yield (
                "chance",
                f"contrastive_loss is {mean:.3g} over steps {self.rows[0]['step']} to {self.rows[-1]['step']}; chance is "
                f"{chance:.3g}, so all pairs look alike. Check that captions belong to their images, and what --freeze_vision and "
                "--freeze_text leave to be trained; train for more than 50 steps, lower --learning_rate tenfold, or raise it if "
                "the loss never moved.",
            )
