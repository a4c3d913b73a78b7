"""Send the log to accelerate's trackers (tensorboard, wandb, ...); one that fails does not end the run."""

import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from transformers import TrainerCallback, TrainerControl, TrainerState

from mm_utils import distributed
from mm_utils.text import one_line, without_secrets

logger = logging.getLogger(__name__)


def tracker_names(report_to: str | None) -> list[str]:
    """Return the trackers that --report_to names.

    Raises:
        ValueError: if one is not installed.
    """
    words = map(str.strip, (report_to or "").split(","))
    names = [word for word in words if word not in ("", "none")]
    installed = [tracker.value for tracker in get_available_trackers()]
    if not set(names) <= set(installed):
        raise ValueError(
            f"--report_to is {report_to}; installed are {', '.join(installed) or 'none'}. Install it with pip."
        )
    return names


class Tracking(TrainerCallback):
    """The trackers of a run's main process, which begin at once. What they do not take is in `metrics.jsonl`."""

    def __init__(self, report_to: str | None, run: str, output_dir: Path, settings: Mapping[str, Any]):
        self.trackers = list[GeneralTracker]()
        self.failed = set[str]()
        given = {name: value for name, value in without_secrets(settings).items() if value is not None}
        plain = (bool, int, float, str)
        config = {name: value if isinstance(value, plain) else str(value) for name, value in given.items()}

        def start(name: str) -> None:
            kind = LOGGER_TYPE_TO_CLASS[name]
            # tensorboard writes into a folder, wandb does not ask for one
            tracker = kind(run, *[str(output_dir)] if kind.requires_logging_directory else [])
            tracker.start()
            self.trackers.append(tracker)
            tracker.store_init_configuration(config)

        words = sys.argv[1:]
        del sys.argv[1:]  # some trackers publish them
        for name in tracker_names(report_to) if distributed.rank() == 0 else ():
            self._try(name, start, name)
        sys.argv += words

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Send a row of the log as `train/loss`, `eval/mean_recall` ..."""
        values = {
            f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": value
            for name, value in kwargs["logs"].items()
            if name != "step"
        }
        for tracker in self.trackers:
            self._try(tracker.name, tracker.log, values, state.global_step)

    def finish(self) -> None:
        """End the trackers."""
        for tracker in self.trackers:
            self._try(tracker.name, tracker.finish)

    def _try(self, name: str, act: Callable[..., Any], *given: Any) -> None:
        """Turn what a tracker raises into one warning."""
        try:
            act(*given)
        except (Exception, SystemExit) as error:  # a client may exit
            if name not in self.failed:
                self.failed.add(name)
                text = "the tracker %s lacks metrics: %s. Training goes on; all metrics are in metrics.jsonl"
                logger.warning(text, name, one_line(error))
