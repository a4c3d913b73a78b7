"""Encode a batch: what a frozen tower has stored is read, captions are taken in groups of about one length.

`mm_utils.training.feature_cache` stores outputs of towers; `mm_utils.data.batches.column_cache` names the entries of the batch.

Padding a batch to its longest caption computes two to five times the tokens there are. Filling batches with captions of one
length avoids that, and changes what is learnt: the negatives of a pair are then those that look like it in length, and so
in language and style; it cost a third of the recall. A text tower, though, reads every caption by itself. So
the batch stays as it was drawn, and its captions, sorted by length, are embedded group by group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel


def vision_features(
    model: FusionDualEncoderModel, batch: Mapping[str, Any], with_taps: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return what the method of the model returns, of the batch's media: read, or computed."""
    if "vision_pooled" not in batch:
        return model.vision_features(batch["pixel_values"], with_taps)
    taps = range(len(model.fusion.taps)) if with_taps and model.fusion is not None else ()
    stored = tuple(batch[f"vision_taps_{tap}"].to(model.dtype) for tap in taps)
    return batch["vision_pooled"].to(model.dtype), stored


def stored_text(
    model: FusionDualEncoderModel, batch: Mapping[str, Any], with_states: bool
) -> tuple[Tensor, Tensor] | None:
    """Return what `encode_text` of the model returns, of the batch's captions; None where it must be computed."""
    if "text_pooled" not in batch:
        return None
    pooled = batch["text_pooled"].to(model.dtype)
    # A part of a batch is padded to its own longest caption.
    states = batch["text_states"][:, : batch["attention_mask"].shape[1]].to(pooled) if with_states else None
    return model.project_text(pooled, states)


PASS_TOKENS = {"cpu": 32, "cuda": 8192}
"""Cost of one more pass through a tower, in tokens: the time to start its kernels, or until they fill the device (H100)."""

_has_padding: ContextVar[bool | None] = ContextVar("has_padding", default=None)


def length_groups(lengths: Sequence[int], device_type: str) -> list[range]:
    """Cut rows into groups, padded to their longest, at least cost in tokens and passes.

    Rows come longest caption first; unsorted rows stay in one group. There is at least one group, possibly empty.
    """
    if not lengths or any(longer < shorter for longer, shorter in pairwise(lengths)):
        return [range(len(lengths))]
    values, first = np.unique(-np.asarray(lengths), return_index=True)
    starts = np.append(first, len(lengths))  # of 9, 9, 5, 4: values -9, -5, -4 and starts 0, 2, 3, 4
    # cheapest[k]: of all rows from the k-th distinct length on; end[k]: where their first group ends
    cheapest = np.zeros(len(starts))
    end = np.zeros(len(values), dtype=int)
    # From the shortest captions on: the best cut behind k is the cheapest first group and the best cuts of the rest
    for k in range(len(values) - 1, -1, -1):
        # the longest times the rows, for every end that the group may have, and the best of the rest
        costs = -values[k] * (starts[k + 1 :] - starts[k]) + cheapest[k + 1 :]
        end[k] = k + 1 + costs.argmin()
        cheapest[k] = costs.min() + PASS_TOKENS.get(device_type, PASS_TOKENS["cuda"])
    groups = []
    k = 0
    while k < len(values):
        groups.append(range(int(starts[k]), int(starts[end[k]])))
        k = end[k]
    return groups


def encode_in_groups(
    model: FusionDualEncoderModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    lengths: Sequence[int] | None,
    with_states: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return what `model.encode_text` does of n texts `[n, L]`, in groups if their numbers of tokens are given."""
    if not lengths:
        return model.encode_text(input_ids, attention_mask, with_states)
    pooled = []
    states = []
    for group in length_groups(lengths, input_ids.device.type):
        rows = slice(group.start, group.stop)
        longest = max(lengths[group.start : group.stop])
        # A copy: compiled towers have one graph for contiguous tokens, and would need another for a slice.
        tokens = input_ids[rows, :longest].contiguous()
        mask = attention_mask[rows, :longest].contiguous()
        with knows_padding(min(lengths[group.start : group.stop]) < longest):
            of_rows, of_tokens = model.text_features(tokens, mask, with_states)
        pooled.append(of_rows)
        if with_states:
            of_tokens = of_tokens if model.fusion is None else model.fusion.encode_text(of_tokens)
            states.append(F.pad(of_tokens, (0, 0, 0, input_ids.shape[1] - longest)))
    embeds, no_states = model.project_text(torch.cat(pooled))  # of all rows, whose dropout is drawn by row
    return embeds, torch.cat(states) if with_states else no_states


def embed_texts(model: FusionDualEncoderModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the unit embeddings `[n, E]` of n texts `[n, L]` in any order, which are read in groups of about one length."""
    if model.config.text_padding is not None:  # it reads all texts at one length
        return model.encode_text(input_ids, attention_mask, with_states=False)[0]
    lengths = attention_mask.sum(1)
    order = lengths.argsort(descending=True, stable=True)
    counts = lengths[order].clamp(min=1).tolist()  # a tower gets one token of an empty text, too
    embeds, _ = encode_in_groups(model, input_ids[order], attention_mask[order], counts, with_states=False)
    return embeds[order.argsort()]


@contextmanager
def knows_padding(has_padding: bool) -> Iterator[None]:
    """Let the towers within know whether any text is padded, see `use_known_padding`."""
    token = _has_padding.set(bool(has_padding))
    try:
        yield
    finally:
        _has_padding.reset(token)


def masked(make: Callable[..., Any], *given: Any, attention_mask: Tensor | None = None, **named: Any) -> Tensor | None:
    """Return the mask, or None, that transformers' `make` would."""
    padded = _has_padding.get() if attention_mask is not None and not torch.compiler.is_compiling() else None
    if padded is not None:
        # Causal and bidirectional masks are left out where no token is padding, and never where one is.
        named |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False} if padded else {}
        attention_mask = attention_mask if padded else None
    return make(*given, attention_mask=attention_mask, **named)


def use_known_padding() -> None:
    """Let the towers of transformers ask `knows_padding` in place of the device: two waits a step less."""
    for name, make in (("sdpa", sdpa_mask), ("eager", eager_mask)):
        AttentionMaskInterface.register(name, partial(masked, make))
