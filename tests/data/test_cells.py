"""Cells are what `datasets` gives, of tables of any making, and images are views of the file."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, Features, Value, concatenate_datasets

from mm_utils.data.cells import Cells

FEATURES = Features(
    {
        "id": Value("string"),
        "image": datasets.Image(decode=False),
        "captions": datasets.List(Value("string")),
        "image_key": Value("int64"),
    }
)


def table(count: int = 30, start: int = 0) -> Dataset:
    """Some images without bytes, without a path, or missing altogether."""
    images: list[Any] = [
        {"bytes": bytes([place % 256]) * (place % 7), "path": f"{place}.png" if place % 3 else None}
        for place in range(start, start + count)
    ]
    images[4], images[5] = {"bytes": None, "path": None}, None
    columns = {
        "id": [f"id-{place}" for place in range(start, start + count)],
        "image": images,
        "captions": [[f"caption {place}"] * (place % 4) for place in range(start, start + count)],
        "image_key": list(range(start, start + count)),
    }
    return Dataset(pa.Table.from_pydict(columns, schema=FEATURES.arrow_schema))


def chunked() -> Dataset:
    return concatenate_datasets([table(7, 10 * part) for part in range(5)])


def beside() -> Dataset:
    return concatenate_datasets([table(), Dataset.from_dict({"more": [[place, 1] for place in range(30)]})], axis=1)


MAKINGS: dict[str, Callable[[], Dataset]] = {
    "in one piece": table,
    "in chunks": chunked,
    "with columns beside": beside,
    "shuffled": lambda: chunked().shuffle(seed=3),
    "a part": lambda: chunked().select(range(6, 30)),
    "picked": lambda: chunked().select([30, 2, 2, 19]),
    "picked with columns beside": lambda: beside().select([11, 4, 5, 3]),
    "without a column": lambda: table().remove_columns("captions"),
}


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("making", MAKINGS)
def test_cells_are_what_the_rows_hold(making: str, saved: bool, tmp_path: Path) -> None:
    rows = MAKINGS[making]()
    if saved:
        kept = [place for place, row in enumerate(rows) if row["image"] and row["image"]["bytes"] is not None]
        rows.select(kept).save_to_disk(tmp_path / "rows", num_shards=min(3, len(kept)))
        rows = datasets.load_from_disk(str(tmp_path / "rows"))
    for cells in (Cells(rows), pickle.loads(pickle.dumps(Cells(rows)))):
        assert len(cells) == len(rows)
        for place, row in enumerate(rows):
            for name in rows.column_names:
                if name != "image":
                    assert cells.value(name, place) == cells.cell(name, place).as_py() == row[name]
            found, expected = cells.image(place), row["image"] or {"bytes": None, "path": None}
            assert found["path"] == expected["path"]
            assert (found["bytes"] is None) == (expected["bytes"] is None)
            assert bytes(found["bytes"] or b"") == (expected["bytes"] or b"")
        assert cells.value("no such column", 0) is None


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()])
def test_images_of_any_binary_type(kind: pa.DataType) -> None:
    contents = [b"abc", b"", b"defghijklmnopqrstuvw", None]
    images = pa.StructArray.from_arrays([pa.array(contents, kind), pa.nulls(4, pa.string())], ["bytes", "path"])
    rows = Dataset.from_dict({"id": list("abcd")})
    cells = Cells(rows)
    cells._columns["image"], cells._starts = pa.chunked_array([images[:1], images[1:]]), np.array([0, 1])
    found = [cells.image(place)["bytes"] for place in range(4)]
    assert [None if one is None else bytes(one) for one in found] == contents


def test_images_are_views_and_pickles_are_small(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(1_000_000)
    Dataset.from_list([{"image": {"bytes": content, "path": None}}]).save_to_disk(str(tmp_path / "rows"))
    cells = Cells(datasets.load_from_disk(str(tmp_path / "rows")))
    before = pa.total_allocated_bytes()
    view = cells.image(0)["bytes"]
    assert view == pa.py_buffer(content)
    assert view.address == cells.image(0)["bytes"].address
    assert pa.total_allocated_bytes() - before < 1000
    assert len(pickle.dumps(cells)) < 100_000
