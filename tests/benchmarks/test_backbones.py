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
    assert "## Whole models" not in file.read_text()
    assert capsys.readouterr().out == file.read_text()


@pytest.mark.slow
def test_a_whole_model_is_exported() -> None:
    assert backbones.check_whole("metaclip_2") == ["right", "yes", "yes", "its own", "yes"]


def test_whole_models_are_taken_by_their_parts_and_others_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits against their own class; another size, another text tower, their class again."""
    monkeypatch.setattr(backbones, "exported", lambda *_: "yes")
    for kind in ("altclip", "clipseg", "metaclip_2"):
        assert backbones.check_whole(kind) == ["right", "yes", "yes", "its own", "yes"], kind
    assert backbones.check_whole("tipsv2") == ["right", "yes", "yes", "VisionTextDualEncoderModel", "yes"]
    reasons = {"align": "its text_projection is more than one matrix", "flava": "it has no vision_model"}
    for kind, reason in {
        **reasons,
        "owlvit": "its vision_model, a OwlViTVisionTransformer, is not a model by itself",
    }.items():
        assert backbones.check_whole(kind)[0] == f"refused: {reason}"
