"""The survey of backbones, on a family of each outcome."""

from pathlib import Path

import pytest

from benchmarks import backbones


def test_families_are_right_or_refused_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "page.md"
    backbones.main(["--families", "vit,vit_mae,mobilevit,bert,llava", "--output_file", str(file)])
    rows = {
        line.split(" | ")[0].removeprefix("| "): line for line in file.read_text().splitlines() if line[:2] == "| "
    }
    assert "| right | pooler | 224 px" in rows["vit"]
    assert "| refused | ViTMAEModel returns other outputs for the same input each time" in rows["vit_mae"]
    assert "refused: MobileViTImageProcessor swaps red and blue" in rows["mobilevit"]
    assert "| right |" in rows["bert"]
    assert "llava" not in rows
    assert capsys.readouterr().out == file.read_text()
