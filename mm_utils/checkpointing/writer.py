"""Write checkpoints in a background thread, and remove old ones.

Training waits for the copy to host memory and no longer.
"""

import errno
import logging
import shutil
import threading
import time
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError

from mm_utils import distributed
from mm_utils.checkpointing.files import (
    checkpoint_folders,
    checkpoint_path,
    misfits,
    newest_checkpoint,
    size_of,
    step_of,
    write_checkpoint,
)
from mm_utils.checkpointing.state import Snapshot
from mm_utils.files import errno_of
from mm_utils.text import byte_size

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
_PAUSES = (1.0, 5.0)  # seconds before a failed write is retried; a network disk may stutter
_FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointWriter:
    """Write snapshots one at a time in a thread of the main process.

    A checkpoint that cannot be written costs the checkpoint and not the run, until `MOST_FAILURES` in succession failed.

    Args:
        limit: how many checkpoints to keep, None for all.

    Attributes:
        failures: failed checkpoints in succession.
        problem: the message of the last failure.
    """

    def __init__(self, output_dir: Path, limit: int | None):
        self.output_dir, self.limit = output_dir, limit
        self.failures, self.problem = 0, ""
        self._thread: threading.Thread | None = None
        self._saved: list[int] = []  # steps whose completion `saved` has not returned yet

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return checkpoint_path(self.output_dir, step)

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
        except FloatingPointError as error:
            self.failures, self.problem = MOST_FAILURES, str(error)
        except Exception as error:  # of any kind: the training loop must know
            self.failures += 1
            self.problem = f"the checkpoint of step {step} could not be written: {self._explained(error)}"
            if self.failures < MOST_FAILURES:
                logger.error("%s. Older checkpoints are intact; training goes on", self.problem)
        else:
            self.failures = 0
            if step:  # callbacks are not told of weights that were not trained
                self._saved.append(step)

    def _write(self, step: int, snapshot: Snapshot, keep: Collection[int]) -> None:
        bad = snapshot.not_finite()
        if bad:
            raise FloatingPointError(
                f"the weights after step {step} are not finite ({len(bad)} tensors, such as {bad[0]}), and are not saved. "
                "Resume from the newest checkpoint with a lower --learning_rate, or in bf16 or fp32."
            )
        keep = {*keep, *self._saved.copy()}  # callbacks, such as the push to the Hub, still need these
        make_room(self.output_dir, snapshot.nbytes, self.limit, keep)
        for pause in (*_PAUSES, None):
            try:
                write_checkpoint(self.path(step), snapshot.write)
                break
            except (OSError, SafetensorError) as error:
                if pause is None or _is_full(error):
                    raise
                logger.warning("Writing the checkpoint of step %d failed (%s); retrying", step, error)
                time.sleep(pause)
        remove_old_checkpoints(self.output_dir, self.limit, keep)

    def _explained(self, error: Exception) -> str:
        if not _is_full(error) or "MiB" in str(error):  # `make_room` explains a full disk itself
            place = f", at {error.filename}" if isinstance(error, OSError) and error.filename else ""
            text = error.strerror if isinstance(error, OSError) else None
            return f"{text or f'{type(error).__name__}: {error}'}{place}"
        free = shutil.disk_usage(self.output_dir).free / 2**20
        return (
            f"the disk of {self.output_dir} is full, or a quota is used up ({free:,.0f} MiB are free). Make room, or give "
            "another --output_dir"
        )


def _is_full(error: Exception) -> bool:
    """Return whether a disk or quota is full."""
    return errno_of(error) in _FULL


# -- retention --------------------------------------------------------------------------------------------------------


def remove_old_checkpoints(output_dir: Path, limit: int | None, keep: Collection[int]) -> None:
    """Keep the newest `limit` complete checkpoints and the steps of `keep`; remove the others.

    Call it after a checkpoint was written, so that the new one is among the newest. A folder that cannot be removed stays,
    with a warning.
    """
    for path in _surplus(output_dir, limit, keep):
        _discard(path)


def make_room(output_dir: Path, needed: int, limit: int | None, keep: Collection[int]) -> None:
    """Make room for a checkpoint of `needed` bytes before it is written.

    If the disk is short, checkpoints that would be removed afterwards are removed now, but never the newest one that
    verifies.

    Raises:
        OSError: ENOSPC, if the room still does not suffice.
    """
    surplus = _surplus(output_dir, None if limit is None else max(1, limit - 1), keep)
    if shutil.disk_usage(output_dir).free < needed and surplus:
        newest, _ = newest_checkpoint(output_dir)
        for path in surplus:
            if path != newest and shutil.disk_usage(output_dir).free < needed:
                _discard(path)
    free = shutil.disk_usage(output_dir).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"the disk of {output_dir} is full: {free / 2**20:,.0f} MiB are free, a checkpoint takes "
            f"{needed / 2**20:,.0f} MiB. Make room, or give another --output_dir",
        )


def check_room(output_dir: Path, checkpoint_bytes: int, kept: int | None) -> None:
    """Check that the disk has room for the run's checkpoints; called on all ranks.

    As many as `kept` are kept, None means at least one; one more is there while it is written.

    Raises:
        ValueError: on every rank, if not even one checkpoint fits.
    """
    if distributed.rank() != 0:
        return distributed.raise_everywhere()
    free = shutil.disk_usage(output_dir).free
    there = sum(map(size_of, checkpoint_folders(output_dir)))
    needed = max(checkpoint_bytes, ((kept or 1) + 1) * checkpoint_bytes - there)
    if free >= needed:
        return distributed.raise_everywhere()
    text = (
        f"{output_dir.resolve()} has {byte_size(free)} free; a checkpoint takes {byte_size(checkpoint_bytes)}, and the run's "
        f"take {byte_size(needed)} more. Free some, or give an --output_dir on another disk."
    )
    if free < checkpoint_bytes:
        return distributed.raise_everywhere(text)
    return distributed.raise_everywhere(None, [text])


def _surplus(output_dir: Path, limit: int | None, keep: Collection[int]) -> list[Path]:
    if limit is None:
        return []
    complete = [path for path in checkpoint_folders(output_dir) if not misfits(path)]
    return [path for path in complete[: -max(1, limit)] if step_of(path) not in keep]


def _discard(path: Path) -> None:
    """Remove a checkpoint such that no half of it is ever seen under its name."""
    try:
        path = path.rename(path.parent / f".{path.name}.removed")
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s is old, and cannot be removed: %s. Remove it by hand", path, error.strerror)
