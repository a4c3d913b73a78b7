"""Whether a run learns: figures of the embeddings' health, and one warning for each cause where it does not.

A contrastive loss at chance is the sign that most failures share, and chance has a value. InfoNCE over N pairs: ln N. The
sigmoid loss: N binary entropies of 1/N, ln N + (N - 1) ln(N / (N - 1)), so about ln N + 1, with all logits at -ln(N - 1).
Similarities that know nothing of the pairing cannot be below either, in expectation (Jensen): above it they are noise
besides. Pairs that share an image or a caption are no negatives of each other and make chance a little less.

Shape letters: M images and T captions of the split, B rows of a block, K different images, E embedding width.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from mm_utils.metrics import Evaluate, RetrievalEvaluator
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.matching import MATCH_PRIOR_ENTROPY
from mm_utils.split_embeddings import Embeddings

logger = logging.getLogger(__name__)

Row = dict[str, float]

BLOCK = 4096  # rows in double precision at a time: 16 MiB at a width of 512
SHARE, MOST_STEPS, FEWEST_LINES = 0.1, 500, 5  # of the run that a finding must last; no fewer lines of the log
HEAD_SHARE, HEAD_MOST_STEPS = 0.6, 2000  # the head of the default run is idle until step 210 of 375, and then learns
NEAR = 0.02  # losses this share away from chance are at chance, and a loss that falls by less does not fall
LEARNT = 0.9  # share of chance below which the towers know something
RISE = 0.2  # of chance: how far a run that diverges is above its best
IDLE_LIFT = 0.005  # nats below the prior's entropy; an idle head's lift varies by 0.0025
FEW_DIRECTIONS = 0.02  # effective rank as a share of what width and rows allow
ONE_DIRECTION, ONE_POINT = 1.5, 0.01  # effective rank; spread, with a mean cosine above 0.99 between any two
FLAT_MARGIN = 0.1  # logits by which true pairs are above others: 10 % more likely


class Finding(NamedTuple):
    """What is said, and its cause, for which it is said once."""

    cause: str
    message: str


def embedding_health(split: Embeddings) -> dict[str, float]:
    """How the embeddings of a split lie in their space; the same on all ranks, in memory for one block and E x E.

    Returns, for image and text each:
        effective_rank: exp of the entropy of the singular values of the centred embeddings, divided by their sum (Roy and
            Vetterli 2007; RankMe, arXiv 2210.02885, without the centring). 1 if there is but one point.
        rank_share: of the highest effective rank that the width and the number of rows allow.
        spread: mean squared distance from the centroid; one minus the mean cosine between any two rows.
    And for both:
        margin: mean cosine of true pairs minus mean cosine of all others.
        modality_gap: distance between the centroids of images and texts (arXiv 2203.02053).
    """
    figures: dict[str, float] = {}
    for name, rows in (("image", split.image_ME), ("text", split.text_TE)):
        rank, spread = _rank_and_spread(rows)
        limit = max(1, min(rows.shape[1], len(rows) - 1))
        figures |= {f"{name}_effective_rank": rank, f"{name}_rank_share": rank / limit, f"{name}_spread": spread}
    gap_E = _centroid(split.image_ME) - _centroid(split.text_TE)
    return {**figures, "margin": _margin(split), "modality_gap": gap_E.norm().item()}


def with_health(evaluator: RetrievalEvaluator) -> Evaluate:
    """An evaluator that measures retrieval, and the health of the embeddings that it leaves."""

    def evaluate(model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        metrics = evaluator(model, loader, accelerator)
        assert evaluator.split is not None
        return metrics | embedding_health(evaluator.split)

    return evaluate


def chance_loss(pairs: int, sigmoid: bool) -> float:
    """The contrastive loss of a global batch whose pairs all look alike; see above."""
    return math.log(pairs) + ((pairs - 1) * math.log(pairs / (pairs - 1)) if sigmoid else 0.0)


class CollapseWarning(TrainerCallback):
    """Watch the log, and say once a run for each cause what does not learn, the likely reason and what to change.

    It is judged after warm-up and by several lines in succession, so one bad line is no finding: contrastive loss at
    chance or rising, matching head idle, temperature at a bound. A gradient of zero and a loss that is not finite count
    at once. Of evaluations (`with_health`) it reads rank, spread and margin.

    Args:
        warmup_ratio: share of the steps in which nothing is judged.
        max_logit_scale: upper bound of the inverse temperature; the lower one is 1.
    """

    def __init__(self, warmup_ratio: float, max_logit_scale: float):
        self.warmup_ratio, self.max_logit_scale = warmup_ratio, max_logit_scale

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Forget an earlier run, and read what a resumed one had logged; what was said is said again if it still holds."""
        every = max(1, args.logging_steps)
        self.lines = max(FEWEST_LINES, int(min(SHARE * state.max_steps, MOST_STEPS) / every))
        self.head_lines = max(FEWEST_LINES, int(min(HEAD_SHARE * state.max_steps, HEAD_MOST_STEPS) / every))
        self.rows: list[Row] = []
        self.evaluation: Row = {}
        self.lowest = math.inf
        self.said: set[str] = set()
        for row in state.log_history:
            list(self._read(row, args, state))

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Judge the newest line."""
        for cause, message in self._read(kwargs["logs"], args, state):
            if cause not in self.said and state.is_world_process_zero:
                logger.warning("%s", message)
            self.said.add(cause)

    def _read(self, row: Row, args: Any, state: TrainerState) -> Iterator[Finding]:
        """Take in a line of the log."""
        judged = row["step"] > self.warmup_ratio * state.max_steps
        window = self.rows[-self.lines :] if len(self.rows) >= self.lines else []
        if "eval_image_effective_rank" in row:
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
            f"grad_norm is 0 at step {row['step']}; nothing that is trained has an influence on the loss, or it underflows. "
            "Check --freeze_vision, --freeze_text and the weights of --objectives, or train in bf16 instead of fp16.",
        )
    if not math.isfinite(row.get("loss", 0.0)) or row.get("nonfinite_steps"):
        yield Finding(
            "finite",
            f"The loss or its gradient is not finite at or before step {row['step']}; such steps change nothing. Lower "
            "--learning_rate, train in bf16 instead of fp16, or look at the images in nonfinite_steps.jsonl.",
        )


def _of_loss(window: list[Row], lowest: float, evaluation: Row) -> Iterator[Finding]:
    """In shares of chance, because a larger batch of a schedule has a higher loss."""
    half, ratios = len(window) // 2, [row["ratio"] for row in window]
    found = f"contrastive_loss is {_mean(window, 'contrastive_loss'):.3g} over {_steps(window)}"
    if min(ratios) > lowest + RISE:
        yield Finding(
            "divergence",
            f"{found} and was {lowest * window[-1]['chance']:.3g} before; the run diverges. Go on from an earlier "
            "checkpoint with a lower --learning_rate, or start anew with a higher --warmup_ratio.",
        )
    elif min(ratios) > 1 - NEAR and _mean(window[-half:], "ratio") > (1 - NEAR) * _mean(window[:half], "ratio"):
        found = f"{found}; similarities that know nothing give {window[-1]['chance']:.3g}"
        yield Finding("chance", f"{found}, and {_reason(window, evaluation)}")


def _reason(window: list[Row], evaluation: Row) -> str:
    """Why a loss stays at chance, as far as the other figures tell."""
    if not any(row.get("learning_rate", 1.0) for row in window):
        return "learning_rate is 0. Raise --learning_rate."
    for side in ("image", "text"):
        if evaluation.get(f"eval_{side}_spread", 1.0) < ONE_POINT:
            return f"all {side}s are embedded alike. Lower --learning_rate or raise --warmup_ratio."
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
            "usual, early it is overfitting or near-duplicates. Raise --max_logit_scale if recall still rises, else remove "
            "duplicates or train on more pairs.",
        )
    if max(scales) < 1.001:
        yield Finding(
            "high temperature",
            f"temperature is at its upper bound, 1, over {_steps(window)}; the loss is least where similarities do not "
            "count. Check that captions belong to their images, or lower --learning_rate.",
        )


def _of_head(rows: list[Row]) -> Iterator[Finding]:
    """Once the towers know something, because negatives are drawn by their similarities."""
    if max(row["ratio"] for row in rows) < LEARNT and max(row.get("matching_lift", 1.0) for row in rows) < IDLE_LIFT:
        yield Finding(
            "matching",
            f"matching_loss is {_mean(rows, 'matching_loss'):.4f} over {_steps(rows)}; the share of matches alone gives "
            f"{MATCH_PRIOR_ENTROPY}, so the fusion head tells no pair from another, though the towers do. Train longer, "
            "give matching more weight in --objectives, or look for captions that are right for several images.",
        )


def _of_rank(row: Row, before: Row, side: str) -> Iterator[Finding]:
    name, step = f"eval_{side}_effective_rank", row["step"]
    rank, share, spread = row[name], row[f"eval_{side}_rank_share"], row[f"eval_{side}_spread"]
    if spread < ONE_POINT:
        yield Finding(
            f"{side} spread",
            f"eval_{side}_spread is {spread:.2g} at step {step}; all {side}s are embedded alike, at a mean cosine of "
            f"{1 - spread:.3f}. Lower --learning_rate, and check what the {side} tower is given to read.",
        )
    elif rank < ONE_DIRECTION or share < FEW_DIRECTIONS:
        yield Finding(
            f"{side} rank",
            f"{name} is {rank:.1f} at step {step}, {share:.1%} of what width and rows allow; {side}s differ in few "
            "directions. Lower --learning_rate, raise --global_batch_size, or train on more varied pairs.",
        )
    elif rank < 0.5 * before.get(name, 0.0):
        yield Finding(
            f"{side} rank halved",
            f"{name} is {rank:.1f} at step {step} and was {before[name]:.1f} at step {before['step']}; the embeddings of "
            f"{side}s collapse. Go on from the earlier checkpoint with a lower --learning_rate.",
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


def _blocks(rows: Tensor) -> Iterator[Tensor]:
    """The rows in double precision, a block at a time, on the CPU where the device has none."""
    for block in rows.split(BLOCK):
        yield (block.cpu() if block.device.type == "mps" else block).double()


def _centroid(rows: Tensor) -> Tensor:
    return torch.stack([block_BE.sum(0) for block_BE in _blocks(rows)]).sum(0) / len(rows)


def _rank_and_spread(rows: Tensor) -> tuple[float, float]:
    """Singular values are the square roots of the eigenvalues of the E x E Gram matrix."""
    centroid_E = _centroid(rows)
    gram_EE = torch.zeros(len(centroid_E), len(centroid_E), dtype=centroid_E.dtype, device=centroid_E.device)
    for block_BE in _blocks(rows):
        centred_BE = block_BE - centroid_E
        gram_EE.addmm_(centred_BE.T, centred_BE)
    spread = gram_EE.trace().item() / len(rows)
    values_E = torch.linalg.eigvalsh(gram_EE).clamp(min=0).sqrt()
    # Rows that are equal but for their rounding to fp32 would have noise of full rank.
    values_E = values_E[values_E > torch.finfo(torch.float32).eps * math.sqrt(len(rows))]
    shares_E = values_E / values_E.sum()
    return math.exp(-(shares_E * shares_E.log()).sum().item()), spread


def _margin(split: Embeddings) -> float:
    """Sums of cosines are products of sums of embeddings: over all pairs, and for true ones, of each image's id."""
    keys_K, place = torch.cat([split.image_key_M, split.caption_key_T]).unique(return_inverse=True)
    sums, counts = [], []
    for rows, at in ((split.image_ME, place[: len(split.image_ME)]), (split.text_TE, place[len(split.image_ME) :])):
        sums.append(rows.new_zeros(len(keys_K), rows.shape[1]).index_add_(0, at, rows))
        counts.append(at.bincount(minlength=len(keys_K)))
    true_cosines = sum((one_BE * other_BE).sum().item() for one_BE, other_BE in zip(*map(_blocks, sums), strict=True))
    true, pairs = int((counts[0] * counts[1]).sum()), len(split.image_ME) * len(split.text_TE)
    cosines = pairs * (_centroid(split.image_ME) @ _centroid(split.text_TE)).item()
    return true_cosines / max(1, true) - (cosines - true_cosines) / max(1, pairs - true)
