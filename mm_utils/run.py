"""Start a run: processes, output folder, seed, logging, the resolved arguments on disk, trackers."""

import ctypes
import json
import logging
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import yaml
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.tracking import get_available_trackers
from accelerate.utils import broadcast_object_list, set_seed

from mm_utils.arguments import arg, to_dict
from mm_utils.ranks import cores_per_process
from mm_utils.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)


@dataclass
class RunArguments:
    """Where figures are sent, and whether the run is only tried."""

    report_to: str | None = arg(
        None, "A tracker that accelerate knows and that is installed, e.g. tensorboard or wandb."
    )
    dry_run: bool = arg(
        False, "Try all of it on a few pairs, say what the run will take in time, memory and disk, and leave nothing."
    )


class RunError(Exception):
    """A run that cannot start or go on; the message says what to do."""


def start_run(
    name: str, args: TrainingArguments, *other_args: Any, report_to: str | None = None, dry_run: bool = False
) -> Accelerator:
    """Set up processes, logging and the output folder; `args.output_dir` is filled in where it was left open.

    Device, precision and number of processes come from `accelerate launch`, everything else from the arguments. With
    `dry_run` the folder is looked at and not made, and no tracker is started.

    Raises:
        RunError: if the processes do not see each other, or the output folder cannot be used.
    """
    accelerator = make_accelerator(report_to, args.output_dir)
    [args.output_dir] = broadcast_object_list([args.output_dir or _free_folder(name)])
    problem = _prepare_folder(Path(args.output_dir), args, dry_run) if accelerator.is_main_process else None
    [problem] = broadcast_object_list([problem])
    if problem:
        raise RunError(problem)
    set_seed(args.seed)
    if dry_run:
        return accelerator
    config = to_dict(args, *other_args)
    if accelerator.is_main_process:
        saved = {
            key: value
            for key, value in config.items()
            if key not in ("resume_from_checkpoint", "overwrite_output_dir")
        }
        header = (
            f"# accelerate launch scripts/{name}.py --config {args.output_dir}/config.yaml --overwrite_output_dir\n"
        )
        Path(args.output_dir, "config.yaml").write_text(header + yaml.safe_dump(saved, sort_keys=False))
    if report_to:
        accelerator.init_trackers(name, config={key: value for key, value in config.items() if value is not None})
    return accelerator


def make_accelerator(report_to: str | None = None, project_dir: str | None = None) -> Accelerator:
    """Processes, device and precision as `accelerate launch` set them, and logging.

    Raises:
        RunError: if the processes do not see each other, or the tracker is not installed.
    """
    installed = [tracker.value for tracker in get_available_trackers()]
    if report_to is not None and report_to not in ("all", *installed):
        raise RunError(
            f"--report_to is {report_to}; installed are {', '.join(installed) or 'none'}. Install it with pip."
        )
    accelerator = Accelerator(
        log_with=report_to,
        project_dir=project_dir,
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    )
    set_up_logging(accelerator.is_main_process, accelerator.is_local_main_process)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise RunError(
            f"{launched} processes were launched, but each sees {accelerator.num_processes}; they would train apart and "
            "write over each other. On a machine without GPUs, set ACCELERATE_USE_CPU=true."
        )
    device = accelerator.device.type
    if device == "cpu":
        _use_the_cpu_well()
    elif device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32; the losses do without
    logger.info("%d x %s, mixed precision %s", accelerator.num_processes, device, accelerator.mixed_precision)
    return accelerator


def report_figures(accelerator: Accelerator, metrics: dict[str, float], file: str | None) -> None:
    """Say the figures once and, if asked to, write them to a JSON file."""
    if accelerator.is_main_process:
        logger.info("\n%s", "\n".join(f"{name:<40}{value:.4f}" for name, value in metrics.items()))
        if file:
            Path(file).write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")


def _use_the_cpu_well() -> None:
    """All cores, and an allocator that keeps its memory.

    `accelerate launch` sets OMP_NUM_THREADS=1 where its config says nothing of CPUs. glibc gives every large tensor's
    memory back when it is freed, and the kernel clears it again for the next one: with MobileNetV2 at 224 px that was
    two thirds of the time. The numbers are M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD of malloc.h.
    """
    torch.set_num_threads(max(1, cores_per_process()))
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for option, value in ((-4, 0), (-1, -1), (-2, 2**28)):
            libc.mallopt(option, value)


def run_script(main: Any) -> None:
    """Call a script's `main`; a mistake of the user's ends with one line and exit status 1, not with a traceback."""
    try:
        main()
    except (RunError, ValueError, FloatingPointError) as error:
        logging.getLogger("mm_utils").error("%s", error)
        logging.getLogger("mm_utils").debug("Traceback:", exc_info=True)
        sys.exit(1)


def _free_folder(name: str) -> str:
    number = 1
    while Path("outputs", f"{name}-{number}").exists():
        number += 1
    return str(Path("outputs", f"{name}-{number}"))


def _prepare_folder(folder: Path, args: TrainingArguments, dry_run: bool) -> str | None:
    """Make the output folder, but for a dry run; returns what is wrong with it."""
    holds_run = any((folder / name).exists() for name in ("metrics.jsonl", "model.safetensors")) or any(
        folder.glob("checkpoint-*")
    )
    if holds_run and not (args.resume_from_checkpoint or args.overwrite_output_dir):
        return (
            f"--output_dir is {folder}; it already holds a run. Continue it with --resume_from_checkpoint latest, "
            "replace it with --overwrite_output_dir, or give another folder."
        )
    if dry_run:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        return f"--output_dir is {folder}; it cannot be written: {error.strerror}. Give a folder that can."
    if holds_run and args.overwrite_output_dir and not args.resume_from_checkpoint:
        _empty(folder)
    return None


def _empty(folder: Path) -> None:
    """Remove what an earlier run's loop would take for its own: the log and the checkpoints."""
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)


def set_up_logging(main: bool = True, local_main: bool = True) -> None:
    """Messages on stderr with their time; only the main process gives more than warnings, progress bars one a machine."""
    level = logging.INFO if main else logging.WARNING
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logging.getLogger("mm_utils").setLevel(level)
    logging.getLogger("__main__").setLevel(level)
    transformers.logging.set_verbosity_error()
    if not local_main:
        datasets.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
