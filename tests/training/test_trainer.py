"""The loop: what is due when, with the trainer itself on a tiny model."""

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mm_utils.checkpointing.files import checkpoint_folders, step_of
from mm_utils.training import trainer
from tests.kit.launches import logged
from tests.kit.tiny_run import Signalled, TinyRun, alone, build, exiting, train


@dataclass
class Hurrying:
    """A clock that is 70 s ahead from some steps on."""

    steps: tuple[int, ...]
    ahead: float = 0.0

    def __call__(self, place: str, step: int) -> None:
        if place == "batch" and step in self.steps:
            self.ahead += 70
            clock: Any = SimpleNamespace(monotonic=lambda: time.monotonic() + self.ahead)
            trainer.time = clock


def test_checkpoints_are_saved_by_the_clock_and_at_the_end(tmp_path: Path) -> None:
    arguments = {"save_steps": 0, "save_minutes": 1.0, "save_total_limit": None, "load_best_model_at_end": False}
    status, _ = alone(train, TinyRun(tmp_path, strike=Hurrying((3, 7)), arguments=arguments))
    assert status == 0
    assert [step_of(path) for path in checkpoint_folders(tmp_path)] == [3, 7, 10]


def test_without_saving_there_is_no_checkpoint_but_for_a_signal(tmp_path: Path) -> None:
    never = {"save_steps": 0}
    assert alone(train, TinyRun(tmp_path / "quiet", arguments=never))[0] == 0
    assert not checkpoint_folders(tmp_path / "quiet")
    run = TinyRun(tmp_path / "asked", strike=Signalled("forward", 5, signal.SIGTERM), arguments=never)
    assert alone(exiting, run)[0] == 143
    assert [step_of(path) for path in checkpoint_folders(tmp_path / "asked")] == [5]


def test_an_evaluation_that_a_signal_prevented_is_made_up_for(tmp_path: Path) -> None:
    best = {"save_best_limit": 1}
    assert alone(train, TinyRun(tmp_path / "straight", arguments=best))[0] == 0
    strike = Signalled("forward", 4, signal.SIGTERM)  # after whose step an evaluation is due
    assert alone(exiting, TinyRun(tmp_path / "run", strike=strike, arguments=best))[0] == 143
    assert logged(tmp_path / "run", "eval_score") == {}
    assert alone(train, TinyRun(tmp_path / "run", arguments=best))[0] == 0
    assert logged(tmp_path / "run", "eval_score") == logged(tmp_path / "straight", "eval_score")
    assert list(logged(tmp_path / "run", "eval_score")) == [4, 5, 8, 10]  # also where the encoders' part ends


def test_a_short_run_has_a_curve(tmp_path: Path) -> None:
    for steps, every in ((1, 1), (6, 1), (15, 2), (25, 3), (100, 10), (1000, 10)):
        run = TinyRun(tmp_path, arguments={"max_steps": steps, "logging_steps": -1})
        assert build(run, []).args.logging_steps == every
