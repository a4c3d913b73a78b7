"""Report retrieval: recalls on the screen; intervals, and the curve and cost of re-ranking, in files."""

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter
from torch import Tensor

from mm_utils.evaluation.metrics import CUTOFFS, measures_of_queries
from mm_utils.evaluation.reranking import DirectionRanks, PairScores
from mm_utils.evaluation.retrieval import RetrievalEvaluator
from mm_utils.extras.flops.counts import FlopCounts
from mm_utils.extras.measured.sizes import mean_of_queries, report_sizes
from mm_utils.files import write_atomic
from mm_utils.reports.plots import (
    COLORS,
    INK,
    MUTED,
    new_figure,
    save_figure,
    set_title,
    style_axes,
)
from mm_utils.run.finish import recall_lines
from mm_utils.run.start import report_metrics

_GIGA = 1e9


def report_retrieval(
    accelerator: Accelerator,
    evaluator: RetrievalEvaluator,
    metrics: dict[str, float],
    flops: FlopCounts,
    medium: str,
    split_name: str,
    folder: str | None,
) -> None:
    """On the main process, log recalls with their intervals and chance, as a run's summary has them; write the rest.

    Args:
        metrics: what the evaluator returned.
        flops: FLOPs of the same model, from `mm_utils.extras.flops.counts.measure_flops`.
        medium, split_name: the kind of media, and of what split.
        folder: where to write `metrics.json`, `reranking.json`, `embedding_sizes.json`, and a picture of the last two; None for
            nowhere.
    """
    split, scores = evaluator.split, evaluator.scores
    if not accelerator.is_main_process or split is None:
        return
    found = {direction: direction_figures(ranks) for direction, ranks in evaluator.directions.items()}
    lines = recall_lines(
        {f"eval_{name}": value for name, value in metrics.items()}, split, medium, f"the {split_name} split"
    )
    report_metrics(accelerator, lines, metrics | half_widths(found), folder)
    if folder is None:
        return
    report_sizes(accelerator, split, folder)
    if scores is not None:
        args = evaluator.args
        settings = {"weights": args.rerank_weights, "top_k": args.rerank_top_k}
        content = {**settings, **found, "costs": scoring_costs(scores, flops)}
        write_atomic(Path(folder, "reranking.json"), json.dumps(content, indent=2) + "\n")
        _draw(found, Path(folder, "reranking.png"))


def half_widths(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return half the width of the 95 % interval of each recall, nDCG and MRR, as `NAME_half_width_95`, where there is one."""
    return {
        f"{stage}{direction}_{measure}_half_width_95": figure["half_width_95"]
        for direction, figures in found.items()
        for stage, key in (("", "dual_encoder"), ("rerank_", "reranked"))
        for measure, figure in figures.get(key, {}).items()
        if figure["half_width_95"] is not None
    }


def direction_figures(ranks: DirectionRanks) -> dict[str, Any]:
    """Return a direction's recalls, nDCG@10 and MRR@10, and half their intervals' widths.

    Returns:
        `queries`, their number, and `dual_encoder`, the figures of the towers. After re-ranking also `reranked`, `difference`
        (of both), and `curve`: recalls after re-ranking the first 1, 2, 4 ... K `candidates`, with their `ceiling`, the share
        of queries that have a right item among these candidates.
    """

    def figures(values: dict[str, Tensor]) -> dict[str, dict[str, float | None]]:
        return {name: mean_of_queries(value_Q, ranks.queries) for name, value_Q in values.items()}

    before = measures_of_queries(ranks.cosine)
    found: dict[str, Any] = {"queries": len(ranks.cosine_Q), "dual_encoder": figures(before)}
    if ranks.reranked is None:
        return found
    after = measures_of_queries(ranks.reranked)
    gain = figures({name: after[name] - before[name] for name in after})
    curve = [
        {
            "candidates": first,
            "ceiling": mean_of_queries(ranks.cosine_Q <= first, ranks.queries),
            **figures({f"recall@{k}": rank_Q <= k for k in CUTOFFS}),
        }
        for first, rank_Q in ranks.by_first.items()
    ]
    return {**found, "reranked": figures(after), "difference": gain, "curve": curve}


def scoring_costs(scores: PairScores, flops: FlopCounts) -> dict[str, float]:
    """Return the time and the FLOPs of re-ranking.

    FLOPs are those of match logits (`mm_utils.extras.flops.counts`), at the mean padded length of the texts: per pair, per text (once
    for all its candidates), and per image for its keys and values (once for all its texts).
    """
    length = round(scores.length)
    return {
        "pairs": len(scores.pairs),
        "seconds": scores.seconds,
        "pairs_per_second": len(scores.pairs) / scores.seconds,
        "text_tokens": scores.length,
        "gflop_per_pair": flops.pair.at(length) / _GIGA,
        "gflop_per_text": flops.text.at(length) / _GIGA,
        "gflop_per_image": flops.keys_values / _GIGA,
        "keys_values_bytes_per_image": scores.image_bytes,
    }


def _draw(found: dict[str, dict[str, Any]], out_path: Path) -> None:
    """Draw recall against the number of re-ranked candidates, one panel per direction."""
    figure = new_figure(4.5 * len(found), 3.6)
    for place, (direction, figures) in enumerate(found.items(), 1):
        ax = figure.add_subplot(1, len(found), place)
        _draw_curve(ax, figures["curve"])
        set_title(ax, direction.replace("_to_", " → "))
    lines, labels = ax.get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False, labelcolor=INK)
    save_figure(figure, out_path)


def _draw_curve(ax: Axes, curve: list[dict[str, Any]]) -> None:
    style_axes(ax)
    firsts = [row["candidates"] for row in curve]
    for k, color in zip(CUTOFFS, COLORS, strict=False):
        values = [row[f"recall@{k}"]["value"] for row in curve]
        halves = [row[f"recall@{k}"]["half_width_95"] or 0.0 for row in curve]
        low, high = ([value + sign * half for value, half in zip(values, halves, strict=True)] for sign in (-1, 1))
        ax.fill_between(firsts, low, high, color=color, alpha=0.12, linewidth=0)
        ax.plot(firsts, values, color=color, linewidth=1.8, marker="o", markersize=3, label=f"R@{k}")
        ax.axhline(values[0], color=color, linewidth=0.9, linestyle="dashed")
    ax.plot([], [], color=MUTED, linewidth=0.9, linestyle="dashed", label="two towers alone")
    ceiling = [row["ceiling"]["value"] for row in curve]
    ax.plot(
        firsts, ceiling, color=MUTED, linewidth=1.2, linestyle="dotted", label="ceiling: a right one is among them"
    )
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(firsts))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.set_xlabel("candidates re-ranked", fontsize=8, color=MUTED)
