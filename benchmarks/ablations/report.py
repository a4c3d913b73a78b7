"""What variants of an ablation differ in: means, differences by seed, their intervals.

Intervals are Student's, over seeds: how much a figure varies with initial weights, order and crops, on the same images.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import MaxNLocator

from mm_utils.reports.plots import BLUE, INK, LIGHT, MUTED, ORANGE, new_figure
from mm_utils.text import markdown_table

# 97.5 % of Student's distribution with 1, 2, ... degrees of freedom lie below.
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
_NORMAL = 1.959964


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half the width of its 95 % interval after Student; None for a single value.

    Quantiles of up to nine degrees of freedom are tabulated, further ones by the expansion of Abramowitz and Stegun,
    26.7.5, right to 1e-4.
    """
    count = len(values)
    if count < 2:
        return fmean(values), None
    z, nu = _NORMAL, count - 1
    terms = (
        (z**3 + z) / 4 / nu,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96 / nu**2,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / nu**3,
    )
    quantile = _STUDENT[nu - 1] if nu <= len(_STUDENT) else z + sum(terms)
    return fmean(values), quantile * stdev(values) / math.sqrt(count)


def with_interval(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """Return the mean and its interval as text; the mean alone for a single value."""
    mean, half_width = interval(values)
    return f"{mean:{sign},.{digits}f}" + ("" if half_width is None else f" ± {half_width:,.{digits}f}")


def summarise(records: Iterable[dict[str, Any]], variants: Sequence[str], metrics: Sequence[str]) -> dict[str, Any]:
    """By variant and metric: values, mean and half width; and those of the differences.

    A difference is taken seed by seed, where both were run. Variants without a finished run, and metrics that a variant
    does not have, are left out.
    """
    runs = {(record["variant"], record["seed"]): record for record in records}
    summary: dict[str, Any] = {}
    for variant in variants:
        own = {seed: record for (name, seed), record in sorted(runs.items()) if name == variant}
        if not own:
            continue
        summary[variant] = {
            "seeds": list(own),
            "seconds": fmean(record["seconds"] for record in own.values()),
            "parameters": max(record["parameters"] for record in own.values()),
            "metrics": {},
        }
        for metric in metrics:
            values = {seed: record["figures"][metric] for seed, record in own.items() if metric in record["figures"]}
            if not values:
                continue
            found: dict[str, Any] = {"values": values, **_mean_of(list(values.values()))}
            first = {seed: runs.get((variants[0], seed), {"figures": {}})["figures"].get(metric) for seed in values}
            apart = [value - first[seed] for seed, value in values.items() if first[seed] is not None]
            if apart and variant != variants[0]:
                found["difference"] = _mean_of(apart)
            summary[variant]["metrics"][metric] = found
    return summary


def report(summary: dict[str, Any], metrics: Sequence[str]) -> str:
    """Markdown: a table of means, one of differences, and what to think of them."""
    [first, *others] = summary
    titles = [metric.replace("_", " ").replace("recall@", "R@") for metric in metrics]
    rows = [
        [
            name,
            *(_cell(of["metrics"].get(metric)) for metric in metrics),
            f"{of['seconds']:.0f}",
            f"{of['parameters']:,}",
        ]
        for name, of in summary.items()
    ]
    lines = [markdown_table(["variant", *titles, "seconds", "parameters"], rows), ""]
    found = {
        name: [summary[name]["metrics"].get(metric, {}).get("difference") for metric in metrics] for name in others
    }
    if any(one for row in found.values() for one in row):
        lines += [f"Difference to {first}, seed by seed; bold where its interval leaves out 0:", ""]
        lines += [
            markdown_table(["variant", *titles], [[name, *map(_signed, row)] for name, row in found.items()]),
            "",
        ]
    seeds = max(len(of["seeds"]) for of in summary.values())
    if seeds == 1:
        return "\n".join(
            [*lines, "One seed: there is no interval, and no difference here can be distinguished from chance."]
        )
    compared = sum(one is not None and one["half_width"] is not None for row in found.values() for one in row)
    lines.append(
        f"Mean and 95 % interval (Student) over up to {seeds} seeds, on the validation split. Of {compared} differences, "
        f"{compared / 20:.1f} are bold by chance alone where nothing differs."
    )
    return "\n".join(lines)


def draw(summary: dict[str, Any], metrics: Sequence[str], out_path: Path) -> None:
    """A panel a metric, a line a variant: a point a seed, the mean and its interval."""
    shown = [metric for metric in metrics if any(metric in of["metrics"] for of in summary.values())]
    columns = min(4, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = new_figure(1.6 + 2.6 * columns, rows * (0.9 + 0.24 * len(summary)))
    for place, metric in enumerate(shown):
        ax = figure.add_subplot(rows, columns, place + 1)
        _draw_metric(ax, {name: of["metrics"].get(metric) for name, of in summary.items()})
        ax.set_title(metric.replace("_", " "), loc="left", fontsize=8, fontweight="bold", color=INK)
        if place % columns:
            ax.tick_params(labelleft=False)
    FigureCanvasAgg(figure).print_png(str(out_path))


def _draw_metric(ax: Axes, found: dict[str, dict[str, Any] | None]) -> None:
    ax.spines[:].set_visible(False)
    ax.grid(color=LIGHT, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=7, labelcolor=MUTED, length=0)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.set_yticks(range(len(found)), list(found), fontsize=7.5, color=INK)
    ax.set_ylim(len(found) - 0.5, -0.5)
    for place, of in enumerate(found.values()):
        if of is not None:
            ax.errorbar(of["mean"], place, xerr=of["half_width"], fmt="|", markersize=10, color=BLUE, linewidth=1.4)
            seeds = list(of["values"].values())
            ax.scatter(seeds, [place] * len(seeds), s=11, color=ORANGE, linewidths=0, zorder=3)


def _mean_of(values: list[float]) -> dict[str, float | None]:
    return dict(zip(("mean", "half_width"), interval(values), strict=True))


def _cell(of: dict[str, Any] | None, sign: str = "") -> str | None:
    if of is None:
        return None
    mean = round(of["mean"], 3) + 0.0  # not -0.000
    return f"{mean:{sign}.3f}" + ("" if of["half_width"] is None else f" ± {of['half_width']:.3f}")


def _signed(of: dict[str, Any] | None) -> str | None:
    sure = of is not None and of["half_width"] is not None and abs(of["mean"]) > of["half_width"]
    return f"**{_cell(of, '+')}**" if sure else _cell(of, "+")
