"""Variants of a training run, of equal budget and several seeds, each run in a process.

A grid is a YAML file: `common`, flags of every run, and `variants`, a name -> the flags that differ. Flags are those of
scripts/pretrain.py; `null` takes one of `common` back. The first variant is what the others are compared with.
"""

import json
import logging
import math
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open
from tqdm.auto import tqdm

from benchmarks.harness import ROOT

logger = logging.getLogger(__name__)

BUDGET = ("max_steps", "num_train_epochs")
OURS = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "seed", "dry_run", "config")
LOG_LINES = 12  # of a failed run that are shown


@dataclass(frozen=True)
class Run:
    """One variant with one seed. `flags` are all but the seed and the folder."""

    variant: str
    seed: int
    flags: dict[str, Any]
    folder: Path

    def command(self, launcher: str) -> list[str]:
        """What starts it, after the words of `launcher`; `python` is the Python that runs this."""
        words = [sys.executable if word == "python" else word for word in shlex.split(launcher)]
        flags = {**self.flags, "seed": self.seed, "output_dir": self.folder}
        given = [f"--set={name}={_word(value)}" for name, value in flags.items() if value is not None]
        return [*words, str(ROOT / "scripts/pretrain.py"), *given, "--overwrite_output_dir"]

    def record(self) -> dict[str, Any] | None:
        """What `execute` wrote when the run was finished; None before.

        Raises:
            ValueError: if it was run with other flags.
        """
        path = self.folder / "record.json"
        if not path.exists():
            return None
        record = json.loads(path.read_text(encoding="utf-8"))
        other = sorted(
            name for name in {*record["flags"], *self.flags} if record["flags"].get(name) != self.flags.get(name)
        )
        if other:
            raise ValueError(
                f"{self.folder} holds a run with other flags, of {', '.join(other)}; it is not a part of this grid. Give another "
                "--output_dir, or remove that folder."
            )
        return record


def read_grid(path: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The common flags and, by name, those of each variant.

    Raises:
        ValueError: if the file is not a grid, or its variants do not have the same budget.
    """
    try:
        grid = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--grid is {path}; it cannot be read: {error.strerror}. Give a YAML file.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"--grid is {path}; it is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(grid, dict) or set(grid) != {"common", "variants"} or not isinstance(grid["variants"], dict):
        raise ValueError(f"--grid is {path}; a grid has 'common' and 'variants' and nothing else. See recipes/.")
    common, variants = grid["common"] or {}, {str(name): flags or {} for name, flags in grid["variants"].items()}
    parts = [("common", common), *variants.items()]
    if not variants or not all(isinstance(flags, dict) for _, flags in parts):
        raise ValueError(
            f"--grid is {path}; 'common' and each variant hold flags. Write 'flag: value' lines, or {{}}."
        )
    if not any(common.get(name) is not None for name in BUDGET):
        raise ValueError(f"{path} names no budget. Put {' or '.join(BUDGET)} into 'common'.")
    for name, flags in parts:
        _check_part(path, name, flags, may_have_budget=flags is common)
    return common, variants


def plan(
    common: dict[str, Any],
    variants: dict[str, dict[str, Any]],
    seeds: int,
    output_dir: str,
    budget: dict[str, Any] | None = None,
) -> list[Run]:
    """All runs, the seeds outermost: an ablation that is stopped has some of every variant.

    `budget`, if there is one, takes the place of the grid's.
    """
    if budget:
        common = {name: value for name, value in common.items() if name not in BUDGET} | budget
    return [
        Run(name, seed, common | flags, Path(output_dir, f"{name}-seed{seed}"))
        for seed in range(seeds)
        for name, flags in variants.items()
    ]


def execute_all(runs: Sequence[Run], launcher: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run what is not finished, in turn; return the records, and why runs failed, by folder."""
    due = [run for run in runs if run.record() is None]
    if len(due) < len(runs):
        logger.info("%d of %d runs are finished and are not repeated", len(runs) - len(due), len(runs))
    failed = {}
    with tqdm(total=len(runs), initial=len(runs) - len(due), desc="Ablation", unit="run", dynamic_ncols=True) as bar:
        for run in due:
            bar.set_postfix_str(run.folder.name)
            if why := execute(run, launcher):
                failed[str(run.folder)] = why
                bar.write(f"{run.folder.name} failed:\n{why}\n", file=sys.stderr)
            bar.update()
    return [record for run in runs if (record := run.record()) is not None], failed


def execute(run: Run, launcher: str) -> str | None:
    """Run one from its beginning, its messages in `log.txt`; return the last if it fails.

    A finished run leaves `record.json`: its flags, its figures (the last ones of its log), seconds and parameters.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    begin, log = time.perf_counter(), run.folder / "log.txt"
    with open(log, "w", encoding="utf-8") as file:
        try:
            code = subprocess.run(run.command(launcher), stdout=file, stderr=file, check=False).returncode
        except OSError as error:
            raise ValueError(f"--launcher is {launcher!r}; {error.strerror}. Give the words of a command.") from error
    if code:
        lines = [line.rpartition("\r")[2] for line in log.read_text("utf-8", "replace").rstrip().split("\n")]
        return "\n".join([*lines[-LOG_LINES:], f"exit status {code}; all of it is in {log}"])
    record = {
        "variant": run.variant,
        "seed": run.seed,
        "flags": run.flags,
        "figures": last_figures(run.folder / "metrics.jsonl"),
        "seconds": time.perf_counter() - begin,
        "parameters": count_parameters(run.folder / "model.safetensors"),
    }
    (run.folder / "record.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return None


def last_figures(log: Path) -> dict[str, float]:
    """The newest value of everything that was logged; `eval_` in front of a name is left out."""
    figures: dict[str, float] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        figures |= {name.removeprefix("eval_"): value for name, value in json.loads(line).items()}
    return figures


def count_parameters(weights: Path) -> int:
    """Numbers in a safetensors file."""
    with safe_open(weights, "np") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def _check_part(path: str, name: str, flags: dict[str, Any], may_have_budget: bool) -> None:
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"{path} has a variant {name!r}; it names folders. Use letters, digits, '_', '-' and '.'.")
    for flag in flags:
        if flag in OURS:
            raise ValueError(f"{path} sets {flag} for {name}; it is set for each run. Take it out.")
        if flag in BUDGET and not may_have_budget:
            raise ValueError(f"{path} sets {flag} for {name}; all variants have one budget. Put it into 'common'.")


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
