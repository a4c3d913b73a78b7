"""Checkpoints written while training goes on: the loop waits for the copy to the host's memory and no longer."""

import errno
import logging
import shutil
import threading
import time
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError

from mm_utils.checkpoints import checkpoint_path, write_checkpoint
from mm_utils.rotation import make_room, remove_old_checkpoints
from mm_utils.snapshot import Snapshot

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
_PAUSES = (1.0, 5.0)  # seconds before a write that failed is tried again; a network disk may stutter
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointWriter:
    """Writes snapshots one at a time, in a thread. For the main process.

    A checkpoint that cannot be written costs the checkpoint and not the run, until `MOST_FAILURES` in succession could not.

    Args:
        output_dir: of the run.
        limit: how many checkpoints to keep.

    Attributes:
        failures: in succession.
        problem: what the last one was.
    """

    def __init__(self, output_dir: Path, limit: int | None):
        self.output_dir, self.limit = output_dir, limit
        self.failures, self.problem = 0, ""
        self._thread: threading.Thread | None = None
        self._saved: list[int] = []  # completed, and not yet told of

    def start(self, step: int, snapshot: Snapshot, keep: Collection[int]) -> None:
        """Begin to write the checkpoint of a step, once that before it is written; `keep`: steps that stay, for being best."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(step, snapshot, frozenset(keep)), name="checkpoint")
        self._thread.start()

    def saved(self) -> int:
        """The step of the oldest checkpoint that was completed and not yet told of, or 0."""
        return self._saved.pop(0) if self._saved else 0

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def tidy(self, keep: Collection[int]) -> None:
        """Remove what stayed for callbacks that had not been told of it."""
        remove_old_checkpoints(self.output_dir, self.limit, keep)

    def _run(self, step: int, snapshot: Snapshot, keep: Collection[int]) -> None:
        try:
            self._write(step, snapshot, keep)
        except FloatingPointError as error:
            self.failures, self.problem = MOST_FAILURES, str(error)
        except Exception as error:  # of whatever kind: it must be told to the training loop
            self.failures += 1
            self.problem = f"the checkpoint of step {step} could not be written: {self._explained(error)}"
            if self.failures < MOST_FAILURES:
                logger.error("%s. Older ones are as they were; training goes on", self.problem)
        else:
            self.failures = 0
            self._saved.append(step)

    def _write(self, step: int, snapshot: Snapshot, keep: Collection[int]) -> None:
        bad = snapshot.not_finite()
        if bad:
            raise FloatingPointError(
                f"the weights after step {step} are not finite ({len(bad)} tensors, such as {bad[0]}), and are not saved. "
                "Resume from the newest checkpoint with a lower --learning_rate, or in bf16 or fp32."
            )
        keep = {*keep, *self._saved.copy()}  # the Hub is sent what callbacks are told of
        make_room(self.output_dir, snapshot.nbytes, self.limit, keep)
        for pause in (*_PAUSES, None):
            try:
                write_checkpoint(checkpoint_path(self.output_dir, step), snapshot.write)
                break
            except (OSError, SafetensorError) as error:
                if pause is None or _is_full(error):
                    raise
                logger.warning("The checkpoint of step %d failed (%s) and is tried again", step, error)
                time.sleep(pause)
        remove_old_checkpoints(self.output_dir, self.limit, keep)

    def _explained(self, error: Exception) -> str:
        if not _is_full(error) or "MiB" in str(error):  # `make_room` says it itself
            place = f", at {error.filename}" if isinstance(error, OSError) and error.filename else ""
            text = error.strerror if isinstance(error, OSError) else None
            return f"{text or f'{type(error).__name__}: {error}'}{place}"
        free = shutil.disk_usage(self.output_dir).free / 2**20
        return (
            f"the disk of {self.output_dir} is full, or a quota is used up ({free:,.0f} MiB are free). Make room, lower "
            "--save_total_limit, or give another --output_dir"
        )


def _is_full(error: Exception) -> bool:
    """Also as safetensors tells it, whose errors have no number."""
    numbers = (f"os error {number})" for number in _FULL)
    return getattr(error, "errno", None) in _FULL or any(number in str(error) for number in numbers)
