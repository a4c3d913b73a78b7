"""Towers of clips and sounds: shapes and the axis of time. What every model keeps: tests/contracts/test_models.py."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, BertConfig, BertModel

from mm_utils.model.join import join_backbones
from mm_utils.model.modeling_fusion_dual_encoder import (
    FramesTower,
    FusionDualEncoderModel,
    _pool_over_time,
    input_shape,
    vision_tower,
)
from tests.kit.models import LAYERS, TOWERS

MEDIUM = {kind: "clip" if place < 4 or kind == "vit" else "sound" for place, kind in enumerate(TOWERS)}
STEPS = {"videomae": 4, "timesformer": 8, "vivit": 4, "vjepa2": 4, "audio-spectrogram-transformer": 9, "wav2vec2": 14,
         "hubert": 14, "whisper": 50, "clap_audio_model": 16, "convnext": 16, "vit": 4}  # fmt: skip
"""Cells along time."""


def tower_of(kind: str) -> Any:
    torch.manual_seed(0)
    return vision_tower(AutoConfig.for_model(kind, **TOWERS[kind]))


def model_of(kind: str, **config: Any) -> FusionDualEncoderModel:
    text = BertModel(BertConfig(**LAYERS, vocab_size=50))
    return join_backbones(tower_of(kind), text, medium=MEDIUM[kind], **config).eval()


def media(model: FusionDualEncoderModel, rows: int = 2) -> Tensor:
    return torch.randn(rows, *input_shape(model.vision_model), generator=torch.Generator().manual_seed(1))


def test_a_map_of_a_spectrogram_is_pooled_with_its_time() -> None:
    """What is heard early and what is heard late have the same mean, and cosine moments of other signs."""
    model = model_of("convnext")
    assert (model.config.vision_pooling, model.config.vision_pooled_width) == ("timed", 3 * 16)
    assert model_of("clap_audio_model").config.vision_pooling == "pooler"
    pixels = media(model)
    pooled, output = model.vision_features(pixels)[0], model.vision_model((pixels + 35) / 33)
    torch.testing.assert_close(pooled[:, :16], output.pooler_output)
    frames, steps = output.last_hidden_state, STEPS["convnext"]
    levels = torch.nn.functional.layer_norm(frames.mean(3).transpose(1, 2), [16])
    for number in (1, 2):
        expected = sum(levels[:, t] * math.cos(math.pi * number * (t + 0.5) / steps) for t in range(steps)) / steps
        torch.testing.assert_close(pooled[:, 16 * number : 16 * (number + 1)], expected, atol=1e-6, rtol=1e-5)
    backwards = _pool_over_time(frames.flip(2))
    torch.testing.assert_close(backwards[:, :16], -pooled[:, 16:32], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(backwards[:, 16:], pooled[:, 32:], atol=1e-6, rtol=1e-5)


def test_a_sound_model_of_before_has_no_moments(tmp_path: Path) -> None:
    old = model_of("convnext", vision_pooling="pooler")
    assert old.visual_projection.in_features == 16
    old.save_pretrained(tmp_path)
    loaded = FusionDualEncoderModel.from_pretrained(tmp_path).eval()
    pixels = media(old)
    torch.testing.assert_close(loaded.encode_image(pixels)[0], old.encode_image(pixels)[0])
    torch.testing.assert_close(loaded.vision_features(pixels)[0], old.vision_model((pixels + 35) / 33).pooler_output)
    with pytest.raises(ValueError, match="text_pooling is 'timed'; choose one of auto, pooler, mean, cls"):
        model_of("convnext", text_pooling="timed")


@pytest.mark.parametrize("kind", TOWERS)
def test_time_runs_along_the_cells(kind: str) -> None:
    """A change late in the medium moves late cells most, and one at the beginning early ones."""
    model = model_of(kind, fusion_layers=1)
    model.add_region_head()
    with torch.no_grad():
        for name, parameter in model.vision_model.named_parameters():  # what is near stays near: no attention
            if (
                any(part in name for part in ("attention.", "self_attn", "attn.", "attention_output"))
                and "out" in name
            ):
                parameter.zero_()
    cells = model.cell_embeds(model.vision_features(media(model))[1])
    assert cells.shape == (2, 1, STEPS[kind], model.config.projection_dim)
    shape = input_shape(model.vision_model)
    along = shape.index(max(shape)) if len(shape) < 4 else 0
    for share in (0.1, 0.5, 0.9):
        found = []
        for sign in (0.0, 1.0):
            pixels = media(model, 1)
            at = int(share * shape[along])
            pixels.narrow(1 + along, at, max(1, shape[along] // 16)).add_(3 * sign)
            found.append(model.vision_features(pixels)[1][-1].mean(2))
        moved = (found[1] - found[0]).norm(dim=1)[0]
        assert abs((int(moved.argmax()) + 0.5) / len(moved) - share) < 0.16, (share, moved)


def test_frames_tower_begins_as_the_mean_of_frames_and_reads_any_number(tmp_path: Path) -> None:
    model = model_of("vit")
    tower = model.vision_model
    assert isinstance(tower, FramesTower)
    clips = torch.randn(2, 6, 3, 16, 16)
    pooled, taps = model.vision_features(clips)
    frames = tower.backbone(clips.flatten(0, 1)).pooler_output.unflatten(0, (2, 6))
    torch.testing.assert_close(pooled, frames.mean(1))
    assert [tuple(tap.shape[2:]) for tap in taps] == [
        (5, 6),
        (1, 6),
    ]  # places and frames; the layers over time come last
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert not torch.allclose(
        model.encode_image(clips)[0], model.encode_image(clips.flip(1))[0], atol=1e-3
    )  # order counts
