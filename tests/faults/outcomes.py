"""What became of the rows of the zoo of faults, by the names that its writers gave them."""

import json
import logging
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from datasets import load_from_disk
from PIL import Image

from mm_utils.data.images import open_image
from mm_utils.data.sources import DataArguments, load_pairs
from tests.data.prepare.fault_corpus import Corpus
from tests.data.prepare.fault_images import draw
from tests.data.prepare.fault_rows import line

CLOSE = 12  # levels of 255; pictures of two numbers differ by 50 and more


@lru_cache(maxsize=1)
def _rows(folder: Path) -> dict[tuple[str, tuple[str, ...]], dict[str, Any]]:
    """By source and captions."""
    splits = load_from_disk(str(folder)).values()
    return {(row["source"], tuple(row["captions"])): row for rows in splits for row in rows}


@lru_cache(maxsize=1)
def _quarantine(folder: Path) -> set[tuple[str, str, str]]:
    faults = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
    return {(fault["source"], fault["where"], fault["reason"]) for fault in faults}


def check_set_aside(zoo: Corpus, prepared: Path, source: str, kind: str) -> None:
    """Rows of a kind are in the quarantine with their places and reasons, and nothing else of theirs came out."""
    losses = [loss for loss in zoo.losses if (loss.source, loss.kind) == (source, kind)]
    assert losses, f"the zoo has no {kind} in {source}"
    assert {(loss.source, loss.where, loss.reason) for loss in losses} <= _quarantine(prepared)
    kept = [pair for pair in zoo.pairs if (pair.source, pair.kind) == (source, kind)]
    for pair in kept:  # a row that lost one caption of several
        assert (pair.source, pair.captions) in _rows(prepared)


def check_kept(zoo: Corpus, prepared: Path, source: str, kind: str) -> None:
    """Rows of a kind came out, each with its own captions and the right pixels."""
    pairs = [pair for pair in zoo.pairs if (pair.source, pair.kind) == (source, kind)]
    assert pairs, f"the zoo has no {kind} in {source}"
    for pair in pairs:
        image = open_image(_rows(prepared)[pair.source, pair.captions]["image"]).resize(pair.picture.size)
        assert pixels_apart(image, pair.picture) < CLOSE


def pixels_apart(image: Image.Image, other: Image.Image) -> float:
    """Mean difference in levels of 255."""
    return float(np.abs(np.asarray(image, np.float32) - np.asarray(other, np.float32)).mean())


def train_on(zoo: Corpus, source: str, file: str, kind: str) -> tuple[int, int, str]:
    """Load the row of a kind, third of four of which the others are good, as a training script would.

    Returns:
        The number of the row's line, how many images were loaded, and what was said of the others.
    """
    path = zoo.folder / source / file
    [at] = {loss.where for loss in zoo.losses if (loss.source, loss.kind) == (source, kind)}
    row = path.read_bytes().split(b"\n")[int(at.removeprefix("line ")) - 1]
    good = []
    for number in range(3):
        draw(1_000_000 + number).save(path.parent / f"good-{number}.png")
        fields = {"id": f"good {number}" if b'"id"' in row else ..., "split": "train" if b'"split"' in row else ...}
        good.append(line(image=f"good-{number}.png", caption=f"good {number}", **fields).encode())
    single = path.with_name(f"only {re.sub('[^a-z0-9]', ' ', kind)}.jsonl"[-200:])
    single.write_bytes(b"\n".join([*good[:2], row, good[2]]) + b"\n")
    heard = _Heard()
    logger = logging.getLogger("mm_utils")
    logger.addHandler(heard)
    try:
        pairs = load_pairs(DataArguments(train_file=str(single)))
    except ValueError as error:
        return 3, 0, str(error)
    finally:
        logger.removeHandler(heard)
    return 3, sum(map(len, pairs.values())), "\n".join(heard.messages)


class _Heard(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
