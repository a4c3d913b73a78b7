"""The callbacks of a run: those that every run has, those of `--callbacks`, and those of its script."""

import logging
from collections.abc import Iterable
from functools import partial

from transformers import TrainerCallback

from mm_utils.arguments import load_own
from mm_utils.reliability.skipped import SkippedSamples
from mm_utils.reliability.watchdog import HangDetection
from mm_utils.run.output_folder import save_config
from mm_utils.run.restarts import RestartRecord
from mm_utils.run.start import Run
from mm_utils.text import passes_own_code
from mm_utils.training.callbacks import ProgressBar, Throughput

logger = logging.getLogger(__name__)


def own_callbacks(names: str | None) -> list[TrainerCallback]:
    """Return the callbacks that `--callbacks` names.

    Raises:
        ValueError: if it names no callback.
    """
    words = [name.strip() for name in (names or "").split(",") if name.strip()]
    return [_made(load_own(name, "--callbacks", TrainerCallback), name) for name in words]


def _made(kind: type[TrainerCallback], name: str) -> TrainerCallback:
    if gone := {"on_start", "on_finish", "on_publish"}.intersection(dir(kind)):
        logger.warning(
            "--callbacks has %s; its %s is never called. Write on_train_begin, or what follows main.", name, min(gone)
        )
    try:
        return kind()
    except TypeError as error:
        if passes_own_code(error):
            raise
        raise ValueError(
            f"--callbacks has {name}; {error}. It is made without arguments: give each a default."
        ) from error


def all_callbacks(run: Run, others: Iterable[TrainerCallback | None]) -> list[TrainerCallback]:
    """Return the callbacks that every run has, and others; those that add values to the log come before the bar."""
    return [
        HangDetection(run.args.ddp_timeout),
        Throughput(run.accelerator.device),
        SkippedSamples(),
        RestartRecord(partial(save_config, run.output_dir, run.settings)),
        *(each for each in others if each is not None),
        ProgressBar(),
    ]
