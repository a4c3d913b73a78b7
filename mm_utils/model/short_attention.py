"""Attention over short sequences on a GPU: one program holds all tokens of one head, forward and backward.

Captions have 13 to 40 tokens and a ViT-B/32 has 50 patches. Kernels for long sequences walk over tiles of 64 to 128 keys, and
keep what they need to come back; here scores fit into registers, so queries, keys and values are read once and scores are
computed again in the backward pass. Products are summed up and the softmax is taken in fp32.
"""

# mypy: disable-error-code="no-untyped-def"
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

try:
    import triton
    import triton.language as tl
except ImportError:  # a machine without a GPU
    triton = None

MOST_TOKENS = 64


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    """Return what transformers' own does, `[B, L, H, D]`, of queries, keys and values `[B, H, L, D]`."""
    if not suits(query, key, value, attention_mask, named):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **named)
    causal = named.get("is_causal")
    scale = named.get("scaling")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    causal = bool(causal) and attention_mask is None
    scale = query.shape[3] ** -0.5 if scale is None else scale
    query = query.transpose(1, 2)
    key = key.transpose(1, 2)
    value = value.transpose(1, 2)
    return ShortAttention.apply(query, key, value, attention_mask, causal, scale), None


def suits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, named: dict[str, Any]) -> bool:
    """Return whether these are few tokens in half precision on a GPU, with a mask of booleans for all heads or none, and no dropout."""
    return (
        triton is not None
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and query.shape == key.shape == value.shape
        and query.shape[2] <= MOST_TOKENS
        and query.shape[3] in (16, 32, 64, 128)
        and (mask is None or (mask.dtype == torch.bool and mask.shape[1] == 1))
        and not named.get("dropout")
        and all(named.get(name) is None for name in ("position_bias", "softcap"))
    )


class ShortAttention(torch.autograd.Function):
    """softmax(scale Q K') V of tensors `[B, L, H, D]`; a query that may see no key gets zeros."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        """Attend; the inputs are kept, the weights are not."""
        batch, length = query.shape[:2]
        query = query.contiguous()
        key = key.contiguous()
        value = value.contiguous()
        mask = None if mask is None else mask.expand(batch, 1, length, length)
        out = torch.empty_like(query)
        _launch(_forward_kernel, (query, key, value, out), mask, causal, scale)
        ctx.save_for_backward(query, key, value, mask)
        ctx.causal = causal
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the weights again, and from them three gradients."""
        query, key, value, mask = ctx.saved_tensors
        of_query = torch.empty_like(query)
        of_key = torch.empty_like(key)
        of_value = torch.empty_like(value)
        given = (query, key, value, grad.contiguous(), of_query, of_key, of_value)
        _launch(_backward_kernel, given, mask, ctx.causal, ctx.scale)
        return of_query, of_key, of_value, None, None, None


def _launch(kernel: Any, tensors: tuple[Tensor, ...], mask: Tensor | None, causal: bool, scale: float) -> None:
    """Start one program for each sequence and head; all but the mask are `[B, L, H, D]`, contiguous."""
    batch, length, heads, dim = tensors[0].shape
    block = 16 if length <= 16 else 32 if length <= 32 else 64
    steps = (0, 0, 0) if mask is None else (mask.stride(0), mask.stride(2), mask.stride(3))
    # Constants, so that addresses are known to be multiples of 16 also in compiled code.
    constants = {"SCALE": scale, "CAUSAL": causal, "MASKED": mask is not None, "HEADS": heads, "DIM": dim}
    kernel[(batch * heads,)](
        *tensors, tensors[0] if mask is None else mask, length, *steps, **constants, BLOCK=block, num_warps=block // 16
    )


if triton is not None:

    @triton.jit
    def _places(length, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
        """The program's part of a tensor `[B, L, H, D]`, and which of its rows there are."""
        batch = (tl.program_id(0) // HEADS).to(tl.int64)
        head = tl.program_id(0) % HEADS
        rows = tl.arange(0, BLOCK)
        columns = tl.arange(0, DIM)
        places = batch * length * HEADS * DIM + head * DIM + rows[:, None] * HEADS * DIM + columns[None, :]
        return places, rows[:, None] < length

    @triton.jit
    def _weights(
        query, key, mask, length, along_batch, along_query, along_key,
        SCALE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """What the softmax of the scores sums up, fp32 `[queries, keys]`, and the sums."""
        rows = tl.arange(0, BLOCK)
        seen = (rows[:, None] < length) & (rows[None, :] < length)
        if CAUSAL:
            seen = seen & (rows[:, None] >= rows[None, :])
        if MASKED:
            batch = (tl.program_id(0) // HEADS).to(tl.int64)
            places = batch * along_batch + rows[:, None] * along_query + rows[None, :] * along_key
            seen = seen & (tl.load(mask + places, mask=seen, other=0) != 0)
        # not -inf: of a query that sees nothing, -inf - -inf would be NaN
        scores = tl.where(seen, tl.dot(query, tl.trans(key)) * SCALE, -1e30)
        weights = tl.where(seen, tl.exp(scores - tl.max(scores, 1)[:, None]), 0.0)
        return weights, tl.maximum(tl.sum(weights, 1), 1e-30)[:, None]

    @triton.jit
    def _forward_kernel(
        query, key, value, out, mask, length, along_batch, along_query, along_key,
        SCALE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
        HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        places, inside = _places(length, HEADS, DIM, BLOCK)
        q = tl.load(query + places, mask=inside, other=0.0)
        k = tl.load(key + places, mask=inside, other=0.0)
        v = tl.load(value + places, mask=inside, other=0.0)
        weights, sums = _weights(
            q, k, mask, length, along_batch, along_query, along_key, SCALE, CAUSAL, MASKED, HEADS, BLOCK
        )
        # Divided afterwards: the largest weight, 1, is exact in half precision.
        tl.store(out + places, (tl.dot(weights.to(v.dtype), v) / sums).to(v.dtype), mask=inside)

    @triton.jit
    def _backward_kernel(
        query, key, value, grad, of_query, of_key, of_value, mask, length, along_batch, along_query, along_key,
        SCALE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
        HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        places, inside = _places(length, HEADS, DIM, BLOCK)
        q = tl.load(query + places, mask=inside, other=0.0)
        k = tl.load(key + places, mask=inside, other=0.0)
        v = tl.load(value + places, mask=inside, other=0.0)
        g = tl.load(grad + places, mask=inside, other=0.0)
        weights, sums = _weights(
            q, k, mask, length, along_batch, along_query, along_key, SCALE, CAUSAL, MASKED, HEADS, BLOCK
        )
        weights = weights / sums
        tl.store(of_value + places, tl.dot(tl.trans(weights.to(g.dtype)), g).to(g.dtype), mask=inside)
        of_weights = tl.dot(g, tl.trans(v))
        # the gradient of a softmax of weights w, of which g are the gradients: w (g - sum of w g)
        of_scores = weights * (of_weights - tl.sum(weights * of_weights, 1)[:, None]) * SCALE
        of_scores = of_scores.to(q.dtype)
        tl.store(of_query + places, tl.dot(of_scores, k).to(q.dtype), mask=inside)
        tl.store(of_key + places, tl.dot(tl.trans(of_scores), q).to(q.dtype), mask=inside)
