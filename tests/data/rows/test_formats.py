"""Formats of other data sets are recognised, and yield the same pairs."""

import json
from pathlib import Path

import pytest

from tests.kit.reading import (
    NAMES,
    PAIRS,
    TEXTS,
    check_format,
    joined,
    read,
    write,
)

COCO = {
    "info": {},
    "images": [{"id": at, "file_name": name} for at, name in enumerate(NAMES)],
    "annotations": [{"id": 9 - at, "image_id": at, "caption": text} for at, text in enumerate(TEXTS)][::-1],
}
KARPATHY = [{"filename": name, "sentences": [{"raw": text}], "split": "train"} for name, text in PAIRS]


FILES = [  # their names, what is in them, and the format
    ("captions_train2017.json", json.dumps(COCO), "coco"),
    ("dataset_coco.json", json.dumps({"images": KARPATHY, "dataset": "coco"}), "karpathy"),
    ("results.token", joined("#0\t"), "flickr"),
    ("captions.txt", joined(",", "image,caption"), "flickr"),
    ("results.csv", joined("| 0| ", "image_name| comment_number| comment"), "flickr"),
]


@pytest.mark.parametrize(("name", "text", "expected"), FILES)
def test_every_file_is_recognised_and_gives_the_same_pairs(name: str, text: str, expected: str, folder: Path) -> None:
    check_format(folder, write(folder / name, text), expected)


def test_formats_of_images_alone_say_so(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"images": [], "annotations": []}')
    with pytest.raises(ValueError, match="coco is read for images alone, and the medium is sound"):
        read(tmp_path / "a.json", medium="sound")
