import unicodedata
from collections import Counter
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value
from hypothesis import given
from hypothesis import strategies as st

from mm_utils.data.statistics import mean, measure_pairs, quantile

TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \t\n\x0b\x1c\x85\u00a0\u3000aé中かж"))
CAPTIONS = st.none() | st.lists(st.none() | TEXT, max_size=4)
ROWS = st.lists(
    st.fixed_dictionaries(
        {"width": st.none() | st.integers(0, 5000), "height": st.none() | st.integers(0, 5000), "captions": CAPTIONS}
    ),
    max_size=12,
)
FEATURES = Features({"width": Value("int32"), "height": Value("int32"), "captions": [Value("string")]})


def split(rows: list[dict[str, Any]], features: Features = FEATURES) -> Dataset:
    return Dataset.from_dict({name: [row[name] for row in rows] for name in features}, features=features)


@given(ROWS)
def test_every_count_equals_a_plain_loop(rows: list[dict[str, Any]]) -> None:
    found = measure_pairs(split(rows))
    captions = [caption for row in rows for caption in row["captions"] or [] if caption is not None]
    sizes = [(row["width"], row["height"]) for row in rows if row["width"] and row["height"]]
    assert (found.images, found.captions) == (len(rows), len(captions))
    assert found.short_side == Counter(min(size) for size in sizes)
    assert found.aspect == Counter(int(np.round(10 * np.log2(width / height))) for width, height in sizes)
    assert found.captions_per_image == Counter(len(row["captions"] or []) for row in rows)
    assert found.words == Counter(len(caption.split()) for caption in captions)
    assert found.characters == Counter(map(len, captions))
    assert found.scripts.total() == len(captions)


@given(st.lists(st.integers(0, 50), min_size=1), st.floats(0.01, 1))
def test_quantile_and_mean_are_numpys(values: list[int], share: float) -> None:
    assert quantile(Counter(values), share) == np.quantile(values, share, method="inverted_cdf")
    assert np.isclose(mean(Counter(values)), np.mean(values))


def test_nothing_has_no_quantile() -> None:
    assert (quantile(Counter(), 0.5), mean(Counter())) == (0, 0)


def test_scripts_are_those_of_most_letters() -> None:
    expected = {
        "a black cat": "Latin",
        "Một con mèo đen": "Latin",
        unicodedata.normalize("NFD", "Một con mèo đen"): "Latin",
        "чёрная кошка на iPhone": "Cyrillic",
        "桌子上的红色圆圈": "Han",
        "机の上の赤い円": "Kana",
        "책상 위의 원": "Hangul",
        "قطة سوداء": "Arabic",
        "काली बिल्ली": "Devanagari",
        "123 😀 !": "no letters",
        "": "no letters",
    }
    for caption, script in expected.items():
        row: dict[str, Any] = {"width": 1, "height": 1, "captions": [caption]}
        assert measure_pairs(split([row])).scripts == {script: 1}


def test_languages_replace_scripts_where_they_say_something() -> None:
    features = Features({"captions": [Value("string")], "languages": [Value("string")]})
    rows: list[dict[str, Any]] = [
        {"captions": ["a", "b"], "languages": ["en", ""]},
        {"captions": ["c"], "languages": None},
    ]
    found = measure_pairs(split(rows, features))
    assert found.languages == {"en": 1, "": 1}
    assert not found.scripts
    silent = measure_pairs(split([{"captions": ["a"], "languages": [""]}], features))
    assert not silent.languages
    assert silent.scripts == {"Latin": 1}


def test_original_sizes_win_over_stored_ones() -> None:
    sizes = {"width": [258], "height": [300], "original_width": [3000], "original_height": [1500]}
    found = measure_pairs(Dataset.from_dict({**sizes, "captions": [["a"]]}))
    assert found.original
    assert found.short_side == {1500: 1}
    assert found.aspect == {10: 1}


def test_batches_indices_and_formats_do_not_matter() -> None:
    rows: list[dict[str, Any]] = [
        {"width": 1 + at % 7, "height": 3, "captions": ["word " * (at % 5)] * (at % 3)} for at in range(9001)
    ]
    plain = split(rows)
    shuffled = plain.shuffle(seed=0).with_format("numpy")
    assert measure_pairs(shuffled) == measure_pairs(plain)
    assert measure_pairs(plain.select([5, 5, 7])).images == 3
