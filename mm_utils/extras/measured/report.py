"""Report retrieval: table, intervals, and the curve and cost of re-ranking."""

import json
import logging
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
from mm_utils.text import with_half_width

logger = logging.getLogger(__name__)

_GIGA = 1e9
_SHORT = {"recall": "R", "ndcg": "nDCG", "mrr": "MRR"}  # names in the table


def report_retrieval(
    accelerator: Accelerator,
    evaluator: RetrievalEvaluator,
    metrics: dict[str, float],
    flops: FlopCounts,
    folder: str | None,
) -> None:
    """On the main process, log the last evaluation's figures and probes, re-ranking's cost.

    Args:
        metrics: what the evaluator returned.
        flops: FLOPs of the same model, from `mm_utils.extras.flops.counts.measure_flops`.
        folder: where to write `reranking.json`, `embedding_sizes.json`, and a picture of each.
    """
    if not accelerator.is_main_process:
        return
    found = {direction: direction_figures(ranks) for direction, ranks in evaluator.directions.items()}
    logger.info("\n%s", "\n".join([*_table(found), *_probe_table(metrics)]))
    report_sizes(accelerator, evaluator.split, folder)
    if evaluator.scores is None:
        return
    costs = scoring_costs(evaluator.scores, flops)
    logger.info(
        "Re-ranking: %s pairs at %s a second; %.3g GFLOP a pair of %.0f text tokens, besides %.3g a text and %.3g an image; "
        "keys and values of an image take %s kB",
        f"{costs['pairs']:,}", f"{costs['pairs_per_second']:,.0f}", costs["gflop_per_pair"], costs["text_tokens"],
        costs["gflop_per_text"], costs["gflop_per_image"], f"{costs['keys_values_bytes_per_image'] / 1000:,.0f}",
    )  # fmt: skip
    if folder is not None:
        args = evaluator.args
        settings = {"weights": args.rerank_weights, "top_k": args.rerank_top_k}
        content = {**settings, **found, "costs": costs}
        write_atomic(Path(folder, "reranking.json"), json.dumps(content, indent=2) + "\n")
        _draw(found, Path(folder, "reranking.png"))


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


def _table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Format one line per direction and measure; the last two columns only after re-ranking."""
    lines = [f"{'95 % intervals, over images':<28}{'two towers':<18}"]
    if any("curve" in figures for figures in found.values()):
        lines[0] += f"{'re-ranked':<18}{'difference':<18}"
    for direction, figures in found.items():
        for measure in figures["dual_encoder"]:
            name, _, cut = measure.partition("@")
            line = f"{direction.replace('_to_', ' → ') + f' {_SHORT[name]}@{cut}':<28}"
            for column, sign in (("dual_encoder", ""), ("reranked", ""), ("difference", "+")):
                if column in figures:
                    one = figures[column][measure]
                    line += f"{with_half_width(one, sign):<18}"
            lines.append(line)
        if "curve" in figures:
            last = figures["curve"][-1]
            name = f"  ceiling, R@{last['candidates']}"
            lines.append(f"{name:<28}{with_half_width(last['ceiling'])}")
    return [line.rstrip() for line in lines]


def _probe_table(metrics: dict[str, float]) -> list[str]:
    """Format one line per kind of probe; "alone" is what the captions tell without their image."""
    kinds = [name.removesuffix("_rows") for name in metrics if name.endswith("_rows")]
    reranked = any(f"rerank_{kind}_accuracy" in metrics for kind in kinds)
    title = f"{'true above false caption':<28}{'two towers':<24}" + f"{'re-ranked':<24}" * reranked + "alone  rows"
    lines = ["", title] if kinds else []
    for kind in kinds:
        line = f"{kind.replace('_', ' '):<28}"
        for name in (f"{kind}_accuracy", f"rerank_{kind}_accuracy")[: 1 + reranked]:
            line += f"{metrics[name]:.3f} ({metrics[name + '_low']:.3f} to {metrics[name + '_high']:.3f})  "
        lines.append(f"{line}{metrics[kind + '_blind']:.3f}{metrics[kind + '_rows']:>6,.0f}")
    return [*lines, "by chance                   0.500"] if kinds else lines
