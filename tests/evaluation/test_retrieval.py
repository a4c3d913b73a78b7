"""The `evaluate` metric, probes, evaluators of one's own, what training gained; figures: tests/contracts/test_metrics.py."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import evaluate
import pytest
import torch
from torch.nn.functional import normalize

import mm_utils
from mm_utils.data.scenes import load_scenes
from mm_utils.evaluation.embeddings import Embeddings
from mm_utils.evaluation.gained import recall_gained
from mm_utils.evaluation.metrics import summarise_ranks
from mm_utils.evaluation.probes import caption_probes
from mm_utils.evaluation.reranking import rank_directions
from mm_utils.evaluation.retrieval import RetrievalEvaluator, in_turn
from mm_utils.model.processor import train_tokenizer
from tests.kit.truthful_model import TruthfulModel, split_of


def test_the_evaluate_metric_agrees() -> None:
    metric = evaluate.load(str(Path(mm_utils.__file__).with_name("retrieval_recall")))
    model = TruthfulModel(30)
    ranking = (model.text @ model.image.T).argsort(1, descending=True)
    rank_Q = (ranking == torch.tensor(model.owner)[:, None]).long().argmax(1) + 1
    found = metric.compute(predictions=ranking, references=[[image] for image in model.owner])
    assert found == pytest.approx(summarise_ranks(rank_Q) | {})
    found = metric.compute(predictions=[[3, 1, 2], [2, 3, 1], [5]], references=[[1], [1, 3], [9]], k=[1, 2])
    assert found == pytest.approx({"recall@1": 0, "recall@2": 2 / 3, "mean_rank": 2, "median_rank": 2})


def test_scenes_have_probes(tmp_path: Any) -> None:
    rows = load_scenes(num_train=1, num_eval=30, cache_dir=tmp_path)["validation"]
    tokenizer: Any = train_tokenizer([caption for row in rows["captions"] for caption in row], 400)
    probes = caption_probes(rows, tokenizer, 64)
    texts = probes.texts
    ids = [row[mask.bool()].tolist() for row, mask in zip(texts.input_ids, texts.attention_mask, strict=True)]
    assert ids == [tokenizer(pair[side]).input_ids for pair in rows["order_pair"] for side in ("true", "false")]
    for others in (rows.remove_columns("order_pair"), datasets.Dataset.from_dict({"order_pair": ["something else"]})):
        assert len(caption_probes(others, tokenizer, 64).image_P) == 0
    # Captions cut to their common beginning are not a probe.
    assert len(caption_probes(rows, tokenizer, 3).image_P) == 0


@pytest.mark.parametrize("value", [{"recall": 0.4}, {"own": "good"}, {"own": None}])
def test_a_metric_is_a_number_and_has_one_source(value: dict[str, Any]) -> None:
    nothing: Any = None
    assert in_turn(lambda *_: {"recall": 0.5}, lambda *_: {"own": 1})(nothing, [], nothing) == {
        "recall": 0.5,
        "own": 1,
    }
    measure = in_turn(lambda *_: {"recall": 0.5}, lambda *_: value)
    with pytest.raises(ValueError, match=next(iter(value))):
        measure(nothing, [], nothing)


# -- what training gained -----------------------------------------------------------------------------------------------
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
    (200, None, 1e6, None, r"by chance 0\.027: by this figure, nothing was learnt\. Encoders from scratch"),
    (200, 1.6, 0.8, 9, r"before training, 0\.\d{3} after: \+0\.\d{3} ± 0\.\d{3}\.$"),
    (200, 0.8, 0.8, 9, r"after: [+-]0\.\d{3} ± 0\.\d{3}, within noise\. More pairs"),
    (200, 0.8, 0.8, 0, r"before training, and no later step was better: training gained nothing"),
    (200, 0.8, 1.6, 9, r"after: -0\.\d{3} ± 0\.\d{3}: training lost\. Lower"),
    (29, 1.6, 0.8, 9, r"^mean recall 0\.\d{3} ± 0\.\d{3}, by chance 0\.\d{3}\.$"),
]


@pytest.mark.parametrize(("images", "before", "after", "saved", "said"), CASES)
@pytest.mark.parametrize("is_paired", [True, False])
def test_a_gain_is_stated_beside_its_noise(
    images: int, before: float | None, after: float, saved: int | None, said: str, is_paired: bool, tmp_path: Path
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
        evaluator, tmp_path / "metrics.jsonl", "image", is_paired=is_paired, from_scratch=before is None
    )
    assert found is not None
    assert re.search(said, found), found
