"""The examples of the four doors, as a notebook's cell runs them. The row source has its test in tests/extras/sqlite/test_rows.py."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

PAGE = Path(__file__).parents[1] / "docs/objectives.md"


def test_the_examples_of_the_page_run_together(
    tiny_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = PAGE.read_text().partition("## Four doors")[2]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 5
    assert all(len(block.splitlines()) <= 20 for block in blocks)
    cell = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", cell)
    flags = [*tiny_flags, "--max_steps", "2", "--output_dir", str(tmp_path)]
    *classes, run = blocks
    run = run.replace('"--train_file", "pairs.jsonl", "--max_steps", "2"', repr(flags)[1:-1])
    for block in (*classes, run):
        exec(block, cell.__dict__)
    output = capsys.readouterr().out
    assert re.search(r"^training on \d+ images$", output, re.MULTILINE)
    assert re.findall(r"^([12]) \d+\.\d+$", output, re.MULTILINE) == ["1", "2"]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(any(name in row for row in rows) for name in ("Uniformity_loss", "eval_centroid_gap"))
    assert "centroid_gap" in (tmp_path / "README.md").read_text()
