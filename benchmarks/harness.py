"""What benchmarks share: processes that take turns, memory, the machine, and a table."""

import ctypes
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import NullLocator

from mm_utils import distributed
from mm_utils.reports.plots import BLUE, INK, LIGHT, MUTED, new_figure

ROOT = Path(__file__).resolve().parents[1]
_LIBC = ctypes.CDLL(None)


class TurnTaker:
    """A Python program that works only between a question and its answer, each one line of JSON.

    After an answer its process group (with its loader workers) is stopped, so that nothing it does falls into another's
    time. On Linux it ends with this process. The program's side is `serve`.

    Attributes:
        error: why it is out, if it is; it answers nothing more then.
    """

    def __init__(self, program: Path, *arguments: str):
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, str(program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            preexec_fn=_begin_group,
        )
        self.error: str | None = None

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer to one question; empty if the program is out."""
        if self.error is not None or self.process.stdin is None or self.process.stdout is None:
            return {}
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '{"error": "it ended without an answer"}')
        self._signal(signal.SIGSTOP)
        self.error = answer.get("error")
        return answer if self.error is None else {}

    def end(self) -> None:
        """End the program and its workers."""
        self._signal(signal.SIGKILL)
        self.process.kill()
        self.process.communicate()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, number)


def _begin_group() -> None:
    """Let this process and its workers be stopped together, and be killed with the parent."""
    os.setpgrp()
    with suppress(AttributeError):
        _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, of Linux


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer a `TurnTaker` until it asks no more; what else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        for line in sys.stdin:
            answers.write(json.dumps(answer(json.loads(line))) + "\n")
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}) + "\n")
        raise


def cpu_seconds() -> float:
    """CPU time so far of this process, its living children and theirs, and ended children.

    On Linux in nanoseconds, by each process's own clock; elsewhere by psutil. What a process has used between two calls is
    lost if it ended between them and is not yet waited for.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            total += _process_clock(child.pid) if sys.platform == "linux" else sum(child.cpu_times()[:2])
    return total


def _process_clock(pid: int) -> float:
    clock = ctypes.c_int()
    if error := _LIBC.clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise ProcessLookupError(error, os.strerror(error))
    try:
        return time.clock_gettime(clock.value)
    except OSError as error:  # EINVAL: it has ended meanwhile
        raise ProcessLookupError(pid) from error


def synchronize(device: torch.device) -> None:
    """Wait for what the device was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def give_memory_back(device: torch.device) -> None:
    """Return what the allocators keep, so that others find room."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if platform.libc_ver()[0] == "glibc":
        _LIBC.malloc_trim(0)


def device_name(device: torch.device) -> str:
    """The GPU's name, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def machine() -> dict[str, str]:
    """Processor, cores, versions, date and commit, for the reader of a table."""
    model = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration), open("/proc/cpuinfo", encoding="utf-8") as lines:
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    with suppress(OSError):
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "processor": f"{model}, {distributed.available_cores()} cores",
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "commit": commit or "unknown",
    }


def draw_bars(values: dict[str, float], title: str, ours: str, out_path: Path) -> None:
    """Draw horizontal bars with their values; names that begin with `ours` are in colour."""
    figure = new_figure(7, 0.9 + 0.32 * len(values))
    ax = figure.add_subplot()
    places = list(range(len(values)))
    colors = [BLUE if name.startswith(ours) else MUTED for name in values]
    ax.barh(places, list(values.values()), color=colors, height=0.66)
    for place, value in zip(places, values.values(), strict=True):
        ax.text(value, place, f" {float(f'{value:.3g}'):,g}", va="center", fontsize=8, color=INK)
    ax.set_yticks(places, list(values), fontsize=8, color=INK)
    ax.tick_params(length=0)
    ax.xaxis.set_major_locator(NullLocator())
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    ax.spines["left"].set_color(LIGHT)
    ax.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    ax.set(xlim=(0, 1.12 * max(values.values(), default=1.0)), ylim=(len(values) - 0.5, -0.5))
    FigureCanvasAgg(figure).print_png(str(out_path))
