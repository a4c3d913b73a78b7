"""One model of several media: towers of their own, one text tower, one file."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel

from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.training.optim import OptimizerArguments, build_optimizer

IMAGES = {"model_type": "convnext", "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32}
SOUNDS = {"model_type": "convnext", "hidden_sizes": [8, 12], "depths": [1, 1], "num_stages": 2, "num_channels": 1,
          "image_size": [32, 64]}  # fmt: skip
TEXTS = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 32, "vocab_size": 50}  # fmt: skip


def single(medium: str, seed: int = 0, **config: object) -> FusionDualEncoderModel:
    torch.manual_seed(seed)
    vision, text = (AutoModel.from_config(AutoConfig.for_model(**dict(each)))
                    for each in (IMAGES if medium == "image" else SOUNDS, TEXTS))  # fmt: skip
    return FusionDualEncoderModel.from_backbones(
        vision, text, **{"medium": medium, "fusion_layers": 0, "projection_dim": 16, **config}
    ).eval()


@pytest.fixture(scope="module")
def both() -> FusionDualEncoderModel:
    model = single("image")
    model.add_medium(single("sound", seed=1))
    return model.eval()


def spectrograms(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 1, 32, 64, generator=torch.Generator().manual_seed(2))


def test_each_medium_is_embedded_by_its_own_model(both: FusionDualEncoderModel) -> None:
    sounds, images = spectrograms(), torch.randn(3, 3, 32, 32)
    assert torch.equal(both.of("sound").encode_image(sounds)[0], single("sound", seed=1).encode_image(sounds)[0])
    assert torch.equal(both.of("image").encode_image(images)[0], single("image").encode_image(images)[0])
    ids = torch.randint(5, 50, (3, 6))
    texts = [model.encode_text(ids, torch.ones_like(ids))[0] for model in (both, both.of("sound"), single("image"))]
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
    assert both.of("sound").logit_scale is both.logit_scale
    assert both.of(None) is both


@pytest.mark.parametrize("first", ["image", "sound"])
def test_it_is_saved_and_loaded(first: str, tmp_path: Path) -> None:
    model, other = single(first), "sound" if first == "image" else "image"
    model.add_medium(single(other, seed=1))
    model.eval().save_pretrained(tmp_path)
    found = AutoModel.from_pretrained(tmp_path, trust_remote_code=True).eval()
    assert found.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in found.state_dict().items())
    sounds = spectrograms()
    expected = model.of("sound").encode_image(sounds)[0]
    assert torch.equal(found.of("sound").encode_image(sounds)[0], expected)

    found.of(other).save_pretrained(tmp_path / other)  # as a whole model of one medium
    alone = FusionDualEncoderModel.from_pretrained(tmp_path / other).eval()
    assert alone.config.medium == other
    assert not alone.media
    assert not any(name.startswith("media.") for name in alone.state_dict())
    assert torch.equal(alone.of("sound").encode_image(sounds)[0] if other == "sound" else expected, expected)


def test_names_of_weights_are_those_of_a_model_of_one_medium(both: FusionDualEncoderModel) -> None:
    alone, prefix = single("sound"), "media.sound."
    found = {name.removeprefix(prefix) for name in both.state_dict() if name.startswith(prefix)}
    assert found == {name for name in alone.state_dict() if name.startswith(("vision_model.", "visual_projection."))}
    assert {name for name in both.state_dict() if not name.startswith(prefix)} == set(single("image").state_dict())


def test_modes_and_frozen_towers(both: FusionDualEncoderModel) -> None:
    both.media["sound"].vision_model.requires_grad_(False)
    both.train()
    assert both.vision_model.training
    assert not both.media["sound"].vision_model.training
    both.media["sound"].vision_model.requires_grad_(True)
    both.train()
    assert both.of("sound").vision_model.training
    both.eval()


def test_idle_weights_are_those_that_a_batch_does_not_reach(both: FusionDualEncoderModel) -> None:
    for medium, pixels in (("image", torch.randn(2, 3, 32, 32)), ("sound", spectrograms(2))):
        both.zero_grad()
        ids = torch.randint(5, 50, (2, 6))
        both.of(medium)(pixel_values=pixels, input_ids=ids, return_loss=True).loss.backward()
        idle = {id(weight) for weight in both.idle_weights(medium)}
        untouched = {id(weight) for weight in both.parameters() if weight.grad is None}
        text = {id(weight) for weight in both.text_model.pooler.parameters()}
        assert idle
        assert untouched - text - {id(both.logit_bias)} == idle
    both.zero_grad()


def test_what_cannot_be_joined() -> None:
    model = single("image")
    with pytest.raises(ValueError, match="no tower for sounds, only for images"):
        model.of("sound")
    with pytest.raises(ValueError, match="has a tower for images already"):
        model.add_medium(single("image"))
    with pytest.raises(ValueError, match="projection_dim is 16 and 8"):
        model.add_medium(single("sound", projection_dim=8))
    with pytest.raises(ValueError, match="fusion_layers=0"):
        single("image", fusion_layers=1).add_medium(single("sound"))


def test_layers_of_each_tower_have_the_rates_of_a_model_of_its_own(both: FusionDualEncoderModel) -> None:
    args = OptimizerArguments(layerwise_lr_decay=0.5)

    def rates(model: FusionDualEncoderModel) -> dict[str, float]:
        groups = build_optimizer(model, args, pretrained=True, device=torch.device("cpu")).param_groups
        of_weight = {weight: group["peak_lr"] for group in groups for weight in group["params"]}
        return {name: of_weight[weight] for name, weight in model.named_parameters() if weight.requires_grad}

    found, prefix = rates(both), "media.sound."
    images, sounds = rates(single("image")), rates(single("sound"))
    assert {name: rate for name, rate in found.items() if not name.startswith(prefix)} == images
    assert len({rate for name, rate in sounds.items() if name.startswith("vision_model.")}) > 2
    for name, rate in found.items():
        if name.startswith(prefix):
            assert rate == sounds[name.removeprefix(prefix)], name
