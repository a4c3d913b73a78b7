"""Trace which functions of the package one default step, and the run around it, enter: `make road`.

Lines are those of the functions that were entered, counted once each.
"""

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
FLAGS = ["--max_steps", "3", "--max_train_samples", "512", "--max_eval_samples", "64"]


def functions(codes: set[CodeType]) -> dict[str, set[int]]:
    """Lines of the functions, by file; what runs at an import counts with neither."""
    found: dict[str, set[int]] = {}
    for code in codes:
        if not code.co_flags & 2:  # the body of a class
            continue
        lines = {line for *_, line in code.co_lines() if line}
        file = Path(code.co_filename).relative_to(ROOT).as_posix()
        found.setdefault(file, set()).update(range(min(lines), max(lines) + 1))
    return found


def trace(flags: list[str]) -> dict[str, Any]:
    """Run pre-training in this process: files and lines of the second step, and of the whole run."""
    from mm_utils.training.step import TrainStep
    from scripts import pretrain

    whole: set[CodeType] = set()
    step: set[CodeType] = set()
    inside, package = False, f"{ROOT}/mm_utils/"

    def at_import(frame: FrameType | None) -> bool:
        while frame is not None and not (frame.f_code.co_name == "<module>" and package in frame.f_code.co_filename):
            frame = frame.f_back
        return frame is not None

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            if frame.f_code not in whole and at_import(frame):
                return
            whole.add(frame.f_code)
            if inside:
                step.add(frame.f_code)

    run, words = TrainStep.run, sys.argv

    def traced(self: Any, batch: Any, number: int) -> Any:
        nonlocal inside
        inside = number == 2
        try:
            return run(self, batch, number)
        finally:
            inside = False

    TrainStep.run = traced  # type: ignore[method-assign]
    threading.setprofile(enter)
    sys.setprofile(enter)
    sys.argv = [f"{ROOT}/scripts/pretrain.py", *flags]
    try:
        pretrain.main()
    finally:
        sys.argv = words
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        TrainStep.run = run  # type: ignore[method-assign]
    return {
        name: {file: len(lines) for file, lines in sorted(functions(codes).items())}
        for name, codes in (("step", step), ("run", whole))
    }


def modules_of(script: str) -> int:
    """Modules of the package that importing a script loads."""
    code = f"import sys, scripts.{script}; print(sum(name.split('.')[0] == 'mm_utils' for name in sys.modules))"
    return int(
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        road = trace([*FLAGS, "--output_dir", f"{folder}/run"])
    for name, files in road.items():
        print(f"{name}: {len(files)} files, {sum(files.values()):,} lines")
    print(json.dumps(road["step"], indent=1))
    print(f"scripts/search.py loads {modules_of('search')} modules")
