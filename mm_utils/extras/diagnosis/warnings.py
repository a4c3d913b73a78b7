"""Warn once for each cause if a run does not learn.

Most failures share one sign: a contrastive loss at chance, which has a value. InfoNCE over N pairs: ln N. The sigmoid loss: N
binary entropies of 1/N, ln N + (N - 1) ln(N / (N - 1)), so about ln N + 1, with all logits at -ln(N - 1). Similarities that
know nothing of the pairing cannot be below either, in expectation (Jensen). Pairs that share an image or a caption are no
negatives of each other and lower chance a little.
"""

import logging
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from transformers import TrainerControl, TrainerState

from mm_utils.arguments import Parsed
from mm_utils.objectives import ObjectiveArguments
from mm_utils.training.callbacks import RunCallback

logger = logging.getLogger(__name__)

Row = dict[str, float]

SHARE, MAX_STEPS, MIN_ROWS = 0.1, 500, 5  # a finding must last this share of the run, and this many log rows
HEAD_SHARE, HEAD_MAX_STEPS = 0.6, 2000  # the head of the default run is idle until step 210 of 375, and then learns
NEAR = 0.02  # a loss within this share of chance is at chance, and a loss that falls by less does not fall
LEARNT = 0.9  # share of chance below which the towers have learnt something
RISE = 0.2  # share of chance by which a diverging run is above its best
IDLE_LIFT = 0.005  # nats below the prior's entropy; an idle head's lift varies by 0.0025
FEW_DIRECTIONS = 0.02  # effective rank as a share of what width and rows allow
ONE_DIRECTION, ONE_POINT = 1.5, 0.01  # effective rank; spread, which is a mean cosine of 0.99
MOST_DIRECTIONS = 0.5  # share from which on a low rank is that of few rows
FORGOTTEN = (
    0.1  # share of the best mean recall by which a later one is lower; that of 165 photographs varies by half of it
)
FLAT_MARGIN = 0.1  # in logits: true pairs are 10 % more likely than others


class Finding(NamedTuple):
    """A message, and its cause, for which one message is logged."""

    cause: str
    message: str


def chance_loss(pairs: int, sigmoid: bool) -> float:
    """Return the contrastive loss of a global batch whose pairs all look alike."""
    return math.log(pairs) + ((pairs - 1) * math.log(pairs / (pairs - 1)) if sigmoid else 0.0)


class CollapseWarning(RunCallback):
    """Read the log, and warn once for each cause: the finding, the likely reason and the remedy.

    After warm-up, several rows in succession must agree: contrastive loss at chance or rising, matching head idle, temperature
    at a bound. A zero gradient and a loss that is not finite count at once. Evaluations give rank, spread and margin
    (`mm_utils.evaluation.metrics`).

    Args:
        warmup_ratio: the share of steps in which nothing is judged.
        max_logit_scale: the upper bound of the inverse temperature, which the model of a run may set; the lower one is 1.
    """

    scripts = ("pretrain",)

    def __init__(self, warmup_ratio: float, max_logit_scale: float = math.inf):
        self.warmup_ratio, self.max_logit_scale = warmup_ratio, max_logit_scale

    @classmethod
    def attach(cls, given: Parsed) -> "CollapseWarning":
        """Return the callback of any run."""
        return cls(given["warmup_ratio"])

    def on_start(self, run: Any) -> None:
        """Read the bound of the temperature."""
        self.max_logit_scale = run.given[ObjectiveArguments].highest_scale(run.model)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Forget an earlier run; read a resumed one's log, and log again what still holds."""
        every = max(1, args.logging_steps)
        self.lines = max(MIN_ROWS, int(min(SHARE * state.max_steps, MAX_STEPS) / every))
        self.head_lines = max(MIN_ROWS, int(min(HEAD_SHARE * state.max_steps, HEAD_MAX_STEPS) / every))
        self.rows: list[Row] = []
        self.evaluation: Row = {}
        self.best: Row = {}
        self.lowest = math.inf
        self.said: set[str] = set()
        for row in state.log_history:
            list(self._read(row, args, state))

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Judge the newest row."""
        for cause, message in self._read(kwargs["logs"], args, state):
            if cause not in self.said and state.is_world_process_zero:
                logger.warning("%s", message)
            self.said.add(cause)

    def _read(self, row: Row, args: Any, state: TrainerState) -> Iterator[Finding]:
        """Add a row of the log."""
        judged = row["step"] > self.warmup_ratio * state.max_steps
        window = self.rows[-self.lines :] if len(self.rows) >= self.lines else []
        if "eval_image_effective_rank" in row:
            yield from _of_recall(row, self.best, bool(args.keeps_best))
            self.best = max(self.best or row, row, key=lambda each: each.get("eval_mean_recall", 0.0))
            if judged:
                yield from _of_rank(row, self.evaluation, "image")
                yield from _of_rank(row, self.evaluation, "text")
                yield from _of_margin(row, window)
                self.evaluation = row
            return
        yield from _of_gradient(row)
        if not judged or not math.isfinite(row.get("contrastive_loss", math.nan)):
            return
        chance = chance_loss(args.batch_sizes.at(int(row["step"]) - 1), "logit_bias" in row)
        row = {**row, "chance": chance, "ratio": row["contrastive_loss"] / chance}
        if (
            self.rows and self.rows[-1]["chance"] != chance
        ):  # another size of the batch: its losses are of another kind
            self.rows, self.lowest = [], math.inf
        self.rows = [*self.rows[1 - self.head_lines :], row]
        window = self.rows[-self.lines :]
        if len(window) == self.lines:
            yield from _of_loss(window, self.lowest, self.evaluation)
            yield from _of_temperature(window, self.max_logit_scale)
            self.lowest = min(self.lowest, _mean(window, "ratio"))
        if len(self.rows) == self.head_lines:
            yield from _of_head(self.rows)


def _of_gradient(row: Row) -> Iterator[Finding]:
    if row.get("grad_norm") == 0:
        yield Finding(
            "gradient",
            f"grad_norm is 0 at step {row['step']}; no trained parameter influences the loss, or the gradient underflows. "
            "Check --freeze_vision, --freeze_text and the weights of --objectives, or train in bf16 instead of fp16.",
        )
    if not math.isfinite(row.get("loss", 0.0)) or row.get("nonfinite_steps"):
        yield Finding(
            "finite",
            f"The loss or its gradient is not finite at or before step {row['step']}; such steps change nothing. Lower "
            "--learning_rate, train in bf16 instead of fp16, or look at the images in nonfinite_steps.jsonl.",
        )


def _of_loss(window: list[Row], lowest: float, evaluation: Row) -> Iterator[Finding]:
    """Judge the losses of batches of one size."""
    half, ratios = len(window) // 2, [row["ratio"] for row in window]
    found = f"contrastive_loss is {_mean(window, 'contrastive_loss'):.3g} over {_steps(window)}"
    if min(ratios) > lowest + RISE:
        yield Finding(
            "divergence",
            f"{found} and was {lowest * window[-1]['chance']:.3g} before; the run diverges. Go on from an earlier "
            "checkpoint with a lower --learning_rate, or start anew with a higher --warmup_ratio.",
        )
    elif min(ratios) > 1 - NEAR and _mean(window[-half:], "ratio") > (1 - NEAR) * _mean(window[:half], "ratio"):
        found = f"{found}; chance is {window[-1]['chance']:.3g}"
        yield Finding("chance", f"{found}, and {_reason(window, evaluation)}")


def _reason(window: list[Row], evaluation: Row) -> str:
    """Return the likely reason of a loss at chance."""
    if not any(row.get("learning_rate", 1.0) for row in window):
        return "learning_rate is 0. Raise --learning_rate."
    for modality in ("image", "text"):
        if evaluation.get(f"eval_{modality}_spread", 1.0) < ONE_POINT:
            return f"all {modality}s are embedded alike. Lower --learning_rate or raise --warmup_ratio."
    if _mean(window, "ratio") > 1 + NEAR:
        return "wrong pairs are often the closer ones. Check that captions belong to their images, or lower --learning_rate."
    return (
        "all pairs look alike. Lower --learning_rate tenfold, or raise it if the loss never moved; check that captions belong "
        "to their images, and what --freeze_vision and --freeze_text leave to be trained."
    )


def _of_temperature(window: list[Row], max_logit_scale: float) -> Iterator[Finding]:
    scales = [1 / row["temperature"] for row in window]
    if min(scales) > 0.999 * max_logit_scale:
        yield Finding(
            "low temperature",
            f"temperature is at its lower bound, {1 / max_logit_scale:g}, over {_steps(window)}; late in a long run that is "
            "usual, early it is overfitting or near-duplicates. Raise it by --set max_logit_scale=VALUE if recall still rises, else remove "
            "duplicates or train on more pairs.",
        )
    if max(scales) < 1.001:
        yield Finding(
            "high temperature",
            f"temperature is at its upper bound, 1, over {_steps(window)}; the loss is least where similarities do not "
            "count. Check that captions belong to their images, or lower --learning_rate.",
        )


def _of_head(rows: list[Row]) -> Iterator[Finding]:
    """Judge the head once the towers have learnt, as they draw its negatives."""
    if max(row["ratio"] for row in rows) < LEARNT and max(row.get("matching_lift", 1.0) for row in rows) < IDLE_LIFT:
        yield Finding(
            "matching",
            f"matching_loss is {_mean(rows, 'matching_loss'):.4f} over {_steps(rows)}; the share of matches alone yields "
            f"{_mean(rows, 'matching_loss') + _mean(rows, 'matching_lift'):.4f}, so the fusion head distinguishes no pairs, though the towers do. Train longer, "
            "give matching more weight in --objectives, or look for captions that are right for several images.",
        )


def _of_rank(row: Row, before: Row, modality: str) -> Iterator[Finding]:
    name, step = f"eval_{modality}_effective_rank", row["step"]
    rank, share, spread = row[name], row[f"eval_{modality}_rank_share"], row[f"eval_{modality}_spread"]
    if spread < ONE_POINT:
        yield Finding(
            f"{modality} spread",
            f"eval_{modality}_spread is {spread:.2g} at step {step}; all {modality}s are embedded alike, at a mean cosine of "
            f"{1 - spread:.3f}. Lower --learning_rate, and check what the {modality} tower is given to read.",
        )
    elif share < FEW_DIRECTIONS or (rank < ONE_DIRECTION and share < MOST_DIRECTIONS):
        yield Finding(
            f"{modality} rank",
            f"{name} is {rank:.1f} at step {step}, {share:.1%} of what width and rows allow; {modality}s differ in few "
            "directions. Lower --learning_rate, raise --global_batch_size, or train on more varied pairs.",
        )
    elif rank < 0.5 * before.get(name, 0.0):
        yield Finding(
            f"{modality} rank halved",
            f"{name} is {rank:.1f} at step {step} and was {before[name]:.1f} at step {before['step']}; the embeddings of "
            f"{modality}s collapse. Go on from the earlier checkpoint with a lower --learning_rate.",
        )


def _of_recall(row: Row, best: Row, is_kept: bool) -> Iterator[Finding]:
    found, before = row.get("eval_mean_recall", math.nan), best.get("eval_mean_recall", 0.0)
    if found < (1 - FORGOTTEN) * before:
        kept = (
            f"the weights of step {best['step']} are kept" if is_kept else "set --eval_steps to keep the best weights"
        )
        seen = [f"{each['eval_train_mean_recall']:.3f}" for each in (row, best) if "eval_train_mean_recall" in each]
        of_train = f"that of training images is {' and was '.join(seen)}; " if seen else ""
        yield Finding(
            "recall",
            f"eval_mean_recall is {found:.3f} at step {row['step']} and was {before:.3f} at step {best['step']}; {of_train}the "
            f"run forgets what carries over to other images. Lower --learning_rate, freeze the backbones, or train on more pairs; "
            f"{kept}.",
        )


def _of_margin(row: Row, window: list[Row]) -> Iterator[Finding]:
    if not window or row["eval_margin"] >= FLAT_MARGIN * window[-1]["temperature"]:
        return
    reason = f"nor are those of training; {_reason(window, row)}"
    if _mean(window, "ratio") < LEARNT:
        reason = (
            "though those of training are. Check that the captions of the validation split belong to their images and are "
            "like those of training, or train on more pairs."
        )
    yield Finding(
        "margin",
        f"eval_margin is {row['eval_margin']:.2g} at step {row['step']}; true pairs are hardly closer than others, {reason}",
    )


def _mean(rows: list[Row], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def _steps(rows: list[Row]) -> str:
    return f"steps {rows[0]['step']} to {rows[-1]['step']}"
