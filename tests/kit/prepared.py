"""What a prepared data set says of itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CLOSE = 12  # levels of 255; pictures of two numbers differ by 50 and more


def report_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def quarantine_of(folder: Path) -> list[dict[str, str]]:
    return [json.loads(text) for text in (folder / "quarantine.jsonl").read_text().splitlines()]


def pixels_apart(image: Image.Image, other: Image.Image) -> float:
    """Mean difference in levels of 255."""
    return float(np.abs(np.asarray(image, np.float32) - np.asarray(other, np.float32)).mean())
