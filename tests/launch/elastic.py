"""Launch by Ray on two nodes of one core each; while it trains, take the second node away and bring another.

    python -m tests.launch.elastic RUN_FOLDER KIND [words of scripts/launch_ray.py]

KIND says how the second node goes: `lost`, at once, or `drained`, announced before. It waits for the starts in environment.json.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import ray
from ray._private.node import Node
from ray.cluster_utils import Cluster

from mm_utils.launch import cluster as launcher
from mm_utils.run.start import run_script
from scripts import launch_ray

RAY = (sys.executable, "-m", "ray.scripts.scripts")
MEMORY = 80 << 20


def worlds(folder: Path) -> list[int]:
    """The numbers of processes of all starts so far."""
    try:
        return [start["num_processes"] for start in json.loads((folder / "environment.json").read_text())]
    except (OSError, ValueError):
        return []


def add_node(address: str) -> subprocess.Popen:
    """Start a node of one core; it ends with this process."""
    words = ("--num-cpus", "1", "--object-store-memory", str(MEMORY), "--block")
    return subprocess.Popen([*RAY, "start", "--address", address, *words], stdout=subprocess.DEVNULL)


def kill(pids: Iterable[int]) -> None:
    """Kill processes and all that they started."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
                process.kill()


def drain(address: str) -> None:
    """Announce that the node beside the head will be taken away in ten minutes."""
    [second] = [node["NodeID"] for node in ray.nodes() if "node:__internal_head__" not in node["Resources"]]
    words = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test")
    deadline = ("--deadline-remaining-seconds", "600")
    subprocess.run([*RAY, "drain-node", "--address", address, "--node-id", second, *words, *deadline], check=True)


def disturb(address: str, second: Node, added: list[int], folder: Path, kind: str) -> None:
    """Take the second node while two workers train, add a third while one does."""
    while not (folder / "checkpoint-4").is_dir():
        time.sleep(0.2)
    if kind == "lost":
        kill([each.process.pid for infos in second.all_processes.values() for each in infos])
    else:
        drain(address)
        (folder / "drained").touch()
    while worlds(folder) != [2, 1] or not (folder / "checkpoint-8").is_dir():
        time.sleep(0.2)
    added.append(add_node(address).pid)


def main() -> None:
    folder, kind, words = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    launcher.RESIZE_SECONDS = 5.0
    small = {"num_cpus": 1, "object_store_memory": MEMORY}
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    second, added = cluster.add_node(**small), list[int]()
    threading.Thread(target=disturb, args=(cluster.address, second, added, folder, kind), daemon=True).start()
    try:
        launch_ray.main(["--address", cluster.address, *words])
    finally:
        kill(added)


if __name__ == "__main__":
    run_script(main)
