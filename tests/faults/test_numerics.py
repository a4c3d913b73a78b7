"""Figures that are not finite, memory that runs out, and batches that have little to say, on one rank of two or on all."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_utils.checkpointing.files import newest_checkpoint, step_of
from mm_utils.training.arguments import NONFINITE_FILE
from mm_utils.training.trainer import Trainer
from tests.faults import rank_runs
from tests.faults.rank_runs import SAVE_STEPS, Action, Fault, Raise, start
from tests.kit.tiny_run import STEPS, exact_run, slow

TOLERANCE = 1e-5
STRUCK = 5  # the step that something happens in


@pytest.fixture(scope="module")
def without_a_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is put back to where it was before one of its steps."""
    folder = tmp_path_factory.mktemp("without") / "run"
    faults = (Fault(_remember, "taken", STRUCK), Fault(_go_back, "log", STRUCK))
    assert start(1, exact_run(folder), *faults).statuses == [0]
    return folder


_state: dict[str, Any] = {}


def _remember(trainer: Trainer, batch: dict[str, Any]) -> None:
    assert trainer.average is not None
    state = {"model": trainer.model, "optimizer": trainer.optimizer}
    _state.update({name: copy.deepcopy(each.state_dict()) for name, each in state.items()})
    _state["average"] = copy.deepcopy(trainer.average.values)


def _go_back(trainer: Trainer, batch: dict[str, Any]) -> None:
    assert trainer.average is not None
    trainer.model.load_state_dict(_state["model"])
    trainer.optimizer.load_state_dict(_state["optimizer"])
    for name, value in _state["average"].items():
        trainer.average.values[name].copy_(value)


# -- not finite ---------------------------------------------------------------------------------------------------------


class Pixels:
    """Images of one value, as a broken decoder may give them."""

    def __init__(self, value: float):
        self.value = value

    def __call__(self, trainer: Trainer, batch: dict[str, Any]) -> None:
        batch["pixel_values"].fill_(self.value)


def overflow(trainer: Trainer, batch: dict[str, Any]) -> None:
    """The gradient of this step, though not its loss, is infinite."""
    weight = trainer.model.text_projection.weight
    left = [math.inf]  # a hook that was removed while it runs would not be called for others
    weight.register_hook(lambda gradient: gradient + (left.pop() if left else 0.0))


POISONS: dict[str, Action] = {
    "NaN pixels": Pixels(math.nan),
    "infinite pixels": Pixels(math.inf),
    "an infinite gradient": overflow,
}
CASES = [("NaN pixels", 1, None), ("an infinite gradient", 0, None), slow("NaN pixels", 0, None),
         slow("infinite pixels", 1, None), slow("an infinite gradient", 1, None), slow("NaN pixels", 1, "1"),
         slow("infinite pixels", 0, "2"), slow("an infinite gradient", 1, "1"), slow("NaN pixels", None, "2")]  # fmt: skip


@pytest.mark.parametrize(("what", "rank", "parts"), CASES)
def test_a_step_that_is_not_finite(
    without_a_step: Path, tmp_path: Path, what: str, rank: int | None, parts: str | None
) -> None:
    """It changes nothing, on no process; its images are written down, and the run goes on."""
    run = exact_run(tmp_path / "run", micro_batch_size=parts)
    ended = start(2, run, Fault(POISONS[what], "taken", STRUCK, rank))
    assert ended.statuses == [0, 0], ended.text
    assert f"Step {STRUCK} was skipped" in ended.texts[0]
    [line] = (run.folder / NONFINITE_FILE).read_text().splitlines()
    assert f'"step": {STRUCK},' in line
    assert all(f'"{row}"' in line for row in rank_runs.rows_of(run.folder)[STRUCK])
    assert rank_runs.difference(run.folder, without_a_step) < TOLERANCE


@pytest.mark.parametrize(("what", "rank"), [("NaN pixels", 1), slow("an infinite gradient", 0)])
def test_too_many_steps_that_are_not_finite(tmp_path: Path, what: str, rank: int) -> None:
    run = exact_run(tmp_path / "run", max_steps=16)
    ended = start(2, run, *(Fault(POISONS[what], "taken", step, rank) for step in range(4, 16)))
    assert ended.statuses == [1, 1], ended.text
    assert "10 steps had a loss or a gradient that is not finite" in ended.text
    assert "Traceback" not in ended.text
    assert not (run.folder / "model.safetensors").exists()


def break_a_weight(trainer: Trainer, batch: dict[str, Any]) -> None:
    with torch.no_grad():
        trainer.model.text_projection.weight[0, 0] = math.nan


def test_weights_that_are_not_finite_are_not_saved(exact: Path, tmp_path: Path) -> None:
    run = exact_run(tmp_path / "run")
    ended = start(2, run, Fault(break_a_weight, "end", 6, None))
    assert ended.statuses == [1, 1], ended.text
    assert "the weights after step 6 are not finite" in ended.errors(0)[0]
    assert "Traceback" not in ended.text
    assert not (run.folder / "model.safetensors").exists()
    path, damaged = newest_checkpoint(run.folder)
    assert path is not None
    assert (step_of(path), damaged) == (SAVE_STEPS, {})
    again = start(2, run)
    assert again.statuses == [0, 0], again.text
    assert rank_runs.difference(run.folder, exact) < TOLERANCE


def test_a_final_model_that_is_not_finite(tmp_path: Path) -> None:
    """Without checkpoints, too: nobody is given such a model as the outcome of a run that went well."""
    run = exact_run(tmp_path / "run", save_steps=0)
    ended = start(2, run, Fault(break_a_weight, "end", STEPS, None))
    assert ended.statuses == [1, 1], ended.text
    assert "are not finite" in ended.text
    assert "Traceback" not in ended.text
    assert not (run.folder / "model.safetensors").exists()


def run_away(trainer: Trainer, batch: dict[str, Any]) -> None:
    with torch.no_grad():
        trainer.model.logit_scale.fill_(1e3)


def test_a_temperature_that_runs_away(tmp_path: Path) -> None:
    """It is bounded before the average of the weights, which is what is saved, follows it."""
    run = exact_run(tmp_path / "run")
    ended = start(2, run, Fault(run_away, "optimizer", STRUCK, None))
    assert ended.statuses == [0, 0], ended.text
    assert not (run.folder / NONFINITE_FILE).exists()
    weights = rank_runs.weights_of(run.folder)
    assert all(value.isfinite().all() for value in weights.values())
    assert float(weights["logit_scale"]) <= math.log(100) + 1e-6


# -- memory -------------------------------------------------------------------------------------------------------------

FULL = Raise(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"))
SHORTAGES = {
    "in a forward pass": [Fault(FULL, "tower", STRUCK, 1)],
    "in a backward pass": [Fault(FULL, "backward", STRUCK, 0)],
    "in the first step of both": [Fault(FULL, "tower", 1, None)],
    "on both, one after the other": [Fault(FULL, "tower", 3, 0), Fault(FULL, "backward", 7, 1)],
    "on both, one again": [Fault(FULL, "tower", STRUCK, 0), Fault(FULL, "backward", STRUCK, 1)],
    "after a resume": [Fault(FULL, "backward", 8, 1), Fault(rank_runs.kill, "backward", 9, 0)],
}
QUICK = ["on both, one again"]


@pytest.mark.parametrize("where", [*QUICK, *(slow(name) for name in SHORTAGES if name not in QUICK)])
def test_a_step_that_runs_out_of_memory(exact: Path, tmp_path: Path, where: str) -> None:
    """It is taken again in smaller parts, and what is learnt is the same."""
    run = exact_run(tmp_path / "run", micro_batch_size="auto")  # three pairs, of which less fit
    ended = start(2, run, *SHORTAGES[where])
    if "resume" in where:
        assert sorted(ended.statuses, key=str) == [-9, 1], ended.text
        ended = start(2, run)
    else:
        assert "ran out of memory" in ended.text
    assert ended.statuses == [0, 0], ended.text
    assert rank_runs.rows_of(run.folder) == rank_runs.rows_of(exact)
    assert rank_runs.difference(run.folder, exact) < TOLERANCE


@pytest.mark.parametrize(
    ("parts", "place", "told"),
    [
        ("1", "tower", "with a single pair"),
        slow(None, "tower", "--micro_batch_size auto"),
        slow("1", "backward", "with a single pair"),
        slow(None, "backward", "--micro_batch_size auto"),
        slow(None, "optimizer", "CUDA out of memory"),
    ],
)
def test_memory_that_runs_out_for_good(tmp_path: Path, parts: str | None, place: str, told: str) -> None:
    run = exact_run(tmp_path / "run", micro_batch_size=parts)
    ended = start(2, run, Fault(FULL, place, STRUCK, 1, times=99))
    assert ended.statuses == [1, 1], ended.text
    assert told in ended.texts[1]
    assert "Traceback" not in ended.text
    assert "process 1 failed" in ended.errors(0)[0]


# -- batches that have little to say --------------------------------------------------------------------------------------


def same_captions(trainer: Trainer, batch: dict[str, Any]) -> None:
    mask = torch.zeros_like(batch["attention_mask"])
    mask[:, :4] = 1
    batch["input_ids"].copy_(torch.arange(5, 5 + mask.shape[1]) * mask)
    batch["attention_mask"].copy_(mask)
    batch["ids"][:, 1] = 3
    batch["lengths"] = [4] * len(mask)


def same_images(trainer: Trainer, batch: dict[str, Any]) -> None:
    batch["pixel_values"].copy_(torch.ones_like(batch["pixel_values"]))
    batch["ids"][:, 0] = 3


def same_pairs(trainer: Trainer, batch: dict[str, Any]) -> None:
    same_captions(trainer, batch)
    same_images(trainer, batch)


def no_rows(trainer: Trainer, batch: dict[str, Any]) -> None:
    """What is left of a batch of which no row, nor any in its place, can be read."""
    batch["skipped"] = [f"{row}: cannot be read" for row in batch["image_ids"]]
    batch["skipped_ids"] = batch["image_ids"]
    for name in ("pixel_values", "input_ids", "attention_mask", "ids", "rows", "lengths", "image_ids"):
        batch[name] = batch[name][:0]


ODD: dict[str, Action] = {
    "equal captions": same_captions,
    "equal images": same_images,
    "equal pairs": same_pairs,
    "no rows": no_rows,
}


@pytest.mark.parametrize(
    ("what", "rank", "parts"),
    [("equal captions", None, None), ("no rows", None, None), ("no rows", 1, None), slow("equal images", None, None),
     slow("equal pairs", None, None), slow("no rows", None, "1"), slow("no rows", 0, "2"), slow("equal pairs", None, "1"),
     slow("equal captions", 1, None)],
)  # fmt: skip
def test_a_batch_that_has_little_to_say(tmp_path: Path, what: str, rank: int | None, parts: str | None) -> None:
    """Nothing becomes NaN, and all processes end with the same weights as one would."""
    run = exact_run(tmp_path / "run", micro_batch_size=parts, max_corrupt_share=1.0)
    ended = start(2, run, Fault(ODD[what], "taken", STRUCK, rank))
    assert ended.statuses == [0, 0], ended.text
    assert all(value.isfinite().all() for value in rank_runs.weights_of(run.folder).values())
    if rank is None:
        alone = exact_run(tmp_path / "alone", max_corrupt_share=1.0)
        assert start(1, alone, Fault(ODD[what], "taken", STRUCK, None)).statuses == [0]
        assert rank_runs.difference(run.folder, alone.folder) < TOLERANCE


def test_a_batch_without_rows_changes_nothing(without_a_step: Path, tmp_path: Path) -> None:
    run = exact_run(tmp_path / "run", max_corrupt_share=1.0)
    assert start(2, run, Fault(no_rows, "taken", STRUCK, None)).statuses == [0, 0]
    assert rank_runs.difference(run.folder, without_a_step) < TOLERANCE


@pytest.mark.parametrize(("world", "size"), [(2, 2), slow(3, 3)])
def test_tiny_batches(tmp_path: Path, world: int, size: int) -> None:
    """One pair per process."""
    run = exact_run(tmp_path / "run", global_batch_size=size)
    ended = start(world, run)
    assert ended.statuses == [0] * world, ended.text
    assert all(value.isfinite().all() for value in rank_runs.weights_of(run.folder).values())
    assert not (run.folder / NONFINITE_FILE).exists()
