"""Columns are found, and a table says what its image column holds."""

from pathlib import Path

import pytest
from datasets import Dataset, Features, Image, Value
from hypothesis import given
from hypothesis import strategies as st

from mm_utils.data.raw.columns import USUAL_NAMES, Columns, captions_of, find_columns, is_null, split_of
from mm_utils.data.raw.faults import Fault
from mm_utils.data.raw.paths import Jail
from mm_utils.data.raw.tables import open_text_table, path_id, with_raw_images


@pytest.mark.parametrize("image", USUAL_NAMES["image"])
@pytest.mark.parametrize("caption", ["caption", "Text", "SENTENCES"])
def test_usual_names_are_found_whatever_their_case(image: str, caption: str) -> None:
    found = find_columns(["x", image.upper(), caption], "a table", Columns())
    assert found == Columns(image.upper(), caption)


def test_a_column_that_is_asked_for_wins() -> None:
    names = ["image", "photo", "caption", "alt", "id", "lang"]
    assert find_columns(names, "t", Columns("photo", "alt", "id", "lang")) == Columns("photo", "alt", "id", "lang")
    assert find_columns(["image", "text"], "t", Columns(id="image")).id is None


@pytest.mark.parametrize(
    ("captions", "languages", "expected"),
    [
        ("a", "vi", (["a"], ["vi"])),
        (["a", "b"], "vi", (["a", "b"], ["vi", "vi"])),
        (["a", "b"], ["vi", None], (["a", "b"], ["vi", ""])),
        (["a"], None, (["a"], None)),
        (None, "en", ([None], ["en"])),
    ],
)
def test_each_caption_gets_its_language(captions: object, languages: object, expected: object) -> None:
    assert captions_of({"c": captions, "l": languages}, Columns(caption="c", language="l")) == expected


@pytest.mark.parametrize("languages", [["en"], ["en", "vi", "de"], []])
def test_languages_of_another_number_are_a_fault(languages: list[str]) -> None:
    with pytest.raises(Fault) as fault:
        captions_of({"c": ["a", "b"], "l": languages}, Columns(caption="c", language="l"))
    assert fault.value.reason == "languages_mismatch"


def test_splits_have_many_names_and_no_others() -> None:
    assert [split_of(name) for name in ("Training", "restval", " val ", "dev", "TEST")] == [
        *("train", "train", "validation", "validation", "test")
    ]
    for name in (None, "", "challenge", 3):
        with pytest.raises(Fault):
            split_of(name)


@pytest.mark.parametrize("value", [None, "", "  ", "nan", " NaN ", float("nan")])
def test_what_programs_write_for_no_value_is_null(value: object) -> None:
    assert is_null(value)
    assert not any(map(is_null, (0, "null and void", "None", [], False)))


@given(st.text(st.characters(exclude_characters="/\0"), min_size=1, max_size=8))
def test_an_id_made_of_a_path_can_be_stored(name: str) -> None:
    assert path_id(f"/root/a/{name}", "/root", "?").encode() is not None
    assert path_id(f"/rooted/{name}", "/root", "as written") == "as written"


def test_a_file_of_bad_lines_alone_is_an_error_that_shows_the_first(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("{\n[]\n")
    with pytest.raises(ValueError, match=r"p\.jsonl, line 1 is not valid JSON"):
        open_text_table(path, "--train_file is p.jsonl", Jail(str(tmp_path)), Columns())


@pytest.mark.parametrize(
    ("feature", "value", "embedded"),
    [
        (Value("string"), "a.png", False),
        (Value("large_string"), "a.png", False),
        (Value("binary"), b"x", True),
        (Value("large_binary"), b"x", True),
        (Image(decode=False), {"bytes": b"x", "path": None}, True),
        (Image(decode=False), {"bytes": None, "path": "a.png"}, False),
        ({"bytes": Value("binary"), "path": Value("string")}, {"bytes": b"x", "path": "a.png"}, True),
    ],
    ids=str,
)
def test_images_are_bytes_or_paths(feature: object, value: object, embedded: bool) -> None:
    dataset = Dataset.from_dict({"image": [value]}, features=Features({"image": feature}))
    assert with_raw_images(dataset, "image", "t")[1] is embedded
