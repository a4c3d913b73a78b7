"""Every format gives its records and names its bad rows; what belongs together is found by key."""

import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, Features, Image, Sequence, Value, disable_progress_bars
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_utils.data.raw.faults import Fault
from mm_utils.data.raw.formats import FORMATS, Source, detect, read_source
from mm_utils.data.raw.paths import Limits, PathArguments
from mm_utils.data.raw.records import BadRow, BytesImage, FileImage, Record, UrlImage

SAFE = PathArguments()
NAMES = ["a.jpg", "b.jpg", "c.jpg"]
disable_progress_bars()


@pytest.fixture(autouse=True)
def offline_and_own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`a.jpg`, `b.jpg` and `c.jpg`, of which nothing is decoded here."""
    for name in NAMES:
        (tmp_path / name).write_bytes(f"bytes of {name}".encode())
    return tmp_path


def read(path: Path | str, safety: PathArguments = SAFE, **fields: Any) -> tuple[list[Record], list[BadRow]]:
    items = list(read_source(Source(str(path), **fields), safety))
    return [item for item in items if isinstance(item, Record)], [item for item in items if isinstance(item, BadRow)]


def reasons(bad: list[BadRow]) -> list[tuple[str, str]]:
    return [(row.where, row.fault.reason) for row in bad]


def content(record: Record) -> bytes:
    return pickle.loads(pickle.dumps(record)).image.read(Limits())


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def lines(*rows: Any) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


# One source in every format: the same three images with the same captions


def jsonl(folder: Path) -> Path:
    return write(folder / "p.jsonl", lines(*({"image": name, "caption": f"about {name}"} for name in NAMES)))


def json_array(folder: Path) -> Path:
    return write(folder / "p.json", json.dumps([{"image": name, "caption": [f"about {name}"]} for name in NAMES]))


def csv_file(folder: Path) -> Path:
    return write(folder / "p.csv", lines("image,caption", *(f"{name},about {name}" for name in NAMES)))


def tsv_file(folder: Path) -> Path:
    return write(folder / "p.tsv", lines("image\tcaption", *(f"{name}\tabout {name}" for name in NAMES)))


def parquet_of_paths(folder: Path) -> Path:
    rows = [{"image": name, "caption": f"about {name}"} for name in NAMES]
    pq.write_table(pa.Table.from_pylist(rows), folder / "p.parquet")
    return folder / "p.parquet"


def parquet_folder(folder: Path) -> Path:
    (folder / "parts").mkdir()
    for at, name in enumerate(NAMES):
        rows = [{"image": (folder / name).read_bytes(), "caption": f"about {name}"}]
        pq.write_table(pa.Table.from_pylist(rows), folder / "parts" / f"train-{at}.parquet")
    return folder / "parts"


def parquet_of_structs(folder: Path) -> Path:
    rows = [
        {"image": {"bytes": (folder / name).read_bytes(), "path": None}, "caption": f"about {name}"} for name in NAMES
    ]
    schema = pa.schema(
        [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("caption", pa.string())]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / "p.parquet", row_group_size=2)
    return folder / "p.parquet"


def image_folder(folder: Path) -> Path:
    write(folder / "metadata.csv", lines("file_name,text", *(f"{name},about {name}" for name in NAMES)))
    return folder


def captions_beside(folder: Path) -> Path:
    for name in NAMES:
        write(folder / name.replace("jpg", "txt"), f"about {name}\n")
    return folder


def two_lists(folder: Path) -> Source:
    write(folder / "images.txt", lines(*NAMES))
    write(folder / "captions.txt", lines(*(f"{name[0]}\tabout {name}" for name in reversed(NAMES))))
    return Source(str(folder / "images.txt"), captions=str(folder / "captions.txt"))


def two_folders(folder: Path) -> Path:
    for name in NAMES:
        write(folder / "set" / "captions" / name.replace("jpg", "txt"), f"about {name}")
        (folder / "set" / "images").mkdir(exist_ok=True)
        (folder / name).rename(folder / "set" / "images" / name)
    return folder / "set"


def coco(folder: Path) -> Path:
    images = [{"id": at, "file_name": name} for at, name in enumerate(NAMES)]
    annotations = [{"id": 9 - at, "image_id": at, "caption": f"about {name}"} for at, name in enumerate(NAMES)]
    return write(
        folder / "captions_train2017.json",
        json.dumps({"info": {}, "images": images, "annotations": annotations[::-1]}),
    )


def karpathy(folder: Path) -> Path:
    images = [{"filename": name, "sentences": [{"raw": f"about {name}"}], "split": "train"} for name in NAMES]
    return write(folder / "dataset_coco.json", json.dumps({"images": images, "dataset": "coco"}))


def flickr_tokens(folder: Path) -> Path:
    return write(folder / "results.token", lines(*(f"{name}#0\tabout {name}" for name in NAMES)))


def flickr_commas(folder: Path) -> Path:
    return write(folder / "captions.txt", lines("image,caption", *(f"{name},about {name}" for name in NAMES)))


def flickr_pipes(folder: Path) -> Path:
    header = "image_name| comment_number| comment"
    return write(folder / "results.csv", lines(header, *(f"{name}| 0| about {name}" for name in NAMES)))


def saved(folder: Path) -> Path:
    rows = [{"image": {"bytes": (folder / name).read_bytes()}, "caption": f"about {name}"} for name in NAMES]
    features = Features({"image": Image(decode=False), "caption": Value("string")})
    Dataset.from_list(rows, features=features).save_to_disk(folder / "saved")
    return folder / "saved"


def local_repository(folder: Path) -> Path:
    rows = [{"image": {"bytes": (folder / name).read_bytes()}, "caption": f"about {name}"} for name in NAMES]
    features = Features({"image": Image(decode=False), "caption": Value("string")})
    (folder / "repo" / "data").mkdir(parents=True)
    Dataset.from_list(rows, features=features).to_parquet(folder / "repo" / "data" / "train-00000-of-00001.parquet")
    write(folder / "repo" / "README.md", "A data set.")
    return folder / "repo"


EVERY = [
    *((jsonl, "jsonl"), (json_array, "json"), (csv_file, "csv"), (tsv_file, "tsv"), (parquet_of_paths, "parquet")),
    *((parquet_folder, "parquet"), (parquet_of_structs, "parquet"), (image_folder, "imagefolder")),
    *((captions_beside, "imagefolder"), (two_lists, "parallel"), (two_folders, "parallel"), (coco, "coco")),
    *((karpathy, "karpathy"), (flickr_tokens, "flickr"), (flickr_commas, "flickr"), (flickr_pipes, "flickr")),
    *((saved, "datasets"), (local_repository, "datasets")),
]


@pytest.mark.parametrize(("make", "expected"), EVERY, ids=lambda value: getattr(value, "__name__", None))
def test_every_format_is_recognised_and_gives_the_same_pairs(
    folder: Path, make: Callable[[Path], Path | Source], expected: str
) -> None:
    made = make(folder)
    source = made if isinstance(made, Source) else Source(str(made))
    assert detect(source) == expected
    items = list(read_source(source, SAFE))
    records = [item for item in items if isinstance(item, Record)]
    assert len(records) == len(items) == len(NAMES)
    assert {content(record): record.captions for record in records} == {
        f"bytes of {name}".encode(): [f"about {name}"] for name in NAMES
    }
    assert len({record.where for record in records}) == len(NAMES)
    assert {record.source for record in records} == {source.name}


def test_the_table_of_formats_is_complete() -> None:
    assert {name for _, name in EVERY} | {"classes", "webdataset"} == set(FORMATS)


# Tables


BAD_LINES = [
    ("{broken", "malformed_row"),
    ('["a.jpg", "a caption"]', "not_an_object"),
    ('{"image": "a.jpg", "caption": "a", "caption": "b"}', "duplicate_key"),
    ('{"caption": "a"}', "missing_column"),
    ('{"image": "a.jpg"}', "missing_column"),
    ('{"image": "a.jpg", "caption": ["a", "b"], "languages": ["en"]}', "languages_mismatch"),
    ('{"image": "a.jpg", "caption": "a", "split": "challenge"}', "unknown_split"),
    ('{"image": "absent.jpg", "caption": "a"}', "image_missing"),
    ('{"image": "", "caption": "a"}', "image_empty"),
    ('{"image": 5, "caption": "a"}', "bad_path"),
    ('{"image": "../a.jpg", "caption": "a"}', "outside_root"),
    ('{"image": "/etc/hostname", "caption": "a"}', "outside_root"),
    ('{"image": ".", "caption": "a"}', "not_a_file"),
    ('{"image": "http://127.0.0.1/a.jpg", "caption": "a"}', "url_not_allowed"),
    ('{"image": "file:///etc/passwd", "caption": "a"}', "url_not_allowed"),
    ('{"image": "pipe:touch canary", "caption": "a"}', "url_not_allowed"),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES)
def test_a_bad_line_is_a_bad_row_with_its_number_reason_and_text(folder: Path, line: str, reason: str) -> None:
    ok = {"image": "a.jpg", "caption": "fine"}
    good, bad = read(write(folder / "p.jsonl", lines(ok, "", line, ok)), name="mine")
    assert [record.where for record in good] == ["line 1", "line 4"]
    assert reasons(bad) == [("line 3", reason)]
    assert bad[0].source == "mine"
    assert 0 < len(bad[0].raw) <= 200


def test_a_csv_row_with_too_many_cells_is_bad(folder: Path) -> None:
    good, bad = read(write(folder / "p.csv", "image,caption\na.jpg,a dog, a cat\nb.jpg,fine\nc.jpg\n"))
    assert reasons(bad) == [("line 2", "malformed_row")]
    assert [record.captions for record in good] == [["fine"], [None]]


def test_captions_are_given_as_they_are(folder: Path) -> None:
    values = ["", None, float("nan"), 5, {"a": 1}, ["a", None], "half \ud83d", []]
    good, bad = read(write(folder / "p.jsonl", lines(*({"image": "a.jpg", "caption": value} for value in values))))
    assert not bad
    expected = [value if isinstance(value, list) else [value] for value in values]
    assert repr([record.captions for record in good]) == repr(expected)


def test_columns_languages_ids_regions_and_splits_are_read(folder: Path) -> None:
    rows = [
        {"i": "a.jpg", "c": ["one", "eins"], "l": ["en", "de"], "n": 2**70, "split": "val", "regions": [1]},
        {"i": "b.jpg", "c": "zwei", "l": "de", "n": "x", "split": "restval"},
        {"i": "c.jpg", "c": "x", "l": None, "n": None},
    ]
    path = write(folder / "p.jsonl", lines(*rows))
    good, bad = read(path, image_column="i", caption_column="c", id_column="n", language_column="l")
    assert [(row.id, row.languages, row.split, row.regions) for row in good] == [
        (str(2**70), ["en", "de"], "validation", [1]),
        ("x", ["de"], "train", None),
    ]
    assert reasons(bad) == [("line 3", "missing_column")]
    good, _ = read(path, image_column="i", caption_column="c", language="vi", split="test")
    assert [(row.id, row.languages, row.split) for row in good][::2] == [
        ("a.jpg", ["vi", "vi"], "test"),
        ("c.jpg", ["vi"], "test"),
    ]


def test_a_column_that_is_not_there_is_an_error(folder: Path) -> None:
    path = jsonl(folder)
    with pytest.raises(
        ValueError, match=r"--caption_column is captoin; there is no such column .*p\.jsonl.*'caption'"
    ):
        read(path, caption_column="captoin")
    with pytest.raises(ValueError, match=r"no caption column was recognised"):
        read(write(folder / "q.jsonl", lines({"image": "a.jpg"})))


def test_the_root_may_be_elsewhere_and_may_be_left_when_allowed(folder: Path) -> None:
    path = write(folder / "lists" / "p.jsonl", lines({"image": "../a.jpg", "caption": "a"}))
    assert reasons(read(path)[1]) == [("line 1", "outside_root")]
    assert len(read(path, PathArguments(allow_outside_root=True))[0]) == 1
    inside = write(folder / "lists" / "q.jsonl", lines({"image": "a.jpg", "caption": "a"}))
    assert read(inside, image_root=str(folder))[0][0].image == FileImage(str(folder / "a.jpg"))
    assert read(inside, PathArguments(image_root=str(folder)))[0][0].id == "a.jpg"
    with pytest.raises(ValueError, match="image_root absent is no folder"):
        read(inside, image_root="absent")


def test_an_address_is_a_reference_only_where_downloads_are_allowed(folder: Path) -> None:
    path = write(folder / "p.jsonl", lines({"image": "https://a.example/b.jpg", "caption": "a"}))
    good, _ = read(path, PathArguments(allow_download=True))
    assert good[0].image == UrlImage("https://a.example/b.jpg")
    assert good[0].id == "https://a.example/b.jpg"


def test_parquet_rows_are_read_in_any_order_and_empty_ones_are_faults(folder: Path) -> None:
    data = [f"image {at}".encode() for at in range(150)]
    rows: list[dict[str, Any]] = [{"image": item, "caption": "a"} for item in data]
    rows[7]["image"], rows[8]["image"] = b"", None
    pq.write_table(pa.Table.from_pylist(rows), folder / "p.parquet", row_group_size=70)
    good, _ = read(folder / "p.parquet")
    order = random.Random(0).sample([at for at in range(150) if at not in (7, 8)], 60)
    assert [content(good[at]) for at in order] == [data[at] for at in order]
    for at in (7, 8):
        with pytest.raises(Fault) as fault:
            good[at].image.read(Limits())
        assert fault.value.reason == "image_empty"
    with pytest.raises(Fault) as fault:
        good[9].image.read(Limits(max_bytes=3))
    assert fault.value.reason == "too_many_bytes"
    (folder / "q.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="cannot be read as Parquet"):
        read(folder / "q.parquet")


def test_a_parquet_struct_of_paths_alone_is_paths(folder: Path) -> None:
    rows = [{"image": {"bytes": None, "path": name}, "caption": "a"} for name in [*NAMES, "/etc/hostname"]]
    schema = pa.schema(
        [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("caption", pa.string())]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / "p.parquet")
    good, bad = read(folder / "p.parquet")
    assert [record.id for record in good] == NAMES
    assert reasons(bad) == [("row 3", "outside_root")]


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_saved_data_set_is_read_from_its_files(folder: Path, shuffled: bool) -> None:
    rows = [{"image": {"bytes": f"image {at}".encode()}, "captions": [f"{at}"]} for at in range(40)]
    features = Features({"image": Image(decode=False), "captions": Sequence(Value("string"))})
    whole = Dataset.from_list(rows, features=features)
    splits = {"train": whole.select(range(30)), "dev": whole.select(range(30, 38)), "other": whole.select([38, 39])}
    DatasetDict(splits).save_to_disk(folder / "saved", num_shards={"train": 3, "dev": 1, "other": 1})
    good, bad = read(folder / "saved")
    assert reasons(bad) == [("split other", "unknown_split")]
    assert [record.split for record in good] == ["train"] * 30 + ["validation"] * 8
    assert not any(isinstance(record.image, BytesImage) for record in good)
    if shuffled:
        random.Random(0).shuffle(good)
    assert [content(record).decode() for record in good] == [f"image {record.captions[0]}" for record in good]
    assert {record.split for record in read(folder / "saved", split="test")[0]} == {"test"}


# Folders and lists


def test_metadata_of_each_split_or_one_above_them(folder: Path) -> None:
    for split, name in (("train", "a.jpg"), ("val", "b.jpg")):
        (folder / "set" / split).mkdir(parents=True)
        (folder / name).rename(folder / "set" / split / name)
        write(folder / "set" / split / "metadata.jsonl", lines({"file_name": name, "text": name}))
    good, _ = read(folder / "set")
    assert [(row.split, row.where) for row in good] == [
        ("train", "train/metadata.jsonl, line 1"),
        ("validation", "val/metadata.jsonl, line 1"),
    ]
    rows = [{"file_name": "train/a.jpg", "text": "a"}, {"file_name": "val/b.jpg", "text": "b"}]
    write(folder / "set" / "metadata.jsonl", lines(*rows))
    good, _ = read(folder / "set")
    assert [(row.split, row.id) for row in good] == [("train", "train/a.jpg"), ("validation", "val/b.jpg")]


def test_captions_beside_images_are_joined_by_name(folder: Path) -> None:
    write(folder / "a.txt", "one\n\ntwo\n")
    write(folder / "z.txt", "nobody's")
    write(folder / "val" / "d.txt", "val's")
    (folder / "val" / "d.png").write_bytes(b"d")
    (folder / "b.txt").write_bytes(b"\xff")
    good, bad = read(folder)
    assert [(record.id, record.captions, record.split) for record in good] == [
        ("a.jpg", ["one", "two"], None),
        ("val/d.png", ["val's"], "validation"),
    ]
    assert reasons(bad) == [
        ("file b.jpg", "bad_encoding"),
        ("file c.jpg", "unmatched_image"),
        ("file z.txt", "unmatched_caption"),
    ]


def test_names_that_are_not_utf8_are_read_and_written_as_escapes(folder: Path) -> None:
    for name in NAMES:
        (folder / name).unlink()
    (folder / os.fsdecode(b"caf\xe9.jpg")).write_bytes(b"image")
    (folder / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"a caption")
    (record,), bad = read(folder)
    assert not bad
    assert content(record) == b"image"
    assert record.id == r"caf\udce9.jpg"
    assert record.where == r"file caf\udce9.jpg"


def test_classes_get_captions_from_templates(folder: Path) -> None:
    for place in ("train/n02123045", "train/garden_spider", "val/n02123045"):
        (folder / "set" / place).mkdir(parents=True)
        (folder / "set" / place / "x.JPEG").write_bytes(place.encode())
    names = write(folder / "names.txt", "n02123045 tabby, tabby cat\n")
    good, bad = read(folder / "set", classes=str(names), templates=("a {}!", "{}"))
    assert not bad
    assert [(record.id, record.captions, record.split) for record in good] == [
        ("train/garden_spider/x.JPEG", ["a garden spider!", "garden spider"], "train"),
        ("train/n02123045/x.JPEG", ["a tabby!", "tabby"], "train"),
        ("val/n02123045/x.JPEG", ["a tabby!", "tabby"], "validation"),
    ]
    with pytest.raises(ValueError, match="n02123045 is named by a WordNet id"):
        read(folder / "set", format="classes")
    imagenet = write(folder / "index.json", json.dumps({"0": ["n02123045", "tiger_cat"]}))
    assert read(folder / "set", classes=str(imagenet))[0][1].captions[0] == "a photo of a tiger cat."


def test_a_folder_of_images_beside_their_list_points_at_the_list(folder: Path) -> None:
    (folder / "set" / "images").mkdir(parents=True)
    (folder / "a.jpg").rename(folder / "set" / "images" / "a.jpg")
    write(folder / "set" / "README.txt", "about")
    write(folder / "set" / "captions.jsonl", lines({"image": "images/a.jpg", "caption": "a"}))
    with pytest.raises(ValueError, match=r"holds images and captions\.jsonl\. Give .*captions\.jsonl as the source"):
        read(folder / "set")
    assert len(read(folder / "set", format="classes")[0]) == 1
    assert len(read(folder / "set" / "captions.jsonl")[0]) == 1


KEYS = st.lists(st.text("abcdef0123._-", min_size=1, max_size=6), unique=True, max_size=8)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(images=KEYS, captions=KEYS, repeat=st.integers(1, 2), seed=st.integers(0, 2**16))
def test_parallel_lists_are_joined_by_key_whatever_their_order(
    folder: Path, images: list[str], captions: list[str], repeat: int, seed: int
) -> None:
    shuffle = random.Random(seed).shuffle
    shuffle(images)
    said = [(key, f"{number} of {key}") for key in captions for number in range(repeat)]
    shuffle(said)
    write(folder / "i.txt", lines(*(f"{key}\ta.jpg" for key in images)))
    write(folder / "c.txt", lines(*(f"{key}\t{text}" for key, text in said)))
    good, bad = read(folder / "i.txt", captions=str(folder / "c.txt"))
    joined = [[text for key, text in said if key == image] for image in images if image in captions]
    assert [record.captions for record in good] == joined
    counts = {
        reason: sum(row.fault.reason == reason for row in bad) for reason in ("unmatched_image", "unmatched_caption")
    }
    assert counts["unmatched_image"] == len(set(images) - set(captions))
    assert counts["unmatched_caption"] == repeat * len(set(captions) - set(images))
    assert len(good) + len(bad) == len(images) + counts["unmatched_caption"]


def test_a_bad_line_of_a_list_shifts_nothing(folder: Path) -> None:
    write(folder / "i.txt", lines("b.jpg", "a.jpg", "sub/../a.jpg", "", "c.jpg"))
    (folder / "c.txt").write_bytes(b"a.jpg\tof a\nno tab\nb\t\xff\nc.txt\tof c\tand more\nb\tof b\n")
    good, bad = read(folder / "i.txt", captions=str(folder / "c.txt"))
    assert {record.id: record.captions for record in good} == {
        "b.jpg": ["of b"],
        "a.jpg": ["of a"],
        "c.jpg": ["of c\tand more"],
    }
    assert reasons(bad) == [
        ("captions line 2", "malformed_row"),
        ("captions line 3", "bad_encoding"),
        ("images line 3", "duplicate_id"),
    ]


def test_a_parallel_source_needs_both_sides(folder: Path) -> None:
    with pytest.raises(ValueError, match="where are its captions"):
        read(folder, format="parallel")
    with pytest.raises(ValueError, match=r"there is no file or folder .*absent"):
        read(folder, captions=str(folder / "absent"))


# Annotation files


def test_coco_is_joined_by_image_id_and_both_sides_are_told(folder: Path) -> None:
    images = [
        {"id": 5, "file_name": "a.jpg"},
        {"id": 3, "file_name": "b.jpg"},
        {"id": 5, "file_name": "c.jpg"},
        {"id": 4, "file_name": "absent.jpg"},
        {"file_name": "c.jpg"},
        [],
    ]
    annotations = [
        *({"image_id": 9, "caption": "nobody's"}, {"image_id": 5, "caption": "one"}, {"image_id": 4, "caption": "x"}),
        *({"image_id": 5, "caption": "two"}, {"caption": "lost"}, {"image_id": 3}),
    ]
    path = write(folder / "p.json", json.dumps({"annotations": annotations, "images": images}))
    good, bad = read(path)
    assert [(record.id, record.captions, record.where) for record in good] == [("5", ["one", "two"], "image 0")]
    assert reasons(bad) == [
        ("annotation 4", "missing_column"),
        ("annotation 5", "missing_column"),
        ("image 1", "unmatched_image"),
        ("image 2", "duplicate_id"),
        ("image 3", "image_missing"),
        ("image 4", "missing_column"),
        ("image 5", "not_an_object"),
        ("annotation 0", "unmatched_caption"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"images": [], "annotations": [{"image_id": 1, "bbox": []}]}', "no annotation has image_id and caption"),
        ('{"images": {}, "annotations": []}', "it has no list 'images'"),
        ('{"images": [', "it is not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "it has no list 'images'"),
    ],
)
def test_a_document_that_is_no_coco_file_is_an_error(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read(write(folder / "p.json", text), format="coco")
    assert "\n" not in str(error.value)


def test_karpathy_gives_all_sentences_their_split_and_their_folder(folder: Path) -> None:
    (folder / "val2014").mkdir()
    (folder / "c.jpg").rename(folder / "val2014" / "c.jpg")
    images = [
        {"filename": "a.jpg", "imgid": 7, "split": "test", "sentences": [{"raw": "one"}, {"raw": "two"}]},
        {"filename": "c.jpg", "filepath": "val2014", "cocoid": 12, "split": "restval", "sentences": [{"raw": "c"}]},
        {"filename": "b.jpg", "split": "challenge", "sentences": [{"raw": "b"}]},
        {"filename": "b.jpg", "split": "val", "sentences": []},
        {"filename": "b.jpg", "split": "val", "sentences": [{"tokens": []}]},
    ]
    good, bad = read(write(folder / "p.json", json.dumps({"images": images})))
    assert [(record.id, record.captions, record.split) for record in good] == [
        ("7", ["one", "two"], "test"),
        ("12", ["c"], "train"),
    ]
    assert reasons(bad) == [
        ("image 2", "unknown_split"),
        ("image 3", "unmatched_image"),
        ("image 4", "missing_column"),
    ]


def test_flickr_captions_may_hold_commas_and_quotes(folder: Path) -> None:
    text = 'image,caption\na.jpg,A dog, a cat and "a bird" .\nb.jpg,"Two ""big"" dogs, running"\nno comma\n'
    good, bad = read(write(folder / "captions.txt", text))
    assert [record.captions[0] for record in good] == ['A dog, a cat and "a bird" .', 'Two "big" dogs, running']
    assert reasons(bad) == [("line 4", "malformed_row")]
    tokens = "a.jpg#0\tone\na.jpg#1\ttwo\nabsent.jpg.1#0\tx\nb.jpg\tno number\n"
    good, bad = read(write(folder / "Flickr8k.token.txt", tokens))
    assert [(record.id, record.captions) for record in good] == [("a.jpg", ["one"]), ("a.jpg", ["two"])]
    assert reasons(bad) == [("line 3", "image_missing"), ("line 4", "malformed_row")]


# Items of --sources


def test_an_item_is_parsed() -> None:
    source = Source.parse(r"coco/captions\, all.json,image_root=coco/train2017,split=val,weight=2,templates=a {}.|{}")
    assert (source.path, source.name) == ("coco/captions, all.json", "captions, all.json")
    assert (source.image_root, source.split, source.weight) == ("coco/train2017", "validation", 2.0)
    assert source.templates == ("a {}.", "{}")
    mapping = {"path": "a, b/", "weight": 3, "templates": ["x {}"], "id_column": None}
    assert Source.parse(mapping) == Source("a, b/", weight=3.0, templates=("x {}",), name="a, b")
    assert pickle.loads(pickle.dumps(source)) == source


BAD_ITEMS = [
    ("p.jsonl,wieght=2", r"has the key wieght; known are .*Did you mean 'weight'"),
    ("p.jsonl,weight=two", "weight=two; a weight is a number"),
    ("p.jsonl,weight=0", "weight=0.0; a weight is above 0"),
    ("p.jsonl,weight=nan", "a weight is above 0"),
    ("p.jsonl,split=nowhere", "split=nowhere; a split is train, validation or test"),
    ("p.jsonl,format=jsnl", "format=jsnl; known are .*Did you mean 'jsonl'"),
    ("p.jsonl,split", "'split' is no key=value"),
    ("p.jsonl,split=val,split=test", "split is given twice"),
    ("p.jsonl,path=q.jsonl", "path is given twice"),
    ("p,templates=a photo", "templates=a photo; a template says"),
    (",weight=2", "an item without a path"),
    ({"weight": 2}, "an item without a path"),
]


@pytest.mark.parametrize(("item", "message"), BAD_ITEMS, ids=str)
def test_an_item_that_cannot_be_meant_is_refused(item: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Source.parse(item)
    assert "\n" not in str(error.value)


def test_a_place_that_is_not_there_or_not_known_is_an_error(folder: Path) -> None:
    for path in (folder / "absent.jsonl", folder / "absent.tar", folder / "absent" / "folder"):
        with pytest.raises(ValueError, match=r"there is no .*"):
            read(path)
    with pytest.raises(ValueError, match="there is no such file"):
        read(folder / "absent.json", format="coco")
    with pytest.raises(ValueError, match=r"its format is not known by '\.xlsx'"):
        read(write(folder / "p.xlsx", "?"))
    with pytest.raises(ValueError, match="the look of no known format"):
        read(folder)
