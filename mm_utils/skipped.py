"""Training rows that could not be read: written down, counted over all ranks and restarts, and the end of a run of too many."""

import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from mm_utils import ranks
from mm_utils.data.substitutes import SHOWN_IN_VALIDATION
from mm_utils.jsonl import append_rows

logger = logging.getLogger(__name__)

SKIPPED_FILE = "skipped_images.jsonl"
LEAST = 20  # corrupt rows, before their share says anything
IN_SUCCESSION = 100  # corrupt rows without a good one between them: a disk that is gone
_NAMED = 10  # in the log; all are in the file
_REASONS = 1000  # that are counted one by one
_NUMBER = re.compile(r"\d+")


class SkippedImages:
    """What the batches' `skipped` say, over a whole run.

    A row counts each time it is drawn, also where another one took its place. Rows of a stream that are left out because
    validation has them are written down, too, but not counted: nothing is wrong with them.

    Args:
        folder: where `skipped_images.jsonl` is written, by the main process: {"step", "image_id", "reason"} a line.
        max_share: of all pairs drawn, that may be corrupt.

    Attributes:
        count: corrupt rows of all ranks, since the first step of the run, as of the last `settle`.
    """

    def __init__(self, folder: Path, max_share: float):
        self.path, self.max_share = folder / SKIPPED_FILE, max_share
        self.count, self._pairs, self._in_succession = 0, 0, 0
        self._new: list[tuple[int, str, str]] = []
        self._reasons: Counter[str] = Counter()
        self._named = 0

    def add(self, step: int, batch: dict[str, Any]) -> None:
        """Note what this rank's batch of `step`, counted from 1, has skipped. Costs nothing where that is nothing."""
        self._new += ((step, *both) for both in zip(batch["skipped_ids"], batch["skipped"], strict=True))

    def settle(self, pairs: int, device: torch.device) -> int:
        """Gather what all ranks have added, and write it down. All ranks call it at the same step.

        Args:
            pairs: drawn by all ranks since the first step of the run.
            device: of the collectives.

        Returns:
            `count`.

        Raises:
            ValueError: on all ranks, if more than `max_share` of the pairs were corrupt, but at least 20 of them; or as many
                as were drawn, 100 or more one after the other.
        """
        drawn, self._pairs = pairs - self._pairs, pairs
        if not ranks.any_rank(bool(self._new), device):
            self._in_succession = 0 if drawn else self._in_succession
            return self.count
        found: list[tuple[int, str, str]] = sorted(gather_object(self._new))
        self._new = []
        reasons = [reason for _, _, reason in found if not reason.endswith(SHOWN_IN_VALIDATION)]
        self.count += len(reasons)
        self._in_succession = self._in_succession + len(reasons) if len(reasons) >= drawn else 0
        for kind in map(_kind, reasons):
            if kind in self._reasons or len(self._reasons) < _REASONS:
                self._reasons[kind] += 1
        if ranks.rank() == 0:
            self._write(found)
        too_many = self.count >= LEAST and self.count > self.max_share * pairs
        if too_many or self._in_succession >= IN_SUCCESSION:
            raise ValueError(self._complaint(too_many))
        return self.count

    def state(self) -> dict[str, int]:
        """What a resumed run goes on from; call `settle` before."""
        return {"count": self.count, "pairs": self._pairs, "in_succession": self._in_succession}

    def load(self, state: dict[str, int]) -> None:
        """Go on from a `state`."""
        self.count, self._pairs, self._in_succession = state["count"], state["pairs"], state["in_succession"]

    def _write(self, found: list[tuple[int, str, str]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append_rows(
            self.path, ({"step": step, "image_id": image_id, "reason": reason} for step, image_id, reason in found)
        )
        for step, _, reason in found[: _NAMED - self._named]:
            logger.warning("Step %d skipped %s", step, reason)
        if self._named < _NAMED <= self._named + len(found):
            logger.warning("Whatever else is skipped is in %s alone", self.path)
        self._named = min(_NAMED, self._named + len(found))

    def _complaint(self, too_many: bool) -> str:
        most = "; ".join(f"{times:,} x {kind}" for kind, times in self._reasons.most_common(3))
        what = (
            f"--max_corrupt_share is {self.max_share:g}; {self.count:,} of {self._pairs:,} rows"
            if too_many
            else f"the training data is out of reach; {self._in_succession:,} rows one after the other"
        )
        return (
            f"{what} could not be read, most often: {most}. All are in {self.path}. Clean the data with "
            "scripts/prepare_data.py, or look whether its disk is there."
        )


def _kind(reason: str) -> str:
    """What reasons of one kind have in common: their last clause, without numbers."""
    return _NUMBER.sub("N", reason.rpartition(": ")[2])[:100]
