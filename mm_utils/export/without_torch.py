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
from PIL import Image
from tokenizers import Tokenizer

from mm_utils.model.reading import CHARACTERS_PER_TOKEN, centered, open_picture

_SPECIAL = ("bos_token", "eos_token", "sep_token", "pad_token", "cls_token", "mask_token")
_Pictures = str | Path | Image.Image | Sequence[str | Path | Image.Image]


class Towers:
    """A folder's exported graphs; items go one by one, on which int8 depends a little.

    `folder` is one that `scripts/export.py` wrote, with the layout plain.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.settings = json.loads((self.folder / "export.json").read_text(encoding="utf-8"))
        self.pixels = json.loads((self.folder / "preprocessor_config.json").read_text(encoding="utf-8"))
        words = json.loads((self.folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # special tokens that a text names are text
        names = {name: words[name]["content"] if isinstance(words[name], dict) else words[name]
                 for name in _SPECIAL if words.get(name)}  # fmt: skip
        self._special = {self.tokenizer.token_to_id(name) for name in names.values()}
        self._pad = self.tokenizer.token_to_id(names["pad_token"])
        length = self._session("text_model").get_inputs()[0].shape[1]
        # a name, such as 'length', where texts of any length are read
        self._length = length if isinstance(length, int) else 0
        self._most = int(min(words["model_max_length"], 1e6))
        self.tokenizer.enable_truncation(self._most)

    def images(self, images: _Pictures) -> np.ndarray:
        """Return unit embeddings of image files or pictures, one or many, `[N, E]`."""
        return self._joined(self._run("vision_model", pixel_values=self._pixels(image))[0] for image in _many(images))

    def texts(self, texts: str | Sequence[str]) -> np.ndarray:
        """Return unit embeddings of texts, one or many, `[N, E]`."""
        return self._joined(self._run("text_model", **self._tokens(text))[0] for text in _many(texts))

    def _joined(self, rows: Any) -> np.ndarray:
        return np.concatenate([np.zeros((0, self.settings["projection_dim"]), np.float32), *rows])

    def _session(self, part: str) -> onnxruntime.InferenceSession:
        if part not in self._sessions:
            suffix = "_quantized" if self.settings["precision"] == "int8" else ""
            path = next(self.folder.rglob(f"{part}{suffix}.onnx"))
            self._sessions[part] = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return self._sessions[part]

    def _run(self, part: str, **inputs: np.ndarray) -> list[np.ndarray]:
        session = self._session(part)
        return session.run(None, {each.name: inputs[each.name] for each in session.get_inputs()})

    def _tokens(self, text: str) -> dict[str, np.ndarray]:
        """Return ids and mask, `[1, L]`."""
        encoded = self.tokenizer.encode(text[: CHARACTERS_PER_TOKEN * self._most])
        pairs = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
        ids = [token for token, is_added in pairs if is_added or token not in self._special]
        missing = max(0, self._length - len(ids))
        sides = {"input_ids": [*ids, *[self._pad] * missing], "attention_mask": [1] * len(ids) + [0] * missing}
        return {name: np.array([values], np.int64) for name, values in sides.items()}

    def _pixels(self, image: Any) -> np.ndarray:
        """Return an image `[1, 3, S, S]`: upright, shorter side resized, centre cut, normalised."""
        size = self.pixels["crop_size"]["height"]
        picture, (width, height, left, top) = centered(open_picture(image, size), size)
        square = picture.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + size, top + size))
        mean = np.array(self.pixels["image_mean"], np.float32)
        std = np.array(self.pixels["image_std"], np.float32)
        return ((np.asarray(square) * np.float32(self.pixels["rescale_factor"]) - mean) / std).transpose(2, 0, 1)[None]


def _many(given: Any) -> list[Any]:
    return [given] if isinstance(given, (str, Path, Image.Image)) else list(given)


def main() -> None:
    """Print the images, best first."""
    parser = argparse.ArgumentParser(description="Order images by how well they fit a text.")
    parser.add_argument("text")
    parser.add_argument("images", nargs="+")
    args = parser.parse_args()
    try:
        towers = Towers(Path(__file__).parent)
        scores = towers.images(args.images) @ towers.texts(args.text)[0]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for place in np.argsort(-scores, kind="stable"):
        line = f"{scores[place]:8.3f}  {args.images[place]}\n"
        sys.stdout.write(line.encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding))


if __name__ == "__main__":
    main()
