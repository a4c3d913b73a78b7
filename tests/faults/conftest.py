"""Uninterrupted runs to compare with."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run, on one process, of what does not depend on their number."""
    from tests.faults.rank_runs import start
    from tests.kit.tiny_run import exact_run

    folder = tmp_path_factory.mktemp("exact") / "run"
    assert start(1, exact_run(folder)).statuses == [0]
    return folder


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with dropout that nothing befell, with its checkpoints of steps 9 and 10."""
    from tests.kit.tiny_run import TinyRun, alone, train

    folder = tmp_path_factory.mktemp("straight") / "run"
    assert alone(train, TinyRun(folder))[0] == 0
    return folder
