"""In training: what was gained, from the ranks of two evaluations and the log; the recall of training images."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import DatasetDict
from torch.nn.functional import normalize

from mm_utils.data import media
from mm_utils.data.batches.loaders import LoaderArguments, Loaders
from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.training_data import TrainingData
from mm_utils.evaluation import train_recall
from mm_utils.evaluation.embeddings import Embeddings
from mm_utils.evaluation.gained import recall_gained
from mm_utils.evaluation.reranking import rank_directions
from mm_utils.evaluation.retrieval import RetrievalEvaluator, in_turn
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model
from scripts import pretrain
from tests.kit.launches import rows_of as log_of
from tests.kit.launches import weights
from tests.kit.numbered_rows import new_tokenizer, rows_of
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
    if not is_paired:  # a resumed run has no ranks of the start: the interval is that of the recall
        said = re.sub(r"after: .*? ± 0", "after ± 0", said)
    assert re.search(said, found), found


def opened(train: int = 12, validation: int = 5) -> TrainingData:
    """So many images; those of validation are the first ones of train."""
    accelerator, rows = Accelerator(cpu=True), tokenize_captions(rows_of(train), new_tokenizer(), 16)
    arguments = LoaderArguments(16, min_crop_area=1, dataloader_num_workers="0")
    loaders = Loaders(arguments, accelerator.device, 0, media.Image(16, (0.5,) * 3, (0.2,) * 3))
    splits = DatasetDict(train=rows, validation=rows.take(validation))
    order = GlobalOrder(train, BatchSizes((0,), (2,)), seed=0)
    return TrainingData(splits, SimpleNamespace(), loaders, order, {}, 4)


def measured(seed: int, **sizes: int) -> dict[str, float]:
    torch.manual_seed(0)
    model, data = build_model(ModelArguments(image_size=16, fusion_layers=0), new_tokenizer()).eval(), opened(**sizes)
    accelerator: Any = Accelerator(cpu=True)
    return in_turn(RetrievalEvaluator(), *train_recall.train_recall(data, seed))(
        model, data.evaluation("validation"), accelerator
    )


def test_a_sample_of_all_rows_has_the_recall_of_these_rows() -> None:
    found = measured(0, train=11, validation=11)
    assert 0 < found["train_mean_recall"] == found["mean_recall"] < 1


def test_a_sample_is_as_large_as_validation_and_a_function_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def places(data: TrainingData, seed: int) -> list[int]:
        return [
            row
            for batch in train_recall.TrainRecall(data, seed).sample
            for row in batch["ids"][:, 0].unique().tolist()
        ]

    first, again, other = (places(opened(), seed) for seed in (0, 0, 1))
    assert len(set(first)) == len(set(other)) == 5
    assert first == again != other
    assert len(set(places(opened(train=4, validation=4), 0))) == 4
    monkeypatch.setattr(train_recall, "MOST_IMAGES", 3)
    assert len(set(places(opened(), 0))) == 3


def test_what_is_trained_is_the_same_without_it(
    tiny_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*tiny_flags, "--max_steps", "2", "--eval_steps", "1", "--save_steps", "0", "--output_dir"]
    metrics = pretrain.main([*flags, str(tmp_path / "with")])
    monkeypatch.setattr(pretrain, "train_recall", lambda *_: [])
    without = pretrain.main([*flags, str(tmp_path / "without")])
    assert metrics.keys() - without.keys() == {"eval_train_mean_recall"}
    assert {name: metrics[name] for name in without} == without
    assert sum("eval_train_mean_recall" in row for row in log_of(tmp_path / "with")) == 2
    others = weights(tmp_path / "without")
    for name, value in weights(tmp_path / "with").items():
        assert torch.equal(value, others[name]), name
