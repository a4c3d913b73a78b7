"""What training gained, from the ranks of two evaluations and the log of the run."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from mm_utils.evaluation.embeddings import Embeddings
from mm_utils.evaluation.gained import recall_gained
from mm_utils.evaluation.reranking import rank_directions
from mm_utils.evaluation.retrieval import RetrievalEvaluator
from tests.kit.truthful_model import split_of


def noisy(images: int, noise: float, seed: int = 0) -> Embeddings:
    drawn = torch.Generator().manual_seed(seed)
    image, other = (torch.randn(images, 16, generator=drawn) for _ in range(2))
    return split_of(normalize(image, dim=1), normalize(image + noise * other, dim=1), list(range(images)))


def mean_recall(split: Embeddings) -> float:
    ranks = [ranks.cosine_Q for ranks in rank_directions(split).values()]
    return sum((rank_Q <= k).double().mean().item() for rank_Q in ranks for k in (1, 5, 10)) / 6


CASES = [
    # images, noise before (None: from scratch), noise after, saved step, what is said
    (200, None, 0.8, None, r"^mean recall 0\.\d{3} ± 0\.\d{3}, by chance 0\.027\.$"),
    (200, None, 1e6, None, r"by chance 0\.027: at chance, nothing was learnt\. Encoders from scratch"),
    (200, 1.6, 0.8, 9, r"before training, 0\.\d{3} after: \+0\.\d{3} ± 0\.\d{3}\.$"),
    (200, 0.8, 0.8, 9, r"after: [+-]0\.\d{3} ± 0\.\d{3}, within noise\. More pairs"),
    (200, 0.8, 0.8, 0, r"before training, and no later step was better: training gained nothing"),
    (200, 0.8, 1.6, 9, r"after: -0\.\d{3} ± 0\.\d{3}: training lost recall\. Lower"),
    (29, 1.6, 0.8, 9, r"^mean recall 0\.\d{3} ± 0\.\d{3}, by chance 0\.\d{3}\.$"),
]


@pytest.mark.parametrize(("images", "before", "after", "saved", "said"), CASES)
@pytest.mark.parametrize("is_paired", [True, False])
def test_a_gain_is_stated_beside_its_noise(
    images: int,
    before: float | None,
    after: float,
    saved: int | None,
    said: str,
    is_paired: bool,
    tmp_path: Path,
) -> None:
    evaluator, rows = RetrievalEvaluator(), []
    evaluator.split = noisy(images, after)
    evaluator.directions = rank_directions(evaluator.split)
    if before is not None:
        start = noisy(images, before, seed=1)
        evaluator.first = {name: ranks.cosine_Q for name, ranks in rank_directions(start).items()}
        rows = [{"step": 0, "eval_mean_recall": mean_recall(start)}]
    rows.append({"step": 9, "eval_mean_recall": mean_recall(evaluator.split)})
    rows += [{"step": 9, "saved_step": saved}] if saved is not None else []
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = recall_gained(
        evaluator,
        tmp_path / "metrics.jsonl",
        "image",
        is_paired=is_paired,
        from_scratch=before is None,
    )
    assert found is not None
    if not is_paired:  # a resumed run has no ranks of the start: the interval is that of the recall
        said = re.sub(r"after: .*? ± 0", "after ± 0", said)
    assert re.search(said, found), found
