"""A trained image tower at another size computes what its own class does with interpolated positions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoProcessor, Siglip2ImageProcessor

from mm_utils.data.media.medium import image_geometry
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model, load_model
from mm_utils.model.dual_encoder import to_dual_encoder
from mm_utils.model.image_size import resize
from mm_utils.model.processor import load_processor, load_processor_of
from mm_utils.model.stock import stock_processor
from tests.kit.stock_folders import KINDS, TEXTS, TOWER, close, write_stock

SIDE = 56
NO_TOKENIZER: Any = None
OF_TOWERS: dict[str, dict[str, Any]] = {
    "vit": {**TOWER, "patch_size": 8},
    "deit": {**TOWER, "patch_size": 8},  # two special tokens
    "dinov2": {**TOWER, "patch_size": 8},
    "ijepa": {**TOWER, "patch_size": 8},
    "siglip_vision_model": {**TOWER, "patch_size": 8},
    "aimv2_vision_model": {**TOWER, "patch_size": 8},
    "dinov3_vit": {**TOWER, "patch_size": 8},  # rotary
    "convnext": {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2},
    "resnet": {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4, "patch_size": 4},
}
OWN = {"vit", "deit", "dinov2", "ijepa", "siglip_vision_model"}  # what their classes interpolate themselves


def tower_of(kind: str, fields: dict[str, Any], size: int = 32) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **fields, image_size=size)
    made: Any = AutoModel.from_config(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return made


@pytest.mark.parametrize("kind", OF_TOWERS)
def test_a_tower_reads_another_size_as_its_own_class_interpolates(kind: str) -> None:
    tower, pixels = tower_of(kind, OF_TOWERS[kind]), torch.randn(2, 3, SIDE, SIDE)
    own = {"interpolate_pos_encoding": True} if kind in OWN - {"dinov2"} else {}
    with torch.no_grad():
        made = resize(tower, SIDE)
        found = made(pixels)["last_hidden_state"]
        if kind != "aimv2_vision_model":  # whose class has no interpolation of its own
            torch.testing.assert_close(found, tower(pixels, **own)["last_hidden_state"], rtol=0, atol=1e-5)
    assert getattr(made.config, "image_size", SIDE) == SIDE
    assert made.training == tower.training is False


def images() -> list[Image.Image]:
    pixels = np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE, 3), np.uint8)
    return [Image.fromarray(each) for each in pixels]


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_model_at_another_size_opens_with_stock_tools(kind: str, tmp_path: Path) -> None:
    """Against the stock class at that size, which interpolates in every forward."""
    name = write_stock(tmp_path / "start", kind)
    args = ModelArguments(model_name_or_path=name, image_size=SIDE, fusion_layers=1)
    processor: Any = load_processor(args, [])
    model = build_model(args, processor.tokenizer).eval()
    assert image_geometry(processor)[0] == SIDE
    own: dict[str, Any] = {} if kind == "siglip2" else {"interpolate_pos_encoding": True}
    before, pixels = (
        AutoModel.from_pretrained(name).eval(),
        processor(images=images(), return_tensors="pt").pixel_values,
    )
    given: Any = {"pixel_values": pixels}
    if kind == "siglip2":
        given = Siglip2ImageProcessor(patch_size=8, max_num_patches=(SIDE // 8) ** 2)(images(), return_tensors="pt")
    with torch.no_grad():
        right = torch.nn.functional.normalize(before.get_image_features(**given, **own).pooler_output, dim=-1)
        found = model.encode_image(pixels)[0]
    torch.testing.assert_close(found, right, rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "run")
    processor.save_pretrained(tmp_path / "run")
    again, its = load_model(str(tmp_path / "run")).eval(), load_processor_of(str(tmp_path / "run"))
    assert image_geometry(its)[0] == SIDE
    with torch.no_grad():
        torch.testing.assert_close(again.encode_image(pixels)[0], found)
        stock = to_dual_encoder(again)
        stock.save_pretrained(tmp_path / "stock")
        stock_processor(its, stock.config).save_pretrained(tmp_path / "stock")
        stock, whole = AutoModel.from_pretrained(tmp_path / "stock"), AutoProcessor.from_pretrained(tmp_path / "stock")
        padding: Any = {"padding": "max_length", "max_length": 64} if "siglip" in kind else {"padding": True}
        read = {
            **whole.tokenizer(TEXTS, return_tensors="pt", **padding),
            **whole.image_processor(images(), return_tensors="pt"),
        }
        close(stock.eval()(**read).logits_per_image, model(**_inputs(processor)).logits_per_image)


def _inputs(processor: Any) -> Any:
    return processor(text=TEXTS, images=images(), padding=True, return_tensors="pt")


def test_frames_of_a_clip_and_a_tower_of_a_name_have_the_size_too(tmp_path: Path) -> None:
    name = write_stock(tmp_path / "clip", "clip")
    model = build_model(ModelArguments(model_name_or_path=name, image_size=48), NO_TOKENIZER, medium="clip").eval()
    frames = torch.randn(1, 4, 3, 48, 48)
    before = load_model(name, medium="clip").eval().vision_model.backbone
    with torch.no_grad():
        right = before(frames[0], interpolate_pos_encoding=True).pooler_output
        torch.testing.assert_close(model.vision_model.backbone(frames[0]).pooler_output, right, rtol=0, atol=1e-5)
        assert model.encode_image(frames)[0].shape == (1, 24)
    AutoImageProcessor.from_pretrained(name).save_pretrained(tmp_path / "clip")
    args = ModelArguments(vision_model_name_or_path=name, image_size=48)
    processor: Any = load_processor(args, ["a red circle"])
    model = build_model(args, processor.tokenizer)
    assert (image_geometry(processor)[0], model.vision_model.config.image_size) == (48, 48)
