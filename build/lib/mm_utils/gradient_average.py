"""Average gradients over the ranks, while the last backward pass still runs or after it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mm_utils import distributed
from mm_utils.communication import meter


class GradientAverage:
    """The mean of gradients over ranks, sent in buckets, the last parameters first.

    A bucket is sent once its gradients are complete and those before it are sent, so all ranks send alike, whatever each of
    them computes. A missing gradient counts as zero. On one process there is nothing to do.

    Args:
        parts: parameters, in one order on all ranks that share them, and these ranks, of `distributed.make_groups`, None for all;
            the others count as ranks whose gradient is zero.
    """

    def __init__(self, *parts: tuple[Iterable[nn.Parameter], Any]):
        self._buckets: list[list[nn.Parameter]] = []
        self._groups: list[Any] = []
        for parameters, group in parts if distributed.world_size() > 1 else ():
            found = list(distributed.buckets(reversed([each for each in parameters if each.requires_grad])))
            self._buckets += found
            self._groups += [group] * len(found)
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
            with meter.exchange(0.0, total.device):
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
        self._sent.append(distributed.start_sum(total, self._groups[place]))
