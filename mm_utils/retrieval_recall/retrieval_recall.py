"""A metric for `evaluate`: recall at k, mean and median rank of retrieval.

    import evaluate
    metric = evaluate.load("mm_utils/retrieval_recall")
    metric.compute(predictions=[[3, 1, 2], [2, 3, 1]], references=[[1], [1, 3]])
    {"recall@1": 0.0, "recall@5": 1.0, "recall@10": 1.0, "mean_rank": 2.0, "median_rank": 2.0}

    evaluate.load("mm_utils/retrieval_recall", "ranks").compute(ranks=[2, 2])  # where the ranks are known: the same

It depends on `datasets` and `evaluate` alone, so it loads from a path without a network.
"""

from collections.abc import Sequence

import datasets
import evaluate

_INPUTS = """
Args:
    predictions: for each query, ids of the retrieved items, best first.
    references: for each query, ids of all right items (five captions of an image are five right items).
    ranks: in place of both, with the configuration "ranks": the rank of each query's first right item, from 1.
    k: cut-offs, by default 1, 5 and 10.
Returns:
    recall@k: share of queries with a right item among the first k, so 1.0 for a perfect model.
    mean_rank, median_rank: rank of the first right item, from 1; without one, the length of the list plus 1.
"""


class RetrievalRecall(evaluate.Metric):
    """Recall and ranks of retrieval, see the module's docstring."""

    def _info(self) -> evaluate.MetricInfo:
        number = datasets.Value("int64")
        ids = datasets.Sequence(number)
        inputs = {"ranks": number} if self.config_name == "ranks" else {"predictions": ids, "references": ids}
        return evaluate.MetricInfo(
            description="Recall at 1, 5 and 10, mean and median rank of the first right item of every query.",
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(inputs),
        )

    def _compute(
        self,
        predictions: Sequence[list[int]] = (),
        references: Sequence[list[int]] = (),
        ranks: Sequence[int] = (),
        k: tuple[int, ...] = (1, 5, 10),
    ) -> dict[str, float]:
        hits = list(ranks)  # rank of the first right item, from 1; 0 if there is none
        if not hits:
            ranks = []
            for found, right in zip(predictions, references):  # noqa: B905
                hit = next((place for place, item in enumerate(found, 1) if item in right), 0)
                hits.append(hit)
                ranks.append(hit or len(found) + 1)
        ranks = sorted(ranks)
        middle = len(ranks) // 2
        metrics = {}
        for cut in k:
            metrics[f"recall@{cut}"] = sum(0 < hit <= cut for hit in hits) / len(hits)
        return {
            **metrics,
            "mean_rank": sum(ranks) / len(ranks),
            # [2] and [~2], which is [-3]: of five ranks the same one, of four those in the middle
            "median_rank": (ranks[middle] + ranks[~middle]) / 2,
        }
