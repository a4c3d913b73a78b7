"""The export's flags, and that a failure leaves nothing; tests/export has what it writes."""

import errno
import os
from pathlib import Path

import pytest

from mm_utils.distributed import RunError
from scripts import export
from tests.export.conftest import save_tiny
from tests.kit.models import save_model


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("export")
    return ["--model_name_or_path", str(save_tiny(folder / "model")), "--output_dir", str(folder / "onnx")]


def test_a_folder_that_is_taken(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ValueError, match="it is not empty"):
        export.main([*flags[:3], str(tmp_path)])


def test_a_split_that_is_not_there(flags: list[str], corpus: Path) -> None:
    with pytest.raises(ValueError, match="--split is test; the data has train, validation"):
        export.main([*flags, "--train_file", str(corpus), "--split", "test"])


def test_a_part_that_cannot_be_traced_leaves_nothing(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("outer") from NotImplementedError("aten::fold_space\nsecond line")

    monkeypatch.setattr("torch.onnx.export", refuse)
    with pytest.raises(
        RunError, match=r"vision_model.onnx cannot be made; .* NotImplementedError: aten::fold_space second"
    ):
        export.main(flags)
    assert {path.name for path in Path(flags[-1]).parent.iterdir()} == {"model"}


@pytest.mark.parametrize("place", ["torch.onnx.export", "mm_utils.export.folder.convert"])
def test_a_full_disk_is_a_line_and_leaves_nothing(
    place: str, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if place.endswith("convert"):
        monkeypatch.setattr("mm_utils.export.folder.trace", lambda *_: None)  # half a minute before it
    monkeypatch.setattr(place, refuse)
    with pytest.raises(
        RunError, match=r"--output_dir is .*; it cannot be written: No space left on device. Free some"
    ):
        export.main(flags)
    assert {path.name for path in Path(flags[-1]).parent.iterdir()} == {"model"}


@pytest.mark.slow
@pytest.mark.parametrize("medium", ["clip", "sound"])
def test_media_are_exported_in_the_plain_layout_alone(medium: str, tmp_path: Path) -> None:
    flags = ["--model_name_or_path", str(save_model(tmp_path / "model", medium)), "--reranker", "no", "--output_dir"]
    with pytest.raises(ValueError, match=f"it is for images, and this model reads {medium}s"):
        export.main([*flags, str(tmp_path / "js"), "--layout", "transformers.js"])
    figures = export.main([*flags, str(tmp_path / "onnx")])  # differs by at most 1e-5, or fails
    assert set(figures["fp32"].differences) == {"image", "text"}
    files = {path.name for path in (tmp_path / "onnx").iterdir()}
    assert "without_torch.py" not in files
    assert {"vision_model.onnx", "text_model.onnx", "preprocessor_config.json", "README.md"} <= files
