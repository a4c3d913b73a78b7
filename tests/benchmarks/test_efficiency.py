"""Time until a recall, read off a log; the table; and a whole command with a stand-in for the training script."""

import json

import pytest

from benchmarks import efficiency
from benchmarks.ablations.runs import Run
from benchmarks.efficiency import read_run, report, time_to
from mm_utils.data.batches.order import BatchSizes
from tests.benchmarks.grids import write_grid

SIZES = BatchSizes((0, 10), (32, 64))
LOG = [
    {"step": 10, "loss": 1.0, "pairs_per_second": 32.0},  # 320 pairs, 10 s
    {"step": 10, "eval_mean_recall": 0.2},
    {"step": 20, "loss": 1.0, "pairs_per_second": 16.0},  # 640 pairs, 40 s
    {"step": 20, "eval_mean_recall": 0.4},
]


def test_time_is_read_off_the_log():
    assert time_to(0.4, LOG, SIZES, before=0) == {"seconds": 50, "pairs": 960}
    assert time_to(0.3, LOG, SIZES, before=5) == {"seconds": pytest.approx(35), "pairs": pytest.approx(640)}
    assert time_to(0.1, LOG, SIZES, before=0) == {"seconds": pytest.approx(5), "pairs": pytest.approx(160)}
    assert time_to(0.5, LOG, SIZES, before=0) is None


def test_a_start_that_is_good_enough_takes_its_own_time():
    assert time_to(0.2, [{"step": 0, "eval_mean_recall": 0.3}, *LOG], SIZES, before=7) == {"seconds": 7, "pairs": 0}


def test_steps_in_no_row_are_an_error():
    with pytest.raises(ValueError, match="step 15 is evaluated and not logged"):
        time_to(0.9, [LOG[0], {"step": 15, "eval_mean_recall": 0.3}], SIZES, before=0)


def test_the_closed_form_counts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LOG))
    said = (
        "Projections start from the closed form of 1,261 images (shrinkage 3, weight of class names 1, 31 s): recall@1"
    )
    (tmp_path / "log.txt").write_text(f"12:00 INFO {said} of pairs\n")
    found = read_run(Run("a", 0, {"batch_size_schedule": "0:32,10:64"}, tmp_path), 0.4)
    assert (found["seconds"], found["pairs"], found["best"], found["start_seconds"]) == (81, 960, 0.4, 31)


def test_the_table():
    found = [
        {"variant": name, "seed": seed, "target": 0.4, "best": 0.5, "seconds": seconds, "pairs": 1000.0}
        for name, times in (("base", (10.0, 20.0)), ("fast", (5.0, 10.0)))
        for seed, seconds in enumerate(times)
    ]
    found.append({"variant": "never", "seed": 0, "target": 0.4, "best": 0.1})
    text = report(found, ["base", "fast", "never"])
    assert "| fast | 2 of 2 | 7.5 ± 31.8 | 1,000 ± 0 | 0.50 ± 0.00 | 0.500 ± 0.000 |" in text
    assert "| never | 0 of 1 |" in text


@pytest.mark.slow
def test_a_real_race(tmp_path, tiny_flags):
    words = dict(zip((flag[2:] for flag in tiny_flags[::2]), tiny_flags[1::2], strict=True)) | {"save_steps": "0"}
    del words["max_steps"]
    common = "common: {max_steps: 4, eval_steps: 2, objectives: 'contrastive:1'}\n"
    grid = write_grid(tmp_path, common + "variants: {base: , parts: {micro_batch_size: 4}}\n")
    flags = ["--grid", grid, "--target", "0.001", "--seeds", "1", "--output_dir", str(tmp_path / "out")]
    flags += ["--flags", " ".join(f"{name}={value}" for name, value in words.items())]
    found = efficiency.main([*flags, "--output_file", str(tmp_path / "e.jsonl")])
    assert [each["variant"] for each in found] == ["base", "parts"]
    assert all(0 < each["pairs"] <= 32 and each["seconds"] > 0 for each in found)
    assert "| parts | 1 of 1 |" in (tmp_path / "e.md").read_text()
