"""Pictures for people: training curves, retrieval examples, confusions, contact sheets, and the style of all figures."""

import contextlib
import functools
import json
import logging
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, PercentFormatter
from PIL import Image, ImageOps

logger = logging.getLogger(__name__)

Points = tuple[list[int], list[float]]

INK, MUTED, LIGHT = "#1f2937", "#6b7280", "#e5e7eb"
BLUE, ORANGE, GREEN, PURPLE, PINK, CYAN = COLORS = ("#2563eb", "#ea580c", "#059669", "#7c3aed", "#db2777", "#0891b2")

_MOST_CELLS = 50  # classes of a matrix of confusion that can be read

# Fonts with Chinese, Japanese and Korean letters, which matplotlib's own font lacks; used where they are installed.
_WIDE_FONTS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "PingFang SC", "Microsoft YaHei")


def plot_training(metrics_path: Path, out_path: Path) -> list[str]:
    """Draw `metrics_path`, one JSON object a line, as small multiples; returns the titles of the panels.

    A panel without values is left out; without any panel nothing is written. Lines that are not JSON are skipped, and
    of values with the same step, as after a resume, the later one counts.
    """
    series = _read_series(metrics_path)
    panels = [(title, draw) for title, pattern, draw in PANELS if any(re.fullmatch(pattern, name) for name in series)]
    if not panels:
        logger.warning("%s has no values to plot; %s is not written", metrics_path, out_path)
        return []
    columns = min(3, len(panels))
    figure = new_figure(4.5 * columns, 3.1 * math.ceil(len(panels) / columns))
    for index, (title, draw) in enumerate(panels):
        ax = figure.add_subplot(math.ceil(len(panels) / columns), columns, index + 1)
        style_axes(ax)
        draw(ax, series)
        ax.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
        if index >= len(panels) - columns:
            ax.set_xlabel("step", fontsize=8, color=MUTED)
    FigureCanvasAgg(figure).print_png(str(out_path))
    return [title for title, _ in panels]


def _read_series(path: Path) -> dict[str, Points]:
    """The finite values of each name, in order of the steps."""
    values: dict[str, dict[int, float]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off when the run was stopped
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            continue
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)) and math.isfinite(value):
                values.setdefault(name, {})[row["step"]] = float(value)
    return {name: (sorted(points), [points[step] for step in sorted(points)]) for name, points in values.items()}


def new_figure(width: float, height: float) -> Figure:
    """A figure of its own: `pyplot` and its global state stay untouched."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # type: ignore[union-attr,call-arg]
    return figure


def style_axes(ax: Axes) -> None:
    """Light horizontal grid, no frame, few ticks in short notation."""
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(LIGHT)
    ax.grid(axis="y", color=LIGHT, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=8, labelcolor=MUTED, length=0)
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=True))
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    ax.yaxis.set_major_formatter(FuncFormatter(_tick))


def _tick(value: float, position: int | None) -> str:
    return np.format_float_scientific(value, 3, trim="-", exp_digits=1) if 0 < value < 1e-3 else f"{value:,.5g}"


def small_legend(ax: Axes, **kwargs: Any) -> None:
    """A legend without a frame; `kwargs` are those of `Axes.legend`."""
    ax.legend(fontsize=7.5, frameon=False, labelcolor=INK, handlelength=1.6, **kwargs)


def _plot(ax: Axes, points: Points, color: str, label: str = "", width: float = 1.6) -> None:
    ax.plot(*points, color=color, linewidth=width, label=label, marker="o" * (len(points[0]) < 30), markersize=3)


def _plot_noisy(ax: Axes, points: Points, color: str, label: str = "", width: float = 1.6) -> None:
    """A line; from 100 values on their running mean, over the values themselves drawn faintly."""
    steps, values = points
    half = len(values) // 50
    if half >= 2:
        ax.plot(steps, values, color=color, linewidth=0.7, alpha=0.25)
        total = np.concatenate([[0.0], np.cumsum(values)])
        at = np.arange(len(values))
        low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
        values = ((total[high] - total[low]) / (high - low)).tolist()
    _plot(ax, (steps, values), color, label, width)


def _draw_losses(ax: Axes, series: dict[str, Points]) -> None:
    names = sorted((name for name in series if re.fullmatch(r"(.*_)?loss", name)), key=lambda name: (len(name), name))
    for index, name in enumerate(names):
        label = name.removesuffix("_loss").replace("_", " ").replace("loss", "total")
        _plot_noisy(ax, series[name], COLORS[index % len(COLORS)], label, 2.0 if name == "loss" else 1.3)
    if len(names) > 1:
        small_legend(ax, loc="upper right")


def _draw_recall(ax: Axes, series: dict[str, Points]) -> None:
    """One colour a direction, one line style a cut-off."""
    found = {name: match for name in series if (match := re.fullmatch(r"eval_(?:(.+)_)?recall@(\d+)", name))}
    directions = sorted({match[1] or "all" for match in found.values()}, key=lambda word: ("rerank" in word, word))
    cutoffs = sorted({int(match[2]) for match in found.values()})
    styles = [("solid", 2.0, "o"), ("dashed", 1.3, ""), ("dotted", 1.3, "")]
    for name, match in found.items():
        rank = cutoffs.index(int(match[2]))
        style, width, marker = styles[min(rank, 2)]
        color = COLORS[directions.index(match[1] or "all") % len(COLORS)]
        ax.plot(*series[name], color=color, linestyle=style, linewidth=width, marker=marker, markersize=3)
    for direction, color in zip(directions, COLORS * len(directions), strict=False):
        label = direction.replace("_to_", " → ").replace("rerank_", "re-ranked ").replace("_", " ")
        ax.plot([], [], color=color, linewidth=2, label=label)
    note = ", ".join(f"@{cutoff} {styles[min(rank, 2)][0]}" for rank, cutoff in enumerate(cutoffs))
    ax.set_title(note, loc="right", fontsize=7.5, color=MUTED)
    small_legend(ax, loc="best")


def _draw_accuracy(ax: Axes, series: dict[str, Points]) -> None:
    known = ("train_accuracy", "eval_accuracy", "eval_macro_f1")
    for name, color in zip(known, (CYAN, BLUE, ORANGE), strict=True):
        if name in series:
            _plot(ax, series[name], color, name.replace("train_", "training ").removeprefix("eval_").replace("_", " "))
    small_legend(ax, loc="lower right")


def _draw_throughput(ax: Axes, series: dict[str, Points]) -> None:
    _plot_noisy(ax, series["pairs_per_second"], CYAN, "pairs per second")
    ax.set_ylim(0, 1.3 * max(series["pairs_per_second"][1]) or 1)
    if "data_wait" in series:
        share = ax.twinx()
        style_axes(share)
        share.grid(visible=False)
        share.fill_between(*series["data_wait"], color=ORANGE, alpha=0.3, linewidth=0)
        share.set_ylim(0, 1)
        share.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        share.tick_params(labelcolor=ORANGE)
        ax.fill_between([], [], color=ORANGE, alpha=0.3, label="waiting for data (right)")
        small_legend(ax, loc="upper right", ncols=2)


PANELS = (
    ("Loss", r"(.*_)?loss", _draw_losses),
    ("Recall", r"eval_(.+_)?recall@\d+", _draw_recall),
    ("Accuracy", "eval_accuracy", _draw_accuracy),
    ("Learning rate", "learning_rate", lambda ax, series: _plot(ax, series["learning_rate"], GREEN)),
    ("Temperature", "temperature", lambda ax, series: _plot(ax, series["temperature"], PURPLE)),
    ("Logit scale", "logit_scale", lambda ax, series: _plot(ax, series["logit_scale"], PURPLE)),
    ("Throughput", "pairs_per_second", _draw_throughput),
    ("Gradient norm", "grad_norm", lambda ax, series: _plot_noisy(ax, series["grad_norm"], PINK)),
)


@dataclass
class RetrievalExample:
    """A caption and the images found for it, best first, each with its score and whether it is the true one."""

    caption: str
    images: list[Image.Image]
    scores: list[float]
    correct: list[bool]


def draw_retrieval(queries: list[RetrievalExample], out_path: Path) -> None:
    """Draw one row a query: its caption and its five best images, the true one in a green frame."""
    if not queries:
        raise ValueError("queries is empty; there is nothing to draw. Pass at least one RetrievalExample.")
    figure = new_figure(10.2, 1.7 * len(queries))
    grid = figure.add_gridspec(len(queries), 6, width_ratios=[2.1, 1, 1, 1, 1, 1])
    for row, query in enumerate(queries):
        ax = figure.add_subplot(grid[row, 0])
        ax.set_axis_off()
        draw_text(ax, 0, 0.5, wrap(query.caption, 30, 5), va="center", fontsize=10)
        for rank, (image, score, hit) in enumerate(zip(query.images, query.scores, query.correct, strict=True)):
            if rank < 5:
                _draw_image(figure.add_subplot(grid[row, rank + 1]), image, score, hit)
    with missing_glyphs_allowed():
        FigureCanvasAgg(figure).print_png(str(out_path))


def _draw_image(ax: Axes, image: Image.Image, score: float, hit: bool) -> None:
    ax.imshow(np.asarray(ImageOps.pad(image.convert("RGB"), (256, 256), color="#f8fafc")))
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set(color="#16a34a" if hit else "#d1d5db", linewidth=3.5 if hit else 1.0)
    label = f"{score:.3f}" + "  ✓" * hit
    ax.set_xlabel(label, fontsize=8.5, color="#15803d" if hit else MUTED, fontweight="bold" if hit else "normal")


@dataclass
class Tile:
    """One picture of a contact sheet (None: a grey field), with a short title and a longer text below it."""

    image: Image.Image | None
    title: str
    text: str = ""


def draw_contact_sheet(tiles: list[Tile], out_path: Path, columns: int = 6, group: int = 1) -> None:
    """Draw the tiles row by row as a JPEG, of which 24 photographs take 200 kB (as a PNG, five times that).

    A title is one line, cut in its middle, and a text at most five. Every `group` neighbours in a row stand closer together.
    """
    if not tiles:
        raise ValueError("tiles is empty; there is nothing to draw. Pass at least one Tile.")
    side, gap, below, dpi = 1.5, 0.14, 0.94, 120
    columns = min(columns, len(tiles))
    rows, groups = math.ceil(len(tiles) / columns), math.ceil(columns / group)
    width = gap + columns * (side + gap) + (groups - 1) * gap * (group > 1)
    height = gap + rows * (side + below)
    figure = Figure(figsize=(width, height), dpi=dpi, facecolor="white")
    for index, tile in enumerate(tiles):
        row, column = divmod(index, columns)
        left = gap + column * (side + gap) + (column // group) * gap * (group > 1)
        bottom = height - gap - (row + 1) * (side + below)
        ax = figure.add_axes((left / width, bottom / height, side / width, (side + below) / height))
        _draw_tile(ax, tile, side, below, round(side * dpi))
    with missing_glyphs_allowed():
        FigureCanvasAgg(figure).print_jpg(str(out_path), pil_kwargs={"quality": 75, "optimize": True})


def _draw_tile(ax: Axes, tile: Tile, side: float, below: float, pixels: int) -> None:
    ax.set_axis_off()
    picture = Image.new("RGB", (pixels, pixels), LIGHT)
    if tile.image is not None:
        picture = ImageOps.pad(tile.image.convert("RGB"), picture.size, color="#f8fafc")
    ax.imshow(np.asarray(picture), extent=(0, side, 0, side))
    ax.set(xlim=(0, side), ylim=(-below, side))
    title = tile.title if len(tile.title) <= 28 else f"{tile.title[:13]}…{tile.title[-14:]}"
    draw_text(ax, 0, -0.05, wrap(title, 28, 1), va="top", fontsize=6.5, color=MUTED, clip_on=True)
    draw_text(ax, 0, -0.19, wrap(tile.text, 24, 5), va="top", fontsize=7.5, clip_on=True)


def draw_confusion(counts: dict[tuple[int, int], int], classes: Sequence[str], out_path: Path) -> None:
    """Draw how many images of a class were taken for which one, given by (class, guess).

    Up to 50 classes as a matrix, a row a class; of more, the 40 most frequent mistakes as bars.
    """
    names = [wrap(name if len(name) <= 24 else f"{name[:23]}…", 24, 1) for name in classes]
    figure = _confusion_matrix(counts, names) if len(classes) <= _MOST_CELLS else _confusion_bars(counts, names)
    with missing_glyphs_allowed():
        FigureCanvasAgg(figure).print_png(str(out_path))


def _confusion_matrix(counts: dict[tuple[int, int], int], names: list[str]) -> Figure:
    matrix = np.zeros((len(names), len(names)))
    for cell, count in counts.items():
        matrix[cell] = count
    matrix *= 100 / np.maximum(1, matrix.sum(1, keepdims=True))
    side = max(4.0, 2.4 + 0.26 * len(names))
    figure = new_figure(side, side)
    ax = figure.add_subplot()
    ax.imshow(matrix, cmap="Blues", vmin=0, vmax=100)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    ax.set_xticks(range(len(names)), names, rotation=90, **_tick_look())
    ax.set_yticks(range(len(names)), names, **_tick_look())
    ax.set_xlabel("taken for", fontsize=8, color=MUTED)
    ax.set_ylabel("class", fontsize=8, color=MUTED)
    for label, guess in np.argwhere(matrix >= 0.5):
        percent = matrix[label, guess]
        color = "white" if percent > 60 else INK
        ax.text(guess, label, f"{percent:.0f}", ha="center", va="center", fontsize=6.5, color=color)
    ax.set_title("Images of a class, in %", loc="left", fontsize=10, fontweight="bold", color=INK)
    return figure


def _confusion_bars(counts: dict[tuple[int, int], int], names: list[str]) -> Figure:
    mistakes = sorted((-count, pair) for pair, count in counts.items() if pair[0] != pair[1])[:40]
    figure = new_figure(8, 1.2 + 0.2 * len(mistakes))
    ax = figure.add_subplot()
    style_axes(ax)
    ax.grid(visible=False)
    ax.barh(range(len(mistakes)), [-count for count, _ in mistakes], color=ORANGE, height=0.7)
    pairs = [f"{names[label]} → {names[guess]}" for _, (label, guess) in mistakes]
    ax.set_yticks(range(len(mistakes)), pairs, **_tick_look())
    ax.set_xlim(0, 1.05 * -min([count for count, _ in mistakes], default=-1))
    ax.set_ylim(len(mistakes) - 0.4, -0.6)
    ax.set_title("Most frequent mistakes, in images", loc="left", fontsize=10, fontweight="bold", color=INK)
    return figure


def _tick_look() -> dict[str, Any]:
    return {"fontsize": 7.5, "color": INK, "family": _font_families(), "parse_math": False}


def wrap(text: str, width: int, lines: int) -> str:
    """At most so many lines of about `width` letters; what cannot be printed is a blank."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder=" …"))


def draw_text(ax: Axes, x: float, y: float, text: str, **kwargs: Any) -> None:
    """Text that others wrote: two $ in it are no formula, and a script that the first font lacks is looked for."""
    ax.text(x, y, text, parse_math=False, family=_font_families(), **{"color": INK, **kwargs})


@functools.cache
def _font_families() -> list[str]:
    known = {font.name for font in fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in _WIDE_FONTS if name in known)]


@contextlib.contextmanager
def missing_glyphs_allowed() -> Iterator[None]:
    """A script that no font has shows as boxes, without a warning for every letter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")
        yield
