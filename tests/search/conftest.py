"""A model of a few steps, folders of pictures, an index of them, and requests that no browser would send to its server."""

import http.client
import json
import shutil
import threading
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pytest
from accelerate import Accelerator
from PIL import ExifTags, Image

from mm_utils.data.media.medium import read_by
from mm_utils.files import SUMS_FILE
from mm_utils.model.build import open_model
from mm_utils.search.index import open_index, write_info
from mm_utils.search.listing import Listing, folder_listing
from mm_utils.search.searcher import Searcher
from mm_utils.search.server import PageServer
from mm_utils.search.updating import Embedder, update_index

EVIL_CAPTION = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"
EVIL_NAME = "<img src=x onerror=document.title='hacked'>.png"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)

    @property
    def hits(self) -> list[dict]:
        return self.json["hits"]


class Served(NamedTuple):
    port: int
    searcher: Any

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Answer:
        """Send a request whose path is not normalised; `host` is a header like others."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        length = {} if body is None else {"content-length": str(len(body))}
        for name, value in ({"host": f"127.0.0.1:{self.port}"} | length | headers).items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders(body)
        answer = connection.getresponse()
        found = Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        connection.close()
        return found


def served(searcher: Any) -> Iterator[Served]:
    with PageServer(searcher, 0) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield Served(running.server_port, searcher)
        running.shutdown()


def bomb(side: int) -> bytes:
    """A PNG of white pixels: a few kB that decode to a gigabyte."""

    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = chunk(b"IHDR", side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def write_photos(folder: Path, numbers: range, seed: int = 0, taken: str = "") -> None:
    """Write pictures of random cells, none a near copy of another, in two folders."""
    exif = Image.Exif()
    if taken:
        exif[ExifTags.Base.DateTime] = taken
    for number in numbers:
        place = folder / f"{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        cells = np.random.default_rng((number, seed)).integers(0, 256, (4, 4, 3), np.uint8)
        image = Image.fromarray(cells).resize((40 + number % 7, 36), Image.Resampling.NEAREST)
        image.save(place / f"{number:03d}.png", exif=exif)


def make_embedder(model: Path, batch_size: int = 8) -> Embedder:
    opened, processor = open_model(str(model))
    return Embedder(opened, read_by(processor), batch_size, 0)


def update(index: Path, model: Path, photos: Path, batch_size: int = 8) -> dict[str, int]:
    listing = folder_listing(str(photos))
    return update_index(index, str(model), listing, make_embedder(model, batch_size), Accelerator(cpu=True))


@pytest.fixture(scope="session", autouse=True)
def few_images_are_enough_for_a_level() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("searcher", "updating"):
            patch.setattr(f"mm_utils.search.{module}.LEAST_LEVEL", 30)
        yield


@pytest.fixture(scope="session")
def model(pretrained: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose head was not found to help."""
    return with_weights(Path(pretrained), tmp_path_factory.mktemp("searched") / "plain", {"match": 0.0})


@pytest.fixture(scope="session")
def reranking_model(model: Path) -> Path:
    """The same model with a head that counts."""
    return with_weights(model, model.parent / "reranking", {"match": 3.0, "caption": 0.5})


def with_weights(source: Path, folder: Path, weights: dict[str, float]) -> Path:
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("checkpoint-*", "dual_encoder", SUMS_FILE))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rerank_weights": weights}))
    return folder


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 30 pictures, which no test changes."""
    folder = tmp_path_factory.mktemp("photos")
    write_photos(folder, range(30))
    return folder


@pytest.fixture(scope="session")
def index(model: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of these pictures."""
    folder = tmp_path_factory.mktemp("indexed") / "index"
    update(folder, model, photos)
    return folder


@pytest.fixture(scope="session")
def evil_searcher(reranking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Searcher:
    """An index of 40 pictures, whose captions, and one of whose names, would run a script on a careless page."""
    folder = tmp_path_factory.mktemp("served")
    write_photos(folder / "photos", range(39))
    write_photos(folder / "photos", range(37, 38), taken="2024:05:31 23:59:59")
    write_photos(folder / "more", range(39, 40))
    (folder / "more/1/039.png").rename(folder / "photos" / EVIL_NAME)
    listing = folder_listing(str(folder / "photos"))
    rows = {"image": listing.rows["image"][:], "captions": [[EVIL_CAPTION]] * len(listing.ids)}
    listing = Listing(listing.ids, datasets.Dataset.from_dict(rows, listing.rows.features))
    update_index(
        folder / "index", str(reranking_model), listing, make_embedder(reranking_model), Accelerator(cpu=True)
    )
    write_info(folder / "index", replace(open_index(folder / "index")[0], level=-2.0))
    return Searcher(folder / "index", device="cpu", rerank_top_k=8)


@pytest.fixture(scope="session")
def page(evil_searcher: Searcher) -> Iterator[Served]:
    yield from served(evil_searcher)
