"""Pretrained backbones: random encoders, missing poolers, missing weights."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AutoConfig,
    AutoModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    ViTModel,
)

from mm_utils.model import join
from mm_utils.model.adapt import load_weights
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model, load_model
from mm_utils.model.join import join_backbones
from mm_utils.model.pretrained import load_tower
from mm_utils.model.processor import load_processor, load_processor_of, train_tokenizer
from tests.kit.models import CAPTIONS, IMAGE, TOWER

DECODER = {f"decoder_{name}": value for name, value in TOWER.items()}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(CAPTIONS, 200)


def test_a_masked_autoencoder_is_loaded_as_a_vit_that_sees_all_patches(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    whole = ViTMAEForPreTraining(ViTMAEConfig(**TOWER, **IMAGE, **DECODER)).eval()
    whole.save_pretrained(tmp_path)
    model = build_model(ModelArguments(vision_model_name_or_path=str(tmp_path)), tokenizer).eval()
    whole.config.mask_ratio = 0.0
    images = torch.randn(3, 3, 32, 32)
    in_order = torch.arange(16.0).expand(3, -1)
    with torch.no_grad():
        expected = whole.vit(images, noise=in_order).last_hidden_state
        torch.testing.assert_close(model.vision_model(images).last_hidden_state, expected)
    assert model.config.vision_pooling == "mean"


def test_an_encoder_that_is_random_in_evaluation_is_refused(tmp_path: Path) -> None:
    vision = AutoModel.from_config(ViTMAEConfig(**TOWER, **IMAGE))
    text = AutoModel.from_config(AutoConfig.for_model("bert", **TOWER, vocab_size=50))
    with pytest.raises(
        ValueError, match=r"ViTMAEModel returns other outputs for the same input each time.*as a ViTModel"
    ):
        join_backbones(vision, text)
    text.get_input_embeddings().register_forward_hook(lambda module, given, found: found * torch.rand_like(found))
    vit = AutoModel.from_config(ViTConfig(**TOWER, **IMAGE))
    with pytest.raises(ValueError, match=r"BertModel returns other outputs.*draws random numbers"):
        join_backbones(vit, text)


@pytest.mark.parametrize(("kind", "place"), [("pixtral", "other images"), ("fnet", "padding")])
def test_a_backbone_that_mixes_the_rows_of_a_batch_is_refused(kind: str, place: str) -> None:
    """Pixtral returns all images as one row; FNet mixes the tokens of padding into the text."""
    sizes = {**TOWER, **(IMAGE if kind == "pixtral" else {"vocab_size": 50})}
    own = AutoModel.from_config(AutoConfig.for_model(kind, **sizes))
    vit, bert = ViTConfig(**TOWER, **IMAGE), AutoConfig.for_model("bert", **TOWER, vocab_size=50)
    vision, text = (own, bert) if kind == "pixtral" else (vit, own)
    towers = [tower if tower is own else AutoModel.from_config(tower) for tower in (vision, text)]
    with pytest.raises(ValueError, match=f"does not keep the rows of a batch apart: .* depends on .*{place}"):
        join_backbones(*towers)


def test_a_saved_model_with_a_random_encoder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vision = AutoModel.from_config(ViTMAEConfig(**TOWER, **IMAGE, mask_ratio=0.75))
    text = AutoModel.from_config(AutoConfig.for_model("bert", **TOWER, vocab_size=50))
    with monkeypatch.context() as patched:
        patched.setattr(join, "_close", lambda one, other: True)
        join_backbones(vision, text, fusion_layers=0).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="ViTMAEModel returns other outputs"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_pooler_without_weights_is_not_used(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture, frozen: bool
) -> None:
    ViTModel(ViTConfig(**TOWER, **IMAGE), add_pooling_layer=False).save_pretrained(tmp_path)
    args = ModelArguments(vision_model_name_or_path=str(tmp_path), freeze_vision=frozen)
    with caplog.at_level(logging.INFO):
        model = build_model(args, tokenizer)
    assert model.config.vision_pooling == "mean"
    assert not any(parameter.requires_grad for parameter in model.vision_model.pooler.parameters())
    assert "it holds no weights of a pooler, so its outputs are pooled by their mean" in caplog.text


def test_the_same_holds_for_texts(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """ALBERT's pooler is not of BERT's kind, which would be passed over with or without weights."""
    sizes = {**TOWER, "embedding_size": 16, "vocab_size": len(tokenizer)}
    AlbertForMaskedLM(AlbertConfig(**sizes)).save_pretrained(tmp_path / "without")
    AutoModel.from_config(AlbertConfig(**sizes)).save_pretrained(tmp_path / "with")
    assert load_tower(str(tmp_path / "with"), "text")[1] == "auto"
    assert load_tower(str(tmp_path / "without"), "text", frozen=True)[1] == "mean"


def test_other_missing_weights_are_named_and_never_frozen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shallow = ViTModel(ViTConfig(**TOWER, **IMAGE))
    shallow.save_pretrained(tmp_path)
    ViTConfig(**{**TOWER, "num_hidden_layers": 3}, **IMAGE).save_pretrained(tmp_path)
    model, pooling = load_tower(str(tmp_path), "vision")
    assert pooling == "auto"
    assert len(model.layers) == 3
    [line] = [record.message for record in caplog.records if record.name.startswith("mm_utils")]
    assert "it lacks 16 weights of a vit (layers.2." in line
    with pytest.raises(ValueError, match=r"frozen they would stay random. Drop --freeze_vision"):
        load_tower(str(tmp_path), "vision", frozen=True)


# -- whole models that cannot be ----------------------------------------------------------------------------------------
def edited(folder: Path, name: str, **entries: Any) -> None:
    path = folder / name
    content = json.loads(path.read_text())
    for place, value in entries.items():
        part, _, key = place.rpartition("__")
        (content[part] if part else content)[key] = value
    path.write_text(json.dumps(content))


def without(folder: Path, start: str) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.startswith(start)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def opened(name: str) -> None:
    load_processor_of(name), load_model(name)


def words_beyond(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"far": 100_000}
    (folder / "tokenizer.json").write_text(json.dumps(content))


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "text_projection": (lambda folder: without(folder, "text_projection"), "lacks 1 weights .*text_projection.weight"),
    "text tower": (lambda folder: without(folder, "text_model.encoder"), r"lacks \d+ weights .*text_model.encoder"),
    "head": (lambda folder: without(folder, "fusion."), r"lacks \d+ weights .*fusion"),
    "words": (words_beyond, "its tokenizer has ids up to 100,000, and its text encoder has 123 words"),
    "no text": (lambda folder: edited(folder, "tokenizer_config.json", model_max_length=0), "reads texts of 0 tokens"),
    "std": (
        lambda folder: edited(folder, "processor_config.json", image_processor__image_std=[0, 0, 0]),
        r"its image_std is .0, 0, 0., by which no image is normalised",
    ),
    "side": (
        lambda folder: edited(folder, "processor_config.json", image_processor__crop_size={"height": -3, "width": -3}),
        "its images are -3 pixels a side",
    ),
    "weight": (
        lambda folder: edited(folder, "config.json", rerank_weights={"match": "2"}),
        "rerank_weights has match",
    ),
    "medium": (lambda folder: edited(folder, "config.json", medium="smell"), "medium is 'smell'; choose one of"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_model_that_cannot_be_is_refused_in_one_line(
    wrong: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """By every way in: without its own weights, transformers would go on with random ones."""
    processor: Any = load_processor(ModelArguments(image_size=32), CAPTIONS)
    build_model(ModelArguments(image_size=32), processor.tokenizer).save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    damage, message = WRONG[wrong]
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        opened(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    if "lacks" in message:
        with pytest.raises(ValueError, match=message):
            AutoModel.from_pretrained(tmp_path)
        with pytest.raises(ValueError, match=message):
            load_weights(build_model(ModelArguments(image_size=32), tokenizer), tmp_path)


def test_weights_that_are_too_many_are_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    build_model(ModelArguments(image_size=32), tokenizer).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "odd.weight": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    load_model(str(tmp_path))
    assert "has 1 weights that are not of its model: odd.weight" in caplog.text


def test_a_tokenizer_beyond_the_text_encoder_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    AutoModel.from_config(AutoConfig.for_model("bert", **TOWER, vocab_size=30)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"its tokenizer has ids up to \d+, and its text encoder has 30 words"):
        build_model(ModelArguments(text_model_name_or_path=str(tmp_path)), tokenizer)
