"""Read and write dual encoders of `transformers`: CLIP, SigLIP, Siglip2, CLAP and others.

A model that is not of `DUAL_ENCODERS` is taken if it has two towers that load by themselves, projections of one matrix each or
none, and a temperature, and its features are those of its own class on a trial input.
"""

import copy
import logging
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer, ProcessorMixin, Siglip2ImageProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from mm_utils.model.join import join_backbones, probe_input
from mm_utils.model.modeling_fusion_dual_encoder import (
    DUAL_ENCODERS,
    UNPROJECTED,
    FusionDualEncoderModel,
    class_of_tower,
)
from mm_utils.model.pretrained import explained
from mm_utils.model.processor import complete, set_outputs

logger = logging.getLogger(__name__)


def load_stock(name: str, config: Any, **fields: Any) -> FusionDualEncoderModel:
    """Load a stock model in float32.

    Args:
        config: the configuration of the stock model.
        fields: fields of the new configuration, such as those of the fusion head.

    Raises:
        ValueError: if the folder lacks weights, or SigLIP's has no tokenizer, or a model does not fit.
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
    if config.model_type not in DUAL_ENCODERS and (reason := _unfit(stock)):
        raise ValueError(
            f"{name} holds a {config.model_type}, which cannot be taken as a whole; {reason}. Choose another model, or take a tower "
            "by --vision_model_name_or_path or --text_model_name_or_path."
        )
    model = from_dual_encoder(stock, **fields)
    if config.model_type not in DUAL_ENCODERS:
        _check_features(name, stock.eval(), model)
    if config.model_type == "clap":
        logger.info(
            "%s has two temperatures, and one is trained: logit_scale %.3f, their geometric mean, instead of %.3f for sounds "
            "and %.3f for texts",
            *(name, *(scale.exp().item() for scale in (model.logit_scale, stock.logit_scale_a, stock.logit_scale_t))),
        )
    return model


def _unfit(stock: Any) -> str | None:
    """Return what a model lacks to be taken; None for one that fits."""
    for side in ("vision_model", "text_model"):
        tower = getattr(stock, side, None)
        if tower is None:
            return f"it has no {side}"
        if class_of_tower(tower.config) is not type(tower):
            return f"its {side}, a {type(tower).__name__}, is not a model by itself"
    for side in ("visual_projection", "text_projection"):
        projection = getattr(stock, side, None)
        if projection is not None and (not isinstance(projection, nn.Linear) or projection.bias is not None):
            return f"its {side} is more than one matrix"
    scales = [getattr(stock, each, None) for each in ("logit_scale", "temperature")]
    return (
        None
        if any(isinstance(each, nn.Parameter) and each.numel() == 1 for each in scales)
        else "it has no temperature"
    )


@torch.no_grad()
def _check_features(name: str, stock: Any, model: FusionDualEncoderModel) -> None:
    """Raise ValueError unless a trial image and a trial text are embedded as by the stock class."""
    image: Any = probe_input(model.vision_model, "vision")
    text: Any = probe_input(model.text_model, "text")
    model.eval()
    [pixels] = image.values()
    found = model.encode_image(pixels, with_keys_values=False)[0], model.encode_text(**text)[0]
    for side, given, ours in (("image", image, found[0]), ("text", text, found[1])):
        own = getattr(stock, f"get_{side}_features")(**given)
        own = F.normalize(getattr(own, "pooler_output", own), dim=-1)
        if own.shape != ours.shape or not torch.allclose(own, ours, rtol=0, atol=1e-4):
            raise ValueError(
                f"{name} holds a {stock.config.model_type}, which cannot be taken as a whole; its {side} features are not its "
                f"{side} tower's pooled output, projected. Choose another model."
            )


def identity_projection(width: int) -> nn.Linear:
    """Return a projection that changes nothing, to the last bit."""
    projection = nn.Linear(width, width, bias=False)
    projection.weight.data = torch.eye(width)
    return projection


def from_dual_encoder(stock: Any, **config: Any) -> FusionDualEncoderModel:
    """Convert a stock model, of `DUAL_ENCODERS` or one that fits, with its embeddings, temperature and bias.

    Of CLAP's two temperatures, one for each direction, the geometric mean is taken.

    Args:
        config: fields of the new config. A SigLIP model needs `text_padding`.

    Raises:
        ValueError: if it is not given, or as in `join_backbones`.
    """
    kind, bias = stock.config.model_type, getattr(stock, "logit_bias", None)
    if kind in UNPROJECTED and not config.get("text_padding"):
        raise ValueError("text_padding is missing; SigLIP reads padding. Give its length, side and pad_token_id.")
    if kind == "clap":
        tower, scale = stock.audio_model, (stock.logit_scale_a + stock.logit_scale_t) / 2
    else:
        tower = stock.vision_model
        scale = stock.logit_scale if hasattr(stock, "logit_scale") else -stock.temperature.log()
    if kind == "clap":  # it has a batch norm, and a rank's batch is not the global batch
        config |= {"medium": "sound", "freeze_batch_norm": True}
    projections = [getattr(stock, f"{side}_projection", None) for side in ("visual", "text")]
    keeps_class = kind in DUAL_ENCODERS or (all(projections) and hasattr(stock, "logit_scale"))
    text_config = stock.config.text_config
    width = getattr(stock.config, "projection_dim", None) if kind in DUAL_ENCODERS or projections[1] else None
    width = width or getattr(text_config, "projection_size", None) or text_config.hidden_size
    taken = {
        "dual_encoder_type": kind if keeps_class else DUAL_ENCODERS[0],
        "vision_pooling": "pooler",
        "text_pooling": "cls" if kind == "chinese_clip" else "pooler",
        "projection_dim": width,
        "logit_bias_init_value": None if bias is None else bias.item(),
    }
    model = join_backbones(tower, stock.text_model, **{**taken, **config})
    if kind not in UNPROJECTED:
        model.text_projection = projections[1] or identity_projection(model.config.text_width)
        own = stock.audio_projection if kind == "clap" else projections[0]
        model.visual_projection = own or identity_projection(model.config.vision_pooled_width)
    model.logit_scale = nn.Parameter(scale.detach().squeeze())
    return model


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
