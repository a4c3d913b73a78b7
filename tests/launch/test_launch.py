"""The launcher without Ray: its command line, what a worker does with a script, the table of a sweep."""

import csv
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from mm_utils.arguments import LAUNCH_VARIABLE
from mm_utils.launch.arguments import Command, LaunchArguments, parse_grid, read_command, split_words, trial_name
from mm_utils.launch.sweep import as_csv, ranked
from mm_utils.launch.worker import prepare
from mm_utils.run import restarts


def test_a_command_line() -> None:
    words = ["--num_workers", "2", "scripts/pretrain.py", "--config", "a.yaml", "other.py"]
    assert split_words(words) == (words[:2], "scripts/pretrain.py", words[3:])
    assert split_words(["--help"]) == (["--help"], None, [])
    assert LaunchArguments(num_workers="2:8").workers == (2, 8)
    assert parse_grid("rate=1e-4, 3e-4;--global-batch-size=64") == {
        "rate": ["1e-4", "3e-4"],
        "global_batch_size": ["64"],
    }
    assert trial_name({"rate": "1e-4", "dataset_name": "data/mine"}) == "rate-1e-4_dataset_name-data-mine"
    command = Command("/s/pretrain.py", ("--output-dir=top", "--output_dir", "one", "--output", "two"), "/s", "")
    assert command.value_of("output_dir") == "one"


@pytest.mark.parametrize(
    ("folder", "script", "argv", "tune", "named"),
    [
        (".", None, [], None, "the script is None"),
        (".", "train.py", ["--seed", "1"], "seed=1,2", "--tune needs --output_dir"),
        ("working_dir_files/pkg", "train.py", ["--output_dir", "mine"], None, "--output_dir is mine"),
        ("working_dir_files/pkg", "embed.py", ["--index_dir=a"], None, "--index_dir is a"),
    ],
)
def test_a_command_that_would_lose_its_run_is_refused(
    folder: str, script: str, argv: list[str], tune: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path / folder)
    for name in ("train.py", "embed.py"):
        Path(name).touch()
    with pytest.raises(ValueError, match=named):
        read_command(LaunchArguments(tune=tune), script, argv)


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process as it was before `prepare`."""
    folder, argv = Path.cwd(), sys.argv
    for name in (restarts.LAUNCHER_VARIABLE, LAUNCH_VARIABLE, "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "")
    yield
    os.chdir(folder)
    sys.argv = argv


def task(folder: Path, launch: str) -> dict[str, Any]:
    named = {"launch": launch, "launcher": "python scripts/launch_ray.py --num_workers 2"}
    return {
        "script": str(folder / "train.py"),
        "argv": ["--seed", "1"],
        "folder": str(folder),
        "on_cpu": True,
        **named,
    }


@pytest.mark.usefixtures("restored")
def test_a_worker_is_where_the_command_was_given_and_restarts_of_a_launch_are_one_run(tmp_path: Path) -> None:
    prepare(task(tmp_path, "ray:first"))
    assert (Path.cwd(), sys.argv) == (tmp_path, ["train.py", "--seed", "1"])
    assert os.environ["ACCELERATE_USE_CPU"] == "true"
    launch = restarts.launcher_names()
    assert launch == ["ray:first"]
    assert restarts.resume_name(None, tmp_path, launch) is None
    restarts.record_start(tmp_path, {}, launch)
    assert json.loads((tmp_path / "environment.json").read_text())[0]["launch"] == ["ray:first"]
    assert restarts.resume_name(None, tmp_path, launch) == "latest"
    prepare(task(tmp_path, "ray:second"))
    assert restarts.resume_name(None, tmp_path, restarts.launcher_names()) is None
    with pytest.raises(ValueError, match=r"gone; a machine of Ray cannot enter it: No such file"):
        prepare(task(tmp_path / "gone", "ray:third"))


NAN = float("nan")


@pytest.mark.parametrize(
    ("metric", "more", "name", "order"),
    [
        ("mean_recall", {}, "eval_mean_recall", ["3", "1", "=2"]),
        ("loss", {}, "eval_loss", ["1", "3", "=2"]),
        ("mean_recall", {"eval_rerank_mean_recall": (0.7, 0.6)}, "eval_rerank_mean_recall", ["1", "3", "=2"]),
        ("mean_recall", {"eval_rerank_mean_recall": (0.7, NAN)}, "eval_mean_recall", ["3", "1", "=2"]),
    ],
)
def test_the_table_of_a_sweep_has_the_best_first(
    metric: str, more: dict[str, tuple[float, float]], name: str, order: list[str], tmp_path: Path
) -> None:
    trials: list[dict[str, Any]] = [
        {"seed": "1", "eval_mean_recall": 0.25, "eval_loss": 2.0, "folder": tmp_path, "problem": ""},
        {"seed": "=2", "folder": tmp_path, "problem": "RunError: no such file"},
        {"seed": "3", "eval_mean_recall": 0.5, "eval_loss": 3.0, "folder": tmp_path, "problem": ""},
    ]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"metric_for_best_model": metric}))
    for figure, values in more.items():
        trials[0][figure], trials[2][figure] = values
    table, chosen = ranked(pd.DataFrame(trials))
    assert (chosen, list(table["seed"])) == (name, order)
    rows = list(csv.DictReader(as_csv(table).splitlines()))
    assert rows[2]["seed"] == "'=2"  # no formula in a spreadsheet
    assert (rows[2]["eval_loss"], rows[2]["problem"]) == ("", "RunError: no such file")


def test_trials_that_all_failed_have_a_table() -> None:
    table, _ = ranked(pd.DataFrame([{"seed": "1", "folder": Path("none"), "problem": "RunError: no such file"}]))
    assert table[["folder", "eval_mean_recall", "problem"]].shape == (1, 3)
