"""Exact losses of the global batch, in tiles.

Every rank holds its n rows against all N columns, one tile of rows at a time, and computes the gradient of its rows
in the forward pass: memory is O(tile x N), no N x N matrix exists at any moment, and the backward pass only multiplies.
Returned losses are the mean over the global batch, the same on all ranks; gradients are multiplied by the number of
ranks because DDP and FSDP average them. After that average every parameter's gradient, the temperature's included,
is the one a single process with the whole batch would compute.

Shape letters: n this rank's rows, N the global batch, T rows of a tile, E embedding width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mm_utils import distributed
from mm_utils.model.row_noise import gumbel_noise, pair_keys

Directions = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Image to text: this rank's images and all texts. Text to image: this rank's texts and all images."""

TILE_ELEMENTS = 2**24  # 64 MiB of fp32 logits; measured time is flat from 128 to 4096 rows


@dataclass
class GlobalBatch:
    """The part of one step's batch that all ranks know, without gradient.

    Attributes:
        image_NE, text_NE: the unit embeddings of the global batch.
        ids_N2: the image id and caption id of every pair; pairs that share either are no negatives of each other.
        sizes: the number of rows of each rank.
        offset: the place of this rank's first row.
        shared_ids: True if some pairs share an id; if not, no time is spent on masking them.
    """

    image_NE: Tensor
    text_NE: Tensor
    ids_N2: Tensor
    sizes: list[int]
    offset: int
    shared_ids: bool


def gather_batch(image_nE: Tensor, text_nE: Tensor, ids_n2: Tensor) -> GlobalBatch:
    """Gather the embeddings of all ranks, in at least fp32: one gather for both towers, one for the ids."""
    sizes = distributed.gather_sizes(len(image_nE), image_nE.device)
    wide = torch.promote_types(image_nE.dtype, torch.float32)
    both = distributed.gather(torch.stack([image_nE.to(wide), text_nE.to(wide)], 1), sizes)
    ids_N2 = distributed.gather(ids_n2, sizes)
    image_NE, text_NE = both.unbind(1)
    return GlobalBatch(image_NE, text_NE, ids_N2, sizes, sum(sizes[: distributed.rank()]), has_shared_ids(ids_N2))


def has_shared_ids(ids_N2: Tensor) -> bool:
    """Return whether some pairs share an image or a caption."""
    ordered_N2 = ids_N2.sort(0).values
    return bool((ordered_N2[1:] == ordered_N2[:-1]).any())


def same_pair(ids_n2: Tensor, ids_N2: Tensor) -> Tensor:
    """Return the `[n, N]` mask of pairs that share the image or the caption."""
    return (ids_n2[:, None] == ids_N2).any(-1)


def info_nce(image_nE: Tensor, text_nE: Tensor, scale: Tensor, batch: GlobalBatch, tile: int | None = None) -> Tensor:
    """Return InfoNCE in both directions (CLIP, arXiv 2103.00020), a scalar.

    loss = 1/2N sum_i [-log softmax_j(scale a_i b_j)_i - log softmax_j(scale b_i a_j)_i], where j runs over i itself and
    its negatives.

    Args:
        image_nE, text_nE: this rank's unit embeddings, with gradient.
        scale: the inverse temperature, a scalar (already exponentiated).
        batch: the result of `gather_batch` for the same embeddings.
        tile: rows per tile; the result does not depend on it.
    """
    return _AtEmbeddings.apply(_info_nce, batch, tile, image_nE, text_nE, scale)


def sigmoid_loss(
    image_nE: Tensor, text_nE: Tensor, scale: Tensor, bias: Tensor, batch: GlobalBatch, tile: int | None = None
) -> Tensor:
    """Return the pairwise sigmoid loss (SigLIP, arXiv 2303.15343), a scalar.

    loss = 1/N sum_i [softplus(-z_ii) + sum_j softplus(z_ij)], z_ij = scale a_i b_j + bias, where j runs over the
    negatives of i. Arguments are those of `info_nce`, and `bias`, the scalar added to every logit.
    """
    return _AtEmbeddings.apply(_sigmoid, batch, tile, image_nE, text_nE, scale, bias)


def distilled_info_nce(
    image_nE: Tensor,
    text_nE: Tensor,
    scale: Tensor,
    teacher_image_nE: Tensor,
    teacher_text_nE: Tensor,
    batch: GlobalBatch,
    tile: int | None = None,
    teacher_scale: float | None = None,
) -> Tensor:
    """Return InfoNCE towards a teacher's soft targets (ALBEF, arXiv 2107.07651), a scalar.

    loss = -1/2N sum_i [sum_j q_ij log softmax_j(scale a_i b_j) + the same of b_i a_j], q_ij = softmax_j of the teacher's
    scale a'_i b'_j, where j runs over i itself and its negatives. No gradient goes through the teacher, nor by `scale`
    through its softmax. Arguments are those of `info_nce`, the teacher's unit embeddings of the same rows, and its own
    inverse temperature, if it is not `scale`.
    """
    wide = torch.stack([teacher_image_nE, teacher_text_nE], 1).detach().to(batch.image_NE.dtype)
    teacher_NE = distributed.gather(wide, batch.sizes)
    given = scale.detach().to(wide.dtype) if teacher_scale is None else teacher_scale
    mine = given * teacher_NE[batch.offset : batch.offset + len(image_nE)]
    teachers = ((mine[:, 0], teacher_NE[:, 1]), (mine[:, 1], teacher_NE[:, 0]))
    return _AtEmbeddings.apply(partial(_distilled, teachers), batch, tile, image_nE, text_nE, scale)


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Turn autocast and TF32 off: at a scale of 100, ten bits of mantissa leave an error of a tenth of a logit."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


class _AtEmbeddings(torch.autograd.Function):
    """A loss whose forward pass computes its gradient at this rank's embeddings and at its scalars."""

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
        total, mine = max(1, len(batch.image_NE)), slice(batch.offset, batch.offset + len(image_nE))
        directions = ((batch.image_NE[mine], batch.text_NE), (batch.text_NE[mine], batch.image_NE))
        with _full_precision(image_nE.device):
            wide = [scalar.to(batch.image_NE.dtype) for scalar in scalars]
            loss, gradients = compute(directions, *wide, batch, total, tile or max(1, TILE_ELEMENTS // total))
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [value.dtype for value in (image_nE, text_nE, *scalars)]
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        upstream = upstream * distributed.world_size()  # in fp32, before the cast: safe under an fp16 loss scaler
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, None, *((gradient * upstream).to(dtype) for gradient, dtype in pairs)


def _info_nce(
    directions: Directions, scale: Tensor, batch: GlobalBatch, total: int, tile: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    lse_n2 = batch.image_NE.new_empty(len(directions[0][0]), 2)
    nll_n2 = torch.empty_like(lse_n2)
    for direction, (rows_nE, columns_NE) in enumerate(directions):
        for part, logits_TN, diagonal in _tiles(scale * rows_nE, columns_NE, batch, tile):
            positive = logits_TN[diagonal]
            logits_TN[diagonal] = -torch.inf
            # softplus(lse over the negatives - positive) loses no digits near convergence; lse - positive does. Its
            # usual threshold of 20 would lose 2e-9, which gradient checks in fp64 see.
            nll_n2[part, direction] = softplus(logits_TN.logsumexp(1) - positive, threshold=40)
            lse_n2[part, direction] = positive + nll_n2[part, direction]
    shared_N3 = distributed.gather(torch.cat([lse_n2, nll_n2.sum(1, keepdim=True)], 1), batch.sizes)
    diagonal_grad_n = torch.expm1(-nll_n2).sum(1)  # softmax - 1, of both directions
    grads = []
    for direction, (rows_nE, columns_NE) in enumerate(directions):
        grad_nE = torch.empty_like(rows_nE)
        for part, logits_TN, diagonal in _tiles(scale * rows_nE, columns_NE, batch, tile):
            weight_TN = (logits_TN - lse_n2[part, direction, None]).exp_()
            weight_TN += logits_TN.sub_(shared_N3[:, 1 - direction]).exp_()
            weight_TN[diagonal] = diagonal_grad_n[part]
            torch.mm(weight_TN, columns_NE, out=grad_nE[part])
        grads.append(grad_nE.div_(2 * total))
    scale_grad = (grads[0] * directions[0][0]).sum()  # sum_ij weight_ij <a_i, b_j> over this rank's rows
    loss = shared_N3[:, 2].sum() / (2 * total)
    return loss, (grads[0].mul_(scale), grads[1].mul_(scale), scale_grad)


def _distilled(
    teachers: Directions, directions: Directions, scale: Tensor, batch: GlobalBatch, total: int, tile: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    def tiles(direction: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield slices of rows, their logits, and the teacher's logits."""
        rows_nE, columns_NE = directions[direction]
        own, given = _tiles(scale * rows_nE, columns_NE, batch, tile), _tiles(*teachers[direction], batch, tile)
        for (part, logits_TN, _), (_, teacher_TN, _) in zip(own, given, strict=True):
            yield part, logits_TN, teacher_TN

    lse_n2 = batch.image_NE.new_empty(len(directions[0][0]), 2)
    teacher_lse_n2, loss_n2 = torch.empty_like(lse_n2), torch.empty_like(lse_n2)
    for direction in range(2):
        for part, logits_TN, teacher_TN in tiles(direction):
            lse_n2[part, direction], teacher_lse_n2[part, direction] = logits_TN.logsumexp(1), teacher_TN.logsumexp(1)
            target_TN = (teacher_TN - teacher_lse_n2[part, direction, None]).exp_()
            expected = target_TN.mul_(logits_TN.masked_fill_(logits_TN == -torch.inf, 0.0)).sum(1)
            loss_n2[part, direction] = lse_n2[part, direction] - expected
    shared_N5 = distributed.gather(torch.cat([lse_n2, teacher_lse_n2, loss_n2.sum(1, keepdim=True)], 1), batch.sizes)
    grads = []
    for direction, (rows_nE, columns_NE) in enumerate(directions):
        grad_nE = torch.empty_like(rows_nE)
        for part, logits_TN, teacher_TN in tiles(direction):
            weight_TN = (logits_TN - lse_n2[part, direction, None]).exp_() - (
                teacher_TN - teacher_lse_n2[part, direction, None]
            ).exp_()
            weight_TN += logits_TN.sub_(shared_N5[:, 1 - direction]).exp_()
            weight_TN -= teacher_TN.sub_(shared_N5[:, 3 - direction]).exp_()
            torch.mm(weight_TN, columns_NE, out=grad_nE[part])
        grads.append(grad_nE.div_(2 * total))
    scale_grad = (grads[0] * directions[0][0]).sum()
    loss = shared_N5[:, 4].sum() / (2 * total)
    return loss, (grads[0].mul_(scale), grads[1].mul_(scale), scale_grad)


def _sigmoid(
    directions: Directions, scale: Tensor, bias: Tensor, batch: GlobalBatch, total: int, tile: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    loss, bias_grad = batch.image_NE.new_zeros(2)  # of this rank's images against all texts: every pair once
    grads = []
    for direction, (rows_nE, columns_NE) in enumerate(directions):
        grad_nE = torch.empty_like(rows_nE)
        for part, logits_TN, diagonal in _tiles(scale * rows_nE, columns_NE, batch, tile):
            logits_TN += bias
            negated = -logits_TN[diagonal]
            weight_TN = logits_TN.sigmoid()
            weight_TN[diagonal] = -negated.sigmoid()
            torch.mm(weight_TN, columns_NE, out=grad_nE[part])
            if direction == 0:
                logits_TN[diagonal] = negated
                loss = loss + softplus(logits_TN, threshold=40).sum()
                bias_grad = bias_grad + weight_TN.sum()
        grads.append(grad_nE.div_(total))
    scale_grad = (grads[0] * directions[0][0]).sum()
    loss = distributed.sum_over_ranks(loss) / total
    return loss, (grads[0].mul_(scale), grads[1].mul_(scale), scale_grad, bias_grad / total)


def _tiles(rows_nE: Tensor, columns_NE: Tensor, batch: GlobalBatch, tile: int) -> Any:
    """Yield slices of rows, their logits with other positives at -inf, and the index of their diagonal."""
    for low in range(0, len(rows_nE), tile):
        part = slice(low, min(low + tile, len(rows_nE)))
        logits_TN = rows_nE[part] @ columns_NE.T
        row = torch.arange(len(logits_TN), device=logits_TN.device)
        diagonal = (row, batch.offset + low + row)
        if batch.shared_ids:
            same = same_pair(batch.ids_N2[diagonal[1]], batch.ids_N2)
            same[diagonal] = False
            logits_TN.masked_fill_(same, -torch.inf)
        yield part, logits_TN, diagonal


def hard_negatives(
    query_nE: Tensor, keys_NE: Tensor, scale: Tensor, batch: GlobalBatch, key: int, tile: int | None = None
) -> Tensor:
    """Draw one negative for each of this rank's rows: its global index, -1 if the batch has none, int64 `[n]`.

    Row i's negative j is drawn with probability proportional to exp(scale <q_i, k_j>) (ALBEF, arXiv 2107.07651), in log
    space by the Gumbel-max trick, so nothing can underflow; pairs that share an image or a caption are never drawn. The
    noise is a hash of `key` and of the ids of both pairs: the draw depends neither on the order of the batch nor on how many
    ranks hold it.
    """
    total = len(keys_NE)
    tile = tile or max(1, TILE_ELEMENTS // max(1, total))
    pair_N = pair_keys(batch.ids_N2)
    chosen = []
    for low in range(0, len(query_nE), tile):
        rows = torch.arange(low, min(low + tile, len(query_nE)), device=query_nE.device) + batch.offset
        with _full_precision(query_nE.device):
            logits_TN = scale.float() * query_nE[low : low + tile].float() @ keys_NE.float().T
        logits_TN = logits_TN + gumbel_noise(pair_N[rows], pair_N, key)
        logits_TN = logits_TN.masked_fill(same_pair(batch.ids_N2[rows], batch.ids_N2), -torch.inf)
        best, index = logits_TN.max(1)
        chosen.append(index.masked_fill(best == -torch.inf, -1))
    return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.long, device=query_nE.device)
