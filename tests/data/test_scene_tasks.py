"""What is asked about the embedded scenes, and that the answers are right."""

from collections import Counter

import datasets
import pytest

from mm_utils.data.scene_tasks import SCENE_TASKS, scene_examples
from mm_utils.data.scenes import COLOURS, load_scenes


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> datasets.Dataset:
    return load_scenes(num_train=120, num_eval=2, cache_dir=tmp_path_factory.mktemp("scenes"))["train"]


def row(*things: tuple[float, float, str]) -> datasets.Dataset:
    """A scene of things with boxes of 10 pixels at these corners."""
    regions = [{"box": [x, y, 10.0, 10.0], "phrase": phrase} for x, y, phrase in things]
    return datasets.Dataset.from_list([{"id": "one", "regions": regions}])


def test_describes_is_balanced_and_told_by_no_words(scenes: datasets.Dataset) -> None:
    examples = list(scene_examples("describes", scenes))
    assert len(examples) == 2 * len(scenes)
    assert Counter(label for _, _, label in examples) == {"yes": len(scenes), "no": len(scenes)}
    for (row_1, true, yes), (row_2, false, no) in zip(examples[::2], examples[1::2], strict=True):
        assert (row_1, yes, no) == (row_2, "yes", "no")
        assert true in scenes[row_1]["captions"]
        assert sorted(true.split()) == sorted(false.split()) or sorted(true) == sorted(false)


def test_counts_are_those_of_the_phrases(scenes: datasets.Dataset) -> None:
    examples = list(scene_examples("count", scenes))
    for place, text, label in examples:
        words = text.split()
        assert (words[:2], words[-3:]) == (["how", "many"], ["things", "are", "there?"])
        phrases = [region["phrase"].split() for region in scenes[place]["regions"]]
        kind = words[2:-3]
        assert int(label) == (sum(kind[0] in phrase for phrase in phrases) if kind else len(phrases))
    assert {label for _, _, label in examples} == {"0", "1", "2", "3"}


def test_a_neighbour_is_asked_for_where_there_is_one_on_that_side() -> None:
    scene = row((5, 40, "large plain red star"), (50, 40, "small dotted blue circle"))
    assert sorted(scene_examples("colour", scene)) == [
        (0, "what colour is the thing to the left of the blue circle?", "red"),
        (0, "what colour is the thing to the right of the red star?", "blue"),
    ]
    above = row(
        (12, 42, "large plain red star"), (42, 42, "small dotted blue circle"), (27, 12, "large plain black cross")
    )
    asked = {text for _, text, _ in scene_examples("colour", above)}
    possible = {
        "what colour is the thing to the left of the blue circle?": "red",
        "what colour is the thing to the right of the red star?": "blue",
        "what colour is the thing above the blue circle?": "black",
        "what colour is the thing above the red star?": "black",
    }
    assert asked <= set(possible)  # never what is below the cross: there are two
    assert len(asked) == 2
    assert all(possible[text] == label for _, text, label in scene_examples("colour", above))


def test_colours_are_of_things_in_the_picture(scenes: datasets.Dataset) -> None:
    examples = list(scene_examples("colour", scenes))
    assert len(examples) == 2 * len(scenes)
    for place, text, label in examples:
        there = [region["phrase"].split()[2] for region in scenes[place]["regions"]]
        named = text.split()[-2]
        assert {label, named} <= set(there) & set(COLOURS)
        assert label != named


@pytest.mark.parametrize("task", SCENE_TASKS)
def test_the_questions_follow_from_the_scene(task: str, scenes: datasets.Dataset) -> None:
    assert list(scene_examples(task, scenes)) == list(scene_examples(task, scenes))
    alone = scenes.select([7])
    moved = [(text, label) for place, text, label in scene_examples(task, scenes) if place == 7]
    assert [(text, label) for _, text, label in scene_examples(task, alone)] == moved


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(ValueError, match=r"--task is scenes:size; choose one of scenes:describes, scenes:count"):
        scene_examples("size", row())
