"""Raw rows, from an image's bytes to a cached set and its report; `tests.contracts.test_bad_rows` has each broken file."""

import hashlib
import io
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset, DatasetDict, Features, Value
from datasets import Image as ImageFeature
from huggingface_hub import DatasetCard
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mm_utils.data.arguments import PathArguments
from mm_utils.data.faults import NOTES, Fault
from mm_utils.data.images import open_image
from mm_utils.data.prepare import cache
from mm_utils.data.prepare import ingest as module
from mm_utils.data.prepare.arguments import CheckArguments
from mm_utils.data.prepare.cache import load_or_prepare
from mm_utils.data.prepare.checks import check_caption, check_image
from mm_utils.data.prepare.ingest import ChunkResult, Storage, ingest, read_part, stored_hash
from mm_utils.data.prepare.report import measure, write_report
from mm_utils.data.rows.records import BadRow, BytesImage, FileImage, Record
from mm_utils.data.rows.source import Source
from mm_utils.data.rows.tars import MemberImage
from scripts.prepare_data import main
from tests.kit.corpora import write_corpus
from tests.kit.fault_images import ODD, draw, save
from tests.kit.jsonl import read_lines, write_lines
from tests.kit.media_files import clip, media_rows, tone
from tests.kit.reading import CLOSE, pixels_apart

LIMITS = CheckArguments()
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")

# -- images -------------------------------------------------------------------------------------------------------------


DAMAGED = [case.make(draw(0)) for case in ODD]


@given(st.data())
def test_damaged_bytes_are_an_image_or_a_fault(data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(DAMAGED)))
    for _ in range(data.draw(st.integers(0, 5))):
        content[data.draw(st.integers(0, min(len(content) - 1, 400)))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    try:
        checked = check_image(bytes(content), LIMITS, min_side=data.draw(st.sampled_from([None, 16])))
        assert checked.image.mode == "RGB"
        assert set(checked.notes) <= set(NOTES)
    except Fault:
        pass


@given(st.text(st.characters(), max_size=300), st.integers(1, 200))
def test_a_clean_caption_stays_clean(value: str, limit: int) -> None:
    limits = CheckArguments(max_caption_characters=limit)
    try:
        text, notes = check_caption(value, limits)
    except Fault:
        return
    text.encode()  # no surrogates
    assert 0 < len(text) <= limit
    assert text == " ".join(text.split())
    if "caption_cut" not in notes:
        assert check_caption(text, limits)[0] == text


# -- a chunk of rows ----------------------------------------------------------------------------------------------------
STORED_JPEG = Storage("jpeg", 64)
RAW = Storage("raw", 64)


def record(data: bytes, *captions: Any, where: str = "line 1", **values: Any) -> Record:
    return Record("pairs", where, None, BytesImage(where, data), list(captions) or ["a gradient"], **values)


def stored(
    folder: Path, *items: Record | BadRow, storage: Storage = STORED_JPEG
) -> tuple[list[dict[str, Any]], ChunkResult]:
    result = ingest(0, items, folder, CheckArguments(), storage)
    return read_part(folder / "part-000000.arrow", module.PART_SCHEMA.names).to_pylist(), result


def test_an_image_is_shrunk_once_and_a_small_one_is_not_compressed_again(tmp_path: Path) -> None:
    data = save(draw(0, (200, 150)), "JPEG", quality=95)
    [row], _ = stored(tmp_path, record(data))
    assert (row["width"], row["height"]) == (85, 64) == Image.open(io.BytesIO(row["image"]["bytes"])).size
    assert (row["original_width"], row["original_height"]) == (200, 150)
    assert row["image_hash"] == hashlib.sha256(data).hexdigest()
    assert row["stored_hash"] == stored_hash(row["image"]["bytes"])
    assert pixels_apart(open_image(row["image"]), draw(0, (85, 64))) < 6
    small = save(draw(0, (70, 60)), "JPEG", quality=80)
    [row], _ = stored(tmp_path, record(small))
    assert row["image"] == {"bytes": small, "path": None}
    [row], _ = stored(tmp_path, record(save(draw(0, (128, 128)), "PNG")), storage=RAW)
    assert (row["image"]["path"], len(row["image"]["bytes"])) == ("raw:64x64", 64 * 64 * 3)
    assert pixels_apart(open_image(row["image"]), draw(0, (64, 64))) < CLOSE
    [row], _ = stored(tmp_path, record(data), storage=Storage("jpeg", None))
    assert (row["image"]["bytes"], row["width"], row["height"]) == (data, 200, 150)


def test_where_a_picture_was_taken_is_not_kept(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[271] = "Camera of Jane Doe"
    rows, _ = stored(tmp_path, *(record(save(draw(0, (60, 60)), form, exif=exif)) for form in ("JPEG", "PNG")))
    assert [row for row in rows if b"Jane Doe" in row["image"]["bytes"]] == []


def test_a_row_survives_bad_captions_and_negatives(tmp_path: Path) -> None:
    content = save(draw(0), "JPEG")
    given = [["a  dog", None, "a dog", ""], "a cat", [], None, 5]
    items = [*(record(content, negatives=each) for each in given), record(content, "good", None)]
    rows, result = stored(tmp_path, *items)
    assert rows[-1]["captions"] == ["good"]
    assert [row["negatives"] for row in rows] == [["a dog"], ["a cat"], None, None, None, None]
    reasons = [fault["reason"] for fault in result.faults]
    assert reasons == ["caption_null", "caption_empty", "caption_not_text", "caption_null"]
    assert not sum(result.bad.values())


def test_a_chunk_is_done_once_and_rows_of_one_image_decode_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    check = module.check_image
    monkeypatch.setattr(module, "check_image", lambda *args: calls.append(1) or check(*args))
    image = BytesImage("one", save(draw(0), "JPEG"))
    items = [Record("pairs", f"line {at}", None, image, [f"caption {at}"]) for at in range(3)]
    first = stored(tmp_path, *items)
    assert [row["captions"] for row in first[0]] == [["caption 0"], ["caption 1"], ["caption 2"]]
    assert stored(tmp_path, *items) == first
    assert len(calls) == 1
    assert stored(tmp_path, *items, storage=RAW)[0] != first[0]


CHANGES = {
    "its date": lambda path, _: os.utime(path, ns=(0, 0)),
    "it is gone": lambda path, _: path.unlink(),
    "PyAV is gone": lambda _, patch: patch.setitem(sys.modules, "av", None),
    "Pillow": lambda _, patch: patch.setattr("PIL.__version__", "1.0"),
    "this code": lambda _, patch: patch.setattr(module, "_VERSION", 0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["file", "member"])
def test_a_chunk_is_done_again_when_what_it_depends_on_changes(
    kind: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(content := save(draw(0), "JPEG"))
    ref = FileImage(str(path))
    if kind == "member":
        ref = MemberImage("a.jpg", str(path), 0, len(content))
    items = (Record("pairs", "line 1", None, ref, ["a gradient"]),)
    key = stored(tmp_path, *items)[1].key
    assert stored(tmp_path, *items)[1].key == key
    CHANGES[change](path, monkeypatch)
    assert stored(tmp_path, *items)[1].key != key


# -- raw sources, prepared once into the cache --------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, own_cache: Path) -> Path:
    """`pairs.jsonl` and six pictures."""
    for number in range(6):
        draw(number).save(tmp_path / f"{number}.png")
    write(tmp_path, [f"{number}.png" for number in range(6)])
    return tmp_path


def write(folder: Path, names: list[str]) -> None:
    rows = [{"image": name, "caption": f"the picture {name[:-4]}"} for name in names]
    write_lines(folder / "pairs.jsonl", rows)


def load(folder: Path, name: str = "pairs.jsonl") -> DatasetDict:
    source = Source(str(folder / name), title=f"--train_file is {name}")
    return load_or_prepare([replace(source, paths=PathArguments(allow_outside_root=True))])


def ids(folder: Path) -> list[str]:
    return list(load(folder)["train"]["id"])


def results(own_cache: Path) -> list[str]:
    return sorted(path.name for path in (own_cache / "tandem_pairs").iterdir() if path.name[0] != ".")


def test_files_stay_files_and_the_second_start_reads_the_result(
    folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(folder)["train"]
    assert first[2]["image"] == {"bytes": None, "path": str(folder / "2.png")}
    assert first["captions"][:] == [[f"the picture {number}"] for number in range(6)]
    monkeypatch.setattr(cache, "_prepare", lambda *_: pytest.fail("prepared again"))
    assert load(folder)["train"].to_list() == first.to_list()
    assert len(results(own_cache)) == 1


def test_a_changed_image_row_or_option_leads_to_another_result(folder: Path, own_cache: Path) -> None:
    write(folder, [f"{number}.png" for number in range(7)])
    assert ids(folder) == [f"{number}.png" for number in range(6)]
    draw(6).save(folder / "6.png")  # the image appeared
    assert len(ids(folder)) == 7
    (folder / "6.png").write_bytes(b"broken")  # it changed
    assert len(ids(folder)) == 6
    write(folder, [f"{number}.png" for number in range(5)])
    assert len(ids(folder)) == 5
    load_or_prepare([Source(str(folder / "pairs.jsonl"), id_column="caption")])
    assert len(results(own_cache)) == 5


def test_odd_images_that_training_takes_are_kept(folder: Path) -> None:
    Image.new("RGB", (2, 2), "red").save(folder / "0.png")
    Image.new("RGB", (7000, 6000)).save(folder / "large.jpg")  # 42 million pixels, which a JPEG need not decode
    Image.new("1", (9000, 9000)).save(folder / "large.png")
    write(folder, ["0.png", "2.png", "large.jpg", "large.png"])
    assert ids(folder) == ["0.png", "2.png", "large.jpg"]


def test_bad_rows_are_counted_and_named_at_every_start(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, ["0.png", "gone.png", "1.png", "2.png", *["gone.png"] * 3, "3.png", "4.png", "5.png"])
    for _ in range(2):
        caplog.clear()
        assert len(ids(folder)) == 6
        assert "pairs.jsonl: image_missing, 4 times in 10 rows (line 2, line 5, line 6 ...), such as: " in caplog.text
        assert f"{folder / 'gone.png'}. There is no such file." in caplog.text


def test_a_hopeless_source_is_refused_and_leaves_nothing(folder: Path, own_cache: Path) -> None:
    write(folder, ["img/0.png", "img/1.png", "2.png"])
    message = (
        r"^--train_file is pairs.jsonl; 2 of 3 rows are bad, more than half [^\n]*img/0.png[^\n]* --image_root[^\n]* If not, and they shall "
        r"be left out, run prepare_data.py with --max_bad_fraction 1, and give its folder as --dataset_name.$"
    )
    with pytest.raises(ValueError, match=message):
        load(folder)
    assert not (own_cache / "tandem_pairs").exists() or not results(own_cache)


# -- the report --------------------------------------------------------------------------------------------------------
FEATURES = Features({
    "id": Value("string"), "image": ImageFeature(decode=False), "width": Value("int32"), "height": Value("int32"),
    "captions": [Value("string")],
})  # fmt: skip
SOURCE = {"name": "one", "path": "a.jsonl", "format": "jsonl", "rows": 1000, "bad": 109, "kept": 891}
LINE = {"source": "a.jsonl", "where": "line 7", "detail": "cut"}
SUMMARY = {
    "settings": {"short_side": 258, "near": True, "validation_fraction": None, "test_fraction": 0.0},
    "ungrouped": {},
    "medium": "image",
    "sources": [SOURCE],
    "quarantined": {"image_truncated": {"count": 109, "explanation": "The image ends too early.", "examples": [LINE]}},
    "notes": {"exif_rotated": 4321},
    "own_splits": False,
    "duplicates": {"near_pairs": 22, "largest_group": 33, "merged_rows": 44, "examples": []}
    | {"neighbours": {"count": 0, "outside": 0}, "groups": 9, "merged_files": ""},
    "leakage": {"policy": "drop", "exact": 51, "near": 52, "by_id": 53, "dropped": {"train": 1560}, "examples": []},
    "storage": {"store": "jpeg"},
}


@pytest.fixture
def empty_pictures() -> None:
    """Here they are drawn."""


def split(name: str, count: int, **changes: Any) -> Dataset:
    rows = []
    for row in range(count):
        data = io.BytesIO()
        Image.new("RGB", (40 + row, 30), (row * 5 % 256, 90, 200)).save(data, format="PNG")
        image = {"bytes": data.getvalue(), "path": None}
        captions = [f"caption {row}", "another"]
        rows.append(
            {"id": f"{name}-{row}", "image": image, "width": 40 + row, "height": 30, "captions": captions, **changes}
        )
    return Dataset.from_list(rows, features=FEATURES)


def report(folder: Path, pairs: DatasetDict, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    splits, captions = measure(pairs)
    write_report(folder, pairs, {**SUMMARY, "splits": splits, "captions": captions, **changes})
    text = (folder / "report.md").read_text(encoding="utf-8")
    for name in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text):
        assert (folder / name).is_file(), name
    return text


def test_the_report_shows_its_figures_and_says_what_matters_first(tmp_path: Path) -> None:
    pairs = DatasetDict({"train": split("train", 30), "test": split("test", 5)})
    text = report(tmp_path, pairs)
    for part in (
        "**35 images with 70 captions** were kept from 1,000 rows of 1 source. Set aside: 109 rows or captions.",
        "Merged: 44 rows of equal images. Copies across splits: 156 images; dropped: 1,560 rows.",
        "10.9% of the rows of one were set aside",
        "35 images share one caption, which tells none from the others: another",
        "One image occurs 33 times",
        "The split train has 30 images, too few to learn from (50 are a beginning): 300 and more are better.",
        "The test split has 5 images; recall on fewer than 30 says little. Add pairs, or set --test_fraction.",
        "There is no validation split, and training will hold out 6 images of train; the rows are in 9 groups of equal",
        "| train | 30 | 60 | 0.0 MiB |",
        "| image_truncated | 109 | The image ends too early. | a.jsonl, line 7, cut |",
        "| exif_rotated | 4,321 | The camera's rotation was applied. |",
    ):
        assert part in text.replace("\\_", "_")
    assert "The splits leak" not in text
    assert "words and signs" not in text
    assert "Latin" not in text
    long = report(
        tmp_path, DatasetDict(train=split("train", 4, captions=["one, two " * 40, "kurz", "一只狗", "собака бежит"]))
    )
    assert "4 of 16 captions have more than 62 words and signs, at most 120; training cuts them at " in long
    assert "8 of 16 captions are not in Latin script" in long
    text = report(tmp_path, pairs, leakage={**SUMMARY["leakage"], "exact": 1, "near": 0, "by_id": 0, "dropped": {}})
    assert text.split("## Look at this first\n\n")[1].startswith("- The splits leak")
    for kind, contents in {"clip": [clip(), clip(fps=8)], "sound": [tone(300, 900), tone(300)]}.items():
        text = report(tmp_path, DatasetDict(train=media_rows(kind, contents, seconds=[60.0, 30.04])), medium=kind)
        assert f"**2 {kind}s with 2 captions** were kept" in text
        assert f"| split | {kind}s | captions |" in text


HOSTILE = [
    "<script>alert(1)</script> | b \\| c `code` **bold** [link](http://evil.example) www.evil.example $x^2$ \\frac{1 $",
    "line\nbreak\r\n# heading\u2028- item\x00\x1b[31m\u202egnp",
    "桌子上的红色圆圈 😀 قطة " * 9,
]


@pytest.mark.filterwarnings("error")
def test_hostile_captions_ids_and_names_stay_text(tmp_path: Path) -> None:
    rows = [split("train", 1, id=text, captions=[text] * 2)[0] for text in [*HOSTILE, ""]]
    pairs = DatasetDict({"../up|b](x)": Dataset.from_list(rows, features=FEATURES)})
    copies = {**SUMMARY["duplicates"], "examples": [[text, text] for text in HOSTILE]}
    sources = [{**SOURCE, "name": text, "path": text, "format": text} for text in HOSTILE]
    text = report(tmp_path, pairs, duplicates=copies, sources=sources)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs.jpg", "report.md"]
    assert not re.search(r"<|[\x00\x1b\u202e]|(?<!\\)\]\(http|http://|www\.|(?<!\\)\$", text)
    table = text.split("## Sources")[1].split("##")[0]
    assert {line.replace("\\|", "").count("|") for line in table.splitlines()} == {0, 7}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_corpus(tmp_path_factory.mktemp("raw"))
    rows = read_lines(path)
    rows.append({**rows[0], "image": "images/nowhere.png", "captions": ["of nobody"]})
    write_lines(path, rows)
    folder = tmp_path_factory.mktemp("out") / "my pairs"
    flags = ["--on_leakage", "keep", "--max_bad_fraction", "1", "--num_proc", "1"]
    main(["--sources", str(path), "--output_dir", str(folder), *flags])
    return folder


def test_the_card_shows_the_report_and_datasets_opens_the_folder_by_it(prepared: Path, tmp_path: Path) -> None:
    card = DatasetCard.load(prepared / "README.md")
    assert (prepared / "report.md").read_text().partition("\n")[2].strip() in card.text
    found = datasets.load_dataset(str(prepared), cache_dir=str(tmp_path))
    stored = datasets.load_from_disk(str(prepared))
    assert found["train"][0]["image"].size == (stored["train"][0]["width"], stored["train"][0]["height"])
    assert {name: rows["content_id"][:] for name, rows in found.items()} == {
        name: rows["content_id"][:] for name, rows in stored.items()
    }


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_of_a_turned_picture_is_that_of_what_is_shown(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.new("RGB", (60, 40), (200, 30, 60)).save(buffer, "JPEG", exif=exif)
    checked = check_image(buffer.getvalue(), CheckArguments())
    assert (checked.width, checked.height) == checked.image.size == ((40, 60) if orientation >= 5 else (60, 40))
