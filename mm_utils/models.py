"""Build or load a model with its processor: from presets, from pretrained backbones, or from an earlier run."""

import json
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoTokenizer,
    CLIPImageProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
    VisionTextDualEncoderProcessor,
)

from mm_utils.arguments import arg
from mm_utils.modeling_fusion_dual_encoder import DIRECTIONS, POOLINGS, FusionDualEncoderModel, image_shape
from mm_utils.pretrained import OwnCodeError, explained, load_backbone, load_config
from mm_utils.wordpiece import cached_tokenizer

logger = logging.getLogger(__name__)

VISION_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"model_type": "convnext", "hidden_sizes": [32, 64, 128], "depths": [2, 2, 2], "num_stages": 3,
             "patch_size": 4, "image_size": 64, "layer_scale_init_value": 1.0, "initializer_range": 0.08},
    "small": {"model_type": "vit", "hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6,
              "intermediate_size": 1536, "patch_size": 16, "image_size": 224},
    "base": {"model_type": "vit", "patch_size": 16, "image_size": 224},
}  # fmt: skip
TEXT_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"model_type": "bert", "hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3,
             "intermediate_size": 768, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "small": {"model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6,
              "intermediate_size": 1536},
    "base": {"model_type": "bert"},
}  # fmt: skip


@dataclass
class ModelArguments:
    """The two towers and the head. A pretrained backbone wins over a preset; an earlier run wins over both."""

    model_name_or_path: str | None = arg(None, "Start from a whole model: a folder that a run left, or a Hub id.")
    vision_model_name_or_path: str | None = arg(None, "Pretrained vision backbone: a folder or a Hub id.")
    text_model_name_or_path: str | None = arg(None, "Pretrained text backbone: a folder or a Hub id.")
    vision_config: str = arg("tiny", "Vision backbone from scratch: tiny, small, base, or a config.json.")
    text_config: str = arg("tiny", "Text backbone from scratch: tiny, small, base, or a config.json.")
    tokenizer_name_or_path: str | None = arg(
        None, "Default: the text backbone's; for a text backbone from scratch, trained on the captions."
    )
    vocab_size: int = arg(8192, "Largest vocabulary of a tokenizer trained on the captions.")
    image_size: int | None = arg(None, "Side of the square image; default: what the vision backbone expects.")
    projection_dim: int | None = arg(
        None, "Width of the shared embedding space; default: 256, or 3/4 of a narrower text backbone."
    )
    vision_pooling: str = arg("auto", "pooler, mean, cls, or auto: the pooler where there is one, else the mean.")
    text_pooling: str = arg("auto", "As --vision_pooling; auto passes over BERT's kind of pooler and takes the mean.")
    fusion_layers: int = arg(2, "Blocks of the cross-attention head; 0 leaves it out.")
    fusion_dim: int | None = arg(
        None, "Width of the cross-attention head; default: half the text backbone's, at most 512."
    )
    fusion_heads: int | None = arg(None, "Attention heads of the cross-attention head; default: one per 32 channels.")
    fusion_vision_taps: str = arg(
        "auto",
        "Hidden states of the vision backbone that the head reads, coarse before fine, e.g. -1,-2; auto: one per block, "
        "three at most, the last of each resolution, or layers of a transformer at equal distances.",
    )
    fusion_text_taps: str = arg("auto", "As --fusion_vision_taps, of the text backbone.")
    fusion_hierarchy: bool = arg(
        True, "Blocks of the head read the taps one after the other, and the text anew; false: all taps, all blocks."
    )
    fusion_direction: str = arg(
        "text_to_image",
        "text_to_image, or both: image tokens read the text too, and can then not be kept for many texts.",
    )
    freeze_vision: bool = arg(False, "Do not train the vision backbone.")
    freeze_text: bool = arg(False, "Do not train the text backbone.")
    gradient_checkpointing: bool = arg(
        False, "Recompute activations in the backward pass: less memory, a third slower."
    )
    patch_dropout: float = arg(
        0.0, "Drop this share of the image's patches in training (FLIP): half costs about half the vision tower."
    )
    torch_compile: bool = arg(
        False, "Compile both towers with torch.compile: minutes at the start, then faster steps on a GPU."
    )
    trust_remote_code: bool = arg(
        False, "Run the Python code that a backbone or tokenizer brings with it. Read that code first."
    )

    def __post_init__(self) -> None:
        if not 0 <= self.patch_dropout < 1:
            raise ValueError(f"--patch_dropout is {self.patch_dropout}; give a share of the patches in [0, 1).")
        for name in ("fusion_vision_taps", "fusion_text_taps"):
            taps = getattr(self, name)
            if taps != "auto" and not re.fullmatch(r"-?\d+(,-?\d+)*", taps):
                raise ValueError(
                    f"--{name} is {taps!r}; give places in the backbone's hidden states, e.g. -1,-2, or auto."
                )
        if self.fusion_direction not in DIRECTIONS:
            raise ValueError(
                f"--fusion_direction is {self.fusion_direction!r}; choose one of {', '.join(DIRECTIONS)}."
            )
        for name in ("vision_pooling", "text_pooling"):
            if getattr(self, name) not in POOLINGS:
                raise ValueError(f"--{name} is {getattr(self, name)!r}; choose one of {', '.join(POOLINGS)}.")
        for name, presets in (("vision_config", VISION_PRESETS), ("text_config", TEXT_PRESETS)):
            value = getattr(self, name)
            if value not in presets and not Path(value).is_file():
                raise ValueError(f"--{name} is {value!r}; give {', '.join(presets)} or the path of a config.json.")

    @property
    def taps(self) -> dict[str, list[int]]:
        """Those that were given, as fields of the model's config."""
        given = {name: getattr(self, name) for name in ("fusion_vision_taps", "fusion_text_taps")}
        return {name: [int(tap) for tap in taps.split(",")] for name, taps in given.items() if taps != "auto"}

    @property
    def pretrained(self) -> bool:
        """Whether any part starts from trained weights."""
        return any((self.model_name_or_path, self.vision_model_name_or_path, self.text_model_name_or_path))


def load_processor(args: ModelArguments, captions: Iterable[str]) -> VisionTextDualEncoderProcessor:
    """Tokenizer and image processor. A text backbone from scratch gets a tokenizer trained on `captions`.

    The image processor does exactly what `mm_utils.data.images.center_square` does, with the backbone's mean and std.
    """
    if args.model_name_or_path:
        return load_processor_of(args.model_name_or_path)
    return VisionTextDualEncoderProcessor(_image_processor(args), _tokenizer(args, captions))


def load_processor_of(name: str) -> VisionTextDualEncoderProcessor:
    """The processor saved with a model: a folder or a Hub id. Images become squares as in `load_processor`."""
    with explained(f"the processor of {name} is missing or damaged", name):
        processor = VisionTextDualEncoderProcessor.from_pretrained(name, trust_remote_code=False)
    processor.image_processor = _center_square_processor(processor.image_processor)
    return processor


def load_model(name: str) -> FusionDualEncoderModel:
    """A saved model: the folder that a run left, a checkpoint, or a Hub id.

    Raises:
        ValueError: if there is none.
    """
    title = f"{name} holds no model"
    try:
        config = load_config(title, name)
        with explained(title, name):
            if config.model_type == VisionTextDualEncoderConfig.model_type:
                stock = VisionTextDualEncoderModel.from_pretrained(name, use_safetensors=True)
                return FusionDualEncoderModel.from_dual_encoder(stock)
            return FusionDualEncoderModel.from_pretrained(name, use_safetensors=True)
    except OwnCodeError as error:
        raise ValueError(
            f"{title} that can be taken as a whole; it needs Python code of its own. Read that code, then give it as "
            "--vision_model_name_or_path or --text_model_name_or_path with --trust_remote_code."
        ) from error


def image_geometry(processor: VisionTextDualEncoderProcessor) -> tuple[int, list[float], list[float]]:
    """Side of the square, mean and std that the processor's images have."""
    images = processor.image_processor
    return images.crop_size["height"], list(images.image_mean), list(images.image_std)


def build_model(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> FusionDualEncoderModel:
    """The model that the arguments name, with frozen towers and gradient checkpointing set."""
    if args.model_name_or_path:
        model = load_model(args.model_name_or_path).float()
    else:
        model = FusionDualEncoderModel.from_backbones(
            _vision_backbone(args),
            _text_backbone(args, tokenizer),
            **({"projection_dim": args.projection_dim} if args.projection_dim else {}),
            vision_pooling=args.vision_pooling,
            text_pooling=args.text_pooling,
            fusion_layers=args.fusion_layers,
            **({"fusion_dim": args.fusion_dim} if args.fusion_dim else {}),
            **({"fusion_heads": args.fusion_heads} if args.fusion_heads else {}),
            **args.taps,
            fusion_hierarchy=args.fusion_hierarchy,
            fusion_direction=args.fusion_direction,
            # Batch norms that were trained elsewhere keep their statistics: a rank's batch is not the global batch.
            freeze_batch_norm=bool(args.vision_model_name_or_path),
        )
    for tower, frozen in (("vision", args.freeze_vision), ("text", args.freeze_text)):
        if frozen:
            model.freeze(tower)
    freeze_unreached(model)
    model.vision_model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if args.gradient_checkpointing:
        recompute_activations(model)
    if args.patch_dropout:
        drop_patches(model.vision_model, args.patch_dropout)
    if args.torch_compile:
        model.vision_model.compile()
        model.text_model.compile(dynamic=True)  # one graph for all lengths
    return model


def recompute_activations(model: PreTrainedModel) -> None:
    """Keep no activations for the backward pass (gradient checkpointing)."""
    # transformers 6 knows the first name alone, early releases of 5 the second
    renamed = getattr(model, "activation_checkpointing_enable", None)
    (renamed or model.gradient_checkpointing_enable)({"use_reentrant": False})


def drop_patches(vision_model: PreTrainedModel, share: float) -> None:
    """From now on, training steps see a random part of every image's patches (FLIP, arXiv 2212.00794).

    Raises:
        ValueError: if the backbone does not embed an image as `[B, tokens, C]`, the patches last.
    """
    embeddings, config = getattr(vision_model, "embeddings", None), vision_model.config
    _, height, width = image_shape(vision_model)
    patch = getattr(config, "patch_size", None)
    patches = (height // patch) * (width // patch) if isinstance(patch, int) else 0

    def drop(module: torch.nn.Module, given: Any, tokens: Any) -> Any:
        if not module.training:
            return tokens
        special = tokens.shape[1] - patches
        kept = max(1, round(patches * (1 - share)))
        order = torch.rand(len(tokens), patches, device=tokens.device).argsort(1)[:, :kept].sort(1).values
        chosen = tokens[:, special:].gather(1, order[..., None].expand(-1, -1, tokens.shape[2]))
        return torch.cat([tokens[:, :special], chosen], 1)

    probed = embeddings(torch.zeros(1, *image_shape(vision_model))) if embeddings is not None and patches else None
    if embeddings is None or not isinstance(probed, torch.Tensor) or probed.dim() != 3 or probed.shape[1] < patches:
        raise ValueError(
            f"--patch_dropout is {share}; a {config.model_type} has no row of patch tokens to drop from. Use a ViT, or 0."
        )
    embeddings.register_forward_hook(drop)


def freeze_unreached(model: FusionDualEncoderModel) -> int:
    """Stop training parameters that no output depends on (mask tokens, poolers that are not used); returns how many.

    DDP waits for the gradient of every trained parameter, and would wait for theirs in vain.
    """
    images = torch.randn(2, *image_shape(model.vision_model))
    ones = torch.ones(2, 4, dtype=torch.long)
    was_training = model.training
    reached = model.eval()(input_ids=ones, pixel_values=images, return_loss=True)
    total = reached.loss if reached.match_logits is None else reached.loss + reached.match_logits.sum()
    # Whether heads and bias are trained is the objective's to say.
    towers = (parameter for tower in (model.vision_model, model.text_model) for parameter in tower.parameters())
    frozen = freeze_untouched(towers, total)
    model.train(was_training)
    return frozen


def freeze_untouched(parameters: Iterable[torch.nn.Parameter], total: torch.Tensor) -> int:
    """Stop training those that a scalar does not depend on; returns how many numbers they hold."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = torch.autograd.grad(total, trained, allow_unused=True) if trained else []
    unreached = [parameter for parameter, gradient in zip(trained, gradients, strict=True) if gradient is None]
    for parameter in unreached:
        parameter.requires_grad_(False)
    return sum(parameter.numel() for parameter in unreached)


def _image_processor(args: ModelArguments) -> CLIPImageProcessor:
    if args.vision_model_name_or_path:
        name = args.vision_model_name_or_path
        with explained(f"--vision_model_name_or_path is {name}", name):
            own = AutoImageProcessor.from_pretrained(name, trust_remote_code=args.trust_remote_code)
        return _center_square_processor(own, args.image_size)
    size = args.image_size or _preset(args.vision_config, VISION_PRESETS).get("image_size")
    return _center_square_processor(CLIPImageProcessor(image_mean=[0.5] * 3, image_std=[0.5] * 3), size)


def _center_square_processor(own: Any, size: int | None = None) -> CLIPImageProcessor:
    """With the mean and std of a backbone's `own` processor, and its side of the square unless `size` is given."""
    size = size or _side(getattr(own, "crop_size", None)) or _side(own.size) or 224
    return CLIPImageProcessor(
        size={"shortest_edge": size},
        crop_size={"height": size, "width": size},
        image_mean=own.image_mean or [0.5] * 3,
        image_std=own.image_std or [0.5] * 3,
    )


def _side(size: Any) -> int | None:
    size = dict(size) if size else {}
    return size.get("height") or size.get("shortest_edge")


def _tokenizer(args: ModelArguments, captions: Iterable[str]) -> PreTrainedTokenizerBase:
    source = args.tokenizer_name_or_path or args.text_model_name_or_path
    if not source:
        return cached_tokenizer(captions, args.vocab_size)
    flag = "--tokenizer_name_or_path" if args.tokenizer_name_or_path else "--text_model_name_or_path"
    with explained(f"{flag} is {source}", source):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=args.trust_remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _vision_backbone(args: ModelArguments) -> PreTrainedModel:
    if args.vision_model_name_or_path:
        return _pretrained(args.vision_model_name_or_path, "vision_config", args.trust_remote_code)
    preset = dict(_preset(args.vision_config, VISION_PRESETS))
    if args.image_size:
        preset["image_size"] = args.image_size
    return AutoModel.from_config(AutoConfig.for_model(**preset))


def _text_backbone(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    if args.text_model_name_or_path:
        return _pretrained(args.text_model_name_or_path, "text_config", args.trust_remote_code)
    preset = {**_preset(args.text_config, TEXT_PRESETS), "vocab_size": len(tokenizer)}
    return AutoModel.from_config(AutoConfig.for_model(**preset, pad_token_id=tokenizer.pad_token_id))


def _pretrained(name: str, tower: str, trust_remote_code: bool) -> PreTrainedModel:
    """One backbone; of a two-tower checkpoint such as CLIP's, the tower asked for."""
    flag = f"--{tower.removesuffix('_config')}_model_name_or_path is {name}"
    config = load_config(flag, name, trust_remote_code)
    config = getattr(config, tower, config)
    if type(config) not in MODEL_MAPPING and not trust_remote_code:
        raise ValueError(f"{flag}; AutoModel knows no {config.model_type}. Choose another backbone.")
    model, info = load_backbone(flag, name, config, trust_remote_code)
    if len(info["missing_keys"]) == len(model.state_dict()):
        raise ValueError(
            f"{flag}; it holds no weights of a {config.model_type}. Choose a checkpoint of that backbone."
        )
    return model


def _preset(name: str, presets: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return presets[name] if name in presets else json.loads(Path(name).read_text(encoding="utf-8"))
