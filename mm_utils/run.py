"""Start a run: processes, output folder, seed, logging, the resolved arguments on disk, trackers."""

import ctypes
import json
import logging
import os
import platform
import shutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import datasets
import torch
import transformers
import yaml
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.tracking import get_available_trackers
from accelerate.utils import broadcast_object_list, set_seed

from mm_utils import failures, meeting, preflight, ranks, spool, starting
from mm_utils.arguments import arg, to_dict
from mm_utils.environment import describe_start
from mm_utils.safe_text import SafeFormatter, printable, redact, without_secrets
from mm_utils.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

LONGEST_MEETING = 600  # seconds from the start of the first process to that of the last


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
    `dry_run` the folder is looked at and not made, and no tracker is started. Where a launcher has restarted the run, its
    first start's folder is used again, and `args.resume_from_checkpoint` becomes `latest`.

    Raises:
        RunError: if the processes do not see each other, or the output folder cannot be used.
        ValueError: if the processes were given different arguments or code, or the device cannot do what is asked for.
    """
    accelerator = make_accelerator(report_to, args.output_dir)
    preflight.allow_open_files()
    preflight.check_devices(accelerator.device)
    preflight.agree_on_start(to_dict(args, *other_args))
    launch, about = starting.this_launch(), describe_start(accelerator)
    place = None
    if accelerator.is_main_process:
        place = _find_place(name, args, to_dict(args, *other_args), launch, dry_run)
    [place] = broadcast_object_list([place])
    args.output_dir, args.resume_from_checkpoint = place.folder, place.resume_from
    config, problem = to_dict(args, *other_args), place.problem
    if accelerator.is_main_process and not dry_run and not problem:
        problem = _write_down(name, Path(place.folder), config, about, launch)
    [problem] = broadcast_object_list([problem])
    if problem:
        raise RunError(problem)
    set_seed(args.seed)
    if dry_run:
        accelerator.log_with.clear()
    return accelerator


def make_accelerator(report_to: str | None = None, project_dir: str | None = None) -> Accelerator:
    """Processes, device and precision as `accelerate launch` set them, and logging.

    Raises:
        RunError: if the processes do not see each other, or the tracker is not installed.
        ValueError: if the device cannot compute in that precision, or the launcher is gone.
    """
    starting.end_with_launcher()
    starting.fork_without_tokenizer_threads()
    preflight.check_precision()
    installed = [tracker.value for tracker in get_available_trackers()]
    if report_to is not None and report_to not in ("all", *installed):
        raise RunError(
            f"--report_to is {report_to}; installed are {', '.join(installed) or 'none'}. Install it with pip."
        )
    # transformers would load a model in one process, and leave its weights empty in the others, for FSDP to fill.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    handlers = [
        DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
        InitProcessGroupKwargs(init_method=meeting.init_method(), timeout=timedelta(seconds=LONGEST_MEETING)),
    ]
    try:
        accelerator = Accelerator(log_with=report_to, project_dir=project_dir, kwargs_handlers=handlers)
    except TimeoutError as error:
        raise RunError(str(error)) from error
    ranks.any_rank(False, accelerator.device)  # all meet now, as NCCL connects them at their first collective only
    ranks.set_timeout(ranks.PATIENCE)
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
    torch.set_num_threads(max(1, ranks.cores_per_process()))
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for option, value in ((-4, 0), (-1, -1), (-2, 2**28)):
            libc.mallopt(option, value)


def run_script(main: Any) -> None:
    """Call a script's `main`; a mistake of the user's ends with one line and exit status 1, not with a traceback.

    Of several processes, the first that fails tells why, and ends the others: see `mm_utils.failures`.
    """
    listener = failures.listen()
    try:
        main()
    except (RunError, ValueError, FloatingPointError) as error:
        if listener.report(error):
            logging.getLogger("mm_utils").error("%s", error)
            logging.getLogger("mm_utils").debug("Traceback:", exc_info=True)
        listener.fail()
    except Exception as error:
        if listener.is_alone:
            raise
        if listener.report(error):
            logging.getLogger("mm_utils").exception("Process %d failed", ranks.rank())
        listener.fail()
    except SystemExit:
        listener.finish()
        raise
    else:
        listener.finish()


class _Place(NamedTuple):
    folder: str
    resume_from: str | None
    problem: str | None = None


def _find_place(
    name: str, args: TrainingArguments, config: Mapping[str, Any], launch: Sequence[str], dry_run: bool
) -> _Place:
    """The output folder, locked and made but for a dry run, and what to go on from in it; or what is wrong."""
    try:
        folder = Path(args.output_dir) if args.output_dir else starting.folder_of_launch(name, launch)
        folder = folder or _new_folder(name, dry_run)
        problem = preflight.misplaced(folder, config)
        is_restart = not dry_run and bool(starting.earlier_starts(folder, launch))
        resume_from = starting.resume_name(args.resume_from_checkpoint, folder, launch if is_restart else [])
        if not problem:
            overwrite = args.overwrite_output_dir and not is_restart
            problem = _prepare_folder(folder, is_restart or bool(resume_from), overwrite, dry_run)
    except (OSError, ValueError) as error:  # a ValueError by a name that no file can have
        where, why = args.output_dir or Path("outputs").absolute(), getattr(error, "strerror", None) or str(error)
        return _Place(
            str(where), None, f"--output_dir is {where}; it cannot be written: {why}. Give a folder that can."
        )
    return _Place(str(folder), resume_from, problem)


def _new_folder(name: str, dry_run: bool) -> Path:
    """The first `outputs/<name>-N` that there is not; it is made at once, so no other run takes it."""
    number = 1
    while True:
        folder = Path("outputs", f"{name}-{number}")
        try:
            if not dry_run:
                folder.mkdir(parents=True)
            if not dry_run or not folder.exists():
                return folder
        except FileExistsError:
            pass
        number += 1


def _prepare_folder(folder: Path, goes_on: bool, overwrite: bool, dry_run: bool) -> str | None:
    """Make the output folder and lock it, but for a dry run; returns what is wrong with it."""
    holds_run = any((folder / name).exists() for name in ("metrics.jsonl", "model.safetensors")) or any(
        folder.glob("checkpoint-*")
    )
    if holds_run and not (goes_on or overwrite):
        return (
            f"--output_dir is {folder}; it already holds a run. Continue it with --resume_from_checkpoint latest, "
            "replace it with --overwrite_output_dir, or give another folder."
        )
    if dry_run:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".writable"
    probe.write_text("")
    probe.unlink()
    problem = starting.lock_folder(folder)
    if not problem and overwrite and not goes_on:
        _empty(folder)
    return problem


def _empty(folder: Path) -> None:
    """Remove what an earlier run's loop would take for its own: the log, the list of starts, checkpoints, pushes."""
    for name in ("metrics.jsonl", starting.STARTS_FILE):
        (folder / name).unlink(missing_ok=True)
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    shutil.rmtree(folder / spool.FOLDER, ignore_errors=True)


def _write_down(
    name: str, folder: Path, config: Mapping[str, Any], about: dict[str, Any], launch: Sequence[str]
) -> str | None:
    """Leave `config.yaml` and an entry in `environment.json`; returns what is wrong, if they cannot be written."""
    saved = {
        key: value for key, value in config.items() if key not in ("resume_from_checkpoint", "overwrite_output_dir")
    }
    shown = without_secrets(saved)
    for key in (key for key in saved if shown[key] != saved[key]):
        logger.warning("--%s holds a secret, which config.yaml leaves out; give it again when the run is resumed", key)
    header = f"# accelerate launch scripts/{name}.py --config {folder}/config.yaml --overwrite_output_dir\n"
    try:
        (folder / "config.yaml").write_text(header + yaml.safe_dump(shown, sort_keys=False))
        starting.record_start(folder, about, launch)
    except OSError as error:
        return f"--output_dir is {folder}; it cannot be written: {error.strerror}. Give a folder that can."
    return None


def set_up_logging(main: bool = True, local_main: bool = True) -> None:
    """Messages on stderr with their time; only the main process gives more than warnings, progress bars one a machine."""
    level = logging.INFO if main else logging.WARNING
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    sys.excepthook = _show_uncaught
    logging.getLogger("mm_utils").setLevel(level)
    logging.getLogger("__main__").setLevel(level)
    transformers.logging.set_verbosity_error()
    if not local_main:
        datasets.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def _show_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's own report, which quotes addresses and command lines, without secrets."""
    sys.stderr.write(printable(redact("".join(traceback.format_exception(kind, error, trace)))))
