"""Figures that are not finite, memory that runs out, and batches that have little to say, on one rank of two or on all."""

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_utils.checkpointing.files import find_checkpoint
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


def spoil(value: float) -> Action:
    """Images of one value, as a broken decoder may give them."""
    return partial(_fill, value)


def _fill(value: float, trainer: Trainer, batch: dict[str, Any]) -> None:
    batch["pixel_values"].fill_(value)


def overflow(trainer: Trainer, batch: dict[str, Any]) -> None:
    """The gradient of this step, though not its loss, is infinite."""
    left = [math.inf]  # a hook that was removed while it runs would not be called for others
    trainer.model.text_projection.weight.register_hook(lambda gradient: gradient + (left.pop() if left else 0.0))


POISONS: dict[str, Action] = {
    "NaN pixels": spoil(math.nan),
    "infinite pixels": spoil(math.inf),
    "an infinite gradient": overflow,
}


@pytest.mark.parametrize(
    ("what", "rank", "parts"),
    [("NaN pixels", 1, None), ("an infinite gradient", 0, None), slow("infinite pixels", 1, None),
     slow("infinite pixels", 0, "2"), slow("an infinite gradient", 1, "1"), slow("NaN pixels", None, "2")],
)  # fmt: skip
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


def break_a_weight(trainer: Trainer, batch: dict[str, Any]) -> None:
    with torch.no_grad():
        trainer.model.text_projection.weight[0, 0] = math.nan


ENDS = {
    "too many steps": (
        [Fault(POISONS["NaN pixels"], "taken", step, 1) for step in range(4, 16)],
        {"max_steps": 16},
        "10 steps had a loss or a gradient that is not finite",
    ),
    "a checkpoint": ([Fault(break_a_weight, "end", 6, None)], {}, "the weights after step 6 are not finite"),
    "the final model": (
        [Fault(break_a_weight, "optimizer", STEPS, None)],
        {"save_steps": 0},
        "the weights after the last step are not finite",
    ),
}


@pytest.mark.parametrize("what", ENDS)
def test_what_is_not_finite_ends_the_run_and_is_not_saved(exact: Path, tmp_path: Path, what: str) -> None:
    faults, arguments, message = ENDS[what]
    run = exact_run(tmp_path / "run", **arguments)
    ended = start(2, run, *faults)
    assert ended.statuses == [1, 1], ended.text
    assert message in ended.errors(0)[0]
    assert "Traceback" not in ended.text
    assert not (run.folder / "model.safetensors").exists()
    if what == "a checkpoint":
        assert find_checkpoint("latest", run.folder) == run.folder / f"checkpoint-{SAVE_STEPS}"
        again = start(2, run)
        assert again.statuses == [0, 0], again.text
        assert rank_runs.difference(run.folder, exact) < TOLERANCE


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
    "on both, one again": [Fault(FULL, "tower", STRUCK, 0), Fault(FULL, "backward", STRUCK, 1)],
    "in the first step of both": [Fault(FULL, "tower", 1, None)],
    "after a resume": [Fault(FULL, "backward", 8, 1), Fault(rank_runs.kill, "backward", 9, 0)],
}


@pytest.mark.parametrize("where", ["on both, one again", slow("in the first step of both"), slow("after a resume")])
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
    [("1", "tower", "with a single pair"), slow(None, "backward", "--micro_batch_size auto"),
     slow(None, "optimizer", "CUDA out of memory")],
)  # fmt: skip
def test_memory_that_runs_out_for_good(tmp_path: Path, parts: str | None, place: str, told: str) -> None:
    run = exact_run(tmp_path / "run", micro_batch_size=parts)
    ended = start(2, run, Fault(FULL, place, STRUCK, 1, times=99))
    assert ended.statuses == [1, 1], ended.text
    assert told in ended.texts[1]
    assert "Traceback" not in ended.text


# -- batches that have little to say --------------------------------------------------------------------------------------


def same_pairs(trainer: Trainer, batch: dict[str, Any]) -> None:
    mask = torch.zeros_like(batch["attention_mask"])
    mask[:, :4] = 1
    batch["input_ids"].copy_(torch.arange(5, 5 + mask.shape[1]) * mask)
    batch["attention_mask"].copy_(mask)
    batch["pixel_values"].copy_(torch.ones_like(batch["pixel_values"]))
    batch["ids"].fill_(3)
    batch["lengths"] = [4] * len(mask)


def no_rows(trainer: Trainer, batch: dict[str, Any]) -> None:
    """What is left of a batch of which no row, nor any in its place, can be read."""
    batch["skipped"] = [f"{row}: cannot be read" for row in batch["image_ids"]]
    batch["skipped_ids"] = batch["image_ids"]
    for name in ("pixel_values", "input_ids", "attention_mask", "ids", "rows", "lengths", "image_ids"):
        batch[name] = batch[name][:0]


@pytest.mark.parametrize(
    ("fault", "rank", "parts"),
    [(same_pairs, None, None), (no_rows, None, None), (no_rows, 1, None), slow(no_rows, 0, "2"),
     slow(same_pairs, None, "1"), slow(same_pairs, 1, None)],
)  # fmt: skip
def test_a_batch_that_has_little_to_say(
    without_a_step: Path, tmp_path: Path, fault: Action, rank: int | None, parts: str | None
) -> None:
    """Nothing becomes NaN, and all processes end with the same weights as one would; without a row, nothing changes."""
    run = exact_run(tmp_path / "run", micro_batch_size=parts, max_corrupt_share=1.0)
    ended = start(2, run, Fault(fault, "taken", STRUCK, rank))
    assert ended.statuses == [0, 0], ended.text
    assert all(value.isfinite().all() for value in rank_runs.weights_of(run.folder).values())
    if rank is None:
        alone = exact_run(tmp_path / "alone", max_corrupt_share=1.0)
        assert start(1, alone, Fault(fault, "taken", STRUCK, None)).statuses == [0]
        assert rank_runs.difference(run.folder, alone.folder) < TOLERANCE
        assert fault is same_pairs or rank_runs.difference(run.folder, without_a_step) < TOLERANCE


def test_one_pair_per_process(tmp_path: Path) -> None:
    run = exact_run(tmp_path / "run", global_batch_size=2)
    ended = start(2, run)
    assert ended.statuses == [0, 0], ended.text
    assert all(value.isfinite().all() for value in rank_runs.weights_of(run.folder).values())
    assert not (run.folder / NONFINITE_FILE).exists()
