"""What a run on several media builds, writes and says for each of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mm_utils.model.adapt import LoraArguments
from mm_utils.model.build import ModelArguments, build_model
from mm_utils.model.modeling_fusion_dual_encoder import (
    FusionDualEncoderConfig,
    FusionDualEncoderModel,
)


def build_media(
    args: ModelArguments,
    tokenizer: PreTrainedTokenizerBase,
    lora_args: LoraArguments | None = None,
    media: Sequence[str] = ("image",),
    resume_from: Path | None = None,
) -> FusionDualEncoderModel:
    """Build the model of one medium, or several with a tower each; see `build_model`.

    Args:
        resume_from: the checkpoint whose weights it will get, if any: its pooling of sounds is kept under `--vision_pooling
            auto`, which was the pooler for towers from scratch before there was `timed`.
    """
    if len(media) == 1:
        return build_model(_with_pooling(args, media[0], resume_from), tokenizer, lora_args, media[0])
    models = []
    for at, medium in enumerate(media):
        own = args.of(at)
        own = replace(own, image_size=None) if medium == "sound" else own
        models.append(build_model(_with_pooling(own, medium, resume_from), tokenizer, lora_args, medium))
    model, *others = models
    for other in others:
        model.add_medium(other)
    return model


def _with_pooling(args: ModelArguments, medium: str, resume_from: Path | None) -> ModelArguments:
    """Return the arguments with a checkpoint's pooling of sounds, where none is asked for."""
    if resume_from is None or medium != "sound" or args.vision_pooling != "auto":
        return args
    config = FusionDualEncoderConfig.from_pretrained(resume_from)
    pooling = (config.media or {}).get(medium, {}).get("vision_pooling", config.vision_pooling)
    return args if pooling == "timed" else replace(args, vision_pooling=pooling)  # which no flag says
