"""What would end a run hours later, found at its start: room on disks, limits of the machine, devices, ranks that differ.

What is found on any machine is said once, and an error is raised on every rank, so that none waits for another.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from mm_utils import ranks
from mm_utils.checkpoints import checkpoint_folders, size_of
from mm_utils.data.loaders import Loaders
from mm_utils.environment import code_digest, versions

logger = logging.getLogger(__name__)

# Batches of each worker that shared memory holds: the slots of `mm_utils.data.ring`, or where there is no ring, those that
# are sent ahead.
_IN_RING, _IN_FLIGHT = 6, 4
_OPEN_FILES, _FEW_OPEN_FILES = 65_536, 1_024
# May differ between machines: they decide nothing, or are the main process's alone.
_OWN = {"output_dir", "dataloader_num_workers", "preprocessing_num_workers", "image_root"}
_SOURCES = ("train_file", "validation_file", "test_file", "dataset_dir", "dataset_name", "model_name_or_path")


def settle(error: str | None = None, warnings: Iterable[str] = ()) -> None:
    """Warn once of what any rank warns of, and raise what any rank has found wrong; called on all ranks.

    Raises:
        ValueError: on every rank, if there is an error on one.
    """
    found = gather_object([(error, list(warnings))])
    for warning in dict.fromkeys(warning for _, each in found for warning in each):
        if ranks.rank() == 0:
            logger.warning("%s", warning)
    errors = [error for error, _ in found if error]
    if errors:
        raise ValueError(errors[0])


# -- processes that are to be alike -------------------------------------------------------------------------------------


def agree_on(name: str, value: Any) -> None:
    """See that `value`, of anything that JSON or `str` can say, is the same on all ranks, which all call this.

    Raises:
        ValueError: on every rank, naming the values and the ranks that have them.
    """
    agree_on_all({name: value}, "All processes must read the same data with the same arguments.")


def agree_on_start(config: Mapping[str, Any]) -> None:
    """See that all ranks were given the same arguments, and run the same code with the same versions of its packages.

    Raises:
        ValueError: on every rank, naming what differs and the ranks.
    """
    given = {f"--{name}": value for name, value in config.items() if name not in _OWN}
    remedy = "Start all machines with one command, in equal environments."
    agree_on_all({**given, **versions(), "the code of mm_utils": code_digest()}, remedy)


def agree_on_all(values: Mapping[str, Any], remedy: str) -> None:
    """As `agree_on`, of several values; `remedy` ends the message."""
    said = {name: json.dumps(value, sort_keys=True, default=str) for name, value in values.items()}
    digests = gather_object([hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()])
    if len(set(digests)) == 1:
        return
    of_ranks: list[dict[str, str]] = gather_object([said])
    differing = []
    for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
        holders: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(of_ranks):
            holders.setdefault(of_rank.get(name, "missing"), []).append(rank)
        if len(holders) > 1:
            shares = [f"{_shortened(value)} on {_ranks(held)}" for value, held in holders.items()]
            differing.append(f"{name} is {' and '.join(shares)}")
    raise ValueError(f"{'; '.join(differing)}; it differs between processes. {remedy}")


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


# -- devices ------------------------------------------------------------------------------------------------------------


def check_precision() -> None:
    """See that this process's device can compute in the precision that `accelerate launch` was told of.

    Raises:
        ValueError: if it cannot.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes", "y", "on", "t")
    has_cuda = torch.cuda.is_available() and not on_cpu
    no_other = not (torch.backends.mps.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available()))
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not has_cuda and not on_cpu and re.match(r"\d|GPU-|MIG-", named):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES is {named}; PyTorch {torch.__version__} sees no GPU. Look at nvidia-smi and at the "
            "container's --gpus, or set ACCELERATE_USE_CPU=true to train on the CPU."
        )
    if precision in ("fp16", "fp8") and not has_cuda and (on_cpu or no_other):
        raise ValueError(
            f"--mixed_precision is {precision}; {precision} needs a GPU. Use bf16, or no for full precision."
        )
    if precision == "bf16" and has_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"--mixed_precision is bf16; {torch.cuda.get_device_name()} computes none. Use fp16, or no for full precision."
        )
    if precision == "fp8" and has_cuda and torch.cuda.get_device_capability() < (8, 9):
        raise ValueError(f"--mixed_precision is fp8; {torch.cuda.get_device_name()} computes none. Use bf16.")


def check_devices(device: torch.device) -> None:
    """Warn of GPUs of several kinds in one run; called on all ranks."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    kinds = sorted(set(gather_object([name])))
    if len(kinds) > 1 and ranks.rank() == 0:
        logger.warning(
            "Devices are %s; every step takes as long as on the slowest. Train on devices of one kind.",
            ", ".join(kinds),
        )


# -- limits of the machine ----------------------------------------------------------------------------------------------


def allow_open_files() -> int | None:
    """Raise this process's limit of open files as far as it may; returns the limit, None where there is none."""
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS allows fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return None if soft == resource.RLIM_INFINITY else soft


def check_loading(loaders: Loaders, global_batch_size: int, eval_batch_size: int, *, streaming: bool = False) -> None:
    """See that shared memory and open files suffice for the loaders' workers of all processes here; on all ranks.

    With `--dataloader_num_workers auto` there will be as many as find room; that changes the loaders' arguments.

    Args:
        global_batch_size: of the largest step. eval_batch_size: of each process.
        streaming: each worker makes a part of every batch, not a batch of its own.

    Raises:
        ValueError: on every rank, if there is a machine with too little.
    """
    workers = loaders.arguments.num_workers
    limit = allow_open_files()
    warnings = []
    if limit is not None and limit < _FEW_OPEN_FILES and (workers or streaming):
        warnings.append(
            f"ulimit -n is {limit}; data workers and shards may need more open files. Set ulimit -n {_OPEN_FILES}, or pass "
            "--dataloader_num_workers 0."
        )
    train = -(-global_batch_size // ranks.world_size())
    parts = max(1, workers) if streaming else 1
    image = ranks.processes_here() * 3 * loaders.image_size**2
    per_worker = _IN_RING * image * (-(-train // parts) + eval_batch_size)
    least = workers * _IN_FLIGHT * image * max(-(-train // parts), eval_batch_size)
    free = _free_shared_memory()
    error = None
    if free is not None and workers * per_worker > free:
        fitting = free // per_worker
        text = (
            f"/dev/shm has {_size(free)} free; {workers} data workers in each of {ranks.processes_here()} processes may put "
            f"{_size(workers * per_worker)} there"
        )
        remedy = f"Start the container with --shm-size={-(-workers * per_worker * 5 // (2**30 * 4))}g"
        if loaders.arguments.dataloader_num_workers == "auto":
            loaders.arguments.dataloader_num_workers = str(fitting)
            warnings.append(f"{text}, so there will be {fitting}. {remedy} for more.")
        elif least > free:
            error = f"{text}. {remedy}, or pass --dataloader_num_workers {fitting}."
        else:
            warnings.append(f"{text}. {remedy}, or pass --dataloader_num_workers {fitting}.")
    settle(error, warnings)


def _free_shared_memory() -> int | None:
    """Bytes; None where tensors do not travel through a folder."""
    if not sys.platform.startswith("linux"):
        return None
    with suppress(OSError):
        found = os.statvfs("/dev/shm")
        return found.f_bavail * found.f_frsize
    return None


# -- the output folder --------------------------------------------------------------------------------------------------


def misplaced(folder: Path, config: Mapping[str, Any]) -> str | None:
    """What is wrong with an output folder, if it is one that holds other things: a disk, a home, the data of `config`."""
    place, reason = folder.resolve(), None
    if place == Path(place.anchor):
        reason = "it is the root of a disk"
    with suppress(RuntimeError):  # there is no home
        reason = "it is your home folder" if place == Path.home().resolve() else reason
    for name in _SOURCES:
        value = config.get(name)
        if not isinstance(value, str) or "://" in value:
            continue
        source = Path(value).resolve()
        if name.endswith("_file"):
            if place in (source, source.parent):
                reason = f"--{name} is {value}, and the run's files would lie among the data"
        elif source.is_dir() and (place == source or (name != "model_name_or_path" and source in place.parents)):
            reason = f"--{name} is {value}, and the run's files would lie among its own"
    return f"--output_dir is {folder}; {reason}. Give a folder of its own, e.g. outputs/mine." if reason else None


def check_disk(folder: Path, checkpoint_bytes: int, kept: int | None) -> None:
    """See that checkpoints of `checkpoint_bytes` find room, `kept` of them and one more while it is written.

    Call it on all ranks, with the same numbers; the main process looks. `kept` None is at least one.

    Raises:
        ValueError: on every rank, if not even one finds room beside those that are there.
    """
    if ranks.rank() != 0:
        return settle()
    free = shutil.disk_usage(folder).free
    there = sum(map(size_of, checkpoint_folders(folder)))
    needed = max(checkpoint_bytes, ((kept or 1) + 1) * checkpoint_bytes - there)
    if free >= needed:
        return settle()
    text = (
        f"{folder.resolve()} has {_size(free)} free; a checkpoint takes {_size(checkpoint_bytes)}, and the run's take "
        f"{_size(needed)} more. Free some, lower --save_total_limit, or give an --output_dir on another disk."
    )
    return settle(text) if free < checkpoint_bytes else settle(None, [text])


def _size(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"
