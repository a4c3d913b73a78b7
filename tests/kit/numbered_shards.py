"""Small shards whose images and captions name the same number, for the tests of streaming."""

import contextlib
import json
import tarfile
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.kit.fault_images import save
from tests.kit.numbered_rows import FEATURES
from tests.kit.reading import add_member


def image_of(number: int) -> bytes:
    """A picture of one colour, which says the number and survives any crop."""
    return save(Image.new("RGB", (20, 18), (number % 256, number // 256, 77)), "PNG")


def caption_of(number: int) -> str:
    """Words that say the number; some captions are longer than others."""
    return " ".join(["picture", *str(number), *["again"] * (number % 5)])


def rows_of(numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of the prepared schema, as far as streaming reads it; each has one or two captions."""
    return [
        {
            "image": {"bytes": image_of(number), "path": None},
            "captions": [caption_of(number), caption_of(number) + " so"][: number % 2 + 1],
            "id": f"id-{number}",
        }
        for number in numbers
    ]


def write_parquet(path: Path, rows: list[dict[str, Any]], row_group_size: int = 4) -> Path:
    """One shard."""
    pq.write_table(pa.Table.from_pylist(rows, FEATURES.arrow_schema), path, row_group_size=row_group_size)
    return path


def write_tar(path: Path, numbers: Sequence[int]) -> Path:
    """One shard as WebDataset writes it: image and caption of every sample one after the other."""
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            sidecar = json.dumps({"image_id": f"id-{number}"})
            parts = {"png": image_of(number), "txt": caption_of(number).encode(), "json": sidecar.encode()}
            for suffix, content in parts.items():
                add_member(tar, f"samples/{number:06d}.{suffix}", content)
    return path


def write_shards(folder: Path, kind: str, sizes: Sequence[int]) -> str:
    """Shards of these sizes, rows numbered through: what `--train_file` or `--dataset_name` is then."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for place, size in enumerate(sizes):
        numbers = range(first, first + size)
        first += size
        if kind == "parquet":
            write_parquet(folder / f"{place:03d}.parquet", rows_of(numbers))
        elif kind == "tar":
            write_tar(folder / f"{place:03d}.tar", numbers)
    if kind == "arrow":
        rows = datasets.Dataset.from_list(rows_of(range(first)), features=FEATURES)
        datasets.DatasetDict({"train": rows}).save_to_disk(folder / "prepared", num_shards={"train": len(sizes)})
        return str(folder / "prepared")
    return str(folder / f"*.{kind}")


class Server(SimpleHTTPRequestHandler):
    """Files of a folder, by ranges."""

    ranges = True

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        file = Path(self.translate_path(self.path))
        if not file.is_file():
            return self.send_error(404)
        content, span = file.read_bytes(), self.headers.get("Range") if self.ranges else None
        self.send_response(206 if span else 200)
        if span:
            low, _, high = span.removeprefix("bytes=").partition("-")
            total, stop = len(content), min(int(high or len(content) - 1) + 1, len(content))
            content = content[int(low) : stop]
            self.send_header("Content-Range", f"bytes {low}-{stop - 1}/{total}")
        self.send_header("Accept-Ranges", "bytes" if self.ranges else "none")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
        return None

    do_HEAD = do_GET


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """The address of a server that serves the files of `folder`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
