"""The pages of jobs run as written, and end in about the number that they state."""

import importlib
import re
from pathlib import Path

import pytest

from tests.kit.commands import ROOT, blocks, command_lines, understand

PAGES = dict.fromkeys(
    ("job_shop.md", "job_domain.md", "job_sounds.md"), "text_to_image_recall@1"
)  # a page -> the metric in the last row of its table


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs_as_written_and_its_number_is_found_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, metrics = ROOT / "docs" / name, {}
    lines = [
        understand(line) for language, block in blocks(page) if language == "bash" for line in command_lines(block)
    ]
    monkeypatch.chdir(tmp_path)
    for language, block in blocks(page):
        if language == "python":
            exec(compile(block, name, "exec"), {"__name__": name})
    for command in lines:
        metrics = importlib.import_module(str(command.module)).main(command.argv)
    row = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")][-1]
    [stated, *_] = re.findall(r"\b0\.\d{3}", row)
    assert metrics[PAGES[name]] == pytest.approx(float(stated), abs=0.1)
