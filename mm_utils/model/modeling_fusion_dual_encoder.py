"""Embed texts and images, clips or sounds with any `AutoModel` towers; re-rank with a head.

The two towers, their projections and the temperature have the parameter names of `VisionTextDualEncoderModel`, `CLIPModel`,
`ChineseCLIPModel` and `SiglipModel`. The heads over them are in `fusion`, and `reading` reads media and texts.
These three files are saved with every model, and depend on torch and transformers alone.

The medium may be a clip or a sound: `vision_model` is its tower, `pixel_values` that tower's input, and "image" in a name
stands for any of the three. Hidden states of clips and sounds become maps `[B, C, places, T]`, see `along_time`.

Shape letters: B images or texts, P pairs, R boxes, C channels of a backbone, N image tokens, L text tokens, M chosen tokens,
V words of the vocabulary, D fusion width, E embedding width.
"""

import copy
import importlib
import itertools
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForZeroShotImageClassification,
    AutoProcessor,
    ChineseCLIPTextModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.image_utils import is_pil_image
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput
from transformers.models.clap.modeling_clap import ClapProjectionLayer
from transformers.utils import ModelOutput

from .fusion import CaptionAdapter, FusionHead, KeysValues, LevelAdapter, RegionHead, TokenHead, as_map, target_mask
from .reading import CHARACTERS_PER_TOKEN, center_square, frames_of, open_picture, samples_of, sound_input, token_ids

logger = logging.getLogger(__name__)

MEDIA = ("image", "clip", "sound")
POOLINGS = ("auto", "pooler", "mean", "cls")
PROJECTIONS = ("linear", "mlp")
CLASSIFIER_INPUTS = ("fused", "pair", "image")
_OF_PADDING = {"length": int, "side": str, "pad_token_id": int}
DUAL_ENCODERS = ("vision-text-dual-encoder", "clip", "chinese_clip", "siglip", "clap")
PROJECTION_HIDDEN = 1_024
FEATURE_DROPOUT = {"vision": 0.7, "text": 0.5}  # of `ResidualProjection`
_MOST_TOKENS = 512  # of a text, where neither tokenizer nor tower says it
_POSITIONS = ("position_embedding", "position_embeddings", "embed_positions", "wpe")


# -- configuration and output -----------------------------------------------------------------------------------------


class FusionDualEncoderConfig(PreTrainedConfig):
    """Two backbone configs, pooling and projection, and the shape of the fusion head.

    Args:
        vision_config, text_config: configs of `AutoModel` backbones, as objects or dictionaries; a classifier of media alone
            has no text_config, nor a text tower.
        medium: one of `MEDIA`, what `vision_config` reads; an image backbone reads the frames of clips by `FramesTower`.
        frame_layers: the layers over time of such a tower.
        projection_dim: width of the embedding space; default: 256, or 3/4 of a narrower text tower.
        projection: one of `PROJECTIONS`, of new models between backbones: `mlp` is `ResidualProjection`.
        logit_scale_init_value: initial log inverse temperature; 2.6592 is log(1 / 0.07).
        logit_bias_init_value: initial bias of the sigmoid loss; None for a model without bias.
        vision_pooling, text_pooling: one of `POOLINGS`. `auto` is resolved when the model is built: `pooler` if the backbone
            returns a `pooler_output`, else the (masked) `mean` of the tokens. BERT's pooler, a dense layer on the first token,
            does not count: after pretraining it is untrained, or knows next-sentence prediction alone. For a map of a
            spectrogram it is `timed`: the pooler, and when in the window a channel is heard (`_pool_over_time`).
        vision_widths, vision_pooled_width, text_width: channels of the hidden states and of the pooled outputs, measured by
            `join.join_backbones`.
        fusion_layers: number of blocks of the fusion head; 0 for no head.
        fusion_dim: width of the head; default: half the text tower's, a multiple of 32, at most 512.
        fusion_heads: attention heads; default: one per 32 channels.
        fusion_vision_taps, fusion_text_taps: hidden states of the towers that the head reads, coarse before fine, as indices
            into `hidden_states`; a text tap of -1 is `last_hidden_state`.
        fusion_tokens_per_tap: a tap with more tokens is pooled to this number.
        token_head, caption_head, region_head: whether the model predicts words, writes captions, embeds boxes of an image.
        rerank_weights: by what each score of the head (match, caption) is multiplied before it is added to the scaled
            cosine, as fitted on the validation split; 0 for one that does not help, None if nothing was fitted.
        freeze_batch_norm: whether running statistics of batch norms stay fixed in training.
        dual_encoder_type: the model type of the stock class that it can be saved as, one of `DUAL_ENCODERS`.
        text_padding: `length`, `side` and `pad_token_id`, if the text tower reads padding like words, as SigLIP's was trained
            to; None if padding is masked.
        classifier_inputs: one of `CLASSIFIER_INPUTS`.
    """

    model_type = "fusion-dual-encoder"
    sub_configs = {"vision_config": AutoConfig, "text_config": AutoConfig}  # noqa: RUF012
    has_no_defaults_at_init = True
    medium = "image"
    frame_layers = 2
    projection = "linear"

    def __init__(
        self,
        vision_config: Any = None,
        text_config: Any = None,
        *,
        medium: str = "image",
        frame_layers: int = 2,
        projection_dim: int | None = None,
        projection: str = "linear",
        logit_scale_init_value: float = 2.6592,
        logit_bias_init_value: float | None = None,
        vision_pooling: str = "auto",
        text_pooling: str = "auto",
        vision_widths: Sequence[int] = (),
        vision_pooled_width: int = 0,
        text_width: int = 0,
        fusion_layers: int = 2,
        fusion_dim: int | None = None,
        fusion_heads: int | None = None,
        fusion_vision_taps: Sequence[int] = (-1,),
        fusion_text_taps: Sequence[int] = (-1,),
        fusion_tokens_per_tap: int = 64,
        token_head: bool = False,
        caption_head: bool = False,
        region_head: bool = False,
        rerank_weights: dict[str, float] | None = None,
        freeze_batch_norm: bool = False,
        dual_encoder_type: str = DUAL_ENCODERS[0],
        text_padding: dict[str, Any] | None = None,
        classifier_inputs: str = "fused",
        classifier_dropout: float = 0.1,
        **kwargs: Any,
    ):
        for name, config in (("vision_config", vision_config), ("text_config", text_config)):
            # A copy: PreTrainedConfig.__init__ below resets the attention implementation of its sub-configs, and a tower
            # whose own config lost it would silently ignore its padding mask.
            setattr(self, name, AutoConfig.for_model(**config) if isinstance(config, dict) else copy.deepcopy(config))
        for name, value, choices in (
            ("medium", medium, MEDIA),
            ("vision_pooling", vision_pooling, (*POOLINGS, "timed")),
            ("text_pooling", text_pooling, POOLINGS),
            ("projection", projection, PROJECTIONS),
            ("dual_encoder_type", dual_encoder_type, DUAL_ENCODERS),
            # of older versions
            ("media", kwargs.pop("media", None), (None, {})),
            ("fusion_direction", kwargs.pop("fusion_direction", None), (None, "text_to_image")),
            ("fusion_hierarchy", kwargs.pop("fusion_hierarchy", None), (None, True)),
            ("classifier_inputs", classifier_inputs, CLASSIFIER_INPUTS),
        ):
            if value not in choices:
                raise ValueError(
                    f"{name} is {value!r}; choose one of {', '.join(map(str, choices))}. AutoModel opens a folder of an older "
                    "version by the code in it."
                )
        for name, weight in (rerank_weights or {}).items():
            if name not in ("match", "caption") or not isinstance(weight, (int, float)) or not math.isfinite(weight):
                raise ValueError(
                    f"rerank_weights has {name}: {weight!r}; it holds a number for match, for caption, or both."
                )
        padding = text_padding if isinstance(text_padding, dict) else {}
        kinds = {name: type(value) for name, value in padding.items()}
        if text_padding is not None and (kinds != _OF_PADDING or padding["side"] not in ("left", "right")):
            raise ValueError(
                f"text_padding is {text_padding!r}; it is null, or has a length, a side (left or right) and a pad_token_id."
            )
        # of 768 channels 384, of 192 channels 96
        fusion_dim = fusion_dim or max(32, min(512, text_width // 64 * 32))
        fusion_heads = fusion_heads or max(1, fusion_dim // 32)
        if fusion_layers and fusion_dim % (4 * fusion_heads):
            raise ValueError(
                f"fusion_dim is {fusion_dim} with {fusion_heads} heads; it must be a multiple of 4 x fusion_heads."
            )
        for name, value in {"medium": medium, "frame_layers": frame_layers, "projection": projection}.items():
            if value != getattr(self, name):  # the class has the usual ones, which files do not name
                setattr(self, name, value)
        self.projection_dim = projection_dim or min(256, 3 * text_width // 4)  # of 192 channels 144
        self.logit_scale_init_value = logit_scale_init_value
        self.logit_bias_init_value = logit_bias_init_value
        self.vision_pooling = vision_pooling
        self.text_pooling = text_pooling
        self.vision_widths = list(vision_widths)
        self.vision_pooled_width = vision_pooled_width
        self.text_width = text_width
        self.fusion_layers = fusion_layers
        self.fusion_dim = fusion_dim
        self.fusion_heads = fusion_heads
        self.fusion_tokens_per_tap = fusion_tokens_per_tap
        self.fusion_vision_taps = list(fusion_vision_taps)
        self.fusion_text_taps = list(fusion_text_taps)
        self.token_head = token_head or caption_head
        self.caption_head = caption_head
        self.region_head = region_head
        self.rerank_weights = rerank_weights
        self.freeze_batch_norm = freeze_batch_norm
        self.dual_encoder_type = dual_encoder_type
        self.text_padding = text_padding
        self.classifier_inputs = classifier_inputs
        self.classifier_dropout = classifier_dropout
        super().__init__(**kwargs)


@dataclass
class FusionDualEncoderOutput(ModelOutput):
    """Output of `FusionDualEncoderModel.forward`; a field is None if its inputs were not given."""

    loss: Tensor | None = None  # scalar InfoNCE over this batch, with `return_loss=True`
    logits_per_image: Tensor | None = None  # `[B, B]` scaled cosines, plus the bias if the model has one
    logits_per_text: Tensor | None = None  # the transpose of `logits_per_image`
    text_embeds: Tensor | None = None  # `[B, E]`, of unit length
    image_embeds: Tensor | None = None  # `[B, E]`, of unit length
    keys_values: KeysValues | None = None  # image side of the fusion head, see `FusionHead.encode_vision`
    text_states: Tensor | None = None  # text side of the fusion head, see `FusionHead.encode_text`
    match_logits: Tensor | None = None  # `[B]` logits that image b and text b belong together
    logit_scale: Tensor | None = None  # scalar log inverse temperature


# -- backbones: inputs, outputs, pooling, taps ------------------------------------------------------------------------


def is_trained(tower: nn.Module) -> bool:
    """Return whether any parameter of the tower is trained."""
    return any(parameter.requires_grad for parameter in tower.parameters())


def input_shape(backbone: Any) -> tuple[int, ...]:
    """Return the shape of one input of a media backbone; where it may be longer, an example.

    Images `[3, H, W]`, clips `[T, 3, H, W]`, waves `[samples]`, spectrograms `[frames, mel]`; Whisper's are turned.
    """
    config = backbone.config
    if isinstance(backbone, FramesTower):
        return *(() if hasattr(config, "num_frames") else (4,)), *input_shape(backbone.backbone)
    if hasattr(config, "conv_stride"):
        return (16 * math.prod(config.conv_stride),)  # Wav2Vec2: 16 frames of 320 samples
    if hasattr(config, "max_source_positions"):
        return config.num_mel_bins, 2 * config.max_source_positions  # Whisper: 80 bands, 3,000 frames
    if hasattr(config, "frequency_stride"):
        return config.max_length, config.num_mel_bins  # AST: 1,024 frames, 128 bands
    if hasattr(config, "spec_size"):
        # CLAP: 256 x 256 values are 1,024 frames of 64 bands
        return 1, config.spec_size**2 // config.num_mel_bins, config.num_mel_bins
    size = getattr(config, "image_size", None) or getattr(config, "crop_size", None)
    size = size or (getattr(config, "pretrained_cfg", None) or {}).get("input_size", (64,))[-1]  # of timm
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
    return (*([frames] if frames else []), getattr(config, "num_channels", 3), height, width)


def input_name(backbone: Any) -> str:
    """Return what a media backbone calls its input, where others may have left a text's name."""
    return "pixel_values" if backbone.main_input_name == "input_ids" else backbone.main_input_name


def image_backbone(tower: Any) -> Any:
    """Return what reads the single frames, if it is an image backbone, or the tower itself."""
    return tower.backbone if isinstance(tower, FramesTower) else tower


def vision_tower(config: Any) -> Any:
    """Make the media tower of a config: of Whisper the encoder."""
    made = _made(config)
    return made.get_encoder() if config.model_type == "whisper" else made


def _made(config: Any) -> Any:
    """Make a tower; `AutoModel` does not know some that are parts of stock models."""
    if config.model_type == "chinese_clip_text_model":
        return ChineseCLIPTextModel(config, add_pooling_layer=False)
    name = type(config).__module__
    if name.startswith("transformers.") and type(config) not in MODEL_MAPPING:
        # '...clip.configuration_clip' -> '...clip.modeling_clip'
        module = importlib.import_module(name.replace("configuration_", "modeling_"))
        # 'CLIPTextConfig' -> CLIPTextModel
        return getattr(module, f"{type(config).__name__.removesuffix('Config')}Model")(config)
    return AutoModel.from_config(config)


def text_positions(text_model: nn.Module) -> int | None:
    """Return for how many tokens a text tower has positions; None if it reads texts of any length."""
    for name, table in text_model.named_modules():
        if isinstance(table, nn.Embedding) and name.rpartition(".")[2] in _POSITIONS:
            # RoBERTa counts from 2, as 1 is its padding: 514 rows are positions for 512 tokens
            before = getattr(table, "offset", 0) if table.padding_idx is None else table.padding_idx + 1
            return table.num_embeddings - before
    return None


def pool_output(output: ModelOutput, pooling: str, attention_mask: Tensor | None = None) -> Tensor:
    """Pool the output of a backbone to one vector per row, `[B, C]`."""
    if pooling == "pooler":
        return output["pooler_output"].flatten(1)
    if pooling == "timed":
        return torch.cat([pool_output(output, "pooler"), _pool_over_time(output["last_hidden_state"])], 1)
    hidden = output["last_hidden_state"]
    if hidden.dim() == 4:
        return hidden.mean((2, 3))
    if pooling == "cls":
        return hidden[:, 0]
    if attention_mask is None:
        return hidden.mean(1)
    weight = attention_mask[..., None].to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)


def _pool_over_time(hidden: Tensor) -> Tensor:
    """Return two cosine moments over time, `[B, 2 C]`, of a spectrogram's map `[B, C, T, F]`.

    A mean over time is about the same whichever event comes first. The first moment is positive where a channel is heard
    early, negative where late; the second separates the middle from both ends.
    """
    frames = hidden.mean(3).transpose(1, 2)
    # middles of the steps, in (0, pi)
    at = (torch.arange(frames.shape[1], device=hidden.device) + 0.5) * (math.pi / frames.shape[1])
    waves = torch.stack([at, 2 * at]).cos().to(hidden) / frames.shape[1]
    return (waves @ F.layer_norm(frames, frames.shape[2:])).flatten(1)


def _pad_unmasked(
    input_ids: Tensor, attention_mask: Tensor, length: int, side: str, pad_token_id: int
) -> tuple[Tensor, Tensor]:
    """Pad texts `[B, L]` to `length` tokens; return them and each given token's column `[B, L]`."""
    missing = (0, max(0, length - input_ids.shape[1]))
    is_token = F.pad(attention_mask.bool(), missing)
    tokens = F.pad(input_ids, missing).masked_fill(~is_token, pad_token_id)
    # what comes first keeps its order, and so does what comes after: padding and tokens, or the reverse
    is_first = (~is_token if side == "left" else is_token).long()
    after = is_first.sum(1, keepdim=True) + (1 - is_first).cumsum(1)
    column = torch.where(is_first.bool(), is_first.cumsum(1), after) - 1  # a sort would not export to ONNX
    return torch.empty_like(tokens).scatter(1, column, tokens), column[:, : input_ids.shape[1]]


def along_time(hidden: Tensor, tower: Any, medium: str) -> Tensor:
    """Lay a clip's or a sound's hidden state out as `[B, C, places or frequencies, T]`."""
    config = tower.config
    if medium == "image" or isinstance(tower, FramesTower):
        return hidden
    if hidden.dim() == 4 and hasattr(config, "spec_size"):  # CLAP's: four stretches of time, one below the other
        return hidden.unflatten(2, (config.spec_size // config.num_mel_bins, -1)).transpose(2, 3).flatten(3)
    if hidden.dim() == 4:  # of a spectrogram `[frames, mel]`
        return hidden.transpose(2, 3)
    patch = getattr(config, "patch_size", None) or getattr(config, "tubelet_size", (0,))[-1]
    places = 1
    if hasattr(config, "frequency_stride"):  # AST, with two special tokens
        hidden = hidden[:, 2:]
        places = (config.num_mel_bins - patch) // config.frequency_stride + 1  # (128 - 16) // 10 + 1 = 12
    elif medium == "clip":
        places = math.prod(side // patch for side in input_shape(tower)[2:])  # 14 x 14 of VideoMAE
    steps = hidden.shape[1] // places
    tokens = hidden[:, hidden.shape[1] - steps * places :].transpose(1, 2)  # without special ones
    if hasattr(config, "frequency_stride") or config.model_type == "timesformer":
        return tokens.unflatten(2, (places, steps))
    return tokens.unflatten(2, (steps, places)).transpose(2, 3)


FRAMES_AT_ONCE = 128  # frames in one pass without gradient


def _is_free() -> bool:
    """Return whether nothing but the result counts: no gradient is taken, and no graph, which has one number of clips, is made."""
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing())


class FramesTower(nn.Module):
    """An image backbone over the frames of a clip, as many as there are, and `layers` over time, by default two.

    What happens is what changes: a frame is mixed with its differences to the frames before and after (CLIP2Video, arXiv
    2106.11097). At initialisation, the pooled output is the mean of the frames' own (CLIP4Clip, arXiv 2104.08860), which are
    `width` channels each by `pooling`.
    """

    main_input_name = "pixel_values"

    def __init__(self, backbone: PreTrainedModel, pooling: str, width: int, layers: int = 2):
        super().__init__()
        self.backbone = backbone
        self.pooling = pooling
        self.config = backbone.config
        self.mix = nn.Linear(3 * width, width) if layers else None
        # Heads of 64 channels, as far as they divide the width
        # also: feed-forward, dropout, activation, epsilon, batch first, norm first
        shape = (width, math.gcd(width, max(1, width // 64)), 2 * width, 0.0, "gelu", 1e-5, True, True)
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(*shape) for _ in range(layers)))
        for part in (self.mix, *self.layers.modules()):
            if isinstance(part, nn.Linear) and part.out_features == width:  # what is added to the frames
                nn.init.zeros_(part.weight)
                nn.init.zeros_(part.bias)

    def forward(self, pixel_values: Tensor, output_hidden_states: bool = False, **_: Any) -> ModelOutput:
        """Read clips `[B, T, 3, H, W]`; the hidden states are the backbone's, `[B, C, places, T]`, and a last `[B, C, 1, T]`."""
        clips, steps = pixel_values.shape[:2]
        images = pixel_values.flatten(0, 1)
        place: Any = slice(None)
        if _is_free():  # a frame that is shown for longer is read once: of a clip of 2 frames, 2 and not 16
            is_new = torch.ones(clips, steps, dtype=torch.bool, device=images.device)
            is_new[:, 1:] = (pixel_values[:, 1:] != pixel_values[:, :-1]).flatten(2).any(-1)
            images = images[is_new.flatten()]
            place = is_new.flatten().cumsum(0) - 1
        images = images.contiguous(memory_format=torch.channels_last)
        output = self.backbone(images, output_hidden_states=output_hidden_states, return_dict=True)
        pooled = pool_output(output, self.pooling)
        frames = self.look_over_time(pooled[place].unflatten(0, (clips, steps)))
        in_time = frames.transpose(1, 2)[:, :, None]
        states = [each if each.dim() == 4 else each.transpose(1, 2) for each in output.get("hidden_states") or ()]
        # [B x T, C, places] -> [B, C, places, T]
        maps = [each[place].flatten(2).unflatten(0, (clips, steps)).permute(0, 2, 3, 1) for each in states]
        return ModelOutput(last_hidden_state=in_time, pooler_output=frames.mean(1), hidden_states=(*maps, in_time))

    def look_over_time(self, frames: Tensor) -> Tensor:
        """`[B, T, C]` -> `[B, T, C]`."""
        if self.mix is None:
            return frames
        change = frames.diff(dim=1)
        steps = frames.shape[1]
        at = (torch.arange(steps, device=frames.device)[:, None] + 0.5) / steps
        # Where in the clip a frame is: 16 cosines, of 0 to 15 half waves, again and again over the channels
        waves = (math.pi * at * (torch.arange(frames.shape[2], device=frames.device) % 16)).cos().to(frames)
        # to the frame before, nothing for the first one; to the frame after, nothing for the last one
        told = [F.pad(change, (0, 0, 1, 0)), F.pad(change, (0, 0, 0, 1)), waves.expand_as(frames)]
        return self.layers(frames + self.mix(torch.cat(told, -1)))


# -- dual encoder -----------------------------------------------------------------------------------------------------


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    if size < 1:
        raise ValueError(f"batch_size is {size}; give a number from 1 on.")
    return (items[start : start + size] for start in range(0, len(items), size))


def _projection(config: FusionDualEncoderConfig, tower: str, width: int) -> nn.Module:
    """Return a new projection, of two layers for CLAP, or none where the tower embeds by itself."""
    own = getattr(config, f"{tower}_config")
    if config.dual_encoder_type == "clap" and hasattr(own, "projection_hidden_act"):  # another text tower has none
        return ClapProjectionLayer(own)
    if config.dual_encoder_type == "siglip":  # its towers end in the embedding space
        return nn.Identity()
    if config.projection == "mlp":
        return ResidualProjection(width, config.projection_dim, FEATURE_DROPOUT[tower])
    return nn.Linear(width, config.projection_dim, bias=False)


class ResidualProjection(nn.Linear):
    """A linear projection of standardised features, and beside it a small network that is zero at initialisation.

    z = W x + W2 GELU(W1 x), where x are pooled features `[B, C]` at unit length, less `center`, at a variance of about 1. In
    training a large share of x is dropped, without which the network learns small data sets by heart.
    """

    center: Tensor

    def __init__(self, width: int, dim: int, dropout: float):
        super().__init__(width, dim, bias=False)
        self.hidden = nn.Linear(width, PROJECTION_HIDDEN)
        self.output = nn.Linear(PROJECTION_HIDDEN, dim, bias=False)
        self.dropouts = nn.ModuleList([nn.Dropout(dropout), nn.Dropout(0.3)])
        self.register_buffer("center", torch.zeros(width))

    def forward(self, pooled: Tensor) -> Tensor:
        """`[B, C]` -> `[B, E]`."""
        of_input, of_hidden = self.dropouts
        # The squares of unit features add up to 1, so what the mean leaves of it is the variance.
        variance = (1 - self.center.square().sum()).clamp(min=1e-6) / len(self.center)
        features = of_input((F.normalize(pooled, dim=-1) - self.center) * variance.rsqrt())
        return super().forward(features) + self.output(of_hidden(F.gelu(self.hidden(features))))


class FusionDualEncoderModel(PreTrainedModel):
    """Two towers with one embedding space, and a fusion head that looks at image and text.

    Build it with `mm_utils.model.build.build_model`, load it with `from_pretrained`.
    """

    config_class = FusionDualEncoderConfig
    base_model_prefix = "fusion_dual_encoder"
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    processor: Any = None  # of `encode` and `rerank`; by default, that of the folder the model was loaded from
    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(
        self,
        config: FusionDualEncoderConfig,
        vision_model: PreTrainedModel | None = None,
        text_model: PreTrainedModel | None = None,
    ):
        super().__init__(config)
        name = self.name_or_path or ""
        self._folder = os.path.abspath(name) if os.path.isdir(name) else name
        if not config.vision_widths:
            raise ValueError(
                "The config does not say how wide the backbones' outputs are. Build new models with "
                "mm_utils.model.join.join_backbones(vision_model, text_model), which measures them."
            )
        self.vision_model: Any = vision_model if vision_model is not None else vision_tower(config.vision_config)
        if config.medium == "clip" and len(input_shape(self.vision_model)) == 3:
            self.vision_model = FramesTower(
                self.vision_model, config.vision_pooling, config.vision_pooled_width, config.frame_layers
            )
        has_texts = config.text_config is not None
        self.text_model: Any = _made(config.text_config) if has_texts and text_model is None else text_model
        configs = {name: tower.config for name, tower in self.towers.items()}
        self.config.vision_config = configs["vision"]
        self.config.text_config = configs.get("text")
        self.visual_projection = _projection(config, "vision", config.vision_pooled_width)
        self.text_projection: Any = _projection(config, "text", config.text_width) if has_texts else None
        self.logit_scale = nn.Parameter(torch.tensor(config.logit_scale_init_value))
        bias = config.logit_bias_init_value
        self.logit_bias = None if bias is None else nn.Parameter(torch.tensor(bias))
        self.fusion = FusionHead(config) if config.fusion_layers else None
        self.region_head: RegionHead | None = None
        if config.region_head:
            self.add_region_head()
        self.token_head: TokenHead | None = None
        self.caption_adapter: CaptionAdapter | None = None
        if config.token_head:
            self.add_token_head(config.caption_head)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if any(module is part for tower in self.towers.values() for part in tower.modules()):
            return
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if isinstance(module, ResidualProjection):
                nn.init.zeros_(module.output.weight)
            for buffer in module.buffers(recurse=False):
                nn.init.zeros_(buffer)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, FusionHead):
            nn.init.normal_(module.cls_token, std=0.02)
            nn.init.zeros_(module.match.weight)  # a head that has learnt nothing changes no ranking
            for bridge in module.bridges[1:]:
                nn.init.zeros_(bridge.projection.weight)
        elif isinstance(module, LevelAdapter):
            nn.init.normal_(module.level, std=0.02)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as `PreTrainedModel` does, and warn of weights that are too many.

        Raises:
            ValueError: if weights are missing, in whose place transformers would put random ones.
        """
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        model, info = loaded
        # A classifier may start from a model without one.
        new = () if cls.__name__ in (model.config.architectures or ()) else "classifier."
        for kind in ("unexpected", "missing"):
            names = sorted(name for name in info[f"{kind}_keys"] if not name.startswith(new))
            if not names:
                continue
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            if kind == "missing":
                raise ValueError(
                    f"{model.name_or_path} lacks {len(names)} weights that its config.json asks for ({shown}), and random ones "
                    "would take their place. Copy the folder again, or choose another model."
                )
            logger.warning("%s has %d weights that are not of its model: %s", model.name_or_path, len(names), shown)
        return (model, info) if output_loading_info else model

    @property
    def towers(self) -> dict[str, Any]:
        """The backbones by name, `vision` and, unless it is a classifier of media alone, `text`."""
        both = {"vision": self.vision_model, "text": self.text_model}
        return {name: tower for name, tower in both.items() if tower is not None}

    def train(self, mode: bool = True) -> "FusionDualEncoderModel":
        """Set the mode, except for frozen towers, frozen projections and fixed batch norms, which stay in evaluation."""
        super().train(mode)
        parts = (
            *self.towers.values(),
            image_backbone(self.vision_model),
            self.visual_projection,
            self.text_projection,
        )
        for part in parts:
            if part is not None and not is_trained(part):
                part.eval()
        if self.config.freeze_batch_norm:
            for module in itertools.chain(*(tower.modules() for tower in self.towers.values())):
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def freeze(self, tower: str) -> None:
        """Stop training the `vision` or the `text` backbone; its projection, and layers over frames, are still trained."""
        (image_backbone(self.vision_model) if tower == "vision" else self.text_model).requires_grad_(False)

    def add_logit_bias(self) -> None:
        """Add a bias of -10 and set the scale to 10, as SigLIP starts (arXiv 2303.15343)."""
        self.config.logit_scale_init_value = math.log(10)
        self.config.logit_bias_init_value = -10.0
        self.logit_scale.data.fill_(self.config.logit_scale_init_value)
        self.logit_bias = nn.Parameter(torch.full_like(self.logit_scale, self.config.logit_bias_init_value))

    def remove_logit_bias(self) -> None:
        """Remove the bias, which has no effect on a softmax."""
        self.config.logit_bias_init_value = self.logit_bias = None

    def add_token_head(self, captions: bool) -> None:
        """Add a head that predicts words and, with `captions`, the adapter to write captions."""
        words: Any = self.text_model.get_input_embeddings()
        dim = self.config.fusion_dim
        width = words.embedding_dim
        if self.token_head is None:
            self.token_head = TokenHead(dim, width, words.num_embeddings).to(words.weight)
            self.token_head.apply(self._init_weights)
            # Logits begin with a variance of 1, however short the word embeddings are: five times fewer steps.
            spread = words.weight.detach().float().std() * math.sqrt(width)
            last: Any = self.token_head.transform[-1]
            last.weight.data.div_(spread.to(words.weight))
        if captions and self.caption_adapter is None:
            self.caption_adapter = CaptionAdapter(width, dim).to(words.weight)
            self.caption_adapter.apply(self._init_weights)
        self.config.token_head = True
        self.config.caption_head = captions or self.config.caption_head

    def add_region_head(self) -> None:
        """Add a head that embeds boxes, if there is none; ValueError if the model has no fusion head, whose taps it reads."""
        if self.fusion is None:
            raise ValueError(
                "This model was built with fusion_layers=0, and regions and moments are read from what a fusion head taps. Leave out "
                "--fusion_layers 0, or start from a model with a head."
            )
        if self.region_head is None:
            width = self.config.vision_widths[self.config.fusion_vision_taps[-1]]
            self.region_head = RegionHead(width, self.config.projection_dim).to(self.logit_scale)
            self.region_head.apply(self._init_weights)
        self.config.region_head = True

    def encode_image(self, pixel_values: Tensor, with_keys_values: bool = True) -> tuple[Tensor, KeysValues | None]:
        """Return unit embeddings `[B, E]` of images `[B, 3, H, W]` or other media (`input_shape`), and the head's image side."""
        return self.project_image(*self.vision_features(pixel_values, with_keys_values))

    def encode_text(
        self, input_ids: Tensor, attention_mask: Tensor, with_states: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return unit embeddings `[B, E]` of texts `[B, L]`, and the head's text side.

        Without `with_states`, the text side has no tokens: `[B, 0, C]`.
        """
        pooled, states = self.text_features(input_ids, attention_mask, with_states)
        return self.project_text(pooled, states if with_states else None)

    def vision_features(self, pixel_values: Tensor, with_taps: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the pooled output `[B, C]` of the vision backbone, and the pooled taps."""
        head = self.fusion if with_taps else None
        tower = self.vision_model
        config = self.config
        if config.medium == "clip" and _is_free():
            most = max(1, FRAMES_AT_ONCE // pixel_values.shape[1])
            if len(pixel_values) > most:  # 64 clips of 16 frames at once would take 14 GB of a MobileNetV2
                parts = [self.vision_features(part, with_taps) for part in pixel_values.split(most)]
                taps = zip(*(part[1] for part in parts), strict=True)
                return torch.cat([part[0] for part in parts]), tuple(map(torch.cat, taps))
        name = input_name(tower)
        medium = config.medium
        if medium == "sound" and name == "pixel_values":  # decibels, to about zero mean and unit variance
            pixel_values = (pixel_values + 35) / 33
        if pixel_values.dim() == 4:
            # Convolutions run fastest on this layout, and pass it on: MobileNetV2 trains 4 times as fast on a CPU.
            pixel_values = pixel_values.contiguous(memory_format=torch.channels_last)
        output = tower(**{name: pixel_values}, output_hidden_states=head is not None, return_dict=True)
        states = () if head is None else [along_time(state, tower, medium) for state in output.hidden_states]
        return pool_output(output, config.vision_pooling), () if head is None else head.pool_taps(states)

    def project_image(self, pooled: Tensor, taps: Sequence[Tensor]) -> tuple[Tensor, KeysValues | None]:
        """Turn the result of `vision_features` into that of `encode_image`; None without taps."""
        embeds = F.normalize(self.visual_projection(pooled), dim=-1)
        return embeds, self.fusion.encode_vision(taps) if self.fusion is not None and taps else None

    def text_features(
        self, input_ids: Tensor, attention_mask: Tensor, with_taps: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the pooled output `[B, C]` of the text backbone, and states `[B, L, taps x C]`.

        Without `with_taps`, the states are those of the last layer.
        """
        self._check_texts()
        taps = self.config.fusion_text_taps if self.fusion is not None and with_taps else (-1,)
        mask: Tensor | None = attention_mask
        columns = None
        if self.config.text_padding is not None:
            input_ids, columns = _pad_unmasked(input_ids, attention_mask, **self.config.text_padding)
            mask = None
        wanted = {"output_hidden_states": any(tap != -1 for tap in taps), "return_dict": True}
        output = self.text_model(input_ids=input_ids, attention_mask=mask, **wanted)
        # Some towers normalise their output once more, so that it is not the last of the hidden states.
        states = torch.cat([output.last_hidden_state if tap == -1 else output.hidden_states[tap] for tap in taps], -1)
        if columns is not None:
            states = states.gather(1, columns[..., None].expand(-1, -1, states.shape[-1]))
        return pool_output(output, self.config.text_pooling, mask), states

    def project_text(self, pooled: Tensor, states: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Turn the result of `text_features` into that of `encode_text`."""
        embeds = F.normalize(self.text_projection(pooled), dim=-1)
        if states is None:
            states = pooled[:, None][:, :0]
        elif self.fusion is not None:
            states = self.fusion.encode_text(states)
        return embeds, states

    def cell_embeds(self, taps: Sequence[Tensor]) -> Tensor:
        """Return unit embeddings `[B, h, w, E]` of all cells of the last tap; of clips and sounds `[B, 1, T, E]`."""
        if self.region_head is None:
            raise ValueError("This model has no embeddings of regions. Train it with regions among --objectives.")
        return self.region_head(as_map(taps[-1]) if self.config.medium == "image" else taps[-1].mean(2, keepdim=True))

    def match_pairs(self, keys_values: KeysValues, text_states: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits `[P]` that pair p, given by its image side and text side, belongs together."""
        if self.fusion is None:
            raise ValueError("This model was built with fusion_layers=0; it has no head to score pairs with.")
        return self.fusion.match(self.fusion(keys_values, text_states, attention_mask)[:, 0])[:, 0]

    @property
    def voices(self) -> list[str]:
        """Name the scores that the head can give a pair: those of its parts that were trained."""
        # zeros until a term trains it
        matches = self.fusion is not None and bool(self.fusion.match.weight.any())
        return ["match"] * matches + ["caption"] * (self.caption_adapter is not None)

    def voice_scores(
        self, voices: Sequence[str], keys_values: KeysValues, text_states: Tensor, mask: Tensor, input_ids: Tensor
    ) -> Tensor:
        """Return the scores `[P, voices]` of P pairs; only `caption` reads `input_ids`."""
        columns = [
            self.match_pairs(keys_values, text_states, mask)
            if name == "match"
            else self.caption_scores(keys_values, input_ids, mask)
            for name in voices
        ]
        return torch.stack([column.float() for column in columns], 1)

    def head_scores(
        self, keys_values: KeysValues, text_states: Tensor, attention_mask: Tensor, input_ids: Tensor
    ) -> Tensor:
        """Return what the head adds to scaled cosines, `[P]`: weighted scores, of P texts or of one for all pairs."""
        weights = {name: weight for name, weight in (self.config.rerank_weights or {}).items() if weight}
        pairs = keys_values[0].shape[1]
        if not weights:
            return torch.zeros(pairs, device=text_states.device)
        texts = (side.expand(pairs, *side.shape[1:]) for side in (text_states, attention_mask, input_ids))
        scores = self.voice_scores(list(weights), keys_values, *texts)
        return scores @ scores.new_tensor(list(weights.values()))

    def caption_states(self, keys_values: KeysValues, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return what the token after each one is predicted from, `[P, L, D]`."""
        assert self.fusion is not None
        assert self.caption_adapter is not None
        words = self.text_model.get_input_embeddings()(input_ids)
        return self.fusion.decode(keys_values, self.caption_adapter(words), attention_mask)

    def target_logits(
        self, keys_values: KeysValues, input_ids: Tensor, attention_mask: Tensor, before: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return logits `[M, W]` over the known words of the tokens after those at rows and columns `before`, and their places.

        See `TokenHead.among_known` for the places.
        """
        assert self.token_head is not None
        words: Any = self.text_model.get_input_embeddings()
        states = self.caption_states(keys_values, input_ids, attention_mask)[before]
        row, column = before
        return self.token_head.among_known(states, words.weight, input_ids[row, column + 1])

    def caption_scores(self, keys_values: KeysValues, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return log probabilities `[P]` of text p, given image p and the text's first token.

        A word that is not known has the probability of chance, whatever the image.
        """
        is_target, is_before = target_mask(attention_mask)
        logits, places = self.target_logits(keys_values, input_ids, attention_mask, is_before.nonzero(as_tuple=True))
        log_probs = -F.cross_entropy(logits.float(), places, reduction="none")
        log_probs = log_probs.masked_fill(places < 0, -math.log(logits.shape[1]))
        # [M] -> [P, L]: the targets of a text stand side by side again, in the same order
        return torch.zeros_like(is_target, dtype=log_probs.dtype).masked_scatter(is_target, log_probs).sum(1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_loss: bool = False,
        match: bool = True,
        **_: Any,
    ) -> FusionDualEncoderOutput:
        """Encode images, texts, or both; with `match=False`, without the fusion head.

        `token_type_ids` and `return_dict`, which processors and the stock class pass, are accepted and ignored.
        """
        output = FusionDualEncoderOutput()
        if pixel_values is not None:
            output.image_embeds, output.keys_values = self.encode_image(pixel_values, with_keys_values=match)
        if input_ids is not None:
            attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            output.text_embeds, output.text_states = self.encode_text(input_ids, attention_mask)
        if output.image_embeds is None or output.text_embeds is None:
            output.logit_scale = self.logit_scale  # last: pipelines take the first value, an embedding here
            return output
        output.logits_per_text = self.logit_scale.exp() * output.text_embeds @ output.image_embeds.T
        if self.logit_bias is not None:
            output.logits_per_text = output.logits_per_text + self.logit_bias
        output.logits_per_image = output.logits_per_text.T
        if output.keys_values is not None and len(output.image_embeds) == len(output.text_embeds):
            assert output.text_states is not None
            assert attention_mask is not None
            output.match_logits = self.match_pairs(output.keys_values, output.text_states, attention_mask)
        if return_loss:
            target = torch.arange(len(output.logits_per_text), device=output.logits_per_text.device)
            both = output.logits_per_text, output.logits_per_image
            output.loss = torch.stack([F.cross_entropy(logits, target) for logits in both]).mean()
        return FusionDualEncoderOutput(**output, logit_scale=self.logit_scale)  # in the order of the fields

    # -- for people: pictures and sentences in, numbers out ---------------------------------------------------------

    @torch.no_grad()
    def encode(
        self, images: Any = None, texts: Any = None, batch_size: int = 32, *, clips: Any = None, sounds: Any = None
    ) -> Tensor | tuple[Tensor, ...]:
        """Return unit embeddings `[B, E]`, on the CPU, of media or of texts; of both, media first.

        Media and texts are read as in training (`reading`), and of nothing, `[]`, there are embeddings `[0, E]`. The model is set to
        evaluation mode.

        Args:
            images: a path, a URL or a PIL image, or a list of these.
            texts: a sentence, or a list of these.
            batch_size: how many go through a tower at a time.
            clips: a path, which needs `av`, or a list of PIL images, or a list of these; frames at equal distances are read.
            sounds: a path (`av` reads all but WAV files) or (samples in [-1, 1], rate), or a list of these; its middle is read.

        Raises:
            ValueError: if nothing is given or other media than the model reads, or the model has no processor.
        """
        self.eval()
        found: list[Tensor] = []
        empty = torch.zeros(0, self.config.projection_dim)
        for kind, media in zip(MEDIA, (images, clips, sounds), strict=True):
            if media is not None:
                parts = [self.encode_image(each, False)[0] for each in self._inputs(media, kind, batch_size)]
                found.append(torch.cat([empty, *(part.float().cpu() for part in parts)]))
        if texts is not None:
            every = [texts] if isinstance(texts, str) else list(texts)
            # texts of one length pad little
            order = sorted(range(len(every)), key=lambda place: -len(str(every[place])))
            batches = _batches([every[place] for place in order], batch_size)
            parts = [
                self.encode_text(*self.text_inputs(batch), with_states=False)[0].float().cpu() for batch in batches
            ]
            found.append(torch.cat([empty, *parts])[torch.tensor(order, dtype=torch.long).argsort()])
        if not found:
            raise ValueError("encode was given nothing. Pass images=..., texts=..., or both.")
        return found[0] if len(found) == 1 else tuple(found)

    def open_image(self, image: Any) -> Any:
        """Return the picture of a path, an address or a file's bytes as this model sees it, upright RGB, for pipelines."""
        return open_picture(image, self._find_processor().image_processor.crop_size["height"])

    @staticmethod
    def similarity(one: Tensor, other: Tensor) -> Tensor:
        """Return the cosines `[A, B]` of embeddings `[A, E]` and `[B, E]`."""
        return F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).T

    @torch.no_grad()
    def rerank(self, text: str, images: Any, batch_size: int = 32) -> list[tuple[int, float]]:
        """Order images, or what the model reads, for a text; return their places with their scores, the best first.

        The score is the cosine, plus `head_scores` divided by the logit scale where the head's fitted weights help. Arguments
        and errors are those of `encode`.
        """
        self.eval()
        input_ids, attention_mask = self.text_inputs([text])
        text_embed, text_states = self.encode_text(input_ids, attention_mask)
        scores: list[float] = []
        for pixels in self._inputs(images, self.config.medium, batch_size):
            image_embeds, keys_values = self.encode_image(pixels)
            score = image_embeds @ text_embed[0]
            if keys_values is not None:
                head = self.head_scores(keys_values, text_states, attention_mask, input_ids)
                score = score + head / self.logit_scale.exp()
            scores += score.tolist()
        return sorted(enumerate(scores), key=lambda hit: -hit[1])

    def get_image_features(self, pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPooling:
        """Return unit embeddings `[B, E]` as `pooler_output`, as stock dual encoders do."""
        return BaseModelOutputWithPooling(pooler_output=self.encode_image(pixel_values, with_keys_values=False)[0])

    def get_text_features(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> BaseModelOutputWithPooling:
        """Return unit embeddings `[B, E]` as `pooler_output`, as stock dual encoders do."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return BaseModelOutputWithPooling(pooler_output=self.encode_text(input_ids, mask, with_states=False)[0])

    def _find_processor(self) -> Any:
        if self.processor is None:
            if not self._folder:
                raise ValueError("This model was not loaded from a folder. Set model.processor to its processor.")
            self.processor = AutoProcessor.from_pretrained(self._folder)
        return self.processor

    def _inputs(self, media: Any, kind: str, batch_size: int) -> Iterator[Tensor]:
        if kind != self.config.medium:
            raise ValueError(f"This model reads {self.config.medium}s, and it was given {kind}s.")
        is_many = isinstance(media, list) or (isinstance(media, tuple) and kind != "sound")
        is_one_clip = is_many and kind == "clip" and len(media) > 0 and is_pil_image(media[0])
        media = list(media) if is_many and not is_one_clip else [media]
        read = self._sound_input if kind == "sound" else self._picture_input
        for batch in _batches(media, batch_size):
            found = torch.stack([read(each, self._find_processor()) for each in batch])
            yield found.to(self.logit_scale.device, self.dtype)

    def _picture_input(self, medium: Any, processor: Any) -> Tensor:
        """Return the tower's input of an image, or of the frames of a clip, as evaluations make it."""
        images = processor.image_processor
        side = images.crop_size["height"]
        mean = torch.tensor(images.image_mean).view(-1, 1, 1) * 255
        std = torch.tensor(images.image_std).view(-1, 1, 1) * 255
        if self.config.medium == "image":
            shown = center_square(open_picture(medium, side), side)
        else:
            frames = frames_of(medium, getattr(images, "clip_frames", 16))
            shown = torch.stack([center_square(open_picture(each, side), side) for each in frames])
        return shown.float().sub_(mean).div_(std)

    def _sound_input(self, sound: Any, processor: Any) -> Tensor:
        extractor = processor.feature_extractor
        rate = extractor.sampling_rate
        seconds = getattr(extractor, "window_seconds", None)
        samples = samples_of(sound, rate, seconds)
        return torch.from_numpy(sound_input(extractor, samples, round(seconds * rate) if seconds else len(samples)))

    def text_inputs(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return token ids and mask `[B, L]` of texts, read as in training; ValueError if one is not text."""
        self._check_texts()
        for text in texts:
            # half of a surrogate pair cannot be written as UTF-8
            if not isinstance(text, str) or text != text.encode(errors="replace").decode():
                raise ValueError(f"The text is {text!r}; a text is a string of UTF-8. Give one, or a list of these.")
        tokenizer = self._find_processor().tokenizer
        most = self.most_tokens(tokenizer)
        ids = token_ids(tokenizer, [text[: CHARACTERS_PER_TOKEN * most] for text in texts], most)
        length = max(1, *map(len, ids))
        padded = []
        mask = []
        for row in ids:
            missing = length - len(row)
            padded.append(row + [tokenizer.pad_token_id] * missing)
            mask.append([1] * len(row) + [0] * missing)
        device = self.logit_scale.device
        return torch.tensor(padded, device=device), torch.tensor(mask, device=device)

    def _check_texts(self) -> None:
        if self.text_model is None:
            raise ValueError(
                f"This is a classifier of {self.config.medium}s alone; it has no text encoder. Take the model that it started from."
            )

    def most_tokens(self, tokenizer: Any) -> int:
        """Return how many tokens of a text are read: as many as in training, which the tokenizer's file says."""
        return min(tokenizer.model_max_length, text_positions(self.text_model) or _MOST_TOKENS)

    def save_pretrained(self, save_directory: Any, *args: Any, **arguments: Any) -> None:
        """Save as `PreTrainedModel` does, so that the pipeline zero-shot-image-classification finds this class too.

        The folders that its towers were loaded from are not saved: nobody else has them.
        """
        for tower in self.towers.values():
            tower.config.name_or_path = ""
        if type(self) is FusionDualEncoderModel:
            known = getattr(self.config, "auto_map", None) or {}
            name = f"{__name__.rpartition('.')[2]}.{type(self).__name__}"
            # 'modeling_fusion_dual_encoder.FusionDualEncoderModel'
            self.config.auto_map = {**known, "AutoModelForZeroShotImageClassification": name}
        super().save_pretrained(save_directory, *args, **arguments)
        if self.processor is not None:
            self.processor.save_pretrained(save_directory)


# -- classifier -------------------------------------------------------------------------------------------------------


class FusionDualEncoderForClassification(FusionDualEncoderModel):
    """Classifier of images or pairs; loads from a checkpoint of the base class.

    `config.classifier_inputs` is the input of a small MLP: `fused`, the fusion head's `[CLS]`; `pair`, both unit embeddings
    concatenated; `image`, one embedding, without running the text tower.
    """

    def __init__(
        self,
        config: FusionDualEncoderConfig,
        vision_model: PreTrainedModel | None = None,
        text_model: PreTrainedModel | None = None,
    ):
        super().__init__(config, vision_model, text_model)
        reads = config.classifier_inputs
        if len(config.id2label or ()) == 1:
            raise ValueError(
                "A classifier of one class, as CrossEncoder of sentence-transformers asks for, says nothing. To score texts "
                "with images, use rerank of the model itself."
            )
        if reads == "fused" and self.fusion is None:
            raise ValueError(
                "classifier_inputs is 'fused'; this model was built with fusion_layers=0. Set classifier_inputs to pair."
            )
        width = {"fused": config.fusion_dim, "pair": 2 * config.projection_dim}.get(reads, config.projection_dim)
        self.classifier = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Dropout(config.classifier_dropout),
            nn.Linear(width, len(config.id2label or ())),
        )
        self.classifier.apply(self._init_weights)

    def classify(
        self, pixel_values: Tensor | None = None, input_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Return logits `[B, classes]`; an input that the classifier does not read is ignored.

        Raises:
            ValueError: if an input that it reads is missing.
        """
        reads = self.config.classifier_inputs
        for name, value in (("pixel_values", pixel_values), ("input_ids", input_ids)):
            if value is None and (name, reads) != ("input_ids", "image"):
                raise ValueError(f"{name} is missing; classifier_inputs is {reads!r}. Pass it.")
        assert pixel_values is not None
        image = self.encode_image(pixel_values, with_keys_values=reads == "fused")
        if reads == "image":
            return self.classify_encoded(image)
        assert input_ids is not None
        attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self.classify_encoded(image, self.encode_text(input_ids, attention_mask), attention_mask)

    def classify_encoded(
        self,
        image: tuple[Tensor, KeysValues | None],
        text: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Return what `classify` does, of what `encode_image` and, unless media are all it reads, `encode_text` return."""
        embeds, keys_values = image
        if text is None:
            return self.classifier(embeds)
        if self.config.classifier_inputs == "pair":
            return self.classifier(torch.cat([embeds, text[0]], -1))
        assert self.fusion is not None
        assert keys_values is not None
        return self.classifier(self.fusion(keys_values, text[1], attention_mask)[:, 0])

    def leave_texts_out(self) -> None:
        """Drop the text tower and all that reads it, which a classifier of media alone never runs."""
        self.text_model = self.text_projection = self.fusion = None
        self.region_head = self.token_head = self.caption_adapter = None
        config = self.config
        config.text_config = config.text_padding = config.rerank_weights = None
        config.fusion_layers = 0
        config.token_head = False
        config.caption_head = False
        config.region_head = False

    @torch.no_grad()
    def predict(self, media: Any, texts: Any = None, batch_size: int = 32) -> Tensor:
        """Return the share of each class `[B, classes]`, on the CPU, of media, or of media and as many texts; see `encode`."""
        self.eval()
        parts = [*self._inputs(media, self.config.medium, batch_size)]
        if not parts:
            return torch.zeros(0, len(self.config.id2label or ()))
        pixels = torch.cat(parts)
        tokens = () if texts is None else self.text_inputs([texts] if isinstance(texts, str) else texts)
        return self.classify(pixels, *tokens).softmax(-1).float().cpu()

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> SequenceClassifierOutput:
        """Return logits of images or pairs, and with `labels` `[B]` their mean cross-entropy."""
        logits = self.classify(pixel_values, input_ids, attention_mask)
        return SequenceClassifierOutput(
            loss=None if labels is None else F.cross_entropy(logits.float(), labels), logits=logits
        )


AutoConfig.register(FusionDualEncoderConfig.model_type, FusionDualEncoderConfig, exist_ok=True)
AutoModel.register(FusionDualEncoderConfig, FusionDualEncoderModel, exist_ok=True)
AutoModelForZeroShotImageClassification.register(FusionDualEncoderConfig, FusionDualEncoderModel, exist_ok=True)
FusionDualEncoderConfig.register_for_auto_class()
FusionDualEncoderModel.register_for_auto_class("AutoModel")
AutoModelForSequenceClassification.register(FusionDualEncoderConfig, FusionDualEncoderForClassification, exist_ok=True)
FusionDualEncoderForClassification.register_for_auto_class("AutoModelForSequenceClassification")
