"""Pictures of a prepared pair data set: histograms of its statistics, and some of its pairs as tiles."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict
from datasets import Image as ImageFeature
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullFormatter
from PIL import Image

from mm_utils.data.images import UnreadableImageError, open_image
from mm_utils.data.statistics import PairStatistics, quantile
from mm_utils.reporting import COLORS, INK, MUTED, Tile, new_figure, style_axes

_MOST_SPLITS = 4
_MOST_BINS = 30
_MOST_NAMES = 8
_RATIOS = ((1, 3), (1, 2), (2, 3), (1, 1), (3, 2), (2, 1), (3, 1))
_WIDEST = 16  # as counted, about 3:1


def draw_statistics(measured: dict[str, PairStatistics], out_path: Path) -> None:
    """Draw the histograms of the splits as one picture; a panel without values is left out.

    The first split is filled, up to three others are outlines. Heights are shares of a split, so that splits of
    different sizes can be compared; the first and last bar of a panel also hold what lies beyond.
    """
    shown = dict(list(measured.items())[:_MOST_SPLITS])
    kind = "original" if any(statistics.original for statistics in shown.values()) else "stored"
    panels = [
        (f"Short side of the {kind} image", "short_side", "images"),
        ("Width : height", "aspect", "images"),
        ("Captions per image", "captions_per_image", "images"),
        ("Words per caption", "words", "captions"),
        ("Characters per caption", "characters", "captions"),
        ("Languages", "languages", "captions"),
        ("Scripts, guessed from the letters", "scripts", "captions"),
    ]
    panels = [panel for panel in panels if any(getattr(statistics, panel[1]) for statistics in shown.values())]
    rows = max(1, -(-len(panels) // 3))
    figure = new_figure(11, 2.7 * rows)
    for index, (title, name, unit) in enumerate(panels):
        ax = figure.add_subplot(rows, 3, index + 1)
        style_axes(ax)
        ax.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
        counters = {split: getattr(statistics, name) for split, statistics in shown.items()}
        if name in ("languages", "scripts"):
            _draw_names(ax, counters.values())
            continue
        _draw_histogram(ax, counters, name == "aspect")
        ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g}%"))
        ax.set_ylabel(f"share of the {unit}", fontsize=8, color=MUTED)
    if len(shown) > 1 and figure.axes:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside upper right", ncols=_MOST_SPLITS, fontsize=9, frameon=False, labelcolor=INK
        )
    FigureCanvasAgg(figure).print_png(str(out_path))


def _draw_histogram(ax: Axes, counters: dict[str, Counter[int]], is_aspect: bool) -> None:
    """Bars of equal width from the smallest 0.5th to the largest 99.5th percentile of a split."""
    filled = [counts for counts in counters.values() if counts]
    low, high = (pick(quantile(counts, share) for counts in filled) for pick, share in ((min, 0.005), (max, 0.995)))
    if is_aspect:
        low, high = -_WIDEST, _WIDEST
    width = max(1, -(-(high - low + 1) // _MOST_BINS))
    edges = np.arange(low, high + width + 1, width) - 0.5
    for index, ((name, counts), color) in enumerate(zip(counters.items(), COLORS, strict=False)):
        heights, _ = np.histogram(np.clip(list(counts), low, high), edges, weights=list(counts.values()))
        look: dict[str, Any] = {"linewidth": 1.3} if index else {"fill": True, "alpha": 0.35, "linewidth": 0}
        ax.stairs(heights / max(counts.total(), 1), edges, color=color, label=_name(name, 20), **look)
    margin = max(0.02 * (edges[-1] - edges[0]), 1.0 if len(edges) < 6 else 0.0)
    ax.set_xlim(edges[0] - margin, edges[-1] + margin)
    smallest, largest = min(map(min, filled)), max(map(max, filled))
    if is_aspect:
        ax.xaxis.set_major_locator(FixedLocator([10 * np.log2(width / height) for width, height in _RATIOS]))
        ax.xaxis.set_major_formatter(FixedFormatter([f"{width}:{height}" for width, height in _RATIOS]))
    else:
        ax.set_xlabel(f"from {smallest:,} to {largest:,}", fontsize=8, color=MUTED)


def _draw_names(ax: Axes, counters: Iterable[Counter[str]]) -> None:
    """The most frequent names of all splits together as bars, each with its share."""
    total = sum(counters, Counter())
    ranked = sorted(total.items(), key=lambda item: (-item[1], item[0]))
    bars = [(_name(name, 14) or "unknown", count) for name, count in ranked[:_MOST_NAMES]]
    if ranked[_MOST_NAMES:]:
        bars.append((f"{len(ranked) - _MOST_NAMES} others", sum(count for _, count in ranked[_MOST_NAMES:])))
    places = list(range(len(bars)))
    ax.grid(visible=False)
    ax.spines["bottom"].set_visible(False)
    ax.barh(places, [count for _, count in bars], color=COLORS[0], alpha=0.35, height=0.7)
    for place, (_, count) in zip(places, bars, strict=True):
        share = count / total.total()
        ax.text(count, place, f" {share:.1%}" if share >= 0.001 else " <0.1%", va="center", fontsize=8, color=INK)
    ax.yaxis.set_major_locator(FixedLocator(places))
    ax.yaxis.set_major_formatter(FixedFormatter([name for name, _ in bars]))
    ax.xaxis.set_major_locator(MaxNLocator(1))
    ax.xaxis.set_major_formatter(NullFormatter())
    ax.set(xlim=(0, 1.25 * max(count for _, count in bars)), ylim=(max(len(bars), 4) - 0.5, -0.5))


def _name(text: str, length: int) -> str:
    """A name as matplotlib may show it: no formula, and none of the leading `_` that hides it from a legend."""
    text = "".join(letter for letter in text if letter.isprintable()).replace("$", "").lstrip("_")
    return text if len(text) <= length else text[: length - 1] + "…"


def random_tiles(split: Dataset, count: int, seed: int) -> list[Tile]:
    """`count` rows of the split, or all if it has fewer, each with its first caption, in the order of the rows.

    A grey field stands for an image that cannot be decoded.
    """
    rows = np.random.default_rng(seed).choice(len(split), min(count, len(split)), replace=False)
    return [_tile(split, row) for row in sorted(rows.tolist())]


def tiles_of_matches(pairs: DatasetDict, matches: Sequence[Sequence[str]]) -> list[Tile]:
    """Two tiles for each [id, id] of which at least one is in the data set; a grey field stands for a missing one.

    An id twice means two rows of that id, as two splits may have.
    """
    places = _find_ids(pairs, sorted({name for match in matches for name in match}))
    tiles = []
    for match in matches:
        rows = {name: iter(places.get(name, [])) for name in match}
        found = [(name, next(rows[name], None)) for name in match]
        if any(place for _, place in found):
            tiles += [
                _tile(pairs[place[0]], place[1], f"{place[0]}: {name}") if place else Tile(None, name, "(removed)")
                for name, place in found
            ]
    return tiles


def _find_ids(pairs: DatasetDict, ids: list[str]) -> dict[str, list[tuple[str, int]]]:
    """Where the rows with these ids are, as (split, row)."""
    places: dict[str, list[tuple[str, int]]] = {}
    for name, split in pairs.items():
        if not ids or "id" not in split.column_names:
            continue
        start = 0
        for table in split.select_columns(["id"]).with_format("arrow").iter(100_000):
            wanted = pa.array(ids, table["id"].type)
            for row in pc.indices_nonzero(pc.is_in(table["id"], wanted)).to_pylist():
                places.setdefault(table["id"][row].as_py(), []).append((name, start + row))
            start += len(table)
    return places


def _tile(split: Dataset, row: int, title: str = "") -> Tile:
    pair = split.with_format(None).select([row]).cast_column("image", ImageFeature(decode=False))[0]
    captions = [caption for caption in pair["captions"] or [] if caption]
    return Tile(_decode(pair["image"] or {}), title or str(pair.get("id", row)), captions[0] if captions else "")


def _decode(value: dict[str, Any]) -> Image.Image | None:
    try:
        return open_image(value)
    except UnreadableImageError:
        return None
