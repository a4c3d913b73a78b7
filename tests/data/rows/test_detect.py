"""Every format is recognised and yields the same pairs."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, Image, Value, disable_progress_bars

from mm_utils.data.rows.detect import detect, read_source
from mm_utils.data.rows.records import Record
from mm_utils.data.rows.source import Source, known_formats
from tests.kit.reading import NAMES, SAFE, content, lines, read, write

disable_progress_bars()


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
    assert {name for _, name in EVERY} | {"classes", "webdataset"} | {"sqlite"} == set(known_formats())


def test_a_folder_of_images_beside_their_list_points_at_the_list(folder: Path) -> None:
    (folder / "set" / "images").mkdir(parents=True)
    (folder / "a.jpg").rename(folder / "set" / "images" / "a.jpg")
    write(folder / "set" / "README.txt", "about")
    write(folder / "set" / "captions.jsonl", lines({"image": "images/a.jpg", "caption": "a"}))
    with pytest.raises(ValueError, match=r"holds images and captions\.jsonl\. Give .*captions\.jsonl as the source"):
        read(folder / "set")
    assert len(read(folder / "set", format="classes")[0]) == 1
    assert len(read(folder / "set" / "captions.jsonl")[0]) == 1


def test_a_place_that_is_not_there_or_not_known_is_an_error(folder: Path) -> None:
    for path in (folder / "absent.jsonl", folder / "absent.tar", folder / "absent" / "folder"):
        with pytest.raises(ValueError, match=r"there is no .*"):
            read(path)
    with pytest.raises(ValueError, match="there is no such file"):
        read(folder / "absent.json", format="coco")
    with pytest.raises(ValueError, match=r"its format is not known by '\.xlsx'"):
        read(write(folder / "p.xlsx", "?"))
    with pytest.raises(ValueError, match="the format of this folder is not recognised"):
        read(folder)
