"""Send metrics to trackers (tensorboard, wandb, ...) that can neither stop nor slow a run.

Each tracker has a thread of its own: accelerate's trackers raise when the network fails, and their libraries may block without
end. What a tracker does not take is still in `metrics.jsonl`.

A resumed run is a new run to the tracker. To continue the earlier one set the tracker's own variables, such as WANDB_RUN_ID and
WANDB_RESUME=allow, or MLFLOW_RUN_ID.
"""

import atexit
import logging
import queue
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, filter_trackers, get_available_trackers
from transformers import TrainerControl, TrainerState

from mm_utils.arguments import Parsed, arg
from mm_utils.text import one_line, redact, without_secrets
from mm_utils.training.callbacks import RunCallback

logger = logging.getLogger(__name__)

_MAX_QUEUED = 10_000  # calls
_RUN_NAME = {
    "wandb": "name",
    "mlflow": "run_name",
    "clearml": "task_name",
    "swanlab": "experiment_name",
    "trackio": "name",
}
"""What the trackers call the name of a run; TensorBoard has a folder of that name."""


@dataclass
class TrackerArguments:
    """Experiment trackers."""

    report_to: str | None = arg(
        None,
        "Trackers that accelerate knows and that are installed, e.g. tensorboard or tensorboard,wandb; 'none' for none.",
    )

    run_name: str | None = arg(None, "Name of the run in the trackers; by default they choose one.")

    def __post_init__(self) -> None:
        installed = [tracker.value for tracker in get_available_trackers()]
        if self.report_to is not None and set(self.names) - {"none", "all", *installed}:
            raise ValueError(
                f"--report_to is {self.report_to}; installed are {', '.join(installed) or 'none'}. Install it with pip."
            )
        if self.run_name is not None and self.run_name != Path(self.run_name).name:
            raise ValueError(f"--run_name is {self.run_name!r}; that is the path of a folder. Give a plain name.")
        named = {"tensorboard", "all", *_RUN_NAME}
        if self.run_name is not None and not named & set(self.names):
            raise ValueError(
                f"--run_name is {self.run_name}; no tracker of --report_to ({self.report_to or 'none'}) takes it. Give one of "
                f"{', '.join(sorted(named))}, or drop it."
            )

    @property
    def names(self) -> list[str]:
        """Names of the trackers, `none` included."""
        return [name.strip() for name in (self.report_to or "none").split(",")]


class Tracking(RunCallback):
    """The trackers of one run; every method but `finish` returns at once, and none raises.

    Args:
        report_to: what accelerate's `log_with` takes: a name, several, or a tracker.
        run_name: the name of the run; None leaves it to the trackers.
    """

    arguments = TrackerArguments
    flag = "report_to"

    def __init__(self, report_to: Any, run_name: str | None = None):
        self.report_to, self.run_name = report_to, run_name
        self._threads: list[_TrackerThread] = []

    @classmethod
    def attach(cls, given: Parsed) -> "Tracking | None":
        """Return the callback with a tracker."""
        names = [name for name in given[TrackerArguments].names if name != "none"]
        return cls(names, given[TrackerArguments].run_name) if names else None

    def on_start(self, run: Any) -> None:
        """Start the trackers, on the main process."""
        if run.run.accelerator.is_main_process:
            self.start(run.run.name, run.run.settings, run.run.output_dir)

    def start(self, project: str, config: Mapping[str, Any], output_dir: str | Path) -> None:
        """Start the trackers.

        Args:
            project: the name of the project.
            config: the run's arguments; secrets are removed.
            output_dir: the folder for trackers that write files.
        """
        plain = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in without_secrets(config).items()
            if value is not None
        }
        for tracker in filter_trackers(self.report_to, str(output_dir)):
            thread = _TrackerThread(tracker, project, str(output_dir), plain, self.run_name)
            thread.start()
            self._threads.append(thread)
            if thread.label == "tensorboard":
                logger.info("TensorBoard's files: tensorboard --logdir %s", Path(output_dir) / project)
        atexit.register(self.finish, 10.0)  # an interrupted run does not call `on_publish`

    def on_publish(self, run: Any) -> None:
        """Wait for what is not sent yet."""
        self.finish()

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Send `logs` at the current step."""
        self.log({name: value for name, value in (logs or {}).items() if name != "step"}, state.global_step)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Send metrics of a step."""
        for thread in self._threads:
            thread.send(dict(values), step)

    def finish(self, timeout: float = 60.0) -> None:
        """Wait up to `timeout` seconds for what is not sent yet."""
        atexit.unregister(self.finish)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.send(None, None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                thread.complain(f"it has not taken everything within {timeout:g} seconds")
        self._threads = []


class _TrackerThread(threading.Thread):
    """One tracker, and the queue of calls to it; `None` as values ends it."""

    def __init__(
        self, tracker: Any, project: str, folder: str, config: dict[str, Any], run_name: str | None = None
    ) -> None:
        self.label = str(tracker.name if isinstance(tracker, GeneralTracker) else tracker)
        super().__init__(daemon=True, name=f"tracker-{self.label}")
        self.tracker, self.project, self.folder, self.config = tracker, project, folder, config
        self.run_name = run_name
        self.calls: queue.Queue[tuple[dict[str, Any] | None, int | None]] = queue.Queue(_MAX_QUEUED)
        self._has_complained = False

    def send(self, values: dict[str, Any] | None, step: int | None) -> None:
        """Queue a call."""
        try:
            self.calls.put_nowait((values, step))
        except queue.Full:
            self.complain(f"{_MAX_QUEUED:,} calls wait for it")

    def complain(self, reason: str) -> None:
        """Warn once that the tracker lacks metrics."""
        if not self._has_complained:
            self._has_complained = True
            text = "the tracker %s lacks metrics: %s. Training goes on; all metrics are in metrics.jsonl"
            logger.warning(text, self.label, reason)

    def run(self) -> None:
        """Start the tracker and make the queued calls."""
        try:
            tracker = self._start()
        except BaseException as error:  # a client may exit, which would end its thread in silence
            self.complain(one_line(error))
            return
        self._call(tracker.store_init_configuration, self.config)
        while (call := self.calls.get())[0] is not None:
            self._call(tracker.log, call[0], step=call[1])
        self._call(tracker.finish)

    def _call(self, method: Callable[..., Any], *values: Any, **options: Any) -> None:
        try:
            method(*values, **options)
        except BaseException as error:  # a client may exit, which would end its thread in silence
            self.complain(one_line(error))

    def _start(self) -> GeneralTracker:
        tracker = self.tracker
        if not isinstance(tracker, GeneralTracker):
            kind = LOGGER_TYPE_TO_CLASS[self.label]
            project, options = self.project, {}
            if self.run_name is not None and self.label in _RUN_NAME:
                options = {_RUN_NAME[self.label]: self.run_name}
            elif self.run_name is not None and self.label == "tensorboard":
                project = f"{project}/{self.run_name}"
            tracker = kind(project, *[self.folder] if kind.requires_logging_directory else [], **options)
        command_line = sys.argv
        try:
            sys.argv = _redacted(command_line)  # some trackers publish it
            tracker.start()
        finally:
            sys.argv = command_line
        return tracker


def _redacted(words: list[str]) -> list[str]:
    try:
        return shlex.split(redact(shlex.join(words)))
    except ValueError:  # a quote has lost its partner
        return words[:1]
