"""Exact losses of the global batch, in tiles.

Every rank holds its n rows against all N columns, one tile of T rows at a time, and computes the gradient of its rows in the
forward pass: memory is that of a tile, no N x N matrix exists at any moment, and the backward pass only multiplies. A first
sweep over the tiles keeps the log-sum-exp of every row, a second one computes the gradient; where all is one tile, InfoNCE keeps it.
One process computes each logit once a sweep, for its row and its column; several compute it for each direction.
Returned losses are the mean over the global batch, the same on all ranks; gradients are multiplied by the number of
ranks because DDP and FSDP average them. After that average every parameter's gradient, the temperature's included,
is the one a single process with the whole batch would compute.

Shape letters: n this rank's rows, N the global batch, T rows of a tile, E embedding width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mm_utils import distributed

Directions = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Image to text: this rank's images and all texts. Text to image: this rank's texts and all images."""

TILE_ELEMENTS = {"cpu": 2**24, "cuda": 2**26}
"""Logits in a tile: 64 MiB of fp32 on a CPU (time is flat from 128 to 4096 rows); 256 MiB on a GPU, which waits for launches."""


@dataclass
class GlobalBatch:
    """The part of one step's batch that all ranks know, without gradient."""

    image_NE: Tensor  # unit embeddings of the global batch
    text_NE: Tensor
    ids_N2: Tensor  # image id and caption id of every pair; pairs that share either are not negatives of each other
    sizes: list[int]  # rows of each rank
    offset: int  # place of this rank's first row
    shared_ids: bool  # whether some pairs share an id; if not, no time is spent on masking them
    longest: int = 0  # tokens of the longest text of all ranks; 0 if not known


def call_roll(ids_n2: Tensor, longest: int = 0) -> GlobalBatch:
    """Return what all ranks' rows are, without embeddings yet, from the ids and the longest text of each.

    Called on all ranks before the towers run. Hosts wait here for each other and for their devices, which have nothing to do then.
    """
    sizes, widths = zip(*distributed.gather_on_hosts([len(ids_n2), longest], ids_n2.device), strict=True)
    ids_N2 = distributed.gather(ids_n2, list(sizes))
    # each column is sorted by itself: equal ids become neighbours, and rows need not stay together
    ordered_N2 = ids_N2.sort(0).values
    shared = bool((ordered_N2[1:] == ordered_N2[:-1]).any())
    none = torch.empty(0, device=ids_n2.device)
    return GlobalBatch(none, none, ids_N2, list(sizes), sum(sizes[: distributed.rank()]), shared, max(widths))


def gather_batch(image_nE: Tensor, text_nE: Tensor, ids_n2: Tensor, roll: GlobalBatch | None = None) -> GlobalBatch:
    """Gather all ranks' embeddings, in at least fp32, and ids, perhaps of a roll call."""
    roll = roll or call_roll(ids_n2)
    wide = torch.promote_types(image_nE.dtype, torch.float32)
    # [n, 2, E]: one collective for both sides
    image_NE, text_NE = distributed.gather(torch.stack([image_nE.to(wide), text_nE.to(wide)], 1), roll.sizes).unbind(1)
    return replace(roll, image_NE=image_NE, text_NE=text_NE)


def same_pair(ids_n2: Tensor, ids_N2: Tensor) -> Tensor:
    """Return the `[n, N]` mask of pairs that share the image or the caption."""
    return (ids_n2[:, None] == ids_N2).any(-1)  # [n, 1, 2] against [N, 2]


def info_nce(image_nE: Tensor, text_nE: Tensor, scale: Tensor, batch: GlobalBatch, tile: int | None = None) -> Tensor:
    """Return InfoNCE in both directions (CLIP, arXiv 2103.00020), a scalar.

    loss = 1/2N sum_i [-log softmax_j(scale a_i b_j)_i - log softmax_j(scale b_i a_j)_i], where j runs over i itself and
    its negatives.

    Args:
        image_nE, text_nE: this rank's unit embeddings, with gradient.
        scale: the inverse temperature, a scalar (already exponentiated).
        batch: the result of `gather_batch` for the same embeddings.
        tile: rows of a tile; the result does not depend on it.
    """
    return AtEmbeddings.apply(_info_nce, batch, tile, image_nE, text_nE, scale)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Turn autocast and TF32 off: at a scale of 100, they leave an error of 0.1 in a logit."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


class AtEmbeddings(torch.autograd.Function):
    """A loss whose forward pass computes its gradient at own embeddings and scalars."""

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable,
        batch: GlobalBatch,
        tile: int | None,
        image_nE: Tensor,
        text_nE: Tensor,
        *scalars: Tensor,
    ) -> Tensor:
        """Return the loss that `compute` returns first; it returns the gradients too."""
        total = max(1, len(batch.image_NE))
        mine = slice(batch.offset, batch.offset + len(image_nE))
        # own rows as they were gathered: in at least fp32, whatever the towers computed in
        directions = ((batch.image_NE[mine], batch.text_NE), (batch.text_NE[mine], batch.image_NE))
        with full_precision(image_nE.device):
            wide = [scalar.to(batch.image_NE.dtype) for scalar in scalars]
            loss, gradients = compute(directions, *wide, batch, total, tile or tile_rows(total, image_nE.device))
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [value.dtype for value in (image_nE, text_nE, *scalars)]
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, times that of the loss."""
        upstream = upstream * distributed.world_size()  # in fp32, before the cast: safe under an fp16 loss scaler
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        # None for compute, batch and tile
        return None, None, None, *((gradient * upstream).to(dtype) for gradient, dtype in pairs)


def _info_nce(
    directions: Directions, scale: Tensor, batch: GlobalBatch, total: int, tile: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    if distributed.world_size() == 1:
        return _info_nce_of_one_process(*directions[0], scale, batch, total, tile)
    lse_n2 = batch.image_NE.new_empty(len(directions[0][0]), 2)
    nll_n2 = torch.empty_like(lse_n2)  # negative log likelihood of each row, in each direction
    is_one = tile >= len(directions[0][0])
    kept: list[tuple[Tensor, tuple[Tensor, Tensor]]] = []  # the logits, where a direction is one tile
    for direction, (rows_nE, columns_NE) in enumerate(directions):
        scaled_nE = scale * rows_nE
        for part in slices(len(rows_nE), tile):
            logits_TN, own = logits_of(scaled_nE, columns_NE, batch, part)
            positive_T = logits_TN[own]
            # exp(-inf) = 0 leaves the negatives alone; a row without any has the loss softplus(-inf) = 0
            logits_TN[own] = -torch.inf
            # softplus(lse over the negatives - positive) loses no digits near convergence; lse - positive does. Its
            # usual threshold of 20 would lose 2e-9, which gradient checks in fp64 see.
            nll_n2[part, direction] = softplus(logits_TN.logsumexp(1) - positive_T, threshold=40)
            lse_n2[part, direction] = positive_T + nll_n2[part, direction]
            if is_one:
                kept.append((logits_TN, own))
    # [N, 3]: the log-sum-exp of either direction, and the loss of both
    shared_N3 = distributed.gather(torch.cat([lse_n2, nll_n2.sum(1, keepdim=True)], 1), batch.sizes)
    # expm1 keeps the digits that softmax - 1 would lose where a loss is small
    diagonal_grad_n = torch.expm1(-nll_n2).sum(1)  # softmax - 1, of both directions
    grads = []
    for direction, (rows_nE, columns_NE) in enumerate(directions):
        scaled_nE = scale * rows_nE
        grad_nE = torch.empty_like(rows_nE)
        for part in slices(len(rows_nE), tile):
            logits_TN, own = kept.pop(0) if is_one else logits_of(scaled_nE, columns_NE, batch, part)
            weight_TN = (logits_TN - lse_n2[part, direction, None]).exp_()
            # the same pair seen from its column, whose log-sum-exp another rank may have computed
            weight_TN += logits_TN.sub_(shared_N3[:, 1 - direction]).exp_()
            weight_TN[own] = diagonal_grad_n[part]
            torch.mm(weight_TN, columns_NE, out=grad_nE[part])
        grads.append(grad_nE.div_(2 * total))
    scale_grad = (grads[0] * directions[0][0]).sum()  # sum_ij weight_ij <a_i, b_j> over this rank's rows
    loss = shared_N3[:, 2].sum() / (2 * total)
    return loss, (grads[0].mul_(scale), grads[1].mul_(scale), scale_grad)


def _info_nce_of_one_process(
    image_NE: Tensor, text_NE: Tensor, scale: Tensor, batch: GlobalBatch, total: int, tile: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the same of a whole batch, whose texts' logits are the columns of its images': four products in place of six."""
    count = len(image_NE)  # `total` is at least 1
    scaled_NE = scale * image_NE
    positive_N = image_NE.new_empty(count)
    # log-sum-exp over the negatives of each image, and of each text
    negatives_N2 = image_NE.new_full((count, 2), -torch.inf)
    whole: tuple[Tensor, tuple[Tensor, Tensor]] | None = None  # the logits, where all are one tile: three products
    for part in slices(count, tile):
        logits_TN, own = logits_of(scaled_NE, text_NE, batch, part)
        positive_N[part] = logits_TN[own]
        logits_TN[own] = -torch.inf
        negatives_N2[part, 0] = logits_TN.logsumexp(1)
        negatives_N2[:, 1] = torch.logaddexp(negatives_N2[:, 1], logits_TN.logsumexp(0))
        whole = (logits_TN, own) if tile >= count else None
    nll_N2 = softplus(negatives_N2 - positive_N[:, None], threshold=40)
    lse_N2 = positive_N[:, None] + nll_N2
    diagonal_grad_N = torch.expm1(-nll_N2).sum(1)
    image_grad_NE = torch.empty_like(image_NE)
    text_grad_NE = torch.zeros_like(text_NE)
    for part in slices(count, tile):
        logits_TN, own = whole or logits_of(scaled_NE, text_NE, batch, part)
        weight_TN = (logits_TN - lse_N2[part, :1]).exp_()
        weight_TN += logits_TN.sub_(lse_N2[:, 1]).exp_()
        weight_TN[own] = diagonal_grad_N[part]
        torch.mm(weight_TN, text_NE, out=image_grad_NE[part])
        text_grad_NE.addmm_(weight_TN.T, image_NE[part])
    image_grad_NE /= 2 * total
    text_grad_NE /= 2 * total
    scale_grad = (image_grad_NE * image_NE).sum()
    loss = nll_N2.sum() / (2 * total)
    return loss, (image_grad_NE.mul_(scale), text_grad_NE.mul_(scale), scale_grad)


def tile_rows(columns: int, device: torch.device) -> int:
    """Return how many rows of so many logits are computed at a time."""
    # on a CPU 2**24 logits: 4,096 rows of 4,096 columns
    return TILE_ELEMENTS.get(device.type, TILE_ELEMENTS["cuda"]) // max(1, columns) or 1


def slices(count: int, most: int) -> list[slice]:
    """Cut a range of `count` into slices of `most`."""
    return [slice(low, min(low + most, count)) for low in range(0, count, most)]


def logits_of(
    rows_nE: Tensor, columns_NE: Tensor, batch: GlobalBatch, part: slice
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return a tile of logits `[T, N]`, other positives at -inf, and the index of the own pairs."""
    logits_TN = rows_nE[part] @ columns_NE.T
    first = batch.offset + part.start  # of the rows in the global batch
    last = batch.offset + part.stop
    row = torch.arange(last - first, device=logits_TN.device)
    own = (row, row + first)
    if batch.shared_ids:
        same = same_pair(batch.ids_N2[first:last], batch.ids_N2)
        same[own] = False
        logits_TN.masked_fill_(same, -torch.inf)
    return logits_TN, own
