"""Labelled tasks on the embedded scenes: does a text describe the picture, how many, which colour.

No text alone and no picture alone tells the answer: every picture is asked about with texts of different answers, and all
words of a text are true of many pictures. Which questions a picture is asked follows from its id.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import datasets

from mm_utils.data.scenes import SIZES, TEXTURES, order_pairs

Example = tuple[int, str, str]
"""Row of the scene, text, name of the class."""

_QUESTIONS = 2  # about a picture, of those that have one answer
_SIDES = {"left": "to the left of", "right": "to the right of", "above": "above", "below": "below"}


def scene_examples(task: str, split: datasets.Dataset) -> Iterator[Example]:
    """The examples of a task on one split of `mm_utils.data.scenes.load_scenes`, two for most pictures.

    describes: a true caption, and the same words in the order that makes them false; yes or no, as many of each.
    count: how many things of a size, a texture, or of any kind there are; 0 to 3.
    colour: of the one thing on a side of another, which is named by colour and shape; one of eight, never the named one.

    Raises:
        ValueError: if there is no such task.
    """
    if task not in SCENE_TASKS:
        raise ValueError(
            f"--task is scenes:{task}; choose one of {', '.join(f'scenes:{name}' for name in SCENE_TASKS)}."
        )
    return SCENE_TASKS[task](split)


def _describes(split: datasets.Dataset) -> Iterator[Example]:
    for row, true, false in order_pairs(split):
        yield row, true, "yes"
        yield row, false, "no"


def _count(split: datasets.Dataset) -> Iterator[Example]:
    words = ("", *SIZES, *TEXTURES)
    for row, scene in enumerate(split.select_columns(["id", "regions"])):
        phrases = [region["phrase"].split() for region in scene["regions"]]
        for word in random.Random(f"count {scene['id']}").sample(words, _QUESTIONS):
            number = sum(not word or word in phrase for phrase in phrases)
            yield row, f"how many {word} things are there?".replace("  ", " "), str(number)


def _colour(split: datasets.Dataset) -> Iterator[Example]:
    for row, scene in enumerate(split.select_columns(["id", "regions"])):
        questions = list(_neighbours(scene["regions"]))
        rng = random.Random(f"colour {scene['id']}")
        for side, named, asked in rng.sample(questions, min(_QUESTIONS, len(questions))):
            _, _, colour, shape = named["phrase"].split()
            answer = asked["phrase"].split()[2]
            yield row, f"what colour is the thing {_SIDES[side]} the {colour} {shape}?", answer


def _neighbours(regions: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """A side, a thing, and the one thing on that side of it."""
    for named in regions:
        sides: dict[str, list[dict[str, Any]]] = {}
        for other in regions:
            if other is not named:
                sides.setdefault(_side(other["box"], named["box"]), []).append(other)
        yield from ((side, named, others[0]) for side, others in sides.items() if len(others) == 1)


def _side(box: list[float], other: list[float]) -> str:
    """On which side of the second box the first one lies: that of the larger distance between their centres."""
    across, down = ((box[axis] + box[axis + 2] / 2) - (other[axis] + other[axis + 2] / 2) for axis in (0, 1))
    if abs(across) > abs(down):
        return "right" if across > 0 else "left"
    return "below" if down > 0 else "above"


SCENE_TASKS: dict[str, Callable[[datasets.Dataset], Iterator[Example]]] = {
    "describes": _describes,
    "count": _count,
    "colour": _colour,
}
