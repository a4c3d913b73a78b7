"""How many pairs fit into memory at a time: two small trials, a straight line, some headroom.

Memory grows with the number of pairs by a constant amount each, so two measured peaks tell the rest. A size that turns out
too large is halved in mid-run (`mm_utils.grad_cache`), so nothing has to be tried until it fails.
"""

import resource
from collections.abc import Callable

import psutil
import torch
from accelerate import Accelerator
from torch import nn

from mm_utils import ranks
from mm_utils.grad_cache import backward
from mm_utils.objectives import Batch

TRIALS = (8, 32)  # pairs
HEADROOM = 0.1  # of the memory, for fragmentation
ADAM_BYTES = 8  # two fp32 moments per trained parameter, which the first update allocates
ROUND_TO = 8


def find_micro_batch_size(
    accelerator: Accelerator, objective: nn.Module, batch: Batch, largest: int, max_seq_length: int
) -> int:
    """Pairs of one process whose activations fit into its memory, at most `largest`, the same on all ranks.

    Args:
        objective: as `accelerator` prepared it; gradients of the trials are left in it.
        batch: any batch, for its shapes.
        max_seq_length: tokens of the longest caption there may be.
    """
    trials = [min(size, largest) for size in TRIALS]
    if trials[0] == trials[1]:
        return largest
    moments = ADAM_BYTES * sum(p.numel() for p in objective.parameters() if p.requires_grad)

    def peak(pairs: int) -> int:
        if accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(accelerator.device)
        backward(accelerator, objective, _synthetic(batch, pairs, max_seq_length), 0, pairs)
        objective.zero_grad()
        return _peak(accelerator.device)

    peak(trials[0])  # the first pass of all also sets up libraries
    limit = largest_that_fits(peak, trials, _available(accelerator.device) - moments, largest)
    return min(ranks.gather_sizes(limit, accelerator.device))


def largest_that_fits(peak: Callable[[int], int], trials: list[int], available: int, largest: int) -> int:
    """The most pairs, a multiple of 8 where there are as many, whose peak stays below `available` less the headroom.

    `peak` gives bytes of a number of pairs; it is asked for two, and taken for a straight line.
    """
    few, many = trials
    low, high = peak(few), peak(many)
    per_pair = (high - low) / (many - few)
    if per_pair <= 0:
        return largest
    fits = int(few + (available * (1 - HEADROOM) - low) / per_pair)
    return max(1, min(largest, fits if fits < ROUND_TO else fits // ROUND_TO * ROUND_TO))


def _synthetic(batch: Batch, pairs: int, length: int) -> Batch:
    pixel_values, input_ids = batch["pixel_values"], batch["input_ids"]
    ids = torch.arange(2 * pairs, device=input_ids.device).view(pairs, 2)
    ones = input_ids.new_ones(pairs, length)
    return {
        "pixel_values": pixel_values.new_zeros(pairs, *pixel_values.shape[1:]),
        "input_ids": ones,
        "attention_mask": ones,
        "ids": ids + 2 * pairs * ranks.rank(),
        "lengths": [length] * pairs,
    }


def _peak(device: torch.device) -> int:
    """Bytes at the peak: of this process's tensors on a GPU, of its resident memory, ever, elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _available(device: torch.device) -> int:
    """Bytes that this process could have at its peak."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return psutil.virtual_memory().available // ranks.processes_here() + _peak(device)
