"""Grids, runs that are real processes of a stand-in for the training script, and how often a finished one is repeated."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.ablations.runs import Run, execute, execute_all, plan, read_grid
from tests.benchmarks.grids import started, write_grid


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("common: {max_steps: 2}", "has 'common' and 'variants' and nothing else"),
        ("common: {max_steps: 2}\nvariants: [a]", "has 'common' and 'variants' and nothing else"),
        ("common: {max_steps: 2}\nvariants: {a: 3}", "each variant hold flags"),
        ("common: {max_steps: 2}\nvariants: {}", "each variant hold flags"),
        ("common: {seed: 2, max_steps: 1}\nvariants: {a: }", "sets seed for common; it is set for each run"),
        (
            "common: {max_steps: 1}\nvariants: {a: {max_steps: 3}}",
            "sets max_steps for a; all variants have one budget",
        ),
        ("common: {}\nvariants: {a: }", "names no budget. Put max_steps or num_train_epochs"),
        ("common: {max_steps: 1}\nvariants: {../a: }", "has a variant '../a'; it names folders"),
        ("common: [", "is not valid YAML"),
    ],
)
def test_what_is_no_grid(text, message, tmp_path):
    with pytest.raises(ValueError, match=r"grid\.yaml") as raised:
        read_grid(write_grid(tmp_path, text))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_seeds_are_outermost_and_a_variant_wins_over_what_is_common():
    common, variants = {"num_train_epochs": 1, "rate": 1}, {"a": {}, "b": {"rate": 2}}
    runs = plan(common, variants, 2, "out")
    assert [run.folder.name for run in runs] == ["a-seed0", "b-seed0", "a-seed1", "b-seed1"]
    assert [run.flags["rate"] for run in runs] == [1, 2, 1, 2]
    assert plan(common, variants, 1, "out", budget={"max_steps": 5})[0].flags == {"rate": 1, "max_steps": 5}


def test_a_command_says_each_flag_as_one_word(tmp_path):
    flags = {"taps": "-1,-2", "hierarchy": False, "dropped": None, "rate": 1e-4}
    python, script, *words = Run("a", 7, flags, tmp_path).command("python")
    assert python == sys.executable
    assert Path(script).is_file()
    flags = ["taps=-1,-2", "hierarchy=false", "rate=0.0001", "seed=7", f"output_dir={tmp_path}"]
    assert words == [*(f"--set={flag}" for flag in flags), "--overwrite_output_dir"]
    assert Run("a", 7, {}, tmp_path).command("accelerate launch --cpu")[:3] == ["accelerate", "launch", "--cpu"]


def test_a_run_leaves_its_record(tmp_path, launcher):
    run = Run("a", 3, {"recall": 0.25}, tmp_path / "a-seed3")
    assert run.record() is None
    assert execute(run, launcher) is None
    record = json.loads((run.folder / "record.json").read_text())
    assert record.pop("seconds") > 0
    figures = {"step": 2, "matching_lift": 0.2, "recall@1": 0.28}
    assert record == {"variant": "a", "seed": 3, "flags": {"recall": 0.25}, "figures": figures, "parameters": 11}


def test_a_failed_run_stops_no_other_and_is_repeated_alone(tmp_path, launcher, capsys):
    runs = plan({"max_steps": 1}, {"a": {}, "b": {"fails": "yes"}, "c": {}}, 1, str(tmp_path))
    records, failed = execute_all(runs, launcher)
    assert [record["variant"] for record in records] == ["a", "c"]
    assert list(failed) == [str(tmp_path / "b-seed0")]
    [why] = failed.values()
    assert "no memory\nexit status 3" in why
    assert why in capsys.readouterr().err
    execute_all(runs, launcher)
    assert started(tmp_path) == ["a-seed0", "b-seed0", "c-seed0", "b-seed0"]


def test_a_run_with_other_flags_is_neither_taken_nor_lost(tmp_path, launcher):
    execute_all(plan({"max_steps": 1}, {"a": {"recall": 0.1}}, 1, str(tmp_path)), launcher)
    before = (tmp_path / "a-seed0/record.json").read_text()
    with pytest.raises(
        ValueError, match="a-seed0 holds a run with other flags, of max_steps, recall; it is not a part"
    ):
        execute_all(plan({"max_steps": 2}, {"a": {"recall": 0.2}}, 1, str(tmp_path)), launcher)
    assert (tmp_path / "a-seed0/record.json").read_text() == before
