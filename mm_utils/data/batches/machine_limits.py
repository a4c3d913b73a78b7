"""Whether shared memory and open files of a machine suffice for its data workers."""

import math
from collections.abc import Sequence

from mm_utils import distributed
from mm_utils.data.batches.loaders import Loaders
from mm_utils.data.batches.workers import PREFETCH, free_shared_memory
from mm_utils.files import MAX_OPEN_FILES, allow_open_files
from mm_utils.text import byte_size

_FEWEST_OPEN_FILES = 128  # with which data workers have been seen to begin


def check_loading(
    loaders: Loaders,
    global_batch_size: int,
    eval_batch_size: int,
    *,
    others: Sequence[Loaders] = (),
    streaming: bool = False,
) -> None:
    """Check that shared memory and open files suffice for all workers of this machine.

    Called on all ranks, and again where the division of batches has changed. With `--dataloader_num_workers auto`, the
    loaders' arguments are changed to as many workers as fit.

    Args:
        loaders: the run's loaders.
        others: those of the other media of the run, whose training batches wait at the same time.
        global_batch_size: pairs of the largest step, over all processes.
        eval_batch_size: images per process.
        streaming: whether each worker makes a part of every batch, instead of whole batches.

    Raises:
        ValueError: on every rank, if a machine has too little.
    """
    parts, warnings, error = [loaders, *others], [], None
    counts = [part.arguments.num_workers for part in parts]
    workers = sum(counts)
    limit = allow_open_files()
    if limit is not None and limit < 1_024 and (workers or streaming):
        text = (
            f"ulimit -n is {limit}; data workers and shards may need more open files. Set ulimit -n {MAX_OPEN_FILES}, or pass "
            "--dataloader_num_workers 0."
        )
        if workers and limit < _FEWEST_OPEN_FILES:
            error = text
        else:
            warnings.append(text)
    processes, free = distributed.processes_here(), free_shared_memory()
    shares = [_rows_here(part, global_batch_size, streaming) for part in parts]
    images = [count * PREFETCH * part.medium.blank(1).nbytes for count, part in zip(counts, parts, strict=True)]
    train = sum(image * share for image, share in zip(images, shares, strict=True))
    evaluation = max(images) * processes * eval_batch_size
    needed = train + evaluation  # an evaluation, of one medium, begins while training batches wait
    if free is not None and needed > free:
        fitting = [count * free // needed for count in counts]
        text = (
            f"/dev/shm has {byte_size(free)} free; {workers} data workers in each of {processes} processes may put "
            f"{byte_size(needed)} there"
        )
        remedy = f"Start the container with --shm-size={-(-needed * 5 // (2**30 * 4))}g"
        total = sum(fitting) if all(fitting) else 0
        if loaders.arguments.dataloader_num_workers == "auto":
            for part, count in zip(parts, fitting, strict=True):
                part.arguments.dataloader_num_workers = str(count)
            warnings.append(f"{text}, so there will be {sum(fitting)}. {remedy} for more.")
        elif max(train, evaluation) > free:
            error = f"{text}. {remedy}, or pass --dataloader_num_workers {total}."
        else:
            warnings.append(f"{text}. {remedy}, or pass --dataloader_num_workers {total}.")
    distributed.raise_everywhere(error, warnings)


def _rows_here(loaders: Loaders, global_batch_size: int, streaming: bool) -> int:
    """Return how many rows of a step the processes of this machine read into one batch of each worker."""
    here, weights = distributed.ranks_here(), loaders.division.weights
    if weights is None:
        parts = max(1, loaders.arguments.num_workers) if streaming else 1
        return len(here) * math.ceil(global_batch_size / (distributed.world_size() * parts))
    return math.ceil(global_batch_size * sum(weights[here.start : here.stop]) / sum(weights))
