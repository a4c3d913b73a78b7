"""What a frozen tower has returned for the rows of a batch, where that is stored beside them.

`mm_utils.extras.frozen` stores it; `mm_utils.data.batches.column_cache` names the entries of the batch.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel, KeysValues


def vision_features(
    model: FusionDualEncoderModel, batch: Mapping[str, Any], with_taps: bool, medium: str | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return what the method of the model returns, of the batch's media: read, or computed."""
    if "vision_pooled" not in batch:
        return model.vision_features(batch["pixel_values"], with_taps, medium)
    taps = range(len(model.fusion.taps)) if with_taps and model.fusion is not None else ()
    pooled, *read = (batch[name].to(model.dtype) for name in ("vision_pooled", *map("vision_taps_{}".format, taps)))
    return pooled, tuple(read)


def encode_image(
    model: FusionDualEncoderModel, batch: Mapping[str, Any], with_keys_values: bool = True
) -> tuple[Tensor, KeysValues | None]:
    """Return what the method of the model returns, of the batch's media."""
    if "vision_pooled" not in batch:
        return model.encode_image(batch["pixel_values"], with_keys_values=with_keys_values)
    return model.project_image(*vision_features(model, batch, with_keys_values))


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
