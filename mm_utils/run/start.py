"""Start a run: processes, logging, output folder, seed, trackers."""

import json
import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.tracking import get_available_trackers
from accelerate.utils import broadcast_object_list, set_seed

from mm_utils import distributed
from mm_utils.arguments import Parsed, arg, to_dict
from mm_utils.distributed import RunError
from mm_utils.reliability import rendezvous
from mm_utils.reports.hub import HubArguments, HubPusher
from mm_utils.reports.tracking import Tracking
from mm_utils.run import checks
from mm_utils.run.output_folder import claim_folder, save_config
from mm_utils.run.restarts import describe_start, launcher_names, record_start
from mm_utils.run.script import run_script as run_script
from mm_utils.run.script import set_up_logging as set_up_logging
from mm_utils.training.arguments import CONFIG_FILE, TrainingArguments

logger = logging.getLogger(__name__)


@dataclass
class RunArguments:
    """Trackers and callbacks."""

    report_to: str | None = arg(
        None, "A tracker that accelerate knows and that is installed, e.g. tensorboard or wandb; 'none' for none."
    )
    callbacks: str | None = arg(
        None, "Callbacks of your own, module.Class[,module.Class], made without arguments: docs/training.md."
    )

    def __post_init__(self) -> None:
        installed = [tracker.value for tracker in get_available_trackers()]
        if self.report_to not in (None, "none", "all", *installed):
            raise ValueError(
                f"--report_to is {self.report_to}; installed are {', '.join(installed) or 'none'}. Install it with pip."
            )


@dataclass
class Run:
    """A started run.

    Attributes:
        name: the script's name.
        accelerator: processes, device and precision.
        output_dir: the output folder.
        settings: all arguments, by name.
        args: the training arguments.
        tracking, pusher: the trackers, and the connection to the Hub.
    """

    name: str
    accelerator: Accelerator
    output_dir: Path
    settings: dict[str, Any]
    args: TrainingArguments
    tracking: Tracking
    pusher: HubPusher


def start_run(name: str, given: Parsed) -> Run:
    """Set up processes, logging, trackers and the output folder.

    Device, precision and number of processes come from `accelerate launch`, everything else from the arguments.
    `args.output_dir` is set to the folder, and after a restart by the launcher `args.resume_from_checkpoint` to `latest`.

    Args:
        name: the script's name.
        given: all arguments of the script.

    Raises:
        RunError: if the processes do not see each other, or the output folder cannot be used.
        ValueError: if the processes have different arguments or code, or the device does not support the precision.
    """
    args, run_args, hub_args, settings = (
        given[TrainingArguments],
        given[RunArguments],
        given[HubArguments],
        given.settings,
    )
    args.script, args.settings = name, settings
    accelerator = make_accelerator(run_args.report_to, args.output_dir)
    checks.check_devices(accelerator, bool(given["balance"]))
    checks.check_equal_start(settings)
    launch, description = launcher_names(), describe_start(accelerator)
    claim = None
    if accelerator.is_main_process:
        claim = claim_folder(name, args, settings, launch)
    [claim] = broadcast_object_list([claim])
    args.output_dir, args.resume_from_checkpoint = claim.folder, claim.resume_from
    settings, problem = {**settings, **to_dict(args)}, claim.problem
    if accelerator.is_main_process and not problem:
        try:
            if not (claim.resume_from and (Path(claim.folder) / CONFIG_FILE).is_file()):  # else once the run may go on
                save_config(name, Path(claim.folder), settings)
            record_start(Path(claim.folder), description, launch)
        except OSError as error:
            problem = (
                f"--output_dir is {claim.folder}; it cannot be written: {error.strerror}. Give a folder that can."
            )
    [problem] = broadcast_object_list([problem])
    if problem:
        raise RunError(problem)
    set_seed(args.seed)
    tracking = Tracking(accelerator, name, settings, claim.folder)
    return Run(name, accelerator, Path(claim.folder), settings, args, tracking, HubPusher(hub_args, claim.folder))


def make_accelerator(report_to: str | None = None, project_dir: str | None = None) -> Accelerator:
    """Return the accelerator as `accelerate launch` set it up; set up logging.

    Raises:
        RunError: if the processes do not see each other, or the launcher is one that they cannot be started by.
        ValueError: if the device does not support the precision, or the launcher is gone.
    """
    checks.check_launcher()
    checks.end_with_launcher()
    checks.fork_without_tokenizer_threads()
    checks.check_precision()
    report_to = None if report_to == "none" else report_to
    # Otherwise transformers would load a model in one process, and leave its weights empty in the others for FSDP to fill.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    handlers = [
        DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
        InitProcessGroupKwargs(
            init_method=rendezvous.init_method(), timeout=timedelta(seconds=rendezvous.RENDEZVOUS_TIMEOUT)
        ),
    ]
    try:
        accelerator = Accelerator(log_with=report_to, project_dir=project_dir, kwargs_handlers=handlers)
    except TimeoutError as error:
        raise RunError(str(error)) from error
    distributed.any_rank(False, accelerator.device)  # NCCL connects at the first collective: let all connect now
    distributed.set_timeout(distributed.COLLECTIVE_TIMEOUT)
    set_up_logging(accelerator.is_main_process, accelerator.is_local_main_process)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise RunError(
            f"{launched} processes were launched, but each sees {accelerator.num_processes}; they would train apart and "
            "write over each other. On a machine without GPUs, set ACCELERATE_USE_CPU=true."
        )
    device = accelerator.device.type
    if device == "cpu":
        checks.use_cpu_well()
    elif device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32; the losses turn it off
    logger.info("%d x %s, mixed precision %s", accelerator.num_processes, device, accelerator.mixed_precision)
    if accelerator.is_main_process:
        checks.report_launch(accelerator.device)
    return accelerator


def report_metrics(accelerator: Accelerator, metrics: dict[str, float], file: str | None) -> None:
    """Log metrics, and write them to a JSON file if one is given."""
    if accelerator.is_main_process:
        logger.info("\n%s", "\n".join(f"{name:<40}{value:.4f}" for name, value in metrics.items()))
        if file:
            Path(file).write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
