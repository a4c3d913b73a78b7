"""Encode a batch's captions as one row of tokens, unpadded: one pass through the tower.

The tower is given `[1, T]` tokens, positions that start anew with every caption, and the places where captions end; attention stays
within a caption. On a GPU it is torch's `varlen_attn`, which runs cuDNN's or the flash kernel; elsewhere every caption is attended by itself, which
is exact, and slow. A tower can be packed if it takes positions and computes attention through transformers' interface, and two
captions in one row give what they give padded: that is tried once. BERT, RoBERTa, DistilBERT, ELECTRA and ModernBERT can; MPNet
and DeBERTa, which compute attention themselves, and CLIP's text tower, which looks for the last token, cannot.

Shape letters: n texts, L tokens of the longest, T tokens of all, C channels.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mm_utils.distributed import RunError
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.encoding import ENCODERS, masked

_NAME = "packed_sdpa"
_PROBED = (6, 3)  # lengths of the captions that are tried


def pack_captions(model: FusionDualEncoderModel) -> bool:
    """Encode captions packed from now on; return False if the text tower cannot.

    Raises:
        ValueError: if torch has no attention of variable length that takes a scale and a window.
    """
    if _varlen_attn() is None:
        raise ValueError(
            f"--set pack_captions is true; the varlen_attn that it needs is not in torch {torch.__version__}, or takes no "
            "scale and window. Drop the flag, or upgrade torch."
        )
    tower = model.text_model
    takes_positions = "position_ids" in inspect.signature(tower.forward).parameters
    configs = {id(config): config for config in map(_config, tower.modules()) if config is not None}
    given = {key: config._attn_implementation for key, config in configs.items()}
    attends = getattr(tower, "_supports_attention_backend", False) and set(given.values()) == {"sdpa"}
    if model.config.text_padding is not None or not takes_positions or not attends:
        return False
    for config in configs.values():
        config._attn_implementation = _NAME
    ids, mask = _probe(tower)
    was_training = tower.training
    tower.eval()
    for first in (0, _pad(tower) + 1):
        if _same(tower, PackedTower(tower, first, sum(_PROBED)), ids, mask):
            ENCODERS[tower] = partial(encode_packed, first)
            break
    else:
        for key, config in configs.items():
            config._attn_implementation = given[key]
    tower.train(was_training)
    return tower in ENCODERS


def encode_packed(
    first: int,
    model: FusionDualEncoderModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    lengths: Sequence[int],
    with_states: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return what `model.encode_text` does, of texts `[n, L]`; `first` is as of `PackedTower`."""
    packed = PackedTower(model.text_model, first, sum(lengths))
    stand_in = copy.copy(model)
    stand_in._modules = {**model._modules, "text_model": packed}
    return stand_in.encode_text(input_ids, attention_mask, with_states)


class PackedTower(nn.Module):
    """A text tower that computes no padding; what it takes and returns is padded, with zeros.

    Args:
        tower: the tower, of which `pack_captions` has changed the attention.
        first: the position of a first token.
        tokens: how many tokens the next texts have, which a GPU need not be asked.
    """

    def __init__(self, tower: Any, first: int, tokens: int):
        super().__init__()
        self.tower, self.first, self.tokens = tower, first, tokens

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **named: Any) -> Any:
        """Run the tower on texts `[n, L]`."""
        rows, longest = input_ids.shape
        lengths = attention_mask.sum(1)
        ends = lengths.cumsum(0)
        row = torch.repeat_interleave(torch.arange(rows, device=ends.device), lengths, output_size=self.tokens)
        position = torch.arange(self.tokens, device=ends.device) - (ends - lengths)[row]
        place = row * longest + position

        def padded(states: Tensor) -> Tensor:
            blank = states.new_zeros(rows * longest, states.shape[-1])
            return blank.index_copy(0, place, states[0]).view(rows, longest, -1)

        output = self.tower(
            input_ids=input_ids.flatten()[place][None],
            attention_mask=attention_mask.new_ones(1, 1, 1, 1),  # of four dimensions, so that no mask is made of it
            position_ids=position[None] + self.first,
            cu_seq_lens_q=F.pad(ends, (1, 0)).int(),
            max_length_q=longest,
            **named,
        )
        output.last_hidden_state = padded(output.last_hidden_state)
        if output.get("hidden_states") is not None:
            output.hidden_states = tuple(map(padded, output.hidden_states))
        if output.get("pooler_output") is not None and isinstance(getattr(self.tower, "pooler", None), nn.Module):
            output.pooler_output = self.tower.pooler(output.last_hidden_state)  # of every text's first token
        return output


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """Attend within captions `[1, heads, T, D]`; without `cu_seq_lens_q`, as "sdpa" does."""
    ends = named.pop("cu_seq_lens_q", None)
    if ends is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **named
        )
    if dropout:
        raise RunError("--set pack_captions is true; its attention has no dropout. Set --backbone_dropout off.")
    window = (named.get("sliding_window") or 0) - 1  # tokens to each side; -1: all
    flat = [side[0].transpose(0, 1) for side in (query, key, value)]
    if query.device.type != "cuda":
        return _attend_one_by_one(flat, ends.tolist(), scaling, window)[None], None
    if query.dtype == torch.float32:
        raise RunError(
            "--set pack_captions is true, and its attention on a GPU needs half precision. Set mixed_precision: bf16 in "
            "accelerate's config, or drop the flag."
        )
    varlen, longest = _varlen_attn(), named["max_length_q"]
    assert varlen is not None
    return varlen(*flat, ends, ends, longest, longest, scale=scaling, window_size=(window, window))[None], None


def _attend_one_by_one(flat: list[Tensor], ends: list[int], scaling: float | None, window: int) -> Tensor:
    """Attend from `[T, heads, D]` to `[T, heads, D]`, a caption at a time."""
    mixed = []
    for begin, end in pairwise(ends):
        place = torch.arange(end - begin, device=flat[0].device)
        near = (place[:, None] - place).abs() <= window if window >= 0 else None
        query, key, value = (side[begin:end].transpose(0, 1) for side in flat)
        mixed.append(F.scaled_dot_product_attention(query, key, value, near, scale=scaling).transpose(0, 1))
    return torch.cat(mixed)


def _varlen_attn() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys() else None


def _config(module: nn.Module) -> PreTrainedConfig | None:
    found = vars(module).get("config")
    return found if isinstance(found, PreTrainedConfig) else None


def _pad(tower: Any) -> int:
    return getattr(tower.config, "pad_token_id", None) or 0


def _probe(tower: Any) -> tuple[Tensor, Tensor]:
    """Return tokens and mask of two texts."""
    pad = _pad(tower)
    words = torch.tensor([word for word in range(8) if word != pad] * 2, device=tower.device)
    mask = torch.arange(max(_PROBED), device=tower.device) < torch.tensor(_PROBED, device=tower.device)[:, None]
    ids = torch.stack([words[at : at + max(_PROBED)] for at in range(len(_PROBED))])
    return ids.masked_fill(~mask, pad), mask.long()


@torch.no_grad()
def _same(tower: Any, packed: PackedTower, ids: Tensor, mask: Tensor) -> bool:
    """Return whether both give the same states of the tokens, and the same pooled output."""
    right, found = (each(input_ids=ids, attention_mask=mask, output_hidden_states=True) for each in (tower, packed))
    both = ((*each.hidden_states, each.last_hidden_state) for each in (found, right))
    pairs = [(one[mask.bool()], other[mask.bool()]) for one, other in zip(*both, strict=True)]
    if right.get("pooler_output") is not None:
        pairs.append((found.pooler_output, right.pooler_output))
    return all(one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-4) for one, other in pairs)


AttentionInterface.register(_NAME, attend)
AttentionMaskInterface.register(_NAME, partial(masked, sdpa_mask))
