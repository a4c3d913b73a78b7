"""What retrieval was measured to be, for people: recalls with their intervals, the curve of re-ranking, its costs.

`reranking.json` holds, of each direction: `dual_encoder`, `reranked` and `difference` by cut-off, each as a value with half
the width of its 95 % interval over images, and `curve`, the recalls after re-ranking the first 1, 2, 4 ... K candidates
with their `ceiling`, the share of queries that have a right item among them.
"""

import json
import logging
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter
from torch import Tensor

from mm_utils.flops import FlopCounts
from mm_utils.intervals import mean_interval
from mm_utils.metrics import RetrievalEvaluator
from mm_utils.ranking import CUTOFFS
from mm_utils.reporting import COLORS, INK, MUTED, new_figure, style_axes
from mm_utils.reranking import DirectionRanks, MatchScores

logger = logging.getLogger(__name__)

Figure = dict[str, float]
_GIGA = 1e9


def report_retrieval(
    accelerator: Accelerator, evaluator: RetrievalEvaluator, flops: FlopCounts, folder: str | None
) -> None:
    """On the main process, say the recalls with their intervals; with a head, its costs, and with a folder, its files.

    Args:
        evaluator: after an evaluation.
        flops: of the same model, from `mm_utils.flops.measure_flops`.
        folder: where to leave `reranking.json` and `reranking.png`.
    """
    if not accelerator.is_main_process:
        return
    found = {direction: direction_figures(of) for direction, of in evaluator.directions.items()}
    logger.info("\n%s", "\n".join(_table(found)))
    if evaluator.match is None:
        return
    costs = scoring_costs(evaluator.match, flops)
    logger.info(
        "Re-ranking: %s pairs at %s a second; %.3g GFLOP a pair of %.0f text tokens, besides %.3g a text and %.3g an image; "
        "keys and values of an image take %s kB",
        f"{costs['pairs']:,}", f"{costs['pairs_per_second']:,.0f}", costs["gflop_per_pair"], costs["text_tokens"],
        costs["gflop_per_text"], costs["gflop_per_image"], f"{costs['keys_values_bytes_per_image'] / 1000:,.0f}",
    )  # fmt: skip
    if folder is not None:
        args = evaluator.args
        settings = {"score": args.rerank_score, "weight": args.rerank_weight, "top_k": args.rerank_top_k}
        text = json.dumps({**settings, **found, "costs": costs}, indent=2) + "\n"
        Path(folder, "reranking.json").write_text(text, encoding="utf-8")
        draw_reranking(found, Path(folder, "reranking.png"))


def direction_figures(of: DirectionRanks) -> dict[str, Any]:
    """What `reranking.json` says of one direction; the towers' recalls alone, where there is no head."""

    def recall(value_Q: Tensor) -> Figure:
        value, half_width = mean_interval(value_Q, of.image_key_Q)
        return {"value": value, "half_width_95": half_width}

    def recalls(rank_Q: Tensor) -> dict[str, Figure]:
        return {f"recall@{k}": recall(rank_Q <= k) for k in CUTOFFS}

    found: dict[str, Any] = {"queries": len(of.cosine_Q), "dual_encoder": recalls(of.cosine_Q)}
    if not of.by_first:
        return found
    gain = {f"recall@{k}": recall((of.reranked_Q <= k).double() - (of.cosine_Q <= k).double()) for k in CUTOFFS}
    curve = [
        {"candidates": first, "ceiling": recall(of.cosine_Q <= first), **recalls(rank_Q)}
        for first, rank_Q in of.by_first.items()
    ]
    return {**found, "reranked": recalls(of.reranked_Q), "difference": gain, "curve": curve}


def scoring_costs(match: MatchScores, flops: FlopCounts) -> dict[str, float]:
    """What re-ranking took: pairs of all processes and how many a second, with all that was computed for them.

    FLOPs are counted by running the head for match logits (`mm_utils.flops`): of a pair at the mean padded length of the scored texts, of a
    text once for all its candidates, and of an image's keys and values, once for all its texts.
    """
    length = round(match.length)
    return {
        "pairs": len(match.pairs),
        "seconds": match.seconds,
        "pairs_per_second": len(match.pairs) / match.seconds,
        "text_tokens": match.length,
        "gflop_per_pair": flops.pair.at(length) / _GIGA,
        "gflop_per_text": flops.text.at(length) / _GIGA,
        "gflop_per_image": flops.keys_values / _GIGA,
        "keys_values_bytes_per_image": match.image_bytes,
    }


def draw_reranking(found: dict[str, dict[str, Any]], out_path: Path) -> None:
    """Draw recall against the number of re-ranked candidates, a panel a direction, from `direction_figures`."""
    figure = new_figure(4.5 * len(found), 3.6)
    for place, (direction, figures) in enumerate(found.items(), 1):
        ax = figure.add_subplot(1, len(found), place)
        _draw_direction(ax, figures["curve"])
        title = direction.replace("_to_", " → ")
        ax.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    lines, labels = ax.get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False, labelcolor=INK)
    FigureCanvasAgg(figure).print_png(str(out_path))


def _draw_direction(ax: Axes, curve: list[dict[str, Any]]) -> None:
    style_axes(ax)
    firsts = [row["candidates"] for row in curve]
    for k, color in zip(CUTOFFS, COLORS, strict=False):
        values = [row[f"recall@{k}"]["value"] for row in curve]
        halves = [row[f"recall@{k}"]["half_width_95"] for row in curve]
        low, high = ([value + sign * half for value, half in zip(values, halves, strict=True)] for sign in (-1, 1))
        ax.fill_between(firsts, low, high, color=color, alpha=0.12, linewidth=0)
        ax.plot(firsts, values, color=color, linewidth=1.8, marker="o", markersize=3, label=f"R@{k}")
        ax.axhline(values[0], color=color, linewidth=0.9, linestyle="dashed")
    ax.plot([], [], color=MUTED, linewidth=0.9, linestyle="dashed", label="two towers alone")
    ceiling = [row["ceiling"]["value"] for row in curve]
    ax.plot(firsts, ceiling, color=MUTED, linewidth=1.2, linestyle="dotted", label="a right one is among them")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(firsts))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.set_xlabel("candidates re-ranked", fontsize=8, color=MUTED)


def _table(found: dict[str, dict[str, Any]]) -> list[str]:
    """A line a direction and cut-off; the last columns only after re-ranking."""
    lines = [f"{'95 % intervals, over images':<28}{'two towers':<18}"]
    if any("curve" in figures for figures in found.values()):
        lines[0] += f"{'re-ranked':<18}{'difference':<18}"
    for direction, figures in found.items():
        for k in CUTOFFS:
            columns = [(figures[name][f"recall@{k}"], sign) for name, sign in _COLUMNS if name in figures]
            shown = [f"{of['value']:{sign}.3f} ± {of['half_width_95']:.3f}" for of, sign in columns]
            lines.append(
                f"{direction.replace('_to_', ' → ') + f' R@{k}':<28}" + "".join(f"{one:<18}" for one in shown)
            )
        if "curve" in figures:
            last = figures["curve"][-1]
            name = f"  ceiling, R@{last['candidates']}"
            lines.append(f"{name:<28}{last['ceiling']['value']:.3f} ± {last['ceiling']['half_width_95']:.3f}")
    return [line.rstrip() for line in lines]


_COLUMNS = (("dual_encoder", ""), ("reranked", ""), ("difference", "+"))
