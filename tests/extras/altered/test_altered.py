"""Alterations of captions: by hand, on the drawn scenes, and on texts that are none."""

import random
import re
import time
from collections import Counter
from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from mm_utils.data.scenes import load_scenes
from mm_utils.extras.altered import captions as altered
from mm_utils.extras.altered.captions import (
    KINDS,
    AlteredTokens,
    Caption,
    Drawing,
    Vocabulary,
    altered_captions,
    event_order,
    replace_attribute,
    replace_noun,
    replace_spatial,
    swap_attributes,
    swap_nouns,
)
from mm_utils.model.build import ModelArguments
from mm_utils.model.processor import load_processor

OTHERS = ["a green box on an old elephant.", "two white apples, three wooden houses"]


def alter(kind: Any, text: str, seed: int = 0) -> str | None:
    caption = Caption(text)
    vocabulary = Vocabulary([caption, *map(Caption, OTHERS)])
    return kind(caption, Drawing(random.Random(seed), vocabulary, frozenset(caption.tokens)))


@pytest.mark.parametrize(
    ("kind", "true", "false"),
    [
        (swap_attributes, "a red ball and a blue cube", "a blue ball and a red cube"),
        (swap_attributes, "Red balls, blue cubes", "Blue balls, red cubes"),
        (swap_attributes, "an orange ball with a small red cube", "a red ball with a small orange cube"),
        (swap_attributes, "two dogs and three cats.", "three dogs and two cats."),
        (swap_attributes, "a red ball and a red cube", None),  # would stay true
        (swap_attributes, "a red ball and a blue ball", None),
        (swap_attributes, "a large ball and a big cube", None),
        (swap_attributes, "a red ball and a large cube", None),
        (swap_nouns, "a red ball and a blue cube", "a red cube and a blue ball"),
        (swap_nouns, "A dog on an old chair.", "A chair on an old dog."),
        (swap_nouns, "an apple under the tree", "a tree under the apple"),
        (swap_nouns, "a red square and a blue star", "a red star and a blue square"),
        (swap_nouns, "a dog and a cat", None),  # would stay true
        (swap_nouns, "a dog on the chairs", None),
        (swap_nouns, "a dog. A man on the chair", "a dog. A chair on the man"),
        (replace_attribute, "an orange ball", "a {green|white} ball"),
        (replace_attribute, "a big ball", None),  # no other size in these captions
        (replace_attribute, "the sky is blue", None),  # no noun follows
        (replace_noun, "A ball on two cubes", "A {box} on two cubes|An {elephant} on two cubes|A ball on two {apples|houses}"),
        (replace_noun, "a photo of people", None),
        (replace_spatial, "a ball to the left of a cube", "a ball to the right of a cube"),
        (replace_spatial, "a ball above it", "a ball below it"),
        (replace_spatial, "a ball in front of a cube", "a ball behind a cube"),
        (replace_spatial, "a ball beside a cube, which was moveover", None),
        (event_order, "a dog barks, then it rains", "it rains, then a dog barks"),
        (event_order, "A dog barks and then a cat, then rain falls.", "Rain falls and then a cat, then a dog barks."),
        (event_order, "first a dog barks, after that it rains", "first it rains, after that a dog barks"),
        (event_order, "first a dog barks, and a cat runs after that", "first a cat runs, and a dog barks after that"),
        (event_order, "A beep is followed by a bang", "A bang is followed by a beep"),
        (event_order, "a man speaks then a dog barks", "a dog barks then a man speaks"),
        (event_order, "a man speaks and a dog then barks", None),  # no events between the words
        (event_order, "a dog barks now and then, then a cat runs", None),
        (event_order, "a dog barks, then a dog barks", None),  # would stay true
        (event_order, "A dog barks. A cat runs, then sleeps.", None),
        (event_order, "a man before a house", None),
        (event_order, "A dog barks, then .", None),  # nothing, or a space, follows
        (event_order, "A dog barks and then ", None),
    ],
)  # fmt: skip
def test_by_hand(kind: Any, true: str, false: str | None) -> None:
    found = {alter(kind, true, seed) for seed in range(20)}
    if false is None or "{" not in false:
        assert found == {false}
        return
    expected = set()
    for each in re.split(r"\|(?![^{]*\})", false):
        before, words, after = re.split("[{}]", each)
        expected |= {before + word + after for word in words.split("|")}
    assert found == expected


def test_names_and_capitals_stay() -> None:
    assert alter(swap_attributes, "The White House and a red car") is None
    assert alter(replace_attribute, "Black Lives Matter on a wall") is None
    assert alter(replace_attribute, "Orange balls") in ("Green balls", "White balls")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> datasets.Dataset:
    return load_scenes(num_train=1, num_eval=40, cache_dir=tmp_path_factory.mktemp("scenes"))["validation"]


def test_scenes_can_be_altered_in_every_way(scenes: datasets.Dataset) -> None:
    found = altered_captions(scenes)
    counts = Counter(probe.kind for probe in found)
    assert counts.keys() == KINDS.keys() - {"event_order"}  # nothing happens in them
    assert all(count > 25 for count in counts.values())
    for probe in found:
        row = scenes[probe.row]
        english = [text for text, code in zip(row["captions"], row["languages"], strict=True) if code == "en"]
        assert probe.true in english
        assert probe.false not in row["captions"]
        words, others = (Counter(re.findall(r"\w+", text)) for text in (probe.true, probe.false))
        if probe.kind.startswith("swap"):
            assert words == others
        elif probe.kind != "replace_spatial":
            assert sum((words - others).values()) in (1, 2)  # a word, and perhaps the article before it
    assert found == altered_captions(scenes), "the probes must follow from the rows"


def test_a_swap_of_scenes_moves_a_colour_a_size_or_a_texture(scenes: datasets.Dataset) -> None:
    moved = set()
    for probe in altered_captions(scenes):
        if probe.kind == "swap_attributes":
            true, false = probe.true.split(), probe.false.split()
            moved |= {word.strip(",") for word, other in zip(true, false, strict=True) if word != other}
    assert {"red", "small", "striped"} <= moved
    assert not moved & {"circle", "square", "left", "a"}


def test_other_languages_have_no_probes(scenes: datasets.Dataset) -> None:
    german = scenes.map(lambda row: {"languages": ["de"] * len(row["captions"])})
    assert altered_captions(german) == []
    assert altered_captions(scenes.remove_columns("languages")) != []


def test_of_many_rows_some_are_taken_from_everywhere(
    scenes: datasets.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(altered, "MOST_IMAGES", 20)
    monkeypatch.setattr(altered, "MOST_PROBES", 5)
    found = altered_captions(scenes)
    assert {row % 2 for row in (probe.row for probe in found)} == {0}
    assert max(Counter(probe.kind for probe in found).values()) == 5
    assert max(probe.row for probe in found) > 25


@settings(max_examples=30)
@given(st.lists(st.text(st.sampled_from("a an the red Red two balls .,'’ -\nis ")), min_size=1, max_size=4))
def test_any_text_is_taken(captions: list[str]) -> None:
    rows = datasets.Dataset.from_dict({"captions": [captions]})
    for probe in altered_captions(rows):
        assert probe.true in captions
        assert probe.false not in captions


def test_endless_captions_are_left_out() -> None:
    """Pairs of groups, and "if ... then", take time by the square of the length."""
    began = time.process_time()
    rows = datasets.Dataset.from_dict(
        {"captions": [["a dog barks, then " + "if " * 60_000], ["a red ball and " * 6_000]]}
    )
    assert altered_captions(rows) == []
    assert time.process_time() - began < 1


TOLD = {
    "first eight, then two, then five": {"first five, then two, then eight"},
    "a dog barks, then it rains": {"it rains, then a dog barks"},
    "a red ball left of a blue cube": {
        "a blue ball left of a red cube",
        "a red cube left of a blue ball",
        "a red ball right of a blue cube",
    },
    "a dog": set(),
    "the sound of rain": set(),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    words = " ".join({*" ".join(TOLD).replace(",", " ").split(), "right"})
    return load_processor(ModelArguments(), [*TOLD, words] * 9).tokenizer


@pytest.mark.parametrize(("caption", "expected"), TOLD.items())
def test_tokens_are_altered_by_swaps(tokenizer: Any, caption: str, expected: set[str]) -> None:
    ids = tuple(tokenizer(caption)["input_ids"])
    found = AlteredTokens(tokenizer).of(ids)
    assert {tokenizer.decode(each, skip_special_tokens=True) for each in found} == expected
    assert all(len(each) <= len(ids) for each in found)
    assert found == AlteredTokens(tokenizer).of(ids)


def test_tokens_of_another_making_are_not_altered(tokenizer: Any) -> None:
    """Unknown letters would be lost, and a mark of a language, too: the altered caption would give itself away."""
    ids = tokenizer("a red ball left of a blue cube")["input_ids"]
    alter = AlteredTokens(tokenizer).of
    assert alter(tuple(ids))
    assert alter((*ids[:3], tokenizer.unk_token_id, *ids[3:])) == alter((ids[0], *ids)) == alter(()) == []
