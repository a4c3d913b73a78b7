"""Runs on real Ray: equal to plain ones, a killed worker, lost and new machines, refused flags, a sweep."""

import csv
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mm_utils.distributed import available_cores
from mm_utils.launch.arguments import LaunchArguments
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.search.index import open_index
from scripts import embed
from tests.kit.numbered_rows import png

pytest.importorskip("ray")
cluster = importlib.import_module("mm_utils.launch.cluster")
pytestmark = [pytest.mark.slow]

ROOT = Path(__file__).parents[2]
STEPS = ["--max_steps", "12", "--save_steps", "4", "--ddp_timeout", "1800"]
SECONDS = 1500
STRIKES = """
import json, os, signal, time
from pathlib import Path
from transformers import TrainerCallback
from mm_utils import distributed
from scripts import pretrain

KILLED_AT, DRAINED_AT, WAITS_AT = {killed_at}, {drained_at}, {waits_at}

def starts(args):
    return len(json.loads(Path(args.output_dir, "environment.json").read_text()))

class Strike(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == KILLED_AT and starts(args) == 1 and distributed.rank() == 1:
            while not Path(args.output_dir, "checkpoint-4").is_dir():
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == DRAINED_AT and starts(args) == 1:
            while not Path(args.output_dir, "drained").exists():
                time.sleep(0.1)
            time.sleep(20)  # Ray's controller looks every 5 seconds
        awaited = WAITS_AT.get(state.global_step)  # this start must not get further
        while awaited is not None and starts(args) == awaited:
            time.sleep(0.1)

def main(argv=None, callbacks=()):
    return pretrain.main(argv, [*callbacks, Strike()])
"""

EMBEDS = """
import os, signal
from pathlib import Path
from mm_utils import distributed
from mm_utils.search import updating
from mm_utils.run.start import make_accelerator
from scripts import embed

write_part, updating.FLUSH_SECONDS, embed.EVALUATION_BATCH = updating.write_part, 0.0, 4

def write_and_die(*part):
    write_part(*part)
    if distributed.rank() == 1 and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

updating.write_part = write_and_die

def main(argv=None):
    return embed.main(argv)
"""


def run(folder: Path, command: list[str]) -> str:
    """Run a command in a folder; return what it wrote."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    quiet = {"RAY_memory_monitor_refresh_ms": "0", "RAY_USAGE_STATS_ENABLED": "0", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, **quiet, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    (folder / "log.txt").write_text(done.stdout)
    return f"{done.stdout}\nexit status {done.returncode}"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return FusionDualEncoderModel.from_pretrained(folder).state_dict()


def difference(one: Path, other: Path) -> float:
    """The largest difference of any weight."""
    found, right = weights(one), weights(other)
    assert found.keys() == right.keys()
    return max(float((found[name] - value).abs().max()) for name, value in right.items())


def starts(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "environment.json").read_text())


def test_workers_get_variables_but_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "HF_TOKEN", "WANDB_API_KEY", "WANDB_PROJECT", "NCCL_DEBUG", "OTHER"):
        monkeypatch.setenv(name, name)
    monkeypatch.setenv("HF_ENDPOINT", "https://me:hush@hub.example.org")
    monkeypatch.setenv("WANDB_PAT", "hush")
    found = cluster._variables(LaunchArguments(mixed_precision="bf16"))
    assert {"HF_HOME", "WANDB_PROJECT", "NCCL_DEBUG"} <= found.keys()
    assert not {"HF_TOKEN", "WANDB_API_KEY", "HF_ENDPOINT", "WANDB_PAT", "OTHER"} & found.keys()
    assert found["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert str(ROOT) in found["PYTHONPATH"].split(os.pathsep)


@pytest.fixture(scope="module")
def plain(tiny_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two plain processes, uninterrupted."""
    folder = tmp_path_factory.mktemp("plain")
    config = str(ROOT / "accelerate_configs/two_processes.yaml")
    words = ["-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
    said = run(folder, [*words, str(ROOT / "scripts/pretrain.py"), *tiny_flags, *STEPS, "--output_dir", "out"])
    assert said.endswith("exit status 0"), said
    return folder / "out"


def launch(folder: Path, own: list[str], script: Path, words: list[str]) -> str:
    return run(folder, [str(ROOT / "scripts/launch_ray.py"), *own, str(script), *words, "--output_dir", "out"])


def strikes(folder: Path, **at: Any) -> Path:
    """A script that is `pretrain`, and kills a process at a step, or waits at one for a drained node, or for another start."""
    path = folder / "strikes.py"
    path.write_text(STRIKES.format(**{"killed_at": None, "drained_at": None, "waits_at": {}, **at}))
    return path


def test_two_workers_are_two_processes(plain: Path, tiny_flags: list[str], tmp_path: Path) -> None:
    said = launch(tmp_path, ["--num_workers", "2"], ROOT / "scripts/pretrain.py", [*tiny_flags, *STEPS])
    assert said.endswith("exit status 0"), said
    assert difference(tmp_path / "out", plain) == 0
    [start] = starts(tmp_path / "out")
    assert start["num_processes"] == 2
    assert start["launch"][0].startswith("ray:pretrain-")
    assert "pretrain.py --train_file" in start["command"]
    assert "step 12 of 12: loss" in said
    assert "Training:" not in said  # a bar
    assert not list((tmp_path / "outputs/ray").rglob("checkpoint-*"))  # no second copies


def test_a_killed_worker_costs_no_bit(plain: Path, tiny_flags: list[str], tmp_path: Path) -> None:
    said = launch(tmp_path, ["--num_workers", "2"], strikes(tmp_path, killed_at=6), [*tiny_flags, *STEPS])
    assert said.endswith("exit status 0"), said
    assert [start["resumed_from"] for start in starts(tmp_path / "out")] == [0, 4]
    assert len({start["launch"][0] for start in starts(tmp_path / "out")}) == 1
    assert difference(tmp_path / "out", plain) == 0


@pytest.mark.parametrize("workers", [1, 3])
def test_an_index_of_several_workers_is_that_of_one_process(workers: int, plain: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(40):
        (photos / f"{number}.png").write_bytes(png(number))
    (photos / "broken.png").write_bytes(b"no image")
    words = ["--model_name_or_path", str(plain), "--images", str(photos)]
    embed.main([*words, "--index_dir", str(tmp_path / "alone")])
    (tmp_path / "embeds.py").write_text(EMBEDS)
    own = ["--num_workers", str(workers), "embeds.py", *words, "--index_dir", "index"]
    said = run(tmp_path, [str(ROOT / "scripts/launch_ray.py"), *own])
    assert said.endswith("exit status 0"), said
    assert (tmp_path / "killed").exists() == (workers > 1)
    indexes = [open_index(tmp_path / name) for name in ("alone", "index")]
    assert indexes[0][0].fingerprint == indexes[1][0].fingerprint
    one, other = (rows.with_format("arrow")[:] for _, rows in indexes)
    assert one.drop(["embedding"]).equals(other.drop(["embedding"]))
    assert len(one) == 40
    both = [np.stack(table["embedding"].to_numpy()).astype(np.float32) for table in (one, other)]
    np.testing.assert_allclose(both[0], both[1], atol=1e-3)  # float16, of batches of another composition
    assert (tmp_path / "alone/skipped.jsonl").read_text() == (tmp_path / "index/skipped.jsonl").read_text()


def test_a_mistake_is_not_tried_again(tiny_flags: list[str], tmp_path: Path) -> None:
    said = launch(tmp_path, [], ROOT / "scripts/pretrain.py", [*tiny_flags, "--train_file", "none.jsonl"])
    assert said.endswith("exit status 1"), said
    last = next(line for line in reversed(said.splitlines()[:-1]) if line)
    assert last.endswith("ERROR --train_file is none.jsonl; there is no such file. Check the path.")
    assert len(starts(tmp_path / "out")) == 1


@pytest.mark.parametrize("kind", ["lost", "drained"])
def test_machines_come_and_go(kind: str, plain: Path, tiny_flags: list[str], tmp_path: Path) -> None:
    at: dict[str, Any] = {"waits_at": {6: 1, 9: 2}} if kind == "lost" else {"drained_at": 6, "waits_at": {9: 2}}
    script = strikes(tmp_path, **at)
    own = ["--min_workers", "1", "--max_workers", "2", str(script)]
    words = [str(tmp_path / "out"), kind, *own, *tiny_flags, *STEPS, "--output_dir", "out"]
    said = run(tmp_path, ["-m", "tests.launch.elastic", *words])
    assert said.endswith("exit status 0"), said
    assert [start["num_processes"] for start in starts(tmp_path / "out")] == [2, 1, 2]
    resumed = [start["resumed_from"] for start in starts(tmp_path / "out")]
    assert resumed in (
        [[0, 4, 8]] if kind == "lost" else [[0, 7, 8], [0, 8, 8]]
    )  # no step is lost where Ray announces it
    assert difference(tmp_path / "out", plain) < 1e-5


def test_a_sweep_names_the_best(tiny_flags: list[str], tmp_path: Path) -> None:
    grid = "learning_rate=1e-5,1e-2;seed=1,2"
    one_at_a_time = ["--cpus_per_worker", str(available_cores())]
    said = launch(
        tmp_path, ["--tune", grid, *one_at_a_time], ROOT / "scripts/pretrain.py", [*tiny_flags, "--max_steps", "12"]
    )
    assert said.endswith("exit status 0"), said
    rows = list(csv.DictReader((tmp_path / "out/sweep.csv").open()))
    recalls = [float(row["eval_mean_recall"]) for row in rows]
    assert recalls == sorted(recalls, reverse=True)
    assert {(row["learning_rate"], row["seed"]) for row in rows} == {(a, b) for a in ("1e-5", "1e-2") for b in "12"}
    for row in rows:
        assert (Path(row["folder"]) / "model.safetensors").is_file()
        assert Path(row["folder"]).name == f"learning_rate-{row['learning_rate']}_seed-{row['seed']}"
    assert "eval_mean_recall" in said
