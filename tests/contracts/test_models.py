"""What every family of models keeps: saved, stock, padding, gradient, frozen. Sizes: tests/model/test_image_size.py."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, BertConfig, BertModel

from mm_utils.model.adapt import switch_off_dropout
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model, freeze_unreached
from mm_utils.model.dual_encoder import to_dual_encoder
from mm_utils.model.join import join_backbones
from mm_utils.model.modeling_fusion_dual_encoder import (
    FusionDualEncoderModel,
    image_backbone,
    input_shape,
    vision_tower,
)
from mm_utils.model.processor import load_processor_of
from mm_utils.objectives.build import ObjectiveArguments, build_objective
from tests.kit.models import LAYERS, TEXT, TOWERS, VISION, Batch, batch_for, build
from tests.kit.stock_folders import KINDS, TEXTS, noise, write_clap, write_stock

PAIRS = [
    *(f"{vision} bert" for vision in VISION),
    *(f"vit {text}" for text in TEXT if text != "bert"),
    *("convnext distilbert", "resnet modernbert", "swin clip", "mobilenet deberta"),
]
CLIPS = ("videomae", "timesformer", "vivit", "vjepa2", "vit")  # the other media towers read sounds
MEDIA = [f"{'clips' if kind in CLIPS else 'sounds'} {kind}" for kind in TOWERS]
WHOLE = [*KINDS, "clap", "clap-fused"]
FAMILIES = [*PAIRS, *MEDIA, *WHOLE]
NO_POOLER = "the stock class pools texts by a pooler, and this text tower has none"
REASONS = {  # why `VisionTextDualEncoderModel` cannot be written
    "resnet": "one pooled vector per image", "distilbert": NO_POOLER, "modernbert": NO_POOLER, "electra": NO_POOLER,
    "deberta": NO_POOLER, "clips": "reads images, and this model clips", "sounds": "reads images, and this model sounds",
}  # fmt: skip
EMBEDS = ("image_embeds", "text_embeds")
OUTPUTS = (*EMBEDS, "match_logits")
Made = Callable[[str], tuple[FusionDualEncoderModel, Batch]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a small model of a family in evaluation mode, whose head counts, and a padded batch of four pairs."""
    root = tmp_path_factory.mktemp("whole")

    def make(family: str) -> tuple[FusionDualEncoderModel, Batch]:
        first, _, second = family.partition(" ")
        if family in PAIRS:
            model = build(first, second)
            return model, batch_for(model)
        torch.manual_seed(0)
        if family in MEDIA:
            tower = vision_tower(AutoConfig.for_model(second, **TOWERS[second]))
            if hasattr(tower.config, "apply_spec_augment"):
                tower.config.apply_spec_augment = False  # as `build_model` does
            model = join_backbones(tower, BertModel(BertConfig(**LAYERS, vocab_size=50)), medium=first[:-1])
            batch = batch_for(model)
        else:
            folder = root / family
            if not folder.is_dir():
                write_clap(folder, fused=family == "clap-fused") if "clap" in family else write_stock(folder, family)
            args = ModelArguments(model_name_or_path=str(folder), gradient_checkpointing=True)
            processor: Any = load_processor_of(str(folder))
            model = build_model(args, processor.tokenizer, medium="sound" if "clap" in family else "image")
            batch = dict(processor.tokenizer(TEXTS, padding=True, return_tensors="pt"))
            batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
            if "clap" not in family:
                batch["pixel_values"] = processor(images=noise(4), return_tensors="pt").pixel_values
        if family not in KINDS:
            batch["pixel_values"] = torch.randn(4, *input_shape(model.vision_model))
        nn.init.xavier_uniform_(model.fusion.match.weight)  # type: ignore[union-attr]
        return model.eval(), batch

    return make


@torch.no_grad()
def outputs(model: nn.Module, batch: Batch, names: tuple[str, ...] = OUTPUTS) -> dict[str, Tensor]:
    output = model(**batch)
    return {name: output[name] for name in names}


def loaded(model: FusionDualEncoderModel, folder: Path) -> Any:
    model.save_pretrained(folder)
    return AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_with_every_head_and_loaded_bit_for_bit(family: str, made: Made, tmp_path: Path) -> None:
    model, batch = made(family)
    model.add_token_head(captions=True)
    model.add_region_head()
    again = loaded(model, tmp_path)
    assert type(again) is FusionDualEncoderModel
    assert type(again.vision_model) is type(model.vision_model)
    assert not again.training
    assert [again.token_head, again.caption_adapter, again.region_head].count(None) == 0
    for tower in ("vision_model", "text_model"):
        attention = [getattr(each, tower).config._attn_implementation for each in (model, again)]
        assert attention[0] == attention[1]
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value, theirs[name]), name
    expected, actual = outputs(model, batch), outputs(again, batch)
    for name, value in expected.items():
        assert torch.isfinite(value).all(), name
        assert value.std(0).max() > 1e-6, f"{name} does not depend on its input; the test would be vacuous"
        # Convolution kernels may round by where in memory the loaded tensors lie.
        exact = family in PAIRS and (
            name == "text_embeds" or family.split()[0] not in ("convnext", "mobilenet", "resnet")
        )
        torch.testing.assert_close(actual[name], value, rtol=0, atol=0 if exact else 1e-4, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_rows_and_their_padding_change_nothing(family: str, made: Made, tmp_path: Path) -> None:
    model, batch = made(family)
    tolerance = 1e-4 if "mobilenet" in family else 1e-5  # its convolutions round by the number of rows
    for each in (model, loaded(model, tmp_path)):
        together, alone = outputs(each, batch), []
        for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
            own = {name: batch[name][row : row + 1, :length] for name in ("input_ids", "attention_mask")}
            alone.append(outputs(each, {**own, "pixel_values": batch["pixel_values"][row : row + 1]}))
        for name, value in together.items():
            torch.testing.assert_close(
                torch.cat([one[name] for one in alone]), value, rtol=1e-4, atol=tolerance, msg=name
            )


@pytest.mark.parametrize("family", [*PAIRS, *MEDIA])
def test_the_stock_class_computes_the_same_or_there_is_a_reason(family: str, made: Made, tmp_path: Path) -> None:
    """Of whole models: tests/model/test_stock.py and test_stock_media.py."""
    model, batch = made(family)
    if reason := next((REASONS[word] for word in family.split() if word in REASONS), None):
        with pytest.raises(ValueError, match=reason):
            to_dual_encoder(model)
        return
    to_dual_encoder(model).save_pretrained(tmp_path)
    stock = outputs(AutoModel.from_pretrained(tmp_path).eval(), batch, EMBEDS)
    for name, value in outputs(model, batch, EMBEDS).items():
        assert value.std(0).max() > 1e-3
        by_mean = name == "text_embeds" and model.config.text_pooling == "mean"  # as one more layer
        exact = not by_mean and (name == "text_embeds" or family.split()[0] not in ("convnext", "mobilenet"))
        torch.testing.assert_close(stock[name], value, rtol=0, atol=0 if exact else 1e-4, msg=name)


@pytest.mark.parametrize("objective", ["contrastive,matching,captioning", "sigmoid"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_trained_parameter_gets_a_gradient(family: str, objective: str, made: Made) -> None:
    model, batch = made(family)
    switch_off_dropout(model)
    freeze_unreached(model)
    trained = build_objective(model, ObjectiveArguments(objective), 0)
    assert (model.logit_bias is not None) == (objective == "sigmoid")
    places = torch.arange(4)
    rows = {"ids": places[:, None].expand(4, 2), "image_keys": places, "caption_keys": places}
    statistics = {name: value.clone() for name, value in model.named_buffers() if "running" in name}
    model.config.freeze_batch_norm = True
    trained.train()({**batch, **rows, "lengths": batch["attention_mask"].sum(1).tolist()}, 1)["loss"].backward()
    lacking = [name for name, value in trained.named_parameters() if value.requires_grad and value.grad is None]
    assert not lacking
    assert all(torch.equal(dict(model.named_buffers())[name], value) for name, value in statistics.items())


@pytest.mark.parametrize("frozen", ["vision", "text"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_tower_rests_and_all_else_is_trained(family: str, frozen: str, made: Made) -> None:
    model, batch = made(family)
    model.freeze(frozen)
    model.train()
    still, moving = image_backbone(model.vision_model), model.text_model
    if frozen == "text":
        still, moving = moving, still
    before = copy.deepcopy(still.state_dict())
    output = model(**batch, return_loss=True)
    (output.loss + F.binary_cross_entropy_with_logits(output.match_logits, torch.tensor([1.0, 0, 1, 0]))).backward()
    assert not any(module.training for module in still.modules())
    assert moving.training
    assert model.fusion is not None
    assert model.fusion.training
    assert all(parameter.grad is None for parameter in still.parameters())
    assert all(torch.equal(value, before[name]) for name, value in still.state_dict().items())
    parts = [moving, model.fusion, model.visual_projection, model.text_projection]
    if model.vision_model is not image_backbone(model.vision_model):
        parts.append(model.vision_model.layers)  # over the frames of a clip
    for part in parts:
        assert not [*part.parameters()] or any(
            parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in part.parameters()
        )
