"""Fixtures of the tests of benchmarks."""

from pathlib import Path

import pytest

from tests.benchmarks.grids import STAND_IN


@pytest.fixture
def launcher(tmp_path: Path) -> str:
    """The words that start the stand-in."""
    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    return f"python {path}"
