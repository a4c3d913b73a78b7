"""Encode a batch: what a frozen tower has stored is read, captions are taken end to end or in groups of about one length.

`mm_utils.training.feature_cache` stores outputs of towers; `mm_utils.data.batches.column_cache` names the entries of the batch.

Padding a batch to its longest caption computes two to five times the tokens there are. Filling batches with captions of one
length avoids that, and changes what is learnt: the negatives of a pair are then those that look like it in length, and so
in language and style; it cost a third of the recall. A text tower, though, reads every caption by itself. So
the batch stays as it was drawn, and its captions are embedded end to end (`mm_utils.model.packing`), or sorted by length and group by group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask

from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.packing import end_to_end, length_groups, packs


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


_has_padding: ContextVar[bool | None] = ContextVar("has_padding", default=None)


def passes_of_texts(
    model: FusionDualEncoderModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    lengths: Sequence[int],
    with_taps: bool = True,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield rows of n texts `[n, L]` and what `model.text_features` returns of them, padded to their longest.

    It is one pass, with the texts end to end, or a pass for each group of about one length.
    """
    device = input_ids.device
    is_packed = packs(model, device.type) and min(lengths) < max(lengths)
    for group in [range(len(lengths))] if is_packed else length_groups(lengths, device.type):
        rows = slice(group.start, group.stop)
        longest = max(lengths[rows])
        # A copy: compiled towers have one graph for contiguous tokens, and would need another for a slice.
        tokens = input_ids[rows, :longest].contiguous()
        mask = attention_mask[rows, :longest].contiguous()
        whole = end_to_end(model.text_model, lengths, device) if is_packed else nullcontext()
        with whole, knows_padding(min(lengths[rows]) < longest):
            features = model.text_features(tokens, mask, with_taps)
        yield rows, *features


def tokens_computed(model: FusionDualEncoderModel, lengths: Sequence[int], device_type: str) -> int:
    """Return how many tokens the passes of `passes_of_texts` compute."""
    if packs(model, device_type):
        return sum(lengths)
    groups = [lengths[group.start : group.stop] for group in length_groups(lengths, device_type)]
    return sum(len(group) * max(group, default=0) for group in groups)


def encode_texts(
    model: FusionDualEncoderModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    lengths: Sequence[int] | None,
    with_states: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return what `model.encode_text` does of n texts `[n, L]`; little padding is computed if their numbers of tokens are given."""
    if not lengths:
        return model.encode_text(input_ids, attention_mask, with_states)
    pooled = []
    states = []
    for _, of_rows, of_tokens in passes_of_texts(model, input_ids, attention_mask, lengths, with_states):
        pooled.append(of_rows)
        if with_states:
            of_tokens = of_tokens if model.fusion is None else model.fusion.encode_text(of_tokens)
            states.append(F.pad(of_tokens, (0, 0, 0, input_ids.shape[1] - of_tokens.shape[1])))
    embeds, no_states = model.project_text(torch.cat(pooled))  # of all rows, whose dropout is drawn by row
    return embeds, torch.cat(states) if with_states else no_states


def embed_texts(model: FusionDualEncoderModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the unit embeddings `[n, E]` of n texts `[n, L]` in any order, padded on the right."""
    if model.config.text_padding is not None:  # it reads all texts at one length
        return model.encode_text(input_ids, attention_mask, with_states=False)[0]
    lengths = attention_mask.sum(1)
    order = lengths.argsort(descending=True, stable=True)
    counts = lengths[order].clamp(min=1).tolist()  # a tower gets one token of an empty text, too
    embeds, _ = encode_texts(model, input_ids[order], attention_mask[order], counts, with_states=False)
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
