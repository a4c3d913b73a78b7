"""Read and write dual encoders of `transformers`: CLIP, SigLIP, Siglip2, CLAP and others.

X-CLIP is only read: its prompts, which make a text depend on the clip, are left out.
"""

import copy
import logging
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Siglip2ImageProcessor,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from mm_utils.model.modeling_fusion_dual_encoder import (
    DUAL_ENCODERS,
    UNPROJECTED,
    FusionDualEncoderModel,
    XCLIPTower,
)
from mm_utils.model.pretrained import explained

logger = logging.getLogger(__name__)

MEDIUM = {"clap": "sound", "xclip": "clip"}  # of stock models that read no images


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
    if config.model_type == "xclip" and config.projection_dim != config.vision_config.mit_hidden_size:
        raise ValueError(
            f"{name} holds no whole xclip; its projections are {config.projection_dim} wide and the layers over them "
            f"{config.vision_config.mit_hidden_size}. Choose another model."
        )
    with explained(f"{name} holds no model", name):
        options = {"use_safetensors": True, "dtype": torch.float32, "output_loading_info": True}
        stock, info = AutoModel.from_pretrained(name, config=config, **options)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{name} holds no whole {config.model_type}; it lacks {len(missing)} weights, such as {missing[0]}. Choose "
            "another model."
        )
    model = from_dual_encoder(stock, **fields)
    if config.model_type == "clap":
        logger.info(
            "%s has two temperatures, and one is trained: logit_scale %.3f, their geometric mean, instead of %.3f for sounds "
            "and %.3f for texts",
            *(name, *(scale.exp().item() for scale in (model.logit_scale, stock.logit_scale_a, stock.logit_scale_t))),
        )
    elif config.model_type == "xclip":
        logger.info("%s is taken without its prompts, by which its texts would depend on the clip", name)
    return model


def from_dual_encoder(stock: Any, **config: Any) -> FusionDualEncoderModel:
    """Convert a stock model of `DUAL_ENCODERS` with its embeddings, temperature and bias.

    Of CLAP's two temperatures, one for each direction, the geometric mean is taken.

    Args:
        config: fields of the new config. A SigLIP model needs `text_padding`.

    Raises:
        ValueError: if it is not given, or as in `FusionDualEncoderModel.from_backbones`.
    """
    kind, bias = stock.config.model_type, getattr(stock, "logit_bias", None)
    if kind in UNPROJECTED and not config.get("text_padding"):
        raise ValueError("text_padding is missing; SigLIP reads padding. Give its length, side and pad_token_id.")
    if kind == "clap":
        tower, scale = stock.audio_model, (stock.logit_scale_a + stock.logit_scale_t) / 2
    else:
        tower, scale = stock.vision_model, stock.logit_scale
    if kind == "xclip":
        tower = XCLIPTower(tower)
        tower.projection, tower.mit = stock.visual_projection, stock.mit
    if kind in MEDIUM:  # CLAP has a batch norm, and a rank's batch is not the global batch
        config |= {"medium": MEDIUM[kind], "freeze_batch_norm": True}
    taken = {
        "dual_encoder_type": kind,
        "vision_pooling": "pooler",
        "text_pooling": "cls" if kind == "chinese_clip" else "pooler",
        "projection_dim": getattr(stock.config, "projection_dim", None) or stock.config.text_config.projection_size,
        "logit_bias_init_value": None if bias is None else bias.item(),
    }
    model = FusionDualEncoderModel.from_backbones(tower, stock.text_model, **{**taken, **config})
    if kind not in UNPROJECTED:
        model.text_projection = stock.text_projection
    if kind not in (*UNPROJECTED, "xclip"):
        model.visual_projection = stock.audio_projection if kind == "clap" else stock.visual_projection
    model.logit_scale = nn.Parameter(scale.detach().squeeze())
    return model


def complete(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Let a tokenizer pad, with its last token if need be, return masks, and take special tokens for text; return it.

    Raises:
        ValueError: if it has no words, which is how some classes load from a folder without a tokenizer.
    """
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ValueError("its tokenizer has no words")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if "attention_mask" not in tokenizer.model_input_names:
        _set_outputs(tokenizer, [*tokenizer.model_input_names, "attention_mask"])
    if tokenizer.is_fast:  # the first is saved, for pipelines and others that open the folder
        tokenizer.init_kwargs["split_special_tokens"] = tokenizer.split_special_tokens = True
    return tokenizer


def stock_processor(
    processor: ProcessorMixin, config: Any, text_padding: dict[str, Any] | None = None
) -> ProcessorMixin:
    """Return the processor of a stock model's class, which does what ours does.

    Args:
        processor: ours, which makes central squares.
        config: the configuration of the stock model.
        text_padding: of our own model, if it reads padding.

    Raises:
        ValueError: if there is none.
    """
    if config.model_type == "clap" and processor.feature_extractor.truncation == "fusion":  # type: ignore[attr-defined]
        raise ValueError("the stock class reads four spectrograms of a sound of a fused CLAP, and this model one")
    if config.model_type in (DUAL_ENCODERS[0], "clap"):
        return processor
    images, tokenizer = processor.image_processor, processor.tokenizer
    if config.model_type in UNPROJECTED:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.model_max_length = (text_padding or {}).get("length", config.text_config.max_position_embeddings)
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
