"""Stock CLIP and SigLIP get the same figures here as by a plain loop with their own classes, and by transformers' pipeline."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModel, AutoProcessor

from scripts import eval_retrieval
from tests.kit.corpora import COLOURS, SHAPES, draw
from tests.kit.jsonl import read_lines, write_lines
from tests.kit.stock_folders import write_stock
from tests.kit.truthful_model import figures_of_lists, lists_by_sorting

IMAGES = 32
DIRECTIONS = ("text_to_image", "image_to_text")
# SigLIP squeezes an image into a square, CLIP cuts one out; here it is always cut, which is the same for squares.
SHAPE = {"clip": (52, 44), "siglip": (44, 44)}


@pytest.fixture(scope="module", params=["clip", "siglip"])
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A kind, and the folder of a random model of it."""
    return request.param, write_stock(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def photos(stock: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noisy shapes in `classes/`, a folder for each, and `pairs.jsonl`, of one to three captions an image."""
    folder = tmp_path_factory.mktemp("photos")
    noise = random.Random(0)
    rows = []
    for number in range(IMAGES):
        colour = noise.choice(list(COLOURS))
        shape = noise.choice(SHAPES)
        image = draw(colour, shape).resize(SHAPE[stock[0]])
        image = Image.blend(image, Image.effect_noise(image.size, 90).convert("RGB"), 0.4)
        path = folder / "classes" / colour / f"{number}.png"
        path.parent.mkdir(exist_ok=True, parents=True)
        image.save(path)
        captions = [f"a {colour} {shape}", f"number {number}: {shape}", f"{shape} in {colour}, one of {number}"]
        captions = [f"{number} {caption}" for caption in captions[: noise.randint(1, 3)]]
        rows.append({"image": f"classes/{colour}/{number}.png", "captions": captions, "split": "test"})
    write_lines(folder / "pairs.jsonl", rows)
    return folder


def padded(kind: str) -> dict[str, Any]:
    """How a kind pads its texts: SigLIP always to the longest that it can read."""
    return {"padding": "max_length", "max_length": 64} if kind == "siglip" else {"padding": True}


@torch.no_grad()
def test_retrieval_equals_a_plain_loop(stock: tuple[str, str], photos: Path) -> None:
    kind, folder = stock
    found = eval_retrieval.main([
        *("--model_name_or_path", folder, "--test_file", str(photos / "pairs.jsonl"), "--split", "test"),
        *("--rerank_top_k", "0", "--dataloader_num_workers", "0"),
    ])  # fmt: skip
    rows = read_lines(photos / "pairs.jsonl")
    texts = [caption for row in rows for caption in row["captions"]]
    owner = torch.tensor([number for number, row in enumerate(rows) for _ in row["captions"]])
    model = AutoModel.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    images = [Image.open(photos / row["image"]).convert("RGB") for row in rows]
    out = model(**processor(text=texts, images=images, return_tensors="pt", **padded(kind)))
    cosine = out.text_embeds @ out.image_embeds.T
    right = owner[:, None] == torch.arange(IMAGES)
    for direction, scores, is_right in zip(DIRECTIONS, (cosine, cosine.T), (right, right.T), strict=True):
        expected = figures_of_lists(lists_by_sorting(scores, is_right))
        assert 0.1 < expected["recall@10"] < 1, "a figure that is always the same would prove nothing"
        for name, value in expected.items():
            assert found[f"{direction}_{name}"] == pytest.approx(value, abs=1e-12), f"{direction} {name}"
