"""Adapters: what they are put into, what is trained, and that what is saved is the stock model."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from mm_utils.adapters import LoraArguments, add_adapters, attention_layers, load_weights, merged, save_adapters
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel

pytest.importorskip("peft")
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def tiny(seed: int = 0, vision: str = "vit") -> FusionDualEncoderModel:
    torch.manual_seed(seed)
    shape: dict[str, dict[str, Any]] = {
        "vit": {**SMALL, "image_size": 16, "patch_size": 8},
        "resnet": {"embedding_size": 8, "hidden_sizes": [8]},
    }
    shape["resnet"] |= {"depths": [1]}
    return FusionDualEncoderModel.from_backbones(
        AutoModel.from_config(AutoConfig.for_model(vision, **shape[vision])),
        AutoModel.from_config(AutoConfig.for_model("bert", **SMALL, vocab_size=50)),
        fusion_layers=1,
    ).eval()


def stirred(model: FusionDualEncoderModel) -> FusionDualEncoderModel:
    """As after some training: the adapters do something."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def outputs(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(7)
    ids = torch.randint(5, 50, (2, 6))
    with torch.no_grad():
        return model(input_ids=ids, pixel_values=torch.randn(2, 3, 16, 16)).match_logits


def test_the_linear_layers_of_attention_are_found() -> None:
    model = tiny()
    assert attention_layers(model.text_model) == [
        *(f"encoder.layer.0.attention.self.{name}" for name in ("query", "key", "value")),
        "encoder.layer.0.attention.output.dense",
    ]
    assert [name.rpartition("attention.")[2] for name in attention_layers(model.vision_model)] == [
        *("q_proj", "k_proj", "v_proj", "o_proj")
    ] or len(attention_layers(model.vision_model)) == 4
    assert not attention_layers(tiny(vision="resnet").vision_model)


def test_only_adapters_of_the_named_towers_are_trained_and_begin_as_nothing() -> None:
    model = tiny()
    before = outputs(model)
    add_adapters(model, LoraArguments(lora_rank=2, lora_towers="text"))
    torch.testing.assert_close(outputs(model), before)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if name.startswith("text_model.")} == {
        f"text_model.{layer}.lora_{side}.default.weight"
        for layer in attention_layers(tiny().text_model)
        for side in "AB"
    }
    assert {name for name, _ in model.vision_model.named_parameters(prefix="vision_model")} <= trained
    add_adapters(model, LoraArguments())  # a rank of 0 is none


def test_merged_weights_are_a_stock_model_that_does_the_same() -> None:
    model = tiny()
    add_adapters(model, LoraArguments(lora_rank=2))
    stock = tiny(seed=1)
    stock.load_state_dict(merged(stirred(model).state_dict()))
    torch.testing.assert_close(outputs(stock), outputs(model), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(outputs(model), outputs(tiny()), atol=1e-3)
    plain = stock.state_dict()
    assert all(value is plain[name] for name, value in merged(plain).items())


def test_a_checkpoint_is_taken_up_again(tmp_path: Path) -> None:
    model = tiny()
    add_adapters(model, LoraArguments(lora_rank=2))
    stirred(model).save_pretrained(tmp_path, state_dict=merged(model.state_dict()))
    save_adapters(model.state_dict(), tmp_path)
    torch.testing.assert_close(
        outputs(FusionDualEncoderModel.from_pretrained(tmp_path).eval()), outputs(model), rtol=1e-5, atol=1e-5
    )
    again = tiny()
    add_adapters(again, LoraArguments(lora_rank=2))
    load_weights(again, tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    (tmp_path / "adapters.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no adapters.safetensors; it was written without --lora_rank"):
        load_weights(again, tmp_path)
    load_weights(tiny(), tmp_path)  # without adapters the merged weights are all there is


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"--lora_towers is vision; a resnet has no attention to adapt. Leave vision out"
    ):
        add_adapters(tiny(vision="resnet"), LoraArguments(lora_rank=2, lora_towers="vision"))
    with pytest.raises(ValueError, match=r"--lora_towers is 'audio'"):
        LoraArguments(lora_towers="audio")
    with pytest.raises(ValueError, match=r"--lora_rank is -1"):
        LoraArguments(lora_rank=-1)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        ValueError, match=r"--lora_rank is 2; adapters need peft, which is not installed. Run pip install"
    ):
        add_adapters(tiny(), LoraArguments(lora_rank=2))
