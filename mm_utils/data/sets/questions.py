"""Questions about the embedded scenes, clips and sounds, to fine-tune on.

No text alone and no picture alone decides the answer to one about a scene: every picture is asked about with texts of different
answers, and all words of a text are true of many pictures. The id of a picture decides its questions.

describes: a true caption, and the same words in the order that makes them false; yes or no, as many of each.
colour: of the one thing on a side of another, which is named by colour and shape; one of eight, never the named one.
"""

import random
from collections.abc import Iterator
from typing import Any

import datasets

from mm_utils.data.scenes import order_pairs

_QUESTIONS = 2  # about a picture, among those with a single answer
_SIDES = {"left": "to the left of", "right": "to the right of", "above": "above", "below": "below"}

Example = tuple[int, str, str]
"""Row of the medium, text, name of the class."""


def describes(split: datasets.Dataset) -> Iterator[Example]:
    """Ask whether a text describes the picture: a true caption and a false order of its words."""
    for row, true, false in order_pairs(split):
        yield row, true, "yes"
        yield row, false, "no"


def colour(split: datasets.Dataset) -> Iterator[Example]:
    """Ask for the colour of the only thing on a side of another one."""
    for row, scene in enumerate(split.select_columns(["id", "regions"])):
        questions = list(_neighbours(scene["regions"]))
        rng = random.Random(f"colour {scene['id']}")
        for side, named, asked in rng.sample(questions, min(_QUESTIONS, len(questions))):
            _, _, colour, shape = named["phrase"].split()
            answer = asked["phrase"].split()[2]
            yield row, f"what colour is the thing {_SIDES[side]} the {colour} {shape}?", answer


def _neighbours(regions: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield a side, a thing, and the only thing on that side of it."""
    for named in regions:
        sides: dict[str, list[dict[str, Any]]] = {}
        for other in regions:
            if other is not named:
                sides.setdefault(_side(other["box"], named["box"]), []).append(other)
        yield from ((side, named, others[0]) for side, others in sides.items() if len(others) == 1)


def _side(box: list[float], other: list[float]) -> str:
    """Return the side of `other` on which `box` lies, by the larger distance of the centres."""
    across, down = ((box[axis] + box[axis + 2] / 2) - (other[axis] + other[axis + 2] / 2) for axis in (0, 1))
    if abs(across) > abs(down):
        return "right" if across > 0 else "left"
    return "below" if down > 0 else "above"


TASKS = {
    "scenes:describes": describes,
    "scenes:colour": colour,
    "clips:describes": describes,
    "sounds:describes": describes,
}
"""By set and task, what yields examples of the rows of a split: row, text, name of the class."""
