"""Write checkpoints in a background thread, and remove old ones.

Training waits for the copy to host memory and no longer.
"""

import errno
import logging
import shutil
import threading
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError

from mm_utils import distributed
from mm_utils.checkpointing.files import checkpoint_folders, step_of, write_checkpoint
from mm_utils.checkpointing.state import Snapshot, check_finite
from mm_utils.files import errno_of, retry
from mm_utils.text import byte_size

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
_PAUSES = (1.0, 5.0)  # seconds before a failed write is retried; a network disk may stutter
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointWriter:
    """Write snapshots one at a time in a thread of the main process.

    A checkpoint that cannot be written costs the checkpoint and not the run, until `MOST_FAILURES` in succession failed.

    Args:
        limit: how many checkpoints to keep, besides the best ones.

    Attributes:
        failures: failed checkpoints in succession.
        problem: the message of the last failure.
        diverged: whether that was weights that are not finite, so nothing can be resumed.
    """

    def __init__(self, output_dir: Path, limit: int):
        self.output_dir = output_dir
        self.limit = limit
        self.failures = 0
        self.problem = ""
        self.diverged = False
        self._thread: threading.Thread | None = None
        self._saved: list[int] = []  # steps whose completion `saved` has not returned yet

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.output_dir / f"checkpoint-{step}"

    def start(self, step: int, snapshot: Snapshot, keep: Collection[int]) -> None:
        """Start writing the checkpoint of `step`, after the previous write has finished.

        `keep` lists the steps of the best checkpoints, which are never deleted.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(step, snapshot, frozenset(keep)), name="checkpoint")
        self._thread.start()

    def saved(self) -> int:
        """Return the step of the oldest completed checkpoint that was not returned before, or 0."""
        return self._saved.pop(0) if self._saved else 0

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, step: int, snapshot: Snapshot, keep: Collection[int]) -> None:
        try:
            self._write(step, snapshot, keep)
        except distributed.RunError as error:
            self.failures = MOST_FAILURES
            self.problem = str(error)
            self.diverged = True
        except Exception as error:  # of any kind: the training loop must know
            why = f"{type(error).__name__}: {error}"
            if errno_of(error) in _FULL:
                why = f"the disk of {self.output_dir} is full, or a quota is used up. Make room, or give another --output_dir"
            self.failures += 1
            self.problem = f"the checkpoint of step {step} could not be written: {why}".rstrip(".")
            if self.failures < MOST_FAILURES:
                logger.error("%s. Older checkpoints are intact; training goes on", self.problem)
        else:
            self.failures = 0
            if step:  # callbacks are not told of weights that were not trained
                self._saved.append(step)

    def _write(self, step: int, snapshot: Snapshot, keep: Collection[int]) -> None:
        check_finite(snapshot.weights, f"step {step}")
        keep = {*keep, *self._saved.copy()}  # callbacks, such as the push to the Hub, still need these

        def may_pass(error: Exception) -> bool:
            passes = isinstance(error, (OSError, SafetensorError)) and errno_of(error) not in _FULL
            if passes:
                logger.warning("Writing the checkpoint of step %d failed (%s); retrying", step, error)
            return passes

        retry(lambda: write_checkpoint(self.path(step), snapshot.write), may_pass, _PAUSES)
        remove_old_checkpoints(self.output_dir, self.limit, keep)


# -- room -----------------------------------------------------------------------------------------------------------------


def remove_old_checkpoints(output_dir: Path, limit: int, keep: Collection[int]) -> None:
    """Keep the newest `limit` checkpoints and the steps of `keep`; remove the others.

    Call it after a checkpoint was written, so that the new one is among the newest. A folder that cannot be removed stays,
    with a warning.
    """
    # of a limit of 0, [: -0] would be none
    for path in [path for path in checkpoint_folders(output_dir)[: -max(1, limit)] if step_of(path) not in keep]:
        try:  # no half of it is ever seen under its name
            path = path.rename(path.parent / f".{path.name}.removed")
            shutil.rmtree(path)
        except OSError as error:
            logger.warning("%s is old, and cannot be removed: %s. Remove it by hand", path, error.strerror)


def check_room(output_dir: Path, checkpoint_bytes: int) -> None:
    """Raise ValueError on every rank if the disk has no room for a checkpoint; called on all ranks."""

    def look() -> None:
        if (free := shutil.disk_usage(output_dir).free) < checkpoint_bytes:
            raise ValueError(
                f"{output_dir.resolve()} has {byte_size(free)} free; a checkpoint takes {byte_size(checkpoint_bytes)}. Free "
                "some, or give an --output_dir on another disk."
            )

    distributed.on_first(look)
