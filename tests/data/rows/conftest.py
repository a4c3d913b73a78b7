"""An own cache for all tests of sources, and three files named like images."""

from pathlib import Path

import pytest

from tests.kit.reading import NAMES


@pytest.fixture(autouse=True)
def offline_and_own_cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`a.jpg`, `b.jpg` and `c.jpg`, which are never decoded here."""
    for name in NAMES:
        (tmp_path / name).write_bytes(f"bytes of {name}".encode())
    return tmp_path
