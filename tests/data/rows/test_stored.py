"""A data set that anyone may publish opens no file outside of its folder, and asks no server."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value

from mm_utils.data.pairs import load_pairs
from mm_utils.data.rows.source import DataArguments, PathArguments
from mm_utils.data.streams.stream import _find_urls
from tests.kit.fault_images import draw, png
from tests.kit.finetuning import labelled_of, task_of
from tests.kit.reading import NAMES, lines, read, write, write_tar
from tests.kit.recording_server import RecordingServer, recording

FEATURES = Features({"image": Image(), "caption": Value("string"), "label": ClassLabel(names=["a", "b"])})


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Pictures and a table that are none of the data set's business."""
    folder = tmp_path / "private"
    rows = [f"{at}.png,my password is {at},{at % 2}\n" for at in range(30)]
    write(folder / "notes.csv", "image,caption,label\n" + "".join(rows))
    for at in range(30):
        (folder / f"{at}.png").write_bytes(png(draw(at)))
    return folder


def table(paths: list[str], contents: list[bytes] | None = None) -> Dataset:
    cells = [{"bytes": contents and contents[at], "path": path} for at, path in enumerate(paths)]
    rows = {"image": cells, "caption": [f"word {at}" for at in range(30)], "label": [at % 2 for at in range(30)]}
    return Dataset.from_dict(rows, FEATURES)


def of_parquet(folder: Path, private: Path) -> str:
    """a column of images in Parquet"""
    pq.write_table(table([str(private / f"{at}.png") for at in range(30)]).data.table, folder / "train.parquet")
    return "outside"


def of_card(key: str, value: Any) -> Callable[[Path, Path], str]:
    def make(folder: Path, private: Path) -> str:
        write(folder / "x.csv", "image,caption,label\na,b,0\n")
        named = json.dumps(value).replace("PRIVATE", str(private))
        config = {"config_name": "default", "data_files": "*.csv", key: json.loads(named)}
        write(folder / "README.md", f"---\nconfigs: {json.dumps([config])}\n---\n")
        return "README.md names the data_"

    make.__doc__ = f"{key}: {value} in the card"
    return make


def of_yaml(folder: Path, private: Path) -> str:
    """.huggingface.yaml"""
    write(folder / "x.csv", "image,caption,label\na,b,0\n")
    write(folder / ".huggingface.yaml", "configs:\n- config_name: default\n  data_files: ../private/notes.csv\n")
    return "huggingface.yaml names the data_files"


def of_link(folder: Path, private: Path) -> str:
    """a link in the place of a data file"""
    (folder / "train.csv").symlink_to(private / "notes.csv")
    return "outside"


def of_state(name: str) -> Callable[[Path, Path], str]:
    def make(folder: Path, private: Path) -> str:
        table(["x.png"] * 30, [png(draw(0))] * 30).save_to_disk(private / "saved")
        [file] = (private / "saved").glob("*.arrow")
        table(["x.png"] * 30, [png(draw(0))] * 30).save_to_disk(folder)
        state = json.loads((folder / "state.json").read_text())
        state["_data_files"] = [{"filename": name.replace("PRIVATE", str(file))}]
        write(folder / "state.json", json.dumps(state))
        return "state.json names"

    make.__doc__ = f"state.json: {name}"
    return make


def of_splits(folder: Path, private: Path) -> str:
    """a split elsewhere"""
    table(["x.png"] * 30, [png(draw(0))] * 30).save_to_disk(private / "saved")
    write(folder / "dataset_dict.json", json.dumps({"splits": ["../private/saved"]}))
    return "dataset_dict.json names"


def of_hdf5(folder: Path, private: Path) -> str:
    """HDF5, which links to other files"""
    (folder / "train.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
    return "hdf5|could not be loaded|not recognised"


WAYS = [
    of_parquet,
    of_card("data_files", "../private/notes.csv"),
    of_card("data_files", "PRIVATE/notes.csv"),
    of_card("data_files", [{"split": "train", "path": ["*.csv", "sub/../../private/*.csv"]}]),
    of_card("data_dir", "PRIVATE"),
    of_card("data_dir", "../private"),
    of_card("data_files", "zip://notes.csv::../private/a.zip"),
    of_card("data_files", "file:PRIVATE/notes.csv"),
    of_yaml,
    of_link,
    of_state("../private/saved/data-00000-of-00001.arrow"),
    of_state("PRIVATE"),
    of_state("/dev/zero"),
    of_splits,
    of_hdf5,
]
DOORS: dict[str, Callable[[str], Any]] = {
    "pretrain": lambda name: load_pairs(DataArguments(dataset_name=name)),
    "finetune": lambda name: task_of(dataset_name=name),
    "eval_zero_shot": lambda name: labelled_of(dataset_name=name),
    "prepare_data": lambda name: read_all(name),
}


def read_all(name: str) -> None:
    """Raise the first fault if all rows are bad, as `prepare_data` does."""
    good, bad = read(name, format="datasets")
    if not good:
        raise ValueError(f"{name}; {bad[0].fault}")


@pytest.mark.parametrize(
    ("way", "door"),
    [*((way, "pretrain") for way in WAYS), *((way, door) for way in WAYS[:2] for door in [*DOORS][1:])],
    ids=lambda value: getattr(value, "__doc__", value) if callable(value) else value,
)
def test_a_data_set_reads_no_file_outside_of_its_folder(
    way: Callable[[Path, Path], str], door: str, private: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "published"
    folder.mkdir()
    message = way(folder, private)
    with pytest.raises(ValueError, match=rf"^[^\n]*({message})[^\n]*$") as caught:
        DOORS[door](str(folder))
    assert str(folder) in str(caught.value)


def test_outside_files_are_read_when_that_is_asked_for(private: Path, tmp_path: Path) -> None:
    folder = tmp_path / "published"
    folder.mkdir()
    of_card("data_files", "../private/notes.csv")(folder, private)
    args = DataArguments(dataset_name=str(folder), image_root=str(private), allow_outside_root=True)
    assert sum(map(len, load_pairs(args).values())) == 30


@pytest.fixture
def server(private: Path) -> Iterator[RecordingServer]:
    with recording((private / "notes.csv").read_bytes()) as server:
        yield server


@pytest.mark.parametrize("door", [*DOORS, "a stream"])
@pytest.mark.parametrize("outside", [False, True])
def test_a_data_set_asks_no_server(
    door: str, outside: bool, server: RecordingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    address = f"http://127.0.0.1:{server.server_address[1]}/latest/meta-data/x.csv"
    folder = tmp_path / "published"
    of_card("data_files", address)(folder, tmp_path)
    name = str(folder)
    if door == "a stream" or outside:
        args = DataArguments(dataset_name=name, allow_outside_root=outside)
        with pytest.raises(ValueError, match="an address"):
            _find_urls(args) if door == "a stream" else load_pairs(args)
    else:
        with pytest.raises(ValueError, match=r"README\.md names the data_files http.*an address\. Download the file"):
            DOORS[door](name)
    assert server.asked == []


def test_files_of_the_folder_are_read(private: Path, tmp_path: Path) -> None:
    """By relative and absolute paths, by its card, in Parquet without bytes, and with bytes beside paths elsewhere."""
    of_card("data_files", "notes.csv")(private, private)
    (private / "x.csv").unlink()
    assert sum(map(len, load_pairs(DataArguments(dataset_name=str(private))).values())) == 30
    for name in ("notes.csv", "README.md"):
        (private / name).unlink()
    (private / "data").mkdir()
    for root in ("", f"{private}/"):
        pq.write_table(table([f"{root}{at}.png" for at in range(30)]).data.table, private / "data" / "train.parquet")
        pairs = load_pairs(DataArguments(dataset_name=str(private / "data"), image_root=str(private)))
        assert sum(map(len, pairs.values())) == 30
    contents = [png(draw(at)) for at in range(30)]
    pq.write_table(table(["/elsewhere/x.png"] * 30, contents).data.table, private / "data" / "train.parquet")
    assert sum(map(len, load_pairs(DataArguments(dataset_name=str(private / "data"))).values())) == 30
    assert len(labelled_of(dataset_name=str(private / "data")).rows) == 30


def test_images_of_labelled_rows_lie_below_the_root(private: Path, tmp_path: Path) -> None:
    """In a table of both kinds, rows without bytes are resolved, and refused outside."""
    contents: list[Any] = [png(draw(at)) if at % 3 else None for at in range(30)]
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "0.png").write_bytes(png(draw(0)))
    pq.write_table(
        table(
            ["0.png", *(f"{private}/{at}.png" if at % 3 == 0 else f"/gone/{at}.png" for at in range(1, 30))], contents
        ).data.table,
        folder / "a.parquet",
    )
    task = task_of(train_file=str(folder / "a.parquet"))
    rows = [row["image"] for split in task.splits.values() for row in split]
    assert len(rows) == 21
    assert [row["path"] for row in rows if row["bytes"] is None] == [str(folder / "0.png")]
    everything = task_of(train_file=str(folder / "a.parquet"), allow_outside_root=True)
    assert sum(map(len, everything.splits.values())) == 30


@pytest.mark.parametrize("decoded", [False, True])
def test_a_look_alike_of_a_prepared_set_reads_no_file_elsewhere(decoded: bool, private: Path, tmp_path: Path) -> None:
    cells = [{"bytes": None, "path": str(private / f"{at}.png")} for at in range(30)]
    rows = {"id": list(map(str, range(30))), "image": cells, "captions": [["a"]] * 30, "content_id": ["x"] * 30}
    features = Features(
        {
            "id": Value("string"),
            "image": Image(decode=decoded),
            "captions": [Value("string")],
            "content_id": Value("string"),
        }
    )
    table = Dataset.from_dict(rows, features).data.table
    rows["image"] = [{"bytes": b"x", "path": None}] * 30
    DatasetDict(train=Dataset.from_dict(rows, features)).save_to_disk(tmp_path / "copy")
    [file] = (tmp_path / "copy").rglob("*.arrow")
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    write(tmp_path / "copy" / "report.json", '{"format": "tandem-pairs"}')
    args = DataArguments(dataset_name=str(tmp_path / "copy"))
    with pytest.raises(ValueError, match="none of it" if decoded else "outside"):
        load_pairs(args)
    outside = DataArguments(dataset_name=str(tmp_path / "copy"), allow_outside_root=True)
    if not decoded:
        assert sum(map(len, load_pairs(outside).values())) == 30


def test_links_in_a_folder_that_lead_out_are_refused(folder: Path, tmp_path: Path) -> None:
    """Captions, lists and archives as of images; a pipe is not waited for."""
    secret = write(tmp_path / "secret", "my password\n")
    inside = tmp_path / "images"
    inside.mkdir()
    for name in NAMES:
        (inside / name).write_bytes(b"x")
    (inside / "a.txt").symlink_to(secret)
    os.mkfifo(inside / "b.txt")
    write(inside / "c.txt", "a dog")
    good, bad = read(inside)
    assert [record.captions for record in good] == [["a dog"]]
    assert sorted(row.fault.reason for row in bad) == ["not_a_file", "outside_root"]
    assert len(read(inside, PathArguments(allow_outside_root=True))[0]) == 2
    listed = tmp_path / "listed"
    write(tmp_path / "metadata.jsonl", lines({"file_name": "a.jpg", "caption": "a"}))
    listed.mkdir()
    (listed / "metadata.jsonl").symlink_to(tmp_path / "metadata.jsonl")
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "a.tar").symlink_to(write_tar(tmp_path / "b.tar", [("a.jpg", b"x"), ("a.txt", b"a")]))
    for place in (listed, shards):
        with pytest.raises(ValueError, match=r"leads to .*, outside"):
            read(place)
