"""Processes that are killed or told to stop, at instants that nobody chose."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.rivals.reliability.trials import Ranks, Run, train

Work = Callable[[Run], None]
Checkpoints = Callable[[str | Path], list[Path]]
"""Those of a folder."""

SECONDS_TO_END = 30
"""That processes have to end after SIGTERM: what schedulers give them before SIGKILL."""


def second_save(work: Work, run: Run, checkpoints: Checkpoints) -> Ranks:
    """A process in its second save, after step 2; the first checkpoint is complete."""
    shutil.rmtree(run.folder, ignore_errors=True)
    ranks = Ranks(work, replace(run, steps=4, saves=(1, 2), digests=True, hold_after=1))
    ranks.wait_for("went_on", step=1)
    wait_for_checkpoints(checkpoints, run, ranks, 1)
    Path(run.folder, "go").touch()
    if ranks.wait_for("stepped", step=2) is None:
        raise RuntimeError(f"it did not get as far as a second save: {ranks.end()[0].error}")
    return ranks


def wait_for_checkpoints(checkpoints: Checkpoints, run: Run, ranks: Ranks, count: int) -> None:
    """Return once there are `count` checkpoints, or the process has ended."""
    while len(checkpoints(run.folder)) < count and ranks.processes[0].is_alive():
        time.sleep(0.001)


def save_seconds(work: Work, run: Run, checkpoints: Checkpoints) -> float:
    """Seconds of the second save, from its step until the folder is there and steps go on."""
    ranks = second_save(work, run, checkpoints)
    start = time.monotonic()
    ranks.wait_for("went_on", step=2)
    wait_for_checkpoints(checkpoints, run, ranks, 2)
    seconds = time.monotonic() - start
    ranks.end()
    return seconds


def kill_in_second_save(work: Work, run: Run, checkpoints: Checkpoints, delay: float) -> str:
    """Kill the process so long into its second save; return what is wrong at its restart.

    It restarts well if it goes on, by itself, from a state that is exactly that of the step it claims.
    """
    ranks = second_save(work, run, checkpoints)
    time.sleep(delay)
    ranks.kill(signal.SIGKILL, 0)
    [killed] = ranks.end()
    states = {event["step"]: event["digest"] for event in killed.events if event["event"] == "stepped"}
    [again] = train(work, replace(run, steps=4, resume=True))
    loaded = again.last("loaded")
    if again.error or again.hung:
        return again.error or "it hung"
    if not loaded:
        return "it began anew"
    return (
        "" if states.get(loaded["step"]) == loaded["digest"] else f"it loaded a wrong state of step {loaded['step']}"
    )


def kill_at_random(
    work: Work, run: Run, kills: int, newest: Callable[[], int], seed: int = 0
) -> tuple[int, int, list[str]]:
    """Kill a run that saves at every step, `kills` times, and let it go on each time.

    Args:
        newest: the step of the newest checkpoint that is whole, as the contestant finds it, after each kill.

    Returns:
        How often the newest checkpoint was of the last acknowledged step or a later one; how many steps were acknowledged; and
        what went wrong.
    """
    chance, right, acknowledged, problems = random.Random(seed), 0, 0, []
    endless = replace(run, steps=10**6, saves=range(10**6), keep=2, digests=True)
    states: dict[int, str] = {}
    for number in range(kills):
        ranks = Ranks(work, replace(endless, resume=number > 0))
        ranks.wait_for("stepped")
        time.sleep(chance.uniform(0.0, 0.6))
        ranks.kill(signal.SIGKILL, 0)
        [life] = ranks.end()
        loaded = life.last("loaded")
        if number and states.get(loaded.get("step", -1)) != loaded.get("digest"):
            problems.append(
                f"kill {number}: loaded a state of step {loaded.get('step')} that was never reached; {life.error}"
            )
        states |= {event["step"]: event["digest"] for event in life.events if event["event"] == "stepped"}
        acknowledged = max([acknowledged, *(event["step"] for event in life.events if event["event"] == "saved")])
        found = newest()
        if found >= acknowledged:
            right += 1
        else:
            problems.append(f"kill {number}: step {acknowledged} was acknowledged, the newest found is {found}")
    return right, acknowledged, problems


def stop_one(work: Work, run: Run, world: int, everyone: bool, seed: int, files: int) -> str:
    """Send SIGTERM to one of several processes, or to all; what went wrong, empty if nothing.

    Right is: all end in time, by themselves; the newest checkpoint has as many files as one saved without a signal, and all
    processes go on from it at one step.
    """
    chance = random.Random(seed)
    shutil.rmtree(run.folder, ignore_errors=True)
    running = replace(run, steps=4000, stop_on_sigterm=True)
    ranks = Ranks(work, running, world)
    ranks.wait_for("stepped", step=3)
    time.sleep(chance.uniform(0.0, 0.3))
    chosen = chance.randrange(world)
    for rank in range(world) if everyone else [chosen]:
        ranks.kill(signal.SIGTERM, rank)
        time.sleep(chance.uniform(0.001, 0.01))
    ended = ranks.end(SECONDS_TO_END)
    if any(outcome.hung for outcome in ended):
        return f"process {[outcome.hung for outcome in ended].index(True)} still ran after {SECONDS_TO_END} s"
    errors = [outcome.error for outcome in ended if outcome.error]
    if errors:
        return errors[0]
    if -signal.SIGTERM in [outcome.status for outcome in ended]:
        return "nobody handled the signal"
    reached = [outcome.last("stepped")["step"] for outcome in ended]
    again = train(work, replace(run, steps=max(reached) + 1, resume=True), world, SECONDS_TO_END)
    began = [outcome.last("loaded").get("step", 0) for outcome in again]
    if began != reached or len(set(began)) != 1:
        return f"stopped after steps {reached}, went on from {began}; {again[0].error}"
    folder = max(Path(run.folder).rglob("checkpoint[-_]*"), key=os.path.getmtime)
    found = sum(path.is_file() for path in folder.rglob("*"))
    return "" if found == files else f"the checkpoint has {found} files, not {files}"
