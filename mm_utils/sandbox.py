"""A folder in place of a run's output folder and its caches, that goes when the run has been tried."""

import logging
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import datasets
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from mm_utils import failures
from mm_utils.run import RunError

QUIET = ("mm_utils.finish", "mm_utils.monitor")  # they speak of a whole run and name a folder that goes
CACHE = "cache"


class Sandbox:
    """A hidden folder where `output_dir` is or will be, so on the same disk; created on all ranks together.

    It is removed by `remove`, and at the latest when the process ends, by the failure of another one too.

    Attributes:
        folder: it.
        cache: the folder in it for what is derived from the data.
        cache_home: where the datasets cache is.

    Raises:
        RunError: if it cannot be written.
    """

    def __init__(self, accelerator: Accelerator, output_dir: Path):
        made = _make(output_dir) if accelerator.is_main_process else None
        [made] = broadcast_object_list([made])
        if not isinstance(made, Path):
            raise RunError(str(made))
        self.folder, self.cache, self.cache_home = made, made / CACHE, Path(datasets.config.HF_DATASETS_CACHE)
        owned = accelerator.is_local_main_process
        self.remove = weakref.finalize(self, _clean_up, made, owned, datasets.config.HF_DATASETS_CACHE, _Silence())
        failures.at_stop(self.remove)

    def take_cache(self) -> None:
        """From now on, what `datasets` caches goes here."""
        datasets.config.HF_DATASETS_CACHE = self.cache


def nearest(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _make(output_dir: Path) -> Path | str:
    """A new hidden folder where `output_dir` is or will be; what is wrong, if there can be none."""
    try:
        return Path(tempfile.mkdtemp(prefix=".dry-run-", dir=nearest(output_dir).absolute()))
    except OSError as error:
        return f"--output_dir is {output_dir}; it cannot be written: {error.strerror}. Give a folder that can."


class _Silence(logging.Filter):
    """Nothing is said by `QUIET` until it is removed."""

    def __init__(self) -> None:
        super().__init__()
        for name in QUIET:
            logging.getLogger(name).addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Let nothing pass."""
        return False

    def remove(self) -> None:
        """Let them speak again."""
        for name in QUIET:
            logging.getLogger(name).removeFilter(self)


def _clean_up(folder: Path, owned: bool, cache_home: Any, silence: _Silence) -> None:
    """Undo what a dry run did to the process and, on one process of each machine, remove the folder."""
    silence.remove()
    if folder / CACHE == datasets.config.HF_DATASETS_CACHE:  # and not another dry run's
        datasets.config.HF_DATASETS_CACHE = cache_home
    if owned:
        shutil.rmtree(folder, ignore_errors=True)
