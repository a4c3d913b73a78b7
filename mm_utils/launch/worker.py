"""What a worker of Ray Train does: run a script's `main` in a thread of Ray's actor.

Ray connects the workers, so that `torch.distributed` is set up when the script begins. It has its own working folder, which is
left for that of the command. What the launcher must tell from a crash comes back in two ways: a run that saved because Ray takes
a machine away returns, and a user's mistake is raised as `Refused`, which is not tried again.
"""

import importlib.util
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState

from mm_utils import distributed
from mm_utils.arguments import LAUNCH_VARIABLE
from mm_utils.data.batches.workers import end_workers
from mm_utils.distributed import RunError
from mm_utils.reliability import signals
from mm_utils.reliability.signals import Interrupted
from mm_utils.run.restarts import LAUNCHER_VARIABLE
from mm_utils.text import redact

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Between reports of training rows, and between looks for a machine that is taken away: Ray's controller takes one report in two
seconds, and lets the workers wait for it."""


def work(task: Mapping[str, Any]) -> dict[str, Any]:
    """Run the script; called by Ray on every worker.

    Args:
        task: `script`, `argv`, `folder` and `launcher` of the command, `launch`, the name of this launch, and `on_cpu`.

    Returns:
        `metrics`, those of the script, and `preempted`, whether it has saved and must be started again.

    Raises:
        Refused: if the script ends with a user's mistake.
    """
    import ray.train

    from mm_utils.launch.refusals import Refused

    callback = RayCallback(ray.train.report, lambda: ray.train.get_preemption_info() is not None)
    metrics: dict[str, float] = {}
    try:
        prepare(task)
        metrics = load_main(task["script"])(list(task["argv"]), [callback])
        end_workers()
    except Interrupted:  # by the callback alone: signals are not recorded outside the main thread
        end_workers()
    except (RunError, ValueError, FloatingPointError) as error:  # those of `run_script`
        raise Refused(redact(str(error))) from error
    except SystemExit as error:
        raise Refused(f"the script ended with exit status {error.code}; its message is above.") from error
    return {"metrics": metrics, "preempted": callback.has_stopped}


def prepare(task: Mapping[str, Any]) -> None:
    """Set what `accelerate launch` and the shell would have set.

    Raises:
        ValueError: if this machine does not have the command's folder.
    """
    try:
        os.chdir(task["folder"])
    except OSError as error:
        raise ValueError(
            f"the command was given in {task['folder']}; a machine of Ray cannot enter it: {error.strerror}. Start from a "
            "folder that all machines share, or with ray job submit --working-dir ."
        ) from error
    sys.argv = [os.path.relpath(task["script"]), *task["argv"]]
    os.environ |= {LAUNCHER_VARIABLE: task["launch"], LAUNCH_VARIABLE: task["launcher"]}
    if task["on_cpu"]:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    hide_bars()


def hide_bars() -> None:
    """Let no progress bar show: Ray would send a thousand lines of it to the launcher."""
    start = tqdm.__init__

    def start_hidden(self: tqdm, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **{**kwargs, "disable": True})

    tqdm.__init__ = start_hidden  # type: ignore[method-assign]


def load_main(path: str, second: str = "callbacks") -> Callable[..., dict[str, float]]:
    """Return the `main(argv, callbacks)` of a script, or one with another second argument.

    Scripts that embed or evaluate, on any number of processes, have a `main(argv)`; they are called without the callbacks.

    Raises:
        ValueError: if it has none of them.
    """
    name = f"scripts.{Path(path).stem}"  # whose log is shown
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"the script is {path}; it cannot be read as Python. Give a training script.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    main: Any = getattr(module, "main", None)
    takes = main.__code__.co_varnames[: main.__code__.co_argcount] if callable(main) else ()
    if second in takes:
        return main
    if second == "callbacks" and "argv" in takes and hasattr(module, "make_accelerator"):
        return lambda argv, callbacks: main(argv)
    raise ValueError(
        f"the script is {path}; it has no main(argv, {second}). Give a script that trains, embeds or evaluates, such as "
        "scripts/pretrain.py."
    )


class RayCallback(TrainerCallback):
    """Report log and progress to Ray; stop the run, saved, when a machine is taken away.

    Args:
        report: `ray.train.report`; all workers must call it equally often.
        is_preempted: returns whether a machine will be taken; all workers must call it equally often, and get one answer.

    Attributes:
        has_stopped: this callback has asked the run to stop.
    """

    def __init__(self, report: Callable[[dict[str, Any]], Any], is_preempted: Callable[[], bool]):
        self.report, self.is_preempted, self.has_stopped = report, is_preempted, False
        self._since, self._reported_step, self._every = time.monotonic(), 0, 1

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure from here."""
        self._since, self._reported_step = time.monotonic(), state.global_step

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look, every few seconds, whether a machine is taken; then stop like after SIGTERM."""
        if self.has_stopped or state.global_step % self._every or not self.is_preempted():
            return
        self.has_stopped = True
        signals.interrupt(signal.SIGTERM)
        if state.is_world_process_zero:
            logger.warning("Ray will take a machine of this run away: it saves now, and starts again on what is left")

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report a row, training rows only after some seconds, on whose end all ranks agree."""
        logs = kwargs["logs"]
        if state.is_world_process_zero and "loss" in logs:
            shown = [f"step {logs['step']} of {state.max_steps}: loss {logs['loss']:.3f}"]
            if "pairs_per_second" in logs:
                shown += [f"{logs['pairs_per_second']:.0f} pairs/s", f"{logs['data_wait']:.0%} data wait"]
            logger.info("%s", ", ".join(shown))
        waited = round(1000 * (time.monotonic() - self._since))
        [milliseconds] = distributed.max_over_ranks([waited], kwargs["model"].device)
        if "loss" in logs and milliseconds < 1000 * LOOK_SECONDS:
            return
        steps = state.global_step - self._reported_step
        if steps:
            self._every = max(1, int(1000 * LOOK_SECONDS * steps / max(milliseconds, 1)))
        self._reported_step = state.global_step
        self.report(dict(logs))
        self._since = time.monotonic()
