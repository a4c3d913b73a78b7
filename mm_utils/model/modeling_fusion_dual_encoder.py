"""A vision-text dual encoder with a cross-attention fusion head, for any pair of `AutoModel` backbones.

The two towers, their projections and the temperature carry the parameter names of `VisionTextDualEncoderModel`, so a
checkpoint of that class loads here unchanged and `FusionDualEncoderModel.to_dual_encoder` gives one back. The head
(`fusion.`) lets text tokens attend to image tokens: keys and values are made once per image by
`FusionHead.encode_vision` and reused for every candidate text.

This file depends on torch and transformers alone, because it travels with pushed checkpoints.

Shape letters: B images or texts, P pairs, C channels, N image tokens, L text tokens, D fusion width, E embedding width.
"""

import copy
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import ModelOutput

POOLINGS = ("auto", "pooler", "mean", "cls")
CLASSIFIER_INPUTS = ("fused", "pair", "image", "text")
DIRECTIONS = ("text_to_image", "both")
MOST_TAPS = 3  # hidden states of a tower that a head reads, if nobody says which
MOST_SPECIAL_TOKENS = 8  # class and register tokens in front of a vision transformer's patches
KeysValues = tuple[Tensor, ...]
"""What a fusion head keeps of B images, one tensor per block with the image as dimension 1: keys and values
`[2, B, heads, N, D / heads]`; or, where image tokens read the text too, the tokens `[1, B, N, D]` that enter there."""


class FusionDualEncoderConfig(PreTrainedConfig):
    """Two backbone configs, how their outputs are pooled and projected, and the shape of the fusion head.

    Args:
        vision_config, text_config: configs of `AutoModel` backbones, as objects or dictionaries.
        projection_dim: width of the shared embedding space, by default 256, or 3/4 of a narrower text tower.
        logit_scale_init_value: initial log inverse temperature; 2.6592 is log(1 / 0.07).
        vision_pooling, text_pooling: `auto` is resolved when the model is built: `pooler` where the backbone returns a
            `pooler_output`, else the (masked) `mean` of the tokens. BERT's kind of pooler, a dense layer on the first
            token, is passed over: after pretraining it is untrained or knows next-sentence prediction alone.
        vision_widths, vision_pooled_width, text_width: channels of every hidden state and of the pooled outputs. They
            are measured by `FusionDualEncoderModel.from_backbones`, not guessed from a config's attribute names.
        fusion_layers: blocks of the head; 0 leaves the head out.
        fusion_dim, fusion_heads: its width, by default half the text tower's in steps of 32 and at most 512, and one head
            per 32 channels.
        fusion_vision_taps: which of the vision tower's hidden states the head reads, coarse before fine, as indices into
            `hidden_states`.
        fusion_text_taps: which of the text tower's, as indices into its `hidden_states`; -1 is what it puts out.
        fusion_hierarchy: block k reads the first taps only, the last block all, and the text tower anew (see `FusionHead`);
            else every block reads every tap.
        fusion_direction: `text_to_image`, where image tokens are never changed and can be kept, or `both`.
        fusion_tokens_per_tap: a tap with more tokens is pooled down to this many.
        token_head, caption_head: whether there is a head that tells words from fused states, and an entrance for words
            without their text tower, to write captions.
        region_head: whether boxes of an image have embeddings of their own (`RegionHead`).
        freeze_batch_norm: keep the running statistics of batch norms fixed in training.
        classifier_inputs, classifier_dropout: of `FusionDualEncoderForClassification`.
    """

    model_type = "fusion-dual-encoder"
    sub_configs = {"vision_config": AutoConfig, "text_config": AutoConfig}  # noqa: RUF012
    has_no_defaults_at_init = True

    def __init__(
        self,
        vision_config: Any = None,
        text_config: Any = None,
        *,
        projection_dim: int | None = None,
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
        fusion_mlp_ratio: int = 4,
        fusion_vision_taps: Sequence[int] = (-1,),
        fusion_text_taps: Sequence[int] = (-1,),
        fusion_hierarchy: bool = True,
        fusion_direction: str = "text_to_image",
        fusion_tokens_per_tap: int = 64,
        token_head: bool = False,
        caption_head: bool = False,
        region_head: bool = False,
        freeze_batch_norm: bool = False,
        classifier_inputs: str = "fused",
        classifier_dropout: float = 0.1,
        **kwargs: Any,
    ):
        for name, config in (("vision_config", vision_config), ("text_config", text_config)):
            # A copy: PreTrainedConfig.__init__ below resets the attention implementation of its sub-configs, and a tower
            # whose own config lost it would silently ignore its padding mask.
            setattr(self, name, AutoConfig.for_model(**config) if isinstance(config, dict) else copy.deepcopy(config))
        for name, pooling in (("vision_pooling", vision_pooling), ("text_pooling", text_pooling)):
            if pooling not in POOLINGS:
                raise ValueError(f"{name} is {pooling!r}; choose one of {', '.join(POOLINGS)}.")
        if fusion_direction not in DIRECTIONS:
            raise ValueError(f"fusion_direction is {fusion_direction!r}; choose one of {', '.join(DIRECTIONS)}.")
        fusion_dim = fusion_dim or max(32, min(512, text_width // 64 * 32))
        fusion_heads = fusion_heads or max(1, fusion_dim // 32)
        if fusion_layers and fusion_dim % (4 * fusion_heads):
            raise ValueError(
                f"fusion_dim is {fusion_dim} with {fusion_heads} heads; it must be a multiple of 4 x fusion_heads."
            )
        self.projection_dim = projection_dim or min(256, 3 * text_width // 4)
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
        self.fusion_mlp_ratio = fusion_mlp_ratio
        self.fusion_vision_taps = list(fusion_vision_taps)
        self.fusion_text_taps = list(fusion_text_taps)
        self.fusion_hierarchy = fusion_hierarchy
        self.fusion_direction = fusion_direction
        self.token_head = token_head
        self.caption_head = caption_head
        self.fusion_tokens_per_tap = fusion_tokens_per_tap
        self.region_head = region_head
        self.freeze_batch_norm = freeze_batch_norm
        if classifier_inputs not in CLASSIFIER_INPUTS:
            raise ValueError(
                f"classifier_inputs is {classifier_inputs!r}; choose one of {', '.join(CLASSIFIER_INPUTS)}."
            )
        self.classifier_inputs, self.classifier_dropout = classifier_inputs, classifier_dropout
        super().__init__(**kwargs)


@dataclass
class FusionDualEncoderOutput(ModelOutput):
    """What `FusionDualEncoderModel.forward` returns; a field whose inputs were not given is None.

    Attributes:
        loss: scalar InfoNCE over this batch, with `return_loss=True` only (training uses `mm_utils.losses`).
        logits_per_image: `[B, B]` scaled cosines, plus the bias of a model that has one.
        logits_per_text: its transpose.
        text_embeds, image_embeds: `[B, E]`, of unit length.
        keys_values: the image side of the fusion head, see `FusionHead.encode_vision`.
        text_states: `[B, L, C]`, the text side of the fusion head, see `FusionHead.encode_text`.
        logit_scale: scalar log inverse temperature.
        match_logits: `[B]` logit that image b and text b belong together, when both are given.
    """

    loss: Tensor | None = None
    logits_per_image: Tensor | None = None
    logits_per_text: Tensor | None = None
    text_embeds: Tensor | None = None
    image_embeds: Tensor | None = None
    keys_values: KeysValues | None = None
    text_states: Tensor | None = None
    logit_scale: Tensor | None = None
    match_logits: Tensor | None = None


def _sincos_positions(height: int, width: int, dim: int, device: torch.device) -> Tensor:
    """Fixed 2-D sine-cosine positions `[height * width, dim]` on a grid normalised to [0, 1]: any resolution works."""
    frequency = 100.0 ** -(torch.arange(dim // 4, device=device) / (dim // 4))
    rows, columns = (
        (torch.arange(size, device=device) + 0.5)[:, None] / size * 2 * math.pi * frequency for size in (height, width)
    )
    rows = torch.cat([rows.sin(), rows.cos()], 1)[:, None].expand(-1, width, -1)
    columns = torch.cat([columns.sin(), columns.cos()], 1)[None].expand(height, -1, -1)
    return torch.cat([rows, columns], -1).flatten(0, 1)


def split_grid(tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """Tokens `[B, N, C]` of a vision transformer as what stands before the patches, `[B, s, C]`, and the patches as a map
    `[B, C, h, h]`; None instead of the map, where there is no square number of them."""
    side = math.isqrt(tokens.shape[1])
    special = tokens.shape[1] - side**2
    if special > MOST_SPECIAL_TOKENS:
        return tokens, None
    return tokens[:, :special], tokens[:, special:].transpose(1, 2).unflatten(2, (side, side))


class LevelAdapter(nn.Module):
    """Any hidden state, a `[B, C, h, w]` map or `[B, N, C]` tokens, as `[B, n, D]` tokens with n <= `max_tokens`."""

    def __init__(self, width: int, dim: int, max_tokens: int):
        super().__init__()
        self.max_tokens = max_tokens
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, dim)
        self.level = nn.Parameter(torch.zeros(dim))

    def pool(self, hidden: Tensor) -> Tensor:
        """At most `max_tokens` of them, by averages of neighbours; class and register tokens stay as they are."""
        side = int(self.max_tokens**0.5)
        if hidden.dim() == 4:
            return F.adaptive_avg_pool2d(hidden, side) if hidden.shape[-1] * hidden.shape[-2] > side**2 else hidden
        if hidden.shape[1] <= self.max_tokens:
            return hidden
        special, grid = split_grid(hidden)
        if grid is None:
            return F.adaptive_avg_pool1d(hidden.transpose(1, 2), self.max_tokens).transpose(1, 2)
        return torch.cat([special, F.adaptive_avg_pool2d(grid, side).flatten(2).transpose(1, 2)], 1)

    def forward(self, pooled: Tensor) -> Tensor:
        """Project, and mark position (of maps) and level."""
        positions: Tensor | float = 0.0
        if pooled.dim() == 4:
            height, width = pooled.shape[-2:]
            positions = _sincos_positions(height, width, self.projection.out_features, pooled.device)
            pooled = pooled.flatten(2).transpose(1, 2)
        tokens = self.projection(self.norm(pooled))
        return tokens + self.level + (positions.to(tokens.dtype) if isinstance(positions, Tensor) else 0.0)


class Attention(nn.Module):
    """Multi-head attention whose keys and values are computed apart from its queries, so that they can be kept."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.output = nn.Linear(dim, dim)

    def keys_values(self, tokens: Tensor) -> Tensor:
        """`[B, N, D]` -> `[2, B, heads, N, D / heads]`."""
        batch, length, _ = tokens.shape
        return self.key_value(tokens).view(batch, length, 2, self.heads, -1).permute(2, 0, 3, 1, 4)

    def forward(self, tokens: Tensor, keys_values: Tensor, mask: Tensor | None = None) -> Tensor:
        """`[P, L, D]` queries against the keys and values of P sequences; `mask` is True where one may look."""
        pairs, length, dim = tokens.shape
        query = self.query(tokens).view(pairs, length, self.heads, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, keys_values[0], keys_values[1], attn_mask=mask)
        return self.output(mixed.transpose(1, 2).reshape(pairs, length, dim))


class FusionLayer(nn.Module):
    """Pre-norm block: text self-attention, gated cross-attention to the image, feed-forward; residuals kept.

    With `updates_image`, image tokens attend to the text after that, and have a feed-forward of their own.
    """

    def __init__(self, dim: int, heads: int, mlp_ratio: int, updates_image: bool = False):
        super().__init__()
        self.self_norm, self.cross_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.self_attention = Attention(dim, heads)
        self.cross_attention = Attention(dim, heads)
        self.gate = nn.Parameter(torch.ones(1))
        self.mlp = _mlp(dim, mlp_ratio)
        self.image = ImageUpdate(dim, heads, mlp_ratio) if updates_image else None

    def encode_image(self, tokens: Tensor) -> Tensor:
        """This layer's keys and values of image tokens `[B, N, D]`."""
        return self.cross_attention.keys_values(tokens)

    def forward(self, tokens: Tensor, keys_values: Tensor, text_mask: Tensor) -> Tensor:
        """`[P, L, D]` -> `[P, L, D]`; `text_mask` is `[P, 1, 1, L]`, or `[P, 1, L, L]` with a row per query."""
        normed = self.self_norm(tokens)
        tokens = tokens + self.self_attention(normed, self.self_attention.keys_values(normed), text_mask)
        tokens = tokens + self.gate * self.cross_attention(self.cross_norm(tokens), keys_values)
        return tokens + self.mlp(self.mlp_norm(tokens))


class ImageUpdate(nn.Module):
    """Image tokens `[P, N, D]` read the text tokens of their pair `[P, L, D]`."""

    def __init__(self, dim: int, heads: int, mlp_ratio: int):
        super().__init__()
        self.text_norm, self.cross_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.cross_attention = Attention(dim, heads)
        self.mlp = _mlp(dim, mlp_ratio)

    def forward(self, tokens: Tensor, text: Tensor, text_mask: Tensor) -> Tensor:
        """`[P, N, D]` -> `[P, N, D]`."""
        keys_values = self.cross_attention.keys_values(self.text_norm(text))
        tokens = tokens + self.cross_attention(self.cross_norm(tokens), keys_values, text_mask)
        return tokens + self.mlp(self.mlp_norm(tokens))


def _mlp(dim: int, ratio: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, ratio * dim), nn.GELU(), nn.Linear(ratio * dim, dim))


class TextBridge(nn.Module):
    """Layers of the text tower, mixed by learned weights (ManagerTower's static manager, arXiv 2306.00103), in D channels."""

    def __init__(self, width: int, taps: int, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Parameter(torch.zeros(taps)) if taps > 1 else None
        self.projection = nn.Linear(width, dim)

    def forward(self, text_states: Tensor) -> Tensor:
        """`[P, L, taps x width]` -> `[P, L, D]`."""
        if self.mix is None:
            return self.projection(self.norm(text_states))
        levels = self.norm(text_states.unflatten(-1, (len(self.mix), -1)))
        return self.projection((levels * self.mix.softmax(0).to(levels)[:, None]).sum(-2))


class FusionHead(nn.Module):
    """Text tokens read image tokens; a learned `[CLS]` in front of them collects the answer.

    The image never reads the text, so its side depends on the image alone and is computed once (ALBEF, BLIP and
    BridgeTower project the same image again for every candidate text).

    With a hierarchy, block k attends to the taps of the vision tower up to its own, coarse ones first, and receives the text
    tower's layers once more through a bridge (BridgeTower, arXiv 2206.08657), which begins at zero.
    """

    def __init__(self, config: FusionDualEncoderConfig):
        super().__init__()
        dim, blocks, both = config.fusion_dim, config.fusion_layers, config.fusion_direction == "both"
        self.taps = list(config.fusion_vision_taps)
        self.adapters: Iterable[LevelAdapter] = nn.ModuleList(  # type: ignore[assignment]
            LevelAdapter(config.vision_widths[tap], dim, config.fusion_tokens_per_tap) for tap in self.taps
        )
        self.vision_norm = nn.LayerNorm(dim)
        bridges = blocks if config.fusion_hierarchy else 1
        self.bridges: Any = nn.ModuleList(
            TextBridge(config.text_width, len(config.fusion_text_taps), dim) for _ in range(bridges)
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.layers: Iterable[FusionLayer] = nn.ModuleList(  # type: ignore[assignment]
            FusionLayer(dim, config.fusion_heads, config.fusion_mlp_ratio, updates_image=both and block + 1 < blocks)
            for block in range(blocks)
        )
        self.output_norm = nn.LayerNorm(dim)
        self.match = nn.Linear(dim, 1)
        self.keeps_tokens = both
        # how many taps each block reads
        last = len(self.taps)
        self.reach = [-(-last * (block + 1) // blocks) if config.fusion_hierarchy else last for block in range(blocks)]

    def pool_taps(self, hidden_states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tapped ones of all hidden states, each with at most `fusion_tokens_per_tap` tokens."""
        return tuple(adapter.pool(hidden_states[tap]) for adapter, tap in zip(self.adapters, self.taps, strict=True))

    def encode_vision(self, taps: Sequence[Tensor]) -> KeysValues:
        """The image side: pooled taps of B images -> keys and values for every block."""
        levels = [adapter(tap) for adapter, tap in zip(self.adapters, taps, strict=True)]
        if self.keeps_tokens:
            begins = [0, *self.reach[:-1]]
            empty = levels[0][:, :0]
            return tuple(
                torch.cat([empty, *levels[begin:end]], 1)[None] for begin, end in zip(begins, self.reach, strict=True)
            )
        tokens = self.vision_norm(torch.cat(levels, 1))
        ends = list(itertools.accumulate(level.shape[1] for level in levels))
        return tuple(
            layer.encode_image(tokens[:, : ends[reach - 1]])
            for layer, reach in zip(self.layers, self.reach, strict=True)
        )

    def encode_text(self, states: Tensor) -> Tensor:
        """The text side: layers of the text tower `[B, L, taps x C]` -> what enters every block, `[B, L, blocks x D]`."""
        return torch.cat([bridge(states) for bridge in self.bridges], -1)

    def forward(self, keys_values: KeysValues, text_states: Tensor, attention_mask: Tensor) -> Tensor:
        """Fused states `[P, 1 + L, D]` of P pairs, the fused `[CLS]` first; padding changes none of the others."""
        first, *later = text_states.chunk(len(self.bridges), -1)
        tokens = torch.cat([self.cls_token.expand(len(first), -1, -1), first], 1)
        mask = F.pad(attention_mask.bool(), (1, 0), value=True)[:, None, None]
        return self._run(tokens, mask, keys_values, [F.pad(states, (0, 0, 1, 0)) for states in later])

    def match_logits(self, keys_values: KeysValues, text_states: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits `[P]` that the pairs belong together."""
        fused = self.forward(keys_values, text_states, attention_mask)
        return self.match(fused[:, 0])[:, 0]

    def decode(self, keys_values: KeysValues, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """Fused states `[P, L, D]` of `tokens` `[P, L, D]`, each of which sees those before it and the image."""
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        itself = torch.eye(length, dtype=torch.bool, device=tokens.device)  # so that padding sees something
        mask = (causal & attention_mask.bool()[:, None, None]) | itself
        return self._run(tokens, mask, keys_values)

    def _run(self, tokens: Tensor, mask: Tensor, keys_values: KeysValues, bridged: Sequence[Tensor] = ()) -> Tensor:
        image = None
        for block, (layer, given) in enumerate(zip(self.layers, keys_values, strict=True)):
            if 0 < block <= len(bridged):
                tokens = tokens + bridged[block - 1]
            if self.keeps_tokens:
                image = given[0] if image is None else torch.cat([image, given[0]], 1)
                given = layer.encode_image(self.vision_norm(image))
            tokens = layer(tokens, given, mask)
            if layer.image is not None:
                image = layer.image(image, tokens, mask)
        return self.output_norm(tokens)


class TokenHead(nn.Module):
    """Fused states as logits over the text tower's vocabulary, whose embeddings they are compared with."""

    def __init__(self, dim: int, width: int, vocabulary: int):
        super().__init__()
        self.transform = nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, fused: Tensor, embeddings: Tensor) -> Tensor:
        """`[M, D]` and `[V, W]` -> `[M, V]`."""
        return F.linear(self.transform(fused), embeddings, self.bias)


class CaptionAdapter(nn.Module):
    """Word embeddings `[P, L, W]`, with their places, as tokens `[P, L, D]`: an entrance without a text tower."""

    def __init__(self, width: int, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, dim)

    def forward(self, embeddings: Tensor) -> Tensor:
        """Positions are those of "Attention is all you need" (arXiv 1706.03762)."""
        tokens = self.projection(self.norm(embeddings))
        frequency = 10000.0 ** -(torch.arange(0, tokens.shape[2], 2, device=tokens.device) / tokens.shape[2])
        angle = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * frequency
        return tokens + torch.cat([angle.sin(), angle.cos()], 1).to(tokens.dtype)


class RegionHead(nn.Module):
    """Boxes of an image, and the cells of its grid, in the space of the texts (X-VLM, arXiv 2111.08276).

    It reads the fusion head's last tap, the finest. A box is the mean of the cells under it, weighted by the area of each
    that it covers: exact, also for boxes smaller than a cell, and with a gradient by the cells.
    """

    def __init__(self, width: int, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, dim, bias=False)

    def forward(self, grid: Tensor, boxes: Tensor, image: Tensor) -> Tensor:
        """Unit embeddings `[R, E]` of R boxes, see `FusionDualEncoderModel.region_embeds`, of `[B, C, h, w]` maps."""
        return self._embed(mean_in_boxes(grid, boxes, image))

    def cells(self, grid: Tensor) -> Tensor:
        """Unit embeddings `[B, h, w, E]`, each what `forward` gives of a box inside that cell."""
        return self._embed(grid.permute(0, 2, 3, 1))

    def _embed(self, pooled: Tensor) -> Tensor:
        return F.normalize(self.projection(self.norm(pooled)), dim=-1)


def _grid(tap: Tensor) -> Tensor:
    """A hidden state, a map or tokens, as the map `[B, C, h, w]` that it is of the image."""
    grid = tap if tap.dim() == 4 else split_grid(tap)[1]
    if grid is None:
        raise ValueError(
            f"Regions need a map or a square grid of patches; the last of fusion_vision_taps gives {tap.shape[1]} tokens."
        )
    return grid


def mean_in_boxes(grid: Tensor, boxes: Tensor, image: Tensor) -> Tensor:
    """Mean `[R, C]` of the cells under each box, by area; zeros for a box without any."""
    weight = cells_covered(boxes, *grid.shape[-2:])
    weight = weight / weight.sum((1, 2), keepdim=True).clamp(min=1e-6)
    # index_select, because the backward of indexing adds in no fixed order on CPUs
    return torch.einsum("rhw,rchw->rc", weight.to(grid), grid.index_select(0, image))


def cells_covered(boxes: Tensor, height: int, width: int) -> Tensor:
    """Which share of each cell of a grid lies in each box, `[R, height, width]`; boxes `[R, 4]` are left, top, right, bottom
    in shares of the grid."""

    def along(spans: Tensor, cells: int) -> Tensor:
        begin = torch.arange(cells, device=spans.device)
        spans = spans * cells
        return (torch.minimum(spans[:, 1:], begin + 1) - torch.maximum(spans[:, :1], begin)).clamp(min=0)

    return along(boxes[:, 1::2], height)[:, :, None] * along(boxes[:, ::2], width)[:, None]


class FusionDualEncoderModel(PreTrainedModel):
    """Two towers in one embedding space, and a head that scores a pair by looking at both.

    Build it with `from_backbones` (or `mm_utils.models.build_model`), load it with `from_pretrained`.
    """

    config_class = FusionDualEncoderConfig
    base_model_prefix = "fusion_dual_encoder"
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(
        self,
        config: FusionDualEncoderConfig,
        vision_model: PreTrainedModel | None = None,
        text_model: PreTrainedModel | None = None,
    ):
        super().__init__(config)
        if not config.vision_widths:
            raise ValueError(
                "The config does not say how wide the backbones' outputs are. Build new models with "
                "FusionDualEncoderModel.from_backbones(vision_model, text_model), which measures them."
            )
        self.vision_model = vision_model if vision_model is not None else AutoModel.from_config(config.vision_config)
        self.text_model = text_model if text_model is not None else AutoModel.from_config(config.text_config)
        self.config.vision_config, self.config.text_config = self.vision_model.config, self.text_model.config
        self.visual_projection = nn.Linear(config.vision_pooled_width, config.projection_dim, bias=False)
        self.text_projection = nn.Linear(config.text_width, config.projection_dim, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(config.logit_scale_init_value))
        bias = config.logit_bias_init_value
        self.logit_bias = None if bias is None else nn.Parameter(torch.tensor(bias))
        self.fusion = FusionHead(config) if config.fusion_layers else None
        self.region_head: RegionHead | None = None
        if config.region_head:
            self._make_region_head()
        self.token_head: TokenHead | None = None
        self.caption_adapter: CaptionAdapter | None = None
        if config.token_head:
            self.add_token_head(config.caption_head)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if any(module is part for tower in (self.vision_model, self.text_model) for part in tower.modules()):
            return
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, FusionHead):
            nn.init.normal_(module.cls_token, std=0.02)
            for bridge in module.bridges[1:]:
                nn.init.zeros_(bridge.projection.weight)
        elif isinstance(module, LevelAdapter):
            nn.init.normal_(module.level, std=0.02)

    @classmethod
    def from_backbones(
        cls, vision_model: PreTrainedModel, text_model: PreTrainedModel, **config: Any
    ) -> "FusionDualEncoderModel":
        """Join two backbones; `config` are fields of `FusionDualEncoderConfig`. Runs both once on zeros to measure them.

        Without `fusion_vision_taps` and `fusion_text_taps`, the head reads a hidden state of each tower per block, three at
        most: the last of each resolution, or, where there is only one, the last and others at equal distances before it.

        Raises:
            ValueError: if a backbone returns no hidden states, or a pooling it was asked for.
        """
        vision, text = _probe_vision(vision_model), _probe_text(text_model)
        for name, output in (("vision_pooling", vision), ("text_pooling", text)):
            pooler = output.get("pooler_output")
            wanted = config.get(name, "auto")
            if wanted == "pooler" and pooler is None:
                raise ValueError(f"{name} is 'pooler'; this backbone has none. Set {name} to mean or cls.")
            first_token_only = name == "text_pooling" and _has_bert_pooler(text_model)
            best = "mean" if pooler is None or first_token_only else "pooler"
            config[name] = best if wanted == "auto" else wanted
        most = max(1, min(MOST_TAPS, config.get("fusion_layers", FusionDualEncoderConfig().fusion_layers)))
        config.setdefault("fusion_vision_taps", _apart([_places(hidden) for hidden in vision["hidden_states"]], most))
        config.setdefault("fusion_text_taps", _apart([1] * len(text["hidden_states"]), most))
        widths = [_channels(hidden) for hidden in vision["hidden_states"]]
        pooled = _pool(vision, config["vision_pooling"], None)
        resolved = FusionDualEncoderConfig(
            vision_model.config,
            text_model.config,
            vision_widths=widths,
            vision_pooled_width=pooled.shape[-1],
            text_width=text["last_hidden_state"].shape[-1],
            **config,
        )
        for name, states in (("vision", vision["hidden_states"]), ("text", text["hidden_states"])):
            for tap in getattr(resolved, f"fusion_{name}_taps"):
                if not -len(states) <= tap < len(states):
                    raise ValueError(
                        f"fusion_{name}_taps holds {tap}; the {name} backbone has {len(states)} hidden states, so give "
                        f"indices from {-len(states)} to {len(states) - 1}."
                    )
        return cls(resolved, vision_model, text_model)

    def train(self, mode: bool = True) -> "FusionDualEncoderModel":
        """As `nn.Module.train`, but frozen towers and, if the config says so, batch norms stay in evaluation mode."""
        super().train(mode)
        for tower in (self.vision_model, self.text_model):
            if not is_trained(tower):
                tower.eval()
        if self.config.freeze_batch_norm:
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    @classmethod
    def from_dual_encoder(cls, stock: VisionTextDualEncoderModel, **config: Any) -> "FusionDualEncoderModel":
        """Take over a stock model, embeddings and temperature unchanged; `config` says how the new head looks."""
        model = cls.from_backbones(
            stock.vision_model,
            stock.text_model,
            **{
                "vision_pooling": "pooler",
                "text_pooling": "pooler",
                "projection_dim": stock.config.projection_dim,
                **config,
            },
        )
        model.visual_projection, model.text_projection = stock.visual_projection, stock.text_projection
        model.logit_scale = stock.logit_scale
        return model

    def add_logit_bias(self) -> None:
        """Give the model what the sigmoid loss starts from: a bias of -10 and a scale of 10 (SigLIP, arXiv 2303.15343)."""
        self.config.logit_scale_init_value, self.config.logit_bias_init_value = math.log(10), -10.0
        self.logit_scale.data.fill_(self.config.logit_scale_init_value)
        self.logit_bias = nn.Parameter(torch.full_like(self.logit_scale, self.config.logit_bias_init_value))

    def remove_logit_bias(self) -> None:
        """Drop the bias, which a softmax does not see."""
        self.config.logit_bias_init_value = self.logit_bias = None

    def add_token_head(self, captions: bool = False) -> None:
        """Give the fusion head what tells words, if it has none; with `captions`, also what it needs to write them.

        Raises:
            ValueError: if captions are asked of a head whose image tokens read the text, the words to be told among it.
        """
        words: Any = self.text_model.get_input_embeddings()
        dim, width = self.config.fusion_dim, words.embedding_dim
        if self.token_head is None:
            self.token_head = TokenHead(dim, width, words.num_embeddings).to(words.weight)
            self.token_head.apply(self._init_weights)
        if captions and self.config.fusion_direction != "text_to_image":
            raise ValueError("fusion_direction is 'both'; to write captions, image tokens must not read the text.")
        if captions and self.caption_adapter is None:
            self.caption_adapter = CaptionAdapter(width, dim).to(words.weight)
            self.caption_adapter.apply(self._init_weights)
        self.config.token_head, self.config.caption_head = True, captions or self.config.caption_head

    def freeze(self, tower: str) -> None:
        """Stop training the `vision` or the `text` backbone; its projection goes on learning."""
        (self.vision_model if tower == "vision" else self.text_model).requires_grad_(False)

    def encode_image(self, pixel_values: Tensor, with_keys_values: bool = True) -> tuple[Tensor, KeysValues | None]:
        """Unit embeddings `[B, E]` of normalised `[B, 3, H, W]` images, and their side of the fusion head."""
        return self.project_image(*self.vision_features(pixel_values, with_keys_values))

    def encode_text(
        self, input_ids: Tensor, attention_mask: Tensor, with_states: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Unit embeddings `[B, E]` of tokenised texts `[B, L]`, and their side of the fusion head; without states, of no
        tokens."""
        pooled, states = self.text_features(input_ids, attention_mask, with_states)
        return self.project_text(pooled, states if with_states else None)

    def vision_features(self, pixel_values: Tensor, with_taps: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        """All that the model takes from the vision backbone: a vector `[B, C]`, and what the fusion head reads, pooled."""
        head = self.fusion if with_taps else None
        # Convolutions run fastest on this layout, and pass it on: MobileNetV2 trains 4 times as fast on a CPU.
        pixel_values = pixel_values.contiguous(memory_format=torch.channels_last)
        output = self.vision_model(pixel_values, output_hidden_states=head is not None, return_dict=True)
        pooled = _pool(output, self.config.vision_pooling, None)
        return pooled, () if head is None else head.pool_taps(output.hidden_states)

    def project_image(self, pooled: Tensor, taps: Sequence[Tensor]) -> tuple[Tensor, KeysValues | None]:
        """The rest of `encode_image`, of `vision_features`; without taps there is nothing for the fusion head."""
        embeds = F.normalize(self.visual_projection(pooled), dim=-1)
        return embeds, self.fusion.encode_vision(taps) if self.fusion is not None and taps else None

    def text_features(
        self, input_ids: Tensor, attention_mask: Tensor, with_taps: bool = True
    ) -> tuple[Tensor, Tensor]:
        """All that the model takes from the text backbone: a vector `[B, C]`, and what the fusion head reads of the hidden
        states, `[B, L, taps x C]`; without taps, the last ones."""
        taps = self.config.fusion_text_taps if self.fusion is not None and with_taps else (-1,)
        output = self.text_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            output_hidden_states=any(tap != -1 for tap in taps),
            return_dict=True,
        )
        # Some towers normalise what they put out once more, so that it is not the last of the hidden states.
        states = [output.last_hidden_state if tap == -1 else output.hidden_states[tap] for tap in taps]
        return _pool(output, self.config.text_pooling, attention_mask), torch.cat(states, -1)

    def add_region_head(self) -> None:
        """Give the model embeddings of boxes, if it has none.

        Raises:
            ValueError: if it has no fusion head, whose taps they are made of, or the last tap is no square grid.
        """
        if self.fusion is None:
            raise ValueError(
                "This model was built with fusion_layers=0; regions are read from the fusion head's taps."
            )
        tapped = _probe_vision(self.vision_model)["hidden_states"][self.config.fusion_vision_taps[-1]]
        _grid(tapped)
        if self.region_head is None:
            self._make_region_head()
        self.config.region_head = True

    def _make_region_head(self) -> None:
        width = self.config.vision_widths[self.config.fusion_vision_taps[-1]]
        self.region_head = RegionHead(width, self.config.projection_dim).to(self.logit_scale)
        self.region_head.apply(self._init_weights)

    def region_embeds(self, taps: Sequence[Tensor], boxes: Tensor, image: Tensor) -> Tensor:
        """Unit embeddings `[R, E]` of R boxes, which may be compared with those of texts.

        Args:
            taps: of `vision_features`.
            boxes: `[R, 4]` left, top, right and bottom in shares of the input, each in [0, 1].
            image: `[R]`, the place of each box's image.

        Raises:
            ValueError: if the model has no region head.
        """
        head, grid = self._region_grid(taps)
        return head(grid, boxes, image)

    def cell_embeds(self, taps: Sequence[Tensor]) -> Tensor:
        """Unit embeddings `[B, h, w, E]` of all cells of the last tap, as of boxes inside them."""
        head, grid = self._region_grid(taps)
        return head.cells(grid)

    def _region_grid(self, taps: Sequence[Tensor]) -> tuple[RegionHead, Tensor]:
        if self.region_head is None:
            raise ValueError("This model has no embeddings of regions. Train it with regions among --objectives.")
        return self.region_head, _grid(taps[-1])

    def project_text(self, pooled: Tensor, states: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The rest of `encode_text`, of `text_features`; without states there are no tokens, `[B, 0, C]`."""
        embeds = F.normalize(self.text_projection(pooled), dim=-1)
        if states is None:
            states = pooled[:, None][:, :0]
        elif self.fusion is not None:
            states = self.fusion.encode_text(states)
        return embeds, states

    def match_pairs(self, keys_values: KeysValues, text_states: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits `[P]` that pair p, given by its image's keys and values and its text's states, belongs together."""
        if self.fusion is None:
            raise ValueError("This model was built with fusion_layers=0; it has no head to score pairs with.")
        return self.fusion.match_logits(keys_values, text_states, attention_mask)

    def token_logits(
        self, keys_values: KeysValues, text_states: Tensor, attention_mask: Tensor, is_asked: Tensor
    ) -> Tensor:
        """Logits `[M, V]` of the M tokens of P pairs that are asked for, bool `[P, L]`, from their fused states."""
        assert self.fusion is not None
        assert self.token_head is not None
        fused = self.fusion(keys_values, text_states, attention_mask)[:, 1:]
        return self.token_head(fused[is_asked], self.text_model.get_input_embeddings().weight)

    def caption_logits(
        self, keys_values: KeysValues, input_ids: Tensor, attention_mask: Tensor, is_asked: Tensor
    ) -> Tensor:
        """Logits `[M, V]` of what follows the M tokens of P captions that are asked for, bool `[P, L]`."""
        assert self.fusion is not None
        assert self.token_head is not None
        assert self.caption_adapter is not None
        words = self.text_model.get_input_embeddings()
        fused = self.fusion.decode(keys_values, self.caption_adapter(words(input_ids)), attention_mask)
        return self.token_head(fused[is_asked], words.weight)

    def caption_scores(self, keys_values: KeysValues, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Log probabilities `[P]` that image p is captioned by text p, all tokens after its first one."""
        is_told, before = told_tokens(attention_mask)
        logits = self.caption_logits(keys_values, input_ids, attention_mask, before).float()
        told = -F.cross_entropy(logits, input_ids[is_told], reduction="none")
        return torch.zeros_like(is_told, dtype=told.dtype).masked_scatter(is_told, told).sum(1)

    @torch.no_grad()
    def caption(self, pixel_values: Tensor, first: int, last: int, max_length: int = 32) -> Tensor:
        """Write captions greedily: token ids `[B, L]`, from `first` to `last` (`[CLS]` and `[SEP]` of a BERT), then `last`."""
        _, keys_values = self.encode_image(pixel_values)
        assert keys_values is not None
        input_ids = torch.full((len(pixel_values), 1), first, device=pixel_values.device)
        while input_ids.shape[1] < max_length and not (input_ids[:, 1:] == last).any(1).all():
            is_asked = torch.zeros_like(input_ids, dtype=torch.bool)
            is_asked[:, -1] = True
            chosen = self.caption_logits(keys_values, input_ids, torch.ones_like(input_ids), is_asked).argmax(-1)
            ended = (input_ids[:, 1:] == last).any(1)
            input_ids = torch.cat([input_ids, chosen.masked_fill(ended, last)[:, None]], 1)
        return input_ids

    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_loss: bool = False,
        match: bool = True,
        **_: Any,
    ) -> FusionDualEncoderOutput:
        """Encode images, texts, or both.

        With `match=False` the fusion head is left out. `token_type_ids` and `return_dict`, which processors and the
        stock class pass, are accepted and not needed.
        """
        output = FusionDualEncoderOutput(logit_scale=self.logit_scale)
        if pixel_values is not None:
            output.image_embeds, output.keys_values = self.encode_image(pixel_values, with_keys_values=match)
        if input_ids is not None:
            attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            output.text_embeds, output.text_states = self.encode_text(input_ids, attention_mask)
        if output.image_embeds is None or output.text_embeds is None:
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
            output.loss = (
                F.cross_entropy(output.logits_per_text, target) + F.cross_entropy(output.logits_per_image, target)
            ) / 2
        return output

    def to_dual_encoder(self) -> VisionTextDualEncoderModel:
        """The two towers as a stock model with the same embeddings; it shares this model's tensors.

        A vision backbone whose config has no `hidden_size` (ConvNeXt, MobileNet) gets one, which is all that the stock
        class misses. The stock class pools texts by the pooler, so a mean is expressed as one more layer of the text
        tower (`_mean_as_layer`), for backbones laid out as BERT.

        Raises:
            ValueError: if the stock class cannot express this model, with the reason.
        """
        vision, weights = _probe_vision(self.vision_model), self.state_dict()
        if self.config.vision_pooling != "pooler" or vision["pooler_output"].dim() != 2:
            raise ValueError(
                "the stock class takes one pooled vector per image from the vision tower, and here is none"
            )
        vision_config, text_config = self.vision_model.config.to_dict(), self.text_model.config.to_dict()
        vision_config["hidden_size"] = self.config.vision_pooled_width
        if self.config.text_pooling != "pooler":
            if self.config.text_pooling != "mean" or not _has_bert_pooler(self.text_model):
                raise ValueError("the stock class pools texts by a pooler, and this text tower has none")
            weights |= _mean_as_layer(self)
            text_config["num_hidden_layers"] += 1
        stock_config = VisionTextDualEncoderConfig(
            vision_config=vision_config,
            text_config=text_config,
            projection_dim=self.config.projection_dim,
            logit_scale_init_value=self.config.logit_scale_init_value,
        )
        stock = VisionTextDualEncoderModel(stock_config)
        names = stock.state_dict().keys()
        stock.load_state_dict({name: value for name, value in weights.items() if name in names}, assign=True)
        return stock.train(self.training)


class FusionDualEncoderForClassification(FusionDualEncoderModel):
    """Classes of an image, of a text, or of both together; loads from a checkpoint of the base class unchanged.

    `config.classifier_inputs` says what a small MLP reads: `fused`, the head's [CLS]; `pair`, both unit embeddings side by
    side, which never look at each other; `image` or `text`, one of them, without running the other tower.
    """

    def __init__(
        self,
        config: FusionDualEncoderConfig,
        vision_model: PreTrainedModel | None = None,
        text_model: PreTrainedModel | None = None,
    ):
        super().__init__(config, vision_model, text_model)
        reads = config.classifier_inputs
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
        """Logits `[B, classes]`; an input that the classifier does not read may be left out, and is not looked at.

        Raises:
            ValueError: if one that it reads is missing.
        """
        reads = self.config.classifier_inputs
        missing = [
            name
            for name, value, other in (("pixel_values", pixel_values, "text"), ("input_ids", input_ids, "image"))
            if value is None and reads != other
        ]
        if missing:
            raise ValueError(f"{missing[0]} is missing; classifier_inputs is {reads!r}. Pass it.")
        keys_values, text_states, embeds = None, None, []
        if pixel_values is not None and reads != "text":
            embed, keys_values = self.encode_image(pixel_values, with_keys_values=reads == "fused")
            embeds.append(embed)
        if input_ids is not None and reads != "image":
            attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            embed, text_states = self.encode_text(input_ids, attention_mask)
            embeds.append(embed)
        if self.fusion is None or keys_values is None or text_states is None or attention_mask is None:
            return self.classifier(torch.cat(embeds, -1))
        return self.classifier(self.fusion(keys_values, text_states, attention_mask)[:, 0])

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **_: Any,
    ) -> SequenceClassifierOutput:
        """Logits of images, texts or pairs, and with `labels` `[B]` their mean cross-entropy."""
        logits = self.classify(pixel_values, input_ids, attention_mask)
        return SequenceClassifierOutput(
            loss=None if labels is None else F.cross_entropy(logits.float(), labels), logits=logits
        )


def _has_bert_pooler(text_model: PreTrainedModel) -> bool:
    """Whether the tower ends in BERT's pooler, tanh of a dense layer on the first token, and has BERT's layers."""
    layers = getattr(getattr(text_model, "encoder", None), "layer", None)
    return hasattr(getattr(text_model, "pooler", None), "dense") and hasattr(
        layers[0] if layers else None, "attention"
    )


@torch.no_grad()
def _mean_as_layer(model: FusionDualEncoderModel) -> dict[str, Tensor]:
    """Weights of one more BERT layer, pooler and projection, whose pooled and projected first token is the mean's.

    With queries and keys of zero, attention is uniform over the unmasked tokens, so the first token receives the values'
    mean. The output matrix maps it to U P mean: P is the trained projection, and U an isometry into the vectors whose
    entries sum to zero, which layer normalisation only scales. The factor `loud` drowns the residual, half of it by
    shrinking what enters the layer, so that float16 does not overflow. The feed-forward part adds nothing, the pooler
    stays where tanh is linear, and U transposed undoes U. What is left is P mean up to its length, which the embedding
    does not keep: equal within 1e-5 in fp32.
    """
    width, embed = model.config.text_width, model.config.projection_dim
    if embed >= width:
        raise ValueError("the stock class needs a projection narrower than the text tower, to pool by the mean")
    loud, quiet = 1e3, 1e-3
    trained = model.text_projection.weight
    projection = trained.double()
    zero_sum = torch.eye(width, dtype=torch.double, device=projection.device) - 1 / width
    isometry = torch.linalg.qr(zero_sum[:, :embed])[0]  # columns: orthonormal, each summing to zero
    eye = torch.eye(width)
    encoder: Any = model.text_model.encoder
    depth, before = len(encoder.layer), encoder.layer[-1].state_dict()
    last = {
        "attention.self.value.weight": loud * eye,
        "attention.output.dense.weight": loud * isometry @ projection,
        "attention.output.LayerNorm.weight": torch.ones(width),
        "output.LayerNorm.weight": torch.ones(width),
    }
    if any(name not in before or before[name].shape != value.shape for name, value in last.items()):
        raise ValueError("the stock class pools texts by a pooler, and this text tower's layers are not BERT's")
    last = {name: torch.zeros_like(value) for name, value in before.items()} | last
    weights = {
        **{f"text_model.encoder.layer.{depth}.{name}": value for name, value in last.items()},
        **{
            f"text_model.encoder.layer.{depth - 1}.{name}": before[name] / loud
            for name in ("output.LayerNorm.weight", "output.LayerNorm.bias")
        },
        "text_model.pooler.dense.weight": quiet * eye,
        "text_model.pooler.dense.bias": torch.zeros(width),
        "text_projection.weight": isometry.T.contiguous(),
    }
    return {name: value.to(trained) for name, value in weights.items()}


def _apart(sizes: Sequence[int], most: int) -> list[int]:
    """Up to `most` of the hidden states with so many places each, from the last one back; not the embeddings."""
    resolutions = [place for place in range(1, len(sizes)) if sizes[place : place + 2] != [sizes[place]] * 2]
    if len(resolutions) > 1:
        return [place - len(sizes) for place in resolutions[::-1][:most]]
    distance = max(1, (len(sizes) - 1) // most)
    return list(range(-1, -len(sizes), -distance))[:most] or [-1]


def _places(hidden: Tensor) -> int:
    return hidden.shape[-2] * hidden.shape[-1] if hidden.dim() == 4 else hidden.shape[1]


def told_tokens(attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens of captions are told from those before them, all but the first, bool `[P, L]`; and the places before."""
    is_told = attention_mask.bool() & (torch.arange(attention_mask.shape[1], device=attention_mask.device) > 0)
    return is_told, F.pad(is_told[:, 1:], (0, 1))


def _channels(hidden: Tensor) -> int:
    return hidden.shape[1] if hidden.dim() == 4 else hidden.shape[-1]


def _pool(output: ModelOutput, pooling: str, attention_mask: Tensor | None) -> Tensor:
    """One vector per row: `[B, C]`."""
    if pooling == "pooler":
        return output["pooler_output"].flatten(1)
    hidden = output["last_hidden_state"]
    if hidden.dim() == 4:
        return hidden.mean((2, 3))
    if pooling == "cls":
        return hidden[:, 0]
    if attention_mask is None:
        return hidden.mean(1)
    weight = attention_mask[..., None].to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)


def is_trained(tower: nn.Module) -> bool:
    """Whether any of its parameters is."""
    return any(parameter.requires_grad for parameter in tower.parameters())


def image_shape(backbone: PreTrainedModel) -> tuple[int, int, int]:
    """Channels, height and width of an image that a vision backbone takes."""
    size = getattr(backbone.config, "image_size", None) or 64
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return getattr(backbone.config, "num_channels", 3), height, width


@torch.no_grad()
def _probe_vision(backbone: PreTrainedModel) -> ModelOutput:
    parameter = next(backbone.parameters())
    pixels = torch.zeros(1, *image_shape(backbone), dtype=parameter.dtype, device=parameter.device)
    was_training = backbone.training
    output = backbone.eval()(pixels, output_hidden_states=True, return_dict=True)
    backbone.train(was_training)
    if output.get("hidden_states") is None:
        raise ValueError(f"{type(backbone).__name__} returns no hidden states; the fusion head cannot read it.")
    return output


@torch.no_grad()
def _probe_text(backbone: PreTrainedModel) -> ModelOutput:
    was_training = backbone.training
    ones = torch.ones(1, 2, dtype=torch.long, device=next(backbone.parameters()).device)
    output = backbone.eval()(input_ids=ones, attention_mask=ones, output_hidden_states=True, return_dict=True)
    backbone.train(was_training)
    return output


AutoConfig.register(FusionDualEncoderConfig.model_type, FusionDualEncoderConfig, exist_ok=True)
AutoModel.register(FusionDualEncoderConfig, FusionDualEncoderModel, exist_ok=True)
FusionDualEncoderConfig.register_for_auto_class()
FusionDualEncoderModel.register_for_auto_class("AutoModel")
AutoModelForSequenceClassification.register(FusionDualEncoderConfig, FusionDualEncoderForClassification, exist_ok=True)
FusionDualEncoderForClassification.register_for_auto_class("AutoModelForSequenceClassification")
