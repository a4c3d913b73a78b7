"""Measure rows a second from shards on an S3 server, beside the same files on the disk.

The server is moto's, a process of its own on the loopback (pip install "moto[server]" s3fs); what it computes is not counted. Rows are
read as training streams read them, in one process, local and remote in turn; figures are medians over the rounds.

    python -m benchmarks.data.remote
    python -m benchmarks.data.remote --rows 5000 --kilobytes 100
"""

import logging
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from socket import create_server
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from mm_utils.arguments import arg, parse_args
from mm_utils.data.rows.source import Source
from mm_utils.distributed import RunError
from mm_utils.extras.streams.shards import ShardReader, count_shards, damage, expand
from mm_utils.run.start import run_script
from mm_utils.text import markdown_table

SHARDS = 4
_SECONDS = 60  # until the server answers


@dataclass
class RemoteBenchmarkArguments:
    """The rows and how often they are read."""

    rows: int = arg(20_000, "Rows in all, in four shards.")
    kilobytes: int = arg(2, "Of an image, about.")
    rounds: int = arg(3, "How often each is read.")


def image_of(kilobytes: int) -> bytes:
    """Return a JPEG file of about that size."""
    side = round(32 * kilobytes**0.5)
    buffer = BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(noise).save(buffer, "JPEG", quality=60)
    return buffer.getvalue()


def write(folder: Path, rows: int, image: bytes) -> None:
    """Write the rows as tar and as Parquet shards, and the number of samples beside the tars."""
    sizes = [len(part) for part in np.array_split(np.arange(rows), SHARDS)]
    for shard, size in enumerate(sizes):
        captions = [f"picture {row} of shard {shard}" for row in range(size)]
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for row, caption in enumerate(captions):
                for suffix, content in (("jpg", image), ("txt", caption.encode())):
                    member = tarfile.TarInfo(f"{row:06d}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, BytesIO(content))
        images = [{"bytes": image, "path": None}] * size
        table = pa.table({"image": images, "caption": captions})
        pq.write_table(table, folder / f"{shard}.parquet", row_group_size=500)
    (folder / "sizes.json").write_text(
        str({f"{shard}.tar": size for shard, size in enumerate(sizes)}).replace("'", '"')
    )


@contextmanager
def server() -> Iterator[None]:
    """Run an S3 server, and let this process use it."""
    with closing(create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            yield
        finally:
            running.terminate()


def put(folder: Path) -> None:
    """Store the files of a folder as soon as the server answers.

    Raises:
        RunError: if it does not answer.
    """
    import s3fs

    until = time.monotonic() + _SECONDS
    while True:
        try:
            files = s3fs.S3FileSystem(skip_instance_cache=True)
            files.mkdir("bucket")
            break
        except damage() as error:
            if time.monotonic() > until:
                raise RunError(f"the S3 server does not answer ({error}). pip install 'moto[server]' s3fs") from error
            time.sleep(0.5)
    files.put(str(folder) + "/", "bucket/", recursive=True)


def read(pattern: str) -> tuple[float, float, int]:
    """Read all rows of shards; return seconds of the processor, seconds, and rows."""
    shards = count_shards(expand(pattern))
    begin, clock, rows = time.process_time(), time.perf_counter(), 0
    reader = ShardReader(shards, Source("shards", medium="image"))
    for place, shard in enumerate(shards):
        for start in range(0, shard.rows, 256):
            found = reader.read(place, start, min(start + 256, shard.rows))
            rows += sum(not isinstance(row, str) for row in found)
    return time.process_time() - begin, time.perf_counter() - clock, rows


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Print and return rows per second of the processor, for each kind of shard, local and remote."""
    args = parse_args(RemoteBenchmarkArguments, argv=argv, doc=__doc__)[RemoteBenchmarkArguments]
    logging.basicConfig(level=logging.WARNING)
    figures = []
    with tempfile.TemporaryDirectory() as folder, server():
        image = image_of(args.kilobytes)
        write(Path(folder), args.rows, image)
        put(Path(folder))
        for kind in ("tar", "parquet"):
            places = {"disk": f"{folder}/*.{kind}", "S3": f"s3://bucket/*.{kind}"}
            found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in places}
            for _ in range(args.rounds):
                for name, pattern in places.items():
                    found[name].append(read(pattern))
            for name, runs in found.items():
                if any(rows != args.rows for *_, rows in runs):
                    raise RunError(f"{kind} from {name}: {runs[0][2]:,} of {args.rows:,} rows were read")
                cpu, wall = (args.rows / median(run[at] for run in runs) for at in range(2))
                row = {"shards": kind, "from": name, "kB an image": round(len(image) / 1e3, 1)}
                figures.append({**row, "rows a CPU second": round(cpu), "rows a second": round(wall)})
    sys.stdout.write(markdown_table(list(figures[0]), [list(each.values()) for each in figures]) + "\n")
    return figures


if __name__ == "__main__":
    run_script(main)
