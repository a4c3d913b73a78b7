"""Every format is recognised and yields the same pairs."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, Image, Value, disable_progress_bars

from tests.kit.reading import PAIRS, check_format, joined, lines, read, write

disable_progress_bars()
ROWS = [{"image": name, "caption": text} for name, text in PAIRS]
FEATURES = Features({"image": Image(decode=False), "caption": Value("string")})


def embedded(folder: Path) -> Dataset:
    rows = [{"image": {"bytes": (folder / name).read_bytes()}, "caption": text} for name, text in PAIRS]
    return Dataset.from_list(rows, features=FEATURES)


def parquet_of_paths(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "p.parquet")
    return folder / "p.parquet"


def parquet_folder(folder: Path) -> Path:
    (folder / "parts").mkdir()
    for at, (name, text) in enumerate(PAIRS):
        rows = [{"image": (folder / name).read_bytes(), "caption": text}]
        pq.write_table(pa.Table.from_pylist(rows), folder / "parts" / f"train-{at}.parquet")
    return folder / "parts"


def parquet_of_structs(folder: Path) -> Path:
    pq.write_table(embedded(folder).data.table, folder / "p.parquet", row_group_size=2)
    return folder / "p.parquet"


def captions_beside(folder: Path) -> Path:
    for name, text in PAIRS:
        write(folder / name.replace("jpg", "txt"), f"{text}\n")
    return folder


def saved(folder: Path) -> Path:
    embedded(folder).save_to_disk(folder / "saved")
    return folder / "saved"


def local_repository(folder: Path) -> Path:
    write(folder / "repo" / "README.md", "A data set.")
    (folder / "repo" / "data").mkdir()
    embedded(folder).to_parquet(folder / "repo" / "data" / "train-00000-of-00001.parquet")
    return folder / "repo"


FILES = [  # their names, what is in them, and the format
    ("p.jsonl", lines(*ROWS), "jsonl"),
    ("p.json", json.dumps([{**row, "caption": [row["caption"]]} for row in ROWS]), "json"),
    ("p.csv", joined(",", "image,caption"), "csv"),
    ("p.tsv", joined("\t", "image\tcaption"), "tsv"),
    ("metadata.csv", joined(",", "file_name,text"), "csv"),
]
PLACES: list[tuple[Callable[[Path], Path], str]] = [
    *((parquet_of_paths, "parquet"), (parquet_folder, "parquet"), (parquet_of_structs, "parquet")),
    (lambda folder: write(folder / "metadata.csv", joined(",", "file_name,text")).parent, "imagefolder"),
    *((captions_beside, "imagefolder"), (saved, "datasets"), (local_repository, "datasets")),
]
EVERY = [
    *((lambda folder, name=name, text=text: write(folder / name, text), form) for name, text, form in FILES),
    *PLACES,
]


@pytest.mark.parametrize(("make", "expected"), EVERY)
def test_every_format_is_recognised_and_gives_the_same_pairs(
    folder: Path, make: Callable[[Path], Path], expected: str
) -> None:
    check_format(folder, make(folder), expected)


def test_a_folder_of_images_beside_their_list_points_at_the_list(folder: Path) -> None:
    write(folder / "set" / "README.txt", "about")
    write(folder / "set" / "captions.jsonl", lines({"image": "images/a.jpg", "caption": "a"}))
    (folder / "set" / "images").mkdir()
    (folder / "a.jpg").rename(folder / "set" / "images" / "a.jpg")
    with pytest.raises(ValueError, match=r"holds images and captions\.jsonl, .* Give .*captions\.jsonl as the source"):
        read(folder / "set")
    assert len(read(folder / "set", format="classes")[0]) == 1
    assert len(read(folder / "set" / "captions.jsonl")[0]) == 1


@pytest.mark.parametrize(
    ("path", "form", "message"),
    [
        *((path, "", "there is no ") for path in ("absent.jsonl", "absent.tar", "absent/folder")),
        ("absent.json", "coco", "there is no such file"),
        ("p.xlsx", "", r"its format is not known by '\.xlsx'"),
        (".", "", "the format of this folder is not recognised"),
    ],
)
def test_a_place_that_is_not_there_or_not_known_is_an_error(
    path: str, form: str, message: str, folder: Path, tmp_path: Path
) -> None:
    if path == "p.xlsx":
        write(folder / path, "?")
    with pytest.raises(ValueError, match=message):
        read(folder / path, **({"format": form} if form else {}))
