"""The benchmark's tables say what was found, and a short run of it. No time is judged."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import reliability
from benchmarks.reliability import report


def run(tmp_path: Path, *flags: str) -> tuple[dict[str, float], dict[str, dict[str, dict]]]:
    """The figures of a run, and all that it wrote."""
    file = tmp_path / "figures.json"
    figures = reliability.main([*flags, "--output_file", str(file)])
    return figures, json.loads(file.read_text())


def test_tables_say_what_was_found() -> None:
    cases = {"1 plain": True, "2 dropout": False, "3 state": None}
    found: dict[str, Any] = {
        "resume": {"tandem": {"right": 1, "of": 2, "notes": ["2 dropout: differs"], "cases": cases}},
        "damage": {"plain_trainer": {"right": 7, "of": 14, "notes": [], "named": 2}},
        "cost": {
            "tandem": {"still": 0.5, "complete": 4.0, "verify": 1.0, "megabytes": 400.0},
            "plain_trainer": {"still": 2.0, "complete": 2.0, "megabytes": 400.0},
        },
    }
    text = report(found, ["tandem", "plain_trainer"])
    assert "| resume | 1 of 2 |  |" in text
    assert "| damage |  | 7 of 14, named 2 |" in text
    assert "| 1 plain | yes | - |" in text
    assert "| 2 dropout | **no** | - |" in text
    assert "| plain_trainer | 2 | 2 |  | 400 | 4 | 0.5 |" in text
    assert "- resume, tandem: 2 dropout: differs" in text


@pytest.mark.slow
def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Both contestants load what they saved, which is checked before anything is damaged."""
    flags = ["--parts", "damage,nan,paths", "--contestants", "tandem,plain_accelerate", "--trials", "1"]
    figures, found = run(tmp_path, *flags)
    assert figures == {
        **{"damage/tandem": 1, "nan/tandem": 1, "paths/tandem": 5},
        **{"damage/plain_accelerate": 0, "nan/plain_accelerate": 0, "paths/plain_accelerate": 0},
    }
    assert found["damage"]["tandem"]["named"] == 1
    table = (tmp_path / "figures.md").read_text()
    assert table in capsys.readouterr().out
    assert "| paths | 5 of 5 | 0 of 5 |" in table


@pytest.mark.slow
def test_this_project_survives_what_is_done_to_it(tmp_path: Path) -> None:
    parts = ["resume", "kill", "kill_often", "damage", "disk", "sigterm", "sigterm_all"]
    flags = ["--parts", ",".join(parts), "--contestants", "tandem", "--trials", "14", "--kills", "5"]
    _, found = run(tmp_path, *flags)
    for part in parts:
        answer = found[part]["tandem"]
        wrong = [note for note in answer["notes"] if not note.startswith("skipped")]
        assert not wrong, part
        assert answer["right"] == answer["of"] or answer["notes"], part


@pytest.mark.slow
def test_a_cost_is_measured_of_all_in_turn(tmp_path: Path) -> None:
    figures, found = run(tmp_path, "--parts", "cost", "--contestants", "tandem,plain_accelerate", "--trials", "1")
    costs = found["cost"]
    assert costs["tandem"]["still"] <= costs["tandem"]["complete"]
    assert costs["tandem"]["megabytes"] == pytest.approx(costs["plain_accelerate"]["megabytes"], rel=0.05)
    assert figures["cost/tandem"] == costs["tandem"]["still"]
