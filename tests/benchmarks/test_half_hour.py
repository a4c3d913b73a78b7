"""Whatever a section does, the others run and what was measured is on the disk."""

import json
from pathlib import Path

import pytest

from benchmarks import half_hour
from benchmarks.half_hour import SECTIONS, Section, run_half_hour


def test_a_section_that_fails_or_hangs_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_hour, "graphics", lambda: {"gpu": "a pretended one, driver 1.2"})
    file = tmp_path / "gpu.json"
    sections = (
        Section("measures", "-c open(__import__('sys').argv[-1],'w').write(__import__('json').dumps(dict(a=1)))", 60),
        Section("fails", "-c 1/0", 60, reports=False),
        Section("hangs", "-c __import__('time').sleep(600)", 1, reports=False),
        Section("comes last", "-c print('here')", 60, "no", reports=False),
    )
    found = run_half_hour(file, sections=sections)
    assert [each["status"] for each in found] == ["done", "failed with exit status 1", "ended after its 1 s", "done"]
    assert found[0]["figures"] == {"a": 1}
    assert "ZeroDivisionError" in found[1]["text"]
    assert json.loads(file.read_text())["sections"] == found
    report = file.with_suffix(".md").read_text()
    assert all(
        each in report for each in ("a pretended one, driver 1.2", "commit: ", "## comes last", "precision no", "here")
    )


@pytest.mark.slow
def test_the_rehearsal_measures_in_every_section(tmp_path: Path) -> None:
    """All that a GPU is to be asked, with tiny shapes, also where there is none; the order is that of value."""
    file = tmp_path / "gpu.json"
    found = run_half_hour(file, tiny=True)
    assert [(each["section"], each["status"]) for each in found] == [(each.title, "done") for each in SECTIONS]
    assert all(each["figures"] for each, section in zip(found, SECTIONS, strict=True) if section.reports)
    plain, captioning, matching = found[1]["figures"]["results"][:1] + found[6]["figures"]["results"]
    assert plain["kernels"] < min(
        captioning["kernels"], matching["kernels"]
    )  # their heads are trained in the steps that are timed
    report = file.with_suffix(".md").read_text()
    assert "did not finish" not in report
    assert all(f"| {loop} |" in report for loop in ("tandem", "bare", "open_clip", "transformers", "naive"))
