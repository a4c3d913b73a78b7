"""Join a vision and a text backbone, after one run of each on a blank input to measure its outputs."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from mm_utils.distributed import RunError
from mm_utils.model.modeling_fusion_dual_encoder import (
    FramesTower,
    FusionDualEncoderConfig,
    FusionDualEncoderModel,
    along_time,
    input_name,
    input_shape,
    pool_output,
)
from mm_utils.text import one_line

MOST_TAPS = 3  # default number of hidden states per tower that the fusion head reads


def join_backbones(vision_model: Any, text_model: PreTrainedModel, **config: Any) -> FusionDualEncoderModel:
    """Return a model of two backbones, after one run of each on a blank input to measure its outputs.

    Args:
        config: fields of `FusionDualEncoderConfig`. Without `fusion_vision_taps` or `fusion_text_taps`, the head reads
            one hidden state of that tower per block, at most three: the last of each resolution, or, if there is only
            one resolution, the last one and others at equal distances before it.

    Raises:
        ValueError: if a backbone returns no hidden states.
    """
    medium = config.get("medium", FusionDualEncoderConfig.medium)
    vision = probe(vision_model, "vision")
    text = probe(text_model, "text")
    for name, output in (("vision_pooling", vision), ("text_pooling", text)):
        pooler = output.get("pooler_output")
        first_token_only = name == "text_pooling" and has_bert_pooler(text_model)
        is_map = medium == "sound" and output["last_hidden_state"].dim() == 4
        is_map &= not hasattr(vision_model.config, "spec_size")  # CLAP's, which is four stretches of time
        best = "timed" if is_map else "pooler"
        best = "mean" if pooler is None or first_token_only else best
        config[name] = best if config.get(name, "auto") == "auto" else config[name]
    pooled_width = pool_output(vision, config["vision_pooling"]).shape[-1]
    if medium == "clip" and len(input_shape(vision_model)) == 3:
        layers = config.get("frame_layers", FusionDualEncoderConfig.frame_layers)
        vision_model = FramesTower(vision_model, config["vision_pooling"], pooled_width, layers)
        vision = probe(vision_model, "vision")
    hidden_states = [along_time(hidden, vision_model, medium) for hidden in vision["hidden_states"]]
    most = max(1, min(MOST_TAPS, config.get("fusion_layers", FusionDualEncoderConfig().fusion_layers)))
    taps = _default_taps(
        [state.shape[2:].numel() if state.dim() == 4 else state.shape[1] for state in hidden_states], most
    )
    # Regions are read from the last tap: of frames, what the layers over time give.
    over_frames = isinstance(vision_model, FramesTower)
    config.setdefault("fusion_vision_taps", sorted(taps, key=lambda tap: over_frames and tap == -1))
    config.setdefault("fusion_text_taps", _default_taps([1] * len(text["hidden_states"]), most))
    measured = FusionDualEncoderConfig(
        vision_model.config,
        text_model.config,
        vision_widths=[state.shape[1 if state.dim() == 4 else -1] for state in hidden_states],
        vision_pooled_width=pooled_width,
        text_width=text["last_hidden_state"].shape[-1],
        **config,
    )
    return FusionDualEncoderModel(measured, vision_model, text_model)


def probe_input(backbone: Any, tower: str) -> dict[str, Tensor]:
    """Return a fixed input of a `vision` backbone, one medium, or of a `text` backbone, two tokens."""
    parameter = next(backbone.parameters())
    if tower == "text":
        ones = torch.ones(1, 2, dtype=torch.long, device=parameter.device)
        return {"input_ids": ones, "attention_mask": ones}
    shape = input_shape(backbone)
    return {input_name(backbone): torch.linspace(-1, 1, math.prod(shape)).view(1, *shape).to(parameter)}


@torch.no_grad()
def probe(backbone: Any, tower: str) -> ModelOutput:
    """Run the backbone on `probe_input` in evaluation mode.

    Raises:
        ValueError: if it cannot run, returns no hidden states, or other outputs in a second run or among other rows.
        RunError: if its outputs are not finite.
    """
    was_training = backbone.training
    inputs = probe_input(backbone, tower)
    wanted = {"output_hidden_states": True, "return_dict": True}
    name = type(backbone).__name__
    # beside its mirror image, which must not reach into the first row
    batch = {field: torch.cat([value, value.flip(-1)]) for field, value in inputs.items()}
    if tower == "text":  # the first row is padded to the length of the second
        pad = getattr(backbone.config, "pad_token_id", None) or 0
        batch["input_ids"] = F.pad(batch["input_ids"], (0, 4), value=1)
        batch["attention_mask"] = F.pad(batch["attention_mask"], (0, 4), value=1)
        batch["input_ids"][0, 2:] = pad
        batch["attention_mask"][0, 2:] = 0
    try:
        backbone.eval()
        first = backbone(**inputs, **wanted)
        among = backbone(**batch, **wanted)
    except Exception as error:  # of any kind: a grid that windows do not divide, a size that a class fixes
        sizes = ", ".join(f"{field} of {list(value.shape)}" for field, value in inputs.items())
        raise ValueError(f"{name} cannot run on {sizes}: {one_line(error)}. Give it another size.") from error
    if first.get("last_hidden_state") is None or first.get("hidden_states") is None:
        raise ValueError(f"{name} returns no hidden states; the fusion head cannot read it.")
    one = first["last_hidden_state"]
    rows = among["last_hidden_state"]
    if not (one.isfinite().all() and rows.isfinite().all()):
        raise RunError(
            f"{name} computes values that are not finite; training has diverged, or its weights are damaged. Start anew with a "
            "lower --learning_rate, or from other weights."
        )
    row = rows[:1] if tower == "vision" else rows[:1, : one.shape[1]]
    if len(rows) != 2 or not _close(one, row):
        if not _close(one, backbone(**inputs, **wanted)["last_hidden_state"]):
            raise ValueError(
                f"{name} returns other outputs for the same input each time, in evaluation too: it draws random numbers. Choose "
                "another backbone; a ViT-MAE is saved as a ViT by ViTModel.from_pretrained(..., add_pooling_layer=False)."
            )
        why = "an image's output depends on the other images" if tower == "vision" else "a text's depends on padding"
        raise ValueError(f"{name} does not keep the rows of a batch apart: {why}. Choose another backbone.")
    backbone.train(was_training)
    return first


def _close(one: Tensor, other: Tensor) -> bool:
    """Return whether two outputs are equal up to rounding, of half precision too."""
    tolerance = (1e-3 if one.dtype == torch.float32 else 5e-2) * float(one.abs().max().clamp(min=1e-6))
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=tolerance)


def has_bert_pooler(text_model: PreTrainedModel) -> bool:
    """Return whether the tower has BERT's layers and pooler, a dense layer on the first token."""
    layers = getattr(getattr(text_model, "encoder", None), "layer", None)
    return hasattr(getattr(text_model, "pooler", None), "dense") and hasattr(
        layers[0] if layers else None, "attention"
    )


def _default_taps(positions: Sequence[int], most: int) -> list[int]:
    """Choose up to `most` hidden states by their numbers of positions, the last one first.

    With several resolutions these are the last of each; else the last one and others at equal distances before it. The
    embeddings, which come first, are not among them.
    """
    # the last of a resolution: of 256, 256, 64, 64, 16 positions those at 1, 3 and 4
    last_of_each = [at for at in range(1, len(positions)) if positions[at : at + 2] != [positions[at]] * 2]
    if len(last_of_each) > 1:
        return [at - len(positions) for at in last_of_each[::-1][:most]]
    distance = max(1, (len(positions) - 1) // most)
    return list(range(-1, -len(positions), -distance))[:most] or [-1]  # of 12 layers and 2 taps: -1, -7
