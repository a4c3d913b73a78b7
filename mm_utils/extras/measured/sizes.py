"""Recall of text to image over the bytes that an image takes in an index.

==========  ==================  =======================================================================================
code        bytes a dimension   what is stored of an image; queries stay in fp32
==========  ==================  =======================================================================================
fp32        4                   its embedding
fp16        2                   the embedding, rounded
int8        1                   `mm_utils.extras.measured.embedding_codes.quantize_int8`, whose steps are fitted to the images
binary      1/8                 signs: the Hamming distance finds 40 candidates, which the query's numbers then order
==========  ==================  =======================================================================================

A width below the full one stores the first numbers of an embedding, at unit length again; so does the query. They are made
for that by `--matryoshka_dims`.

Shape letters: Q queries, N images, K candidates, E width of an embedding.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import normalize

from mm_utils.evaluation.embeddings import Embeddings, Keyed, best_rank, right_items
from mm_utils.evaluation.metrics import CUTOFFS, FEW_GROUPS, mean_interval
from mm_utils.extras.measured.embedding_codes import hamming, quantize_int8, rotate, to_bits
from mm_utils.files import write_atomic
from mm_utils.reports.plots import COLORS, INK, MUTED, new_figure, save_figure, set_title, style_axes
from mm_utils.training.callbacks import RunCallback

BYTES = {"fp32": 4.0, "fp16": 2.0, "int8": 1.0, "binary": 1 / 8}
_LEAST_POWER = 4  # 16 dimensions
_QUERIES = 5000  # captions at equal distances, of more
_CANDIDATES = 4 * max(CUTOFFS)  # of the first pass over signs
_BLOCK = 512  # queries at a time
_SHOWN = (1, 10)  # cut-offs in the picture

Scores = Callable[[Tensor], Tensor]
"""Map queries `[Q, E]` to scores `[Q, N]`."""


class EmbeddingSizes(RunCallback):
    """Report what size costs at the end of a run with `--matryoshka_dims`."""

    scripts = ("pretrain",)
    flag = "matryoshka_dims"

    def on_finish(self, run: Any) -> None:
        """Write `embedding_sizes.*` of the last evaluation."""
        for share in run.data.shares(run.run, run.metrics):
            share.run.output_dir.mkdir(parents=True, exist_ok=True)
            report_sizes(run.run.accelerator, run.retrieval[share.data.medium].split, share.run.output_dir)


def report_sizes(accelerator: Accelerator, split: Embeddings | None, folder: str | Path) -> None:
    """On the main process, write recalls of each width and code, `embedding_sizes.*`.

    Args:
        split: the embeddings of the last evaluation; None if there was none.
        folder: where to write.
    """
    if not accelerator.is_main_process or split is None:
        return
    rows = recall_over_bytes(split)
    write_atomic(Path(folder, "embedding_sizes.json"), json.dumps(rows, indent=2) + "\n")
    draw_sizes(rows, Path(folder, "embedding_sizes.png"))


def recall_over_bytes(split: Embeddings) -> list[dict[str, Any]]:
    """Return recalls of the full width and powers of two from 16 on, in each code.

    Returns:
        rows with `dimensions`, `code`, `bytes` of an image, and `recall@1` ... with half the width of their 95 % intervals.
    """
    queries, images = (
        Keyed(
            side.embeds.cpu().float(),
            side.key.cpu(),
            side.group.cpu(),
            None if side.captions is None else side.captions.cpu(),
        )
        for side in split.directions["text_to_image"]
    )
    count = len(queries.key)
    chosen_Q = torch.arange(min(count, _QUERIES)) * count // min(count, _QUERIES)
    chosen, full = queries.take(chosen_Q), images.embeds.shape[1]
    right_QN = right_items(chosen, images)
    widths = [2**power for power in range(_LEAST_POWER, full.bit_length()) if 2**power < full]
    rows = []
    for width in (full, *reversed(widths)):
        query_QE, image_NE = (normalize(each[:, :width], dim=1) for each in (chosen.embeds, images.embeds))
        for code, size in BYTES.items():
            rank_Q = _ranks(query_QE, _coded(image_NE, code), right_QN)
            recalls = {f"recall@{k}": mean_of_queries(rank_Q <= k, chosen) for k in CUTOFFS}
            rows.append({"dimensions": width, "code": code, "bytes": math.ceil(size * width), **recalls})
    return rows


def _ranks(query_QE: Tensor, scores: Scores, right_QN: Tensor) -> Tensor:
    blocks = zip(query_QE.split(_BLOCK), right_QN.split(_BLOCK), strict=True)
    return torch.cat([best_rank(scores(part_QE), right) for part_QE, right in blocks])


def _coded(image_NE: Tensor, code: str) -> Scores:
    """Return the scores of images that are stored as `code`."""
    if code == "binary":
        return _two_passes(image_NE.numpy())
    if code == "int8":
        codes, scale = quantize_int8(image_NE.numpy())
        image_NE = torch.from_numpy(codes * scale)
    elif code == "fp16":
        image_NE = image_NE.half().float()
    return lambda query_QE: query_QE @ image_NE.T


def _two_passes(image_NE: np.ndarray) -> Scores:
    bits = to_bits(image_NE)
    sign_NE = 2 * torch.from_numpy(np.unpackbits(bits, axis=1, count=image_NE.shape[1])).float() - 1

    def scores(query_QE: Tensor) -> Tensor:
        distance_QN = torch.from_numpy(hamming(to_bits(query_QE.numpy()), bits))
        near_QK = distance_QN.topk(min(_CANDIDATES, len(bits)), 1, largest=False).indices
        score_QN = torch.from_numpy(rotate(query_QE.numpy())) @ sign_NE.T
        return torch.full_like(score_QN, -torch.inf).scatter_(1, near_QK, score_QN.gather(1, near_QK))

    return scores


def draw_sizes(rows: list[dict[str, Any]], out_path: Path) -> None:
    """Draw recall against the bytes of an embedding, a line per code, a panel per cut-off."""
    from matplotlib.ticker import EngFormatter, NullLocator

    figure = new_figure(7.5, 2.9)
    for place, k in enumerate(_SHOWN, 1):
        ax = figure.add_subplot(1, len(_SHOWN), place)
        style_axes(ax)
        for code, color in zip(BYTES, COLORS, strict=False):
            own = [row for row in rows if row["code"] == code]
            values, sizes = [row[f"recall@{k}"]["value"] for row in own], [row["bytes"] for row in own]
            ax.plot(sizes, values, color=color, linewidth=1.6, marker="o", markersize=3, label=code)
            halves = [row[f"recall@{k}"]["half_width_95"] for row in own]
            if color == COLORS[0] and None not in halves:
                low, high = (
                    [value + sign * half for value, half in zip(values, halves, strict=True)] for sign in (-1, 1)
                )
                ax.fill_between(sizes, low, high, color=color, alpha=0.12, linewidth=0, label="95 % interval")
        ax.set_xscale("log", base=2)
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.set_xlabel("bytes of an embedding", fontsize=8, color=MUTED)
        set_title(ax, f"found by text, R@{k}")
    lines, labels = ax.get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False, labelcolor=INK)
    save_figure(figure, out_path)


def mean_of_queries(value_Q: Tensor, queries: Keyed) -> dict[str, float | None]:
    """Return the mean of values as `value`, and `half_width_95` of its interval.

    That is None where equal captions leave fewer than `FEW_GROUPS` independent groups: no interval could be relied on.
    """
    value, half = mean_interval(value_Q, queries.group)
    groups, images = len(queries.group.unique()), len(queries.key.unique())
    return {"value": value, "half_width_95": None if groups < min(images, FEW_GROUPS) else half}
