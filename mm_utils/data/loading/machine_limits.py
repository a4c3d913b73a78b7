"""Whether shared memory and open files of a machine suffice for its data workers."""

from mm_utils import distributed
from mm_utils.data.loading.dataset import blank
from mm_utils.data.loading.loaders import Loaders
from mm_utils.data.loading.workers import PREFETCH, free_shared_memory
from mm_utils.files import MAX_OPEN_FILES, allow_open_files
from mm_utils.text import byte_size

_FEWEST_OPEN_FILES = 128  # with which data workers have been seen to begin


def check_loading(loaders: Loaders, global_batch_size: int, eval_batch_size: int, *, streaming: bool = False) -> None:
    """Check that shared memory and open files suffice for all workers of this machine.

    Called on all ranks. With `--dataloader_num_workers auto`, the loaders' arguments are changed to as many workers as fit.

    Args:
        loaders: the run's loaders.
        global_batch_size: pairs of the largest step, over all processes.
        eval_batch_size: images per process.
        streaming: whether each worker makes a part of every batch, instead of whole batches.

    Raises:
        ValueError: on every rank, if a machine has too little.
    """
    args, workers, warnings, error = loaders.arguments, loaders.arguments.num_workers, [], None
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
    image = processes * PREFETCH * blank(1, loaders.image_size, loaders.timed).nbytes
    parts = distributed.world_size() * (max(1, workers) if streaming else 1)
    train = -(-global_batch_size // parts)
    per_worker = image * (train + eval_batch_size)  # an evaluation begins while training batches wait
    if free is not None and workers * per_worker > free:
        fitting = free // per_worker
        text = (
            f"/dev/shm has {byte_size(free)} free; {workers} data workers in each of {processes} processes may put "
            f"{byte_size(workers * per_worker)} there"
        )
        remedy = f"Start the container with --shm-size={-(-workers * per_worker * 5 // (2**30 * 4))}g"
        if args.dataloader_num_workers == "auto":
            args.dataloader_num_workers = str(fitting)
            warnings.append(f"{text}, so there will be {fitting}. {remedy} for more.")
        elif workers * image * max(train, eval_batch_size) > free:
            error = f"{text}. {remedy}, or pass --dataloader_num_workers {fitting}."
        else:
            warnings.append(f"{text}. {remedy}, or pass --dataloader_num_workers {fitting}.")
    distributed.raise_everywhere(error, warnings)
