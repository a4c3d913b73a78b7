"""The only module that asks what share of the machines this process has, and the collectives that the losses need.

Shape letters: n this rank's rows, N all ranks' rows.
"""

import os
from collections.abc import Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_set_timeout = getattr(dist, "set_timeout", None)  # public since torch 2.15
BUCKET_ELEMENTS = 2**24  # 64 MiB of fp32: large enough for the network, small beside the weights
PATIENCE = 4 * 3600.0  # seconds that processes wait for one that prepares data, draws or writes alone


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


def set_timeout(seconds: float) -> None:
    """From now on, a collective that waits longer than this for another process is an error."""
    if world_size() > 1:
        (_set_timeout or distributed_c10d._set_pg_timeout)(timedelta(seconds=seconds))


def is_lost_connection(error: BaseException) -> bool:
    """Whether the error says no more than that another process did not take part in a collective."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in ("gloo", " by peer", "Broken pipe"))
    )


class Board:
    """Short texts between the processes, beside their collectives, on a connection of their own to the group's store.

    A new group begins with an empty board, and so does every name.

    Any thread may call; every method raises RuntimeError once the store is gone, and waits where its keeper is stopped.
    """

    def __init__(self, name: str) -> None:
        self._group_store = distributed_c10d._get_default_store()  # held, as its keeper serves the others
        self._store = dist.PrefixStore(name, self._group_store.clone())

    def post(self, key: str, text: str) -> None:
        """Write a text, over what was there."""
        self._store.set(key, text)

    def post_once(self, key: str, text: str) -> str:
        """Write a text unless there is one; returns the one that stands."""
        return self._store.compare_set(key, "", text).decode()

    def read(self, *keys: str) -> list[str | None]:
        """The texts, None where there is none."""
        return [self._store.get(key).decode() if self._store.check([key]) else None for key in keys]

    def count(self, key: str, more: int = 0) -> int:
        """Add to a number that begins at 0; returns the sum."""
        return self._store.add(key, more)


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


def max_over_ranks(numbers: list[int], device: torch.device) -> list[int]:
    """The largest of each place over the ranks."""
    if world_size() == 1:
        return numbers
    most = torch.tensor(numbers, dtype=torch.long, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.tolist()


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
