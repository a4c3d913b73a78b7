"""Measure a prepared data set, and draw contact sheets of some of its pairs."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict
from datasets import Image as ImageFeature
from matplotlib.figure import Figure
from PIL import Image, ImageOps

from mm_utils.data.images import UnreadableImageError
from mm_utils.data.media import kind_of
from mm_utils.data.media.pictures import picture
from mm_utils.plots import (
    LIGHT,
    MUTED,
    draw_text,
    save_figure,
    wrap,
)

_BATCH_ROWS = 4000
# The gaps of `str.split()`; RE2's own \s knows ASCII only.
_WORD = r"[^\s\x0b\x1c-\x1f\x{85}\p{Z}]+"


# -- statistics ---------------------------------------------------------------------------------------------------------


@dataclass
class PairStatistics:
    """Counts of one split; every counter maps a value to its count.

    Attributes:
        kind: what its media are, of `mm_utils.data.media.COLUMNS`; `images` counts them, whatever they are.
        seconds: tenths of a second, of clips and sounds.
        short_side, aspect: of the original images where their sizes are known (`original`), else of the stored ones.
            `aspect` is round(10 log2(width / height)): 0 is square, 10 twice as wide as high.
        words: between spaces, so a sentence in Chinese or Thai is one or few.
    """

    kind: str = "image"
    images: int = 0
    captions: int = 0
    original: bool = False
    seconds: Counter[int] = field(default_factory=Counter)
    short_side: Counter[int] = field(default_factory=Counter)
    aspect: Counter[int] = field(default_factory=Counter)
    captions_per_image: Counter[int] = field(default_factory=Counter)
    words: Counter[int] = field(default_factory=Counter)
    characters: Counter[int] = field(default_factory=Counter)


def measure_pairs(split: Dataset) -> PairStatistics:
    """Count the values of one split with a `captions` column; the columns of sizes are optional.

    No image is read and no row becomes a Python object: a million images with five captions each take about 7 s of one core.
    """
    original = {"original_width", "original_height"} <= set(split.column_names)
    found = PairStatistics(kind_of(split.features), original=original)
    sides = ("original_width", "original_height") if found.original else ("width", "height")
    names = [name for name in (*sides, "seconds", "captions") if name in split.column_names]
    for table in split.select_columns(names).with_format("arrow").iter(_BATCH_ROWS):
        if set(sides) <= set(names):
            _count_sizes(found, *(table[side].to_numpy().astype(float) for side in sides))
        if "seconds" in names:
            _add(found.seconds, pc.cast(pc.round(pc.multiply(table["seconds"], 10)), pa.int64()))
        _count_captions(found, table["captions"])
    return found


def quantile(counts: Counter[int], share: float) -> int:
    """Return the smallest value that at least `share` of all do not exceed; 0 if there are none."""
    if not counts:
        return 0
    values = sorted(counts)
    below = np.cumsum([counts[value] for value in values])
    return values[int(np.searchsorted(below, share * below[-1]))]


def mean(counts: Counter[int]) -> float:
    """Return the mean of all values; 0 if there are none."""
    return sum(value * count for value, count in counts.items()) / (counts.total() or 1)


def _add(counts: Counter[Any], values: pa.ChunkedArray | pa.Array) -> None:
    for pair in pc.value_counts(values).to_pylist():
        if pair["values"] is not None:
            counts[pair["values"]] += pair["counts"]


def _count_sizes(found: PairStatistics, width: np.ndarray, height: np.ndarray) -> None:
    known = (width > 0) & (height > 0)  # False for a missing value, too
    width, height = width[known], height[known]
    _add(found.short_side, pa.array(np.minimum(width, height).astype(np.int64)))
    _add(found.aspect, pa.array(np.round(10 * np.log2(width / height)).astype(np.int64)))


def _count_captions(found: PairStatistics, lists: pa.ChunkedArray) -> None:
    captions = pc.list_flatten(lists).drop_null()
    found.images += len(lists)
    found.captions += len(captions)
    _add(found.captions_per_image, pc.fill_null(pc.list_value_length(lists), 0))
    _add(found.words, pc.count_substring_regex(captions, pattern=_WORD))
    _add(found.characters, pc.utf8_length(captions))


# -- contact sheets -----------------------------------------------------------------------------------------------------


@dataclass
class Tile:
    """A picture of a contact sheet, None for a grey field, with a title and up to five lines."""

    image: Image.Image | None
    title: str
    text: str = ""


def draw_contact_sheet(tiles: list[Tile], out_path: Path, columns: int = 6, group: int = 1) -> None:
    """Draw tiles row by row as a JPEG; each `group` neighbours in a row stand close together."""
    side, below, gap = 1.5, 0.94, 0.14  # inches
    columns = min(columns, len(tiles))
    left = [gap + column * (side + gap) + (column // group) * gap * (group > 1) for column in range(columns)]
    width, height = left[-1] + side + gap, gap + math.ceil(len(tiles) / columns) * (side + below)
    figure = Figure(figsize=(width, height), dpi=120, facecolor="white")
    for index, tile in enumerate(tiles):
        row, column = divmod(index, columns)
        bottom = height - gap - (row + 1) * (side + below)
        ax = figure.add_axes((left[column] / width, bottom / height, side / width, (side + below) / height))
        ax.set_axis_off()
        picture = Image.new("RGB", (180, 180), LIGHT)
        if tile.image is not None:
            picture = ImageOps.pad(tile.image.convert("RGB"), picture.size, color="#f8fafc")
        ax.imshow(np.asarray(picture), extent=(0, side, 0, side))
        ax.set(xlim=(0, side), ylim=(-below, side))
        title = (
            tile.title if len(tile.title) <= 28 else f"{tile.title[:9]}…{tile.title[-18:]}"
        )  # one line, with its end
        draw_text(ax, 0, -0.05, wrap(title, 28, 1), va="top", fontsize=6.5, color=MUTED, clip_on=True)
        draw_text(ax, 0, -0.19, wrap(tile.text, 24, 5), va="top", fontsize=7.5, clip_on=True)
    # 24 photographs take 200 kB, and as a PNG five times that.
    save_figure(figure, out_path, pil_kwargs={"quality": 75, "optimize": True})


def random_tiles(split: Dataset, count: int, seed: int) -> list[Tile]:
    """Return tiles of at most `count` random rows, in the order of the rows."""
    rows = np.random.default_rng(seed).choice(len(split), min(count, len(split)), replace=False)
    return [row_tile(split, row) for row in sorted(rows.tolist())]


def matched_tiles(pairs: DatasetDict, matches: Sequence[Sequence[str]]) -> list[Tile]:
    """Return two tiles for each pair of ids in `matches`; an id twice means two rows of that id."""
    places: dict[str, list[tuple[str, int]]] = {key: [] for match in matches for key in match}
    for name, split in pairs.items() if places else ():
        ids = (key for batch in split.select_columns(["id"]).iter(10_000) for key in batch["id"])
        for row, key in enumerate(ids):
            if key in places:
                places[key].append((name, row))
    tiles: list[Tile] = []
    for first, second in matches:
        found = [*places[first][:1], *places[second][first == second :][:1]]
        if len(found) == 2:
            named = zip(found, (first, second), strict=True)
            tiles += [row_tile(pairs[split], row, f"{split}: {key}") for (split, row), key in named]
    return tiles


def row_tile(split: Dataset, row: int, title: str = "") -> Tile:
    """Return the tile of a row with its first caption, titled by its id."""
    kind, split = kind_of(split.features), split.with_format(None).select([row])
    pair = (split.cast_column("image", ImageFeature(decode=False)) if kind == "image" else split)[0]
    captions = [caption for caption in pair["captions"] or [] if caption]
    try:
        image = picture(pair["image"] or {}, kind)
    except UnreadableImageError:
        image = None
    return Tile(image, title or str(pair["id"]), captions[0] if captions else "")
