"""What the embedded sets share: contents with twins, divided by their hash, which become rows once; clips and sounds of events in turn.

No bag of words solves these sets: half of the drawn contents get a *twin* in their split, whose captions have the same words in
another order. Each content occurs at most once, and a hash of it decides the split, so that validation and test hold
combinations that training never has. A content has `group`, the text that it shares with its twin and that decides the split, and `twin`.
"""

import hashlib
import logging
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from datasets import Dataset, DatasetDict, Features, Value
from tqdm.auto import tqdm

from mm_utils.data.media import FEATURES
from mm_utils.stored import stored

logger = logging.getLogger(__name__)

Event = tuple[str, ...]
Span = tuple[float, float]


def load_made(
    name: str,
    key: str,
    kind: str,
    columns: dict[str, Any],
    counts: Sequence[int],
    draw: Callable[[random.Random], Any],
    seed: str,
    row: Callable[[Any, str, int], dict[str, Any]],
    cache_dir: str | os.PathLike[str] | None,
) -> DatasetDict:
    """Load the splits train, validation and test from the cache; generate them on first use.

    Args:
        key: names the folder in the cache; it must change with everything that decides a row.
        columns: types of the columns; None for `image`.
        counts: rows of train and of both other splits.
        row: makes a row of a content, its split, and its number there; `image` is the stored file.
    """
    train, other = counts

    def generate(folder: Path) -> None:
        logger.info("Generating %d %s into %s", train + 2 * other, name, folder.parent)
        stored_as = Features({**columns, "image": FEATURES[kind]}).arrow_schema
        file = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        plain = pa.schema([pa.field("image", file) if field.name == "image" else field for field in stored_as])
        splits = DatasetDict()
        for split, contents in draw_contents(draw, {"train": train, "validation": other, "test": other}, seed).items():
            bar = tqdm(contents, desc=f"Generating {split} {name}", unit=kind)
            rows = [row(content, split, number) for number, content in enumerate(bar)]
            rows = [{**one, "image": {"bytes": one["image"], "path": None}} for one in rows]
            # `Dataset.from_list` would decode the media of some kinds.
            splits[split] = Dataset(pa.Table.from_pylist(rows, schema=plain).cast(stored_as))
        splits.save_to_disk(str(folder))

    return DatasetDict.load_from_disk(str(stored(name, f"{key}-train{train}-eval{other}-seed0", generate, cache_dir)))


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


# -- events in turn -----------------------------------------------------------------------------------------------------

CAPTIONS = 3  # of a medium, each by another template
_TEMPLATES = (  # of two events, and what a third one adds
    ("{a}, then {b}", ", then {c}"),
    ("first {a}, then {b}", ", and last {c}"),
    ("{a} before {b}", ", and then {c}"),
    ("{b} after {a}", ", and then {c}"),
    ("after {a}, {b}", ", and then {c}"),
)
_COLUMNS = {
    "id": Value("string"),
    "image": None,
    "captions": [Value("string")],
    "moments": [{"span": [Value("float64")], "phrase": Value("string")}],
    "order_pair": {"true": Value("string"), "false": Value("string")},
    "seconds": Value("float64"),
    "width": Value("int32"),
    "height": Value("int32"),
}


class Medium(NamedTuple):
    """A rendered content: the stored file, each event's span in seconds, the frames' size."""

    content: bytes
    spans: list[Span]
    seconds: float
    width: int | None = None
    height: int | None = None


class Content(NamedTuple):
    """Events in their order, and the style that shows them."""

    style: str
    events: tuple[Event, ...]

    def group(self) -> str:
        """Return the text that all orders of the events share; it decides the split and the style."""
        return "; ".join(sorted(map(" ".join, self.events)))

    def twin(self) -> "Content":
        """Return the content whose first two events have changed places."""
        first, second, *third = self.events
        return self._replace(events=(second, first, *third))


@dataclass(frozen=True)
class Recipe:
    """How the media of one kind are made: two or three events in turn, told by captions.

    Which event comes first is not told by its place in the caption. Each set of events occurs in one order, or also in that of its twin.

    Attributes:
        version: part of the cache folder's name; to be raised with every change of a generated row.
        styles: ways to show the same events; part of the id.
        draw_events: draws n different events.
    """

    name: str
    kind: str
    version: str
    styles: tuple[str, ...]
    draw_events: Callable[[random.Random, int], tuple[Event, ...]]
    phrase: Callable[[Event], str]
    render: Callable[[Content, random.Random], Medium]

    def draw(self, rng: random.Random) -> Content:
        """Draw two or three events."""
        content = Content("", self.draw_events(rng, 2 if rng.random() < 0.5 else 3))
        digest = hashlib.sha256(content.group().encode()).digest()
        return content._replace(style=self.styles[digest[1] % len(self.styles)])

    def captions(self, content: Content) -> list[str]:
        """Return the captions of a content; its twin's are of the same templates."""
        rng = random.Random(f"0 {content.group()}")
        first, second, *third = map(self.phrase, content.events)
        captions = []
        for pattern, suffix in sorted(_TEMPLATES, key=lambda _: rng.random())[:CAPTIONS]:
            caption = pattern.format(a=first, b=second)
            captions.append(caption + suffix.format(c=third[0]) if third else caption)
        return captions

    def row(self, content: Content, split: str, number: int) -> dict[str, Any]:
        """Return a row of the set."""
        made = self.render(content, random.Random(f"0 {split} {number}"))
        captions, phrases = self.captions(content), map(self.phrase, content.events)
        return {
            "id": f"{content.style}-{split}-{number:05d}",
            "image": made.content,
            "captions": captions,
            "moments": [
                {"span": list(span), "phrase": phrase} for span, phrase in zip(made.spans, phrases, strict=True)
            ],
            "order_pair": {"true": captions[0], "false": self.captions(content.twin())[0]},
            "seconds": made.seconds,
            "width": made.width,
            "height": made.height,
        }

    def load(self, num_train: int, num_eval: int, cache_dir: str | os.PathLike[str] | None = None) -> DatasetDict:
        """Load the splits train, validation and test.

        A row has `id`, `image` (an AVI file of JPEG frames, or a WAV file, not decoded), `captions`, `moments` (the `span` of each event
        in seconds, and a `phrase`), `order_pair` as scenes have it, `seconds`, `width` and `height`. Twins are neighbouring rows.
        """
        counts, seed = (num_train, num_eval), f"0 {self.name}"
        return load_made(
            self.name, f"v{self.version}", self.kind, _COLUMNS, counts, self.draw, seed, self.row, cache_dir
        )


def lay_out(lengths: Sequence[int], total: int, margin: int, rng: random.Random) -> list[tuple[int, int]]:
    """Place stretches in turn, at least `margin` apart; return their begins and ends."""
    free = total - sum(lengths) - margin * (len(lengths) + 1)
    cuts = sorted(int(rng.random() * (free + 1)) for _ in lengths)
    begins = [cut + margin * (place + 1) + sum(lengths[:place]) for place, cut in enumerate(cuts)]
    return [(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
