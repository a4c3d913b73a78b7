"""The embedded data set: synthetic scenes with captions.

A run without arguments trains on them, and needs no network. To know which words occur is not enough: half of the drawn contents get a *twin* in their split,
whose captions have the same words in another order, as its first two objects are exchanged (67 % of the default training images
are one of such a pair). Each content occurs at most once, and a hash of what it shares with its twin decides the split, so that
validation and test hold combinations that training never has. There are 62.9 million possible contents. Captions may leave out size or texture, so
0.2 % of the training captions also describe another scene. The 5000 default scenes take 6 s on one core and 9 MB on disk.
Pixels are the same everywhere, PNG bytes with the same Pillow and zlib.
"""

import hashlib
import io
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from PIL import Image
from tqdm.auto import tqdm

from mm_utils.stored import stored

logger = logging.getLogger(__name__)

GENERATOR_VERSION = "3"
"""Part of the cache folder's name; raise it with every change of a generated row."""

SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")
COLOURS = {
    "red": (214, 30, 34), "green": (28, 150, 60), "blue": (34, 70, 214), "yellow": (246, 224, 40),
    "orange": (245, 134, 20), "purple": (138, 40, 170), "white": (252, 252, 252), "black": (22, 22, 24),
}  # fmt: skip
SIZES = {"small": 8.0, "large": 12.5}  # half the extent of an object in pixels
TEXTURES = ("plain", "striped", "dotted")

_OVERSAMPLING = 4
_SIDE = 64  # pixels
# 72 degrees apart
_STAR_NORMALS = [(round(np.sin(k * np.pi / 2.5), 6), round(np.cos(k * np.pi / 2.5), 6)) for k in range(5)]

_AXES = {"x": ("left", "right"), "y": ("above", "below")}
_WORDS = {
    "left": {"short": "left of", "side": "to the left of", "its": "to its left", "place": "on the left"},
    "right": {"short": "right of", "side": "to the right of", "its": "to its right", "place": "on the right"},
    "above": {"short": "above", "side": "above", "its": "above it", "place": "at the top"},
    "below": {"short": "below", "side": "below", "its": "below it", "place": "at the bottom"},
}
_TEMPLATES = (  # and what a third object adds
    ("{a} {short} {b}", ", with {c} {third_side} both"),
    ("{a} is {side} {b}", ", and {c} {third_side} both"),
    ("{side} {b} is {a}", ", with {c} {third_side} both of them"),
    ("{a} with {b} {other_its}", ", and {c} {third_side} both of them"),
    ("{place} {a}, {other_place} {b}", ", and {c} {third_side} both"),
    ("{a} and {b}, the {a_colour} one {side} the {b_colour} one", ", with {c} {third_side} both"),
)
_DETAILS = (("size", "texture"), ("size", "texture"), ("size",), ("texture",))
_FEATURES = datasets.Features({
    "id": datasets.Value("string"),
    "image": datasets.Image(decode=False),
    "captions": [datasets.Value("string")],
    "regions": [{"box": [datasets.Value("float32")], "phrase": datasets.Value("string")}],
})  # fmt: skip


class _Thing(NamedTuple):
    size: str
    texture: str
    colour: str
    shape: str


class _Scene(NamedTuple):
    """The first thing is left of or above the second (`axis`); a third is on `side` of both."""

    axis: str
    side: str
    things: tuple[_Thing, ...]

    def group(self) -> str:
        first, second, *third = map(" ".join, self.things)
        return "; ".join([self.axis, self.side, *sorted([first, second]), *third])

    def twin(self) -> "_Scene":
        first, second, *third = self.things
        return self._replace(things=(second, first, *third))


def load_scenes(
    num_train: int = 4000, num_eval: int = 500, cache_dir: str | os.PathLike[str] | None = None
) -> datasets.DatasetDict:
    """Load the splits train, validation and test from the cache; generate them on first use.

    A row has `id`, `image` (PNG bytes, not decoded), four `captions` and `regions`
    (a `box` as x, y, width, height in pixels and a `phrase` for each object). Mirror twins are neighbouring rows. The cache is `cache_dir`, or else the one of `datasets`.
    """

    def generate(folder: Path) -> None:
        logger.info("Generating %s scenes into %s", f"{num_train + 2 * num_eval:,}", folder.parent)
        splits = datasets.DatasetDict()
        for split, scenes in _draw_scenes({"train": num_train, "validation": num_eval, "test": num_eval}).items():
            bar = tqdm(scenes, desc=f"Generating {split} scenes", unit="image")
            rows = [_row(scene, split, number) for number, scene in enumerate(bar)]
            splits[split] = datasets.Dataset.from_list(rows, features=_FEATURES)
        splits.save_to_disk(str(folder))

    key = f"v{GENERATOR_VERSION}-size{_SIDE}-train{num_train}-eval{num_eval}-seed0"
    return datasets.DatasetDict.load_from_disk(str(stored("scenes", key, generate, cache_dir)))


def _draw_scenes(counts: dict[str, int], seed: str = "0 contents") -> dict[str, list[_Scene]]:
    """Draw n scenes of every split, twins beside each other."""
    rng = random.Random(seed)
    scenes: dict[str, list[_Scene]] = {split: [] for split in counts}
    seen: set[str] = set()
    while any(len(scenes[split]) < count for split, count in counts.items()):
        scene = _draw_scene(rng)
        with_twin = rng.random() < 0.5
        group = scene.group()
        bucket = hashlib.sha256(group.encode()).digest()[0]
        split = "train" if bucket < 205 else "validation" if bucket < 231 else "test"  # of 256: 80, 10 and 10 %
        room = counts[split] - len(scenes[split])
        if room and group not in seen:
            seen.add(group)
            scenes[split] += [scene, scene.twin()][: min(room, 1 + with_twin)]
    return scenes


def colour_questions(split: datasets.Dataset) -> Iterator[tuple[int, str, str]]:
    """Yield a row, a question about its scene, and the answer: the colour of the only thing on a side of another one.

    The other thing is named by colour and shape, and is of another colour. A scene has two questions, which its id decides. Neither
    the text nor the picture alone tells the answer.
    """
    for row, scene in enumerate(split.select_columns(["id", "regions"])):
        questions = []
        for named in scene["regions"]:
            colours: dict[str, list[str]] = {}
            for other in scene["regions"]:
                if other is not named:
                    # the third word of 'small striped red circle'
                    colours.setdefault(_side(other["box"], named["box"]), []).append(other["phrase"].split()[2])
            thing = " ".join(named["phrase"].split()[2:])
            questions += [
                (f"what colour is the thing {side} the {thing}?", found[0])
                for side, found in colours.items()
                if len(found) == 1
            ]
        rng = random.Random(f"colour {scene['id']}")
        yield from ((row, text, answer) for text, answer in rng.sample(questions, min(2, len(questions))))


def _side(box: list[float], other: list[float]) -> str:
    """Return in words the side of `other` on which `box` lies, by the larger distance of the centres."""
    across = (box[0] + box[2] / 2) - (other[0] + other[2] / 2)
    down = (box[1] + box[3] / 2) - (other[1] + other[3] / 2)
    if abs(across) > abs(down):
        return "to the right of" if across > 0 else "to the left of"
    return "below" if down > 0 else "above"


def _draw_scene(rng: random.Random) -> _Scene:
    colours = sorted(COLOURS, key=lambda _: rng.random())[: 2 if rng.random() < 0.5 else 3]  # shuffled
    axis, across = sorted(_AXES, key=lambda _: rng.random())
    side = rng.choices(_AXES[across])[0] if len(colours) == 3 else ""
    sizes, textures, shapes = [rng.choices(options, k=len(colours)) for options in (list(SIZES), TEXTURES, SHAPES)]
    return _Scene(axis, side, tuple(map(_Thing, sizes, textures, colours, shapes)))


def _row(scene: _Scene, split: str, number: int) -> dict[str, Any]:
    pixels, boxes = _draw(scene, random.Random(f"0 {split} {number}"))
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, format="PNG")
    return {
        "id": f"scene-{split}-{number:05d}",
        "image": {"bytes": png.getvalue(), "path": None},
        "captions": _captions(scene),
        "regions": [{"box": box, "phrase": " ".join(thing)} for box, thing in zip(boxes, scene.things, strict=True)],
    }


def _captions(scene: _Scene) -> list[str]:
    """Return four captions; a twin gets the same templates and words."""
    rng = random.Random(f"0 {scene.group()}")
    return [_caption(scene, *template, rng) for template in rng.sample(_TEMPLATES, 4)]


def _caption(scene: _Scene, pattern: str, suffix: str, rng: random.Random) -> str:
    details = rng.choices(_DETAILS)[0]
    direction, other = _AXES[scene.axis]
    a, b, *third = scene.things
    if rng.random() < 0.5:
        direction, other = other, direction
        a, b = b, a
    filling = _WORDS[direction] | {f"other_{key}": value for key, value in _WORDS[other].items()}
    filling |= {"a": _phrase(a, details), "b": _phrase(b, details), "a_colour": a.colour, "b_colour": b.colour}
    if third:
        pattern += suffix
        filling |= {"c": _phrase(third[0], details), "third_side": _WORDS[scene.side]["side"]}
    return pattern.format(**filling)


def _phrase(thing: _Thing, details: tuple[str, ...]) -> str:
    """Name a thing with an indefinite article."""
    words = [*(getattr(thing, detail) for detail in details), thing.colour, thing.shape]
    return " ".join(["an" if words[0][0] in "aeiou" else "a", *words])


def _centres(scene: _Scene, rng: random.Random) -> list[tuple[float, float]]:
    """Place the things, at least 27 apart along their axis."""
    if not scene.side:
        apart = rng.uniform(27, 33)
        shift = rng.uniform(-1, 1)
        level = rng.uniform(-12, 12)
        along = [32 + shift - apart / 2, 32 + shift + apart / 2]
        across = [32 + level + rng.uniform(-4, 4) for _ in along]
    else:
        pair, third = (47.0, 17.0) if scene.side in ("left", "above") else (17.0, 47.0)
        along = [place + rng.uniform(-1.5, 1.5) for place in (17, 47, 32)]
        across = [place + rng.uniform(-1.5, 1.5) for place in (pair, pair, third)]
    return list(zip(along, across, strict=True) if scene.axis == "x" else zip(across, along, strict=True))


def _draw(scene: _Scene, rng: random.Random) -> tuple[np.ndarray, list[list[float]]]:
    """Return the picture, and the tight box of each thing in its order in the scene."""
    grey = rng.uniform(145, 175)
    pixels = np.empty((_SIDE, _SIDE, 3))
    pixels[:] = [grey + rng.uniform(-7, 7) for _ in range(3)]
    boxes = []
    for thing, centre in zip(scene.things, _centres(scene, rng), strict=True):
        half = SIZES[thing.size] * rng.uniform(0.96, 1.04)
        colour = np.clip([channel + rng.uniform(-8, 8) for channel in COLOURS[thing.colour]], 0, 255)
        boxes.append(_draw_thing(pixels, thing, colour, centre, half))
    return np.floor(pixels + 0.5).astype(np.uint8), boxes


def _draw_thing(
    pixels: np.ndarray, thing: _Thing, colour: np.ndarray, centre: tuple[float, float], half: float
) -> list[float]:
    left, top = [int(c - half) - 1 for c in centre]
    right, bottom = [int(c + half) + 2 for c in centre]
    # in pixels from the centre, at the middles of 4 x 4 samples a pixel
    x = (np.arange(left * _OVERSAMPLING, right * _OVERSAMPLING) + 0.5)[None, :] / _OVERSAMPLING - centre[0]
    y = (np.arange(top * _OVERSAMPLING, bottom * _OVERSAMPLING) + 0.5)[:, None] / _OVERSAMPLING - centre[1]
    inside = shape_mask(thing.shape, x / half, y / half)
    rim = (-_OVERSAMPLING, 0, _OVERSAMPLING)  # a pixel that no texture marks
    shifts = [(down, aside) for down in rim for aside in rim]
    core = np.logical_and.reduce([np.roll(inside, shift, axis=(0, 1)) for shift in shifts])
    marked = core & _marks(thing.texture, x, y)
    blocks = (bottom - top, _OVERSAMPLING, right - left, _OVERSAMPLING)
    share, marked_share = [mask.reshape(blocks).mean(axis=(1, 3))[..., None] for mask in (inside, marked)]
    # darker marks on light colours, lighter ones on dark colours
    ink = 0.25 * colour if colour @ (0.3, 0.59, 0.11) > 130 else 0.1 * colour + 0.9 * 255
    patch = pixels[top:bottom, left:right]
    patch[:] = (1 - share) * patch + (share - marked_share) * colour + marked_share * ink
    columns, rows = [np.flatnonzero(inside.any(axis=axis)) for axis in (0, 1)]
    corner = [left + columns[0] / _OVERSAMPLING, top + rows[0] / _OVERSAMPLING]
    return [*map(float, corner), *(float(span[-1] - span[0] + 1) / _OVERSAMPLING for span in (columns, rows))]


def shape_mask(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return a mask of the points in the shape, whose box is about [-1, 1]; y points down."""
    if shape == "circle":
        return x * x + y * y <= 1
    if shape == "square":
        return np.maximum(abs(x), abs(y)) <= 0.9
    if shape == "triangle":
        return (abs(x) <= (y + 0.95) / 1.9) & (y <= 0.95)
    if shape == "diamond":
        return abs(x) / 0.85 + abs(y) <= 1
    if shape == "cross":
        return (np.minimum(abs(x), abs(y)) <= 0.36) & (np.maximum(abs(x), abs(y)) <= 1)
    # Of the five lines that draw a star, at most one separates a point of it from its centre. The disc widens it.
    y = y - 0.1
    near = [x * normal_x + y * normal_y <= 0.33 for normal_x, normal_y in _STAR_NORMALS]
    return (np.sum(near, axis=0) >= 4) | (x * x + y * y <= 0.34)


def _marks(texture: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if texture == "striped":
        return np.mod(x + y + 1.3, 6.0) < 2.6
    if texture == "dotted":
        dx, dy = [np.mod(v + 2.4, 4.8) - 2.4 for v in (x, y)]
        return dx * dx + dy * dy <= 1.6**2
    return np.zeros(np.broadcast_shapes(x.shape, y.shape), dtype=bool)
