"""Small shards whose images and captions name the same number, for the tests of streaming."""

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import fsspec
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


def in_memory(folder: Path) -> str:
    """The address of the files of a folder on a server, which is the memory of this process."""
    fsspec.filesystem("memory").put(f"{folder}/", f"/{folder.name}/", recursive=True)
    return f"memory://{folder.name}"


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
