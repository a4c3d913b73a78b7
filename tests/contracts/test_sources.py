"""Every format gives the same pairs through every door: prepared, trained on raw, streamed, fine-tuned on."""

import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, Features, Value

from mm_utils.data.arguments import DataArguments
from mm_utils.data.batches.sizes import BatchSizes
from mm_utils.data.media import COLUMNS, FEATURES
from mm_utils.data.pairs import load_pairs
from mm_utils.data.prepare.cache import load_labelled_rows
from mm_utils.data.prepare.on_disk import open_prepared
from mm_utils.data.rows.detect import detect
from mm_utils.data.rows.source import Source
from mm_utils.data.streams.shards import ShardReader
from mm_utils.data.streams.stream import open_stream
from scripts import prepare_data
from tests.kit.fault_images import draw, png
from tests.kit.media_files import COLOURS, clip, tone
from tests.kit.reading import content, lines, read, write, write_tar

COUNT = 6
CAPTIONS = [f'picture {at}, a "red" one; or | not, of {at}' for at in range(COUNT)]
ENDINGS = {"image": "png", "sound": "wav", "clip": "avi"}
CONTENTS = {
    "image": [png(draw(at)) for at in range(COUNT)],
    "sound": [tone(200 + 100 * at, each=0.5 + at / 8) for at in range(COUNT)],
    "clip": [clip((COLOURS * 3)[: 4 + at]) for at in range(COUNT)],
}


class Made:
    """A folder with the media of one kind, and the pairs in rows of paths or bytes."""

    def __init__(self, folder: Path, medium: str):
        self.folder = folder
        self.medium = medium
        self.column = COLUMNS[medium]
        self.names = [f"{at}.{ENDINGS[medium]}" for at in range(COUNT)]
        for name, data in zip(self.names, CONTENTS[medium], strict=True):
            (folder / name).write_bytes(data)
        self.rows = [{self.column: name, "caption": text} for name, text in zip(self.names, CAPTIONS, strict=True)]

    def write(self, name: str, text: str) -> Path:
        return write(self.folder / name, text)

    def lines(self, name: str, join: Callable[[str, str], str], header: str = "") -> Path:
        joined = [join(row[self.column], row["caption"]) for row in self.rows]
        return self.write(name, lines(*filter(None, [header]), *joined))

    def cells(self, name: str, sign: str) -> Path:
        return self.lines(name, lambda image, text: f"{image}{sign}" + '"{}"'.format(text.replace('"', '""')),
                          f"{self.column}{sign}caption")  # fmt: skip

    def embedded(self) -> Dataset:
        cells = [{"bytes": data, "path": None} for data in CONTENTS[self.medium]]
        features = Features({self.column: FEATURES[self.medium], "caption": Value("string")})
        return Dataset(pa.table({self.column: cells, "caption": CAPTIONS}).cast(features.arrow_schema))

    def table(self, name: str, rows: Any, **options: Any) -> Path:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), self.folder / name, **options
        )
        return self.folder / name

    def parts(self) -> Path:
        for at in range(COUNT):
            self.table(f"parts/train-{at}.parquet", self.embedded().data.table.slice(at, 1))
        return self.folder / "parts"

    def database(self, cells: list[Any]) -> Path:
        with sqlite3.connect(self.folder / "pairs.db") as made:
            made.execute(f"CREATE TABLE pairs ({self.column}, caption TEXT)")
            made.executemany("INSERT INTO pairs VALUES (?, ?)", zip(cells, CAPTIONS, strict=True))
        made.close()
        return self.folder / "pairs.db"

    def coco(self) -> Path:
        images = [{"id": at, "file_name": name} for at, name in enumerate(self.names)]
        texts = [{"id": 9 - at, "image_id": at, "caption": text} for at, text in enumerate(CAPTIONS)][::-1]
        return self.write("captions_train2017.json", json.dumps({"info": {}, "images": images, "annotations": texts}))

    def karpathy(self) -> Path:
        place = {"filepath": self.folder.name, "split": "restval"}
        images = [
            {"filename": name, "sentences": [{"raw": text}], **place}
            for name, text in zip(self.names, CAPTIONS, strict=True)
        ]
        (self.folder / self.folder.name).symlink_to(".")
        return self.write("dataset_coco.json", json.dumps({"images": images, "dataset": "coco"}))

    def beside(self, split: str = "") -> Path:
        for name, text in zip(self.names, CAPTIONS, strict=True):
            self.write(f"set/{split}{name[:1]}.txt", f"\n{text}\n")
            (self.folder / name).rename(self.folder / f"set/{split}{name}")
        return self.folder / "set"

    def image_folder(self, file: str) -> Path:
        rows = [{"file_name": row[self.column], "text": row["caption"]} for row in self.rows]
        if file.endswith(".parquet"):
            return self.table(file, rows).parent
        return self.write(file, lines(*rows)).parent

    def saved(self, splits: bool) -> Path:
        (DatasetDict(train=self.embedded()) if splits else self.embedded()).save_to_disk(self.folder / "saved")
        return self.folder / "saved"

    def repository(self) -> Path:
        self.write("repo/README.md", "A data set.")
        return self.table("repo/data/train-00000-of-00001.parquet", self.embedded().data.table).parents[1]

    def tars(self, *names: str) -> Path:
        (self.folder / "shards").mkdir()
        each = COUNT // len(names)
        for place, name in enumerate(names):
            own = range(place * each, place * each + each)
            members = [
                item
                for at in own
                for item in ((self.names[at], CONTENTS[self.medium][at]), (f"{at}.txt", CAPTIONS[at].encode()))
            ]
            write_tar(self.folder / "shards" / name, members)
        return self.folder / "shards"


ALL = ("image", "sound", "clip")
STILL = ("image",)
WITH_COLUMNS = ("jsonl", "json", "csv", "tsv", "parquet", "datasets", "sqlite")
# name: what makes it, its format, its media, the flag of training, and whether it can be streamed
FORMATS = {
    "lines": (lambda made: made.write("p.jsonl", lines(*made.rows)), "jsonl", ALL, "train_file", False),
    "an array": (lambda made: made.write("p.json", json.dumps(made.rows)), "json", STILL, "train_file", False),
    "commas": (lambda made: made.cells("p.csv", ","), "csv", ALL, "train_file", False),
    "semicolons": (lambda made: made.cells("p.csv", ";"), "csv", STILL, "train_file", False),
    "tabs": (lambda made: made.cells("p.tsv", "\t"), "tsv", STILL, "train_file", False),
    "Parquet of paths": (lambda made: made.table("p.parquet", made.rows), "parquet", ALL, "train_file", False),
    "Parquet of bytes": (
        lambda made: made.table("p.parquet", made.embedded().data.table, row_group_size=2),
        "parquet", ALL, "train_file", True,
    ),
    "a folder of Parquet": (Made.parts, "parquet", STILL, "dataset_name", True),
    "a database of paths": (lambda made: made.database(made.names), "sqlite", STILL, "train_file", False),
    "a database of bytes": (lambda made: made.database(CONTENTS[made.medium]), "sqlite", STILL, "train_file", False),
    "COCO": (Made.coco, "coco", STILL, "train_file", False),
    "Karpathy's": (Made.karpathy, "karpathy", STILL, "train_file", False),
    "Flickr30k": (
        lambda made: made.lines("results.token", lambda image, text: f"{image}#0\t{text}"),
        "flickr", STILL, "train_file", False,
    ),
    "Flickr8k": (
        lambda made: made.lines("captions.txt", lambda image, text: f"{image},{text}", "image,caption"),
        "flickr", STILL, "train_file", False,
    ),
    "metadata in lines": (
        lambda made: made.image_folder("metadata.jsonl"), "imagefolder", ALL, "dataset_name", False
    ),
    "metadata in Parquet": (
        lambda made: made.image_folder("metadata.parquet"), "imagefolder", STILL, "dataset_name", False
    ),
    "captions beside": (Made.beside, "imagefolder", ALL, "dataset_name", False),
    "captions beside in a split": (lambda made: made.beside("Train/"), "imagefolder", STILL, "dataset_name", False),
    "a saved set": (lambda made: made.saved(splits=False), "datasets", ALL, "dataset_name", True),
    "saved splits": (lambda made: made.saved(splits=True), "datasets", STILL, "dataset_name", True),
    "a repository": (Made.repository, "parquet", STILL, "dataset_name", True),
    "a tar": (lambda made: made.tars("0.tar") / "0.tar", "webdataset", ALL, "train_file", True),
    "a folder of tars": (lambda made: made.tars("train-0.tar", "train-1.tar"), "webdataset", STILL, "dataset_name", False),
    "a pattern of tars": (lambda made: made.tars("0.tar", "1.tar") / "{0..1}.tar", "webdataset", STILL, "train_file", True),
}  # fmt: skip
CASES = [(name, medium) for name, (_, _, media, _, _) in FORMATS.items() for medium in media]


def shown(row: dict[str, Any], medium: str) -> tuple[str, Any]:
    """The caption, and what tells the medium: the bytes of an image, the seconds of a clip or sound, no two alike."""
    [caption] = row["captions"]
    image = row["image"]
    return caption, row["seconds"] if medium != "image" else image["bytes"] or Path(image["path"]).read_bytes()


def prepared(path: Path, medium: str, _: str) -> list[dict[str, Any]]:
    words = ["--sources", f"{path},medium={medium}", "--keep_originals", "--num_proc", "1", "--max_seconds", "60"]
    output = str(path.parent / "out of it")
    prepare_data.main([*words, "--min_image_side", "8", "--validation_fraction", "0", "--output_dir", output])
    return [row for split in open_prepared(output, "it").values() for row in split]


def arguments(flag: str, path: Path) -> DataArguments:
    values = {flag: str(path)}
    return DataArguments(**values)


def raw(path: Path, _: str, flag: str) -> list[dict[str, Any]]:
    return [row for split in load_pairs(arguments(flag, path), need_train=False).values() for row in split]


def labelled(path: Path, medium: str, flag: str) -> list[dict[str, Any]]:
    """As `finetune` and `eval_zero_shot` read them, with the caption for a label."""
    source = Source(str(path), labelled=True, medium=medium, label_column="caption")
    return [{**row, "captions": row["answers"]} for row in load_labelled_rows([source])[0]]


def streamed(path: Path, medium: str, flag: str) -> list[dict[str, Any]]:
    stream = open_stream(arguments(flag, path), BatchSizes((0,), (2,)), 0)
    reader = ShardReader(stream.shards, stream.source)
    train = [row for at, shard in enumerate(stream.shards) for row in reader.read(at, 0, shard.rows)]
    return [*stream.validation, *train]


@pytest.mark.parametrize(("kind", "medium"), CASES)
def test_every_format_gives_the_same_pairs_through_every_door(
    kind: str, medium: str, tmp_path: Path, own_cache: Path
) -> None:
    make, form, _, flag, streams = FORMATS[kind]
    (tmp_path / "data").mkdir()
    path = make(Made(tmp_path / "data", medium))
    assert detect(Source(str(path))) == form
    records, bad = read(path)
    assert (len({record.where for record in records}), bad) == (COUNT, [])
    assert {record.medium for record in records} == {medium}
    found = {record.captions[0]: content(record) for record in records}
    assert found == dict(zip(CAPTIONS, CONTENTS[medium], strict=True))
    wanted = (
        CONTENTS["image"] if medium == "image" else [(at + 4) / (8 if medium == "sound" else 4) for at in range(COUNT)]
    )
    if streams and medium != "image":
        with pytest.raises(ValueError, match=f"it holds {medium}s, and images alone are streamed. Drop --streaming"):
            streamed(path, medium, flag)
    for door in (
        prepared,
        raw,
        *([streamed] if streams and medium == "image" else []),
        *([labelled] if form in WITH_COLUMNS else []),
    ):
        pairs = [shown(row, medium) for row in door(path, medium, flag)]
        assert sorted(pairs) == list(zip(CAPTIONS, wanted, strict=True)), door.__name__


def _rows(
    first: int, last: int, image: str = "image", caption: str = "caption", more: str = ""
) -> list[dict[str, str]]:
    return [{image: f"{more}{at}.png", caption: f"text {at}"} for at in range(first, last)]


def _csv(rows: list[dict[str, str]], sign: str = ",") -> str:
    return lines(sign.join(rows[0]), *(sign.join(row.values()) for row in rows))


_SIX = {f"{at}.png": png(draw(at)) for at in range(6)}
_TEXTS = {f"{at}.txt": f"text {at}" for at in range(6)}
_SAMPLES = [
    member for at in range(6) for member in ((f"{at}.png", _SIX[f"{at}.png"]), (f"{at}.txt", f"text {at}".encode()))
]
_COCO = {
    "info": {"about": "x" * 70_000},
    "images": [{"id": at, "file_name": f"{at}.png"} for at in range(6)],
    "annotations": [{"image_id": at, "caption": f"text {at}"} for at in range(6)],
}
# name: the files (a list is a tar), what is read of them and how, the number of rows, and all that is said, as patterns
FOLDERS = {
    "kinds that differ": (
        {**_SIX, "a.jsonl": lines(*_rows(0, 3)), "b.tsv": _csv(_rows(3, 6, "file_name", "text"), "\t")}, "", {}, None,
        (r"a\.jsonl has the columns image, caption, and b\.tsv file_name, text; tables of several kinds",),
    ),
    "another kind of table": (
        {**_SIX, "a.jsonl": lines(*_rows(0, 6)), "b.csv": "a,b\n1,2\n", "c.jsonl.gz": "", "d.json": "[]", "e.xlsx": ""}, "",
        {}, 6, (r"table_not_read: not read: (?=.*b\.csv)(?=.*d\.json)(?=.*e\.xlsx)", r"archive_not_read: not read: c\.jsonl\.gz"),
    ),
    "a stray archive": (
        {**_SIX, **_TEXTS, "old/backup.tar": _SAMPLES}, "", {}, 6, (r"archive_not_read: not read: old/backup\.tar",),
    ),
    "tables and shards": (
        {"a.parquet": "", "b.tar": _SAMPLES}, "", {}, None, (r"tables, such as .*a\.parquet, and tar shards, such as .*b\.tar",),
    ),
    "what img2dataset writes": (
        {"0.tar": _SAMPLES, "0.parquet": "", "0_stats.json": "{}"}, "", {}, 6, (r"table_not_read: not read: 0\.parquet",),
    ),
    "other captions of metadata": (
        {**_SIX, **_TEXTS, "metadata.jsonl": lines(*_rows(0, 5, "file_name", "text")), "captions.csv": _csv(_rows(0, 6))}, "",
        {}, 5, (r"text_not_read: not read: 6 \.txt files, such as 0\.txt", r"table_not_read: not read: captions\.csv", r"not_read: not read: 5\.png"),
    ),
    "two texts of an image": ({**_SIX, **_TEXTS, "0.caption": "other"}, "", {}, 6, ()),
    "sidecars": (
        {**_SIX, **_TEXTS, "0.xmp": "", "1.XMP": "", "2.npy": "", "README.md": "", "LICENSE": "", "SHA256SUMS": "", ".DS_Store": ""},
        "", {}, 6, (r"not_read: not read: 2 \.xmp files, such as 0\.xmp; 2\.npy",),
    ),
    "members of a shard": (
        {"a.tar": [("README.md", b""), (".DS_Store", b""), *_SAMPLES, ("6.png", _SIX["0.png"]), ("6.jpg", b""), ("6.npy", b""), ("6.txt", b"a")]},
        "a.tar", {}, 7, (r"not_read: not read: a\.tar/6\.jpg; a\.tar/6\.npy",),
    ),
    "captions in JSON": (
        {**_SIX, "annotations/all.json": "[]"}, "", {}, None, (r"no captions in a form .*not read: annotations/all\.json",),
    ),
    "tables below": (
        {**{f"a/im/{name}": data for name, data in _SIX.items()}, "a/p.csv": _csv(_rows(0, 3, more="im/")),
         "b/im/0.png": _SIX["0.png"], "b/p.csv": _csv(_rows(0, 1, more="im/"))}, "", {}, 4, (r"not_read: not read: 3 \.png files",),
    ),
    "labels beside folders": (
        {"im/0.png": _SIX["0.png"], "labels.csv": "image,label\nim/0.png,cat\n"}, "", {"labelled": True}, 1, (),
    ),
    "many other files first": (
        {**{f"a/{at}.xml": "" for at in range(1001)}, **_SIX, **_TEXTS}, "", {}, 6, (r"not_read: not read: 1,001 \.xml files",),
    ),
    "an empty table": ({**_SIX, "a.jsonl": lines(*_rows(0, 6)), "b.jsonl": ""}, "", {}, None, (r"b\.jsonl; the file holds no rows",)),
    "COCO after 64 KiB": ({**_SIX, "c.json": json.dumps(_COCO)}, "c.json", {}, 6, ()),
    "rows with annotations": (
        {**_SIX, "c.json": lines(*({**row, "annotations": [{}]} for row in _rows(0, 6)))}, "c.json", {}, 6, (),
    ),
    "an object over lines": (
        {"c.json": json.dumps({"version": "1", "image": "0.png"}, indent=1)}, "c.json", {}, None,
        (r"c\.json holds one object with version, image over several lines\. Write rows",),
    ),
    "an object of splits": (
        {"c.json": json.dumps({"train": _rows(0, 6), "test": _rows(0, 6)})}, "c.json", {}, None,
        (r"c\.json holds one object, with rows in train, test\. Write each list to a file of its own",),
    ),
    "an object of files": (
        {"c.json": json.dumps({"0.png": ["a"], "1.png": "b"})}, "c.json", {}, None, (r"a key for every file, such as 0\.png\. Write a row",),
    ),
    "a table without names": (
        {"c.csv": "0.png,text 0\n"}, "c.csv", {}, None, (r"c\.csv, line 1 has 0\.png where the name of a column belongs",),
    ),
    "a table of Excel's": (
        {**_SIX, "c.csv": "sep=;\r\nimage;caption\r\n" + "".join(f"{at}.png;text {at}\r\n" for at in range(6))}, "c.csv", {}, 6, (),
    ),
    "a folder in an archive": (
        {"a.tar": [*((f"s/{name}", data) for name, data in _SIX.items()), ("s/p.csv", _csv(_rows(0, 6)).encode())]}, "a.tar", {}, None,
        (r"it holds the table p\.csv .* Unpack it",),
    ),
    "a database without a table": ({"a.db": ""}, "a.db", {}, None, ("the database holds no table",)),
    "lines with commas": (
        {"c.jsonl": ",\n".join(map(json.dumps, _rows(0, 6)))}, "c.jsonl", {}, None, (r"divided by commas",),
    ),
    "a list of three columns": (
        {**_SIX, "c.txt": "image,caption,split\n" + "".join(f"{at}.png,text {at},train\n" for at in range(6))}, "c.txt", {}, 6, (),
    ),
    "names that differ": (
        {"Images/0.png": b"", "a b.png": b"", "c.jsonl": lines({"image": "images/0.png", "caption": "a"}, {"image": "a%20b.png", "caption": "b"})},
        "c.jsonl", {}, 0, (r"image_missing: .*there is Images", r"image_missing: .*there is a b\.png"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_what_lies_in_a_source_is_read_or_named(name: str, tmp_path: Path) -> None:
    contents, path, fields, count, patterns = FOLDERS[name]
    for file, data in contents.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, list):
            write_tar(tmp_path / file, data)
        else:
            (tmp_path / file).write_bytes(data.encode() if isinstance(data, str) else data)
    if count is None:
        with pytest.raises(ValueError, match=patterns[0]):
            read(tmp_path / path, **fields)
        return
    good, bad = read(tmp_path / path, **fields)
    assert len(good) == count
    said = [f"{row.fault.reason}: {row.fault.detail}" for row in bad]
    assert len(said) == len(patterns), said
    for pattern in patterns:
        assert any(re.match(pattern, text) for text in said), said
    texts = {caption for record in good for caption in record.captions}
    assert fields or texts >= {f"text {at}" for at in range(min(count, 3))} | (
        {"other"} if name.startswith("two") else set()
    )
