"""The callbacks that every run has."""

from functools import partial

from transformers import EarlyStoppingCallback, TrainerCallback

from mm_utils.data.training_data import TrainingData
from mm_utils.model.flops import measure_flops
from mm_utils.objectives import Objective
from mm_utils.reliability.skipped_samples import SkippedSamples
from mm_utils.reliability.watchdog import HangDetection, StragglerDetection
from mm_utils.run.output_folder import save_config
from mm_utils.run.restarts import RestartRecord
from mm_utils.run.start import Run
from mm_utils.training.callbacks import ProgressBar, TemperatureClamp
from mm_utils.training.diagnosis import CollapseWarning
from mm_utils.training.throughput import Communication, LoaderAdvice, Throughput


def default_callbacks(
    run: Run, objective: Objective, data: TrainingData, highest_scale: float | None = None
) -> list[TrainerCallback]:
    """Return the callbacks that every run has; those that add values to the log come first.

    Args:
        run: the started run.
        objective: the objective that is trained.
        data: the data that it is trained on.
        highest_scale: the bound of the inverse temperature; None for an objective without one.
    """
    device, args, caches = run.accelerator.device, run.args, bool(run.settings.get("cache_features"))
    flops = None
    if highest_scale is not None and len(data.media) == 1:
        shape = data.loaders.blank(1).shape[1:]
        flops = measure_flops(objective.model, shape, data.max_seq_length, not caches)
    callbacks: list[TrainerCallback] = [
        HangDetection(args.ddp_timeout),
        Throughput(device, flops, objective.pairs_per_image),
        Communication(run.accelerator.distributed_type),
        StragglerDetection(),
        SkippedSamples(),
        RestartRecord(partial(save_config, run.name, run.output_dir, run.settings)),
        ProgressBar(),
    ]
    if highest_scale is not None:
        warmup = run.settings["warmup_ratio"]
        callbacks += [TemperatureClamp(highest_scale), CollapseWarning(warmup, highest_scale)]
    if not (caches and run.settings["freeze_vision"]):  # cached features cost the loader nothing
        callbacks.append(LoaderAdvice(lambda: data.loaders.workers))
    if args.early_stopping_patience:
        callbacks.append(EarlyStoppingCallback(args.early_stopping_patience))
    return callbacks
