"""Data that workers of Ray prepare are those of one machine, whatever their number, also when one is killed."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from scripts import prepare_data
from tests.kit.launches import ROOT

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
ROWS = 400


def photo(seed: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3)).astype(np.uint8)
    return Image.fromarray(coarse).resize((96, 72), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, quality: int = 90) -> bytes:
    with io.BytesIO() as file:
        image.save(file, "JPEG", quality=quality)
        return file.getvalue()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards and a table, with copies and near copies across shards, damaged images and empty captions."""
    folder = tmp_path_factory.mktemp("sources")
    for shard in range(3):
        with tarfile.open(folder / f"web-{shard}.tar", "w") as tar:
            for row in range(shard, ROWS, 3):
                image = photo(row)
                content = encoded(image)
                if row % 20 == 7:
                    content = encoded(photo(row - 5))  # equal, of another shard
                elif row % 20 == 11:
                    content = encoded(photo(row - 4), 40)  # nearly equal
                elif row % 50 == 3:
                    content = content[:200]
                for suffix, data in (("jpg", content), ("txt", f"picture {row}".encode() if row % 61 else b" ")):
                    entry = tarfile.TarInfo(f"{row:05d}.{suffix}")
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
    lines = []
    for row in range(30):
        photo(row if row % 3 else 1000 + row).save(folder / f"{row}.png")
        lines.append(json.dumps({"image": f"{row}.png", "caption": [f"painting {row}", f"work {row}"]}))
    (folder / "table.jsonl").write_text("\n".join(lines))
    return folder


def words(sources: Path, output: Path) -> list[str]:
    given = [f"{sources}/web-{{0..2}}.tar,name=web", f"{sources}/table.jsonl,name=table"]
    more = ["--image_size", "32", "--near_duplicates", "drop", "--test_fraction", "0.1", "--max_bad_fraction", "0.5"]
    return ["--sources", *given, "--output_dir", str(output), *more]


def results(folder: Path) -> dict[str, bytes]:
    """All files but what names the time and place of a run."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    report = json.loads(found["report.json"])
    for name in ("seconds", "created", "settings"):
        report.pop(name)
    found["report.json"] = json.dumps(report, sort_keys=True).encode()
    return {name: content for name, content in found.items() if Path(name).suffix not in (".md", ".html", ".yaml")}


@pytest.fixture(scope="module")
def alone(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("alone") / "data"
    prepare_data.main(words(sources, output))
    return results(output)


def kill_a_worker(running: subprocess.Popen, parts: Path, killed: list[int]) -> None:
    """Kill a process of Ray that prepares as soon as there are parts."""
    while running.poll() is None and not killed:
        if any(parts.glob("*.json")):
            for process in psutil.Process(running.pid).children(recursive=True):
                if "_Worker" in " ".join(process.cmdline()):
                    os.kill(process.pid, signal.SIGKILL)
                    killed.append(process.pid)
                    break
        time.sleep(0.01)


@pytest.mark.parametrize("workers", [1, 3])
def test_prepared_on_ray_is_prepared_on_one_machine(
    workers: int, sources: Path, alone: dict[str, bytes], tmp_path: Path
) -> None:
    output, killed = tmp_path / "data", list[int]()
    own = ["--num_workers", str(workers), "--storage_path", str(tmp_path / "ray")]
    command = [sys.executable, str(ROOT / "scripts/launch_ray.py"), *own, str(ROOT / "scripts/prepare_data.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, *words(sources, output)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        hunt = threading.Thread(target=kill_a_worker, args=(running, tmp_path / "data.partial/parts", killed))
        hunt.start()
        said, _ = running.communicate(timeout=500)
        hunt.join()
    assert running.returncode == 0, said
    assert killed
    found = results(output)
    assert found.keys() == alone.keys()
    assert [name for name in alone if found[name] != alone[name]] == []
    duplicates = json.loads(found["report.json"])["duplicates"]
    assert min(duplicates[name] for name in ("exact_rows", "near_pairs", "merged_rows")) > 0
