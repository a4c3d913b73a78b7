"""Columns are found by their names; captions and splits by their values."""

import pytest

from mm_utils.data.faults import Fault
from mm_utils.data.rows.columns import USUAL_NAMES, Columns, find_columns, is_null, split_of
from mm_utils.data.rows.source import Source


@pytest.mark.parametrize("image", USUAL_NAMES["image"])
@pytest.mark.parametrize("caption", ["caption", "Text", "SENTENCES"])
def test_usual_names_are_found_whatever_their_case(image: str, caption: str) -> None:
    found = find_columns(["x", image.upper(), caption], "a table", Columns())
    assert found == Columns(image.upper(), caption)


def test_a_column_that_is_asked_for_wins() -> None:
    names = ["image", "photo", "caption", "alt", "id", "lang"]
    assert find_columns(names, "t", Columns("photo", "alt", "id", "lang")) == Columns("photo", "alt", "id", "lang")
    assert find_columns(["image", "text"], "t", Columns(id="image")).id is None


def test_an_exact_name_wins_over_another_case() -> None:
    for names in (["Caption", "caption", "image"], ["caption", "Caption", "image"]):
        assert find_columns(names, "t", Columns()).caption == "caption"
    with pytest.raises(ValueError, match=r"Caption and CAPTION differ in case alone\. Set --caption_column to one"):
        find_columns(["Caption", "CAPTION", "image"], "t", Columns())
    assert find_columns(["Caption", "CAPTION", "image"], "t", Columns(caption="CAPTION")).caption == "CAPTION"


def test_an_error_names_the_flag_or_the_key_of_a_source_and_few_columns() -> None:
    with pytest.raises(ValueError, match=r"t; no image .* The columns are: Bild, text\. Set --image_column\."):
        find_columns(["Bild", "text"], "t", Columns())
    with pytest.raises(
        ValueError, match=r"--sources has a\.csv; no .* Write it behind the path: ,image_column=NAME\."
    ):
        find_columns(["Bild", "text"], "--sources has a.csv", Source("a.csv").columns)
    with pytest.raises(ValueError, match=r"and 99,961 more\.") as caught:
        find_columns(["token-" * 100_000, *map(str, range(100_000))], "t", Columns(image="token-" * 9))
    assert len(str(caught.value)) < 1000


def test_splits_have_many_names_and_no_others() -> None:
    assert [split_of(name) for name in ("Training", "restval", " val ", "dev", "TEST", "eval")] == [
        *("train", "train", "validation", "validation", "test", "test")
    ]
    for name in (None, "", "challenge", 3):
        with pytest.raises(Fault):
            split_of(name)


@pytest.mark.parametrize("value", [None, "", "  ", "nan", " NaN ", float("nan")])
def test_null_values_of_programs_are_null(value: object) -> None:
    assert is_null(value)
    assert not any(map(is_null, (0, "null and void", "None", [], False)))
