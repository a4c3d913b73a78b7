"""Start a run: processes, logging, output folder, seed."""

import logging
import os
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import set_seed

from mm_utils import distributed
from mm_utils.arguments import Parsed, to_dict
from mm_utils.data.arguments import SPLIT_NAMES
from mm_utils.data.training_data import TrainingData
from mm_utils.distributed import RunError
from mm_utils.files import write_json
from mm_utils.reports.model_card import library_versions
from mm_utils.run import rendezvous
from mm_utils.run.launched import check_processes, launched_processes, refuse_settings
from mm_utils.run.output_folder import claim_folder, save_config
from mm_utils.run.restarts import code_digest, describe_start, launcher_names, record_start
from mm_utils.run.script import run_script as run_script
from mm_utils.run.script import set_up_logging as set_up_logging
from mm_utils.run.script import use_cpu_well
from mm_utils.text import one_line
from mm_utils.training.arguments import CONFIG_FILE, TrainingArguments

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """A started run.

    `settings` has all arguments by name; `fits_batch`: the command line does not name the size of a batch, so that it is at most all rows. Features are stored in the
    datasets cache, or below `feature_root` by a dry run, which leaves none.
    """

    name: str
    accelerator: Accelerator
    output_dir: Path
    settings: dict[str, Any]
    args: TrainingArguments
    fits_batch: bool = True
    feature_root: Path | None = None

    def settled(self, data: TrainingData, has_baseline: bool = False) -> "Run":
        """Return this run with the arguments that depend on the data, and on whether its first weights are a model."""
        return replace(self, args=self.args.settled(data.order.sizes, data.num_rows, has_baseline))


def start_run(name: str, given: Parsed) -> Run:
    """Set up processes, logging and the output folder of a script.

    Device, precision and number of processes come from `accelerate launch`, everything else from the arguments.
    The run's `args.output_dir` is the folder, and after a restart by the launcher its `args.resume_from_checkpoint` is `latest`.

    Raises:
        RunError: if the processes do not see each other, or the output folder cannot be used.
        ValueError: if the processes have different arguments or code, or the device does not compute in the precision.
    """
    args = given[TrainingArguments]
    settings = given.settings
    fits_batch = args.batch_size_schedule is None and "global_batch_size" not in given.named
    accelerator = make_accelerator()
    check_vision_device(args.vision_device)
    common = {f"--{name}": value for name, value in given.common.items()}
    versions = {**library_versions(), "the code of mm_utils": code_digest()}
    distributed.check_equal_on_all_ranks(
        {**common, **versions}, "Start all machines with one command, in equal environments."
    )
    launch = launcher_names()
    description = describe_start(accelerator)

    def begin() -> tuple[Path, str | None]:
        folder, resume_from = claim_folder(name, args, settings, launch)
        if not (resume_from and (folder / CONFIG_FILE).is_file()):  # else once the run may go on
            save_config(folder, {**settings, "output_dir": str(folder)})
        record_start(folder, description, launch)
        return folder, resume_from

    folder, resume_from = distributed.on_first(begin)
    args = replace(args, output_dir=str(folder), resume_from_checkpoint=resume_from)
    set_seed(args.seed)
    return Run(
        name,
        accelerator,
        folder,
        {**settings, **to_dict(args)},
        args,
        fits_batch=fits_batch,
        feature_root=folder.parent if given.is_trial else None,
    )


def check_vision_device(name: str | None) -> None:
    """Raise ValueError if `--vision_device` is no device of this machine, or there are several processes."""
    if name is None:
        return
    if distributed.world_size() > 1:
        raise ValueError(
            f"--vision_device is {name}; there are {distributed.world_size()} processes, each with a device of its own. Start one "
            "process, or drop it: DDP and FSDP2 divide the work among processes."
        )
    try:
        torch.zeros(1, device=name).cpu()  # no value comes back from "meta"
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch is built without CUDA
        why = one_line(error).split(". ")[0]
        raise ValueError(
            f"--vision_device is {name}; {why}. Give a device that this machine has, or drop it."
        ) from error


def make_accelerator() -> Accelerator:
    """Return the accelerator as `accelerate launch` set it up; set up logging.

    Raises:
        RunError: if the processes do not see each other, or Accelerate is set to what no run does.
    """
    refuse_settings(os.environ)
    # Forked processes would wait forever for the threads of tokenizers, where TOKENIZERS_PARALLELISM is true.
    os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))
    # Otherwise transformers would load a model in one process, and leave its weights empty in the others for FSDP to fill.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    # Its successor is not in older versions of torch, which are supported, too.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    launched = launched_processes(os.environ)
    handlers = [
        DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
        InitProcessGroupKwargs(
            init_method=rendezvous.init_method() if launched[0] > 1 else None,
            timeout=timedelta(seconds=distributed.RENDEZVOUS_TIMEOUT),
        ),
    ]
    try:
        accelerator = Accelerator(kwargs_handlers=handlers)
    except (TimeoutError, ImportError) as error:  # ImportError: a package that its configuration asks for
        raise RunError(str(error)) from error
    distributed.any_rank(False, accelerator.device)  # NCCL connects at the first collective: let all connect now
    distributed.set_timeout(distributed.COLLECTIVE_TIMEOUT)
    set_up_logging(accelerator.is_main_process, accelerator.is_local_main_process)
    check_processes(launched, accelerator.num_processes)
    device = accelerator.device.type
    if device == "cpu":
        use_cpu_well()
    elif device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32; the losses turn it off
    logger.info("%d x %s, mixed precision %s", accelerator.num_processes, device, accelerator.mixed_precision)
    return accelerator


def report_metrics(
    accelerator: Accelerator, lines: list[str], metrics: dict[str, float], folder: str | None, split: str
) -> None:
    """Log what a person reads first, and write all metrics to `metrics.json` in a folder if one is given."""
    if accelerator.is_main_process:
        if SPLIT_NAMES.get(split.lower()) == "train":
            logger.warning(
                "The split is %s; of a model that was trained on these rows, the figures say nothing about others. Set --split, "
                "or name other data.",
                split,
            )
        more = (
            "Give --output_dir to have all metrics" if folder is None else f"All metrics are in {folder}/metrics.json"
        )
        logger.info("%s", "\n".join([*lines, more]))
        if folder is not None:
            write_json(Path(folder, "metrics.json"), metrics)
