"""A tiny corpus on disk: coloured shapes and their captions."""

import json
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (40, 70, 220), "yellow": (235, 205, 40)}
SHAPES = ("circle", "square")


def draw(colour: str, shape: str, size: int = 48) -> Image.Image:
    """A coloured shape on grey."""
    image = Image.new("RGB", (size, size), (120, 120, 120))
    box = [size // 4, size // 4, 3 * size // 4, 3 * size // 4]
    getattr(ImageDraw.Draw(image), "ellipse" if shape == "circle" else "rectangle")(box, fill=COLOURS[colour])
    return image


def write_corpus(folder: Path, copies: int = 3) -> Path:
    """`pairs.jsonl` and its images: 8 kinds of picture, `copies` of each, two captions an image, a third of them validation."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for copy in range(copies):
        for colour in COLOURS:
            for shape in SHAPES:
                name = f"images/{colour}-{shape}-{copy}.png"
                draw(colour, shape, 40 + 4 * copy).save(folder / name)
                captions = [f"a {colour} {shape}, number {copy}", f"number {copy}: one {shape} in {colour}"]
                split = "validation" if copy == copies - 1 else "train"
                rows.append({"image": name, "captions": captions, "split": split})
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
