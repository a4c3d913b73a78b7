"""What ranks exchange in a step: before it which rows each has, after it their gradients.

Rows are asked for before the towers run, and read after they are launched, when the answer is old: hosts wait for nothing of
the step. Gradients are averaged while the last backward pass still runs, or after it.

Shape letters: n this rank's rows, N all ranks' rows, W ranks, M rows that are sent at once.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mm_utils import distributed
from mm_utils.copies import HostCopy


def has_shared_ids(ids_N2: Tensor) -> Tensor:
    """Return whether some pairs share an id."""
    ordered_N2 = ids_N2.sort(0).values
    return (ordered_N2[1:] == ordered_N2[:-1]).any()


class RollCall:
    """Call all ranks; called on all.

    How many rows the others have is not known yet, so each rank sends as many as the fullest has had so far. Where one
    has more, all send their ids again, and wait.

    Args:
        ids_n2: the ids of this rank's rows.
        longest: tokens of its longest text.
        most: M, the same number on all ranks.
    """

    def __init__(self, ids_n2: Tensor, longest: int = 0, most: int = 0):
        self._ids_n2, self._longest, self._most = ids_n2, longest, most
        world = distributed.world_size()
        if world == 1:
            self._copy = HostCopy(has_shared_ids(ids_n2))
            return
        told_12 = torch.tensor([[len(ids_n2), longest]]).to(ids_n2.device, non_blocking=True)
        sent_n2 = ids_n2[:most]
        everyone = distributed.gather(
            pad(torch.cat([told_12, sent_n2]), (0, 0, 0, most - len(sent_n2))), [1 + most] * world
        )
        told_W2, self._ids_WM2 = everyone.view(world, 1 + most, 2).split([1, most], 1)
        place_M, alone_WM = (torch.arange(count, device=ids_n2.device) for count in (most, world * most))
        # Rows that there are not get ids of their own; should one be another's, only time is lost.
        ids_WM2 = self._ids_WM2.where((place_M < told_W2[..., 0])[..., None], -1 - alone_WM.view(world, most, 1))
        self._copy = HostCopy(torch.cat([told_W2.flatten(), has_shared_ids(ids_WM2.flatten(0, 1))[None].long()]))

    def answer(self) -> tuple[list[int], int, Tensor, bool]:
        """Return each rank's rows, most tokens of a text, ids `[N, 2]`, whether any are shared."""
        if distributed.world_size() == 1:
            return [len(self._ids_n2)], self._longest, self._ids_n2, bool(self._copy.tolist())
        *told, is_shared = self._copy.tolist()
        sizes, longest = told[::2], max(told[1::2])
        if max(sizes) > self._most:
            ids_N2 = distributed.gather(self._ids_n2, sizes)
            return sizes, longest, ids_N2, bool(has_shared_ids(ids_N2))
        ids_N2 = torch.cat([ids_M2[:size] for ids_M2, size in zip(self._ids_WM2, sizes, strict=True)])
        return sizes, longest, ids_N2, bool(is_shared)


class GradientAverage:
    """The mean of gradients over ranks, sent in buckets, the last parameters first.

    A bucket is sent once its gradients are complete and those before it are sent, so all ranks send alike, whatever each of
    them computes. A missing gradient counts as zero. On one process there is nothing to do.

    Args:
        parameters: in one order on all ranks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter] = ()):
        trained = [each for each in parameters if each.requires_grad] if distributed.world_size() > 1 else []
        self._buckets = list(distributed.buckets(reversed(trained)))
        # Taken before the backward pass: a rank that runs out of memory in it must still send.
        self._sums = [bucket[0].new_empty(sum(each.numel() for each in bucket)) for bucket in self._buckets]
        self._missing = [{id(parameter) for parameter in bucket} for bucket in self._buckets]
        self._place = {each: place for place, ids in enumerate(self._missing) for each in ids}
        self._sent: list[Any] = []

    @contextmanager
    def sent_while_computed(self) -> Iterator[None]:
        """Send within a backward pass, the last one of the step."""
        parameters = [parameter for bucket in self._buckets for parameter in bucket]
        hooks = [parameter.register_post_accumulate_grad_hook(self._note) for parameter in parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def send_rest(self, complete: bool = True) -> None:
        """Send what was not sent; anything at all, if this rank's gradients are not `complete`."""
        while len(self._sent) < len(self._buckets):
            self._send(complete)

    def receive(self) -> None:
        """Replace the gradients by their means, once everything is sent."""
        self.send_rest()
        for bucket, total, work in zip(self._buckets, self._sums, self._sent, strict=True):
            work.wait()
            total /= distributed.world_size()
            means = total.split([parameter.numel() for parameter in bucket])
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            torch._foreach_copy_(gradients, [mean.view_as(to) for mean, to in zip(means, bucket, strict=True)])

    def _note(self, parameter: Tensor) -> None:
        self._missing[self._place[id(parameter)]].discard(id(parameter))
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send()

    def _send(self, complete: bool = True) -> None:
        place = len(self._sent)
        bucket, total = self._buckets[place], self._sums[place]
        if complete:
            for parameter in bucket:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            torch.cat([parameter.grad.flatten() for parameter in bucket if parameter.grad is not None], out=total)
        self._sent.append(distributed.start_sum(total))
