"""Read dual encoders of `transformers`, and write their processors: CLIP, Chinese CLIP, SigLIP, Siglip2, CLAP."""

import copy
import logging
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer, ProcessorMixin, Siglip2ImageProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from mm_utils.model.join import join_backbones
from mm_utils.model.modeling_fusion_dual_encoder import DUAL_ENCODERS, UNPROJECTED, FusionDualEncoderModel
from mm_utils.model.pretrained import explained
from mm_utils.model.processor import complete, set_outputs

logger = logging.getLogger(__name__)


def load_stock(name: str, config: Any, **fields: Any) -> FusionDualEncoderModel:
    """Load a stock model in float32.

    Args:
        config: its configuration.
        fields: fields of the new configuration, such as those of the fusion head.

    Raises:
        ValueError: if the folder lacks weights, or SigLIP's has no tokenizer.
    """
    if config.model_type in UNPROJECTED:
        # SigLIP pools the last position: its texts are padded to one length, and padding is not masked.
        with explained(f"the tokenizer of {name} is missing or damaged", name):
            tokenizer = complete(AutoTokenizer.from_pretrained(name, trust_remote_code=False))
        length = min(config.text_config.max_position_embeddings, tokenizer.model_max_length)
        side, pad = tokenizer.padding_side, tokenizer.pad_token_id
        fields["text_padding"] = {"length": length, "side": side, "pad_token_id": pad}
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
    return model


def identity_projection(width: int) -> nn.Linear:
    """Return a projection that changes nothing, to the last bit."""
    projection = nn.Linear(width, width, bias=False)
    projection.weight.data = torch.eye(width)
    return projection


def from_dual_encoder(stock: Any, **config: Any) -> FusionDualEncoderModel:
    """Convert a stock model of `DUAL_ENCODERS` with its embeddings, temperature and bias.

    Of CLAP's two temperatures, one for each direction, the geometric mean is taken.

    Args:
        config: fields of the new config. A SigLIP model needs `text_padding`.
    """
    kind, bias, text_config = stock.config.model_type, getattr(stock, "logit_bias", None), stock.config.text_config
    width = getattr(stock.config, "projection_dim", None) or getattr(text_config, "projection_size", None)
    taken = {
        "dual_encoder_type": kind,
        "vision_pooling": "pooler",
        "text_pooling": "cls" if kind == "chinese_clip" else "pooler",
        "projection_dim": width or text_config.hidden_size,
        "logit_bias_init_value": None if bias is None else bias.item(),
    }
    if kind == "clap":  # it has a batch norm, and a rank's batch is not the global batch
        taken |= {"medium": "sound", "freeze_batch_norm": True}
        tower, scale = stock.audio_model, (stock.logit_scale_a + stock.logit_scale_t) / 2
    else:
        tower, scale = stock.vision_model, stock.logit_scale
    model = join_backbones(tower, stock.text_model, **{**taken, **config})
    if kind not in UNPROJECTED:
        model.text_projection = stock.text_projection
        model.visual_projection = stock.audio_projection if kind == "clap" else stock.visual_projection
    model.logit_scale = nn.Parameter(scale.detach().squeeze())
    return model


def stock_processor(
    processor: ProcessorMixin, config: Any, text_padding: dict[str, Any] | None = None
) -> ProcessorMixin:
    """Return the processor of the class of a stock `config`, which does what ours does; ValueError if there is none.

    Args:
        processor: ours, which makes central squares.
        text_padding: of our own model, if it reads padding.
    """
    if config.model_type == "clap" and processor.feature_extractor.truncation == "fusion":  # type: ignore[attr-defined]
        raise ValueError("the stock class reads four spectrograms of a sound of a fused CLAP, and this model one")
    if config.model_type in (DUAL_ENCODERS[0], "clap") or type(config) not in PROCESSOR_MAPPING:
        return processor
    images, tokenizer = processor.image_processor, processor.tokenizer
    if config.model_type in UNPROJECTED:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.model_max_length = (text_padding or {}).get("length", config.text_config.max_position_embeddings)
        set_outputs(tokenizer, ["input_ids"])
    if config.model_type == "siglip2":
        patch_size = config.vision_config.patch_size
        images = Siglip2ImageProcessor(
            patch_size=patch_size,
            max_num_patches=(images.crop_size["height"] // patch_size) ** 2,
            **{name: getattr(images, name) for name in ("resample", "image_mean", "image_std")},
        )
    processor_class: Any = PROCESSOR_MAPPING[type(config)]
    return processor_class(images, tokenizer)
