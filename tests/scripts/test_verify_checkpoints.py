"""The script that reads a run's checkpoints and says which are whole."""

import logging
from pathlib import Path

import pytest

from scripts import verify_checkpoints
from tests.test_checkpoints import flip, saved


def test_damage_is_told_by_checkpoint_and_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 9, 10)
    flags = ["--output_dir", str(tmp_path)]
    with caplog.at_level(logging.INFO, "scripts.verify_checkpoints"):
        assert verify_checkpoints.main(flags) == {"checkpoints": 2, "whole": 2}
        flip(tmp_path / "checkpoint-10/model.safetensors")
        assert verify_checkpoints.main(flags) == {"checkpoints": 2, "whole": 1}
    [last] = [line for line in caplog.text.splitlines() if "SHA-256 differs" in line]
    assert last.startswith("checkpoint-10 ")
    assert "model.safetensors" in last


@pytest.mark.parametrize(("damaged", "status"), [(False, 0), (True, 1)])
def test_the_exit_status_tells_a_nightly_job(
    damaged: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, 1)
    if damaged:
        flip(path / "model.safetensors")
    monkeypatch.setattr("sys.argv", ["verify_checkpoints.py", "--output_dir", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        verify_checkpoints.run()
    assert ended.value.code == status


def test_a_folder_without_checkpoints_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it holds no checkpoint-N folder"):
        verify_checkpoints.main(["--output_dir", str(tmp_path)])
