"""The pages of jobs run as written, and end in about the number that they state."""

import importlib
import re
from pathlib import Path

import pytest

from tests.kit.commands import ROOT, blocks, command_lines, understand

PAGES = {  # a page -> the metric of its last command, or the name in its last lines of Python, that its last table ends in
    **dict.fromkeys(("job_shop.md", "job_domain.md", "job_sounds.md", "job_language.md"), "text_to_image_recall@1"),
    "job_library.md": "recall",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs_as_written_and_its_number_is_found_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, found = ROOT / "docs" / name, {"__name__": name}
    runs = [
        (block, [understand(line) for line in command_lines(block)] if language == "bash" else None)
        for language, block in blocks(page)
        if language in ("bash", "python")
    ]
    monkeypatch.chdir(tmp_path)
    for block, commands in runs:
        if commands is None:
            exec(compile(block, name, "exec"), found)
        for command in commands or ():
            if command.module is not None:
                found |= importlib.import_module(command.module).main(command.argv) or {}
    row = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")][-1]
    stated = re.findall(r"\b0\.\d{3}", row)[-1 if name == "job_library.md" else 0]
    assert found[PAGES[name]] == pytest.approx(float(stated), abs=0.1)
