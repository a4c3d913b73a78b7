"""Measure what training survives, beside plain Accelerate and transformers' Trainer.

All faults, all contestants, in about half an hour on two cores:
    python -m benchmarks.reliability
Some of them, all figures and what went wrong to a file, the table beside it:
    python -m benchmarks.reliability --parts resume,damage --contestants tandem,plain_accelerate --output_file faults.json

What is done to each, and what counts as right, is described with the parts in `benchmarks/rivals/reliability/process.py`, the
contestants beside it. A figure is in how many of how many trials all was right:

- resume: 21 ways to train on two processes, interrupted once; right is the uninterrupted run's weights, bit for bit. What
  stands for a way of Accelerate's in this project is in the list of the file. Nothing where it has no setting to train so.
- kill: SIGKILL at evenly spread instants of a save; right is a restart by itself from a right state.
- kill_often: the same at random, `--kills` times in one run that saves after every step; right is that the newest checkpoint
  found is of the last acknowledged step or a later one.
- damage: 14 kinds, to a file of the newest checkpoint; right is that it is noticed. `named` counts where the file is named.
- nan: a batch of NaN; right is finite weights and checkpoints.
- disk: no room for a checkpoint, with and without rotation; right is an older one that loads and an error that says it.
  It takes root, as small disks are mounted.
- sigterm, sigterm_all: to one of two processes, or both; right is that both save at one step and end within half a minute.
- paths: five image paths that lead out of the data's folder; right is that they are refused.
- cost: seconds that the loop stands still for a save, and until it is complete, with a model of the preset `small` and
  Adam's state; medians, and ratios to the first contestant. Here, checkpoints are synchronised to the disk and verified by
  this project alone.
"""

import json
import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import ROOT, TurnTaker, machine
from mm_utils.arguments import arg, parse_args
from mm_utils.distributed import RunError
from mm_utils.run.start import run_script
from mm_utils.text import markdown_table

logger = logging.getLogger(__name__)

PROGRAM = ROOT / "benchmarks/rivals/reliability/process.py"
CONTESTANTS = "tandem,plain_accelerate,accelerate_trigger,plain_trainer"
TRIALS = {
    "resume": 21, "kill": 20, "kill_often": 1, "damage": 14, "nan": 1, "disk": 2, "sigterm": 10, "sigterm_all": 10,
    "paths": 5, "cost": 5,
}  # fmt: skip
LEFT_OUT = {
    "accelerate_trigger": {*TRIALS} - {"sigterm", "sigterm_all"},  # it differs in nothing else
    "plain_accelerate": {"kill_often"},
    "plain_trainer": {"kill_often", "paths"},  # it reads no paths
}
COSTS = {
    "still": "loop stands still, s",
    "complete": "complete after, s",
    "verify": "verified in, s",
    "megabytes": "MB",
}


@dataclass
class ReliabilityBenchmarkArguments:
    """What is done to whom, how often."""

    parts: str = arg(",".join(TRIALS), "What is done.")
    contestants: str = arg(CONTESTANTS, "Who takes part; ratios of costs are to the first.")
    trials: int = arg(100, "At most N trials of each part.")
    kills: int = arg(200, "Kills of kill_often.")
    output_file: str | None = arg(None, "Write all figures to this JSON file, and the tables beside it (.md).")

    def __post_init__(self) -> None:
        for flag, given, known in (
            ("parts", self.parts, TRIALS),
            ("contestants", self.contestants, CONTESTANTS.split(",")),
        ):
            if unknown := set(given.split(",")) - set(known):
                raise ValueError(f"--{flag} has {', '.join(sorted(unknown))}; choose from {','.join(known)}.")
        if min(self.trials, self.kills) < 1:
            raise ValueError(f"--trials is {self.trials}, --kills {self.kills}; both count from 1.")

    def takes_part(self, contestant: str, part: str) -> bool:
        """Whether there is anything to find out."""
        return part not in LEFT_OUT.get(contestant, ())


def compete(args: ReliabilityBenchmarkArguments, folder: str) -> dict[str, dict[str, Any]]:
    """What was found: part -> contestant -> answer of the process."""
    process = TurnTaker(PROGRAM)
    found: dict[str, dict[str, Any]] = {}
    try:
        for part in args.parts.split(","):
            names = [name for name in args.contestants.split(",") if args.takes_part(name, part)]
            trials = args.kills if part == "kill_often" else min(args.trials, TRIALS[part])
            question = {"part": part, "folder": folder, "trials": trials}
            rounds = trials if part == "cost" else 1
            answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for _ in range(rounds):  # costs are measured in turn
                for name in names:
                    answers[name].append(process.ask({**question, "contestant": name}))
                    if process.error:
                        raise RunError(f"{part} of {name} could not be measured: {process.error}")
            found[part] = {name: median_costs(each) if part == "cost" else each[0] for name, each in answers.items()}
            logger.info("%s: %s", part, ", ".join(f"{name} {cell(found[part][name])}" for name in names))
    finally:
        process.end()
    return found


def median_costs(answers: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median of every cost."""
    return {name: median(answer[name] for answer in answers) for name in answers[0]}


def cell(answer: dict[str, Any] | None) -> str | None:
    """What the table says of a contestant."""
    if answer is None or "right" not in answer:
        return None if answer is None else f"{answer['still']:.3g} s"
    named = f", named {answer['named']}" if "named" in answer else ""
    return f"{answer['right']} of {answer['of']}{named}" if answer["of"] else None


def report(found: dict[str, dict[str, Any]], names: list[str]) -> str:
    """The tables: counts, every way of resuming, costs; what went wrong; the machine."""
    counted = [part for part in found if part != "cost"]
    rows = [[part, *(cell(found[part].get(name)) for name in names)] for part in counted]
    lines = [markdown_table(["", *names], rows), ""] if counted else []
    if ways := {title for answer in found.get("resume", {}).values() for title in answer["cases"]}:
        marks = {True: "yes", False: "**no**", None: "-"}
        answers = [found["resume"].get(name, {}).get("cases", {}) for name in names]
        titles = sorted(ways, key=lambda title: int(title.split()[0]))
        table = [[title, *(marks[answer.get(title)] for answer in answers)] for title in titles]
        lines += [markdown_table(["equal weights after a resume", *names], table), ""]
    if costs := found.get("cost"):
        first = next(iter(costs.values()))
        table = [
            [
                name,
                *(answer.get(key) for key in COSTS),
                answer["still"] / first["still"],
                answer["complete"] / first["complete"],
            ]
            for name, answer in costs.items()
        ]
        lines += [markdown_table(["", *COSTS.values(), "ratio still", "ratio complete"], table), ""]
    for part in counted:
        for name, answer in found[part].items():
            lines += [f"- {part}, {name}: {note}" for note in answer["notes"]]
    return "\n".join([*lines, "- " + "; ".join(f"{name}: {value}" for name, value in machine().items())])


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the script; return how often all was right, as `part/contestant`."""
    # 1. Arguments.
    args = parse_args(ReliabilityBenchmarkArguments, argv=argv, doc=__doc__)[ReliabilityBenchmarkArguments]
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logger.setLevel(logging.INFO)

    # 2. Measure.
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        found = compete(args, folder)

    # 3. Report.
    text = report(found, args.contestants.split(","))
    sys.stdout.write(text + "\n")
    if args.output_file:
        Path(args.output_file).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        Path(args.output_file).with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    figures = {f"{part}/{name}": answer for part, answers in found.items() for name, answer in answers.items()}
    return {name: float(answer.get("right", answer.get("still"))) for name, answer in figures.items()}


if __name__ == "__main__":
    run_script(main)
