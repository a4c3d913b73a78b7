"""Fourteen ways to damage a checkpoint, and what a contestant that loads it makes of it.

Two checkpoints stand beside each other, of steps 1 and 2, and the newer one is damaged. Damage counts as detected if loading
raises, passes over to the older checkpoint, or warns with the file's name; it counts as named if the name of the damaged file
is in what it prints.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rivals.reliability.trials import Outcome


def flip_a_bit(path: Path, other: Path) -> None:
    """In the last quarter, where there are values and no header."""
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 4
    path.write_bytes(content)


def zero_the_tail(path: Path, other: Path) -> None:
    """The last quarter reads as zeros, as after a power loss."""
    content = path.read_bytes()
    kept = len(content) * 3 // 4
    path.write_bytes(content[:kept] + bytes(len(content) - kept))


def cut_a_byte(path: Path, other: Path) -> None:
    """The last one."""
    path.write_bytes(path.read_bytes()[:-1])


def cut_half(path: Path, other: Path) -> None:
    """The second."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def empty(path: Path, other: Path) -> None:
    """Nothing is left in the file."""
    path.write_bytes(b"")


def remove(path: Path, other: Path) -> None:
    """Nor the file."""
    path.unlink()


def mix(path: Path, other: Path) -> None:
    """The file of another step."""
    shutil.copyfile(other / path.name, path)


@dataclass(frozen=True)
class Damage:
    """What is done to which file of every contestant, by its part: see `FILES` of each."""

    title: str
    part: str
    do: Callable[[Path, Path], None]


DAMAGES = (
    Damage("model: a bit flipped", "model", flip_a_bit),
    Damage("model: tail zeroed", "model", zero_the_tail),
    Damage("model: cut to half", "model", cut_half),
    Damage("model: empty", "model", empty),
    Damage("model: missing", "model", remove),
    Damage("model: of another step", "model", mix),
    Damage("optimizer: a bit flipped", "optimizer", flip_a_bit),
    Damage("optimizer: tail zeroed", "optimizer", zero_the_tail),
    Damage("optimizer: cut by one byte", "optimizer", cut_a_byte),
    Damage("optimizer: cut to half", "optimizer", cut_half),
    Damage("optimizer: missing", "optimizer", remove),
    Damage("schedule: missing", "schedule", remove),
    Damage("random state: missing", "random", remove),
    Damage("random state: cut to half", "random", cut_half),
)


def judge(outcome: Outcome, file: str, digests: dict[int, str]) -> tuple[bool, bool]:
    """Whether the damage was detected, and whether the right file was named.

    Args:
        outcome: of loading the newest checkpoint, which is damaged.
        file: its damaged file.
        digests: of the states at steps 1 and 2.
    """
    loaded = outcome.last("loaded")
    passed_over = loaded.get("step") == 1 and loaded["digest"] == digests[1]
    named = file in outcome.said
    return bool(outcome.error) or passed_over or named, named
