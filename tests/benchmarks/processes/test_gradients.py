"""The ablation of gradients: every recipe's known error, exactly, between real processes; and what bad input says."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from benchmarks.processes import gradients
from benchmarks.processes.gradients import RECIPES, RIGHT

ROOT = Path(__file__).parents[3]
WORLDS = (1, 2, 3)
EXACT = 1e-10
LOCAL_NEGATIVES, OWN_SLICE, LOCAL_LOSS, LOCAL_LOSS_WITH_GRAD, ACCUMULATION, CACHED, *OURS = RECIPES


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What one run returned, printed and wrote."""
    path = tmp_path_factory.mktemp("ablation") / "gradients.json"
    with redirect_stdout(io.StringIO()) as printed:
        table = gradients.main(["--processes", "1,2,3", "--output_file", str(path)])
    return table, printed.getvalue(), json.loads(path.read_text())


@pytest.fixture(scope="module")
def table(run):
    return run[0]


def rows_of(text: str) -> dict[tuple[str, int], dict[str, float]]:
    """The Markdown table in `text`, by recipe and number of processes."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    [header, _, *rows] = cells
    assert header == ["recipe", "processes", *RIGHT]
    return {(name, int(world)): dict(zip(RIGHT, map(float, values), strict=True)) for name, world, *values in rows}


@pytest.mark.parametrize("name", [*OURS, LOCAL_LOSS_WITH_GRAD])
def test_exact_recipes(table, name):
    for world in WORLDS:
        assert table[name][world] == pytest.approx(RIGHT, abs=EXACT), world


def test_what_is_printed_and_written(run):
    table, printed, written = run
    assert written == {name: {str(world): row for world, row in rows.items()} for name, rows in table.items()}
    shown = rows_of(printed)
    assert shown.keys() == {(name, world) for name in RECIPES for world in WORLDS}
    for (name, world), row in shown.items():
        assert row == pytest.approx(table[name][world], rel=5e-3, abs=EXACT)
    verdicts = dict(line.split("  ", 1) for line in printed.splitlines() if line and line[0] != "|")
    verdicts = {name: verdict.strip() for name, verdict in verdicts.items()}
    assert {name for name, verdict in verdicts.items() if verdict == "exact"} == {*OURS, LOCAL_LOSS_WITH_GRAD}
    assert verdicts[OWN_SLICE] == "wrong weights"
    assert verdicts[CACHED] == "wrong temperature"
    assert verdicts[LOCAL_LOSS] == "wrong weights, cosine, residual"
    assert verdicts[LOCAL_NEGATIVES] == verdicts[ACCUMULATION] == "wrong weights, cosine, residual, temperature, loss"


def test_the_page_shows_this_table(table):
    section = (ROOT / "docs/ablations.md").read_text(encoding="utf-8").split("\n## ")[1]
    shown = rows_of(section)
    assert shown.keys() == {(name, world) for name in RECIPES for world in (*WORLDS, 4)}
    for (name, world), row in shown.items():
        if world in WORLDS:
            assert row == pytest.approx(table[name][world], rel=5e-3, abs=EXACT), (name, world)


def test_help_explains_the_columns(capsys):
    with pytest.raises(SystemExit):
        gradients.main(["--help"])
    said = capsys.readouterr().out
    for column in RIGHT:
        assert f"\n    {column}  " in said
