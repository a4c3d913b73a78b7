"""What the benchmarks share: flags, contestants that take turns, the clock, the machine, and the table."""

import argparse
import ctypes
import multiprocessing
import os
import platform
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch

from mm_utils.cores import available_cores
from mm_utils.model.arguments import ModelArguments
from mm_utils.text import markdown_table

ROOT = Path(__file__).resolve().parents[1]
MODEL_FLAGS = {
    "vision_model_name_or_path": str, "text_model_name_or_path": str, "vision_config": str, "text_config": str,
    "image_size": int,
}  # fmt: skip


def flags_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser that prints the module's docstring as its help."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `scripts/pretrain.py` that choose the two encoders."""
    for name, kind in MODEL_FLAGS.items():
        parser.add_argument(f"--{name}", type=kind, help="as in scripts/pretrain.py")
    parser.add_argument(
        "--vocab_size", type=int, default=ModelArguments.vocab_size, help="words of the text encoder, at least"
    )


def model_arguments(args: argparse.Namespace, **fixed: Any) -> ModelArguments:
    """What those flags say; `fixed` are further fields."""
    chosen = {name: getattr(args, name) for name in MODEL_FLAGS if getattr(args, name) is not None}
    return ModelArguments(**chosen, **fixed)


def numbers(text: str) -> list[int]:
    """`64,128` as numbers above 0, for argparse."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a number below 1")
    return values


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A type for argparse: a list of some of the `known` names, with commas between."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := sorted(set(chosen) - set(known)):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not known; choose from {','.join(known)}")
        return chosen

    return parse


class Contestant:
    """A process that works only between a question and its answer, and is stopped in between, with its loader workers.

    Args:
        make: called with `task` in the process; what it returns is called with each question.

    Attributes:
        error: why it is out, if it is; it answers nothing more then.
    """

    def __init__(self, make: Callable[[Any], Callable[[Any], dict[str, Any]]], task: Any):
        context = multiprocessing.get_context("spawn")  # nothing of this process falls into its memory
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make, task))
        self.process.start()
        theirs.close()
        self.error: str | None = None

    def ask(self, question: Any = None) -> dict[str, Any]:
        """The answer to one question; empty if the process is out."""
        if self.error is not None:
            return {}
        self._signal(signal.SIGCONT)
        try:
            self.pipe.send(question)
            answer = self.pipe.recv()
        except (EOFError, OSError):
            answer = {"error": "it ended without an answer"}
        self._signal(signal.SIGSTOP)
        self.error = answer.get("error")
        return answer if self.error is None else {}

    def end(self) -> None:
        """End the process and its workers."""
        self._signal(signal.SIGKILL)
        self.process.kill()
        self.process.join()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended, or has no group yet
            os.killpg(self.process.pid or 0, number)


def _serve(pipe: Any, make: Callable[[Any], Callable[[Any], dict[str, Any]]], task: Any) -> None:
    os.setpgrp()  # it is stopped and ended together with its workers
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a stopped process would outlive its parent
    multiprocessing.set_start_method(None, force=True)  # its loader workers start as anywhere else, not by spawning
    try:
        answer = make(task)
        while True:
            pipe.send(answer(pipe.recv()))
    except EOFError:
        pass
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})


def compete(
    make: Callable[[Any], Callable[[Any], dict[str, Any]]],
    chosen: Sequence[str],
    args: argparse.Namespace,
    warm: Sequence[Any],
    question: Any,
    rounds: int,
) -> list[tuple[str, Contestant, list[dict[str, Any]]]]:
    """Each by name with its answers: asked the `warm` questions alone, then all in turn, so that a slow machine hits all alike."""
    field: list[Contestant] = []
    answers: list[list[dict[str, Any]]] = [[] for _ in chosen]
    try:
        for name in chosen:  # they load their libraries side by side
            field.append(Contestant(make, (name, args)))
        for contestant in field:
            for first in warm:
                contestant.ask(first)
        for turn in range(rounds):
            for number in range(len(field)):
                place = (turn + number) % len(field)
                answers[place].append(field[place].ask(question))
    finally:
        for contestant in field:
            contestant.end()
    return list(zip(chosen, field, answers, strict=True))


def cpu_seconds() -> float:
    """CPU time so far of this process, its living children and theirs, and its ended children."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:2])
    return total


def synchronize(device: torch.device) -> None:
    """Wait for what the device was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def give_memory_back(device: torch.device) -> None:
    """Return what the allocators keep, so that others find room."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def device_name(device: torch.device) -> str:
    """The GPU's name, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def machine() -> str:
    """Processor, cores, versions, date and commit, for the reader of a table."""
    model = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration), open("/proc/cpuinfo", encoding="utf-8") as lines:
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = ""
    with suppress(OSError):
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    cores = available_cores()
    return f"{model}, {cores} cores; torch {torch.__version__}; {date.today()}; commit {commit or 'unknown'}"


def print_table(rows: Sequence[dict[str, Any]], notes: Sequence[str] = ()) -> None:
    """Print a Markdown table, a column for each name that a row has; below it notes and the machine."""
    titles = list(dict.fromkeys(name for row in rows for name in row))
    table = markdown_table(titles, [[row.get(name) for name in titles] for row in rows])
    sys.stdout.write("\n".join([table, "", *(f"- {note}" for note in (*notes, machine()))]) + "\n")
    sys.stdout.flush()
