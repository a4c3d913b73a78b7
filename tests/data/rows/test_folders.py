"""Folders of classes and of images beside their list, and a reader of one's own."""

import json
import re
from pathlib import Path

import pytest

from tests.kit.reading import lines, put, read, reasons, write


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
    write(folder / "set" / "README.txt", "about")
    write(folder / "set" / "captions.jsonl", lines({"image": "images/a.jpg", "caption": "a"}))
    (folder / "set" / "images").mkdir()
    (folder / "a.jpg").rename(folder / "set" / "images" / "a.jpg")
    with pytest.raises(ValueError, match=r"holds images and captions\.jsonl, .* Give .*captions\.jsonl as the source"):
        read(folder / "set")
    assert len(read(folder / "set", format="classes")[0]) == 1
    assert len(read(folder / "set" / "captions.jsonl")[0]) == 1
    with pytest.raises(ValueError, match="the format of this folder is not recognised"):
        read(write(folder / "other" / "README.txt", "about").parent)
    for files, message in (
        (("a.png", "captions.txt"), "holds images and captions.txt"),
        (("a.png",), "holds images and no captions"),
    ):
        put(*files)(folder / f"flat {len(files)}")
        with pytest.raises(ValueError, match=message):
            read(folder / f"flat {len(files)}")


def test_a_function_of_ones_own_reads_a_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs/data.md").read_text()
    [block] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def read_diary" in block]
    assert len(block.splitlines()) <= 20
    (folder / "diary.py").write_text(block + "\n\ndef odd(source, paths):\n    yield 1\n")
    monkeypatch.syspath_prepend(str(folder))
    file = write(folder / "diary.txt", "a.jpg: a house\nno colon\n9.png: gone\nb.jpg: a street\n")
    good, bad = read(file, format="diary.read_diary")
    assert [(record.id, record.captions) for record in good] == [("a.jpg", ["a house"]), ("b.jpg", ["a street"])]
    assert reasons(bad) == [("line 2", "malformed_row"), ("line 3", "image_missing")]
    for name, message in (
        ("diary.odd", "it yields int. Yield Record or BadRow"),
        ("diary.no", "format has diary.no; module 'diary' has no attribute"),
    ):
        with pytest.raises(ValueError, match=message):
            read(file, format=name)
    with pytest.raises(ValueError, match=r"known are .*sqlite.*, and a function of your own as module.function"):
        read(file, format="diary")
