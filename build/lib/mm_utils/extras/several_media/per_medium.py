"""Build the model of a run on several media."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mm_utils.model.adapt import LoraArguments
from mm_utils.model.build import ModelArguments, build_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel


def build_media(
    args: ModelArguments,
    tokenizer: PreTrainedTokenizerBase,
    lora_args: LoraArguments | None,
    media: Sequence[str],
    resume_from: Path | None = None,
) -> FusionDualEncoderModel:
    """Build a model with a tower for each medium; see `build_model`."""
    models = []
    for at, medium in enumerate(media):
        own = args.of(at)
        own = replace(own, image_size=None) if medium == "sound" else own
        models.append(build_model(own, tokenizer, lora_args, medium, resume_from))
    model, *others = models
    for other in others:
        model.add_medium(other)
    return model
