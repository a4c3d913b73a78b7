"""What lies in the folder of an export: settings that its readers find, figures, and how to use it."""

import json
import os
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoImageProcessor, AutoTokenizer

import mm_utils
from mm_utils.export.comparison import Figures, text_length
from mm_utils.export.folder import IMMICH_NAMES, immich_width, write_settings
from mm_utils.model.build import load_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import load_processor_of
from scripts import eval_retrieval, export
from tests.export.conftest import WEIGHTS, WORDS
from tests.kit.stock_folders import TEXTS, noise, write_stock


def test_recall_is_that_of_the_evaluation(
    exported: tuple[Path, dict[str, Figures]], folder: Path, corpus: Path
) -> None:
    flags = ["--train_file", str(corpus), "--rerank_top_k", "0", "--dataloader_num_workers", "0"]
    expected = eval_retrieval.main(["--model_name_or_path", str(folder), *flags])
    figures = exported[1]
    assert figures["torch"].recall == pytest.approx({name: expected[name] for name in figures["torch"].recall})
    assert figures["fp32"].recall == figures["torch"].recall
    assert len(figures["int8"].recall) == 4


def test_figures_and_usage_are_written(
    exported: tuple[Path, dict[str, Figures]], model: FusionDualEncoderModel
) -> None:
    folder, figures = exported
    stated = json.loads((folder / "export.json").read_text())
    assert [each["precision"] for each in stated["figures"]] == list(figures)
    assert stated["figures"][1]["recall"] == figures["fp32"].recall
    assert stated["logit_scale"] == pytest.approx(model.logit_scale.exp().item())
    assert (stated["opset"], stated["split"], stated["rerank_weights"]) == (18, "validation", WEIGHTS)
    page = (folder / "README.md").read_text()
    assert "# model, in ONNX" in page
    assert "python without_torch.py" in page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["", "torch", "fp32", "fp16", "int8"]
    assert not [name for name in ("NAME", "WIDTH", "DTYPE", "PADDING") if name in page]
    places = [each.encode() for each in (str(folder.parent), os.path.dirname(mm_utils.__file__))]  # of this machine
    found = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert [name for name, content in found.items() if any(place in content for place in places)] == []


def test_stock_classes_read_the_settings(exported: tuple[Path, dict[str, Figures]], folder: Path) -> None:
    for name in (folder, exported[0]):
        image = AutoImageProcessor.from_pretrained(name)(images=[Image.effect_noise((50, 40), 90)] * 2)
        assert np.shape(image["pixel_values"]) == (2, 3, 32, 32)
    one, other = (AutoTokenizer.from_pretrained(name)(WORDS)["input_ids"] for name in (folder, exported[0]))
    assert one == other


def test_settings_for_transformers_js(folder: Path, model: FusionDualEncoderModel, tmp_path: Path) -> None:
    write_settings(tmp_path, "transformers.js", model, load_processor_of(str(folder)))
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "clip"
    assert (
        json.loads((tmp_path / "preprocessor_config.json").read_text())["image_processor_type"] == "CLIPImageProcessor"
    )
    assert (tmp_path / "tokenizer.json").is_file()
    assert "tokenizer_class" in json.loads((tmp_path / "tokenizer_config.json").read_text())


def test_widths_that_immich_knows() -> None:
    assert [immich_width(width) for width in (1, 512, 513, 1152)] == [512, 512, 640, 1152]
    assert list(IMMICH_NAMES) == sorted(IMMICH_NAMES)
    with pytest.raises(
        ValueError, match="--layout is immich; it stores at most 1152 numbers, and embeddings here have 1153"
    ):
        immich_width(1153)


def immich_embeds(folder: Path, images: list[Image.Image], texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Read a folder as Immich's machine-learning service does: one image and one padded text at a time, int32 and no mask."""
    settings = json.loads((folder / "visual/preprocess_cfg.json").read_text())
    session = onnxruntime.InferenceSession(folder / "visual/model.onnx")
    found = []
    for image in images:
        size = settings["size"][0]
        square = image.resize((size, size), Image.Resampling[settings["interpolation"].upper()])
        pixels = (np.asarray(square, np.float32) / 255 - np.float32(settings["mean"])) / np.float32(settings["std"])
        found.append(session.run(None, {"image": pixels.transpose(2, 0, 1)[None]})[0][0])
    length = json.loads((folder / "config.json").read_text())["text_cfg"]["context_length"]
    pad = json.loads((folder / "textual/tokenizer_config.json").read_text())["pad_token"]
    tokenizer = Tokenizer.from_file(str(folder / "textual/tokenizer.json"))
    tokenizer.enable_padding(length=length, pad_token=pad, pad_id=tokenizer.token_to_id(pad))
    tokenizer.enable_truncation(max_length=length)
    session = onnxruntime.InferenceSession(folder / "textual/model.onnx")
    words = [session.run(None, {"text": np.array([tokenizer.encode(text).ids], np.int32)})[0][0] for text in texts]
    return np.stack(found), np.stack(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("tiny", "immich"), ("clip", "immich"), ("siglip2", "immich")),
        *(("siglip", "transformers.js"), ("chinese_clip", "transformers.js")),
    ],
)
def test_layouts_of_every_kind_of_model(kind: str, layout: str, folder: Path, tmp_path: Path) -> None:
    name = str(folder) if kind == "tiny" else write_stock(tmp_path / "stock", kind)
    out = tmp_path / "out"
    export.main(["--model_name_or_path", name, "--output_dir", str(out), "--layout", layout])
    model, processor = load_model(name, fusion_layers=0).eval(), load_processor_of(name)
    model.processor = processor
    expected = [each.numpy() for each in model.encode(images=noise(), texts=TEXTS)]
    if layout == "immich":
        images, texts = immich_embeds(out, noise(), TEXTS)
        assert images.shape[1] == texts.shape[1] == 512
        assert not images[:, model.config.projection_dim :].any()
        assert text_length(model, processor.tokenizer) <= 77
        found = images[:, : model.config.projection_dim], texts[:, : model.config.projection_dim]
        assert f"/cache/clip/{IMMICH_NAMES[512]}" in (out / "README.md").read_text()
    else:
        from mm_utils.export.without_torch import Towers

        towers = Towers(out)
        found = towers.images(noise()), towers.texts(TEXTS)
        assert {path.name for path in (out / "onnx").iterdir()} >= {"vision_model.onnx", "text_model.onnx"}
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert torch.isfinite(torch.tensor(found[0])).all()
