import hashlib
import io
import json
import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from mm_utils.data import scenes as scenes_module
from mm_utils.data.scenes import COLOURS, SHAPES, SIZES, TEXTURES, load_scenes, order_pairs

SMALL = {"num_train": 300, "num_eval": 60}
TINY = {"num_train": 12, "num_eval": 2}

GERMAN_STEMS = {
    "klein": "small", "groß": "large", "einfarbig": "plain", "gestreift": "striped", "gepunktet": "dotted",
    "rot": "red", "grün": "green", "blau": "blue", "gelb": "yellow", "orangefarben": "orange",
    "violett": "purple", "weiß": "white", "schwarz": "black",
}  # fmt: skip
GERMAN_NOUNS = {
    "Kreis": ("circle", "der"), "Quadrat": ("square", "das"), "Dreieck": ("triangle", "das"),
    "Stern": ("star", "der"), "Kreuz": ("cross", "das"), "Raute": ("diamond", "die"),
}  # fmt: skip
GERMAN_FORMS = {
    ("nominative", "der"): ("ein", "er"), ("nominative", "die"): ("eine", "e"), ("nominative", "das"): ("ein", "es"),
    ("accusative", "der"): ("einen", "en"), ("accusative", "die"): ("eine", "e"), ("accusative", "das"): ("ein", "es"),
    ("dative", "der"): ("einem", "en"), ("dative", "die"): ("einer", "en"), ("dative", "das"): ("einem", "en"),
}  # fmt: skip
DIRECTIONS = {
    "left": ["left of", "to the left of", "to its left", "on the left", "links", "links von"],
    "right": ["right of", "to the right of", "to its right", "on the right", "rechts", "rechts von"],
    "above": ["above", "above it", "at the top", "oben", "über"],
    "below": ["below", "below it", "at the bottom", "unten", "unter"],
}
DIRECTION_OF = {words: direction for direction, phrases in DIRECTIONS.items() for words in phrases}
OPPOSITE = {"left": "right", "right": "left", "above": "below", "below": "above"}
ENGLISH_PHRASE = re.compile(
    rf"\b(an?) ((?:(?:{'|'.join(SIZES)}) )?(?:(?:{'|'.join(TEXTURES)}) )?({'|'.join(COLOURS)}) (?:{'|'.join(SHAPES)}))\b"
)
GERMAN_PHRASE = re.compile(rf"\b(ein\w*) ((?:[a-zß-ü]+ )+)({'|'.join(GERMAN_NOUNS)})\b")
SIDE = "(" + "|".join(sorted(DIRECTION_OF, key=len, reverse=True)) + ")"
THING = r"<(\w+)>"


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> datasets.DatasetDict:
    return load_scenes(**SMALL, cache_dir=tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def rows(scenes: datasets.DatasetDict) -> list[dict[str, Any]]:
    return [row for split in scenes.values() for row in split]


def pixels_of(row: dict[str, Any]) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])))


def centre(region: dict[str, Any]) -> np.ndarray:
    x, y, width, height = region["box"]
    return np.array([x + width / 2, y + height / 2])


def holds(row: dict[str, Any], fact: tuple[str, str, str]) -> bool:
    """Whether the relation is true of the boxes with the margin that the data set promises."""
    by_colour = {region["phrase"].split()[2]: region for region in row["regions"]}
    first, direction, second = fact
    difference = centre(by_colour[first]) - centre(by_colour[second])
    axis, sign = {"left": (0, -1), "right": (0, 1), "above": (1, -1), "below": (1, 1)}[direction]
    along, across = difference[axis] * sign, abs(difference[1 - axis])
    return along >= pixels_of(row).shape[0] / 5 and along > 1.2 * across


def german_case(caption: str) -> str:
    beginnings = {"Man sieht": "accusative", "Das Bild zeigt": "accusative", "Ein Bild mit": "dative"}
    return next((case for words, case in beginnings.items() if caption.startswith(words)), "nominative")


def abstract(caption: str, language: str) -> tuple[str, list[set[str]]]:
    """The caption with `<colour>` for each noun phrase, and the attribute words of each, in English."""
    described: list[set[str]] = []

    def english(match: re.Match[str]) -> str:
        assert match[1] == ("an" if match[2][0] in "aeiou" else "a")
        described.append(set(match[2].split()))
        return f"<{match[3]}>"

    def german(match: re.Match[str]) -> str:
        shape, definite = GERMAN_NOUNS[match[3]]
        article, ending = GERMAN_FORMS[german_case(caption), definite]
        assert match[1] == article, caption
        assert all(word.endswith(ending) for word in match[2].split()), caption
        words = [GERMAN_STEMS[word[: -len(ending)]] for word in match[2].split()]
        described.append({*words, shape})
        return f"<{words[-1]}>"

    if language == "en":
        return ENGLISH_PHRASE.sub(english, caption), described
    return GERMAN_PHRASE.sub(german, caption), described


def facts_of(caption: str, language: str) -> list[tuple[str, str, str]]:
    """Every relation the caption states, as (colour, direction, colour)."""
    text = abstract(caption, language)[0]
    text = text.replace("Von links nach rechts:", "sweep left").replace("Von rechts nach links:", "sweep right")
    text = text.replace("Von oben nach unten:", "sweep above").replace("Von unten nach oben:", "sweep below")
    text = text[0].lower() + text[1:]
    third = re.search(
        rf"(?:, and|, with|,|;| sowie) (?:{THING} )?{SIDE} (?:both(?: of them)?|beiden)(?: ist)?(?: {THING})?$", text
    )
    facts = []
    if third:
        text = text[: third.start()]
    places = [
        (rf"{THING} (?:is )?{SIDE} {THING}", (1, 2, 3)),
        (rf"{THING} and {THING}, the \1 one {SIDE} the \2 one", (1, 3, 2)),
        (rf"{SIDE} {THING} is {THING}", (3, 1, 2)),
        (rf"{THING} with {THING} {SIDE}", (2, 3, 1)),
        (r"sweep (\w+) " + rf"{THING}, {THING}", (2, 1, 3)),
        (rf"{SIDE}(?: ist)? {THING}, {SIDE}(?: ist)? {THING}", (2, 1, 4, 3)),
        (rf"man sieht {SIDE} {THING} und {SIDE} {THING}", (2, 1, 4, 3)),
        (rf"(?:das Bild zeigt|ein Bild mit) {THING} {SIDE} und {THING} {SIDE}", (1, 2, 3, 4)),
    ]
    for pattern, (first, side, second, *opposite) in places:
        if match := re.fullmatch(pattern, text):
            direction = DIRECTION_OF.get(match[side], match[side])
            assert not opposite or DIRECTION_OF[match[opposite[0]]] == OPPOSITE[direction]
            facts.append((match[first], direction, match[second]))
    assert len(facts) == 1, f"{caption!r} became {text!r}"
    if third:
        side, added = DIRECTION_OF[third[2]], third[1] or third[3]
        facts += [(added, side, colour) for colour in (facts[0][0], facts[0][2])]
    return facts


def bag(caption: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", caption))


def group_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Content up to exchanging the first two objects, from the regions alone."""
    first, second, *third = row["regions"]
    axis = int(np.argmax(abs(centre(first) - centre(second))))
    side = bool(third) and bool(centre(third[0])[1 - axis] > centre(first)[1 - axis])
    return axis, side, tuple(sorted([first["phrase"], second["phrase"]])), tuple(region["phrase"] for region in third)


def test_schema_and_sizes(scenes: datasets.DatasetDict, rows: list[dict[str, Any]]) -> None:
    assert {name: len(split) for name, split in scenes.items()} == {"train": 300, "validation": 60, "test": 60}
    assert scenes["train"][7]["id"] == "scene-train-00007"
    assert len({row["id"] for row in rows}) == len(rows)
    assert scenes["train"].features["image"] == datasets.Image(decode=False)
    assert scenes["train"].cache_files, "the rows should be memory-mapped"
    for row in rows:
        assert row["image"]["path"] is None
        assert pixels_of(row).shape == (64, 64, 3)
        assert len(set(row["captions"])) == 4
        assert row["languages"] in (["en", "en", "de", "de"], ["en", "en", "en", "de"])
        assert len(row["regions"]) in (2, 3)


def test_the_same_seed_makes_the_same_bytes(scenes: datasets.DatasetDict, tmp_path: Path) -> None:
    again = load_scenes(**SMALL, cache_dir=tmp_path)
    assert all(again[split].to_list() == scenes[split].to_list() for split in scenes)
    other = load_scenes(**TINY, seed=1, cache_dir=tmp_path)
    assert other["train"][0]["captions"] != scenes["train"][0]["captions"]


def test_rows_change_only_with_the_generator_version(scenes: datasets.DatasetDict) -> None:
    """Guards old caches: where the digest changes on purpose, GENERATOR_VERSION must be raised with it."""
    digest = hashlib.sha256()
    for row in scenes["train"].select(range(40)):
        digest.update(pixels_of(row).tobytes())
        digest.update(json.dumps([row["captions"], row["regions"], row["order_pair"]]).encode())
    assert (scenes_module.GENERATOR_VERSION, digest.hexdigest()[:16]) == ("1", "c486fbda89eb1af0")


def test_captions_are_true(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        for caption, language in zip(row["captions"], row["languages"], strict=True):
            facts = facts_of(caption, language)
            assert len(facts) == (3 if len(row["regions"]) == 3 else 1), caption
            assert all(holds(row, fact) for fact in facts), (row["id"], caption)


def test_splits_share_no_content(scenes: datasets.DatasetDict) -> None:
    groups = [{group_of(row) for row in split} for split in scenes.values()]
    assert not groups[0] & groups[1]
    assert not groups[0] & groups[2]
    assert not groups[1] & groups[2]


def test_order_pairs_differ_only_in_order(scenes: datasets.DatasetDict) -> None:
    split = scenes["test"]
    pairs = list(order_pairs(split))
    assert [index for index, _, _ in pairs] == list(range(len(split)))
    for index, true, false in pairs:
        row = split[index]
        assert true in row["captions"]
        assert bag(true) == bag(false)
        assert all(holds(row, fact) for fact in facts_of(true, "en"))
        assert not holds(row, facts_of(false, "en")[0])


def test_second_load_reads_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger=scenes_module.__name__):
        first = load_scenes(**TINY, cache_dir=tmp_path)
        monkeypatch.delattr(scenes_module, "_row")
        second = load_scenes(**TINY, cache_dir=tmp_path)
    assert first["train"].to_list() == second["train"].to_list()
    assert len(caplog.records) == 1
    assert not list(tmp_path.rglob("*.tmp-*"))


@pytest.mark.parametrize(("name", "value"), [("image_size", 32), ("num_train", 0), ("num_eval", -1)])
def test_numbers_out_of_range(name: str, value: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}; "):
        load_scenes(**{name: value}, cache_dir=tmp_path)
