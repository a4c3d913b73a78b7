"""The trials of `benchmarks/reliability.py`, in a process that forks them.

Asked `{"part", "contestant", "trials", "folder"}`, it answers with how many of how many trials went well and with what went
wrong; asked for `cost`, with seconds.
"""

import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import datasets
from safetensors.torch import load_file

from benchmarks.harness import serve
from benchmarks.rivals.reliability import ours, plain_accelerate, plain_trainer
from benchmarks.rivals.reliability.damage import DAMAGES, judge
from benchmarks.rivals.reliability.disks import fill
from benchmarks.rivals.reliability.kills import (
    kill_at_random,
    kill_in_second_save,
    save_seconds,
    stop_one,
)
from benchmarks.rivals.reliability.paths import read_by_datasets, read_by_ours, try_escapes
from benchmarks.rivals.reliability.trials import CASES, Case, Ranks, Run, train

Answer = dict[str, Any]

PARAMETERS = 5_400_000
"""The parameters of models whose checkpoints are killed or find no room: 65 MB with Adam's state."""
RANKS = 2


@dataclass
class Contestant:
    """Who takes part.

    Attributes:
        train: called in each process.
        files: what a checkpoint's files are called.
        checkpoints: of a folder, oldest first.
        has: whether it has a setting to train so.
    """

    train: Callable[..., None]
    files: dict[str, str]
    checkpoints: Callable[[str | Path], list[Path]]
    has: Callable[[Case], bool] = lambda case: True


def contestants(folder: Path) -> dict[str, Contestant]:
    """All of them; ours reads its pairs in `folder`."""
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    own = ours.Ours(folder / "pairs")
    if not own.data.is_dir():
        [prepared] = train(own.prepare, Run(""))
        if prepared.error:
            raise RuntimeError(prepared.error)
    accelerate = Contestant(
        plain_accelerate.train, plain_accelerate.FILES, plain_accelerate.checkpoints, plain_accelerate.has
    )
    return {
        "plain_accelerate": accelerate,
        "accelerate_trigger": replace(accelerate, train=plain_accelerate.agreed),
        "plain_trainer": Contestant(
            plain_trainer.train, plain_trainer.FILES, plain_trainer.checkpoints, has=plain_trainer.has
        ),
        "tandem": Contestant(own.train, ours.FILES, ours.checkpoints),
    }


# -- the parts --------------------------------------------------------------------------------------------------------


def resume(who: Contestant, folder: Path, trials: int) -> Answer:
    """Train 16 steps straight, and from a checkpoint on the way: equal weights, bit for bit?"""
    found: dict[str, bool | None] = {}
    notes = []
    for number, case in enumerate(CASES[:trials]):
        title = f"{number + 1} {case.title}"
        found[title] = None
        if not who.has(case):
            continue
        straight, resumed = folder / f"{number}-straight", folder / f"{number}-resumed"
        whole = train(who.train, Run(str(straight), case, saves=(case.save,)), RANKS)
        resumed.mkdir()
        for path in straight.glob("checkpoint*"):
            shutil.copytree(path, resumed / path.name)
        again = train(who.train, Run(str(resumed), case, saves=(case.save + 2,), resume=True), RANKS)
        if not case.set_epoch:  # nothing hangs on epochs where this can be: once more, in the same epoch
            again = train(who.train, Run(str(resumed), case, resume=True), RANKS)
        reached = case.save + (0 if case.set_epoch else 2)
        began, ended = again[0].last("loaded").get("step"), again[0].last("ended")
        found[title] = began == reached and bool(ended) and ended["digest"] == whole[0].last("ended").get("digest")
        if not found[title]:
            problem = whole[0].error or again[0].error or f"went on at {began}, ended after step {ended.get('step')}"
            notes.append(f"{title}: {problem}")
    return _answer([value for value in found.values() if value is not None], notes, cases=found)


def kill(who: Contestant, folder: Path, trials: int) -> Answer:
    """Kill it at evenly spread instants of a save: does it go on by itself from a right state?"""
    run = Run(str(folder / "run"), parameters=PARAMETERS)
    seconds = median(save_seconds(who.train, run, who.checkpoints) for _ in range(3))
    instants = [seconds * (number + 0.5) / trials for number in range(trials)]
    problems = [kill_in_second_save(who.train, run, who.checkpoints, instant) for instant in instants]
    return _answer([not problem for problem in problems], problems, save_seconds=seconds)


def kill_often(who: Contestant, folder: Path, trials: int) -> Answer:
    """Kill a run that saves every step, again and again; is what it acknowledged there?"""
    run = Run(str(folder / "run"))
    right, acknowledged, problems = kill_at_random(who.train, run, trials, lambda: ours.newest_step(run.folder))
    return {"right": right, "of": trials, "notes": problems, "acknowledged": acknowledged}


def damage(who: Contestant, folder: Path, trials: int) -> Answer:
    """Damage a checkpoint: is it detected when it is loaded, and is the right file named?"""
    whole = Run(str(folder / "whole"), steps=3, saves=(1, 2), digests=True)
    [saved] = train(who.train, whole)
    digests = {event["step"]: event["digest"] for event in saved.events if event["event"] == "stepped"}
    [control] = train(who.train, replace(whole, saves=(), resume=True, folder=str(_copy(folder / "whole"))))
    if control.error or control.last("loaded").get("digest") != digests[2] or control.last("loaded")["step"] != 2:
        raise RuntimeError(f"an undamaged checkpoint is not loaded: {control.error}")
    verdicts, notes = [], []
    for each in DAMAGES[:trials]:
        damaged = _copy(folder / "whole")
        older, newer = who.checkpoints(damaged)
        each.do(newer / who.files[each.part], older)
        [outcome] = train(who.train, replace(whole, saves=(), resume=True, folder=str(damaged)))
        verdicts.append(judge(outcome, who.files[each.part], digests))
        if not all(verdicts[-1]):
            said = outcome.said.strip().splitlines()
            notes.append(f"{each.title}: {'not named' if verdicts[-1][0] else 'not detected'}; {' '.join(said)[:160]}")
    return _answer([detected for detected, _ in verdicts], notes, named=sum(named for _, named in verdicts))


def nan(who: Contestant, folder: Path, trials: int) -> Answer:
    """Feed a batch of NaN in step 6: are weights and all checkpoints finite in the end?"""
    [outcome] = train(who.train, Run(str(folder), steps=12, saves=(4, 8, 12), keep=2, nan_at=6))
    left = who.checkpoints(folder)
    finite = [
        all(bool(value.isfinite().all()) for value in load_file(path / who.files["model"]).values()) for path in left
    ]
    last = bool(outcome.last("ended").get("finite"))
    note = f"weights are {'' if last else 'not '}finite, checkpoints: {dict(zip([p.name for p in left], finite, strict=True))}"
    return _answer([last and bool(left) and all(finite)], [note])


def disk(who: Contestant, folder: Path, trials: int) -> Answer:
    """Save where there is no room: is the older checkpoint loaded then, and was the error clear?"""
    run = Run(str(folder / "sized"), steps=3, saves=(1,), parameters=PARAMETERS)
    train(who.train, run)
    size = sum(file.stat().st_size for file in who.checkpoints(run.folder)[0].rglob("*") if file.is_file())
    problems = [
        fill(who.train, replace(run, folder=str(folder / f"disk-{neighbour}")), who.checkpoints, size, neighbour)
        for neighbour in (False, True)
    ]
    return _answer([not problem for problem in problems], problems)


def sigterm(who: Contestant, folder: Path, trials: int, everyone: bool = False) -> Answer:
    """Send SIGTERM to one process of two: do all save and end, at one step?"""
    run = Run(str(folder / "reference"), steps=3, saves=(2,))
    train(who.train, run, RANKS)
    files = sum(path.is_file() for path in who.checkpoints(run.folder)[0].rglob("*"))
    run = replace(run, folder=str(folder / "run"), saves=())
    problems = [stop_one(who.train, run, RANKS, everyone, seed, files) for seed in range(trials)]
    return _answer([not problem for problem in problems], problems)


def paths(who: Contestant, folder: Path, trials: int) -> Answer:
    """Name images outside the data's folder: are they refused?"""
    reads = read_by_ours if who.files is ours.FILES else read_by_datasets
    [outcome] = train(partial(try_escapes, reads), Run(str(folder)))
    found = {event["kind"]: event["refused"] for event in outcome.events if event["event"] == "path"}
    return _answer(list(found.values()), [f"{kind} was followed" for kind, refused in found.items() if not refused])


def cost(who: Contestant, folder: Path, trials: int) -> Answer:
    """Save once: seconds until the loop goes on, until it is complete, and to verify it."""
    is_ours = who.files is ours.FILES
    run = Run(str(folder / "run"), steps=6, saves=(2,))
    large = ours.Ours(folder.parent / "pairs", preset="small")
    [shaped] = train(large.tell_shapes, replace(run, folder=str(folder / "shapes")))
    work = large.train if is_ours else partial(who.train, shapes=shaped.last("shapes")["shapes"])
    ranks = Ranks(work, run)
    stepped, went_on = (ranks.wait_for(event, step=2) for event in ("stepped", "went_on"))
    while is_ours and not who.checkpoints(run.folder) and ranks.processes[0].is_alive():
        time.sleep(0.001)
    complete = time.monotonic()
    [outcome] = ranks.end()
    if stepped is None or went_on is None or outcome.error:
        raise RuntimeError(f"nothing was saved: {outcome.error}")
    size = sum(file.stat().st_size for file in who.checkpoints(run.folder)[-1].rglob("*") if file.is_file())
    found = {"still": went_on["at"] - stepped["at"], "megabytes": size / 1e6}
    if not is_ours:
        return {**found, "complete": found["still"]}
    [verified] = train(ours.verify_newest, run)
    return {**found, "complete": complete - stepped["at"], "verify": verified.last("verified")["seconds"]}


PARTS: dict[str, Callable[[Contestant, Path, int], Answer]] = {
    "resume": resume,
    "kill": kill,
    "kill_often": kill_often,
    "damage": damage,
    "nan": nan,
    "disk": disk,
    "sigterm": sigterm,
    "sigterm_all": partial(sigterm, everyone=True),
    "paths": paths,
    "cost": cost,
}


def _answer(right: list[bool], notes: list[str], **more: Any) -> Answer:
    return {"right": sum(right), "of": len(right), "notes": [note for note in notes if note], **more}


def _copy(folder: Path) -> Path:
    """Copy the checkpoints of a run to a new folder; return it."""
    copy = Path(tempfile.mkdtemp(dir=folder.parent))
    for path in folder.glob("checkpoint*"):
        shutil.copytree(path, copy / path.name)
    return copy


def answer(question: dict[str, Any]) -> Answer:
    """Do one part of one contestant."""
    folder = Path(question["folder"])
    who = contestants(folder)[question["contestant"]]
    work = Path(tempfile.mkdtemp(prefix=f"{question['part']}-{question['contestant']}-", dir=folder))
    try:
        return PARTS[question["part"]](who, work, question["trials"])
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    logging.disable(logging.INFO)
    serve(answer)
