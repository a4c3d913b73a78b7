"""Skip steps that are not finite and rows that cannot be read; end a run that has too many of either."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from mm_utils import distributed
from mm_utils.data.batches.order import OF_ANOTHER_SPLIT, SHOWN_IN_VALIDATION
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
        self.path = path
        self.has_scaler = has_scaler
        self.count = 0

    def written(self) -> int:
        """Return how many its file names."""
        return len(self.path.read_text(encoding="utf-8").splitlines()) if self.path.is_file() else 0

    def may_move(self, step: int, report: Mapping[str, Tensor], image_ids: list[str]) -> bool:
        """Note the figures of a step, counted from 0; return whether it may change weights. Called on all ranks.

        `report` has the loss, the losses of its terms and the norm of the gradient, the same on all ranks.

        A batch without a row has a gradient of 0, and momentum and weight decay would still move the weights. An infinite
        gradient under a loss scaler changes nothing either, but does not count.

        Raises:
            RunError: if one step too many was not finite.
        """
        # both at once: the host waits for its device a single time
        loss, norm = torch.stack([report["loss"].float(), report["grad_norm"].float()]).tolist()
        if math.isfinite(loss) and (self.has_scaler or math.isfinite(norm)):
            return math.isfinite(norm) and norm != 0
        self.count += 1
        image_ids = gather_object(image_ids)
        step += 1
        if distributed.rank() == 0:
            terms = {name: str(float(value)) for name, value in report.items() if not torch.isfinite(value).all()}
            figures = {**terms, "loss": str(loss), "grad_norm": str(norm)}
            append_rows(self.path, [{"step": step, **figures, "image_ids": image_ids}])
            logger.warning("Step %d was skipped: %s; its images are in %s", step, figures, self.path)
        if self.count >= MAX_NONFINITE_STEPS:
            raise distributed.RunError(
                f"{self.count} steps had a loss or a gradient that is not finite, the last one step {step}. Look at the images in {self.path}, lower --learning_rate, and start anew, or train in bf16 or fp32."
            )
        return False


SKIPPED_FILE = "skipped_images.jsonl"
MAX_NONFINITE_STEPS = 10
MIN_COUNT = 20  # unreadable rows before their share of the data means anything


class SkippedSamples(TrainerCallback, ExportableState):
    """Collect what the batches report as `skipped` and `skipped_ids`.

    The main process appends a line {"step", "image_id", "reason"} per row to `skipped_images.jsonl`, and training log rows get
    the count as `skipped_images`. A row counts each time it is drawn, also if another row replaced it. Rows that a stream leaves
    out because validation has them, or because they say another split, are listed but not counted.

    Attributes:
        count: unreadable rows of all ranks since the first step of the run, as of the last log row or checkpoint.

    Raises:
        ValueError: on all ranks, if more than `--max_corrupt_share` of the rows could not be read, and at least 20.
    """

    def __init__(self) -> None:
        self.count = 0
        self._new: list[tuple[int, str, str]] = []  # this rank's, since the last sync
        self._told = False

    def state(self) -> dict[str, Any]:
        """Return what a resumed run continues with."""
        return {"args": {}, "attributes": {"count": self.count}}

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
        if not distributed.any_rank(bool(self._new), device):
            return
        found: list[tuple[int, str, str]] = sorted(gather_object(self._new))
        self._new = []
        reasons = [reason for _, _, reason in found if not reason.endswith((SHOWN_IN_VALIDATION, OF_ANOTHER_SPLIT))]
        self.count += len(reasons)
        if distributed.rank() == 0:
            append_rows(_path(args), ({"step": step, "image_id": name, "reason": why} for step, name, why in found))
            if not self._told:
                logger.warning("Rows that are left out are listed in %s, such as %s", _path(args), found[0][2])
                self._told = True
        pairs = args.batch_sizes.before(state.global_step)
        if self.count >= MIN_COUNT and self.count > args.max_corrupt_share * pairs:
            raise ValueError(
                f"--max_corrupt_share is {args.max_corrupt_share:g}; {self.count:,} of {pairs:,} rows could not be read, such as "
                f"{found[-1][2]}. All are in {_path(args)}. Clean the data with scripts/prepare_data.py, or check that its disk "
                "is there."
            )


def _path(args: Any) -> Path:
    return Path(args.output_dir or ".", SKIPPED_FILE)
