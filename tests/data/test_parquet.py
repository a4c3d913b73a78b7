"""A Parquet file takes memory and time that its size on disk bounds."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mm_utils.data import parquet
from mm_utils.data.faults import Fault
from mm_utils.data.pairs import load_pairs
from mm_utils.data.parquet import ParquetRows, check_files
from mm_utils.data.paths import Limits
from mm_utils.data.rows.records import CellImage
from mm_utils.data.rows.source import DataArguments, PathArguments
from tests.kit.finetuning import task_of
from tests.kit.reading import read

DOORS = {
    "pretrain": lambda path: load_pairs(DataArguments(train_file=str(path))),
    "a folder": lambda path: load_pairs(DataArguments(dataset_name=str(path.parent))),
    "finetune": lambda path: task_of(train_file=str(path)),
    "prepare_data": lambda path: read(path, PathArguments()),
}


def write_bomb(path: Path, rows: int, letters: int) -> Path:
    """One caption again and again, which a dictionary and a compressor make small."""
    places = pa.array([0] * rows, pa.int32())
    cells = {"image": "a.png", "caption": "x" * letters, "label": "x"}
    columns = {name: pa.DictionaryArray.from_arrays(places, pa.array([cell])) for name, cell in cells.items()}
    pq.write_table(pa.table(columns), path, compression="zstd", store_schema=False)
    return path


@pytest.mark.parametrize("door", DOORS)
def test_more_rows_than_a_file_can_hold_are_refused(door: str, tmp_path: Path) -> None:
    path = write_bomb(tmp_path / "p.parquet", rows=300_000, letters=3)
    assert path.stat().st_size < 100_000
    with pytest.raises(ValueError, match=r"^[^\n]*p\.parquet[^\n]* has 300,000 rows in [^\n]* bytes"):
        DOORS[door](path)


def test_captions_that_decode_to_much_more_than_the_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_ALLOWED", 1 << 20)
    path = write_bomb(tmp_path / "p.parquet", rows=200, letters=20_000)
    with pytest.raises(ValueError, match=r"p\.parquet decodes to more than .* bytes, 100 times its size"):
        read(path)


def test_one_large_cell_makes_batches_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_ALLOWED", 4 << 20)
    monkeypatch.setattr(parquet, "_BATCH_BYTES", 12 << 20)
    path = write_bomb(tmp_path / "p.parquet", rows=1000, letters=1 << 20)
    batches = ParquetRows(str(path), "p").batches(0, ["caption"], 1000)
    assert len(next(batches)) <= 16
    with pytest.raises(ValueError, match="decodes to more than"):
        read(path)


def test_an_image_that_decodes_to_much_more_than_the_file_is_a_fault(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [bytes(100 << 20)]}), tmp_path / "p.parquet", compression="zstd")
    with pytest.raises(Fault, match="decodes to more than"):
        CellImage("p", str(tmp_path / "p.parquet"), 0, "image").read(Limits())


def test_honest_files_are_read_whole(tmp_path: Path) -> None:
    rows = [{"n": at, "caption": f"a dog and {at} cats"} for at in range(30_000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet", row_group_size=7000)
    check_files([str(tmp_path / "p.parquet")])
    found = ParquetRows(str(tmp_path / "p.parquet"), "p").cells(["n", "caption"], 1000, first=6999)
    assert list(found) == rows[6999:]


def test_a_column_twice_is_an_error(tmp_path: Path) -> None:
    table = pa.table([["a"], ["b"], ["c"]], names=["image", "caption", "caption"])
    pq.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(ValueError, match="has two columns caption; only one can be read"):
        read(tmp_path / "p.parquet")
