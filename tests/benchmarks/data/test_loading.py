"""The benchmark of loading: a short run, in this process, and its report. It never judges a time."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.data import loading
from benchmarks.data.loading import COLUMNS, summarise
from benchmarks.rivals.reader_process import Process

TINY = ["--images", "32", "--batch_size", "8", "--image_size", "32", "--num_workers", "0", "--rounds", "1"]
NO_PACKAGES = "datasets,tandem_originals,tandem_jpeg,tandem_raw,tandem_stream,memmap"


class Inside:
    """A `TurnTaker` without a process of its own."""

    def __init__(self, program: Path):
        self.process, self.error = Process(), None

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        return {} if self.error else self.process(json.loads(json.dumps(question)))

    def end(self) -> None:
        pass


@pytest.mark.slow
def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "TurnTaker", Inside)
    file = tmp_path / "loading.json"
    flags = [*TINY, "--batches_per_round", "2", "--contestants", NO_PACKAGES, "--cache_dir", str(tmp_path / "cache")]
    results = loading.main([*flags, "--output_file", str(file)])["results"]
    assert [result["contestant"] for result in results] == NO_PACKAGES.split(",")
    for result in results:
        assert "error" not in result
        assert [turn["images"] for turn in result["turns"]] == [16]
        assert all(result[name] is not None for name in COLUMNS)
        assert result["relative"] == pytest.approx(results[0]["cpu_ms"] / result["cpu_ms"])
    assert [result["kb_moved"] for result in results] == [4 * 3.072, *[3.072] * 5]
    assert json.loads(file.read_text()) == results
    table = file.with_suffix(".md").read_text()
    assert table in capsys.readouterr().out
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert lines[0] == "| " + " | ".join(COLUMNS.values()) + " |"
    assert len(lines) == 2 + len(results)
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_who_is_not_installed_or_wrong_is_said(tmp_path: Path, capsys, monkeypatch) -> None:
    class Answers(Inside):
        def ask(self, question: dict[str, Any]) -> dict[str, Any]:
            if self.error:
                return {}
            if "contestant" in question:
                self.name = question["contestant"]
                return {"missing": "streaming"} if self.name == "mosaic" else {"bytes_per_pair": 1000.0}
            if "check" in question:
                return {"fault": "mean colours are 90.0 off; not compared" if self.name == "litdata" else None}
            return {"images": 10, "moved": 5000, "seconds": 0.1, "cpu_seconds": 0.2, "first_batch": 0.5}

    monkeypatch.setattr(loading, "TurnTaker", Answers)
    flags = ["--contestants", "datasets,litdata,mosaic", "--cache_dir", str(tmp_path)]
    results = loading.main([*flags, *TINY])["results"]
    said = capsys.readouterr().out
    assert "| datasets | 100 | 20 | 1 | 1 | 0.5 | 0.5 |" in said
    assert "- litdata: mean colours are 90.0 off; not compared" in said
    assert "- mosaic: not installed: streaming" in said
    assert [result.get("cpu_ms") for result in results] == [20, None, None]


def test_figures_are_medians() -> None:
    turns = [{"images": 100, "moved": 10_000, "seconds": s, "cpu_seconds": 2 * s} for s in (0.1, 0.2, 5.0)]
    figures = summarise({"turns": turns, "bytes_per_pair": 2500.0})
    assert figures == {"images_per_second": 500, "cpu_ms": 4, "kb_stored": 2.5, "kb_moved": 0.1}


@pytest.mark.slow
def test_readers_work_in_processes_of_their_own(tmp_path: Path) -> None:
    flags = [*TINY, "--num_workers", "2", "--batches_per_round", "2", "--contestants", "tandem_jpeg,memmap"]
    results = loading.main([*flags, "--cache_dir", str(tmp_path)])["results"]
    assert all("error" not in result for result in results)
