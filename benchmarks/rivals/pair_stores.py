"""One set of pairs in each format that `benchmarks/data/loading.py` reads, written once.

Every function below returns a folder and makes it if it does not exist; a folder is complete or does not exist.
"""

import importlib.util
import io
import json
import multiprocessing
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from PIL import Image, ImageDraw
from tqdm.auto import tqdm

from mm_utils import distributed
from mm_utils.data.prepare.on_disk import PREPARED_FORMAT, write_split
from scripts import prepare_data

PACKAGES = {"lmdb": "lmdb", "webdataset": "webdataset", "litdata": "litdata", "mosaic": "streaming"}
"""What must be importable for a contestant."""
SHARDS = 8  # of the formats that are read shard by shard: as many for each of up to 8 workers
HELD_OUT = 2  # photographs of the validation split
_COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink", "white", "grey", "brown", "black")


def is_installed(contestant: str) -> bool:
    """Whether the package that it needs is there."""
    return contestant not in PACKAGES or importlib.util.find_spec(PACKAGES[contestant]) is not None


@contextmanager
def written(folder: Path) -> Iterator[Path | None]:
    """Yield a new folder to fill, which then becomes `folder`; None if that exists already."""
    if folder.is_dir():
        yield None
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        yield new
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def bytes_below(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# -- the source -------------------------------------------------------------------------------------------------------


def photographs(folder: Path, images: int) -> Path:
    """`pairs.jsonl` of synthetic photographs: JPEGs of 640 x 480, every third upright."""
    with written(folder) as new:
        if new is not None:
            with multiprocessing.get_context("fork").Pool(distributed.available_cores()) as pool:
                rows = pool.map(partial(_photograph, new), range(images + HELD_OUT), chunksize=8)
            for place, row in enumerate(rows):
                row["split"] = "train" if place < images else "validation"
            (new / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / "pairs.jsonl"


def _photograph(folder: Path, seed: int) -> dict[str, Any]:
    """Noise whose spectrum falls as 1/f, like photographs', around one colour, and shapes."""
    rng = np.random.default_rng(seed)
    width, height = (640, 480) if seed % 3 else (480, 640)
    pixels = np.full((height, width, 3), rng.uniform(40, 215, 3), np.float32)
    for octave in range(1, 9):  # 1/f: every octave has the same power
        cells = rng.integers(0, 256, (max(2, height >> octave), max(2, width >> octave), 3), dtype=np.uint8)
        layer = Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC)
        pixels += (np.asarray(layer, np.float32) - 127.5) * 0.2
    pixels += rng.normal(0, 6, (height, width, 1))
    image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    canvas, names = ImageDraw.Draw(image), []
    for _ in range(rng.integers(2, 7)):
        left, top = rng.integers(0, width - 60), rng.integers(0, height - 60)
        names.append(str(rng.choice(_COLOURS)))
        box = [int(value) for value in (left, top, left + rng.integers(30, 200), top + rng.integers(30, 200))]
        canvas.rectangle(box, fill=names[-1]) if rng.random() < 0.5 else canvas.ellipse(box, fill=names[-1])
    name = f"{seed:08d}.jpg"
    image.save(folder / name, quality=90)
    return {"image": name, "caption": f"photograph {seed} with shapes in {' and '.join(names)}"}


def prepared(folder: Path, train_file: Path, store: str, image_size: int) -> Path:
    """The data set that `scripts/prepare_data.py` makes of a source."""
    with written(folder) as new:
        if new is not None:
            flags = ["--sources", str(train_file), "--output_dir", str(new / "pairs"), "--store", store]
            prepare_data.main([*flags, "--image_size", str(image_size)])
    return folder / "pairs"


def tiny_pairs(folder: Path, count: int) -> Path:
    """A prepared data set of `count` pairs that share one image of 8 x 8 pixels."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "grey").save(buffer, "PNG")
    image, at_once = {"bytes": buffer.getvalue(), "path": None}, 2048
    starts = range(0, count, at_once)
    tables = (_tiny_table(range(start, min(count, start + at_once)), image) for start in starts)
    with written(folder) as new:
        if new is not None:
            write_split(tables, "train", new / "train", tqdm(disable=True))
            write_split(iter([_tiny_table(range(2), image)]), "validation", new / "validation", tqdm(disable=True))
            (new / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "validation"]}), encoding="utf-8")
            (new / "report.json").write_text(json.dumps({"format": PREPARED_FORMAT}), encoding="utf-8")
    return folder


def _tiny_table(places: range, image: dict[str, Any]) -> pa.Table:
    return pa.table(
        {
            "id": [f"image-{place:09d}" for place in places],
            "image": [image] * len(places),
            "captions": [[f"photograph {place}", f"the {place}th picture of all"] for place in places],
            "width": pa.array([8] * len(places), pa.int32()),
            "height": pa.array([8] * len(places), pa.int32()),
            "source": ["tiny"] * len(places),
            "image_hash": [f"{place:064x}" for place in places],
            "content_id": [f"{place:032x}" for place in places],
        }
    )


# -- the peers' formats -----------------------------------------------------------------------------------------------


def lmdb(folder: Path, contents: list[bytes]) -> None:
    """Number -> encoded image."""
    import lmdb

    size = 2 * sum(map(len, contents)) + 2**24
    with lmdb.open(str(folder), map_size=size) as environment, environment.begin(write=True) as transaction:
        for row, content in enumerate(contents):
            transaction.put(f"{row:08d}".encode(), content)


def memmap(folder: Path, images: list[np.ndarray]) -> None:
    """The pixels of all images in one file; where each begins and its shape in another."""
    with (folder / "pixels.bin").open("wb") as file:
        for image in images:
            file.write(image.tobytes())
    ends = np.cumsum([image.size for image in images])
    shapes = np.array([image.shape for image in images])
    np.save(folder / "index.npy", np.column_stack([ends - shapes.prod(1), shapes]))


def tar_shards(folder: Path, rows: datasets.Dataset, validation: datasets.Dataset) -> None:
    """Shards as WebDataset writes them, samples named by number; one of validation."""
    parts = {f"{part:06d}": rows.select(distributed.share(len(rows), part, SHARDS)) for part in range(SHARDS)}
    for name, part in {**parts, "validation": validation}.items():
        first = int(name) * len(rows) // SHARDS if name.isdecimal() else len(rows)
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for number, row in enumerate(part, first):
                sidecar = json.dumps({"image_id": row["id"]}).encode()
                members = {"jpg": row["image"]["bytes"], "txt": row["captions"][0].encode(), "json": sidecar}
                for suffix, content in members.items():
                    info = tarfile.TarInfo(f"{number:08d}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def litdata(folder: Path, contents: list[bytes]) -> None:
    """Write chunks of a size that makes them about as many as the others have shards."""
    from litdata import optimize

    optimize(
        fn=partial(_numbered, contents),
        inputs=list(range(len(contents))),
        output_dir=str(folder),
        chunk_size=-(-len(contents) // SHARDS),
        num_workers=1,
        start_method="fork",
    )


def _numbered(contents: list[bytes], row: int) -> dict[str, Any]:
    return {"row": row, "image": contents[row]}


def mosaic(folder: Path, contents: list[bytes]) -> None:
    """MDS shards."""
    from streaming import MDSWriter

    columns, limit = {"row": "int", "image": "bytes"}, sum(map(len, contents)) // SHARDS + 2**10
    with MDSWriter(out=str(folder), columns=columns, size_limit=limit) as sink:
        for row, content in enumerate(contents):
            sink.write({"row": row, "image": content})
