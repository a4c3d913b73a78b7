"""Deal global batches by the ranks' measured speed, so that none waits for the slowest.

Every rank computes the gradient of its own rows of one global loss, however many they are, so a slower one can have fewer:
what is learnt stays the same but for the order in which numbers are added up.
"""

import heapq
import logging
import statistics
import time
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerControl, TrainerState

from mm_utils import distributed
from mm_utils.data.batches.loaders import check_loading
from mm_utils.data.batches.order import EQUAL_SHARES, Division
from mm_utils.extras.micro_batch.search import TRIALS, synthetic_batch
from mm_utils.objectives import Objective
from mm_utils.objectives.grad_cache import is_out_of_memory
from mm_utils.objectives.terms import Batch
from mm_utils.training.callbacks import RunCallback
from mm_utils.training.memory import restored_buffers

logger = logging.getLogger(__name__)

TURNS = 3  # timed passes, after one that sets up libraries
MIN_DIFFERENCE = 0.1  # between the fastest and the slowest rank; below it, the measurement says too little
_SHOWN = 8  # ranks in a message


class Balance(RunCallback):
    """At each start, measure the ranks' speeds, and deal the rows of all batches by them.

    It does nothing on one process, or where ranks are equally fast.

    Attributes:
        accelerator: the run's accelerator; neither FSDP2 nor DeepSpeed.
        objective: the objective that is trained, as it was before `accelerator.prepare`.
    """

    accelerator: Accelerator
    objective: Objective

    def on_start(self, run: Any) -> None:
        """Take what is measured from the run."""
        self.accelerator, self.objective = run.run.accelerator, run.objective
        run.run.args.has_unequal_shares = True

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure, and set the division of the training loaders."""
        if distributed.world_size() == 1 or state.global_step >= state.max_steps:
            return
        size, ranks = args.batch_sizes.at(state.global_step), distributed.world_size()
        if size < ranks:
            raise ValueError(
                f"--global_batch_size is {size}, for {ranks} processes; --balance assigns a pair to each of them. Give at least "
                f"{ranks}, or drop --balance."
            )
        [batch] = kwargs["data"].train_batches(state.global_step, state.global_step + 1)
        pairs = _pairs_tried(args, size // ranks)
        try:
            seconds = seconds_per_pair(self.accelerator, self.objective, batch, state.global_step, pairs)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(
                f"--balance is set, and memory ran out with {pairs} pairs on this process. Give a smaller --micro_batch_size, or "
                "auto, which changes nothing that is learnt."
            ) from error
        division = EQUAL_SHARES
        if max(seconds) > (1 + MIN_DIFFERENCE) * min(seconds):
            division = Division(tuple(map(float, deal(seconds, size))))
        loaders = kwargs["data"].loaders
        loaders.division = division
        check_loading(loaders, args.batch_sizes.sizes[-1], args.per_device_eval_batch_size)
        logger.info("--balance: %s", _describe(division, seconds))


def _pairs_tried(args: Any, share: int) -> int:
    """Return how many pairs a rank is measured with: its share, or what it holds at a time."""
    return min(share, TRIALS[-1] if args.micro_batch_size == "auto" else int(args.micro_batch_size or share))


def _describe(division: Division, seconds: list[float]) -> str:
    """Return what each rank gets, the slowest first."""
    if division.weights is None:
        return f"processes are about equally fast, {1e3 * max(seconds):.3g} ms a pair, and get equal shares"
    slowest = sorted(range(len(seconds)), key=seconds.__getitem__, reverse=True)
    shown = [
        f"process {rank} {division.weights[rank]:.0f} ({1e3 * seconds[rank]:.3g} ms a pair)"
        for rank in slowest[:_SHOWN]
    ]
    more = f" and {len(slowest) - _SHOWN} faster ones the rest" if len(slowest) > _SHOWN else ""
    return f"of {sum(division.weights):.0f} pairs, {', '.join(shown)}{more}"


def seconds_per_pair(
    accelerator: Accelerator, objective: Objective, batch: Batch, step: int, pairs: int
) -> list[float]:
    """Return each rank's seconds a pair, measured by all at once; on all ranks.

    The ranks compute the same number of equal, blank pairs, forward and backward. The exchange between the two, in which they
    wait for each other, is not timed. Neither weights nor statistics of batch norms change; gradients are removed.

    Args:
        accelerator, objective: as of `Balance`.
        batch: any batch of this rank, for its shapes.
        step: the step that is about to be taken.
        pairs: the number of pairs of each rank.
    """
    lengths = batch["lengths"]
    [length] = distributed.max_over_ranks([round(sum(lengths) / max(1, len(lengths)))], accelerator.device)
    blank = objective.with_keys(synthetic_batch(batch, pairs, max(1, length), objective.readers), step)
    objective.train()
    with restored_buffers(objective):
        turns = [_seconds_of_pass(accelerator, objective, blank, step) for _ in range(1 + TURNS)]
    objective.zero_grad()
    mine = torch.tensor([statistics.median(turns[1:]) / pairs], device=accelerator.device)
    return distributed.gather(mine, [1] * distributed.world_size()).tolist()


def _seconds_of_pass(accelerator: Accelerator, objective: Objective, batch: Batch, step: int) -> float:
    """Return the seconds of a forward and backward pass without exchanges between."""
    distributed.any_rank(False, accelerator.device)  # processes that share a machine are to slow each other down
    begin = _now(accelerator.device)
    with accelerator.autocast():
        encoded = objective.encode(batch)
        encoded_at = _now(accelerator.device)
        plan = objective.plan(encoded, batch, step)
        planned_at = _now(accelerator.device)
        loss, _ = objective.part(encoded, batch, plan, plan.gradients, 0, 1.0)
    loss.backward()  # DDP, whose forward did not run, waits for no gradient
    return encoded_at - begin + _now(accelerator.device) - planned_at


def _now(device: torch.device) -> float:
    """Return the time once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def deal(seconds: list[float], size: int) -> list[int]:
    """Return each rank's number of `size` rows, one or more, so that the last ends early.

    Args:
        seconds: of each rank for one row.
    """
    rows = [1] * len(seconds)
    ends = [(2 * each, rank) for rank, each in enumerate(seconds)]  # with one more row
    heapq.heapify(ends)
    for _ in range(size - len(rows)):
        end, rank = ends[0]
        rows[rank] += 1
        heapq.heapreplace(ends, (end + seconds[rank], rank))
    return rows
