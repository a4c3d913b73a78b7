"""A step of many made-up ranks is that of one process."""

import pytest

from benchmarks.processes import exchange


def test_many_ranks_compute_what_one_process_does(capsys: pytest.CaptureFixture[str]) -> None:
    found = exchange.main(["--ranks", "24", "--pairs", "200", "--width", "16"])
    assert max(found[name] for name in ("loss", "images", "texts", "scale")) < 2e-6
    assert "24 ranks of 7 to 10 pairs" in capsys.readouterr().out
    assert found["bytes"] == 4 * 35 * 10
