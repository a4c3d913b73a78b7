"""Share with every rank what it must know of all ranks' rows before a step's loss.

It is asked for before the towers run, and read after they are launched, when the answer is old: hosts wait for nothing of the
step.

Shape letters: n this rank's rows, N all ranks' rows, W ranks, M rows that are sent at once.
"""

import torch
from torch import Tensor
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
