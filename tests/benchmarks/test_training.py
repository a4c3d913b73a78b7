"""The benchmark's plan, its arithmetic, and one short run of it. It never judges a time."""

import json
from statistics import median

import pytest

from benchmarks import training
from benchmarks.training import report, summarise
from mm_utils import distributed

ABOUT = {"gflop_per_pair": 40.0}


def turn(seconds: float, pairs: int = 100) -> dict:
    counts = {"tokens_computed": 3 * pairs, "tokens_real": 2 * pairs}
    return {"seconds": seconds, "pairs": pairs, "start_bytes": 2**30, "peak_bytes": 3 * 2**30, **counts}


def test_figures_are_medians():
    figures = summarise(ABOUT, [turn(1.0), turn(2.0), turn(10.0)], peak_tflops=10.0)
    assert figures["pairs_per_second"] == 50
    assert (figures["slowest"], figures["fastest"]) == (10, 100)
    assert (figures["start_gib"], figures["peak_gib"]) == (1, 3)
    assert figures["tokens"] == 1.5
    assert figures["utilisation"] == pytest.approx(50 * 40 / 10_000)
    assert summarise(ABOUT, [turn(1.0)], None)["utilisation"] is None


def test_report_names_targets_and_who_is_out():
    common = {"batch_size": 8, "caption_tokens": "real", "about": ABOUT}
    results = [
        {"contestant": "tandem", **common, **summarise(ABOUT, [turn(1.0)], None), "ratio": 1.0},
        {"contestant": "tandem_cached_2", **common, **summarise(ABOUT, [turn(1.25)], None), "ratio": 0.8},
        {"contestant": "open_clip", **common, "error": "OutOfMemoryError: too much", "ratio": None},
    ]
    text = report(results)
    assert "| tandem_cached_2 | 8 | real | 80 |" in text
    assert "utilisation" not in text
    assert "- tandem_cached_2, 8 pairs: 1.25 x the time of tandem; target 1.1" in text
    assert "- open_clip, 8 pairs: did not finish: OutOfMemoryError: too much" in text


@pytest.mark.slow
def test_a_short_run(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(
        "LOCAL_WORLD_SIZE", str(distributed.available_cores())
    )  # one thread; more only wait for each other
    file = tmp_path / "speed.json"
    results = training.main(
        [
            *("--train_file", str(corpus), "--image_size", "32", "--dataloader_num_workers", "0"),
            *("--contestants", "tandem,transformers", "--batch_sizes", "8", "--caption_lengths", "8"),
            *("--rounds", "1", "--steps_per_round", "2", "--uncounted_steps", "0", "--output_file", str(file)),
        ]
    )
    assert [result["contestant"] for result in results] == ["tandem", "transformers"]
    rates = [median(turn["pairs"] / turn["seconds"] for turn in result["turns"]) for result in results]
    for result, rate in zip(results, rates, strict=True):
        assert "error" not in result
        assert [turn["pairs"] for turn in result["turns"]] == [16]
        assert result["pairs_per_second"] == rate
        assert result["ratio"] == pytest.approx(rate / rates[0])
        assert 0.1 < result["start_gib"] <= result["peak_gib"]
    assert [result["tokens"] for result in results] == [1, 16]
    assert json.loads(file.read_text()) == results
    table = file.with_suffix(".md").read_text()
    assert table in capsys.readouterr().out
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert "torch: " in table
