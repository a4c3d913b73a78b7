"""A chunk of raw rows: what is stored of its images, what its faults are called, and that it is done only once."""

import hashlib
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from mm_utils.data.faults import Fault
from mm_utils.data.images import open_image
from mm_utils.data.prepare import ingest as module
from mm_utils.data.prepare.checks import CheckArguments
from mm_utils.data.prepare.ingest import Chunk, ChunkResult, Storage, cut_into_chunks, ingest, read_part, stored_hash
from mm_utils.data.rows.records import BadRow, BytesImage, FileImage, FramesImage, ImageRef, Record
from mm_utils.data.rows.tars import MemberImage
from tests.kit.fault_images import save

JPEG, RAW = Storage("jpeg", 64), Storage("raw", 64)
EVERYTHING = module.PART_SCHEMA.names


def picture(width: int = 120, height: int = 90) -> Image.Image:
    """A smooth gradient, which JPEG keeps well."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, 255 - x], axis=2).astype(np.uint8))


def record(data: bytes, *captions: Any, where: str = "line 1", **values: Any) -> Record:
    return Record("pairs", where, None, BytesImage(where, data), list(captions) or ["a gradient"], **values)


def stored(folder: Path, *items: Record | BadRow, storage: Storage = JPEG) -> tuple[list[dict[str, Any]], ChunkResult]:
    result = ingest(Chunk(0, items), folder, CheckArguments(), storage)
    return read_part(folder / "part-000000.arrow", EVERYTHING).to_pylist(), result


def test_an_image_is_shrunk_once(tmp_path: Path) -> None:
    data = save(picture(200, 150), "JPEG", quality=95)
    [row], _ = stored(tmp_path, record(data))
    assert (row["width"], row["height"]) == (85, 64) == Image.open(io.BytesIO(row["image"]["bytes"])).size
    assert (row["original_width"], row["original_height"], row["original_bytes"]) == (200, 150, len(data))
    assert row["image_hash"] == hashlib.sha256(data).hexdigest()
    assert row["stored_hash"] == stored_hash(row["image"]["bytes"])


def test_a_small_jpeg_is_not_compressed_twice(tmp_path: Path) -> None:
    data = save(picture(70, 60), "JPEG", quality=80)
    [row], _ = stored(tmp_path, record(data))
    assert row["image"] == {"bytes": data, "path": None}


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
def test_where_a_picture_was_taken_is_not_kept(form: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[271] = "Camera of Jane Doe"
    [row], _ = stored(tmp_path, record(save(picture(60, 60), form, exif=exif)))
    assert b"Jane Doe" not in row["image"]["bytes"]


def test_drawings_stay_lossless_where_that_is_smaller(tmp_path: Path) -> None:
    drawing, photo = Image.new("RGB", (60, 60), "red"), picture(60, 60)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8))
    data = [save(image, "PNG") for image in (drawing, noise)]
    rows, _ = stored(tmp_path, *map(record, data))
    assert [row["image"]["bytes"] == one for row, one in zip(rows, data, strict=True)] == [True, False]
    [row], _ = stored(tmp_path, record(save(photo, "JPEG")), storage=Storage("png", 64))
    assert Image.open(io.BytesIO(row["image"]["bytes"])).format == "PNG"


def test_raw_pixels_are_those_of_the_shrunk_image(tmp_path: Path) -> None:
    [row], _ = stored(tmp_path, record(save(picture(128, 128), "PNG")), storage=RAW)
    assert row["image"]["path"] == "raw:64x64"
    assert len(row["image"]["bytes"]) == 64 * 64 * 3
    assert open_image(row["image"]).getpixel((0, 0)) == pytest.approx((1, 1, 254), abs=3)


def test_originals_are_kept_on_request(tmp_path: Path) -> None:
    data = save(picture(300, 200), "JPEG")
    [row], _ = stored(tmp_path, record(data), storage=Storage("jpeg", None))
    assert (row["image"]["bytes"], row["width"], row["height"]) == (data, 300, 200)


def test_a_row_survives_bad_negatives(tmp_path: Path) -> None:
    given = [["a  dog", None, "a dog", ""], "a cat", [], None, 5]
    rows, result = stored(tmp_path, *(record(save(picture(), "JPEG"), negatives=each) for each in given))
    assert [row["negatives"] for row in rows] == [["a dog"], ["a cat"], None, None, []]
    assert [fault["reason"] for fault in result.faults] == ["caption_null", "caption_empty", "caption_not_text"]
    assert not sum(result.bad.values())


def test_a_row_survives_one_bad_caption(tmp_path: Path) -> None:
    items = [
        record(save(picture(), "JPEG"), "good", None, "good", " good  too"),
        record(save(picture(), "JPEG"), None, "", where="line 2"),
        BadRow("pairs", "line 4", Fault("malformed_row", "no JSON"), raw='{"image'),
    ]
    [row], result = stored(tmp_path, *items)
    assert row["captions"] == ["good", "good too"]
    assert [(fault["where"], fault["reason"]) for fault in result.faults] == [
        ("line 1", "caption_null"),
        ("line 2", "caption_null"),
        ("line 2", "caption_empty"),
        ("line 4", "malformed_row"),
    ]
    assert (result.rows, result.bad) == ({"pairs": 3}, {"pairs": 2})
    assert result.notes["caption_repeated"] == 1


def test_rows_of_one_image_decode_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    check = module.check_image
    monkeypatch.setattr(module, "check_image", lambda *args: calls.append(1) or check(*args))
    image = BytesImage("one", save(picture(), "JPEG"))
    rows, _ = stored(tmp_path, *(Record("pairs", f"line {at}", None, image, [f"caption {at}"]) for at in range(3)))
    assert [row["captions"] for row in rows] == [["caption 0"], ["caption 1"], ["caption 2"]]
    assert len(calls) == 1


def test_a_chunk_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [record(save(picture(), "JPEG")), record(b"broken", where="line 2")]
    first = stored(tmp_path, *items)
    with monkeypatch.context() as patch:
        patch.setattr(module, "check_image", lambda *_: pytest.fail("done again"))
        assert stored(tmp_path, *items) == first
    again, _ = stored(tmp_path, *items, storage=RAW)
    assert again != first[0]


CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], Any]] = {
    "the file is another picture": lambda path, _: path.write_bytes(save(picture(90, 90), "JPEG")),
    "its date": lambda path, _: os.utime(path, ns=(0, 0)),
    "it is gone": lambda path, _: path.unlink(),
    "PyAV is gone": lambda _, patch: patch.setitem(sys.modules, "av", None),
    "Pillow": lambda _, patch: patch.setattr("PIL.__version__", "1.0"),
    "this code": lambda _, patch: patch.setattr(module, "_VERSION", 0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["file", "frames", "member"])
def test_a_chunk_is_done_again_when_what_it_depends_on_changes(
    kind: str, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(content := save(picture(), "JPEG"))
    ref: ImageRef = FileImage(str(path))
    if kind == "frames":
        ref = FramesImage("frames", (ref, ref), None)
    elif kind == "member":
        ref = MemberImage("a.jpg", str(path), 0, len(content))
    items = (Record("pairs", "line 1", None, ref, ["a gradient"], medium="clip" if kind == "frames" else "image"),)
    key = stored(tmp_path, *items)[1].key
    assert stored(tmp_path, *items)[1].key == key
    CHANGES[change](path, monkeypatch)
    assert stored(tmp_path, *items)[1].key != key


def test_an_interrupted_chunk_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module.json, "dumps", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stored(tmp_path, record(save(picture(), "JPEG")))
    assert not list(tmp_path.glob("*.json"))
    assert len(stored(tmp_path, record(save(picture(), "JPEG")))[0]) == 1


def test_large_images_are_written_in_several_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 10_000)
    rows, _ = stored(tmp_path, *(record(save(picture(64, 64 + at), "PNG")) for at in range(5)), storage=RAW)
    assert len(rows) == 5
    with pa.memory_map(str(tmp_path / "part-000000.arrow")) as file:
        assert len(list(pa.ipc.open_stream(file))) == 5


def test_chunks_hold_all_rows_in_order() -> None:
    rows = [BadRow("pairs", f"line {at}", Fault("malformed_row", "")) for at in range(20_000)]
    chunks = list(cut_into_chunks(iter(rows)))
    assert [row for chunk in chunks for row in chunk.items] == rows
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    assert len(chunks[0].items) == 64
    assert max(len(chunk.items) for chunk in chunks) == 2048
