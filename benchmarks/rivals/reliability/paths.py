"""Image paths in a data file that lead out of its folder: which of them are followed."""

import json
import os
import threading
import zipfile
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
from PIL import Image

from benchmarks.rivals.reliability.trials import Run
from mm_utils.data.pairs import load_pairs
from mm_utils.data.rows.source import DataArguments

ESCAPES = ("absolute", "parent", "link", "zip", "http")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


def escapes(folder: Path) -> tuple[Path, dict[str, str], ThreadingHTTPServer]:
    """A folder of images, and paths from it to one outside, by kind; shut the server down."""
    inside, outside = folder / "inside", folder / "outside"
    for place in (inside, outside):
        place.mkdir(parents=True)
    Image.new("RGB", (8, 8), "red").save(outside / "secret.png")
    for number in range(4):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(inside / f"{number}.png")
    os.symlink(outside / "secret.png", inside / "link.png")
    with zipfile.ZipFile(outside / "secret.zip", "w") as packed:
        packed.write(outside / "secret.png", "secret.png")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(outside)))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    paths = {
        "absolute": str(outside / "secret.png"),
        "parent": "../outside/secret.png",
        "link": "link.png",
        "zip": f"zip://secret.png::{outside / 'secret.zip'}",
        "http": f"http://127.0.0.1:{server.server_port}/secret.png",
    }
    return inside, paths, server


def try_escapes(reads: Callable[[Path, str], bool], run: Run) -> None:
    """Report which escapes were refused."""
    inside, paths, server = escapes(Path(run.folder))
    for kind, path in paths.items():
        try:
            reached = reads(inside, path)
        except (OSError, ValueError):
            reached = False
        run.tell("path", kind=kind, refused=not reached)
    server.shutdown()


def read_by_datasets(inside: Path, path: str) -> bool:
    """As a column of type `Image`, from a process that works in the data's folder."""
    os.chdir(inside)
    column = datasets.Dataset.from_dict({"image": [path]}).cast_column("image", datasets.Image())
    return column[0]["image"].size == (8, 8)


def read_by_ours(inside: Path, path: str) -> bool:
    """As a row of a JSONL file among others."""
    rows = [{"image": name, "caption": f"the picture at {name}"} for name in [*(f"{n}.png" for n in range(4)), path]]
    (inside / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_pairs(DataArguments(train_file=str(inside / "pairs.jsonl")))
    captions = {caption for split in found.values() for captions in split["captions"] for caption in captions}
    return f"the picture at {path}" in captions
