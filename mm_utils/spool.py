"""Pushes that wait in a hidden folder of the output folder, each as the hard links of what is to stand in the repository.

A checkpoint that rotates away, or a file that is rewritten meanwhile, cannot spoil a push that waits; nor can the end of
the process, since the next one finds it. What waits costs disk only where the run itself has removed it since.
"""

import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mm_utils.checkpoints import checkpoint_folders, size_of

logger = logging.getLogger(__name__)

FOLDER, DESCRIPTION = ".hub", "push.json"
MOST_WAITING = 10
HIDDEN = ("*.tmp", ".*", "__pycache__")
# What resumes a run and is no part of a model.
RESUME_STATE = (
    *("optimizer*", "scheduler*", "scaler*", "random_states*", "ema.safetensors", "adapters.safetensors"),
    *("trainer_state.json", "run.json", "manifest.json", "tracker.json"),
)
# What a run writes at its end: of an earlier run, while this one is under way.
FINAL_MODEL = ("model*.safetensors", "model.safetensors.index.json", "dual_encoder")


@dataclass(frozen=True)
class Entry:
    """One push."""

    path: Path

    @property
    def files(self) -> Path:
        """The repository as it is to be."""
        return self.path / "files"

    @property
    def message(self) -> str:
        """Of the commit."""
        return str(json.loads((self.path / DESCRIPTION).read_text(encoding="utf-8"))["message"])

    @property
    def checkpoints(self) -> set[str]:
        """Names of the checkpoints that are pushed under their own name."""
        return {path.name for path in checkpoint_folders(self.files)}

    @property
    def size(self) -> int:
        """Bytes."""
        return size_of(self.files)

    def is_readable(self) -> bool:
        """Whether nothing else than `Spool.add` made it, and the disk has kept it."""
        try:
            return bool(self.message)
        except (OSError, ValueError, LookupError, TypeError):
            return False

    def remove(self) -> None:
        """It is pushed, or not wanted any more."""
        shutil.rmtree(self.path, ignore_errors=True)


class Spool:
    """The pushes of an output folder that wait, oldest first."""

    def __init__(self, output_dir: Path):
        self.output_dir, self.folder = output_dir, output_dir / FOLDER

    def entries(self) -> list[Entry]:
        """All that are complete."""
        paths = [path for path in self.folder.glob("*") if path.name.isdecimal()]
        entries = [Entry(path) for path in sorted(paths, key=lambda path: int(path.name))]
        return [entry for entry in entries if entry.is_readable()]

    def add(self, message: str, strategy: str, checkpoint: Path | None, under_way: bool) -> Entry:
        """Lay out what is in the output folder now.

        Args:
            message: of the commit.
            strategy: of HubArguments: which checkpoints come along.
            checkpoint: the one that comes along; None for those in the output folder.
            under_way: the model is that of `checkpoint`; otherwise that of the output folder.

        Raises:
            OSError: if a file cannot be linked or copied; nothing is left of it then.
        """
        temporary = self.folder / "new.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        files = temporary / "files"
        files.mkdir(parents=True)
        try:
            if checkpoint is not None and under_way:
                _link_tree(self.output_dir, files, (*HIDDEN, *RESUME_STATE, "checkpoint-*", *FINAL_MODEL))
                _link_tree(checkpoint, files, (*HIDDEN, *RESUME_STATE))
            else:
                _link_tree(self.output_dir, files, (*HIDDEN, *RESUME_STATE, "checkpoint-*"))
            saved = [checkpoint] if checkpoint is not None else checkpoint_folders(self.output_dir)
            if strategy == "checkpoint" and saved:
                _link_tree(saved[-1], files / "last-checkpoint", HIDDEN)
            elif strategy == "all_checkpoints":
                for path in saved:
                    _link_tree(path, files / path.name, HIDDEN)
            (temporary / DESCRIPTION).write_text(json.dumps({"message": message}), encoding="utf-8")
            newest = max((int(path.name) for path in self.folder.glob("*") if path.name.isdecimal()), default=0)
            return Entry(temporary.rename(self.folder / str(newest + 1)))
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def tidy(self, busy: Entry | None) -> None:
        """Remove what a newer push replaces, and the oldest checkpoints where too much waits.

        Of the older ones only checkpoints are left that no newer one brings. `busy`, being pushed now, stays as it is.
        """
        entries = self.entries()
        brought: set[str] = set()
        for entry in reversed(entries):
            kept = entry.checkpoints - brought
            brought |= entry.checkpoints
            if entry in (busy, entries[-1]):
                continue
            for path in list(entry.files.iterdir()):
                if path.name not in kept:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            if not kept:
                entry.remove()
        waiting = [entry for entry in self.entries() if entry not in (busy, entries[-1])]
        while waiting and (len(waiting) >= MOST_WAITING or self._is_short_of_disk(entries[-1])):
            lost = waiting.pop(0)
            logger.warning(
                "%s: never pushed, and not kept any longer; %d pushes wait, and the disk has %.1f GB left",
                ", ".join(sorted(lost.checkpoints)),
                len(waiting) + 2,
                shutil.disk_usage(self.folder).free / 1e9,
            )
            lost.remove()

    def _is_short_of_disk(self, newest: Entry) -> bool:
        """Whether the run might lack the place for its next two checkpoints."""
        return shutil.disk_usage(self.folder).free < 2 * newest.size


def _link_tree(source: Path, target: Path, ignore: Sequence[str]) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*ignore), copy_function=_link, dirs_exist_ok=True)


def _link(source: str, target: str) -> str:
    """Hard-link weights; copy what is small and appended to, or where the file system has no links."""
    Path(target).unlink(missing_ok=True)
    if not source.endswith(".safetensors"):
        return str(shutil.copy2(source, target))
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
    return target
