"""Count what a pair data set holds, column by column: sizes, caption lengths, languages.

No image is read and no row becomes a Python object: columns are read in batches, so memory does not grow with the
number of rows, and every figure is exact, since whole numbers are counted rather than sampled.
"""

import functools
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

_BATCH_ROWS = 4000
# What `str.split()` takes for a gap; RE2's own \s knows ASCII only.
_WORD = r"[^\s\x0b\x1c-\x1f\x{85}\p{Z}]+"
_NO_LETTERS = "no letters"


@dataclass
class PairStatistics:
    """How often each value occurs, in one split; every counter maps a value to its count.

    `short_side` and `aspect` are of the original images where the columns `original_width` and `original_height`
    are there, else of the stored ones, and empty without either; `original` says which. `aspect` is
    round(10 log2(width / height)): 0 is square, 10 twice as wide as high. Words are what spaces separate, so a
    sentence in Chinese or Thai is one or few. `languages` is empty without such a column, or if it says nothing;
    `scripts` is counted instead, by the writing system of most letters of a caption.
    """

    images: int = 0
    captions: int = 0
    original: bool = False
    short_side: Counter[int] = field(default_factory=Counter)
    aspect: Counter[int] = field(default_factory=Counter)
    captions_per_image: Counter[int] = field(default_factory=Counter)
    words: Counter[int] = field(default_factory=Counter)
    characters: Counter[int] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    scripts: Counter[str] = field(default_factory=Counter)


def measure_pairs(split: Dataset) -> PairStatistics:
    """The statistics of one split with a `captions` column; the other columns are optional.

    It costs about 7 s of one core for a million images with five captions each, twice that where scripts are guessed.
    """
    found = PairStatistics(original={"original_width", "original_height"} <= set(split.column_names))
    sides = ("original_width", "original_height") if found.original else ("width", "height")
    names = [name for name in (*sides, "captions", "languages") if name in split.column_names]
    columns = split.select_columns(names).with_format("arrow")
    for table in columns.iter(_BATCH_ROWS):
        if set(sides) <= set(names):
            _count_sizes(found, *(table[side].to_numpy().astype(float) for side in sides))
        _count_captions(found, table["captions"])
        if "languages" in names:
            _add(found.languages, pc.list_flatten(table["languages"]))
    if not any(found.languages):
        found.languages.clear()
        for table in columns.iter(_BATCH_ROWS):
            _count_scripts(found, pc.list_flatten(table["captions"]))
    return found


def quantile(counts: Counter[int], share: float) -> int:
    """The smallest value that at least `share` of all do not exceed; 0 if there are none."""
    if not counts:
        return 0
    values = sorted(counts)
    below = np.cumsum([counts[value] for value in values])
    return values[int(np.searchsorted(below, share * below[-1]))]


def mean(counts: Counter[int]) -> float:
    """The mean of all values; 0 if there are none."""
    return sum(value * count for value, count in counts.items()) / (counts.total() or 1)


def _add(counts: Counter[Any], values: pa.ChunkedArray | pa.Array) -> None:
    for pair in pc.value_counts(values).to_pylist():
        if pair["values"] is not None:
            counts[pair["values"]] += pair["counts"]


def _count_sizes(found: PairStatistics, width: np.ndarray, height: np.ndarray) -> None:
    known = (width > 0) & (height > 0)  # False for a missing value, too
    width, height = width[known], height[known]
    _add(found.short_side, pa.array(np.minimum(width, height).astype(np.int64)))
    _add(found.aspect, pa.array(np.round(10 * np.log2(width / height)).astype(np.int64)))


def _count_captions(found: PairStatistics, lists: pa.ChunkedArray) -> None:
    captions = pc.list_flatten(lists).drop_null()
    found.images += len(lists)
    found.captions += len(captions)
    _add(found.captions_per_image, pc.fill_null(pc.list_value_length(lists), 0))
    _add(found.words, pc.count_substring_regex(captions, pattern=_WORD))
    _add(found.characters, pc.utf8_length(captions))


def _count_scripts(found: PairStatistics, captions: pa.ChunkedArray) -> None:
    captions = captions.drop_null()
    names, of_letter = _scripts()
    lengths = pc.utf8_length(captions).to_numpy()
    text = pc.binary_join(pa.ListArray.from_arrays([0, len(captions)], captions.combine_chunks()), "")[0].as_py()
    letters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    caption = np.repeat(np.arange(len(captions)), lengths)
    scripts = of_letter[np.minimum(letters, 0xFFFF)]
    table = np.bincount(caption * len(names) + scripts, minlength=len(captions) * len(names))
    table = table.reshape(len(captions), len(names))
    kana, han = names.index("Kana"), names.index("Han")
    japanese = table[:, kana] > 0  # a Japanese sentence may well have more Han letters than kana
    table[japanese, kana] += table[japanese, han]
    table[japanese, han] = 0
    table[:, 0] = 0  # spaces, digits, signs: the script only where there is nothing else
    for script, count in enumerate(np.bincount(table.argmax(axis=1), minlength=len(names))):
        if count:
            found.scripts[names[script]] += int(count)


@functools.cache
def _scripts() -> tuple[list[str], np.ndarray]:
    """The names of scripts, and the index of each letter's; Unicode's name of a letter starts with its script."""
    names = [_NO_LETTERS, "Kana", "Han"]
    index = {"HIRAGANA": 1, "KATAKANA": 1, "KATAKANA-HIRAGANA": 1, "CJK": 2}
    of_letter = np.zeros(0x10000, dtype=np.int64)
    for code in range(0x10000):
        letter = chr(code)
        if unicodedata.category(letter) in ("Lu", "Ll", "Lt", "Lo") and (name := unicodedata.name(letter, "")):
            script = name.removeprefix("HALFWIDTH ").removeprefix("FULLWIDTH ").split()[0]
            if script not in index:
                index[script] = len(names)
                names.append(script.capitalize())
            of_letter[code] = index[script]
    return names, of_letter
