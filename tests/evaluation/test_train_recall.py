"""The recall of training images: whose it is, what it equals, and that it leaves the run alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import DatasetDict

from mm_utils.data import media
from mm_utils.data.batches.loaders import LoaderArguments, Loaders
from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.training_data import TrainingData
from mm_utils.evaluation import train_recall
from mm_utils.evaluation.retrieval import RetrievalEvaluator, in_turn
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model
from scripts import pretrain
from tests.kit.launches import rows_of as log_of
from tests.kit.launches import weights
from tests.kit.numbered_rows import new_tokenizer, rows_of


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
