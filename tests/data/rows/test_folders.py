"""Folders and lists are joined by key, whatever their order."""

import json
import os
from pathlib import Path

import pytest

from tests.kit.reading import NAMES, content, read, reasons, write


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
