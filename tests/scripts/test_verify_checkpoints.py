"""The script that reads a run's checkpoints and says which are whole."""

import logging
import runpy
import sys
from pathlib import Path

import pytest

from mm_utils.distributed import RunError
from scripts import verify_checkpoints
from tests.kit.checkpoints import flip, saved
from tests.kit.tiny_run import alone


def test_damage_is_told_by_checkpoint_and_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 9, 10)
    flags = ["--output_dir", str(tmp_path)]
    with caplog.at_level(logging.INFO, "scripts.verify_checkpoints"):
        assert verify_checkpoints.main(flags) == {"checkpoints": 2}
        flip(tmp_path / "checkpoint-10/model.safetensors")
        with pytest.raises(RunError, match=r"1 of 2 checkpoints in .* are damaged"):
            verify_checkpoints.main(flags)
    [last] = [line for line in caplog.text.splitlines() if "SHA-256 differs" in line]
    assert last.startswith("checkpoint-10 ")
    assert "model.safetensors" in last


@pytest.mark.parametrize(("damaged", "status"), [(False, 0), (True, 1)])
def test_the_exit_status_names_the_result(damaged: bool, status: int, tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    if damaged:
        flip(path / "model.safetensors")
    words = [verify_checkpoints.__file__, "--output_dir", str(tmp_path)]
    assert alone(runs_as_the_main_program, words)[0] == status


def runs_as_the_main_program(words: list[str]) -> None:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def test_a_folder_without_checkpoints_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it holds no checkpoint-N folder"):
        verify_checkpoints.main(["--output_dir", str(tmp_path)])
