"""The callbacks that every run has."""

from transformers import EarlyStoppingCallback, TrainerCallback

from mm_utils.data.training_data import TrainingData
from mm_utils.extras.placement.balance import Balance
from mm_utils.model.flops import FlopCounts
from mm_utils.objectives import Objective
from mm_utils.reliability.skipped_samples import SkippedSamples
from mm_utils.reliability.watchdog import HangDetection, StragglerDetection
from mm_utils.run.restarts import RestartRecord
from mm_utils.run.start import Run
from mm_utils.training.callbacks import LossOfMedium, ProgressBar
from mm_utils.training.throughput import Communication, LoaderAdvice, Throughput


def default_callbacks(
    run: Run, objective: Objective, data: TrainingData, flops: FlopCounts | None = None
) -> list[TrainerCallback]:
    """Return the callbacks that every run has; those that add values to the log come first.

    Args:
        run: the started run.
        objective: the objective that is trained.
        data: the data that it is trained on.
        flops: the model's FLOPs, to log how fast it computes.
    """
    device, args = run.accelerator.device, run.args
    callbacks: list[TrainerCallback] = [
        HangDetection(args.ddp_timeout),
        Balance(run.accelerator, objective),
        Throughput(device, flops if len(data.media) == 1 else None, objective.pairs_per_image),
        Communication(run.accelerator.distributed_type),
        LossOfMedium(),
        StragglerDetection(),
        SkippedSamples(),
        RestartRecord(),
        run.tracking,
        run.pusher,
        ProgressBar(),
    ]
    if data.features is None or "image" in data.features.column_names:  # cached features cost the loader nothing
        callbacks.append(LoaderAdvice(lambda: data.loaders.workers))
    if args.early_stopping_patience:
        callbacks.append(EarlyStoppingCallback(args.early_stopping_patience))
    return callbacks
