"""Frozen towers run once, and training from what they returned is training with them."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset

from mm_utils.data.batches.order import GlobalOrder
from mm_utils.data.batches.sizes import BatchSizes
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.model import packing
from mm_utils.model.arguments import ModelArguments, ObjectiveArguments
from mm_utils.model.build import build_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.build import build_objective
from mm_utils.objectives.objective import Objective
from mm_utils.stored import place_of
from mm_utils.training.feature_cache import cache_features
from scripts import pretrain
from tests.kit.jsonl import read_lines
from tests.kit.models import write_towers
from tests.kit.numbered_rows import loaders, new_tokenizer, rows_of, training_data
from tests.kit.processes import run_on_ranks

SIZE = 16
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def rows() -> Dataset:
    """12 images of which two cannot be decoded, each with 1 to 4 captions."""
    return tokenize_captions(rows_of(12, broken=[2, 7]), new_tokenizer(), 16)


def frozen(
    vision: bool = True, text: bool = True, objectives: str = "contrastive,matching", **changes: Any
) -> Objective:
    torch.manual_seed(0)
    model = build_model(
        ModelArguments(image_size=SIZE, fusion_layers=1, freeze_vision=vision, freeze_text=text, **changes),
        new_tokenizer(),
    )
    return build_objective(model, ObjectiveArguments(objectives), 0)


def cached(rows: Dataset, objective: Objective, **changes: Any) -> Dataset:
    data = training_data(rows, **changes)
    return cache_features(data, objective, Accelerator()).features["train"]


def stores(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("tandem_features/*") if path.name[0] != "."}


def leftovers(folder: Path) -> list[Path]:
    return list(folder.glob("tandem_features/.*"))


def no_tower(*_: Any, **__: Any) -> None:
    pytest.fail("a frozen tower ran")


@pytest.mark.parametrize("packed_on", [{"cpu"}, set()], ids=["end to end", "in groups"])
@pytest.mark.parametrize("objectives", ["contrastive", "contrastive,matching"])
def test_a_batch_holds_what_the_towers_give(
    objectives: str, packed_on: set[str], rows: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "PACKED_ON", packed_on)
    monkeypatch.setitem(packing.PASS_TOKENS, "cpu", 1)  # several groups
    objective = frozen(objectives=objectives)
    matches = "matching" in objectives
    model = objective.model.eval()
    found = cached(rows, objective)
    order = GlobalOrder(12, BatchSizes((0,), (4,)), seed=0)
    live = list(loaders(min_crop_area=1.0).train(rows, order, 0, 6))
    monkeypatch.setattr("mm_utils.data.media.medium.read_pixels", lambda *_: pytest.fail("an image was opened"))
    for batch, expected in zip(loaders(min_crop_area=1.0).train(found, order, 0, 6), live, strict=True):
        assert "pixel_values" not in batch
        for name in ("rows", "skipped", "lengths", "image_ids"):
            assert list(batch[name]) == list(expected[name])
        for name in ("ids", "input_ids", "attention_mask"):
            assert torch.equal(batch[name], expected[name])
        with torch.no_grad():
            pooled, taps = model.vision_features(expected["pixel_values"], matches)
            text, states = model.text_features(expected["input_ids"], expected["attention_mask"])
        right = {"vision_pooled": pooled, "text_pooled": text} | {
            f"vision_taps_{n}": tap for n, tap in enumerate(taps)
        }
        right |= {"text_states": states * expected["attention_mask"][..., None]} if matches else {}
        assert {name for name in batch if name.startswith(("vision_", "text_"))} == right.keys()
        for name, value in right.items():
            torch.testing.assert_close(batch[name], value, rtol=1e-5, atol=1e-5)
    reasons = [reason.split(":")[0] for batch in live for reason in batch["skipped"]]
    assert sorted(reasons) == ["image id-2"] * 2 + ["image id-7"] * 2  # in each of two epochs


def test_a_tower_that_gives_no_numbers_is_refused(
    rows: Dataset, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    run = FusionDualEncoderModel.vision_features

    def loud(self, pixels, with_taps=True):
        pooled, taps = run(self, pixels, with_taps)
        return pooled / 0, taps

    monkeypatch.setattr(FusionDualEncoderModel, "vision_features", loud)
    with pytest.raises(ValueError, match="the frozen vision tower computes values that are not finite"):
        cached(rows, frozen(text=False))
    assert not stores(own_cache)
    assert not leftovers(own_cache)


@torch.no_grad()
def change_last_weight(tower: torch.nn.Module) -> None:
    *_, last = tower.parameters()
    last[(-1,) * last.dim()] += 1e-6


def tap(objective: Objective) -> None:
    objective.model.config.fusion_vision_taps = objective.model.fusion.taps = [-2]


def set_config(name: str, value: Any) -> Callable[[Objective], None]:
    return lambda objective: setattr(objective.model.config, name, value)


def other_rows(count: int = 12, broken: Sequence[int] = (2, 7), length: int = 16) -> Dataset:
    return tokenize_captions(rows_of(count, broken), new_tokenizer(), length)


MODELS = {
    "vision weight": (lambda objective: change_last_weight(objective.model.vision_model), True, False),
    "text weight": (lambda objective: change_last_weight(objective.model.text_model), False, True),
    "vision pooling": (set_config("vision_pooling", "mean"), True, False),
    "text pooling": (set_config("text_pooling", "cls"), False, True),
    "taps": (tap, True, False),
    "objective": (lambda objective: setattr(objective, "pairs_per_image", 0), True, True),
}
OTHERS = {
    "workers": ({"num_workers": 2}, None, False, False),
    "image size": ({"size": 32}, None, True, False),
    "mean": ({"mean": 0.25}, None, True, False),
    "fewer rows": ({}, lambda: other_rows(11), True, True),
    "order": ({}, lambda: other_rows().select([1, 0, *range(2, 12)]), True, True),
    "captions are cut": ({}, lambda: other_rows(length=4), False, True),
    "an image has other bytes": ({}, lambda: other_rows(broken=[2]), True, False),
}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_store_is_for_one_model_one_preprocessing_one_data_set_and_one_precision(
    rows: Dataset, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cached(rows, frozen())
    second = frozen()
    assert len(stores(own_cache)) == 2
    with monkeypatch.context() as patch:
        for name in ("vision_features", "text_features"):
            patch.setattr(FusionDualEncoderModel, name, no_tower)
        again = cached(rows, second, eval_batch_size=3)
    assert again.with_format("arrow")[:].equals(first.with_format("arrow")[:])

    def check(name, expected, objective, given=rows, **options):
        before = stores(own_cache)
        cached(given, objective, **options)
        assert len(stores(own_cache) - before) == expected, name

    for name, (change, vision, text) in MODELS.items():
        change(objective := frozen())
        check(name, vision + text, objective)
    for name, (options, other, vision, text) in OTHERS.items():
        check(name, vision + text, frozen(), other() if other else rows, **options)
    monkeypatch.setattr(Accelerator, "mixed_precision", "bf16")
    check("precision", 2, frozen())


def cached_on_this_rank(folder: Path) -> Any:
    datasets.config.HF_DATASETS_CACHE = folder
    return cached(other_rows(), frozen())["vision_pooled"]


def test_two_processes_share_the_work(tmp_path: Path) -> None:
    by_rank = run_on_ranks(2, cached_on_this_rank, tmp_path / "two")
    alone = cached(other_rows(), frozen())
    folders = [*(tmp_path / "two").glob("*_features/*")]
    assert len(folders) == 2
    for folder in folders:
        assert sorted(path.name for path in folder.glob("*.arrow")) == ["00000.arrow", "00001.arrow"]
    assert not leftovers(tmp_path / "two")
    for found in by_rank:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(alone["vision_pooled"]), rtol=1e-5, atol=1e-6)


def test_a_run_between_frozen_towers_runs_each_tower_once(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Closed form, training and all evaluations read one pass; the names of classes are the only other texts."""
    rows = {}
    for name in ("vision_features", "text_features"):
        run = getattr(FusionDualEncoderModel, name)

        def noted(self, first, *args, name=name, run=run, **kwargs):
            rows[name] = rows.get(name, 0) + (len(first) if len(first) > 2 else 0)  # one or two are blanks, for shapes
            return run(self, first, *args, **kwargs)

        monkeypatch.setattr(FusionDualEncoderModel, name, noted)
    flags = ["--config", "recipes/two_encoders.yaml", "--train_file", str(corpus)]
    towers = write_towers(tmp_path, "resnet", ["red", "blue", "round"], new_tokenizer())
    flags += [word for name, folder in towers.items() for word in (f"--{name}", folder)]
    small = ["--max_steps", "4", "--dataloader_num_workers", "0"]  # fewer rows than the default batch
    with caplog.at_level(logging.INFO):
        pretrain.main([*flags, *small, "--output_dir", str(tmp_path / "run")])
    assert [line for line in caplog.messages if "eatures" in line] == [
        f"Features of the frozen vision and text encoders are in {place_of('features', '')}"
    ]
    assert "without its own dropout" not in caplog.text
    lines = read_lines(corpus)
    captions = sum(len(line["captions"]) for line in lines)
    assert rows == {"vision_features": len(lines), "text_features": captions + 3}
    log = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert sum("eval_mean_recall" in row for row in log) >= 5
