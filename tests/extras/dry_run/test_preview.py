"""A few lines that say what pairs look like."""

import io

import datasets
import pytest
from PIL import Image

from mm_utils.extras.dry_run.preview import describe_pairs
from mm_utils.model.processor import train_tokenizer
from tests.kit.media_files import media_rows, tone


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def lines():
    rows = datasets.Dataset.from_dict(
        {
            "id": ["a", "b", "c", "d"],
            "image": [{"bytes": data, "path": None} for data in (png(20, 40), png(90, 60), b"no image", png(90, 61))],
            "captions": [["one two three"], ["one", "One "], ["one two"], ["word " * 50]],
        }
    )
    return describe_pairs(rows, train_tokenizer(["one two three word"] * 9, 100), 6, 32)


def test_sizes_come_from_the_headers_that_can_be_read(lines):
    assert "images: shorter side 20 to 61, median 60, at most 61 px; 33.3% are enlarged to 32" in lines


def test_captions_are_counted_in_tokens_before_they_are_cut(lines):
    assert "captions: 1.2 an image; tokens 3 to 52, median 4, at most 52; 20.0% are cut by --max_seq_length 6" in lines


def test_equal_captions_are_named(lines):
    assert "the same caption again: 20.0%; equal captions are not negatives" in lines


def test_examples_are_short_and_say_which_image_is_damaged(lines):
    assert lines[-3:] == ["a, 20x40: one two three", "b, 90x60: one", "c, unreadable: one two"]


def test_a_long_caption_is_shortened():
    rows = datasets.Dataset.from_dict(
        {"id": ["a"], "image": [{"bytes": png(8, 8), "path": None}], "captions": [["word " * 50]]}
    )
    shown = describe_pairs(rows, train_tokenizer(["word"], 50), 64, 8)[-1]
    assert shown.endswith("…")
    assert len(shown) < 100


def test_seconds_of_sounds_are_told():
    rows = media_rows("sound", [tone(300)] * 3, seconds=[0.5, 2.04, 4.0])
    found = describe_pairs(rows, train_tokenizer(["number"] * 9, 100), 6, 0)
    assert found[0] == "sounds: 0.5 to 4.0, median 2.0, at most 4.0 s"
    assert found[1].startswith("captions: 1.0 a sound; tokens")
    assert found[-2] == "m1, 2.0 s: number 1"
