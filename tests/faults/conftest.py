"""An uninterrupted run to compare with."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with dropout that nothing befell, with its checkpoints of steps 9 and 10."""
    from tests.kit.tiny_run import TinyRun, alone, train

    folder = tmp_path_factory.mktemp("straight") / "run"
    assert alone(train, TinyRun(folder))[0] == 0
    return folder
