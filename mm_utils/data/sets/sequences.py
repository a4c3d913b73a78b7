"""What embedded clips and sounds share: two or three events in turn, told by captions.

No bag of words solves them: half of the drawn contents get a *twin* in their split, in which the first two events change
places, with captions of the same words in another order. Which event comes first is not told by its place in the caption
either. Each set of events occurs in one order or in these two, and a hash of it, not the seed, decides the split, so that
validation and test hold combinations that training never has.
"""

import hashlib
import logging
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
from tqdm.auto import tqdm

from mm_utils.data.media import FEATURES
from mm_utils.stored import stored

logger = logging.getLogger(__name__)

Event = tuple[str, ...]
Span = tuple[float, float]

CAPTIONS = 3  # of a medium, each by another template
_TEMPLATES = (  # of two events, and what a third one adds
    ("{a}, then {b}", ", then {c}"),
    ("first {a}, then {b}", ", and last {c}"),
    ("{a} before {b}", ", and then {c}"),
    ("{b} after {a}", ", and then {c}"),
    ("after {a}, {b}", ", and then {c}"),
)
_COLUMNS = {
    "id": datasets.Value("string"),
    "image": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
    "captions": [datasets.Value("string")],
    "languages": [datasets.Value("string")],
    "moments": [{"span": [datasets.Value("float64")], "phrase": datasets.Value("string")}],
    "order_pair": {"true": datasets.Value("string"), "false": datasets.Value("string")},
    "seconds": datasets.Value("float64"),
    "width": datasets.Value("int32"),
    "height": datasets.Value("int32"),
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
    """How the media of one kind are made.

    Attributes:
        name: of the data set, as --dataset_name names it.
        kind: of its media.
        version: part of the cache folder's name; to be raised with every change of a generated row.
        styles: ways to show the same events; part of the id.
        draw: draws n different events.
        phrase: says an event.
        render: makes the medium.
    """

    name: str
    kind: str
    version: str
    styles: tuple[str, ...]
    draw: Callable[[random.Random, int], tuple[Event, ...]]
    phrase: Callable[[Event], str]
    render: Callable[[Content, random.Random], Medium]


def load_sequences(
    recipe: Recipe, num_train: int, num_eval: int, seed: int = 0, cache_dir: str | os.PathLike[str] | None = None
) -> datasets.DatasetDict:
    """Load the splits train, validation and test from the cache; generate them on first use.

    A row has `id`, `image` (an AVI file of JPEG frames, or a WAV file, not decoded), `captions` with their `languages`, `moments`
    (the `span` of each event in seconds, and a `phrase`), `order_pair` as scenes have it, `seconds`, `width` and `height`.
    Twins are neighbouring rows. The cache is `cache_dir`, or else the one of `datasets`.

    Raises:
        ValueError: if a number is out of range.
    """
    for name, value in (("num_train", num_train), ("num_eval", num_eval)):
        if value < 1:
            raise ValueError(f"{name} is {value}; the least that works is 1. Pass 1 or more.")

    def generate(folder: Path) -> None:
        logger.info("Generating %d %s into %s", num_train + 2 * num_eval, recipe.name, folder.parent)
        splits = datasets.DatasetDict()
        counts = {"train": num_train, "validation": num_eval, "test": num_eval}
        for split, contents in draw_contents(recipe, counts, seed).items():
            bar = tqdm(contents, desc=f"Generating {split} {recipe.name}", unit=recipe.kind)
            rows = [_row(recipe, content, split, index, seed) for index, content in enumerate(bar)]
            splits[split] = _dataset(rows, recipe.kind)
        splits.save_to_disk(str(folder))

    key = f"v{recipe.version}-train{num_train}-eval{num_eval}-seed{seed}"
    return datasets.DatasetDict.load_from_disk(str(stored(recipe.name, key, generate, cache_dir)))


def draw_contents(recipe: Recipe, counts: dict[str, int], seed: int) -> dict[str, list[Content]]:
    """Draw n contents of every split, twins beside each other."""
    rng = random.Random(f"{seed} {recipe.name}")
    contents: dict[str, list[Content]] = {split: [] for split in counts}
    seen: set[str] = set()
    while any(len(contents[split]) < count for split, count in counts.items()):
        events, with_twin = recipe.draw(rng, 2 if rng.random() < 0.5 else 3), rng.random() < 0.5
        group = Content("", events).group()
        digest = hashlib.sha256(group.encode()).digest()
        split = "train" if digest[0] < 205 else "validation" if digest[0] < 231 else "test"
        content = Content(recipe.styles[digest[1] % len(recipe.styles)], events)
        room = counts[split] - len(contents[split])
        if room and group not in seen:
            seen.add(group)
            contents[split] += [content, content.twin()][: min(room, 1 + with_twin)]
    return contents


def captions_of(recipe: Recipe, content: Content, seed: int) -> list[str]:
    """Return the captions of a content; its twin's are of the same templates."""
    rng = random.Random(f"{seed} {content.group()}")
    first, second, *third = map(recipe.phrase, content.events)
    captions = []
    for pattern, suffix in sorted(_TEMPLATES, key=lambda _: rng.random())[:CAPTIONS]:
        caption = pattern.format(a=first, b=second)
        captions.append(caption + suffix.format(c=third[0]) if third else caption)
    return captions


def lay_out(lengths: Sequence[int], total: int, margin: int, rng: random.Random) -> list[tuple[int, int]]:
    """Place stretches in turn, at least `margin` apart; return their begins and ends."""
    free = total - sum(lengths) - margin * (len(lengths) + 1)
    cuts = sorted(int(rng.random() * (free + 1)) for _ in lengths)
    begins = [cut + margin * (place + 1) + sum(lengths[:place]) for place, cut in enumerate(cuts)]
    return [(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]


def _row(recipe: Recipe, content: Content, split: str, index: int, seed: int) -> dict[str, Any]:
    made = recipe.render(content, random.Random(f"{seed} {split} {index}"))
    captions = captions_of(recipe, content, seed)
    phrases = map(recipe.phrase, content.events)
    return {
        "id": f"{content.style}-{split}-{index:05d}",
        "image": {"bytes": made.content, "path": None},
        "captions": captions,
        "languages": ["en"] * len(captions),
        "moments": [{"span": list(span), "phrase": phrase} for span, phrase in zip(made.spans, phrases, strict=True)],
        "order_pair": {"true": captions[0], "false": captions_of(recipe, content.twin(), seed)[0]},
        "seconds": made.seconds,
        "width": made.width,
        "height": made.height,
    }


def _dataset(rows: list[dict[str, Any]], kind: str) -> datasets.Dataset:
    """Return rows as a data set; `Dataset.from_list` would decode the media of some kinds."""
    table = pa.Table.from_pylist(rows, schema=datasets.Features(_COLUMNS).arrow_schema)
    features = datasets.Features({**_COLUMNS, "image": FEATURES[kind]})
    return datasets.Dataset(table.cast(features.arrow_schema))
