"""Ranks, collectives, sharded tensors: the only module that asks torch for processes.

Shape letters: n this rank's rows, N all ranks' rows.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from tqdm.auto import tqdm

T = TypeVar("T")
TensorLike = TypeVar("TensorLike", bound=Tensor)

_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # public since torch 2.15
BUCKET_ELEMENTS = 2**24  # 64 MiB of fp32: large enough for the network, small beside the weights
RENDEZVOUS_TIMEOUT = 600.0  # seconds from the start of the first process to that of the last
COLLECTIVE_TIMEOUT = 4 * 3600.0  # seconds; one process may prepare data, draw or write while the others wait
_host_groups: list[Any] = []  # of all ranks' hosts, where the default one is of devices


class RunError(Exception):
    """A run that cannot start or continue; the message says what to do."""


class PeerError(RunError):
    """Another process failed, which reports the error itself."""


# -- this process's place ---------------------------------------------------------------------------------------------


def world_size() -> int:
    """Return how many processes train together; 1 when `torch.distributed` is not set up."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def share(count: int, part: int, parts: int) -> range:
    """Return the `part`-th of `parts` contiguous shares of `count` rows, equal up to one."""
    return range(count * part // parts, count * (part + 1) // parts)  # of 10 in 3 parts: 3, 3, 4


# -- collectives ------------------------------------------------------------------------------------------------------


def progress(items: Iterable | None, title: str, **options: Any) -> Any:
    """Return the items with a bar, which the main process shows of what takes longer than two seconds."""
    return tqdm(items, desc=title, leave=False, disable=rank() > 0, delay=2, **options)


def set_timeout(seconds: float) -> None:
    """Make a collective fail when it waits longer than this for another process."""
    if world_size() > 1:
        _set_timeout(timedelta(seconds=seconds), None)


def is_lost_connection(error: BaseException) -> bool:
    """Return whether the error only says that another process did not take part in a collective."""
    return isinstance(error, (dist.DistError, PeerError)) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in ("gloo", " by peer", "Broken pipe"))
    )


def gather_sizes(count: int, device: torch.device) -> list[int]:
    """Return how many rows every rank holds."""
    if world_size() == 1:
        return [count]
    sizes = torch.empty(world_size(), dtype=torch.long, device=device)
    _gather_into(sizes, torch.tensor([count]).to(device, non_blocking=True))
    return sizes.tolist()


def gather(rows: Tensor, sizes: list[int]) -> Tensor:
    """Gather `[n, ...]` of each rank into `[N, ...]` on all, in rank order, without gradient.

    Args:
        rows: this rank's rows.
        sizes: the rows of every rank, from `gather_sizes`.
    """
    rows = rows.detach()
    if len(sizes) == 1:
        return rows
    most = max(sizes)
    if len(rows) < most:
        # a collective takes equally many rows of every rank
        rows = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
    everything = rows.new_empty(len(sizes) * most, *rows.shape[1:])
    _gather_into(everything, rows.contiguous())
    if min(sizes) == most:
        return everything
    return torch.cat([part[:size] for part, size in zip(everything.split(most), sizes, strict=True)])


def gather_ragged(rows: Tensor, sizes: list[int], longest: int = 0) -> Tensor:
    """Gather `[n, ..., L]` rows whose L differs between ranks; shorter rows are padded with 0.

    If no rank's L exceeds `longest`, give it: hosts need not wait to know.
    """
    if len(sizes) == 1:
        return rows.detach()
    longest = longest or max(gather_sizes(rows.shape[-1], rows.device))
    return gather(torch.nn.functional.pad(rows, (0, longest - rows.shape[-1])), sizes)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the element-wise sum over the ranks, without gradient."""
    values = values.detach().clone()
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def max_over_ranks(numbers: list[int], device: torch.device) -> list[int]:
    """Return the element-wise maximum over the ranks."""
    if world_size() == 1:
        return numbers
    most = torch.tensor(numbers, dtype=torch.long, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.tolist()


def any_rank(here: bool, device: torch.device) -> bool:
    """Return whether `here` is true on any rank."""
    return here if world_size() == 1 else any(max_over_ranks([int(here)], device))


def gather_on_hosts(numbers: list[int], device: torch.device) -> list[list[int]]:
    """Return the numbers of every rank; hosts wait for each other, not for what their devices still compute."""
    if world_size() == 1:
        return [numbers]
    if device.type != "cpu" and not _host_groups:  # NCCL knows of devices alone
        _host_groups.append(dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT)))
    everyone = [torch.empty(len(numbers), dtype=torch.long) for _ in range(world_size())]
    dist.all_gather(everyone, torch.tensor(numbers), group=_host_groups[0] if device.type != "cpu" else None)
    return [each.numpy().tolist() for each in everyone]


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace gradients by their means over the ranks; a missing one counts as zero. Called on all ranks.

    Args:
        parameters: in one order on all ranks.
    """
    if world_size() == 1:
        return
    for bucket in buckets(parameter for parameter in parameters if parameter.requires_grad):
        for parameter in bucket:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
        total = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(total)
        total /= world_size()
        means = total.split([parameter.numel() for parameter in bucket])
        torch._foreach_copy_(gradients, [mean.view_as(to) for mean, to in zip(means, bucket, strict=True)])


def buckets(tensors: Iterable[TensorLike]) -> Iterator[list[TensorLike]]:
    """Group tensors of one type and device, in their order, up to `BUCKET_ELEMENTS` together."""
    alike: dict[tuple, list[TensorLike]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in alike.values():
        bucket: list[TensorLike] = []
        for tensor in same:
            if bucket and sum(map(Tensor.numel, bucket)) + tensor.numel() > BUCKET_ELEMENTS:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


# -- agreement --------------------------------------------------------------------------------------------------------


def on_first(work: Callable[[], T]) -> T:
    """Return on all ranks what `work` returns on rank 0, which alone does it; called on all ranks.

    Raises:
        Exception: on all ranks, if `work` fails; see `_agree`.
    """
    found: list[Any] = [None]
    failed = None
    if rank() == 0:
        try:
            found = [work()]
        except Exception as error:
            failed = error
    _agree(failed)
    if world_size() > 1:
        dist.broadcast_object_list(found)
    return found[0]


@contextmanager
def first_then_others() -> Iterator[None]:
    """Let rank 0 go first, which fills caches; no rank goes on if one fails. Entered on all ranks."""
    failed = None
    if rank():
        _agree(None)  # on what rank 0 did
    try:
        yield
    except Exception as error:
        failed = error
    if not rank():
        _agree(failed)
    _agree(failed if rank() else None)  # rank 0 has raised its own above


def _agree(error: Exception | None) -> None:
    """Raise the error of this rank, or else that of the first rank that has one; called on all ranks.

    Elsewhere than on its own rank, a ValueError and a RunError say what they say there, and others are a PeerError.
    """
    said: list[Any] = [None] * world_size()
    if world_size() > 1:
        kind = next((each for each in (ValueError, RunError) if isinstance(error, each)), PeerError)
        dist.all_gather_object(said, error and (kind, str(error) if kind is not PeerError else f"{error!r}"))
    if error is not None:
        raise error
    for number, (kind, text) in ((number, each) for number, each in enumerate(said) if each):
        raise kind(text if kind is not PeerError else f"process {number} failed: {text}")


def check_equal_on_all_ranks(values: Mapping[str, Any], remedy: str) -> None:
    """Check that each value, which JSON or `str` can express, is equal on all ranks.

    Args:
        values: the name of each value in the message, and the value; called on all ranks.
        remedy: the end of the message.

    Raises:
        ValueError: on every rank, naming the values that differ, each with rank 0 and the first other one.
    """
    said = {name: json.dumps(value, sort_keys=True, default=str) for name, value in values.items()}
    of_ranks: list[dict[str, str]] = gather_object([said])
    differing = []
    for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
        said_of = [of_rank.get(name, "missing") for of_rank in of_ranks]
        if other := next((at for at, value in enumerate(said_of) if value != said_of[0]), 0):
            differing.append(f"{name} is {said_of[0][:60]} on rank 0 and {said_of[other][:60]} on rank {other}")
    if differing:
        raise ValueError(f"{'; '.join(differing)}; it differs between processes. {remedy}")
