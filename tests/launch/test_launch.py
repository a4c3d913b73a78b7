"""Launching: the command line and workers of Ray's launcher, the table of a sweep, and the files for Kubernetes and Slurm."""

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from torch.distributed.run import get_args_parser

from mm_utils.arguments import LAUNCH_VARIABLE
from mm_utils.launch.arguments import Command, LaunchArguments, parse_grid, read_command, split_words, trial_name
from mm_utils.launch.sweep import ranked
from mm_utils.launch.worker import prepare
from mm_utils.run import restarts
from tests.kit import commands
from tests.kit.processes import ROOT, kill_family, on_loopback, wait_until


def test_a_command_line() -> None:
    words = ["--num_workers", "2", "scripts/pretrain.py", "--config", "a.yaml", "other.py"]
    assert split_words(words) == (words[:2], "scripts/pretrain.py", words[3:])
    assert split_words(["--help"]) == (["--help"], None, [])
    assert LaunchArguments(num_workers="2:8").workers == (2, 8)
    assert parse_grid("rate=1e-4, 3e-4;--global-batch-size=64") == {
        "rate": ["1e-4", "3e-4"],
        "global_batch_size": ["64"],
    }
    assert parse_grid("objectives=a:1|a:1,b:1") == {"objectives": ["a:1", "a:1,b:1"]}
    assert trial_name({"rate": "1e-4", "dataset_name": "data/mine"}) == "rate-1e-4_dataset_name-data-mine"
    command = Command("/s/pretrain.py", ("--output-dir=top", "--output_dir", "one", "--output", "two"), "/s", "", "")
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
    folder = Path.cwd()
    argv = sys.argv
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
    restarts.record_start(tmp_path, {}, launch)
    assert json.loads((tmp_path / "environment.json").read_text())[0]["launch"] == ["ray:first"]
    assert restarts.earlier_starts(tmp_path, launch)
    prepare(task(tmp_path, "ray:second"))
    assert not restarts.earlier_starts(tmp_path, restarts.launcher_names())
    with pytest.raises(ValueError, match=r"gone; a machine of Ray cannot enter it: No such file"):
        prepare(task(tmp_path / "gone", "ray:third"))


NAN = float("nan")


@pytest.mark.parametrize(
    ("metric", "more", "name", "order"),
    [
        ("mean_recall", {}, "eval_mean_recall", ["3", "1", "'=2"]),
        ("loss", {}, "eval_loss", ["1", "3", "'=2"]),
        ("mean_recall", {"eval_rerank_mean_recall": (0.7, 0.6)}, "eval_rerank_mean_recall", ["1", "3", "'=2"]),
        ("mean_recall", {"eval_rerank_mean_recall": (0.7, NAN)}, "eval_mean_recall", ["3", "1", "'=2"]),
    ],
)
def test_the_table_of_a_sweep_has_the_best_first(
    metric: str, more: dict[str, tuple[float, float]], name: str, order: list[str], tmp_path: Path
) -> None:
    trials = [
        {"seed": "1", "eval_mean_recall": 0.25, "eval_loss": 2.0, "folder": tmp_path, "problem": ""},
        {"seed": "=2", "folder": tmp_path, "problem": "RunError: no such file"},
        {"seed": "3", "eval_mean_recall": 0.5, "eval_loss": 3.0, "folder": tmp_path, "problem": ""},
    ]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"metric_for_best_model": metric}))
    for figure, values in more.items():
        trials[0][figure], trials[2][figure] = values
    table, chosen = ranked(pd.DataFrame(trials))
    assert (chosen, list(table["seed"])) == (name, order)  # no formula in a spreadsheet
    rows = list(csv.DictReader(table.to_csv(index=False).splitlines()))
    assert (rows[2]["eval_loss"], rows[2]["problem"]) == ("", "RunError: no such file")


def test_trials_that_all_failed_have_a_table() -> None:
    table, _ = ranked(pd.DataFrame([{"seed": "1", "folder": Path("none"), "problem": "RunError: no such file"}]))
    assert table[["folder", "eval_mean_recall", "problem"]].shape == (1, 3)


# -- Kubernetes --------------------------------------------------------------------------------------------------------
LAUNCHERS = ROOT / "launchers"
DOCUMENTS = [
    document for path in LAUNCHERS.glob("*.yaml") for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]
LONGEST_SAVE = 240  # seconds that torchrun waits for its processes, in all files


def found(value: Any, key: str) -> Iterator[Any]:
    """Yield what stands under a key, anywhere in a document."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from found(each, key)


def document_of(kind: str) -> dict[str, Any]:
    [match] = [document for document in DOCUMENTS if document["kind"] == kind]
    return match


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob"])
def test_torchrun_and_the_script_take_their_arguments(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [command] = found(document_of(kind), "command")
    assert command[0] == "torchrun"
    given = get_args_parser().parse_args(command[1:])
    assert given.training_script == "scripts/pretrain.py"
    commands.parse(commands.Command(kind, "scripts.pretrain", given.training_script_args), monkeypatch)
    assert given.training_script_args[-1] == "--resume_from_checkpoint=latest"
    [variables] = found(document_of(kind), "env")
    assert {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(LONGEST_SAVE)} in variables


def test_the_workers_of_ray_are_the_gpus_of_its_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = document_of("RayJob")["spec"]
    words = shlex.split(spec["entrypoint"])
    assert words[:2] == ["python", "scripts/launch_ray.py"]
    script = words.index("scripts/pretrain.py")
    flags = dict(zip(words[2:script:2], words[3:script:2], strict=True))
    [group] = spec["rayClusterSpec"]["workerGroupSpecs"]
    limits = next(found(group, "limits"))
    gpus = limits["nvidia.com/gpu"]
    assert flags["--num_workers"] == f"{gpus * group['minReplicas']}:{gpus * group['maxReplicas']}"
    assert int(flags["--cpus_per_worker"]) * gpus <= int(limits["cpu"])
    assert flags["--storage_path"].startswith("/outputs/")
    assert words[-2:] == ["--resume_from_checkpoint", "latest"]
    commands.parse(commands.Command(spec["entrypoint"], "scripts.pretrain", words[script + 1 :]), monkeypatch)


# -- Slurm, whose `srun`, `scancel` and `scontrol` are stand-ins for one job on processes here ------------------------
JOB = os.getpid()  # the job's number, of which the port is made
STAND_INS = {
    # One process per machine; the status is the highest one, as srun's.
    "srun": 'while [[ $1 = --* ]]; do shift; done\nfor _ in $(seq "$SLURM_NNODES"); do "$@" & echo $! >> "$JOB/step"; done\n'
    'status=0; for pid in $(cat "$JOB/step"); do wait "$pid" || status=$?; done; exit $status',
    "scancel": 'echo "$*" >> "$JOB/scancel"\nwhile read -r pid; do kill "-${1#--signal=}" "$pid"; done < "$JOB/step"',
    "scontrol": 'if [ "$1" = show ]; then echo localhost; echo other; else echo "$*" >> "$JOB/scontrol"; fi',
}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    """Submit the script with arguments; the stand-ins write into `tmp_path`."""
    started = []
    (tmp_path / "bin").mkdir()

    def submit(*arguments, torchrun):
        for name, text in {**STAND_INS, "torchrun": torchrun}.items():
            path = tmp_path / "bin" / name
            path.write_text(f"#!/bin/bash\n{text}\n")
            path.chmod(0o755)
        variables = on_loopback() | {"JOB": str(tmp_path), "SLURM_JOB_ID": str(JOB), "SLURM_NNODES": "2"}
        variables |= {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_GPUS_ON_NODE": "1"}
        variables["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{variables['PATH']}"
        command = ["bash", str(LAUNCHERS / "slurm.sbatch"), *arguments]
        with open(tmp_path / "log", "a") as log:
            started.append(subprocess.Popen(command, env=variables, cwd=tmp_path, stdout=log, stderr=log))
        return started[-1]

    yield submit
    for each in started:
        kill_family(each.pid)


def requeued(folder: Path) -> bool:
    path = folder / "scontrol"
    return path.exists() and path.read_text() == f"requeue {JOB}\n"


def test_one_torchrun_a_machine(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE TORCH_ELASTIC_SHUTDOWN_TIMEOUT ACCELERATE_MIXED_PRECISION"
    note = (
        f'printf "%q " "$@" > "$JOB/arguments.$$"; for each in {seen}; do echo "${{!each}}"; done > "$JOB/environment"'
    )
    arguments = ("--dataset_name", "data/a b", "--output_dir", "out")
    assert job("scripts/pretrain.py", *arguments, torchrun=note).wait(30) == 0
    files = list(tmp_path.glob("arguments.*"))
    assert len(files) == 2
    [line] = {path.read_text() for path in files}
    given = get_args_parser().parse_args(shlex.split(line))
    assert (given.nnodes, given.nproc_per_node, given.rdzv_backend) == ("2", "1", "c10d")
    assert (given.rdzv_endpoint, given.rdzv_id) == (f"localhost:{20000 + JOB % 10000}", f"{JOB}.0")
    assert "SIGUSR1" in given.signals_to_handle.split(",")
    assert "SIGTERM" in given.signals_to_handle.split(",")
    assert given.training_script == "scripts/pretrain.py"
    assert given.training_script_args == [*arguments, "--resume_from_checkpoint", "latest"]
    assert (tmp_path / "environment").read_text().split() == ["1", "240", "no"]
    commands.parse(commands.Command(line, "scripts.pretrain", given.training_script_args), monkeypatch)
    assert not requeued(tmp_path)


WAITING = "trap 'sleep 0.2; exit {}' USR1; echo up > $JOB/up.$$; while :; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("torchrun", "sent", "status", "again"),
    [
        (WAITING.format(1), signal.SIGUSR1, 1, True),
        (WAITING.format(0), signal.SIGUSR1, 0, False),
        ("echo up > $JOB/up.$$; sleep 0.5; echo > $JOB/saved; exit 1", signal.SIGTERM, 1, False),
        ("exit 1", None, 1, False),
        ("exit 138", None, 138, True),
    ],
    ids=["saved", "done meanwhile", "cancelled", "failed", "stopped without torchrun"],
)
def test_when_the_job_is_requeued(
    torchrun: str, sent: signal.Signals | None, status: int, again: bool, job: Any, tmp_path: Path
) -> None:
    process = job("scripts/pretrain.py", torchrun=torchrun)
    if sent:
        assert wait_until(lambda: len(list(tmp_path.glob("up.*"))) == 2)
        process.send_signal(sent)
    assert process.wait(30) == status
    assert requeued(tmp_path) == again
    passed_on = tmp_path / "scancel"
    assert (passed_on.read_text() if passed_on.exists() else "") == (
        f"--signal=USR1 {JOB}\n" if sent == signal.SIGUSR1 else ""
    )
    assert (tmp_path / "saved").exists() == (sent == signal.SIGTERM), "the script waits for its run"
