"""What pairs look like, in a few lines: sizes or seconds, lengths, examples."""

import io
from typing import Any

import datasets
import numpy as np
from PIL import Image
from transformers import PreTrainedTokenizerBase

from mm_utils.data.media import kind_of
from mm_utils.reports.model_card import an

SHOWN, WIDTH = 3, 80  # examples, and letters of a caption


def describe_pairs(
    rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, image_size: int
) -> list[str]:
    """Lines that describe `rows`; of images the header is read, of clips and sounds nothing.

    Args:
        max_seq_length: captions are cut to this many tokens.
        image_size: images whose shorter side is below it are enlarged.
    """
    kind = kind_of(rows.features)
    if kind == "image":
        sizes = [_size(row) for row in rows.select_columns([n for n in rows.column_names if n != "captions"])]
        shown = ["x".join(map(str, size)) if size else "unreadable" for size in sizes]
        extent = _of_sizes(np.array([min(size) for size in sizes if size]), image_size)
    else:
        shown = [f"{seconds:.1f} s" for seconds in rows["seconds"]]
        extent = [f"{kind}s: {_spread(np.array(rows['seconds']).round(1))} s"]
    captions = [caption for row in rows["captions"] for caption in row]
    tokens = tokenizer(captions, truncation=False, split_special_tokens=True, verbose=False)["input_ids"]
    lengths = np.array([len(ids) for ids in tokens])
    lines = [
        *extent,
        f"captions: {len(captions) / len(rows):.1f} {an(kind)}; tokens {_spread(lengths)}; "
        f"{(lengths > max_seq_length).mean():.1%} are cut by --max_seq_length {max_seq_length}",
    ]
    shared = len(captions) - len({" ".join(caption.lower().split()) for caption in captions})
    if shared:
        lines.append(f"the same caption again: {shared / len(captions):.1%}; equal captions are not negatives")
    for row, size in zip(rows.select(range(min(SHOWN, len(rows)))), shown, strict=False):
        caption = " ".join(row["captions"][0].split())
        caption = caption if len(caption) <= WIDTH else caption[: WIDTH - 1] + "…"
        lines.append(f"{row['id']}, {size}: {caption}")
    return lines


def _size(row: dict[str, Any]) -> tuple[int, int] | None:
    """Width and height, as the row says or the image's header; None if neither does."""
    if row.get("width") and row.get("height"):
        return row["width"], row["height"]
    value = row["image"]
    try:
        with Image.open(io.BytesIO(value["bytes"]) if value.get("bytes") else value["path"]) as image:
            return image.size
    except Exception:  # a damaged file makes Pillow raise what not; the loader says what is wrong with it
        return None


def _of_sizes(shorter: np.ndarray, image_size: int) -> list[str]:
    if not len(shorter):
        return ["images: none has a header that can be read"]
    small = (shorter < image_size).mean()
    enlarged = f"; {small:.1%} are enlarged to {image_size}" if small else ""
    return [f"images: shorter side {_spread(shorter)} px{enlarged}"]


def _spread(values: np.ndarray) -> str:
    low, middle, high = np.quantile(values, (0.05, 0.5, 0.95), method="nearest")
    return f"{low} to {high}, median {middle}, at most {values.max()}"
