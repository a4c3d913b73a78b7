"""Texts end to end: the layers of a text tower read all tokens of a batch as one row, and no padding.

A layer reads every token by itself, but for its attention. So embeddings, masks and pooling see texts `[B, L]`, padded as ever, and the
layers between them the T tokens that there are, `[1, T]`; attention lays these out again, in groups of about one length. Beside a pass
for each group, no layer computes padding, and the gradient of a weight is computed once, not once a group.

Shape letters: B texts, L tokens of the longest, T tokens of all, H heads, D width of a head, C width of a state.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from mm_utils.model import short_attention

PASS_TOKENS = {"cpu": 32, "cuda": 8192}
"""Cost of one more pass through a tower, in tokens: the time to start its kernels, or until they fill the device (H100)."""

ATTENTION_TOKENS = {"cpu": 256, "cuda": 65536}
"""Cost of one more group of texts for attention alone, in tokens; on a GPU an estimate."""

PACKED_ON = {"cpu"}
"""Types of devices on which it is faster than groups, as far as it was measured."""

_ENCODERS = {  # whose layers pass on what they do not know to their attention, and read no positions
    "BertEncoder",
    "RobertaEncoder",
    "XLMRobertaEncoder",
    "CamembertEncoder",
    "ElectraEncoder",
    "CLIPEncoder",
    "ChineseCLIPTextEncoder",
    "Transformer",  # DistilBERT's
}

COMPILED = "has_compiled_layers"
"""An attribute of what `mm_utils.model.compile` has compiled."""

# the layout of a batch, and those of attention's groups
_packing: ContextVar[Any] = ContextVar("packing", default=None)
_lock = Lock()


def length_groups(lengths: Sequence[int], device_type: str, prices: Mapping[str, int] = PASS_TOKENS) -> list[range]:
    """Cut rows into groups, padded to their longest, at least cost in tokens, of which a pass has a price by type of device.

    Rows come longest caption first; unsorted rows stay in one group. There is at least one group, possibly empty.
    """
    if not lengths or any(longer < shorter for longer, shorter in pairwise(lengths)):
        return [range(len(lengths))]
    values, first = np.unique(-np.asarray(lengths), return_index=True)
    starts = np.append(first, len(lengths))  # of 9, 9, 5, 4: values -9, -5, -4 and starts 0, 2, 3, 4
    # cheapest[k]: of all rows from the k-th distinct length on; end[k]: where their first group ends
    cheapest = np.zeros(len(starts))
    end = np.zeros(len(values), dtype=int)
    # From the shortest captions on: the best cut behind k is the cheapest first group and the best cuts of the rest
    for k in range(len(values) - 1, -1, -1):
        # the longest times the rows, for every end that the group may have, and the best of the rest
        costs = -values[k] * (starts[k + 1 :] - starts[k]) + cheapest[k + 1 :]
        end[k] = k + 1 + costs.argmin()
        cheapest[k] = costs.min() + prices.get(device_type, prices["cuda"])
    groups = []
    k = 0
    while k < len(values):
        groups.append(range(int(starts[k]), int(starts[end[k]])))
        k = end[k]
    return groups


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Return an array's values on the device, on their way from pinned memory: the host does not wait."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Taken(torch.autograd.Function):
    """Rows of a tensor, each at most once: their gradients are copied back, where `index_select` adds them up in no fixed order."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor) -> Tensor:
        """Take the rows."""
        ctx.save_for_backward(places)
        ctx.count = len(values)
        return values.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Put gradients where the rows were, and zeros elsewhere."""
        (places,) = ctx.saved_tensors
        return grad.new_zeros(ctx.count, *grad.shape[1:]).index_copy_(0, places, grad), None


class Layout(NamedTuple):
    """Where the tokens of some texts lie once these are padded. Sizes are those of tensors, which compiled code takes for variables."""

    place_T: Tensor  # of every token among B x L
    is_token_BL: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Layout":
        """Lay out texts of so many tokens."""
        is_token = np.arange(max(lengths)) < np.asarray(lengths)[:, None]
        return cls(to_device(is_token.ravel().nonzero()[0], device), to_device(is_token, device))

    def padded(self, of_tokens: Tensor) -> Tensor:
        """Turn `[T, ...]` into `[B, L, ...]`, with zeros for padding."""
        zeros = of_tokens.new_zeros(self.is_token_BL.numel(), *of_tokens.shape[1:])
        return zeros.index_copy(0, self.place_T, of_tokens).unflatten(0, self.is_token_BL.shape)

    def packed(self, of_texts: Tensor) -> Tensor:
        """Turn `[B, L, ...]` into `[T, ...]`, without padding."""
        return Taken.apply(of_texts.flatten(0, 1), self.place_T)


def packs(model: Any, device_type: str) -> bool:
    """Return whether the text tower of a model can read texts end to end, and does so faster."""
    tower = model.text_model
    encoder = encoder_of(tower)
    return (
        device_type in PACKED_ON
        and type(encoder).__name__ in _ENCODERS
        and type(encoder).__module__.startswith("transformers.models.")
        and tower.config._attn_implementation == "sdpa"
        and not getattr(tower.config, "chunk_size_feed_forward", 0)  # it cuts texts of one length
    )


def encoder_of(tower: Any) -> Any:
    """Return the module that holds the layers of a text tower; None if it has no name that is known."""
    return getattr(tower, "encoder", None) or getattr(tower, "transformer", None)


@contextmanager
def end_to_end(tower: Any, lengths: Sequence[int], device: torch.device) -> Iterator[None]:
    """Let the layers of a tower within read texts end to end; it takes and returns `[B, L]`, padded on the right to the longest.

    Args:
        lengths: tokens of every text, at least 1; longest first, else attention takes all texts at one length.
    """
    whole = Layout.of(lengths, device)
    groups = length_groups(lengths, device.type, ATTENTION_TOKENS)
    layouts: tuple[Layout, ...] = (whole,)
    # Compiled layers attend to all texts at one length, as each number of groups would be a graph of its own.
    if len(groups) > 1 and not getattr(tower, COMPILED, False):
        layouts = tuple(Layout.of(lengths[group.start : group.stop], device) for group in groups)
    use_packed_attention()  # a model that is only used was not made trainable
    with _lock:
        _add_hooks(tower)
    token = _packing.set((whole, layouts))
    try:
        yield
    finally:
        _packing.reset(token)


def _add_hooks(tower: Any) -> None:
    """Let a tower and its encoder ask whether texts lie end to end; they stay, as several threads may use one model."""
    encoder: nn.Module = encoder_of(tower)
    if _enter in encoder._forward_pre_hooks.values():
        return
    encoder.register_forward_pre_hook(_enter, with_kwargs=True)
    encoder.register_forward_hook(_leave)
    tower.register_forward_hook(_lay_out_states)


def _enter(encoder: nn.Module, given: Any, named: dict[str, Any]) -> Any:
    """Take the padding out of the states that the layers are given, and tell their attention of it."""
    packing = _packing.get()
    if packing is None:
        return given, named
    whole, layouts = packing
    named = named | {"packing": layouts}
    name = next((name for name in ("inputs_embeds", "hidden_states") if name in named), None)
    if name is None:
        return (whole.packed(given[0])[None], *given[1:]), named
    return given, named | {name: whole.packed(named[name])[None]}


def _leave(encoder: nn.Module, given: Any, output: Any) -> Any:
    packing = _packing.get()
    if packing is not None:
        output["last_hidden_state"] = packing[0].padded(output["last_hidden_state"][0])
    return output


def _lay_out_states(tower: nn.Module, given: Any, output: Any) -> Any:
    """Pad the states between the layers, which transformers recorded as they were computed."""
    packing = _packing.get()
    if packing is None or not output.get("hidden_states"):
        return output
    whole, _ = packing
    laid_out = whole.is_token_BL.shape
    states = output["hidden_states"]
    output["hidden_states"] = tuple(s if s.shape[:2] == laid_out else whole.padded(s[0]) for s in states)
    return output


def use_packed_attention() -> None:
    """Let the towers of transformers attend text by text where texts lie end to end."""
    AttentionInterface.register("sdpa", attention)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: tuple[Layout, ...] | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """Return what transformers' own does, `[B, L, H, D]`, of queries, keys and values `[B, H, L, D]`; in a packing B is 1 and L is T."""
    if packing is None:
        return short_attention.attention(module, query, key, value, attention_mask, **named)
    texts = 0
    tokens = 0
    found = []
    for layout in packing:
        count, longest = layout.is_token_BL.shape
        mine = slice(tokens, tokens + len(layout.place_T))
        # [1, H, T, D] -> [T, H, D] -> [B, H, L, D]
        queries = layout.padded(query[0].transpose(0, 1)[mine]).transpose(1, 2)
        keys = layout.padded(key[0].transpose(0, 1)[mine]).transpose(1, 2)
        values = layout.padded(value[0].transpose(0, 1)[mine]).transpose(1, 2)
        seen = None if attention_mask is None else attention_mask[texts : texts + count, :, :longest, :longest]
        attended, _ = short_attention.attention(module, queries, keys, values, seen, **named)
        found.append(layout.packed(attended))
        texts += count
        tokens += len(layout.place_T)
    return torch.cat(found)[None], None
