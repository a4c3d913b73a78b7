"""What the embedded sets share: contents with twins, divided by their hash, which become rows once.

No bag of words solves these sets: half of the drawn contents get a *twin* in their split, whose captions have the same words in
another order. Each content occurs at most once, and a hash of it decides the split, so that validation and test hold
combinations that training never has.
"""

import hashlib
import logging
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from datasets import Dataset, DatasetDict, Features
from tqdm.auto import tqdm

from mm_utils.data.media import FEATURES
from mm_utils.stored import stored

logger = logging.getLogger(__name__)


class Content(Protocol):
    """What a row of an embedded set shows."""

    def group(self) -> str:
        """Return the text that a content and its twin share; it decides the split."""

    def twin(self) -> Any:
        """Return the content whose first two things have changed places."""


def load_made(
    name: str,
    key: str,
    kind: str,
    columns: dict[str, Any],
    counts: Sequence[int],
    draw: Callable[[random.Random], Content],
    seed: str,
    row: Callable[[Any, str, int], dict[str, Any]],
    cache_dir: str | os.PathLike[str] | None,
) -> DatasetDict:
    """Load the splits train, validation and test from the cache; generate them on first use.

    Args:
        name: of the set.
        key: names the folder in the cache; it must change with everything that decides a row.
        kind: of its media.
        columns: types of the columns beside `image`.
        counts: rows of train and of both other splits.
        draw: draws a content.
        seed: of the draws.
        row: makes a row of a content, its split, and its number there; `image` is the stored file.
        cache_dir: the cache, or else the one of `datasets`.
    """
    train, other = counts

    def generate(folder: Path) -> None:
        logger.info("Generating %d %s into %s", train + 2 * other, name, folder.parent)
        stored_as = Features({**columns, "image": FEATURES[kind]}).arrow_schema
        plain = pa.schema([pa.field("image", _FILE) if field.name == "image" else field for field in stored_as])
        splits = DatasetDict()
        for split, contents in draw_contents(draw, {"train": train, "validation": other, "test": other}, seed).items():
            bar = tqdm(contents, desc=f"Generating {split} {name}", unit=kind)
            rows = [row(content, split, number) for number, content in enumerate(bar)]
            rows = [{**one, "image": {"bytes": one["image"], "path": None}} for one in rows]
            # `Dataset.from_list` would decode the media of some kinds.
            splits[split] = Dataset(pa.Table.from_pylist(rows, schema=plain).cast(stored_as))
        splits.save_to_disk(str(folder))

    return DatasetDict.load_from_disk(str(stored(name, f"{key}-train{train}-eval{other}-seed0", generate, cache_dir)))


_FILE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def draw_contents(draw: Callable[[random.Random], Any], counts: dict[str, int], seed: str) -> dict[str, list[Any]]:
    """Draw n contents of every split, twins beside each other."""
    rng = random.Random(seed)
    contents: dict[str, list[Any]] = {split: [] for split in counts}
    seen: set[str] = set()
    while any(len(contents[split]) < count for split, count in counts.items()):
        content, with_twin = draw(rng), rng.random() < 0.5
        group = content.group()
        bucket = hashlib.sha256(group.encode()).digest()[0]
        split = "train" if bucket < 205 else "validation" if bucket < 231 else "test"  # of 256: 80, 10 and 10 %
        room = counts[split] - len(contents[split])
        if room and group not in seen:
            seen.add(group)
            contents[split] += [content, content.twin()][: min(room, 1 + with_twin)]
    return contents
