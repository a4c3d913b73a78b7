"""Data workers find room in the table of open files, or the run says so at its start."""

import resource

import pytest

from mm_utils.data.batches.loaders import check_open_files


def test_few_open_files(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    check_open_files(0)
    assert not caplog.text
    check_open_files(2)
    assert "ulimit -n is 256; data workers" in caplog.text
    caplog.clear()
    check_open_files(0, streaming=True)
    assert "ulimit -n is 256" in caplog.text
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    check_open_files(0)
    with pytest.raises(ValueError, match=r"^ulimit -n is 40; data workers .* or pass --dataloader_num_workers 0"):
        check_open_files(2)
