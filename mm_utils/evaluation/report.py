"""Report retrieval: a table with intervals, and what the first numbers of the embeddings keep."""

import json
import logging
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import normalize

from mm_utils.evaluation.embeddings import Embeddings, Keyed, cosine_places
from mm_utils.evaluation.metrics import FEW_GROUPS, mean_interval, measures_of_queries
from mm_utils.evaluation.reranking import DirectionRanks
from mm_utils.evaluation.retrieval import RetrievalEvaluator
from mm_utils.files import write_atomic
from mm_utils.text import with_half_width

logger = logging.getLogger(__name__)

_SHORT = {"recall": "R", "ndcg": "nDCG", "mrr": "MRR"}  # names in the table


def report_retrieval(
    accelerator: Accelerator, evaluator: RetrievalEvaluator, metrics: dict[str, float], folder: str | None
) -> None:
    """On the main process, log the last evaluation's figures and probes.

    Args:
        metrics: what the evaluator returned.
        folder: where to write `reranking.json`, if there is a head; None does not.
    """
    if not accelerator.is_main_process:
        return
    found = {direction: direction_figures(ranks) for direction, ranks in evaluator.directions.items()}
    logger.info("\n%s", "\n".join([*_table(found), *_probe_table(metrics)]))
    if evaluator.split is not None:
        logger.info("R@1 by text of the first numbers of an embedding: %s", recall_by_width(evaluator.split))
    if evaluator.scores is not None and folder is not None:
        args = evaluator.args
        content = {"weights": args.rerank_weights, "top_k": args.rerank_top_k, **found}
        write_atomic(Path(folder, "reranking.json"), json.dumps(content, indent=2) + "\n")


def recall_by_width(split: Embeddings) -> str:
    """Return R@1 from text to image of 16, 32 ... numbers, at unit length again; `--matryoshka_dims` trains for that."""
    queries, images = split.directions["text_to_image"]
    full = images.embeds.shape[1]
    shares = []
    for width in [*(2**power for power in range(4, full.bit_length()) if 2**power < full), full]:
        cut = (side._replace(embeds=normalize(side.embeds[:, :width], dim=1)) for side in (queries, images))
        shares.append(f"{width} {(cosine_places(*cut).rank_Q <= 1).double().mean():.3f}")
    return ", ".join(shares)


def direction_figures(ranks: DirectionRanks) -> dict[str, Any]:
    """Return a direction's recalls, nDCG@10 and MRR@10, and half their intervals' widths.

    Returns:
        `queries`, their number, and `dual_encoder`, the figures of the towers. After re-ranking also `reranked`, `difference`
        (of both), and `ceiling`, the share of queries that have a right item among the K candidates.
    """

    def figures(values: dict[str, Tensor]) -> dict[str, dict[str, float | None]]:
        return {name: mean_of_queries(value_Q, ranks.queries) for name, value_Q in values.items()}

    before = measures_of_queries(ranks.cosine)
    found: dict[str, Any] = {"queries": len(ranks.cosine_Q), "dual_encoder": figures(before)}
    if ranks.reranked is None:
        return found
    after = measures_of_queries(ranks.reranked)
    gain = figures({name: after[name] - before[name] for name in after})
    assert ranks.reranked_items is not None
    top_k = ranks.reranked_items.shape[1]
    ceiling = mean_of_queries(ranks.cosine_Q <= top_k, ranks.queries)
    return {**found, "reranked": figures(after), "difference": gain, "candidates": top_k, "ceiling": ceiling}


def _table(found: dict[str, dict[str, Any]]) -> list[str]:
    """Format one line per direction and measure; the last two columns only after re-ranking."""
    lines = [f"{'95 % intervals, over images':<28}{'two towers':<18}"]
    if any("ceiling" in figures for figures in found.values()):
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
        if "ceiling" in figures:
            name = f"  ceiling, R@{figures['candidates']}"
            lines.append(f"{name:<28}{with_half_width(figures['ceiling'])}")
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


def mean_of_queries(value_Q: Tensor, queries: Keyed) -> dict[str, float | None]:
    """Return the mean of values as `value`, and `half_width_95` of its interval.

    That is None where equal captions leave fewer than `FEW_GROUPS` independent groups: no interval could be relied on.
    """
    value, half = mean_interval(value_Q, queries.group)
    groups, images = len(queries.group.unique()), len(queries.key.unique())
    return {"value": value, "half_width_95": None if groups < min(images, FEW_GROUPS) else half}
