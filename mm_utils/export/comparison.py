"""Compare exported graphs with torch: differences of embeddings, recall, time and size.

Shape letters: K images, T texts, L tokens.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm

from mm_utils.distributed import RunError
from mm_utils.evaluation.embeddings import cosine_ranks, embed_split
from mm_utils.evaluation.metrics import summarise_ranks
from mm_utils.export.graphs import Head, ImageSide
from mm_utils.export.layouts import text_length
from mm_utils.export.sessions import ExportedTowers
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel, input_shape
from mm_utils.text import markdown_table

MOST_DIFFERENCE = 1e-5  # of an fp32 embedding; of the head's term, as a share of the largest where that is above 1
TEXTS = ("a red door", "two dogs run along the beach at sunset, and a man with a hat looks at them", "snow")
RUNS = 20  # whose median is the time of one image and of one query


@dataclass
class Figures:
    """What was measured of torch or of one precision.

    Attributes:
        precision: torch, fp32, fp16 or int8.
        megabytes: size of each graph.
        differences: largest absolute difference from torch of each output.
        milliseconds: median time of one image and of one query, each by itself.
        recall: in both directions, at 1 and at 10; empty without data.
    """

    precision: str
    megabytes: dict[str, float] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)
    recall: dict[str, float] = field(default_factory=dict)


@torch.no_grad()
def compare(
    model: FusionDualEncoderModel,
    exported: Mapping[str, ExportedTowers],
    tokenizer: Any,
    head: Head | None = None,
    shape: Sequence[int] | None = None,
) -> dict[str, Figures]:
    """Measure differences, sizes and times of torch and of each precision.

    Args:
        model: in evaluation mode, on the CPU.
        exported: towers by precision.
        tokenizer: that of the model.
        head: what was exported as the head.
        shape: of a clip or a sound, see `mm_utils.export.graphs.tower_graphs`.

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
    found = {"torch": Figures("torch")}
    for precision, towers in exported.items():
        outputs = {"image": towers.encode_image(images)[0], "text": towers.encode_text(*texts)[0]}
        if head is not None:
            outputs["head"] = towers.added(images, *texts)
        differences = {name: (outputs[name] - value).abs().max().item() for name, value in expected.items()}
        found[precision] = Figures(precision, towers.megabytes, differences)
        if precision == "fp32":
            _check(differences, expected)
    query = tuple(each[:1, : int(given["attention_mask"][0].sum())] for each in texts)
    calls: dict[str, Any] = {"torch": model, **exported}
    measured = {
        "image": _milliseconds({name: partial(one.encode_image, images[:1], False) for name, one in calls.items()}),
        "query": _milliseconds({name: partial(one.encode_text, *query, False) for name, one in calls.items()}),
    }
    for what, by_name in measured.items():
        for name, milliseconds in by_name.items():
            found[name].milliseconds[what] = milliseconds
    return found


def _check(differences: Mapping[str, float], expected: Mapping[str, Tensor]) -> None:
    for name, difference in differences.items():
        allowed = MOST_DIFFERENCE * max(1.0, expected[name].abs().max().item() if name == "head" else 1.0)
        if not difference <= allowed:
            raise RunError(
                f"The exported {name} graph differs from torch by {difference:.1e}; at most {allowed:.0e} is right. Nothing was "
                "written. Try another --opset, or other versions of torch and onnxruntime."
            )


def _milliseconds(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Return each call's median time; they take turns, so that other work disturbs all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(RUNS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def add_recall(
    figures: Mapping[str, Figures],
    towers: Mapping[str, Any],
    loader: Iterable,
    accelerator: Accelerator,
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
    every = list(figures.values())
    columns = {
        "": [each.precision for each in every],
        "image, MB": [_cell(each.megabytes.get("vision_model"), ".1f") for each in every],
        "text, MB": [_cell(each.megabytes.get("text_model"), ".1f") for each in every],
        **{f"difference: {name}": [_cell(each.differences.get(name), ".0e") for each in every] for name in _OUTPUTS},
        **{title: [_cell(each.recall.get(name), ".3f") for each in every] for name, title in _RECALLS.items()},
        **{
            f"ms: {name}": [_cell(each.milliseconds.get(name), ".1f") for each in every] for name in ("image", "query")
        },
    }
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    return markdown_table(list(shown), [list(row) for row in zip(*shown.values(), strict=True)])


_OUTPUTS = ("image", "text", "head")
_RECALLS = {
    f"{direction}_recall@{k}": f"{direction.replace('_', ' ')} R@{k}"
    for direction in ("text_to_image", "image_to_text")
    for k in (1, 10)
}


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
