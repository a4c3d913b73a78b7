"""Embed and search with exported graphs, by numpy, onnxruntime, tokenizers, Pillow alone.

    python without_torch.py "a red door" photos/*.jpg

prints the images, best first. In Python, where this file lies in the folder of an export:

    from without_torch import Towers
    towers = Towers("outputs/onnx")
    cosines = towers.texts(["a red door"]) @ towers.images(["photos/0001.jpg"]).T
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageOps
from tokenizers import Tokenizer

SUFFIXES = {"fp32": "", "fp16": "_fp16", "int8": "_quantized"}


class Towers:
    """A folder's exported graphs; items go one by one, on which int8 depends a little.

    Args:
        folder: as `scripts/export.py` wrote it, with the layout plain or transformers.js.
        precision: fp32, fp16 or int8.
    """

    def __init__(self, folder: str | Path, precision: str = "fp32"):
        self.folder, self.suffix = Path(folder), SUFFIXES[precision]
        self.settings, self.pixels, words = (
            json.loads((self.folder / name).read_text(encoding="utf-8"))
            for name in ("export.json", "preprocessor_config.json", "tokenizer_config.json")
        )
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        length, pad = self._input("text_model", 1), words["pad_token"]
        pad = pad if isinstance(pad, str) else pad["content"]
        if words["model_max_length"] < 1e6:
            self.tokenizer.enable_truncation(words["model_max_length"])
        self.tokenizer.enable_padding(
            pad_id=self.tokenizer.token_to_id(pad), pad_token=pad, length=length if isinstance(length, int) else None
        )

    def images(self, images: Sequence[str | Path | Image.Image]) -> np.ndarray:
        """Return unit embeddings of image files or pictures, `[N, E]`."""
        return np.concatenate([self._run("vision_model", pixel_values=self._pixels(image))[0] for image in images])

    def texts(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit embeddings of texts, `[N, E]`."""
        return np.concatenate([self._run("text_model", **self._tokens(text))[0] for text in texts])

    def rank(self, text: str, images: Sequence[str | Path | Image.Image]) -> np.ndarray:
        """Return a text's score for each image, `[N]`: scaled cosine, plus an exported head's term."""
        scores = self.settings["logit_scale"] * (self.images(images) @ self.texts([text])[0])
        if not self.settings["rerank_weights"]:
            return scores
        sides = [self._run("reranker_images", pixel_values=self._pixels(image)) for image in images]
        blocks = {f"keys_values_{at}": np.concatenate(block) for at, block in enumerate(zip(*sides, strict=True))}
        return scores + self._run("reranker", **self._tokens(text), **blocks)[0][0]

    def _session(self, part: str) -> onnxruntime.InferenceSession:
        if part not in self._sessions:
            name = f"{part}{self.suffix}.onnx"
            found = [path for path in (self.folder / name, self.folder / "onnx" / name) if path.is_file()]
            if not found:
                raise FileNotFoundError(
                    f"{self.folder / name} is missing; export it with scripts/export.py --precision."
                )
            self._sessions[part] = onnxruntime.InferenceSession(found[0], providers=["CPUExecutionProvider"])
        return self._sessions[part]

    def _run(self, part: str, **inputs: np.ndarray) -> list[np.ndarray]:
        session = self._session(part)
        return session.run(None, {each.name: inputs[each.name] for each in session.get_inputs()})

    def _input(self, part: str, axis: int) -> Any:
        """Return the size of an axis of the first input, a name if any size will do."""
        return self._session(part).get_inputs()[0].shape[axis]

    def _tokens(self, text: str) -> dict[str, np.ndarray]:
        """Return ids and mask, `[1, L]`."""
        encoded = self.tokenizer.encode(text)
        sides = {"input_ids": encoded.ids, "attention_mask": encoded.attention_mask}
        return {name: np.array([values], np.int64) for name, values in sides.items()}

    def _pixels(self, image: Any) -> np.ndarray:
        """Return an image `[1, 3, S, S]`: upright, shorter side resized, centre cut, normalised."""
        if not isinstance(image, Image.Image):
            with Image.open(image) as file:
                file.load()
                image = file
        rgb = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        shorter, wanted = self.pixels["size"]["shortest_edge"], self.pixels["crop_size"]
        height, width = (int(side * shorter / min(rgb.shape[:2])) for side in rgb.shape[:2])
        if self.pixels["resample"] != Image.Resampling.BICUBIC:
            raise ValueError(
                f"resample is {self.pixels['resample']} in preprocessor_config.json; 3, bicubic, is known here."
            )
        rgb = resized(resized(rgb, width, 1), height, 0)
        top, left = (height - wanted["height"]) // 2, (width - wanted["width"]) // 2
        rgb = rgb[top : top + wanted["height"], left : left + wanted["width"]]
        mean, std = (np.array(self.pixels[f"image_{name}"], np.float32) for name in ("mean", "std"))
        return ((rgb * np.float32(self.pixels["rescale_factor"]) - mean) / std).transpose(2, 0, 1)[None]


def resized(pixels: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Resize one axis of uint8 pixels to `size`, by torch's antialiased bicubic filter.

    Pillow's filter rounds another bit of the weights: one pixel in 300 differs by one level, embeddings by 5e-4.
    """
    rows = np.moveaxis(pixels, axis, 0)
    scale = len(rows) / size
    stretch = max(scale, 1.0)
    places = []
    for place in range(size):
        centre = scale * (place + 0.5)
        first, last = max(int(centre - 2 * stretch + 0.5), 0), min(int(centre + 2 * stretch + 0.5), len(rows))
        x = np.abs((np.arange(first, last) - centre + 0.5) / stretch)
        near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
        weights = np.where(x < 1, near, np.where(x < 2, far, 0.0))
        places.append((first, last, weights / weights.sum()))
    largest, bits = max(weights.max() for _, _, weights in places), 0
    while bits < 22 and int(0.5 + largest * 2 ** (bits + 1)) < 2**15:
        bits += 1
    found = np.empty((size, *rows.shape[1:]), np.uint8)
    for place, (first, last, weights) in enumerate(places):
        whole = np.trunc(weights * 2**bits + np.copysign(0.5, weights))
        total = np.tensordot(whole, rows[first:last].astype(np.float64), 1)
        found[place] = np.clip(np.floor((total + 2 ** (bits - 1)) / 2**bits), 0, 255)
    return np.moveaxis(found, 0, axis)


def main() -> None:
    """Print the images, best first."""
    parser = argparse.ArgumentParser(description="Order images by how well they fit a text.")
    parser.add_argument("text")
    parser.add_argument("images", nargs="+")
    parser.add_argument("--precision", default="fp32", choices=SUFFIXES)
    args = parser.parse_args()
    scores = Towers(Path(__file__).parent, args.precision).rank(args.text, args.images)
    for place in np.argsort(-scores, kind="stable"):
        sys.stdout.write(f"{scores[place]:8.3f}  {args.images[place]}\n")


if __name__ == "__main__":
    main()
