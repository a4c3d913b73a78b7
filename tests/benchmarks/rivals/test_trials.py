"""The trials find what they say. Whole runs of them are in `tests/benchmarks/test_reliability.py`."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability import TRIALS
from benchmarks.rivals.reliability.damage import DAMAGES, Damage, judge
from benchmarks.rivals.reliability.paths import escapes, read_by_datasets, read_by_ours
from benchmarks.rivals.reliability.trials import CASES, Outcome

STATES = {1: "first", 2: "second"}


def outcome(step: int = 0, said: str = "", error: str = "") -> Outcome:
    """Seconds of loading a checkpoint."""
    events: list[dict[str, Any]] = [{"event": "warning", "text": said}] if said else []
    events += [{"event": "loaded", "step": step, "digest": STATES[step]}] if step else []
    events += [{"event": "error", "text": error}] if error else []
    return Outcome(events, 0, False)


@pytest.mark.parametrize(
    ("loading", "verdict"),
    [
        (outcome(2), (False, False)),
        (outcome(1), (True, False)),
        (outcome(1, said="a.bin is damaged"), (True, True)),
        (outcome(error="OSError: Invalid argument"), (True, False)),
        (outcome(error="OSError: a.bin is cut"), (True, True)),
    ],
)
def test_damage_is_detected_or_not(loading: Outcome, verdict: tuple[bool, bool]) -> None:
    assert judge(loading, "a.bin", STATES) == verdict


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.title)
def test_every_damage_changes_the_file(damage: Damage, tmp_path: Path) -> None:
    content = bytes(range(1, 101))
    for name, change in (("older", b"!"), ("newer", b"")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.bin").write_bytes(content + change)
    file = tmp_path / "newer/a.bin"
    damage.do(file, tmp_path / "older")
    assert not file.exists() or file.read_bytes() != content


def test_trials_are_as_many_as_they_are_said_to_be() -> None:
    assert (len(CASES), len(DAMAGES)) == (TRIALS["resume"], TRIALS["damage"])
    assert len({(case.title, number) for number, case in enumerate(CASES)}) == len(CASES)


def test_a_path_inside_is_read_and_one_outside_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inside, paths, server = escapes(tmp_path)
    server.shutdown()
    assert read_by_ours(inside, "./0.png")
    assert not read_by_ours(inside, paths["parent"])
    assert read_by_datasets(inside, "0.png")
    assert read_by_datasets(inside, paths["parent"])
    with pytest.raises(OSError, match="missing"):
        read_by_datasets(inside, "missing.png")
