"""Read and write dual encoders of `transformers`: CLIP, SigLIP, Siglip2, and others."""

import copy
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Siglip2ImageProcessor,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from mm_utils.model.modeling_fusion_dual_encoder import DUAL_ENCODERS, UNPROJECTED, FusionDualEncoderModel
from mm_utils.model.pretrained import explained


def load_stock(name: str, config: Any, **fields: Any) -> FusionDualEncoderModel:
    """Load a stock model in float32.

    Args:
        config: the configuration of the stock model.
        fields: fields of the new configuration, such as those of the fusion head.

    Raises:
        ValueError: if the folder lacks weights, or SigLIP's has no tokenizer.
    """
    if config.model_type in UNPROJECTED:
        # SigLIP pools the last position: its texts are padded to one length, and padding is not masked.
        with explained(f"the tokenizer of {name} is missing or damaged", name):
            tokenizer = complete(AutoTokenizer.from_pretrained(name, trust_remote_code=False))
        length = min(config.text_config.max_position_embeddings, tokenizer.model_max_length)
        fields["text_padding"] = {
            "length": length,
            "side": tokenizer.padding_side,
            "pad_token_id": tokenizer.pad_token_id,
        }
    with explained(f"{name} holds no model", name):
        options = {"use_safetensors": True, "dtype": torch.float32, "output_loading_info": True}
        stock, info = AutoModel.from_pretrained(name, config=config, **options)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{name} holds no whole {config.model_type}; it lacks {len(missing)} weights, such as {missing[0]}. Choose "
            "another model."
        )
    return FusionDualEncoderModel.from_dual_encoder(stock, **fields)


def complete(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Let a tokenizer pad, with its last token if need be, and return masks; return it.

    Raises:
        ValueError: if it has no words, which is how some classes load from a folder without a tokenizer.
    """
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ValueError("its tokenizer has no words")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if "attention_mask" not in tokenizer.model_input_names:
        _set_outputs(tokenizer, [*tokenizer.model_input_names, "attention_mask"])
    return tokenizer


def stock_processor(processor: ProcessorMixin, config: Any) -> ProcessorMixin:
    """Return the processor of a stock model's class, which does what ours does.

    Args:
        processor: ours, which makes central squares.
        config: the configuration of the stock model.
    """
    if config.model_type == DUAL_ENCODERS[0]:
        return processor
    images, tokenizer = processor.image_processor, processor.tokenizer
    if config.model_type in UNPROJECTED:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.model_max_length = min(config.text_config.max_position_embeddings, tokenizer.model_max_length)
        _set_outputs(tokenizer, ["input_ids"])
    if config.model_type == "siglip2":
        patch_size = config.vision_config.patch_size
        images = Siglip2ImageProcessor(
            patch_size=patch_size,
            max_num_patches=(images.crop_size["height"] // patch_size) ** 2,
            **{name: getattr(images, name) for name in ("resample", "image_mean", "image_std")},
        )
    processor_class: Any = PROCESSOR_MAPPING[type(config)]
    return processor_class(images, tokenizer)


def _set_outputs(tokenizer: PreTrainedTokenizerBase, names: list[str]) -> None:
    tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names  # the second is saved
