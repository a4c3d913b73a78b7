"""Models and processors from presets, pretrained backbones and saved models."""

import copy

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    BertConfig,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipModel,
    TimmWrapperConfig,
    TimmWrapperModel,
    VisionTextDualEncoderProcessor,
    ViTImageProcessor,
)

from mm_utils.data.media.medium import image_geometry
from mm_utils.model import processor as processors
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model, load_model
from mm_utils.model.dual_encoder import to_dual_encoder
from mm_utils.model.join import join_backbones
from mm_utils.model.processor import load_processor, load_processor_of, train_tokenizer
from mm_utils.model.reading import center_square
from tests.kit.models import CAPTIONS, TOWER

VIT = {"model_type": "vit", **TOWER, "image_size": 32, "patch_size": 8}
MEAN, STD = [0.1, 0.2, 0.3], [0.9, 0.8, 0.7]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(CAPTIONS, 200)


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory) -> dict[str, str]:
    """Folders as a user may have them: `vision`, `text`, `clip` and a `stock` dual encoder."""
    root = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model(**VIT)).save_pretrained(root / "vision")
    processor = ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=MEAN, image_std=STD)
    processor.save_pretrained(root / "vision")
    bert = BertConfig(**TOWER, vocab_size=len(tokenizer))
    AutoModel.from_config(bert).half().save_pretrained(root / "text")
    tokenizer.save_pretrained(root / "text")
    tower = {**TOWER, "projection_dim": 16}
    clip = CLIPConfig(
        text_config={**tower, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.sep_token_id},
        vision_config={**tower, "image_size": 32, "patch_size": 8},
    )
    CLIPModel(clip).save_pretrained(root / "clip")
    CLIPImageProcessor(size={"shortest_edge": 36}, crop_size=32).save_pretrained(root / "clip")
    tokenizer.save_pretrained(root / "clip")
    towers = (AutoModel.from_pretrained(root / name, dtype="float32") for name in ("vision", "text"))
    to_dual_encoder(join_backbones(*towers)).save_pretrained(root / "stock")
    VisionTextDualEncoderProcessor(processor, tokenizer).save_pretrained(root / "stock")
    return {folder.name: str(folder) for folder in root.iterdir()}


@pytest.fixture
def _cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name].to(value.dtype)) for name, value in ours.items())


# Presets and backbones
@pytest.mark.usefixtures("_cache")
def test_tiny_preset_is_the_default_and_takes_a_training_step():
    args = ModelArguments()
    processor = load_processor(args, CAPTIONS)
    model = build_model(args, processor.tokenizer).train()
    assert not args.pretrained
    assert model.config.vision_config.model_type == "convnext"
    assert model.config.text_config.vocab_size == len(processor.tokenizer)
    assert model.config.text_config.pad_token_id == processor.tokenizer.pad_token_id
    assert image_geometry(processor) == (64, [0.5] * 3, [0.5] * 3)
    image = Image.new("RGB", (80, 60), "red")
    inputs = processor(text=CAPTIONS[:2], images=[image, image], padding=True, return_tensors="pt")
    output = model(**inputs, return_loss=True)
    (output.loss + output.match_logits.sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    assert sum(parameter.numel() for parameter in model.parameters()) < 5e6


def test_pretrained_backbones_keep_their_weights_and_their_normalisation(folders):
    args = ModelArguments(vision_model_name_or_path=folders["vision"], text_model_name_or_path=folders["text"])
    assert args.pretrained
    processor = load_processor(args, [])
    model = build_model(args, processor.tokenizer)
    assert_same_weights(model.vision_model, AutoModel.from_pretrained(folders["vision"]))
    assert_same_weights(model.text_model, AutoModel.from_pretrained(folders["text"]))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.freeze_batch_norm
    side, mean, std = image_geometry(processor)
    assert side == 32
    assert mean == pytest.approx(MEAN)
    assert std == pytest.approx(STD)
    assert processor.tokenizer.get_vocab() == AutoTokenizer.from_pretrained(folders["text"]).get_vocab()


def test_one_tower_of_a_two_tower_checkpoint_is_loaded(folders):
    whole = CLIPModel.from_pretrained(folders["clip"])
    args = ModelArguments(vision_model_name_or_path=folders["clip"], text_model_name_or_path=folders["clip"])
    processor = load_processor(args, [])
    model = build_model(args, processor.tokenizer)
    for ours, theirs in ((model.vision_model, whole.vision_model), (model.text_model, whole.text_model)):
        theirs = dict(theirs.named_parameters())
        assert len(theirs) == len(list(ours.parameters()))
        for name, value in ours.named_parameters():
            assert torch.equal(value, theirs[name.removeprefix("vision_model.").removeprefix("text_model.")]), name
    assert (model.config.vision_pooling, model.config.text_pooling) == ("pooler", "pooler")
    assert image_geometry(processor)[0] == 32


def test_only_siglips_image_tower_is_loaded(tokenizer, tmp_path):
    """Its text tower is not an AutoModel and pools the last position, padding included."""
    tower = {**TOWER, "vocab_size": 100, "projection_size": 32}
    config = SiglipConfig(text_config=tower, vision_config={**TOWER, "image_size": 32, "patch_size": 8})
    SiglipModel(config).save_pretrained(tmp_path)
    model = build_model(ModelArguments(vision_model_name_or_path=str(tmp_path)), tokenizer)
    assert_same_weights(model.vision_model, SiglipModel.from_pretrained(tmp_path).vision_model)
    with pytest.raises(ValueError, match=r"--text_model_name_or_path is .*; AutoModel knows no siglip_text_model"):
        build_model(ModelArguments(text_model_name_or_path=str(tmp_path)), tokenizer)


def test_a_checkpoint_without_weights_of_the_backbone_is_refused(folders, tokenizer):
    """transformers would only warn and use random weights."""
    with pytest.raises(ValueError, match=r"--vision_model_name_or_path is .*; it holds no weights of a vit"):
        build_model(ModelArguments(vision_model_name_or_path=folders["stock"]), tokenizer)


# Images
SIZES = [(64, 64), (65, 64), (100, 75), (75, 100), (640, 480), (333, 500), (31, 47), (300, 70), (64, 256), (129, 131)]


def test_saved_processor_does_what_center_square_does(tokenizer):
    generator = np.random.default_rng(0)
    args = ModelArguments(image_size=64)
    processor = VisionTextDualEncoderProcessor(processors._image_processor(args), tokenizer)
    side, mean, std = image_geometry(processor)
    mean, std = (torch.tensor(value)[:, None, None] for value in (mean, std))
    differences = {}
    for size in SIZES:
        coarse = Image.fromarray(generator.integers(0, 256, (5, 5, 3), dtype=np.uint8))
        image = coarse.resize(size, Image.Resampling.BICUBIC)
        ours = (center_square(image, side) / 255 - mean) / std
        theirs = processor.image_processor(images=image, return_tensors="pt")["pixel_values"][0]
        differences[size] = ((ours - theirs) * std * 255).abs().max().item()
    assert max(differences.values()) <= 2.01, differences


def test_other_processors_become_center_squares(folders):
    """A stock model's own processor may stretch images; training and evaluation do not."""
    for processor in (
        load_processor_of(folders["stock"]),
        load_processor(ModelArguments(model_name_or_path=folders["stock"]), []),
    ):
        side, mean, std = image_geometry(processor)
        assert side == 32
        assert (mean, std) == (pytest.approx(MEAN), pytest.approx(STD))
        wide = Image.new("RGB", (96, 32))
        wide.paste("white", (32, 0, 64, 32))
        pixels = processor(images=wide, return_tensors="pt")["pixel_values"][0]
        white = (1 - torch.tensor(MEAN)) / torch.tensor(STD)
        torch.testing.assert_close(pixels.mean((1, 2)), white, rtol=0, atol=1e-3)


# The tokenizer
def test_tokenizer_without_padding_pads_with_its_end(tokenizer, tmp_path):
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    bare.eos_token = "[SEP]"
    bare.save_pretrained(tmp_path)
    assert processors._tokenizer(ModelArguments(text_model_name_or_path=str(tmp_path)), []).pad_token == "[SEP]"


# Whole models
def test_a_bfloat16_model_is_trained_in_float32(folders, tokenizer, tmp_path):
    load_model(folders["stock"]).bfloat16().save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).dtype == torch.bfloat16
    model = build_model(ModelArguments(model_name_or_path=str(tmp_path)), tokenizer)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_head_of_a_whole_model_stays(tokenizer, tmp_path):
    build_model(ModelArguments(image_size=32, fusion_layers=1), tokenizer).save_pretrained(tmp_path)
    for same in ({}, {"fusion_layers": 1}):
        assert build_model(ModelArguments(str(tmp_path), **same), tokenizer).config.fusion_layers == 1
    with pytest.raises(ValueError, match=r"--fusion_layers is 3; the head of .* and stays as it is"):
        build_model(ModelArguments(str(tmp_path), fusion_layers=3), tokenizer)


@pytest.mark.parametrize("architecture", ["test_vit", "test_convnext", "vit_pe_core_tiny_patch16_384"])
@pytest.mark.usefixtures("_cache")
def test_timm_backbones_keep_their_size_and_normalisation(architecture, tmp_path):
    timm = pytest.importorskip("timm")
    own = timm.get_pretrained_cfg(architecture).to_dict() | {"mean": MEAN, "std": STD}
    config = TimmWrapperConfig(architecture=architecture, pretrained_cfg=own)
    backbone = TimmWrapperModel(config).eval()
    backbone.save_pretrained(tmp_path / "timm")
    args = ModelArguments(vision_model_name_or_path=str(tmp_path / "timm"))
    processor = load_processor(args, CAPTIONS)
    side, mean, std = image_geometry(processor)
    assert side == own["input_size"][-1]
    assert (mean, std) == (pytest.approx(MEAN, abs=1e-5), pytest.approx(STD, abs=1e-5))
    model = build_model(args, processor.tokenizer).eval()
    model.save_pretrained(tmp_path / "run")
    pixels = torch.randn(2, 3, side, side)
    with torch.no_grad():
        right = backbone(pixels).pooler_output
        for each in (model, load_model(str(tmp_path / "run")).eval()):
            torch.testing.assert_close(each.vision_features(pixels)[0], right, rtol=0, atol=1e-5)
