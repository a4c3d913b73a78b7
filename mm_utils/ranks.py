"""The only module that asks what share of the machines this process has, and the collectives that the losses need.

Shape letters: n this rank's rows, N all ranks' rows.
"""

import os
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
BUCKET_ELEMENTS = 2**24  # 64 MiB of fp32: large enough for the network, small beside the weights


def world_size() -> int:
    """How many processes train together; 1 when `torch.distributed` is not set up."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's place among them, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_here() -> int:
    """How many processes were launched together on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores_per_process() -> int:
    """This process's share of the cores."""
    return available_cores() // processes_here()


def share(count: int, part: int, parts: int) -> range:
    """The `part`-th of `parts` contiguous shares of `count` rows; sizes differ by at most one."""
    return range(count * part // parts, count * (part + 1) // parts)


def gather_sizes(count: int, device: torch.device) -> list[int]:
    """How many rows every rank holds."""
    if world_size() == 1:
        return [count]
    sizes = torch.empty(world_size(), dtype=torch.long, device=device)
    _all_gather(sizes, torch.tensor([count], device=device))
    return sizes.tolist()


def gather(rows: Tensor, sizes: list[int]) -> Tensor:
    """`[n, ...]` on each rank -> `[N, ...]` on all, in rank order, without gradient. `sizes` from `gather_sizes`."""
    rows = rows.detach()
    if len(sizes) == 1:
        return rows
    most = max(sizes)
    if len(rows) < most:
        rows = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
    everything = rows.new_empty(len(sizes) * most, *rows.shape[1:])
    _all_gather(everything, rows.contiguous())
    if min(sizes) == most:
        return everything
    return torch.cat([part[:size] for part, size in zip(everything.split(most), sizes, strict=True)])


def gather_ragged(rows: Tensor, sizes: list[int], pad: int = 0) -> Tensor:
    """As `gather`, for `[n, L]` rows whose L differs between ranks; shorter ones are padded with `pad`."""
    if len(sizes) == 1:
        return rows.detach()
    longest = max(gather_sizes(rows.shape[1], rows.device))
    return gather(torch.nn.functional.pad(rows, (0, longest - rows.shape[1]), value=pad), sizes)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Element-wise sum over the ranks, without gradient."""
    values = values.detach().clone()
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def any_rank(here: bool, device: torch.device) -> bool:
    """Whether it is so on any rank."""
    return bool(sum_over_ranks(torch.tensor([here], dtype=torch.int, device=device)))


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace every gradient by its mean over the ranks, as DDP does; a missing one counts as zero."""
    if world_size() == 1:
        return
    gradients: dict[tuple, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.setdefault((parameter.dtype, parameter.device), []).append(parameter.grad)
    for alike in gradients.values():
        for bucket in _buckets(alike):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat)
            flat /= world_size()
            for gradient, mean in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
                gradient.copy_(mean.view_as(gradient))


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors, up to `BUCKET_ELEMENTS` together."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(map(Tensor.numel, bucket)) + tensor.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
