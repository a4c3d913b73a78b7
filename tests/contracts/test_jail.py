"""Whatever a data set names, no file outside of its folder is opened, and no server is asked."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_utils.data import paths
from mm_utils.data.arguments import DataArguments, PathArguments
from mm_utils.data.faults import Fault
from mm_utils.data.pairs import load_pairs
from mm_utils.data.paths import Jail, read_file
from mm_utils.data.rows import stored
from mm_utils.data.streams.stream import _find_urls
from tests.kit.corpora import labelled_of, task_of
from tests.kit.fault_images import draw, png
from tests.kit.reading import lines, read, write, write_tar

pytestmark = pytest.mark.usefixtures("own_cache")
FEATURES = Features({"image": Image(), "caption": Value("string"), "label": ClassLabel(names=["a", "b"])})


# -- paths --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """`root/inside.png` and `root/sub/deep.png`; beside it `secret.png`, and links that lead in and out."""
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "rooted").mkdir()
    for path in (root / "inside.png", root / "sub/deep.png", tmp_path / "secret.png", tmp_path / "rooted/a.png"):
        path.write_bytes(path.name.encode())
    for name, target in {
        "link_in.png": "sub/deep.png", "link_out.png": "../secret.png", "folder_out": "..", "folder_in": "sub",
        "loop.png": "loop.png", "dangling.png": "nowhere.png",
    }.items():  # fmt: skip
        (root / name).symlink_to(target)
    (tmp_path / "alias").symlink_to(root)
    os.mkfifo(root / "pipe.png")
    return root


def reason_of(action: Callable[[], Any]) -> str:
    with pytest.raises(Fault) as fault:
        action()
    return fault.value.reason


def test_files_below_the_root_are_found_and_others_if_that_is_allowed(root: Path) -> None:
    (root / os.fsdecode(b"caf\xe9.png")).write_bytes(b"x")
    for jail in (Jail(str(root)), Jail(str(root.parent / "alias"))):
        for name in ("./sub/../inside.png", "link_in.png", f"{root}/folder_in/deep.png", os.fsdecode(b"caf\xe9.png")):
            assert Path(jail.resolve(name)).read_bytes() == Path(root / name).read_bytes()
    for name in ("../secret.png", "link_out.png", "folder_out/secret.png", f"{root.parent}/secret.png"):
        assert reason_of(lambda name=name: Jail(str(root)).resolve(name)) == "outside_root"
        assert Path(Jail(str(root), allow_outside=True).resolve(name)).read_bytes() == b"secret.png"
    assert reason_of(lambda: Jail(str(root)).resolve("../rooted/a.png")) == "outside_root"


NAMES = ["..", ".", "sub", "inside.png", "deep.png", "secret.png", "folder_out", "folder_in", "root", "link_out.png"]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.sampled_from(NAMES), min_size=1, max_size=7), absolute=st.booleans())
def test_a_resolved_path_lies_below_the_root(root: Path, parts: list[str], absolute: bool) -> None:
    name = "/".join(parts)
    refused = ""
    path = ""
    try:
        path = Jail(str(root)).resolve(f"{root.parent}/{name}" if absolute else name)
    except Fault as fault:
        refused = fault.reason
    assert refused in ("", "outside_root", "image_missing", "not_a_file")
    assert refused or os.path.realpath(path).startswith(os.path.realpath(root) + os.sep)
    assert refused or os.path.isfile(path)


def test_a_file_is_read_within_limits_and_again_after_errors_that_pass(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "empty.png").touch()
    assert read_file(str(root / "inside.png"), 99, 2, 4) == b"side"
    for name, most, part, reason in [
        ("empty.png", 99, (), "image_empty"), ("absent.png", 99, (), "image_missing"),
        ("pipe.png", 99, (), "not_a_file"), ("sub", 99, (), "not_a_file"),
        ("inside.png", 9, (), "too_many_bytes"), ("inside.png", 99, (5, 10), "read_error"),
    ]:  # fmt: skip
        assert reason_of(lambda: read_file(str(root / name), most, *part)) == reason, name  # noqa: B023
    real = os.open
    calls = []

    def flaky(path, *args):
        calls.append(path)
        if len(calls) < 3:
            raise OSError(116, "Stale file handle")
        return real(path, *args)

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("os.open", flaky)
    assert read_file(str(root / "inside.png"), 99) == b"inside.png"
    calls.clear()
    monkeypatch.setattr(paths, "_PAUSES", ())
    assert reason_of(lambda: read_file(str(root / "inside.png"), 99)) == "read_error"


# -- data sets that anyone may publish -----------------------------------------------------------------------------------


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """Pictures and a table that are none of the data set's business."""
    folder = tmp_path / "private"
    rows = [f"{at}.png,my password is {at},{at % 2}\n" for at in range(30)]
    write(folder / "notes.csv", "image,caption,label\n" + "".join(rows))
    for at in range(30):
        (folder / f"{at}.png").write_bytes(png(draw(at)))
    table(["x.png"] * 30, [png(draw(0))] * 30).save_to_disk(folder / "saved")
    return folder


def table(paths: list[str], contents: list[bytes] | None = None) -> Dataset:
    cells = [{"bytes": contents and contents[at], "path": path} for at, path in enumerate(paths)]
    rows = {"image": cells, "caption": [f"word {at}" for at in range(30)], "label": [at % 2 for at in range(30)]}
    return Dataset.from_dict(rows, FEATURES)


def write_card(folder: Path) -> Path:
    config = {"config_name": "default", "data_files": "../private/notes.csv"}
    return write(folder / "README.md", f"---\nconfigs: {json.dumps([config])}\n---\n")


def write_state(folder: Path, private: Path, name: str) -> None:
    table(["x.png"] * 30, [png(draw(0))] * 30).save_to_disk(folder)
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"] = [{"filename": name.replace("PRIVATE", str(private / "saved/data-00000-of-00001.arrow"))}]
    write(folder / "state.json", json.dumps(state))


def write_parquet(folder: Path, private: Path) -> None:
    pq.write_table(table([str(private / f"{at}.png") for at in range(30)]).data.table, folder / "train.parquet")


WAYS = {  # what is written, and what the message says
    "Parquet": (write_parquet, "outside"),
    "a link": (lambda folder, private: (folder / "train.csv").symlink_to(private / "notes.csv"), "outside"),
    **{
        f"state.json: {name}": (
            lambda folder, private, name=name: write_state(folder, private, name),
            "state.json names",
        )
        for name in ("../private/saved/data-00000-of-00001.arrow", "PRIVATE", "/dev/zero")
    },
    "a split elsewhere": (
        lambda folder, _: write(folder / "dataset_dict.json", json.dumps({"splits": ["../private/saved"]})),
        "dataset_dict.json names",
    ),
    "HDF5, which links to other files": (
        lambda folder, _: (folder / "train.h5").write_bytes(b"\x89HDF\r\n\x1a\n"),
        "not recognised",
    ),
}


def read_all(name: str) -> None:
    """Raise the first fault if all rows are bad, as `prepare_data` does."""
    good, bad = read(name)
    if not good:
        raise ValueError(f"{name}; {bad[0].fault}")


DOORS = {
    "pretrain": lambda name: load_pairs(DataArguments(dataset_name=name)),
    "finetune": lambda name: task_of(dataset_name=name),
    "eval_zero_shot": lambda name: labelled_of(dataset_name=name),
    "prepare_data": read_all,
    "a stream": lambda name: _find_urls(DataArguments(dataset_name=name)),
}
CASES = [(way, "pretrain") for way in WAYS] + [(way, door) for way in [*WAYS][:2] for door in [*DOORS][1:-1]]


@pytest.mark.parametrize(("way", "door"), CASES)
def test_a_data_set_reads_no_file_outside_of_its_folder(way: str, door: str, private: Path, tmp_path: Path) -> None:
    folder = tmp_path / "published"
    (make, message) = WAYS[way]
    folder.mkdir()
    make(folder, private)
    with pytest.raises(ValueError, match=rf"^[^\n]*({message})[^\n]*$") as caught:
        DOORS[door](str(folder))
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("file", ["https://host.example/a.csv", "/private/notes.csv", "s3://b/a.csv"])
def test_a_set_of_the_hub_has_files_of_its_own_alone(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    builder = SimpleNamespace(config=SimpleNamespace(data_files={"train": ["hf://datasets/a/set/b.csv", file]}))
    monkeypatch.setattr(stored, "load_dataset_builder", lambda *_: builder)
    for flags in ({}, {"allow_outside_root": True}):
        with pytest.raises(
            ValueError, match=r"^--dataset_name is a/set; its data file .* is not in the data set[^\n]*$"
        ):
            load_pairs(DataArguments(dataset_name="a/set", **flags))


def test_files_of_the_folder_are_read_and_others_when_that_is_asked_for(private: Path, tmp_path: Path) -> None:
    """By relative and absolute paths, in Parquet without bytes, and with bytes beside paths elsewhere."""

    def count(folder, **flags):
        return sum(map(len, load_pairs(DataArguments(dataset_name=str(folder), **flags)).values()))

    write_card(private)  # which is not read
    (data := tmp_path / "private/data").mkdir()
    for root in ("", f"{private}/"):
        pq.write_table(table([f"{root}{at}.png" for at in range(30)]).data.table, data / "train.parquet")
        assert count(data, image_root=str(private)) == 30
    contents = [png(draw(at)) for at in range(30)]
    pq.write_table(table(["/elsewhere/x.png"] * 30, contents).data.table, data / "train.parquet")
    assert count(data) == len(labelled_of(dataset_name=str(data)).rows) == 30


@pytest.mark.parametrize("decoded", [False, True])
def test_a_look_alike_of_a_prepared_set_reads_no_file_elsewhere(decoded: bool, private: Path, tmp_path: Path) -> None:
    cells = [{"bytes": None, "path": str(private / f"{at}.png")} for at in range(30)]
    rows = {"id": list(map(str, range(30))), "image": cells, "captions": [["a"]] * 30, "content_id": ["x"] * 30}
    texts = {"id": Value("string"), "captions": [Value("string")], "content_id": Value("string")}
    features = Features({**texts, "image": Image(decode=decoded)})
    held = Dataset.from_dict(rows, features).data.table
    rows["image"] = [{"bytes": b"x", "path": None}] * 30
    DatasetDict(train=Dataset.from_dict(rows, features)).save_to_disk(tmp_path / "copy")
    [file] = (tmp_path / "copy").rglob("*.arrow")
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, held.schema) as writer:
        writer.write_table(held)
    write(tmp_path / "copy" / "report.json", '{"format": "tandem-pairs"}')
    with pytest.raises(ValueError, match="none of it" if decoded else "outside"):
        load_pairs(DataArguments(dataset_name=str(tmp_path / "copy")))


def test_links_in_a_folder_that_lead_out_are_refused(tmp_path: Path) -> None:
    """Captions, lists and archives as of images; a pipe is not waited for."""
    secret = write(tmp_path / "secret", "my password\n")
    inside = tmp_path / "images"
    write(inside / "c.txt", "a dog")
    for name in "abc":
        (inside / f"{name}.jpg").write_bytes(b"x")
    (inside / "a.txt").symlink_to(secret)
    os.mkfifo(inside / "b.txt")
    good, bad = read(inside)
    assert [record.captions for record in good] == [["a dog"]]
    assert sorted(row.fault.reason for row in bad) == ["not_a_file", "outside_root"]
    assert len(read(inside, PathArguments(allow_outside_root=True))[0]) == 2
    metadata = write(tmp_path / "metadata.jsonl", lines({"file_name": "a.jpg", "caption": "a"}))
    archive = write_tar(tmp_path / "b.tar", [("a.jpg", b"x"), ("a.txt", b"a")])
    for place, name, target in (("listed", "metadata.jsonl", metadata), ("shards", "a.tar", archive)):
        (tmp_path / place).mkdir()
        (tmp_path / place / name).symlink_to(target)
        with pytest.raises(ValueError, match=r"leads to .*, outside"):
            read(tmp_path / place)


# -- the network --------------------------------------------------------------------------------------------------------
