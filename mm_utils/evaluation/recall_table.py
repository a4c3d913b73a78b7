"""The recalls of both directions as a table: before training, by the encoders, re-ranked, and by chance."""

from collections.abc import Mapping
from typing import NamedTuple

from mm_utils.data.rows.columns import too_few
from mm_utils.evaluation.embeddings import Embeddings
from mm_utils.evaluation.metrics import CUTOFFS, FEW_GROUPS, wilson_interval
from mm_utils.evaluation.recall_gain import Gain, chance
from mm_utils.text import sentence_case

DIRECTIONS = {"text_to_image": "text to image", "image_to_text": "image to text"}
GROUNDED = {  # a figure, what it says, and what stands beside it
    "eval_moment_iou0.5": (
        "Moments found with an overlap of half",
        "eval_moment_iou0.5_fixed",
        "by the best fixed span",
    ),
    "eval_pointing_accuracy": ("Phrases pointed at within their box", "eval_pointing_chance", "by chance"),
}
MEASURED = {"eval_": "encoders alone", "eval_rerank_": "re-ranked by the fusion head"}


class RecallTable(NamedTuple):
    """The recalls on a split, as a screen and a card show them.

    Attributes:
        images: how many images, or other media, were measured.
        rows: a title, and a cell for each of `CUTOFFS`.
        notes: sentences that belong below.
    """

    images: int
    medium: str
    rows: list[list[str]]
    notes: list[str]

    def lines(self, name: str) -> list[str]:
        """Return the lines of a screen; `name` is that of the split, such as "the test split"."""
        width = max((len(title) for title, *_ in self.rows), default=0) + 2
        lines = ["", f"Retrieval on the {self.images:,} {self.medium}s of {name}:"]
        for title, *cells in self.rows:
            shown = "".join(f"R@{k} {cell:<24}" for k, cell in zip(CUTOFFS, cells, strict=False))
            lines.append(f"  {title:<{width}}{shown.rstrip()}")
        return lines + [f"  {note}" for note in self.notes]


def recall_table(
    metrics: Mapping[str, float], split: Embeddings, medium: str, gain: Gain | None = None
) -> RecallTable:
    """Return both directions' recalls with their intervals: before training, encoders, re-ranked, the head's gain, by chance."""
    images = len(split.image_key_M)
    counted, queries = independent_queries(split, medium)
    notes = [f"{sentence_case(counted)}.", *grounding_sentences(metrics), too_few(images, medium, "The split")]
    rows: list[list[str]] = []
    for direction, title in DIRECTIONS.items():
        shown = title.replace("image", medium)
        names = [f"eval_{direction}_recall@{k}" for k in CUTOFFS]
        reranked = [name.replace("eval_", "eval_rerank_") for name in names]
        found = {
            "eval_": [metrics[name] for name in names if name in metrics],
            "eval_rerank_": [metrics[name] for name in reranked if name in metrics],
        }
        if gain and gain.starts and names[0] in gain.starts[0]:
            rows.append(
                [f"{shown}, {gain.start_name}", *(_with_interval(gain.starts[0][name], queries) for name in names)]
            )
        named = dict(MEASURED) if found["eval_rerank_"] or gain is None else {"eval_": "after training"}
        for prefix, words in named.items():
            if recalls := found[prefix]:
                rows.append([f"{shown}, {words}", *(_with_interval(recall, queries) for recall in recalls)])
        gains = [after - before for before, after in zip(*found.values(), strict=False)]
        if gains:
            rows.append([f"{shown}, what the head adds", *(f"{gain:+.3f}" for gain in gains)])
        rows.append([f"{shown}, by chance", *(f"{value:.3f}" for value in chance(split, direction))])
    return RecallTable(images, medium, rows, [note for note in notes if note])


def grounding_sentences(metrics: Mapping[str, float]) -> list[str]:
    """Return a sentence on moments and one on regions, where they were measured."""
    said = []
    for name, (words, floor, by) in GROUNDED.items():
        if name in metrics:
            low = metrics[f"{name}_low"]
            high = metrics[f"{name}_high"]
            said.append(f"{words}: {metrics[name]:.3f} ({low:.2f} to {high:.2f}), {by} {metrics[floor]:.3f}.")
    return said


def independent_queries(split: Embeddings, medium: str) -> tuple[str, int]:
    """Return what the intervals of recalls count as a query, in words, and how many; 0 if there are too few for intervals."""
    images = len(split.group_M)
    groups = len(split.group_M.unique())
    if groups < min(images, FEW_GROUPS):
        return (
            f"equal captions leave {groups} independent groups of {medium}s, too few for intervals; measure on more",
            0,
        )
    counted = medium if groups == images else f"group of {medium}s with equal captions"
    return f"95 % intervals in brackets, counting one query per {counted}", groups


def _with_interval(recall: float, queries: int) -> str:
    """Format a recall with its interval, of independent queries; without if there are 0."""
    if not queries:
        return f"{recall:.3f}"
    low, high = wilson_interval(recall * queries, queries)
    return f"{recall:.3f} ({low:.2f} to {high:.2f})"
