"""A metric for `evaluate`: recall at k, mean and median rank of retrieval.

    import evaluate
    metric = evaluate.load("mm_utils/retrieval_recall")
    metric.compute(predictions=[[3, 1, 2], [2, 3, 1]], references=[[1], [1, 3]])
    {"recall@1": 0.0, "recall@5": 1.0, "recall@10": 1.0, "mean_rank": 2.0, "median_rank": 2.0}

It depends on `datasets` and `evaluate` alone, so it loads from a path without a network.
"""

import datasets
import evaluate

_INPUTS = """
Args:
    predictions: for each query, ids of the retrieved items, best first.
    references: for each query, ids of all right items (five captions of an image are five right items).
    k: cut-offs, by default 1, 5 and 10.
Returns:
    recall@k: share of queries with a right item among the first k, so 1.0 for a perfect model.
    mean_rank, median_rank: rank of the first right item, from 1; without one, the length of the list plus 1.
"""


class RetrievalRecall(evaluate.Metric):
    """Recall and ranks of retrieval, see the module's docstring."""

    def _info(self) -> evaluate.MetricInfo:
        ids = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description="Recall at 1, 5 and 10, mean and median rank of the first right item of every query.",
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": ids, "references": ids}),
        )

    def _compute(
        self, predictions: list[list[int]], references: list[list[int]], k: tuple[int, ...] = (1, 5, 10)
    ) -> dict[str, float]:
        hits = [  # rank of the first right item, from 1; 0 if there is none
            next((place for place, item in enumerate(found, 1) if item in set(right)), 0)
            for found, right in zip(predictions, references)  # noqa: B905
        ]
        ranks = sorted(hit or len(found) + 1 for hit, found in zip(hits, predictions))  # noqa: B905
        middle = len(ranks) // 2
        return {
            **{f"recall@{cut}": sum(0 < hit <= cut for hit in hits) / len(hits) for cut in k},
            "mean_rank": sum(ranks) / len(ranks),
            "median_rank": (ranks[middle] + ranks[~middle]) / 2,
        }
