"""Run exported graphs where a model is expected, and compare them with torch: differences of embeddings, recall and size.

Shape letters: K images, T texts, L tokens, E embedding width.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import pad
from tqdm.auto import tqdm
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from mm_utils.distributed import RunError
from mm_utils.evaluation.embeddings import cosine_ranks, embed_split
from mm_utils.evaluation.metrics import summarise_ranks
from mm_utils.export.graphs import Head, ImageSide
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel, input_shape
from mm_utils.text import markdown_table

MOST_DIFFERENCE = 1e-5  # of an fp32 embedding; of the head's term, as a share of the largest where that is above 1
TEXTS = ("a red door", "two dogs run along the beach at sunset, and a man with a hat looks at them", "snow")
IMMICH_LENGTH = 77  # tokens that Immich pads every text to, as open_clip does


def text_length(model: FusionDualEncoderModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many tokens of a text are read where padding is of one length."""
    if model.config.text_padding:
        return model.config.text_padding["length"]
    most = getattr(model.config.text_config, "max_position_embeddings", IMMICH_LENGTH)
    return min(IMMICH_LENGTH, most, tokenizer.model_max_length)


class ExportedTowers:
    """Towers of one precision, and the exported head, with a model's methods, on as many threads as torch has.

    Args:
        paths: of the graphs, by part.
        config: of the model they were made from.
        pad_token_id: fills texts for graphs that take one length.
        length: that length, for graphs that take ids alone.

    Attributes:
        megabytes: sizes of the files, by part.
    """

    def __init__(self, paths: Mapping[str, Path], config: PreTrainedConfig, pad_token_id: int, length: int):
        import onnxruntime

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
        return self._run_images("vision_model", pixel_values)[0][:, : self.config.projection_dim], None

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor, with_states: bool = False) -> tuple[Tensor, None]:
        """Return unit embeddings `[T, E]`, as the model does, and nothing for the head."""
        ids, mask = self._padded(input_ids, attention_mask)
        [embeds] = self._run("text_model", input_ids=ids, attention_mask=mask, text=ids.int())
        return embeds[:, : self.config.projection_dim], None

    def added(self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return what the head adds to the scaled cosine of every text and image, `[T, K]`."""
        sides = self._run_images("reranker_images", pixel_values)
        blocks = {f"keys_values_{number}": block for number, block in enumerate(sides)}
        ids, mask = self._padded(input_ids, attention_mask)
        return self._run("reranker", input_ids=ids, attention_mask=mask, **blocks)[0]

    def _run_images(self, part: str, pixel_values: Tensor) -> list[Tensor]:
        [images] = self._sessions[part].get_inputs()  # each tower and layout chooses its name
        return self._run(part, **{images.name: pixel_values})

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


@dataclass
class Figures:
    """What was measured of torch or of one precision.

    Attributes:
        precision: torch, fp32, fp16 or int8.
        megabytes: size of each graph.
        differences: largest absolute difference from torch of each output.
        recall: in both directions, at 1 and at 10; empty without data.
    """

    precision: str
    megabytes: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    recall: dict[str, float] = field(default_factory=dict)


@torch.no_grad()
def compare(
    model: FusionDualEncoderModel,
    exported: Mapping[str, ExportedTowers],
    tokenizer: Any,
    head: Head | None = None,
    shape: Sequence[int] | None = None,
) -> dict[str, Figures]:
    """Measure differences from torch and sizes of each precision.

    Args:
        model: in evaluation mode, on the CPU.
        exported: towers by precision.
        tokenizer: that of the model.
        head: what was exported as the head.
        shape: of a clip or a sound, see `mm_utils.export.graphs.graphs_of`.

    Raises:
        RunError: if fp32 differs from torch by more than `MOST_DIFFERENCE`.
    """
    images = torch.randn(3, *(shape or input_shape(model.vision_model)), generator=torch.Generator().manual_seed(0))
    most = text_length(model, tokenizer)
    given = tokenizer(list(TEXTS), padding=True, truncation=True, max_length=most, return_tensors="pt")
    texts = given["input_ids"], given["attention_mask"]
    expected = {"image": model.encode_image(images, with_keys_values=False)[0], "text": model.encode_text(*texts)[0]}
    if head is not None:
        expected["head"] = head(*texts, list(ImageSide(model)(images)))
    figures = {"torch": Figures("torch")}
    for precision, towers in exported.items():
        outputs = {"image": towers.encode_image(images)[0], "text": towers.encode_text(*texts)[0]}
        if head is not None:
            outputs["head"] = towers.added(images, *texts)
        differences = {name: (outputs[name] - value).abs().max().item() for name, value in expected.items()}
        figures[precision] = Figures(precision, towers.megabytes, differences)
        for name, difference in differences.items() if precision == "fp32" else ():
            allowed = MOST_DIFFERENCE * max(1.0, expected[name].abs().max().item() if name == "head" else 1.0)
            if not difference <= allowed:
                raise RunError(
                    f"The exported {name} graph differs from torch by {difference:.1e}; at most {allowed:.0e} is right. Nothing "
                    "was written. Try other versions of torch and onnxruntime."
                )
    return figures


def add_recall(
    figures: Mapping[str, Figures], towers: Mapping[str, Any], loader: Iterable, accelerator: Accelerator
) -> None:
    """Measure recall of torch and each precision on a split, as `scripts/eval_retrieval.py`."""
    for name, one in tqdm(towers.items(), desc="Recall", unit=" precisions"):
        split = embed_split(one, loader, accelerator)
        for direction, (queries, items) in split.directions.items():
            measures = summarise_ranks(cosine_ranks(queries, items), f"{direction}_")
            kept = ("recall@1", "recall@10")
            figures[name].recall |= {key: value for key, value in measures.items() if key.endswith(kept)}


def table(figures: Mapping[str, Figures]) -> str:
    """Return a Markdown table of the figures; what was not measured has no column."""
    columns: dict[str, list[str]] = {"": list(figures)}
    for name, title in (("vision_model", "image, MB"), ("text_model", "text, MB")):
        columns[title] = [_cell(each.megabytes.get(name), ".1f") for each in figures.values()]
    for name in ("image", "text", "head"):
        columns[f"difference: {name}"] = [_cell(each.differences.get(name), ".0e") for each in figures.values()]
    for direction in ("text_to_image", "image_to_text"):
        for k in (1, 10):
            cells = [_cell(each.recall.get(f"{direction}_recall@{k}"), ".3f") for each in figures.values()]
            columns[f"{direction.replace('_', ' ')} R@{k}"] = cells
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    return markdown_table(list(shown), [list(row) for row in zip(*shown.values(), strict=True)])


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
