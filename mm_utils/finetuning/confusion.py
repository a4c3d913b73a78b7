"""Draw which classes are taken for which."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mm_utils.plots import INK, MUTED, font_families, new_figure, save_figure, set_title, wrap

_MAX_CLASSES = 50  # a larger matrix cannot be read


def draw_confusion(counts: dict[tuple[int, int], int], classes: Sequence[str], out_path: Path) -> None:
    """Draw how many rows of each class were taken for which class, as a matrix in percent.

    Args:
        counts: number of rows for each (class, predicted class).
        classes: names of the classes; of more than 50, those of the most frequent mistakes are shown.
        out_path: the PNG to write.
    """
    shown = _most_confused(counts, len(classes))
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


def _most_confused(counts: dict[tuple[int, int], int], num_classes: int) -> list[int]:
    """Return up to 50 classes in order: those of the most frequent mistakes, then the first."""
    mistakes = sorted((-count, pair) for pair, count in counts.items() if pair[0] != pair[1])
    ranked = dict.fromkeys([*(label for _, pair in mistakes for label in pair), *range(num_classes)])
    return sorted(list(ranked)[:_MAX_CLASSES])
