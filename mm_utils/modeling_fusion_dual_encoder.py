"""A vision-text dual encoder with a cross-attention fusion head, for any pair of `AutoModel` backbones.

The two towers, their projections and the temperature carry the parameter names of `VisionTextDualEncoderModel`, so a
checkpoint of that class loads here unchanged and `FusionDualEncoderModel.to_dual_encoder` gives one back. The head
(`fusion.`) lets text tokens attend to image tokens: keys and values are made once per image by
`FusionHead.encode_vision` and reused for every candidate text.

This file depends on torch and transformers alone, because it travels with pushed checkpoints.

Shape letters: B images or texts, P pairs, C channels, N image tokens, L text tokens, D fusion width, E embedding width.
"""

import copy
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
    PreTrainedConfig,
    PreTrainedModel,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
)
from transformers.utils import ModelOutput

POOLINGS = ("auto", "pooler", "mean", "cls")
KeysValues = tuple[Tensor, ...]
"""One `[2, B, heads, N, D / heads]` tensor of keys and values per fusion layer."""


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
        fusion_vision_taps: which of the vision tower's hidden states the head reads, as indices into `hidden_states`.
        fusion_tokens_per_tap: a tap with more tokens is pooled down to this many.
        freeze_batch_norm: keep the running statistics of batch norms fixed in training.
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
        fusion_tokens_per_tap: int = 49,
        freeze_batch_norm: bool = False,
        **kwargs: Any,
    ):
        for name, config in (("vision_config", vision_config), ("text_config", text_config)):
            # A copy: PreTrainedConfig.__init__ below resets the attention implementation of its sub-configs, and a tower
            # whose own config lost it would silently ignore its padding mask.
            setattr(self, name, AutoConfig.for_model(**config) if isinstance(config, dict) else copy.deepcopy(config))
        for name, pooling in (("vision_pooling", vision_pooling), ("text_pooling", text_pooling)):
            if pooling not in POOLINGS:
                raise ValueError(f"{name} is {pooling!r}; choose one of {', '.join(POOLINGS)}.")
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
        self.fusion_tokens_per_tap = fusion_tokens_per_tap
        self.freeze_batch_norm = freeze_batch_norm
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
        text_states: `[B, L, C]` last hidden states of the text tower.
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


class LevelAdapter(nn.Module):
    """Any hidden state, a `[B, C, h, w]` map or `[B, N, C]` tokens, as `[B, n, D]` tokens with n <= `max_tokens`."""

    def __init__(self, width: int, dim: int, max_tokens: int):
        super().__init__()
        self.max_tokens = max_tokens
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, dim)
        self.level = nn.Parameter(torch.zeros(dim))

    def pool(self, hidden: Tensor) -> Tensor:
        """At most `max_tokens` of them, by averages of neighbours."""
        if hidden.dim() == 4:
            too_many = hidden.shape[-1] * hidden.shape[-2] > self.max_tokens
            return F.adaptive_avg_pool2d(hidden, int(self.max_tokens**0.5)) if too_many else hidden
        if hidden.shape[1] <= self.max_tokens:
            return hidden
        return F.adaptive_avg_pool1d(hidden.transpose(1, 2), self.max_tokens).transpose(1, 2)

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
    """Pre-norm block: text self-attention, gated cross-attention to the image, feed-forward; residuals kept."""

    def __init__(self, dim: int, heads: int, mlp_ratio: int):
        super().__init__()
        self.self_norm, self.cross_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.self_attention = Attention(dim, heads)
        self.cross_attention = Attention(dim, heads)
        self.gate = nn.Parameter(torch.ones(1))
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_ratio * dim), nn.GELU(), nn.Linear(mlp_ratio * dim, dim))

    def encode_image(self, tokens: Tensor) -> Tensor:
        """This layer's keys and values of image tokens `[B, N, D]`."""
        return self.cross_attention.keys_values(tokens)

    def forward(self, tokens: Tensor, keys_values: Tensor, text_mask: Tensor) -> Tensor:
        """`[P, L, D]` -> `[P, L, D]`; `text_mask` is `[P, 1, 1, L]`."""
        normed = self.self_norm(tokens)
        tokens = tokens + self.self_attention(normed, self.self_attention.keys_values(normed), text_mask)
        tokens = tokens + self.gate * self.cross_attention(self.cross_norm(tokens), keys_values)
        return tokens + self.mlp(self.mlp_norm(tokens))


class FusionHead(nn.Module):
    """Text tokens read image tokens; a learned `[CLS]` in front of them collects the answer.

    The image never reads the text, so its side depends on the image alone and is computed once (ALBEF, BLIP and
    BridgeTower project the same image again for every candidate text).
    """

    def __init__(self, config: FusionDualEncoderConfig):
        super().__init__()
        dim = config.fusion_dim
        self.taps = list(config.fusion_vision_taps)
        self.adapters: Iterable[LevelAdapter] = nn.ModuleList(  # type: ignore[assignment]
            LevelAdapter(config.vision_widths[tap], dim, config.fusion_tokens_per_tap) for tap in self.taps
        )
        self.vision_norm = nn.LayerNorm(dim)
        self.text_adapter = nn.Sequential(nn.LayerNorm(config.text_width), nn.Linear(config.text_width, dim))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        blocks = [FusionLayer(dim, config.fusion_heads, config.fusion_mlp_ratio) for _ in range(config.fusion_layers)]
        self.layers: Iterable[FusionLayer] = nn.ModuleList(blocks)  # type: ignore[assignment]
        self.output_norm = nn.LayerNorm(dim)
        self.match = nn.Linear(dim, 1)

    def pool_taps(self, hidden_states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tapped ones of all hidden states, each with at most `fusion_tokens_per_tap` tokens."""
        return tuple(adapter.pool(hidden_states[tap]) for adapter, tap in zip(self.adapters, self.taps, strict=True))

    def encode_vision(self, taps: Sequence[Tensor]) -> KeysValues:
        """The image side: pooled taps of B images -> keys and values for every layer."""
        tokens = torch.cat([adapter(tap) for adapter, tap in zip(self.adapters, taps, strict=True)], 1)
        tokens = self.vision_norm(tokens)
        return tuple(layer.encode_image(tokens) for layer in self.layers)

    def forward(self, keys_values: KeysValues, text_states: Tensor, attention_mask: Tensor) -> Tensor:
        """Fused states `[P, 1 + L, D]` of P pairs, the fused `[CLS]` first; padding changes none of the others."""
        tokens = self.text_adapter(text_states)
        tokens = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], 1)
        mask = F.pad(attention_mask.bool(), (1, 0), value=True)[:, None, None]
        for layer, layer_keys_values in zip(self.layers, keys_values, strict=True):
            tokens = layer(tokens, layer_keys_values, mask)
        return self.output_norm(tokens)

    def match_logits(self, keys_values: KeysValues, text_states: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits `[P]` that the pairs belong together."""
        fused = self.forward(keys_values, text_states, attention_mask)
        return self.match(fused[:, 0])[:, 0]


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
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if any(module is part for tower in (self.vision_model, self.text_model) for part in tower.modules()):
            return
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, FusionHead):
            nn.init.normal_(module.cls_token, std=0.02)
        elif isinstance(module, LevelAdapter):
            nn.init.normal_(module.level, std=0.02)

    @classmethod
    def from_backbones(
        cls, vision_model: PreTrainedModel, text_model: PreTrainedModel, **config: Any
    ) -> "FusionDualEncoderModel":
        """Join two backbones; `config` are fields of `FusionDualEncoderConfig`. Runs both once on zeros to measure them.

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
        for tap in resolved.fusion_vision_taps:
            if not -len(widths) <= tap < len(widths):
                raise ValueError(
                    f"fusion_vision_taps holds {tap}; the vision backbone has {len(widths)} hidden states, "
                    f"so give indices from {-len(widths)} to {len(widths) - 1}."
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

    def freeze(self, tower: str) -> None:
        """Stop training the `vision` or the `text` backbone; its projection goes on learning."""
        (self.vision_model if tower == "vision" else self.text_model).requires_grad_(False)

    def encode_image(self, pixel_values: Tensor, with_keys_values: bool = True) -> tuple[Tensor, KeysValues | None]:
        """Unit embeddings `[B, E]` of normalised `[B, 3, H, W]` images, and their side of the fusion head."""
        return self.project_image(*self.vision_features(pixel_values, with_keys_values))

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Unit embeddings `[B, E]` and last hidden states `[B, L, C]` of tokenised texts `[B, L]`."""
        pooled, states = self.text_features(input_ids, attention_mask)
        return self.project_text(pooled), states

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

    def text_features(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """All that the model takes from the text backbone: a vector `[B, C]`, and the last hidden states `[B, L, C]`."""
        output = self.text_model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)
        return _pool(output, self.config.text_pooling, attention_mask), output.last_hidden_state

    def project_text(self, pooled: Tensor) -> Tensor:
        """The rest of `encode_text`: unit embeddings `[B, E]` of `text_features`."""
        return F.normalize(self.text_projection(pooled), dim=-1)

    def match_pairs(self, keys_values: KeysValues, text_states: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits `[P]` that pair p, given by its image's keys and values and its text's states, belongs together."""
        if self.fusion is None:
            raise ValueError("This model was built with fusion_layers=0; it has no head to score pairs with.")
        return self.fusion.match_logits(keys_values, text_states, attention_mask)

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
    output = backbone.eval()(input_ids=ones, attention_mask=ones, return_dict=True)
    backbone.train(was_training)
    return output


AutoConfig.register(FusionDualEncoderConfig.model_type, FusionDualEncoderConfig, exist_ok=True)
AutoModel.register(FusionDualEncoderConfig, FusionDualEncoderModel, exist_ok=True)
FusionDualEncoderConfig.register_for_auto_class()
FusionDualEncoderModel.register_for_auto_class("AutoModel")
