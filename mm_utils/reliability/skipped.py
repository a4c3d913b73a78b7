"""Skip steps that are not finite and rows that cannot be read; end a run that has too many of either."""

import logging
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from mm_utils import distributed
from mm_utils.data.batches.order import SHOWN_IN_VALIDATION
from mm_utils.files import append_rows, truncate_rows

logger = logging.getLogger(__name__)


class NonfiniteSteps:
    """The steps of a run that changed nothing because they were not finite.

    Args:
        path: the file that they are written to.
        has_scaler: True with a loss scaler; an infinite gradient then only means that the scale was too high.

    Attributes:
        count: how many there were.
    """

    def __init__(self, path: Path, has_scaler: bool):
        self.path, self.has_scaler, self.count = path, has_scaler, 0

    def may_move(self, step: int, loss: Tensor, grad_norm: Tensor, image_ids: list[str]) -> bool:
        """Note the figures of a step, counted from 0; return whether it may change weights. Called on all ranks.

        A batch without a row has a gradient of 0, and momentum and weight decay would still move the weights. An infinite
        gradient under a loss scaler changes nothing either, but does not count.

        Raises:
            FloatingPointError: if one step too many was not finite.
        """
        loss, norm = torch.stack([loss.float(), grad_norm.float()]).tolist()
        if math.isfinite(loss) and (self.has_scaler or math.isfinite(norm)):
            return math.isfinite(norm) and norm != 0
        self.count += 1
        image_ids, step = gather_object(image_ids), step + 1
        if distributed.rank() == 0:
            figures = {"loss": str(loss), "grad_norm": str(norm)}
            append_rows(self.path, [{"step": step, **figures, "image_ids": image_ids}])
            logger.warning("Step %d was skipped: %s; its images are in %s", step, figures, self.path)
        if self.count >= MAX_NONFINITE_STEPS:
            raise FloatingPointError(
                f"{self.count} steps had a loss or a gradient that is not finite, the last one step {step}. Look at the images in {self.path}, lower --learning_rate, or train in bf16 or fp32."
            )
        return False


SKIPPED_FILE = "skipped_images.jsonl"
MAX_NONFINITE_STEPS = 10
MIN_COUNT = 20  # unreadable rows before their share of the data means anything
MAX_IN_SUCCESSION = 100  # unreadable rows without a readable one between them: the disk is gone
_NAMED = 10  # rows named in the log; the file has all
_MAX_REASONS = 1000  # reasons that are counted one by one
_NUMBER = re.compile(r"\d+")


class SkippedSamples(TrainerCallback, ExportableState):
    """Collect what the batches report as `skipped` and `skipped_ids`.

    The main process appends a line {"step", "image_id", "reason"} per row to `skipped_images.jsonl`, and training log rows get
    the count as `skipped_images`. A row counts each time it is drawn, also if another row replaced it. Rows that a stream leaves
    out because validation has them are listed but not counted.

    Attributes:
        count: unreadable rows of all ranks since the first step of the run, as of the last log row or checkpoint.
        pairs: rows drawn by all ranks until then.
        in_succession: unreadable rows since the last readable one.

    Raises:
        ValueError: on all ranks, if more than `--max_corrupt_share` of the rows could not be read, and at least 20; or 100 in
            succession.
    """

    def __init__(self) -> None:
        self.count, self.pairs, self.in_succession = 0, 0, 0
        self._new: list[tuple[int, str, str]] = []  # this rank's, since the last sync
        self._reasons: Counter[str] = Counter()
        self._named = 0

    def state(self) -> dict[str, Any]:
        """Return what a resumed run continues with."""
        counts = {"count": self.count, "pairs": self.pairs, "in_succession": self.in_succession}
        return {"args": {}, "attributes": counts}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remove the rows of steps that a resumed run takes again."""
        if distributed.rank() == 0:
            truncate_rows(_path(args), state.global_step)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note what this rank's batch skipped."""
        batch = kwargs["batch"]
        self._new += ((state.global_step, *row) for row in zip(batch["skipped_ids"], batch["skipped"], strict=True))

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the count to a training row."""
        if "loss" in kwargs["logs"]:
            self._sync(args, state, kwargs["model"].device)
            if self.count:
                kwargs["logs"]["skipped_images"] = self.count

    def on_save_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Bring the counts up to date before they are saved."""
        self._sync(args, state, kwargs["model"].device)

    def _sync(self, args: Any, state: TrainerState, device: Any) -> None:
        """Gather the rows of all ranks, list and count them, and raise if there are too many."""
        pairs = args.batch_sizes.before(state.global_step)
        drawn, self.pairs = pairs - self.pairs, pairs
        if not distributed.any_rank(bool(self._new), device):
            self.in_succession = 0 if drawn else self.in_succession
            return
        found: list[tuple[int, str, str]] = sorted(gather_object(self._new))
        self._new = []
        reasons = [reason for _, _, reason in found if not reason.endswith(SHOWN_IN_VALIDATION)]
        self.count += len(reasons)
        self.in_succession = self.in_succession + len(reasons) if len(reasons) >= drawn else 0
        for kind in map(_kind, reasons):
            if kind in self._reasons or len(self._reasons) < _MAX_REASONS:
                self._reasons[kind] += 1
        if distributed.rank() == 0:
            self._write(_path(args), found)
        problem = ""
        if self.count >= MIN_COUNT and self.count > args.max_corrupt_share * pairs:
            problem = f"--max_corrupt_share is {args.max_corrupt_share:g}; {self.count:,} of {pairs:,} rows"
        elif self.in_succession >= MAX_IN_SUCCESSION:
            problem = f"the training data is out of reach; {self.in_succession:,} rows one after the other"
        if problem:
            most = "; ".join(f"{times:,} x {kind}" for kind, times in self._reasons.most_common(3))
            raise ValueError(
                f"{problem} could not be read, most often: {most}. All are in {_path(args)}. Clean the data with "
                "scripts/prepare_data.py, or check that its disk is there."
            )

    def _write(self, path: Path, found: list[tuple[int, str, str]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_rows(path, ({"step": step, "image_id": image_id, "reason": why} for step, image_id, why in found))
        for step, _, reason in found[: _NAMED - self._named]:
            logger.warning("Step %d skipped %s", step, reason)
        if self._named < _NAMED <= self._named + len(found):
            logger.warning("From here on, skipped rows are listed in %s only", path)
        self._named = min(_NAMED, self._named + len(found))


def _path(args: Any) -> Path:
    return Path(args.output_dir or ".", SKIPPED_FILE)


def _kind(reason: str) -> str:
    """Return the last clause without numbers, which is the same for all reasons of a kind."""
    return _NUMBER.sub("N", reason.rpartition(": ")[2])[:100]
