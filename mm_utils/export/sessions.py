"""Run exported graphs where a model is expected: same methods, tensors in and out.

Shape letters: K images, T texts, L tokens, E embedding width.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig


class ExportedTowers:
    """Towers of one precision, and the exported head, on as many threads as torch has.

    Args:
        paths: of the graphs, by part.
        config: of the model they were made from.
        pad_token_id: fills texts for graphs that take one length.
        length: that length, for graphs that take ids alone.

    Attributes:
        megabytes: sizes of the files, by part.
    """

    def __init__(self, paths: Mapping[str, Path], config: PreTrainedConfig, pad_token_id: int, length: int):
        self.config, self.pad_token_id, self.length = config, pad_token_id, length
        self.megabytes = {part: path.stat().st_size / 1e6 for part, path in paths.items()}
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        self._sessions = {
            part: onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            for part, path in paths.items()
        }

    def encode_image(self, pixel_values: Tensor, with_keys_values: bool = False) -> tuple[Tensor, None]:
        """Return unit embeddings `[K, E]`, as the model does, and nothing for the head."""
        [embeds] = self._run("vision_model", **self._named("vision_model", pixel_values))
        return embeds[:, : self.config.projection_dim], None

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor, with_states: bool = False) -> tuple[Tensor, None]:
        """Return unit embeddings `[T, E]`, as the model does, and nothing for the head."""
        ids, mask = self._padded(input_ids, attention_mask)
        [embeds] = self._run("text_model", input_ids=ids, attention_mask=mask, text=ids.int())
        return embeds[:, : self.config.projection_dim], None

    def added(self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return what the head adds to the scaled cosine of every text and image, `[T, K]`."""
        sides = self._run("reranker_images", **self._named("reranker_images", pixel_values))
        blocks = {f"keys_values_{number}": block for number, block in enumerate(sides)}
        ids, mask = self._padded(input_ids, attention_mask)
        return self._run("reranker", input_ids=ids, attention_mask=mask, **blocks)[0]

    def _named(self, part: str, pixel_values: Tensor) -> dict[str, Tensor]:
        """Return the input of a graph that has one, whose name each tower and layout chooses."""
        return {self._sessions[part].get_inputs()[0].name: pixel_values}

    def _padded(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        ids = input_ids.masked_fill(attention_mask == 0, self.pad_token_id)
        first = self._sessions["text_model"].get_inputs()[0]
        length = self.length if first.name == "text" else first.shape[1]
        missing = (0, length - ids.shape[1] if isinstance(length, int) else 0)
        return pad(ids, missing, value=self.pad_token_id), pad(attention_mask, missing)

    def _run(self, part: str, **inputs: Any) -> list[Tensor]:
        session = self._sessions[part]
        given = {each.name: np.ascontiguousarray(inputs[each.name].numpy()) for each in session.get_inputs()}
        return [torch.from_numpy(found) for found in session.run(None, given)]
