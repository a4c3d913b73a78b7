"""Sources that cannot be read as a whole are refused in one line that says what to do."""

import re
from pathlib import Path

import pytest

from scripts.prepare_data import main
from tests.data.prepare.fault_images import draw

HEADER, WHOLE = b"image,caption\n", b"image,caption\n0.png,a dog\n1.png,a cat\n"
LINES = b'{"image": "0.png", "caption": "a dog"}\n{"image": "1.png", "caption": "a cat"}\n'
GONE = b'{"image": "none.png", "caption": "a dog"}\n'
REFUSED = {  # kind: file, its content (None: there is none), further keys and flags, and what the message must say
    "UTF-16 lines": ("a.jsonl", LINES.decode().encode("utf-16"), "", "a.jsonl is UTF-16 text. Save it as UTF-8"),
    "UTF-16 cells": ("a.csv", WHOLE.decode().encode("utf-16"), "", "a.csv is UTF-16 text. Save it as UTF-8"),
    "a UTF-16 document": (
        "a.json",
        '{"images": []}'.encode("utf-16"),
        ",format=coco",
        "UTF-16 text. Save it as UTF-8",
    ),
    "an empty file of lines": ("a.jsonl", b"", "", "holds no rows. Give a file"),
    "an empty table": ("a.csv", b"", "", "holds no rows. Give a file"),
    "a table of a header": ("a.csv", HEADER, "", "holds no rows. Give a file"),
    "an empty array": ("a.json", b"[]", "", "holds no rows. Give a file"),
    "an array that is cut": ("a.json", b'[{"image": "0.png", "cap', "", "Repair it"),
    "a file that is not there": ("a.jsonl", None, "", "there is no such file or folder. Check the path"),
    "an archive that is not there": ("{000..002}.tar", None, "", "000.tar. Check the path and the range"),
    "an unknown suffix": ("a.xlsx", LINES, "", "its format is not known by '.xlsx'. Set format= to one of"),
    "an unknown format": ("a.jsonl", LINES, ",format=jsonlines", "Did you mean"),
    "an unknown key": ("a.jsonl", LINES, ",caption=x", "--sources has the key caption; known are"),
    "a column that is not there": (
        "a.jsonl",
        LINES,
        ",caption_column=captoin",
        "Did you mean 'caption'? The columns are",
    ),
    "no column of captions": ("a.csv", b"image,words\n0.png,a dog\n", "", "no caption column was recognised"),
    "a column twice": (
        "a.csv",
        b"image,caption,caption\n",
        "",
        "two columns caption; only one can be read. Rename one",
    ),
    "a header in Latin-1": ("a.csv", b"image,l\xe9gende\n", "", "a.csv is not UTF-8 text"),
    "Parquet that is none": ("a.parquet", LINES, "", "cannot be read as Parquet"),
    "Parquet that is cut": ("a.parquet", b"PAR1" + bytes(50), "", "cannot be read as Parquet"),
    "COCO that is cut": ("a.json", b'{"images": [{"id": 1', ",format=coco", "Copy or repair the file"),
    "COCO of objects": ("a.json", b'{"images": [], "categories": []}', ",format=coco", "no list 'annotations'"),
    "only images that are missing": ("a.jsonl", GONE * 20, "", "20 of 20 rows are bad"),
    "every tenth image missing": ("a.jsonl", (LINES * 9 + GONE * 2) * 3, "", "6 of 60 rows are bad, more than"),
    "no row that is good, though all may be bad": ("a.jsonl", GONE * 20, " --max_bad_fraction 1", "no row is left"),
    "a single pair": ("a.jsonl", LINES.splitlines()[0], " --validation_fraction 0", "at least 2. Add some"),
    "captions of nowhere": ("a.txt", b"0.png\n", ",format=parallel", "Set captions="),
    "a split of another name": ("a.jsonl", LINES, ",split=dev2", "Name one of them"),
    "an image root that is none": ("a.jsonl", LINES, ",image_root=/nowhere", "Give the folder of the images"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_source_that_cannot_be_read_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    name, content, more, message = REFUSED[kind]
    for number in range(2):
        draw(number).save(tmp_path / f"{number}.png")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    keys, *flags = more.split(" ")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        main(
            ["--sources", f"{tmp_path / name}{keys}", "--output_dir", str(tmp_path / "out"), "--num_proc", "1", *flags]
        )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
