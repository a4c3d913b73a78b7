"""Which checkpoints stay: older ones make room, and never the newest that is whole."""

import errno
import logging
import shutil
from collections.abc import Collection
from pathlib import Path

from mm_utils.checkpoints import checkpoint_folders, misfits, newest_checkpoint, step_of

logger = logging.getLogger(__name__)


def remove_old_checkpoints(output_dir: Path, limit: int | None, keep: Collection[int]) -> None:
    """Keep the newest `limit` complete checkpoints, and those of the steps `keep` besides.

    Call it after a checkpoint was written: that one is among the newest. What cannot be removed is left with a warning.
    """
    for path in _surplus(output_dir, limit, keep):
        _discard(path)


def make_room(output_dir: Path, needed: int, limit: int | None, keep: Collection[int]) -> None:
    """See that there is room for a checkpoint of `needed` bytes before it is begun.

    Where there is not, what `remove_old_checkpoints` would remove after it goes now, but never the newest that verifies.

    Raises:
        OSError: ENOSPC, if there is still not enough.
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
            f"{needed / 2**20:,.0f} MiB. Make room, lower --save_total_limit, or give another --output_dir",
        )


def _surplus(output_dir: Path, limit: int | None, keep: Collection[int]) -> list[Path]:
    if limit is None:
        return []
    complete = [path for path in checkpoint_folders(output_dir) if not misfits(path)]
    return [path for path in complete[: -max(1, limit)] if step_of(path) not in keep]


def _discard(path: Path) -> None:
    """Remove a checkpoint such that no half of it is seen under its name."""
    try:
        path = path.rename(path.parent / f".{path.name}.removed")
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s is old, and cannot be removed: %s. Remove it by hand", path, error.strerror)
