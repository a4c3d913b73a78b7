"""The loop: what is due when, with the trainer itself on a tiny model."""

import signal
from pathlib import Path

from mm_utils.checkpointing.files import checkpoint_folders, step_of
from tests.kit.launches import logged
from tests.kit.tiny_run import Signalled, TinyRun, alone, build, exiting, train


def test_without_saving_there_is_no_checkpoint_but_for_a_signal(tmp_path: Path) -> None:
    never = {"save_steps": 0}
    assert alone(train, TinyRun(tmp_path / "quiet", arguments=never))[0] == 0
    assert not checkpoint_folders(tmp_path / "quiet")
    run = TinyRun(tmp_path / "asked", strike=Signalled("forward", 5, signal.SIGTERM), arguments=never)
    assert alone(exiting, run)[0] == 143
    assert [step_of(path) for path in checkpoint_folders(tmp_path / "asked")] == [5]


def test_an_evaluation_that_a_signal_prevented_is_made_up_for(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True}
    assert alone(train, TinyRun(tmp_path / "straight", arguments=best))[0] == 0
    strike = Signalled("forward", 4, signal.SIGTERM)  # after whose step an evaluation is due
    assert alone(exiting, TinyRun(tmp_path / "run", strike=strike, arguments=best))[0] == 143
    assert logged(tmp_path / "run", "eval_score") == {}
    assert alone(train, TinyRun(tmp_path / "run", arguments=best))[0] == 0
    assert logged(tmp_path / "run", "eval_score") == logged(tmp_path / "straight", "eval_score")
    assert list(logged(tmp_path / "run", "eval_score")) == [4, 8, 10]


def test_a_short_run_has_a_curve(tmp_path: Path) -> None:
    for steps, every in ((1, 1), (6, 1), (15, 2), (25, 3), (100, 10), (1000, 10)):
        run = TinyRun(tmp_path, arguments={"max_steps": steps, "logging_steps": -1})
        assert build(run, []).args.logging_steps == every
