"""Runs on real Ray: equal to plain ones, killed workers, lost and new machines, refused flags, a sweep, prepared data.

As a script, it launches on two nodes of one core each; while it trains, the second is lost, and another one comes:
python -m tests.launch.test_ray RUN_FOLDER [words of scripts/launch_ray.py]
"""

import csv
import importlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from mm_utils.cores import available_cores
from mm_utils.launch.arguments import LaunchArguments
from mm_utils.run.start import run_script
from scripts import launch_ray, prepare_data
from tests.kit.processes import ROOT, kill_family, weights

pytest.importorskip("ray")
cluster = importlib.import_module("mm_utils.launch.cluster")
pytestmark = [pytest.mark.slow]

STEPS = ["--max_steps", "12", "--save_steps", "4", "--ddp_timeout", "1800"]
KILLS = """
import json, os, signal, time
from pathlib import Path
from transformers import TrainerCallback
from mm_utils import distributed
from scripts import pretrain

KILLED_AT, WAITS_AT = {killed_at}, {waits_at}

def starts(args):
    return len(json.loads(Path(args.output_dir, "environment.json").read_text()))

class Strike(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == KILLED_AT and starts(args) == 1 and distributed.rank() == 1:
            while not Path(args.output_dir, "checkpoint-4").is_dir():
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        awaited = WAITS_AT.get(state.global_step)  # this start must not get further
        while awaited is not None and starts(args) == awaited:
            time.sleep(0.1)

def main(argv):
    return pretrain.main(argv, [Strike()])
"""


def start(folder: Path, command: list[str]) -> subprocess.Popen:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    quiet = {"RAY_memory_monitor_refresh_ms": "0", "RAY_USAGE_STATS_ENABLED": "0", "ACCELERATE_USE_CPU": "true"}
    variables = {**os.environ, **quiet, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *command], cwd=folder, env=variables, **streams)


def run(folder: Path, command: list[str], status: int = 0) -> str:
    """Run a command in a folder; return what it wrote."""
    with start(folder, command) as running:
        said, _ = running.communicate(timeout=1500)
    assert running.returncode == status, said
    return said


def launch(folder: Path, own: list[str], script: Path, words: list[str], status: int = 0) -> str:
    command = [str(ROOT / "scripts/launch_ray.py"), *own, str(script), *words, "--output_dir", "out"]
    return run(folder, command, status)


def strikes(folder: Path, killed_at: int | None = None, waits_at: dict[int, int] | None = None) -> Path:
    """A script that is `pretrain`, and kills a process at a step, or waits at one for another start."""
    path = folder / "strikes.py"
    path.write_text(KILLS.format(killed_at=killed_at, waits_at=waits_at or {}))
    return path


def difference(one: Path, other: Path) -> float:
    """The largest difference of any weight."""
    found = weights(one)
    right = weights(other)
    assert found.keys() == right.keys()
    return max(float((found[name] - value).abs().max()) for name, value in right.items())


def starts(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "environment.json").read_text())


def test_workers_get_variables_but_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "HF_TOKEN", "WANDB_API_KEY", "NCCL_DEBUG", "OTHER"):
        monkeypatch.setenv(name, name)
    monkeypatch.setenv("HF_ENDPOINT", "https://me:hush@hub.example.org")
    monkeypatch.setenv("WANDB_PAT", "hush")
    found = cluster._variables(LaunchArguments(mixed_precision="bf16"))
    assert {"HF_HOME", "NCCL_DEBUG"} <= found.keys()
    assert not {"HF_TOKEN", "WANDB_API_KEY", "HF_ENDPOINT", "WANDB_PAT", "OTHER"} & found.keys()
    assert found["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert str(ROOT) in found["PYTHONPATH"].split(os.pathsep)


@pytest.fixture(scope="module")
def plain(tiny_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two plain processes, uninterrupted."""
    folder = tmp_path_factory.mktemp("plain")
    config = str(ROOT / "accelerate_configs/two_processes.yaml")
    words = ["-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
    run(folder, [*words, str(ROOT / "scripts/pretrain.py"), *tiny_flags, *STEPS, "--output_dir", "out"])
    return folder / "out"


def test_a_killed_worker_costs_no_bit(plain: Path, tiny_flags: list[str], tmp_path: Path) -> None:
    launch(tmp_path, ["--num_workers", "2"], strikes(tmp_path, killed_at=6), [*tiny_flags, *STEPS])
    first, second = starts(tmp_path / "out")
    assert (first["num_processes"], first["resumed_from"], second["resumed_from"]) == (2, 0, 4)
    assert first["launch"] == second["launch"]
    assert first["launch"][0].startswith("ray:strikes-")
    assert difference(tmp_path / "out", plain) == 0
    assert not list((tmp_path / "outputs/ray").rglob("checkpoint-*"))  # no second copies


def test_a_mistake_is_not_tried_again(tiny_flags: list[str], tmp_path: Path) -> None:
    said = launch(tmp_path, [], ROOT / "scripts/pretrain.py", [*tiny_flags, "--train_file", "none.jsonl"], 1)
    last = next(line for line in reversed(said.splitlines()) if line)
    assert last.endswith("ERROR --train_file is none.jsonl; there is no such file. Check the path.")
    assert len(starts(tmp_path / "out")) <= 1


def test_a_sweep_names_the_best(tiny_flags: list[str], tmp_path: Path) -> None:
    own = ["--tune", "learning_rate=1e-5,1e-2;seed=1,2", "--cpus_per_worker", str(available_cores())]  # one at a time
    said = launch(tmp_path, own, ROOT / "scripts/pretrain.py", [*tiny_flags, "--max_steps", "12"])
    rows = list(csv.DictReader((tmp_path / "out/sweep.csv").open()))
    recalls = [float(row["eval_mean_recall"]) for row in rows]
    assert recalls == sorted(recalls, reverse=True)
    assert {(row["learning_rate"], row["seed"]) for row in rows} == {(a, b) for a in ("1e-5", "1e-2") for b in "12"}
    for row in rows:
        assert (Path(row["folder"]) / "model.safetensors").is_file()
        assert Path(row["folder"]).name == f"learning_rate-{row['learning_rate']}_seed-{row['seed']}"
    assert "mean_recall" in said


# -- machines that come and go ------------------------------------------------------------------------------------------
def test_machines_come_and_go(plain: Path, tiny_flags: list[str], tmp_path: Path) -> None:
    own = ["--num_workers", "1:2", str(strikes(tmp_path, waits_at={6: 1, 9: 2}))]
    words = [str(tmp_path / "out"), *own, *tiny_flags, *STEPS, "--output_dir", "out"]
    run(tmp_path, ["-m", "tests.launch.test_ray", *words])
    assert [start["num_processes"] for start in starts(tmp_path / "out")] == [2, 1, 2]
    assert [start["resumed_from"] for start in starts(tmp_path / "out")] == [0, 4, 8]
    assert difference(tmp_path / "out", plain) < 1e-5


def main() -> None:
    from ray.cluster_utils import Cluster

    folder = Path(sys.argv[1])
    words = sys.argv[2:]
    cluster.RESIZE_SECONDS = 5.0
    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    machines = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    second = machines.add_node(**small)

    def disturb():
        while not (folder / "checkpoint-4").is_dir():
            time.sleep(0.2)
        for infos in second.all_processes.values():
            for info in infos:
                kill_family(info.process.pid)
        while len(starts(folder)) < 2 or not (folder / "checkpoint-8").is_dir():
            time.sleep(0.2)
        node = ["--num-cpus", "1", "--object-store-memory", str(80 << 20), "--block", "--address", machines.address]
        added.append(subprocess.Popen([sys.executable, "-m", "ray.scripts.scripts", "start", *node]).pid)

    added = []
    threading.Thread(target=disturb, daemon=True).start()
    try:
        launch_ray.main(["--address", machines.address, *words])
    finally:
        for pid in added:
            kill_family(pid)


# -- prepared data ------------------------------------------------------------------------------------------------------
def photo(seed: int, size: int = -1, quality: int = 90) -> bytes:
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3)).astype(np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(coarse).resize((96, 72), Image.Resampling.BICUBIC).save(file, "JPEG", quality=quality)
        return file.getvalue()[:size] if size > 0 else file.getvalue()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards with copies and near copies across them, damaged images and empty captions."""
    folder = tmp_path_factory.mktemp("sources")
    odd = {7: {"seed": -5}, 11: {"seed": -3, "quality": 40}, 13: {"size": 200}}
    for shard in range(3):
        with tarfile.open(folder / f"web-{shard}.tar", "w") as tar:
            for row in range(shard, 400, 3):
                how = odd.get(row % 20, {})
                content = photo(row + how.get("seed", 0), how.get("size", -1), how.get("quality", 90))
                for suffix, data in (("jpg", content), ("txt", f"picture {row}".encode() if row % 61 else b" ")):
                    entry = tarfile.TarInfo(f"{row:05d}.{suffix}")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
    return folder


def words(sources: Path, output: Path) -> list[str]:
    more = ["--image_size", "32", "--test_fraction", "0.1", "--max_bad_fraction", "0.5"]
    return ["--sources", f"{sources}/web-{{0..2}}.tar,name=web", "--output_dir", str(output), *more]


def results(folder: Path) -> dict[str, bytes]:
    """All files but what names the time and place of a run, and the sheet of pairs, which is not drawn in a test."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    report = json.loads(found["report.json"])
    for name in ("seconds", "created", "settings"):
        report.pop(name)
    found["report.json"] = json.dumps(report, sort_keys=True).encode()
    return {name: content for name, content in found.items() if Path(name).suffix not in (".md", ".jpg", ".yaml")}


def test_prepared_on_ray_is_prepared_on_one_machine(sources: Path, tmp_path: Path) -> None:
    """Also when a worker is killed."""
    prepare_data.main(words(sources, tmp_path / "alone"))
    alone = results(tmp_path / "alone")
    killed = False
    own = ["--num_workers", "3", str(ROOT / "scripts/prepare_data.py"), *words(sources, tmp_path / "data")]
    with start(tmp_path, [str(ROOT / "scripts/launch_ray.py"), *own]) as running:
        while running.poll() is None and not killed:
            time.sleep(0.01)
            if any((tmp_path / "data.partial/parts").glob("*.json")):
                for process in psutil.Process(running.pid).children(recursive=True):
                    if "_Worker" in " ".join(process.cmdline()) and not killed:
                        process.kill()
                        killed = True
        said, _ = running.communicate(timeout=500)
    assert (running.returncode, killed) == (0, True), said
    found = results(tmp_path / "data")
    assert found.keys() == alone.keys()
    assert [name for name in alone if found[name] != alone[name]] == []
    duplicates = json.loads(found["report.json"])["duplicates"]
    assert min(duplicates[name] for name in ("near_pairs", "merged_rows")) > 0


if __name__ == "__main__":
    run_script(main)
