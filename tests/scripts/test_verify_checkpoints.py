"""The script that reads a run's checkpoints and its model, and says which are whole."""

import logging
from pathlib import Path

import pytest

from mm_utils.checkpointing.files import seal_model
from mm_utils.distributed import RunError
from scripts import verify_checkpoints
from tests.kit.checkpoints import flip, saved


@pytest.mark.parametrize("damaged", ["checkpoint-10", "model"])
def test_damage_is_told_by_place_and_file(damaged: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 9, 10)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    seal_model(tmp_path)
    flags = ["--output_dir", str(tmp_path)]
    with caplog.at_level(logging.INFO, "scripts.verify_checkpoints"):
        assert verify_checkpoints.main(flags) == {"checkpoints": 2}
        flip(tmp_path / damaged.removeprefix("model") / "model.safetensors")
        with pytest.raises(RunError, match=rf"Damaged in .*: {damaged}\. Restore"):
            verify_checkpoints.main(flags)
    [last] = [line for line in caplog.text.splitlines() if "SHA-256 differs" in line]
    assert last.startswith(f"{damaged} ")
    assert "model.safetensors" in last


def test_a_folder_without_checkpoints_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it holds no checkpoint-N folder"):
        verify_checkpoints.main(["--output_dir", str(tmp_path)])
