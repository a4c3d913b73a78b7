"""The model itself: the exported mean, the fusion head, regions, time. By family: tests/contracts/test_models.py."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, VisionTextDualEncoderModel

from mm_utils.model.fusion import LevelAdapter, split_grid
from mm_utils.model.join import join_backbones
from mm_utils.model.modeling_fusion_dual_encoder import (
    FusionDualEncoderConfig,
    FusionDualEncoderModel,
    input_shape,
    vision_tower,
)
from mm_utils.model.stock import to_dual_encoder
from tests.kit.models import EMBEDS, LAYERS, TEXT, TOWERS, VISION, backbone, batch_for, build, outputs


# The stock class
def test_the_exported_mean_does_not_depend_on_the_other_weights(tmp_path):
    model = build(fusion_layers=0)
    with torch.no_grad():
        model.text_projection.weight.mul_(0.05)
        norm = model.text_model.encoder.layer[-1].output.LayerNorm
        norm.weight.normal_(1, 0.5)
        norm.bias.normal_(0, 2)
    batch = batch_for(model, (1, 16, 2, 30))
    to_dual_encoder(model).save_pretrained(tmp_path)
    stock = outputs(VisionTextDualEncoderModel.from_pretrained(tmp_path).eval(), batch, EMBEDS)
    torch.testing.assert_close(stock["text_embeds"], model(**batch).text_embeds.detach(), rtol=0, atol=1e-4)


# The fusion head
def test_a_head_that_was_not_trained_adds_nothing():
    towers = backbone(VISION["vit"]), backbone(TEXT["bert"])
    model = join_backbones(*towers, projection_dim=16).eval()
    assert not outputs(model, batch_for(model))["match_logits"].any()
    assert model.voices == []
    model.add_token_head(captions=True)
    assert model.voices == ["caption"]


def test_head_scores_are_weighted_sums():
    model = build()
    model.add_token_head(captions=True)
    batch = batch_for(model)
    _, keys_values = model.encode_image(batch["pixel_values"])
    ids = batch["input_ids"]
    mask = batch["attention_mask"]
    _, states = model.encode_text(ids, mask)
    assert not model.head_scores(keys_values, states, mask, ids).any()
    match = model.match_pairs(keys_values, states, mask)
    caption = model.caption_scores(keys_values, ids, mask)
    for weights, expected in (
        ({"caption": 0.5, "match": 2.0}, 0.5 * caption + 2 * match),
        ({"match": 0.0}, 0 * match),
    ):
        model.config.rerank_weights = weights
        torch.testing.assert_close(model.head_scores(keys_values, states, mask, ids), expected)


@pytest.mark.parametrize(
    "entry",
    [
        {"media": {"sound": {"medium": "sound"}}},
        {"fusion_direction": "both"},
        {"fusion_hierarchy": False},
    ],
)
def test_what_no_model_has_any_more_is_refused(entry):
    with pytest.raises(ValueError, match=f"{next(iter(entry))} is .* AutoModel opens a folder of an older version"):
        FusionDualEncoderConfig(VISION["vit"], TEXT["bert"], **entry)


def test_patches_are_pooled_in_two_dimensions():
    """A token of the pooled map is the mean of the patches it covers; the class token stays."""
    adapter = LevelAdapter(1, 4, max_tokens=4)
    tokens = torch.arange(17.0)[None, :, None]
    grid = torch.arange(1.0, 17.0).view(4, 4)
    quarters = [grid[row : row + 2, column : column + 2].mean() for row in (0, 2) for column in (0, 2)]
    torch.testing.assert_close(adapter.pool(tokens)[0, :, 0], torch.stack([torch.tensor(0.0), *quarters]))
    assert split_grid(torch.zeros(1, 201, 3))[0].shape == (1, 5, 3)
    assert split_grid(torch.zeros(1, 1500, 3))[1] is None
    assert split_grid(torch.zeros(1, 49, 3))[0].shape == (1, 0, 3)


@torch.no_grad()
def test_forward_encodes_what_it_is_given():
    model = build()
    batch = batch_for(model)
    images = model(pixel_values=batch["pixel_values"])
    texts = model(input_ids=batch["input_ids"])
    assert images.text_embeds is texts.image_embeds is None
    without = model(**batch, match=False, return_loss=True, token_type_ids=batch["input_ids"], return_dict=True)
    assert without.keys_values is without.match_logits is None
    logits = model.logit_scale.exp() * without.image_embeds @ without.text_embeds.T
    torch.testing.assert_close(without.logits_per_image, logits)
    target = torch.arange(4)
    expected = (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    torch.testing.assert_close(without.loss, expected)
    uneven = model(**batch | {"pixel_values": batch["pixel_values"][:3]})
    assert uneven.logits_per_text.shape == (4, 3)
    assert uneven.match_logits is None


@pytest.mark.parametrize("text", ["bert", "clip"])
@torch.no_grad()
def test_text_poolings(text):
    for pooling in ("mean", "cls", "pooler"):
        model = build(text=text, text_pooling=pooling)
        batch = batch_for(model)
        embeds, _ = model.encode_text(batch["input_ids"], batch["attention_mask"])
        states = model.text_features(batch["input_ids"], batch["attention_mask"], with_taps=False)[1]
        rows = [states[row, : int(length)] for row, length in enumerate(batch["attention_mask"].sum(1))]
        if pooling == "pooler":
            pooled = [row[-1] for row in rows] if text == "clip" else model.text_model.pooler(states)
        else:
            pooled = [row.mean(0) if pooling == "mean" else row[0] for row in rows]
        expected = F.normalize(model.text_projection(torch.stack(list(pooled))), dim=-1)
        torch.testing.assert_close(embeds, expected)


def test_what_a_model_lacks_is_named():
    model = build(fusion_layers=0)
    with pytest.raises(ValueError, match="fusion_layers=0"):
        model.match_pairs((), torch.zeros(1, 2, 32), torch.ones(1, 2))
    with pytest.raises(ValueError, match="fusion_layers=0"):
        model.add_region_head()
    with pytest.raises(ValueError, match=r"no embeddings of regions\. Train it with regions"):
        model.cell_embeds((torch.rand(1, 17, 16),))
    with pytest.raises(ValueError, match="join_backbones"):
        FusionDualEncoderModel(FusionDualEncoderConfig(VISION["vit"], TEXT["bert"]))


# Regions
@pytest.mark.parametrize("kind", ["convnext", "vit", "swin"])
def test_cells_are_where_the_image_is(kind):
    """Maps, tokens behind a class token, tokens alone."""
    model = build(kind, fusion_vision_taps=[-1], fusion_layers=1)
    model.add_region_head()
    [tap] = model.vision_features(torch.rand(2, 3, 32, 32))[1]
    side = 4 if kind == "vit" else model.cell_embeds((tap,)).shape[1]
    assert model.cell_embeds((tap,)).shape == (2, side, side, model.config.projection_dim)
    if kind == "vit":
        tokens = torch.zeros(1, 17, 32)
        tokens[0, 1 + 4 * 2 + 3, 0] = 5.0  # third row, fourth column, behind the class token
        cells = model.cell_embeds((tokens,))
        assert (cells - cells[0, 0, 0]).norm(dim=-1)[0].argmax() == 11
        with pytest.raises(ValueError, match="the last of fusion_vision_taps has 35 tokens"):
            model.cell_embeds((torch.rand(1, 35, 32),))


# Time: towers of clips and sounds
MEDIUM = {kind: "clip" if place < 4 or kind == "vit" else "sound" for place, kind in enumerate(TOWERS)}
STEPS = {"videomae": 4, "timesformer": 8, "vivit": 4, "vjepa2": 4, "audio-spectrogram-transformer": 9, "wav2vec2": 14,
         "hubert": 14, "whisper": 50, "clap_audio_model": 16, "convnext": 16, "vit": 4}  # fmt: skip
"""Cells along time."""


def timed(kind: str, **config) -> FusionDualEncoderModel:
    torch.manual_seed(0)
    tower = vision_tower(AutoConfig.for_model(kind, **TOWERS[kind]))
    text = AutoModel.from_config(AutoConfig.for_model("bert", **LAYERS, vocab_size=50))
    return join_backbones(tower, text, medium=MEDIUM[kind], **config).eval()


def media(model: FusionDualEncoderModel, rows: int = 2) -> Tensor:
    return torch.randn(rows, *input_shape(model.vision_model), generator=torch.Generator().manual_seed(1))


def test_a_map_of_a_spectrogram_is_pooled_with_its_time(tmp_path):
    """What is heard early and what is heard late have the same mean, and cosine moments of other signs."""
    model = timed("convnext")
    old = timed("convnext", vision_pooling="pooler")
    assert (model.config.vision_pooling, model.config.vision_pooled_width) == ("timed", 3 * 16)
    assert timed("clap_audio_model").config.vision_pooling == "pooler"
    pixels = media(model)
    pooled = model.vision_features(pixels)[0]
    output = model.vision_model((pixels + 35) / 33)
    torch.testing.assert_close(pooled[:, :16], output.pooler_output)
    frames = output.last_hidden_state
    steps = STEPS["convnext"]
    levels = F.layer_norm(frames.mean(3).transpose(1, 2), [16])
    for number in (1, 2):
        expected = sum(levels[:, t] * math.cos(math.pi * number * (t + 0.5) / steps) for t in range(steps)) / steps
        torch.testing.assert_close(pooled[:, 16 * number : 16 * (number + 1)], expected, atol=1e-6, rtol=1e-5)
    old.save_pretrained(tmp_path)  # a sound model of before has no moments
    loaded = FusionDualEncoderModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded.vision_features(pixels)[0], old.vision_model((pixels + 35) / 33).pooler_output)
    with pytest.raises(ValueError, match="text_pooling is 'timed'; choose one of auto, pooler, mean, cls"):
        timed("convnext", text_pooling="timed")


@pytest.mark.parametrize("kind", TOWERS)
def test_time_runs_along_the_cells(kind):
    """A change late in the medium moves late cells most, and one at the beginning early ones."""
    model = timed(kind, fusion_layers=1)
    model.add_region_head()
    attention = ("attention.", "self_attn", "attn.", "attention_output")
    with torch.no_grad():
        for name, parameter in model.vision_model.named_parameters():  # what is near stays near: no attention
            if any(part in name for part in attention) and "out" in name:
                parameter.zero_()
    cells = model.cell_embeds(model.vision_features(media(model))[1])
    assert cells.shape == (2, 1, STEPS[kind], model.config.projection_dim)
    shape = input_shape(model.vision_model)
    along = shape.index(max(shape)) if len(shape) < 4 else 0
    for share in (0.1, 0.5, 0.9):
        found = []
        for sign in (0.0, 1.0):
            pixels = media(model, 1)
            pixels.narrow(1 + along, int(share * shape[along]), max(1, shape[along] // 16)).add_(3 * sign)
            found.append(model.vision_features(pixels)[1][-1].mean(2))
        moved = (found[1] - found[0]).norm(dim=1)[0]
        assert abs((int(moved.argmax()) + 0.5) / len(moved) - share) < 0.16, (share, moved)


def test_frames_tower_begins_as_the_mean_of_frames_and_reads_any_number():
    model = timed("vit")
    tower = model.vision_model
    clips = torch.randn(2, 6, 3, 16, 16)
    pooled, taps = model.vision_features(clips)
    frames = tower.backbone(clips.flatten(0, 1)).pooler_output.unflatten(0, (2, 6))
    torch.testing.assert_close(pooled, frames.mean(1))
    # Places and frames; the layers over time are last
    assert [tuple(tap.shape[2:]) for tap in taps] == [(5, 6), (1, 6)]
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    both = [model.encode_image(each)[0] for each in (clips, clips.flip(1))]
    assert not torch.allclose(*both, atol=1e-3)  # order counts
