"""Send figures to trackers (tensorboard, wandb, ...) so that none of them can stop a run or slow it down.

All of a tracker's calls come from a thread of its own: accelerate's trackers raise where the network fails, and their
libraries may wait for it without end. What a tracker does not take stands in `metrics.jsonl` all the same.
"""

import atexit
import json
import logging
import queue
import shlex
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from mm_utils.safe_text import one_line, redact, without_secrets

logger = logging.getLogger(__name__)

FILE = "tracker.json"  # in the output folder: for each tracker, its run's id and the last step that it took
MOST_WAITING = 10_000  # calls
# Arguments of a tracker that name a run, where the name is ours to choose.
CHOSEN_IDS = {
    "wandb": ("id", {"resume": "allow"}),
    "trackio": ("name", {"resume": "allow"}),
    "swanlab": ("id", {"resume": "allow"}),
    "comet_ml": ("experiment_key", {"mode": "get_or_create"}),
}
# Where the tracker chooses it: the attribute that has it, and the argument that goes on with it.
GIVEN_IDS = {"mlflow": ("info.run_id", "run_id"), "aim": ("hash", "run_hash"), "clearml": ("id", "continue_last_task")}


class Tracking:
    """The trackers of one run; every method returns at once, `finish` within its limit, and none raises."""

    def __init__(self, accelerator: Accelerator, name: str, config: Mapping[str, Any], output_dir: str | Path) -> None:
        """Start the trackers that `accelerator` was made for, on the main process.

        A run that is resumed (`resume_from_checkpoint` in `config`) goes on where its trackers were.

        Args:
            accelerator: from `mm_utils.run.start_run`.
            name: of the project.
            config: the arguments; secrets are taken out.
            output_dir: of the run.
        """
        self.accelerator = accelerator
        self._threads: list[_TrackerThread] = []
        if not accelerator.is_main_process or not accelerator.log_with:
            return
        path = Path(output_dir) / FILE
        memory = _Memory(path, new=not config.get("resume_from_checkpoint"))
        shown = {key: _plain(value) for key, value in without_secrets(config).items() if value is not None}
        for tracker in accelerator.log_with:
            thread = _TrackerThread(tracker, name, str(accelerator.logging_dir or output_dir), shown, memory)
            thread.start()
            self._threads.append(thread)
        if self._threads:
            atexit.register(self._wait, 10.0)  # an interrupted run does not come to its end

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Pass figures on. After a resume, those of steps that a tracker has already are left out."""
        for thread in self._threads:
            thread.put(dict(values), step)

    def finish(self, timeout: float = 60.0) -> None:
        """Give the trackers `timeout` seconds for what they have not sent, then end the training's processes as a group."""
        self._wait(timeout)
        self.accelerator.end_training()

    def _wait(self, timeout: float) -> None:
        atexit.unregister(self._wait)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.put(None, None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                thread.complain(f"it has not taken everything within {timeout:g} seconds")
        self._threads = []


class _TrackerThread(threading.Thread):
    """One tracker, and the calls that wait for it."""

    def __init__(self, tracker: Any, project: str, folder: str, config: dict[str, Any], memory: "_Memory") -> None:
        super().__init__(daemon=True, name=f"tracker-{getattr(tracker, 'name', tracker)}")
        self.tracker, self.project, self.folder, self.config, self.memory = tracker, project, folder, config, memory
        self.label = str(tracker.name if isinstance(tracker, GeneralTracker) else tracker)
        self.last_step = memory.step(self.label)
        self.calls: queue.Queue[tuple[dict[str, Any] | None, int | None]] = queue.Queue(MOST_WAITING)
        self._complained = False

    def put(self, values: dict[str, Any] | None, step: int | None) -> None:
        """Have figures sent, or None: end."""
        if step is not None and step < self.last_step:
            return
        try:
            self.calls.put_nowait((values, step))
        except queue.Full:
            self.complain(f"{MOST_WAITING:,} calls wait for it")

    def complain(self, reason: str) -> None:
        """Say once that figures are missing."""
        if not self._complained:
            self._complained = True
            logger.warning(
                "the tracker %s lacks figures: %s. Training goes on; all figures are in metrics.jsonl",
                self.label,
                reason,
            )

    def run(self) -> None:
        """Start the tracker and serve it until None comes."""
        try:
            tracker = self._start()
        except Exception as error:
            self.complain(one_line(error))
            return
        try:
            tracker.store_init_configuration(self.config)
        except Exception as error:
            self.complain(one_line(error))
        while True:
            values, step = self.calls.get()
            try:
                if values is None:
                    tracker.finish()
                    return
                tracker.log(values, step=step)
                self.memory.keep(self.label, step=step)
            except Exception as error:
                self.complain(one_line(error))
                if values is None:
                    return

    def _start(self) -> GeneralTracker:
        known, arguments = self.memory.run_id(self.label), {}
        if self.label in CHOSEN_IDS:
            argument, more = CHOSEN_IDS[self.label]
            known = known or uuid.uuid4().hex[:21]  # swanlab wants 21 letters, comet_ml 32 to 50
            arguments = {argument: known.ljust(32, "0") if self.label == "comet_ml" else known, **more}
        elif self.label in GIVEN_IDS and known:
            arguments = {GIVEN_IDS[self.label][1]: known}
        tracker = self.tracker
        if not isinstance(tracker, GeneralTracker):
            kind = LOGGER_TYPE_TO_CLASS[self.label]
            where = [self.folder] if kind.requires_logging_directory else []
            tracker = kind(self.project, *where, **arguments)
        with _redacted_command_line():
            tracker.start()
        if self.label in GIVEN_IDS:
            known = tracker.tracker
            for attribute in GIVEN_IDS[self.label][0].split("."):
                known = getattr(known, attribute)
        if known:
            self.memory.keep(self.label, id=str(known))
        return tracker


class _Memory:
    """What a resumed run has to know of its trackers."""

    def __init__(self, path: Path, new: bool) -> None:
        self.path, self.lock = path, threading.Lock()
        self.content: dict[str, dict[str, Any]] = {}
        if new:
            with suppress(OSError):
                path.unlink()
            return
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
            self.content = {str(name): dict(value) for name, value in dict(read).items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s is not readable: %s. The trackers start new runs", path, one_line(error))

    def run_id(self, name: str) -> str | None:
        found = self.content.get(name, {}).get("id")
        return found if isinstance(found, str) else None

    def step(self, name: str) -> int:
        found = self.content.get(name, {}).get("step")
        return found if isinstance(found, int) else 0

    def keep(self, name: str, **values: Any) -> None:
        with self.lock, suppress(OSError):  # a full disk is not the tracker's fault
            self.content.setdefault(name, {}).update(values)
            temporary = self.path.with_name(f"{self.path.name}.tmp")
            temporary.write_text(json.dumps(self.content) + "\n", encoding="utf-8")
            temporary.replace(self.path)


@contextmanager
def _redacted_command_line() -> Iterator[None]:
    """Some trackers publish `sys.argv`."""
    before = sys.argv
    try:
        sys.argv = shlex.split(redact(shlex.join(before)))
    except ValueError:  # what is left has a quote too many
        sys.argv = before[:1]
    try:
        yield
    finally:
        sys.argv = before


def _plain(value: Any) -> Any:
    """What every tracker takes as an argument of a run."""
    return value if isinstance(value, (bool, int, float, str)) else str(value)
