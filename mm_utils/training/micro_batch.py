"""How many pairs fit into memory at a time: small trials, a line, some headroom.

Every pair adds a constant amount of memory once activations outweigh what a trial allocates whatever its size, such as the
gradient of a large vocabulary. So trials grow until two of them have the slope of the two before, and the line through the
last two yields the size. One that turns out too large is halved during training (`mm_utils.objectives.grad_cache`).
"""

from collections.abc import Callable, Collection, Sequence

import torch
from accelerate import Accelerator
from torch import nn

from mm_utils import distributed
from mm_utils.data.batches.column_reader import ColumnReader
from mm_utils.objectives.grad_cache import backward
from mm_utils.objectives.terms import Batch
from mm_utils.training.memory import available_bytes, peak_bytes, reset_peak

TRIALS = (8, 32)  # pairs
HEADROOM = 0.1  # share of the memory, for fragmentation
ADAM_BYTES = 8  # two fp32 moments per trained parameter, allocated by the first update
ROUND_TO = 8
SAME_SLOPE = 0.02


def find_micro_batch_size(
    accelerator: Accelerator,
    objective: nn.Module,
    batch: Batch,
    largest: int,
    max_seq_length: int,
    steps: Collection[int] = (0,),
) -> int:
    """Return how many pairs of one process fit into its memory, the same number on all ranks.

    Args:
        accelerator: the accelerator that prepared the objective.
        objective: the prepared objective; it is left without gradients.
        batch: any batch, for its shapes.
        largest: the upper limit, in pairs.
        max_seq_length: the longest possible caption in tokens.
        steps: a step of each part of the run.
    """
    trials = [min(size, largest) for size in TRIALS]
    if trials[0] == trials[1]:
        return largest
    moments = ADAM_BYTES * sum(p.numel() for p in objective.parameters() if p.requires_grad)

    def peak(pairs: int) -> int:
        reset_peak(accelerator.device)
        for step in steps:
            tried = synthetic_batch(batch, pairs, max_seq_length, accelerator.unwrap_model(objective).readers)
            backward(accelerator, objective, tried, step, pairs)
            objective.zero_grad(set_to_none=False)  # else gradients make up the peak of a small trial
        return peak_bytes(accelerator.device)

    peak(trials[0])  # the very first pass also sets up libraries
    available = available_bytes(accelerator.device) - moments
    limit = largest_that_fits(peak, trials, available, largest)
    objective.zero_grad()
    return min(distributed.gather_sizes(limit, accelerator.device))


def largest_that_fits(peak: Callable[[int], int], trials: list[int], available: int, largest: int) -> int:
    """Return the most pairs, a multiple of 8, whose peak stays below `available` with room.

    Args:
        peak: measures the bytes of a number of pairs; a constant up to some number, a straight line from there on.
        trials: the first two numbers of pairs; the next ones are up to four times as large, and half of what may fit.
        available: bytes of memory.
        largest: the upper limit, in pairs.
    """
    few, many = trials
    low, high, slope_before = peak(few), peak(many), 0.0
    while True:
        slope = (high - low) / (many - few)
        fits = int(few + (available * (1 - HEADROOM) - low) / slope) if slope > 0 else largest
        further = min(4 * many, fits // 2, largest)
        if further < 2 * many or (slope > 0 and slope <= (1 + SAME_SLOPE) * slope_before):
            return max(1, min(largest, fits if fits < ROUND_TO else fits // ROUND_TO * ROUND_TO))
        few, low, slope_before = many, high, slope
        many, high = further, peak(further)


def synthetic_batch(batch: Batch, pairs: int, length: int, readers: Sequence[ColumnReader]) -> Batch:
    """Return `pairs` blank pairs with captions of one length, with all that `batch` has."""
    ones = batch["input_ids"].new_ones(pairs, length)
    inputs = {
        name: value.new_zeros(pairs, *value.shape[1:])
        for name, value in batch.items()
        if name == "pixel_values" or name.startswith(("vision_", "text_", "teacher_"))
    }
    if "text_states" in inputs:
        inputs["text_states"] = ones.new_zeros(pairs, length, batch["text_states"].shape[-1]).to(batch["text_states"])
    if "all_input_ids" in batch:
        captions = ones.new_ones(pairs, batch["all_input_ids"].shape[1], length)
        inputs |= {"all_input_ids": captions, "all_attention_mask": captions}
    for reader in readers:
        inputs |= reader.blank(batch, pairs, length)
    return {
        **inputs,
        "input_ids": ones,
        "attention_mask": ones,
        "rows": ones.new_zeros(pairs),
        "ids": torch.arange(2 * pairs, device=ones.device).view(pairs, 2) + 2 * pairs * distributed.rank(),
        "lengths": [length] * pairs,
    }
