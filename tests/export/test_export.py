"""Graphs give torch's numbers for any batch and length; a folder has what its readers look for; a failure leaves nothing."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoTokenizer

import mm_utils
from mm_utils.distributed import RunError
from mm_utils.export import folder as export_folder
from mm_utils.export.folder import IMMICH_NAMES, ends_in_pad, immich_width
from mm_utils.export.graphs import PaddedTextTower
from mm_utils.export.open_clip import write_open_clip
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model, load_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.pretrained import cut_texts_at
from mm_utils.model.processor import load_processor, load_processor_of
from scripts import export
from tests.kit.fault_images import TEXTS as AWKWARD
from tests.kit.fault_images import awkward_pictures
from tests.kit.models import save_model
from tests.kit.stock_folders import TEXTS, noise, stock_logits, write_stock

WORDS = ["a red circle, number 3", "one square in yellow", "green and blue", "number 2: one circle in red"]


def save_tiny(folder: Path) -> Path:
    """Write a model with weights that matter: fresh ones are so small that rounding would not show."""
    tower = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "hidden_size": 32}
    configs = {
        "vision": {"model_type": "convnext", "hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2,
                   "patch_size": 4, "image_size": 32, "layer_scale_init_value": 1.0, "initializer_range": 0.1},
        "text": {"model_type": "bert", **tower, "initializer_range": 0.2},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for name, config in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    files = {f"{name}_config": str(folder / f"{name}.json") for name in configs}
    args = ModelArguments(**files, fusion_layers=2, projection_dim=20)
    processor = load_processor(args, WORDS * 20)
    torch.manual_seed(0)
    model = build_model(args, processor.tokenizer)
    model.config.rerank_weights = {"match": 0.7}
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model."""
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> FusionDualEncoderModel:
    return FusionDualEncoderModel.from_pretrained(folder).eval()


def export_as(folder: Path, output: Path, precision: str) -> tuple[Path, dict[str, float]]:
    flags = ["--model_name_or_path", str(folder), "--output_dir", str(output), "--precision", precision]
    return output, export.main(flags)


@pytest.fixture(scope="module")
def exported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """The folder of an export, and its differences from torch."""
    return export_as(folder, tmp_path_factory.mktemp("exported") / "onnx", "fp32")


PARTS = ("vision_model", "text_model")


@torch.no_grad()
@pytest.mark.parametrize(("images", "texts", "length"), [(1, 1, 2), (1, 4, 9), (5, 1, 30), (2, 3, 7)])
def test_any_number_of_images_texts_and_tokens(
    images: int, texts: int, length: int, exported: tuple[Path, Any], model: FusionDualEncoderModel
) -> None:
    draw = torch.Generator().manual_seed(texts)
    pixels = torch.randn(images, 3, 32, 32, generator=draw)
    ids = torch.randint(5, 20, (texts, length), generator=draw)
    mask = (torch.arange(length) < (torch.arange(texts) % length + 1)[:, None]).long()

    def run(part, **inputs):
        session = onnxruntime.InferenceSession(exported[0] / f"onnx/{part}.onnx")
        given = {each.name: inputs[each.name].numpy() for each in session.get_inputs()}
        return [torch.from_numpy(found) for found in session.run(None, given)]

    text = {"input_ids": ids, "attention_mask": mask}
    for part, inputs, expected in (
        ("vision_model", {"pixel_values": pixels}, model.encode_image(pixels)[0]),
        ("text_model", text, model.encode_text(ids, mask)[0]),
    ):
        torch.testing.assert_close(run(part, **inputs)[0], expected, atol=1e-5, rtol=0)


def test_int8_is_smaller_and_near(
    folder: Path, exported: tuple[Path, dict], paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        export_folder, "trace", lambda graph, path: shutil.copy(exported[0] / "onnx" / path.name, path)
    )
    out, apart = export_as(folder, tmp_path / "int8", "int8")
    assert exported[1]["text_model"] < apart["text_model"] < 0.05  # on any processor
    assert {path.name for path in out.glob("onnx/*")} == {f"{part}_quantized.onnx" for part in PARTS}
    sizes = [
        path.stat().st_size for path in (out / "onnx/text_model_quantized.onnx", exported[0] / "onnx/text_model.onnx")
    ]
    assert sizes[0] < sizes[1]
    assert len(run_there(out, tmp_path, "without_torch.py", "a circle", *paths[:2]).splitlines()) == 2


def test_what_is_written(exported: tuple[Path, dict], folder: Path, model: FusionDualEncoderModel) -> None:
    """Figures, usage, and settings that stock classes read; and nothing of this machine."""
    out, apart = exported
    assert apart.keys() == set(PARTS)
    assert max(apart.values()) < 1e-5
    assert {path.name for path in out.glob("onnx/*")} == {f"{part}.onnx" for part in PARTS}
    stated = json.loads((out / "export.json").read_text())
    assert (stated["opset"], stated["differences"]) == (18, apart)
    assert stated["logit_scale"] == pytest.approx(model.logit_scale.exp().item())
    page = (out / "README.md").read_text()
    assert "python without_torch.py" in page
    assert not [name for name in ("NAME", "WIDTH", "DTYPE", "PADDING") if name in page]
    places = [each.encode() for each in (str(out.parent), os.path.dirname(mm_utils.__file__))]
    files = {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    for name, content in files.items():
        assert not any(place in content for place in places), name
    for name in (folder, out):
        image = AutoImageProcessor.from_pretrained(name)(images=[Image.effect_noise((50, 40), 90)] * 2)
        assert np.shape(image["pixel_values"]) == (2, 3, 32, 32)
    one = AutoTokenizer.from_pretrained(folder)(WORDS)["input_ids"]
    other = AutoTokenizer.from_pretrained(out)(WORDS)["input_ids"]
    assert one == other


@torch.no_grad()
@pytest.mark.parametrize("kind", ["clip", "siglip", "chinese_clip"])
def test_texts_without_a_mask(kind: str, tmp_path: Path) -> None:
    """The mask is read off the tokens, also where a text ends in the token that pads it, as CLIP's do."""
    name = write_stock(tmp_path, kind)
    model = load_model(name, fusion_layers=0).eval()
    tokenizer = load_processor_of(name).tokenizer
    assert ends_in_pad(tokenizer) == (kind != "chinese_clip")
    given = tokenizer(TEXTS, padding="max_length", max_length=64, return_tensors="pt")
    found = PaddedTextTower(model, tokenizer.pad_token_id, ends_in_pad(tokenizer), 40)(given["input_ids"].int())
    expected = model.encode_text(given["input_ids"], given["attention_mask"])[0]
    torch.testing.assert_close(
        found, torch.nn.functional.pad(expected, (0, 40 - expected.shape[1])), atol=1e-6, rtol=0
    )


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("export")
    return ["--model_name_or_path", str(save_tiny(place / "model")), "--output_dir", str(place / "onnx")]


def test_a_folder_that_is_taken(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ValueError, match="it is not empty"):
        export.main([*flags[:3], str(tmp_path)])


FAILURES = {
    "an operator": (
        "torch.onnx.export",
        NotImplementedError("aten::fold\nsecond"),
        "cannot be made; .*aten::fold second",
    ),
    "a full disk": (
        "torch.onnx.export",
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        "No space left on device",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_a_line_and_leaves_nothing(name: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    place, error, said = FAILURES[name]

    def refuse(*_, **__):
        raise RuntimeError("outer") from error

    monkeypatch.setattr(place, refuse)
    with pytest.raises((RunError, OSError), match=said):
        export.main(flags)
    assert {path.name for path in Path(flags[-1]).parent.iterdir()} == {"model"}


@pytest.mark.parametrize("difference", [2e-5, float("nan")])
def test_an_export_that_differs_is_refused(difference: float, flags: list[str], monkeypatch) -> None:
    monkeypatch.setattr(export_folder, "trace", lambda graph, path: path.touch())
    monkeypatch.setattr(export_folder, "differences", lambda *_: {"text_model": difference})
    with pytest.raises(RunError, match=rf"The exported text_model differs from torch by {difference:.1e}; .* Nothing"):
        export.main(flags)
    assert not Path(flags[-1]).exists()


# -- every layout and medium -------------------------------------------------------------------------------------------


def immich_embeds(folder: Path, images: list[Image.Image], texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Read a folder as Immich's machine-learning service does: one image and one padded text at a time, int32 and no mask."""
    settings = json.loads((folder / "visual/preprocess_cfg.json").read_text())
    session = onnxruntime.InferenceSession(folder / "visual/model.onnx")
    size = settings["size"][0]
    found = []
    for image in images:
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
@pytest.mark.parametrize("kind", ["tiny", "clip", "siglip", "chinese_clip"])
def test_layouts_of_every_kind_of_model(kind: str, folder: Path, tmp_path: Path, monkeypatch) -> None:
    layout = "plain" if kind in ("siglip", "chinese_clip") else "immich"
    name = str(folder) if kind == "tiny" else write_stock(tmp_path / "stock", kind)
    out = tmp_path / "out"
    export.main(["--model_name_or_path", name, "--output_dir", str(out), "--layout", layout])
    model = load_model(name, fusion_layers=0).eval()
    model.processor = load_processor_of(name)
    expected = [each.numpy() for each in model.encode(images=noise(), texts=TEXTS)]
    width = model.config.projection_dim
    if layout == "immich":
        images, texts = immich_embeds(out, noise(), TEXTS)
        assert images.shape[1] == texts.shape[1] == 512
        assert not images[:, width:].any()
        found = images[:, :width], texts[:, :width]
        assert f"/cache/clip/{IMMICH_NAMES[512]}" in (out / "README.md").read_text()
    else:
        from mm_utils.export.without_torch import Towers

        towers = Towers(out)
        found = towers.images(noise()), towers.texts(TEXTS)
        assert {path.name for path in (out / "onnx").iterdir()} >= {"vision_model.onnx", "text_model.onnx"}
        assert json.loads((out / "config.json").read_text())["model_type"] == "clip"
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 if layout == "immich" else 2e-3)  # Pillow's filter


def test_widths_that_immich_knows() -> None:
    assert [immich_width(width) for width in (1, 512, 513, 1152)] == [512, 512, 640, 1152]
    with pytest.raises(ValueError, match="it stores at most 1152 numbers, and embeddings here have 1153"):
        immich_width(1153)


@pytest.mark.slow
@pytest.mark.parametrize("medium", ["clip", "sound"])
def test_media_are_exported_in_the_plain_layout_alone(medium: str, tmp_path: Path) -> None:
    flags = ["--model_name_or_path", str(save_model(tmp_path / "model", medium)), "--output_dir"]
    with pytest.raises(ValueError, match=f"it is for images, and this model reads {medium}s"):
        export.main([*flags, str(tmp_path / "immich"), "--layout", "immich"])
    assert set(export.main([*flags, str(tmp_path / "onnx")])) >= {"vision_model", "text_model"}
    files = {path.name for path in (tmp_path / "onnx").iterdir()}
    assert "without_torch.py" not in files
    assert {"onnx", "preprocessor_config.json", "README.md"} <= files


# -- open_clip ----------------------------------------------------------------------------------------------------------


def test_export_writes_what_open_clip_reads(tmp_path: Path) -> None:
    open_clip = pytest.importorskip("open_clip")
    start = write_stock(tmp_path / "clip", "clip")
    out = tmp_path / "out"
    export.main(["--model_name_or_path", start, "--output_dir", str(out), "--layout", "open_clip"])
    read = load_processor_of(start)
    read = read(text=TEXTS, images=noise(), padding=True, return_tensors="pt")
    theirs = open_clip.create_model_from_pretrained(f"local-dir:{out}", return_transform=False).eval()
    with torch.no_grad():
        image, text, scale = theirs(read.pixel_values, F.pad(read.input_ids, (0, 77 - read.input_ids.shape[1])))
    torch.testing.assert_close(scale * image @ text.T, stock_logits(start), rtol=0, atol=1e-5)
    config = json.loads((out / "open_clip_config.json").read_text())
    assert config["preprocess_cfg"]["resize_mode"] == "shortest"
    assert (out / "open_clip_model.safetensors").stat().st_mode == (out / "open_clip_config.json").stat().st_mode
    short = tmp_path / "short"
    short.mkdir()
    processor = load_processor_of(start)
    cut_texts_at(processor.tokenizer, 16)
    write_open_clip(short, load_model(start, fusion_layers=0), processor)
    ids = processor.tokenizer(["a red circle " * 9], truncation=True, return_tensors="pt")["input_ids"]
    cut = open_clip.create_model_from_pretrained(f"local-dir:{short}", return_transform=False).eval()
    with torch.no_grad():
        torch.testing.assert_close(cut.encode_text(ids), theirs.encode_text(F.pad(ids, (0, 77 - 16))))
    siglip = ["--model_name_or_path", write_stock(tmp_path / "siglip", "siglip"), "--output_dir", str(tmp_path / "no")]
    with pytest.raises(ValueError, match="it is written of a CLIP, and this is a siglip_vision_model"):
        export.main([*siglip, "--layout", "open_clip"])


# -- the one file that travels with an export, where torch cannot be imported ------------------------------------------
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("torch", "torchvision", "transformers", "mm_utils", "datasets", "accelerate"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
"""
PROGRAM = """
import json, sys
from PIL import Image
from without_torch import Towers
paths, texts = json.loads(sys.argv[1])
for name in ("torch", "transformers", "mm_utils"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} was imported")
towers = Towers(".")
one = towers.images([paths[0]])
for images in (paths[0], Image.open(paths[0]), (paths[0],)):
    assert (towers.images(images) == one).all()
assert (towers.texts(texts[0]) == towers.texts(texts[:1])).all()
assert towers.images([]).shape == towers.texts([]).shape == (0, 20)
print(json.dumps([towers.images(paths).tolist(), towers.texts(texts).tolist()]))
"""
SAID = ["a red circle, number 3", "one square", "number 2: one circle in red " * 3, *AWKWARD]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pictures")
    files = []
    for number, content in enumerate(awkward_pictures().values()):
        files.append(folder / f"{number}.png")
        files[-1].write_bytes(content)
    return list(map(str, files))


def run_there(folder: Path, place: Path, *words: str) -> str:
    (place / "sitecustomize.py").write_text(BLOCKER)
    environment = {**os.environ, "PYTHONPATH": str(place)}
    ran = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_images_and_texts_as_in_torch(
    exported: tuple[Path, dict], model: FusionDualEncoderModel, paths: list[str], tmp_path: Path
) -> None:
    images, texts = json.loads(run_there(exported[0], tmp_path, "-c", PROGRAM, json.dumps([paths, SAID])))
    expected = model.encode(images=paths, texts=SAID)
    np.testing.assert_allclose(images, expected[0], atol=1e-2)  # Pillow's bicubic filter is not torch's to the bit
    np.testing.assert_allclose(texts, expected[1], atol=1e-5)
    lines = run_there(exported[0], tmp_path, "without_torch.py", SAID[0], *paths).splitlines()
    scores = {line.split()[1]: float(line.split()[0]) for line in lines}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert scores == pytest.approx(dict(zip(paths, (expected[0] @ expected[1][0]).tolist(), strict=True)), abs=2e-2)


def test_immichs_folder_has_the_models_own_colours(tmp_path: Path) -> None:
    name = write_stock(tmp_path / "clip", "clip")
    processor = load_processor_of(name)
    (tmp_path / "out/visual").mkdir(parents=True)
    export_folder.write_settings(tmp_path / "out", "immich", load_model(name, fusion_layers=0), processor)
    settings = json.loads((tmp_path / "out/visual/preprocess_cfg.json").read_text())
    images = processor.image_processor
    assert (settings["mean"], settings["std"]) == (list(images.image_mean), list(images.image_std))
    assert settings["mean"] != [0.0] * 3
