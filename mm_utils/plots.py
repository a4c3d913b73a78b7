"""Draw training curves and retrieval examples; set the style of all figures."""

import functools
import json
import logging
import math
import re
import textwrap
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.ticker import EngFormatter, MaxNLocator
from PIL import Image, ImageOps

from mm_utils.files import optional_file

logger = logging.getLogger(__name__)

Points = tuple[list[int], list[float]]

INK, MUTED, LIGHT = "#1f2937", "#6b7280", "#e5e7eb"
COLORS = ("#2563eb", "#ea580c", "#059669", "#7c3aed", "#db2777", "#0891b2")

# Title of each panel of the training curves, and the names of its values.
_PANELS = {
    "Recall": r"eval_(.+_)?recall@\d+",
    "Loss": r"(.*_)?loss",
    "Mean recall": "eval_mean_recall",
    "Accuracy": "train_accuracy|eval_accuracy|eval_macro_f1",
    "Learning rate": "learning_rate",
    "Temperature": "temperature",
    "Logit scale": "logit_scale",
    "Pairs per second": "pairs_per_second",
    "Waiting for data": "data_wait",
    "GPU use": "gpu",
    "Gradient norm": "grad_norm",
}

_LABELS = {"loss": "total", "eval_mean_recall": "unseen images"}

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


def plot_training(metrics_path: Path, out_path: Path) -> list[str]:
    """Draw the values of `metrics_path`, JSON lines, as panels; return the titles of the panels.

    A panel without values is left out, and one of single points where there are others; without any panel nothing is
    written. Lines that are not JSON are skipped. A step that occurs twice, as after a resume, has its later value.
    """
    series = _read_series(metrics_path)
    shown = {title: {name for name in series if re.fullmatch(pattern, name)} for title, pattern in _PANELS.items()}
    # A short run's single points say nothing, but for the recalls of one evaluation.
    several = {name for name, (steps, _) in series.items() if len(steps) > 1}
    panels = [title for title, names in shown.items() if names & several or (names and title == "Recall")]
    panels = panels or [title for title, names in shown.items() if names]
    if not panels:
        logger.warning("%s has no values to plot; %s is not written", metrics_path, out_path)
        return []
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(4.2 * columns, 3.1 * rows)
    for place, title in enumerate(panels, start=1):
        ax = figure.add_subplot(rows, columns, place)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.spines["bottom"].set_color(LIGHT)
        ax.grid(axis="y", color=LIGHT, linewidth=0.8)
        ax.tick_params(labelsize=8, labelcolor=MUTED, length=0)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        _draw_lines(ax, {name: series[name] for name in shown[title]})
        ax.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
        ax.set_xlabel("step", fontsize=8, color=MUTED)
    save_figure(figure, out_path)
    return panels


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
    return {name: (sorted(points), [points[step] for step in sorted(points)]) for name, points in values.items()}


def _draw_lines(ax: Axes, series: dict[str, Points]) -> None:
    """Draw a line for each name, in one style per cut-off; shorter names come first. The only term of a loss is the total."""
    terms = [name for name in series if name.endswith("_loss") and not name.startswith("eval_")]
    names = sorted(series.keys() - ({"loss"} if len(terms) == 1 else set()), key=lambda name: (len(name), name))
    kinds, cutoffs = (list(dict.fromkeys(name.partition("@")[at] for name in names)) for at in (0, 2))
    for name in names:
        kind, _, cutoff = name.partition("@")
        label = _LABELS.get(name) or name.removesuffix("_loss").removeprefix("eval_").replace("_recall@", " @")
        label = label.replace("_to_", " → ").replace("rerank_", "re-ranked ").replace("_", " ")
        steps, values = series[name]
        look: dict[str, Any] = {"color": COLORS[kinds.index(kind) % len(COLORS)]}
        if (half := len(values) // 50) >= 2:  # from 100 values on their running mean, over the values drawn faintly
            ax.plot(steps, values, linewidth=0.7, alpha=0.25, **look)
            values = [float(np.mean(values[max(0, at - half) : at + half + 1])) for at in range(len(values))]
        look |= {"linewidth": 1.5, "linestyle": ("-", "--", ":")[min(cutoffs.index(cutoff), 2)]}
        ax.plot(steps, values, label=label, marker="o" * (len(steps) < 30), markersize=3, **look)
    if len(names) > 1:  # above the axes, right of the title, where it covers no curve
        place: dict[str, Any] = {
            "loc": "lower right",
            "bbox_to_anchor": (1.02, 0.98),
            "ncols": 3,
            "columnspacing": 1.2,
        }
        ax.legend(fontsize=7.5, frameon=False, labelcolor=INK, handlelength=1.6, **place)


@dataclass
class RetrievalExample:
    """A caption and images found, best first; `correct` marks its own, `note` where that is."""

    caption: str
    images: list[Image.Image]
    scores: list[float]
    correct: list[bool]
    note: str = ""


def draw_retrieval(queries: list[RetrievalExample], out_path: Path) -> None:
    """Draw each query's caption and its five best images, the true one in a green frame."""
    if not queries:
        raise ValueError("queries is empty; there is nothing to draw. Pass at least one RetrievalExample.")
    figure = new_figure(10.2, 1.7 * len(queries))
    grid = figure.add_gridspec(len(queries), 6, width_ratios=[2.1, 1, 1, 1, 1, 1])
    for row, query in enumerate(queries):
        ax = figure.add_subplot(grid[row, 0])
        ax.set_axis_off()
        draw_text(ax, 0, 1.0, wrap(query.caption, 30, 4), va="top", fontsize=10)
        draw_text(ax, 0, 0.0, query.note, va="bottom", fontsize=8, color=MUTED)
        found = list(zip(query.images, query.scores, query.correct, strict=True))
        for rank, (image, score, hit) in enumerate(found[:5]):
            ax = figure.add_subplot(grid[row, rank + 1])
            ax.imshow(np.asarray(ImageOps.pad(image.convert("RGB"), (256, 256), color="#f8fafc")))
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set(color="#16a34a" if hit else "#d1d5db", linewidth=3.5 if hit else 1.0)
            label, weight = f"{score:.3f}" + "  ✓" * hit, "bold" if hit else "normal"
            ax.set_xlabel(label, fontsize=8.5, color="#15803d" if hit else MUTED, fontweight=weight)
    save_figure(figure, out_path)
