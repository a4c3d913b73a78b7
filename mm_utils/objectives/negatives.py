"""Negatives of the data, captions that are wrong for their image: tokenised once, one drawn in every epoch."""

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
from datasets import Value
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mm_utils.data.batches.column_cache import Columns
from mm_utils.data.batches.column_reader import ColumnReader
from mm_utils.data.batches.order import choose_captions
from mm_utils.data.batches.tokens import add_tokens, encode_lists, pad_captions
from mm_utils.data.media.medium import Shown
from mm_utils.data.rows.columns import NEGATIVES
from mm_utils.text import caption_key

NEGATIVE_IDS = "negative_input_ids"  # a column, and with `negative_attention_mask` a tensor of a batch, `[b, L]`


class Negatives(ColumnReader):
    """One of an image's negatives, drawn by a hash of seed, epoch and image; of an image without any, no tokens.

    They are tokenised like captions. One that is also a caption of the image is left out.
    """

    columns = frozenset({NEGATIVE_IDS})
    optional = True
    in_evaluation = False

    def source(self, rows: datasets.Dataset) -> str:
        """Return the column of negatives."""
        return NEGATIVES

    def prepare(
        self, rows: datasets.Dataset, split: str, tokenizer: PreTrainedTokenizerBase, max_seq_length: int
    ) -> datasets.Dataset:
        """Add the tokens to training rows with negatives."""
        if split != "train" or NEGATIVES not in rows.column_names:
            return rows
        features = datasets.Features({NEGATIVE_IDS: [[Value("int32")]]})
        read = [NEGATIVES, "caption_keys"]
        return add_tokens(rows, NEGATIVES, read, _tokenize, tokenizer, max_seq_length, features)

    def example(self, row: dict[str, Any], shown: Shown | None, seed: int | None) -> dict[str, Any]:
        """Return the drawn negative, as `negative`."""
        listed = [ids for ids in row[NEGATIVE_IDS] if ids not in row["input_ids"]]  # equal where both are cut
        key = np.array([row["image_key"]])
        if seed is None or not listed:
            return {"negative": []}
        # other keys than captions have, or both went in step
        [place] = choose_captions(seed, np.array([row["epoch"]]), ~key, np.array([len(listed)]))
        return {"negative": listed[place]}

    def collate(self, examples: Sequence[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
        """Pad the negatives of all images, perhaps empty ones, to the longest."""
        padded = pad_captions([example["negative"] for example in examples], pad_token_id)
        return dict(zip((NEGATIVE_IDS, "negative_attention_mask"), padded, strict=True))


def _tokenize(
    rows: Columns, wanted: np.ndarray | None, tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> Columns:
    listed = []
    for place, (texts, keys) in enumerate(zip(rows[NEGATIVES], rows["caption_keys"], strict=True)):
        is_read = bool(keys) and (wanted is None or wanted[place])
        listed.append([text for text in texts or () if is_read and caption_key(text) not in keys])
    return {NEGATIVE_IDS: encode_lists(tokenizer, listed, max_seq_length)}
