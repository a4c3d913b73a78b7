"""Draw training curves and retrieval examples; set the style of all figures."""

import functools
import json
import logging
import math
import textwrap
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.gridspec import SubplotSpec
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator
from PIL import Image, ImageOps

from mm_utils.files import optional_file

if TYPE_CHECKING:  # a preparation, which draws too, needs no torch
    from mm_utils.evaluation.recall_gain import Gain

logger = logging.getLogger(__name__)

Points = tuple[list[int], list[float]]

INK = "#1f2937"
MUTED = "#6b7280"
LIGHT = "#e5e7eb"
COLORS = ("#2563eb", "#ea580c", "#059669", "#7c3aed", "#db2777", "#0891b2")

# What a run is judged by, and the lines of its large panel: by the two encoders, and what is better or stricter than that.
_JUDGED = {
    "Mean recall": {"eval_mean_recall": "encoders", "eval_rerank_mean_recall": "re-ranked"},
    "Accuracy": {"eval_accuracy": "accuracy", "eval_macro_f1": "macro F1", "train_accuracy": "training rows"},
}
_SMALL = {  # what is beside that: for whoever looks for a fault
    "learning_rate": "Learning rate",
    "temperature": "Temperature",
    "logit_scale": "Logit scale",
    "grad_norm": "Gradient norm",
    "pairs_per_second": "Pairs per second",
    "gpu": "GPU use",
}

_TICKS = (1, 2, 2.5, 5, 10)  # of matplotlib's, without 1.5, 3, 6 and 8: 0, 25, 50 and not 0, 30, 60

# Fonts with Chinese, Japanese and Korean letters, which matplotlib's own font lacks; used where they are installed.
_WIDE_FONTS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "PingFang SC", "Microsoft YaHei")


def new_figure(width: float, height: float) -> Figure:
    """Return a figure in the common style, without `pyplot` and its global state."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # type: ignore[union-attr,call-arg]
    return figure


def save_figure(figure: Figure, out_path: Path, **kwargs: Any) -> None:
    """Write a picture with `Figure.savefig`, if the disk takes it; letters that no font has show as boxes."""
    with warnings.catch_warnings(), optional_file(out_path):
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(out_path, **kwargs)


def wrap(text: str, width: int, lines: int) -> str:
    """Break a text into at most `lines` lines of about `width` printable letters."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder=" …"))


def draw_text(ax: Axes, x: float, y: float, text: str, **kwargs: Any) -> None:
    """Draw foreign text: $ starts no formula, and more fonts are searched for its script."""
    ax.text(x, y, text, parse_math=False, family=font_families(), **{"color": INK, **kwargs})


@functools.cache
def font_families() -> list[str]:
    """Return the fonts of texts, those for Chinese, Japanese and Korean letters where installed."""
    known = {font.name for font in fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in _WIDE_FONTS if name in known)]


def plot_training(
    metrics_path: Path, out_path: Path, gain: "Gain | None" = None, without: Sequence[str] = ()
) -> list[str]:
    """Draw the values of `metrics_path`, JSON lines, but for those `without`, as panels; return the titles of the panels.

    Two panels are large: the figure that a run is judged by, beside what `gain` says of it, and the loss by term. A figure that
    was measured only once is drawn as bars. Panels without values are left out, as are small ones of single points; without any
    panel nothing is written. Lines that are not JSON are skipped. A step that occurs twice, as after a resume, has its later value.
    """
    series = {name: values for name, values in _read_series(metrics_path).items() if name not in without}
    several = {name for name, (steps, _) in series.items() if len(steps) > 1}
    judged = [title for title, names in _JUDGED.items() if next(iter(names)) in series]
    terms = {name: values for name, values in series.items() if name.endswith("_loss") and name != "eval_loss"}
    if not terms and "loss" in series:  # else the weighted sum of the terms
        terms["loss"] = series["loss"]
    if "eval_loss" in series:
        terms["eval_loss"] = series["eval_loss"]
    large = [*judged, "Loss"] if terms else judged
    small = [name for name in _SMALL if name in several]
    if not large + small:
        logger.warning("%s has no values to plot; %s is not written", metrics_path, out_path)
        return []
    heights = [3.4] * bool(large) + [1.3] * bool(small)
    figure = new_figure(9.4, sum(heights))
    rows = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    for ax, title in zip(_row(figure, rows[0], len(large)), large, strict=True):
        ax.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
        if title == "Loss":
            names = {name: name.removesuffix("_loss").replace("_", " ") for name in terms}
            _label_ends(ax, _draw_lines(ax, terms, {**names, "eval_loss": "validation"}))
            continue
        figures = {name: series[name] for name in _JUDGED[title] if name in series}
        if any(len(steps) > 1 for steps, _ in figures.values()):
            _draw_judged(ax, figures, _JUDGED[title], gain)
        else:
            _draw_bars(ax, figures, _JUDGED[title], gain)
    for ax, name in zip(_row(figure, rows[-1], len(small)), small, strict=True):
        ax.set_title(_SMALL[name], loc="left", fontsize=9, color=MUTED)
        _draw_lines(ax, {name: series[name]}, {})
    save_figure(figure, out_path)
    return large + [_SMALL[name] for name in small]


def _read_series(path: Path) -> dict[str, Points]:
    """Return the finite values of each name, in order of the steps."""
    values: dict[str, dict[int, float]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(json.JSONDecodeError):  # cut off when the run was stopped
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                for name, value in row.items():
                    if name != "step" and isinstance(value, (int, float)) and math.isfinite(value):
                        values.setdefault(name, {})[row["step"]] = float(value)
    series = {}
    for name, points in values.items():
        steps = sorted(points)
        series[name] = steps, [points[step] for step in steps]
    return series


def _row(figure: Figure, place: SubplotSpec, count: int) -> list[Axes]:
    """Return axes beside each other, in the common style."""
    grid = place.subgridspec(1, max(1, count))
    axes = [figure.add_subplot(grid[column]) for column in range(count)]
    for ax in axes:
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.spines["bottom"].set_color(LIGHT)
        ax.grid(axis="y", color=LIGHT, linewidth=0.8)
        ax.tick_params(labelsize=9, labelcolor=MUTED, length=0)
        ax.xaxis.set_major_locator(MaxNLocator(5, steps=_TICKS, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(4, steps=_TICKS))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.yaxis.set_major_formatter(_short)
    return axes


@FuncFormatter
def _short(value: float, _: object = None) -> str:
    """Format a tick: 6k, 0.25, 2.4e-4."""
    if abs(value) >= 1000:
        return EngFormatter(sep="")(value)
    text = f"{value:.3g}" if value == 0 or abs(value) >= 1e-2 else f"{value:.1e}"
    return text.replace(".0e", "e").replace("e-0", "e-")


def _figure(value: float) -> str:
    """Format a figure with three digits."""
    return f"{value:#.3g}".rstrip(".") if value >= 0.1 else f"{value:.3f}"


def _interval(gain: "Gain") -> str:
    """Format what is saved, with its interval if it has one."""
    if gain.interval:
        low, high = gain.interval
        return f"{_figure(gain.after)} ({_figure(low)} to {_figure(high)})"
    return _figure(gain.after) + f" ± {_figure(gain.half)}" * (gain.half > 0)


def _draw_lines(ax: Axes, series: dict[str, Points], labels: dict[str, str]) -> list[tuple[float, str, str]]:
    """Draw a line for each name, of many values their running mean; return the last values, with their labels and colours.

    Of lines that coincide one is drawn, and its label has all names.
    """
    drawn: dict[Any, list[str]] = {}
    for name, (steps, values) in series.items():
        drawn.setdefault((*steps, *map(_figure, values)), []).append(name)
    ends = []
    for place, names in enumerate(drawn.values()):
        label = ", ".join(labels.get(name, "") for name in names)
        steps, values = series[names[0]]
        color = COLORS[place % len(COLORS)]
        shown = np.asarray(values)
        if (half := len(values) // 50) >= 2:
            ax.plot(steps, values, linewidth=0.7, alpha=0.25, color=color)
            sums = np.cumsum([0.0, *values])
            at = np.arange(len(values))
            first = np.maximum(0, at - half)
            end = np.minimum(len(values), at + half + 1)
            shown = (sums[end] - sums[first]) / (end - first)
        ax.plot(steps, shown, linewidth=1.8, color=color, marker="o" * (len(steps) < 30), markersize=3.5)
        ends.append((float(shown[-1]), wrap(f"{label} {_figure(shown[-1])}", 24, 3), color))
    every = np.concatenate([values for _, values in series.values()])
    ax.set_xlabel("step", fontsize=8, color=MUTED, labelpad=2)
    ax.set_ylim(min(0.0, 1.1 * float(every.min())), max(1.1 * float(every.max()), 1e-9))
    return ends


def _label_ends(ax: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write labels right of the axes, at the height of their values but a line apart."""
    low, high = ax.get_ylim()
    gap = (high - low) / 14
    least = low
    for value, label, color in sorted(ends):
        height = max(value, least)
        least = height + gap
        ax.annotate(label, (1.02, height), xycoords=("axes fraction", "data"), va="center", fontsize=9.5, color=color,
                    annotation_clip=False)  # fmt: skip


def _beside(gain: "Gain | None") -> list[tuple[float, str, str]]:
    """Return what a figure is compared with: its value, in words, and the colour."""
    if gain is None:
        return []
    before = [] if gain.before is None else [(gain.before, gain.start_name, INK)]
    return [(gain.floor, gain.floor_name, MUTED), *before]


def _draw_judged(ax: Axes, series: dict[str, Points], labels: dict[str, str], gain: "Gain | None") -> None:
    """Draw a figure at each evaluation, what it is compared with, and the saved one with its interval."""
    ends = _draw_lines(ax, series, labels)
    for value, words, color in _beside(gain):
        ax.axhline(value, linewidth=1.2, linestyle="--", color=color)
        ends.append((value, f"{words} {_figure(value)}", color))
    last = max(steps[-1] for steps, _ in series.values())
    if gain:
        step = last if gain.saved_step is None else gain.saved_step
        low, high = gain.bounds
        up = high - gain.after
        ends_of = [[gain.after - low], [up]]
        ax.errorbar(step, gain.after, ends_of, fmt="o", color=INK, markersize=8, markerfacecolor="none", capsize=4)
        side = "left" if step < last / 2 else "right"
        ax.annotate(f"saved: {_interval(gain)}", (step, gain.after + up), (0, 6),
                    textcoords="offset points", ha=side, va="bottom", fontsize=9.5, color=INK)  # fmt: skip
    ax.set_ylim(0, min(1.1, 1.15 * max(ax.get_ylim()[1], gain.after + gain.half if gain else 0)))
    _label_ends(ax, ends)


def _draw_bars(ax: Axes, series: dict[str, Points], labels: dict[str, str], gain: "Gain | None") -> None:
    """Draw a figure that was measured once as a bar, beside what it is compared with."""
    bars = _beside(gain)
    bars += [(values[-1], labels[name], COLORS[place]) for place, (name, (_, values)) in enumerate(series.items())]
    values, names, colors = zip(*bars, strict=True)
    ax.barh(range(len(bars)), values, height=0.5, color=colors)
    labels_of = [_figure(value) for value in values]
    reach = list(values)
    if gain:  # the last bar is that of what is saved
        low, high = gain.bounds
        if gain.half:
            ends_of = [[gain.after - low], [high - gain.after]]
            ax.errorbar(values[-1], len(bars) - 1, xerr=ends_of, color=INK, capsize=4)
        labels_of[-1] = _interval(gain)
        reach[-1] = max(values[-1], high)
    for place, (value, label) in enumerate(zip(reach, labels_of, strict=True)):
        ax.text(value, place, f"  {label}", va="center", fontsize=9.5, color=INK)
    ax.set(xlim=(0, 1.35 * max(reach)), ylim=(len(bars), -1), xticks=[], yticks=range(len(bars)), yticklabels=names)
    ax.tick_params(axis="y", labelsize=9.5, labelcolor=INK)
    ax.grid(visible=False)
    ax.spines["bottom"].set_visible(False)


@dataclass
class RetrievalExample:
    """A caption and images found, best first; `correct` marks its own, `note` where that is; `own` where it is not among them."""

    caption: str
    images: list[Image.Image]
    scores: list[float]
    correct: list[bool]
    note: str = ""
    own: Image.Image | None = None


def draw_retrieval(queries: list[RetrievalExample], out_path: Path, about: str = "") -> None:
    """Draw each query's caption and its five best images, the true one in a green frame, as a sixth if it is not among these.

    `about` is a line at the bottom, which says what the numbers are.
    """
    if not queries:
        raise ValueError("queries is empty; there is nothing to draw. Pass at least one RetrievalExample.")
    images = 5 + any(query.own is not None for query in queries)
    figure = new_figure(3.5 + 1.4 * images, 1.7 * len(queries) + 0.3)
    grid = figure.add_gridspec(len(queries), images + 1, width_ratios=[2.1, *[1] * images])
    for row, query in enumerate(queries):
        ax = figure.add_subplot(grid[row, 0])
        ax.set_axis_off()
        draw_text(ax, 0, 1.0, wrap(query.caption, 30, 4), va="top", fontsize=10)
        draw_text(ax, 0, 0.0, query.note, va="bottom", fontsize=8, color=MUTED)
        found = list(zip(query.images, query.scores, query.correct, strict=True))
        for rank, (image, score, hit) in enumerate(found[:5]):
            ax = figure.add_subplot(grid[row, rank + 1])
            _draw_image(ax, image, f"{round(score, 2) + 0:.2f}" + "  ✓" * hit, is_own=hit)
        if query.own is not None:
            _draw_image(figure.add_subplot(grid[row, 6]), query.own, "the right one", is_own=True)
    figure.supxlabel(wrap(about, 150, 3), x=0.01, ha="left", fontsize=8.5, color=MUTED)
    save_figure(figure, out_path)


def _draw_image(ax: Axes, image: Image.Image, label: str, is_own: bool) -> None:
    ax.imshow(np.asarray(ImageOps.pad(image.convert("RGB"), (256, 256), color="#f8fafc")))
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(color="#16a34a" if is_own else "#d1d5db", linewidth=3.5 if is_own else 1.0)
    weight = "bold" if is_own else "normal"
    ax.set_xlabel(label, fontsize=8.5, color="#15803d" if is_own else MUTED, fontweight=weight)
