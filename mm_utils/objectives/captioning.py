"""Captioning: next tokens, from those before and the image."""

import logging
from functools import partial

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mm_utils import distributed
from mm_utils.data.batches.tokens import occurring_tokens
from mm_utils.model.fusion import KeysValues, rows_of
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.packing import to_device
from mm_utils.objectives.losses import GlobalBatch
from mm_utils.objectives.terms import Batch, Encoded, RowPlan, RowSums, TermOnRows

logger = logging.getLogger(__name__)

_MOST_COPIED = 2**23  # numbers of keys and values that are copied, for each caption of an image; 32 MiB
_LARGE = 4096  # words of a vocabulary of which one half may be worth leaving out


class Captioning(TermOnRows):
    """Cross-entropy of next tokens, from those before and the image (CoCa, arXiv 2205.01917).

    The blocks of the fusion head run over word embeddings under a causal mask; the text tower, which reads both directions,
    is left out. All captions of an image are targets (up to `mm_utils.data.batches.dataset.MOST_CAPTIONS`), each of which costs
    one pair of the fusion head.

    Of a large vocabulary, as that of a pretrained tower, only words that occur in the training captions are predicted, if these are
    at most half: 6,642 words in captions of 6,000 photographs have logits that are four times as fast as those of 30,522.

    Captions of one image share its keys and values. Where copies of these would be large, about as many captions as there are
    images are read at a time, by length, which also pads less.
    """

    name = "captioning"
    heads = ("token_head", "caption_adapter")

    def prepare(self, model: FusionDualEncoderModel) -> None:
        """Add a head that predicts tokens, and an adapter for word embeddings."""
        self._is_new = model.token_head is None
        model.add_token_head(captions=True)

    def read_captions(self, model: FusionDualEncoderModel, rows: datasets.Dataset) -> None:
        """Let the head predict the words that occur; one that was trained before keeps its own, too."""
        head = model.token_head
        assert head is not None
        known = head.known()
        if len(known) < _LARGE or (known.all() and not self._is_new):
            return
        occurs = occurring_tokens(rows, len(known))
        if occurs is None:
            head.predict(torch.ones_like(known))
            return
        occurs = occurs.to(known.device) if self._is_new else occurs.to(known.device) | known
        logger.info("Captioning predicts the %s words that occur, of %s", f"{occurs.sum():,}", f"{len(known):,}")
        head.predict(occurs)

    def plan(self, batch: Batch, shared: GlobalBatch, scale: Tensor, step: int) -> RowPlan:
        """Count the tokens of all ranks."""
        _, mask = _all_captions(batch)
        # the first token is given, never predicted
        return RowPlan(distributed.sum_over_ranks(mask[..., 1:].sum()).clamp(min=1))

    def rows(self, model: FusionDualEncoderModel, encoded: Encoded, batch: Batch, plan: RowPlan) -> RowSums:
        """Predict all tokens but the first of the captions of this part's images."""
        input_ids, mask = _all_captions(batch)
        # stays 0 where an image has fewer captions than another
        lengths = np.zeros(input_ids.shape[:2], int)
        for row, of_row in enumerate(batch.get("all_lengths") or [[length] for length in batch["lengths"]]):
            lengths[row, : len(of_row)] = of_row
        image, caption = np.nonzero(lengths)
        predict = partial(_predict, model, encoded.keys_values, input_ids, mask, lengths)
        if len(image) * sum(layer[:, :1].numel() for layer in encoded.keys_values) <= _MOST_COPIED:
            return predict(image, caption)
        longest_first = (-lengths[image, caption]).argsort(kind="stable")
        groups = np.array_split(longest_first, min(lengths.shape[1], len(longest_first)))
        sums = [predict(image[group], caption[group]) for group in groups]
        loss = torch.stack([part.loss for part in sums]).sum()
        return RowSums(loss, torch.stack([part.right for part in sums]).sum())


def _predict(
    model: FusionDualEncoderModel,
    keys_values: KeysValues,
    input_ids: Tensor,
    mask: Tensor,
    lengths: np.ndarray,
    images: np.ndarray,
    captions: np.ndarray,
) -> RowSums:
    """Return the sums of some captions, each given by its image and its place among the captions of that."""
    chosen = lengths[images, captions]
    longest = chosen.max(initial=1)
    # all tokens but the last have a next one
    rows, columns = np.nonzero(np.arange(longest) < chosen[:, None] - 1)
    image = to_device(images, mask.device)
    caption = to_device(captions, mask.device)
    input_ids = input_ids[image, caption, :longest]
    mask = mask[image, caption, :longest]
    # one caption an image, in order: nothing to copy
    if not np.array_equal(images, np.arange(len(lengths))):
        keys_values = tuple(rows_of(layer, image, 1) for layer in keys_values)
    before = (to_device(rows, mask.device), to_device(columns, mask.device))
    logits, labels = model.target_logits(keys_values, input_ids, mask, before)
    return RowSums(F.cross_entropy(logits.float(), labels, reduction="sum"), (logits.argmax(-1) == labels).sum())


def _all_captions(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return ids and mask of all captions, `[n, k, L]`; of the shown ones if alone."""
    if "all_input_ids" in batch:
        return batch["all_input_ids"], batch["all_attention_mask"]
    return batch["input_ids"][:, None], batch["attention_mask"][:, None]
