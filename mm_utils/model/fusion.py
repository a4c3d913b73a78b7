"""The heads over two towers: a text looks at an image, words are predicted, captions written and boxes embedded.

In `FusionHead`, text tokens attend to image tokens of several levels. Keys and values are computed once per image, and every
candidate text reuses them. This file is saved with every model, like `modeling_fusion_dual_encoder`, which has the shape letters.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MOST_SPECIAL_TOKENS = 8  # class and register tokens in front of a vision transformer's patches
KeysValues = tuple[Tensor, ...]
"""The image side of the fusion head for B images: keys and values of each block, `[2, B, heads, N, D / heads]`."""


def on_gpu(values: Tensor) -> bool:
    """Return whether CUDA computes with the values; sums that repeat and products are written otherwise there."""
    return values.is_cuda


def rows_of(values: Tensor, places: Tensor, dim: int = 0) -> Tensor:
    """Select rows, whose gradients add up in a fixed order: by indexing on CUDA, which sorts, else by `index_select`."""
    return values[(slice(None),) * dim + (places,)] if on_gpu(values) else values.index_select(dim, places)


def average_pool(grid: Tensor, height: int, width: int) -> Tensor:
    """Average `[B, C, h, w]` to `[B, C, height, width]`, as `F.adaptive_avg_pool2d` does.

    On CUDA its gradients add up in no fixed order where windows overlap; there it is a product with ones and zeros.
    """
    if not on_gpu(grid) or (grid.shape[2] % height == 0 and grid.shape[3] % width == 0):
        return F.adaptive_avg_pool2d(grid, (height, width))
    windows = []
    for side, steps in zip(grid.shape[2:], (height, width), strict=True):
        place = torch.arange(side, device=grid.device)
        step = torch.arange(steps, device=grid.device)[:, None]
        # from floor(step x side / steps) to ceil((step + 1) x side / steps): windows may share a cell
        windows.append((place >= step * side // steps) & (place * steps < (step + 1) * side))
    is_in = torch.kron(*windows)  # `[height x width, h x w]`, 1 where a cell belongs to a window
    return (grid.flatten(2) @ is_in.T.to(grid) / is_in.sum(1)).unflatten(2, (height, width)).to(grid)


def split_grid(tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """Split tokens of a vision transformer into special tokens and patches.

    `[B, N, C]` -> `[B, s, C]` and a map `[B, C, h, h]`; all tokens and None if the number of patches is not a square.
    """
    side = math.isqrt(tokens.shape[1])  # of 197 tokens 14: 196 patches and a class token
    special = tokens.shape[1] - side**2
    if special > MOST_SPECIAL_TOKENS:
        return tokens, None
    return tokens[:, :special], tokens[:, special:].transpose(1, 2).unflatten(2, (side, side))


class LevelAdapter(nn.Module):
    """Projection of a hidden state to at most `max_tokens` tokens `[B, n, D]`.

    The state is a map `[B, C, h, w]` or tokens `[B, N, C]`; a `timed` map, `[B, C, places, T]`, loses places before time.
    """

    def __init__(self, width: int, dim: int, max_tokens: int, timed: bool = False):
        super().__init__()
        self.max_tokens = max_tokens
        self.timed = timed
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, dim)
        self.level = nn.Parameter(torch.zeros(dim))

    def pool(self, hidden: Tensor) -> Tensor:
        """Average neighbours until at most `max_tokens` are left; keep special tokens."""
        side = int(self.max_tokens**0.5)
        if self.timed:
            steps = min(hidden.shape[3], self.max_tokens)
            return average_pool(hidden, min(hidden.shape[2], self.max_tokens // steps), steps)
        if hidden.dim() == 4:
            return average_pool(hidden, side, side) if hidden.shape[-1] * hidden.shape[-2] > side**2 else hidden
        if hidden.shape[1] <= self.max_tokens:
            return hidden
        special, grid = split_grid(hidden)
        if grid is None:
            # tokens without a grid lie on one line
            return average_pool(hidden.transpose(1, 2)[:, :, None], 1, self.max_tokens)[:, :, 0].transpose(1, 2)
        return torch.cat([special, average_pool(grid, side, side).flatten(2).transpose(1, 2)], 1)

    def forward(self, pooled: Tensor) -> Tensor:
        """Project a pooled state; add the level's embedding, and to a map the positions."""
        positions: Tensor | float = 0.0
        if pooled.dim() == 4:
            height, width = pooled.shape[-2:]
            positions = _sincos_positions(height, width, self.projection.out_features, pooled.device)
            pooled = pooled.flatten(2).transpose(1, 2)
        tokens = self.projection(self.norm(pooled))
        return tokens + self.level + (positions.to(tokens.dtype) if isinstance(positions, Tensor) else 0.0)


def _sincos_positions(height: int, width: int, dim: int, device: torch.device) -> Tensor:
    """Return fixed 2-D sine-cosine positions `[height * width, dim]` for any resolution."""
    # Grids have some ten cells a side, so the slowest wave is 100 times, not 10,000 times, as long as the fastest
    frequency = 100.0 ** -(torch.arange(dim // 4, device=device) / (dim // 4))
    rows = (torch.arange(height, device=device) + 0.5)[:, None] / height * 2 * math.pi * frequency
    columns = (torch.arange(width, device=device) + 0.5)[:, None] / width * 2 * math.pi * frequency
    rows = torch.cat([rows.sin(), rows.cos()], 1)[:, None].expand(-1, width, -1)
    columns = torch.cat([columns.sin(), columns.cos()], 1)[None].expand(height, -1, -1)
    return torch.cat([rows, columns], -1).flatten(0, 1)


class Attention(nn.Module):
    """Multi-head attention with keys and values apart from queries, so that they can be kept."""

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
        """Attend from `[P, L, D]` to P sequences; `mask` is True where attention is allowed."""
        pairs, length, dim = tokens.shape
        query = self.query(tokens).view(pairs, length, self.heads, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, keys_values[0], keys_values[1], attn_mask=mask)
        return self.output(mixed.transpose(1, 2).reshape(pairs, length, dim))


class FusionLayer(nn.Module):
    """Pre-norm block: text self-attention, gated cross-attention to the image, feed-forward."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.self_norm = nn.LayerNorm(dim)
        self.cross_norm = nn.LayerNorm(dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.self_attention = Attention(dim, heads)
        self.cross_attention = Attention(dim, heads)
        self.gate = nn.Parameter(torch.ones(1))
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def encode_image(self, tokens: Tensor) -> Tensor:
        """Return this layer's keys and values of image tokens `[B, N, D]`; FSDP2 gathers the layer's weights for it."""
        return self.cross_attention.keys_values(tokens)

    def forward(self, tokens: Tensor, keys_values: Tensor, text_mask: Tensor) -> Tensor:
        """`[P, L, D]` -> `[P, L, D]`; `text_mask` is `[P, 1, 1, L]` or, per query, `[P, 1, L, L]`."""
        normed = self.self_norm(tokens)
        tokens = tokens + self.self_attention(normed, self.self_attention.keys_values(normed), text_mask)
        tokens = tokens + self.gate * self.cross_attention(self.cross_norm(tokens), keys_values)
        return tokens + self.mlp(self.mlp_norm(tokens))


class TextBridge(nn.Module):
    """Layers of the text tower, mixed by learned weights and projected: ManagerTower's static manager (arXiv 2306.00103)."""

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
    """Cross-attention of a text to an image; a learned `[CLS]` token collects the answer.

    The image does not attend to the text, so its side is computed once per image (ALBEF, BLIP and BridgeTower project the same
    image again for every candidate text).

    Block k attends to the vision taps up to its own, coarse ones first and the last block to all, and the text tower's states
    are added again through a bridge (BridgeTower, arXiv 2206.08657), which is zero at initialisation.
    """

    def __init__(self, config: Any):
        super().__init__()
        dim = config.fusion_dim
        blocks = config.fusion_layers
        self.taps = list(config.fusion_vision_taps)
        self.adapters: Iterable[LevelAdapter] = nn.ModuleList(  # type: ignore[assignment]
            LevelAdapter(config.vision_widths[tap], dim, config.fusion_tokens_per_tap, config.medium != "image")
            for tap in self.taps
        )
        self.vision_norm = nn.LayerNorm(dim)
        self.bridges: Any = nn.ModuleList(
            TextBridge(config.text_width, len(config.fusion_text_taps), dim) for _ in range(blocks)
        )
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.layers: Iterable[FusionLayer] = nn.ModuleList(  # type: ignore[assignment]
            FusionLayer(dim, config.fusion_heads) for _ in range(blocks)
        )
        self.output_norm = nn.LayerNorm(dim)
        self.match = nn.Linear(dim, 1)
        # How many taps each block reads, rounded up: of 3 taps, two blocks read 2 and 3
        self.reach = [-(-len(self.taps) * (block + 1) // blocks) for block in range(blocks)]

    def pool_taps(self, hidden_states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Select the tapped hidden states, and pool each to at most `fusion_tokens_per_tap` tokens."""
        return tuple(adapter.pool(hidden_states[tap]) for adapter, tap in zip(self.adapters, self.taps, strict=True))

    def encode_vision(self, taps: Sequence[Tensor]) -> KeysValues:
        """Compute the image side: pooled taps of B images -> keys and values for every block."""
        levels = [adapter(tap) for adapter, tap in zip(self.adapters, taps, strict=True)]
        tokens = self.vision_norm(torch.cat(levels, 1))
        ends = list(itertools.accumulate(level.shape[1] for level in levels))
        return tuple(
            layer.encode_image(tokens[:, : ends[reach - 1]])
            for layer, reach in zip(self.layers, self.reach, strict=True)
        )

    def encode_text(self, states: Tensor) -> Tensor:
        """Compute the text side: `[B, L, taps x C]` -> input of every block `[B, L, blocks x D]`."""
        return torch.cat([bridge(states) for bridge in self.bridges], -1)

    def forward(self, keys_values: KeysValues, text_states: Tensor, attention_mask: Tensor) -> Tensor:
        """Return fused states `[P, 1 + L, D]` of P pairs, `[CLS]` first, independent of padding."""
        first, *later = text_states.chunk(len(self.bridges), -1)
        tokens = torch.cat([self.cls_token.expand(first.shape[0], -1, -1), first], 1)
        # [P, 1, 1, 1 + L]; all see [CLS]
        mask = F.pad(attention_mask.bool(), (1, 0), value=True)[:, None, None]
        # [CLS] gets zeros in place of a text's states
        return self._run(tokens, mask, keys_values, [F.pad(states, (0, 0, 1, 0)) for states in later])

    def decode(self, keys_values: KeysValues, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """Return fused states of `tokens` `[P, L, D]`; each sees itself, those before, the image."""
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        itself = torch.eye(length, dtype=torch.bool, device=tokens.device)  # so that padding sees something
        mask = (causal & attention_mask.bool()[:, None, None]) | itself
        return self._run(tokens, mask, keys_values)

    def _run(self, tokens: Tensor, mask: Tensor, keys_values: KeysValues, bridged: Sequence[Tensor] = ()) -> Tensor:
        for block, (layer, image) in enumerate(zip(self.layers, keys_values, strict=True)):
            if 0 < block <= len(bridged):
                tokens = tokens + bridged[block - 1]
            tokens = layer(tokens, image, mask)
        return self.output_norm(tokens)


class TokenHead(nn.Module):
    """Logits over the text tower's vocabulary, by comparing fused states with its embeddings.

    A word whose bias is `ABSENT` has probability 0, to the last digit, and `among_known` does not compute it.
    """

    ABSENT = -1e4  # fp16 holds it, and its exponential is 0

    def __init__(self, dim: int, width: int, vocabulary: int):
        super().__init__()
        self.transform = nn.Sequential(nn.Linear(dim, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self._places: tuple[Tensor, Tensor] | Literal[False] | None = False

    def forward(self, fused: Tensor, embeddings: Tensor) -> Tensor:
        """`[M, D]` and `[V, width]` -> `[M, V]`."""
        return F.linear(self.transform(fused), embeddings, self.bias)

    def known(self) -> Tensor:
        """Return which words are predicted, bool `[V]`."""
        return self.bias.detach() > self.ABSENT / 2

    def places(self) -> tuple[Tensor, Tensor] | None:
        """Return the ids `[W]` of the known words, and where every word is among them, `[V]`; None if all words are known.

        It is found once, as the host waits for it: training leaves the words that are known.
        """
        if self._places is False:
            known = self.known()
            where = (known.cumsum(0) - 1).masked_fill(~known, -100)  # -100 is ignored by F.cross_entropy
            self._places = None if known.all() else (known.nonzero()[:, 0], where)
        return self._places

    def among_known(self, fused: Tensor, embeddings: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits `[M, W]` of the W known words, and the places of words `ids`, `[M]`, among these; -100: not known."""
        if (places := self.places()) is None:
            return self(fused, embeddings), ids
        chosen = places[0].to(fused.device)
        where = places[1].to(fused.device)
        return F.linear(self.transform(fused), rows_of(embeddings, chosen), rows_of(self.bias, chosen)), where[ids]

    def predict(self, known: Tensor) -> None:
        """Let the words be known for which `known`, bool `[V]`, is true; those that were not start without a preference."""
        was = self.known()
        self.bias.data[was & ~known] = self.ABSENT
        self.bias.data[known & ~was] = 0
        self._places = False

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._places = False


class CaptionAdapter(nn.Module):
    """Word embeddings and positions as input of the fusion head, without the text tower."""

    def __init__(self, width: int, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, dim)

    def forward(self, embeddings: Tensor) -> Tensor:
        """`[P, L, width]` -> `[P, L, D]`, with the sine-cosine positions of arXiv 1706.03762."""
        tokens = self.projection(self.norm(embeddings))
        frequency = 10000.0 ** -(torch.arange(0, tokens.shape[2], 2, device=tokens.device) / tokens.shape[2])
        angle = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * frequency
        return tokens + torch.cat([angle.sin(), angle.cos()], 1).to(tokens.dtype)


def target_mask(attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks `[P, L]` of predicted tokens, all but the first, and of those before these."""
    is_target = attention_mask.bool() & (torch.arange(attention_mask.shape[1], device=attention_mask.device) > 0)
    return is_target, F.pad(is_target[:, 1:], (0, 1))


class RegionHead(nn.Module):
    """Unit embeddings of grid cells in the space of the texts, from the last vision tap of the fusion head, the finest."""

    def __init__(self, width: int, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, dim, bias=False)

    def forward(self, grid: Tensor) -> Tensor:
        """Embed all cells of maps `[B, C, h, w]`, `[B, h, w, E]`."""
        return F.normalize(self.projection(self.norm(grid.permute(0, 2, 3, 1))), dim=-1)


def as_map(tap: Tensor) -> Tensor:
    """Return a hidden state, a map or tokens, as the map `[B, C, h, w]`."""
    grid = tap if tap.dim() == 4 else split_grid(tap)[1]
    if grid is None:
        raise ValueError(
            f"Regions need a map or a square grid of patches; the last of fusion_vision_taps has {tap.shape[1]} tokens."
        )
    return grid
