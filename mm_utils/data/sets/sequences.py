"""What embedded clips and sounds share: two or three events in turn, told by captions.

Twins exchange the first two events. Which event comes first is not told by its place in the caption either. Each set of events
occurs in one order or in these two.
"""

import hashlib
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from datasets import DatasetDict, Value

from mm_utils.data.sets.generate import load_made

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
    "id": Value("string"),
    "image": None,
    "captions": [Value("string")],
    "languages": [Value("string")],
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
    """How the media of one kind are made.

    Attributes:
        name: of the data set, as --dataset_name names it.
        kind: of its media.
        version: part of the cache folder's name; to be raised with every change of a generated row.
        styles: ways to show the same events; part of the id.
        draw_events: draws n different events.
        phrase: says an event.
        render: makes the medium.
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
            "languages": ["en"] * len(captions),
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

        A row has `id`, `image` (an AVI file of JPEG frames, or a WAV file, not decoded), `captions` with their `languages`, `moments`
        (the `span` of each event in seconds, and a `phrase`), `order_pair` as scenes have it, `seconds`, `width` and `height`.
        Twins are neighbouring rows.
        """
        counts, seed = (num_train, num_eval), f"0 {self.name}"
        key = f"v{self.version}"
        return load_made(self.name, key, self.kind, _COLUMNS, counts, self.draw, seed, self.row, cache_dir)


def lay_out(lengths: Sequence[int], total: int, margin: int, rng: random.Random) -> list[tuple[int, int]]:
    """Place stretches in turn, at least `margin` apart; return their begins and ends."""
    free = total - sum(lengths) - margin * (len(lengths) + 1)
    cuts = sorted(int(rng.random() * (free + 1)) for _ in lengths)
    begins = [cut + margin * (place + 1) + sum(lengths[:place]) for place, cut in enumerate(cuts)]
    return [(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
