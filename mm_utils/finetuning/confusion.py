"""Which classes are taken for which: a table and a picture."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from mm_utils.plots import INK, MUTED, font_families, new_figure, save_figure, set_title, wrap
from mm_utils.text import no_formula

_MAX_CLASSES = 50  # a larger matrix cannot be read


class ClassFigures(NamedTuple):
    """A row of `classes.csv`."""

    name: str
    rows: int
    recall: float | None  # None without rows
    precision: float | None  # None if nothing is taken for it
    most_confused_with: str  # empty without mistakes
    times: int


def report_classes(predictions: Tensor, classes: Sequence[str], folder: str | Path | None) -> list[ClassFigures]:
    """Return the figures of every class; write them as `classes.csv`, and `confusion.png`, into a folder.

    Args:
        predictions: class and predicted class of every row, `[M, 2]`; a class of -1 is none of the known ones.
        classes: the names of the classes.
        folder: the folder to write to, if any.
    """
    pairs, times = predictions.unique(dim=0, return_counts=True)
    counts = {(label, guess): count for (label, guess), count in zip(pairs.tolist(), times.tolist(), strict=True)}
    rows, guessed, mistakes = [0] * len(classes), [0] * len(classes), [(0, "")] * len(classes)
    for (label, guess), count in counts.items():
        guessed[guess] += count
        if label >= 0:
            rows[label] += count
        if label >= 0 and label != guess and count > mistakes[label][0]:
            mistakes[label] = (count, classes[guess])
    figures = []
    for number, name in enumerate(classes):
        right, (count, other) = counts.get((number, number), 0), mistakes[number]
        recall = right / rows[number] if rows[number] else None
        precision = right / guessed[number] if guessed[number] else None
        figures.append(ClassFigures(name, rows[number], recall, precision, other, count))
    if folder is not None:
        with open(Path(folder, "classes.csv"), "w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(ClassFigures._fields)
            table.writerows([no_formula(cell) for cell in row] for row in figures)
        known = {pair: count for pair, count in counts.items() if pair[0] >= 0}
        draw_confusion(known, classes, Path(folder, "confusion.png"))
    return figures


def draw_confusion(counts: dict[tuple[int, int], int], classes: Sequence[str], out_path: Path) -> None:
    """Draw how many rows of each class were taken for which class, as a matrix in percent.

    Args:
        counts: number of rows for each (class, predicted class).
        classes: names of the classes; of more than 50, those of the most frequent mistakes are shown.
        out_path: the PNG to write.
    """
    mistakes = sorted((-count, pair) for pair, count in counts.items() if pair[0] != pair[1])
    ranked = dict.fromkeys([*(label for _, pair in mistakes for label in pair), *range(len(classes))])
    shown = sorted(list(ranked)[:_MAX_CLASSES])
    place = {label: index for index, label in enumerate(shown)}
    images = np.zeros(len(shown))
    matrix = np.zeros((len(shown), len(shown)))
    for (label, guess), count in counts.items():
        if label in place:
            images[place[label]] += count
            if guess in place:
                matrix[place[label], place[guess]] = count
    matrix *= 100 / np.maximum(1, images)[:, None]
    names = [wrap(name if len(name) <= 24 else f"{name[:23]}…", 24, 1) for name in (classes[label] for label in shown)]
    side = max(4.0, 2.4 + 0.26 * len(names))
    figure = new_figure(side, side)
    ax = figure.add_subplot()
    ax.imshow(matrix, cmap="Blues", vmin=0, vmax=100)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    look: dict[str, Any] = {"fontsize": 7.5, "color": INK, "family": font_families(), "parse_math": False}
    ax.set_xticks(range(len(names)), names, rotation=90, **look)
    ax.set_yticks(range(len(names)), names, **look)
    ax.set_xlabel("taken for", fontsize=8, color=MUTED)
    ax.set_ylabel("class", fontsize=8, color=MUTED)
    for label, guess in np.argwhere(matrix >= 0.5):
        percent = matrix[label, guess]
        color = "white" if percent > 60 else INK
        ax.text(guess, label, f"{percent:.0f}", ha="center", va="center", fontsize=6.5, color=color)
    part = "" if len(shown) == len(classes) else f"; the {len(shown)} most confused of {len(classes):,} classes"
    set_title(ax, f"Rows of a class, in %{part}")
    save_figure(figure, out_path)
