"""Which parameters decay and learn how fast, and the learning rate over the steps."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, BertConfig, ConvNextConfig, PreTrainedConfig, ViTConfig

from mm_utils.model.adapt import add_adapters, use_channels_last
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.training.arguments import OptimizerArguments
from mm_utils.training.optim import build_optimizer, schedule, scratch_rate
from tests.kit.models import build
from tests.kit.objectives import tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> FusionDualEncoderModel:
    return tiny_model(1)


def settings_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, float]]:
    """Rate and decay of every parameter; each must stand in one group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [(names[id(p)], group) for group in optimizer.param_groups for p in group["params"]]
    assert len(found) == len(dict(found))
    return dict(found)


def test_only_matrices_decay(model: FusionDualEncoderModel) -> None:
    args = OptimizerArguments(weight_decay=0.3)
    optimizer = build_optimizer(model, args, pretrained=False, device=CPU)
    assert all(group["betas"] == (0.9, 0.98) and group["eps"] == 1e-6 for group in optimizer.param_groups)
    groups = settings_by_name(model, optimizer)
    assert set(groups) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        is_token = "position_embeddings" in name or name == "fusion.cls_token"
        is_vector = sum(size > 1 for size in parameter.shape) < 2
        assert groups[name]["weight_decay"] == (0.0 if is_token or is_vector else 0.3), name
        assert is_vector or not name.endswith(("bias", "norm.weight", "LayerNorm.weight", "logit_scale")), name
    assert sum(group["weight_decay"] > 0 for group in groups.values()) > 10


@pytest.mark.parametrize(
    ("kind", "sizes", "tokens"),
    [
        ("clip_vision_model", {"intermediate_size": 32}, {"class_embedding", "position_embedding.weight"}),
        ("dinov2_with_registers", {}, {"cls_token", "register_tokens", "mask_token", "position_embeddings"}),
        ("beit", {"use_relative_position_bias": True}, {"cls_token", "relative_position_bias_table"}),
    ],
)
def test_learned_tokens_and_positions_do_not_decay(kind: str, sizes: dict[str, Any], tokens: set[str]) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    backbone = AutoModel.from_config(AutoConfig.for_model(kind, **shape, **sizes))
    groups = settings_by_name(backbone, build_optimizer(backbone, OptimizerArguments(), pretrained=False, device=CPU))
    for token in tokens:
        assert {group["weight_decay"] for name, group in groups.items() if name.endswith(token)} == {0.0}, token
    matrices = [
        name for name, weight in backbone.named_parameters() if weight.dim() in (2, 4) and min(weight.shape) > 1
    ]
    assert any(groups[name]["weight_decay"] > 0 for name in matrices)


@pytest.mark.parametrize(
    ("pretrained", "rate", "expected"),
    [(False, None, 4e-4), (True, None, 4e-5), (False, 7e-6, 7e-6), (True, 0.0, 0.0)],
)
def test_backbones_have_a_rate_of_their_own(
    model: FusionDualEncoderModel, pretrained: bool, rate: float | None, expected: float
) -> None:
    args = OptimizerArguments(learning_rate=4e-4, backbone_learning_rate=rate)
    groups = settings_by_name(model, build_optimizer(model, args, pretrained=pretrained, device=CPU))
    for name, group in groups.items():
        assert group["peak_lr"] == group["lr"]
        assert group["peak_lr"] == pytest.approx(
            expected if name.startswith(("vision_model.", "text_model.")) else 4e-4
        )
    assert groups["text_projection.weight"]["peak_lr"] == groups["logit_scale"]["peak_lr"] == 4e-4


def test_frozen_parameters_have_no_group(model: FusionDualEncoderModel) -> None:
    frozen = copy.deepcopy(model)
    frozen.freeze("text")
    names = settings_by_name(frozen, build_optimizer(frozen, OptimizerArguments(), pretrained=True, device=CPU))
    assert not any(name.startswith("text_model.") for name in names)
    assert "text_projection.weight" in names
    with pytest.raises(ValueError, match="no parameter is left to train"):
        build_optimizer(frozen.requires_grad_(False), OptimizerArguments(), pretrained=True, device=CPU)


def test_cosine_rises_once_and_falls_once() -> None:
    for steps, share in ((1, 0.5), (7, 0.0), (7, 1.0), (1000, 0.1)):
        rates = [schedule(step, steps, OptimizerArguments(warmup_ratio=share)) for step in range(steps)]
        assert all(0 < rate <= 1 for rate in rates)
        peak = rates.index(max(rates))
        assert rates[: peak + 1] == sorted(set(rates[: peak + 1]))
        assert rates[peak:] == sorted(rates[peak:], reverse=True)
    found = [rates[step] for step in (0, 49, 99, 100, 325, 550)]
    assert found == pytest.approx([0.01, 0.5, 1, 1, 0.5 + math.sqrt(0.125), 0.5])
    assert rates[999] < 1e-5


@pytest.mark.parametrize(
    ("config", "rate"),
    [
        (BertConfig(hidden_size=192, num_hidden_layers=2), 1e-3),
        (BertConfig(hidden_size=384, num_hidden_layers=6), 1.67e-4),
        (ViTConfig(), 4.17e-5),
        (ConvNextConfig(), 1e-3),
    ],
)
def test_wide_and_deep_transformers_from_scratch_have_lower_rates(config: PreTrainedConfig, rate: float) -> None:
    assert scratch_rate(config) == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize("kind", ["adamw_torch_fused", "adamw_torch", "sgd", "adafactor"])
def test_optimizers_of_transformers_names_keep_the_rates_of_the_groups(
    kind: str, model: FusionDualEncoderModel
) -> None:
    model = copy.deepcopy(model)
    optimizer = build_optimizer(model, OptimizerArguments(optim=kind), pretrained=True, device=CPU)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == pytest.approx([1e-4, 1e-3])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    assert all(not torch.equal(before[name], weight) for name, weight in model.named_parameters())


def test_adapters_learn_at_the_rate_of_new_parameters() -> None:
    model = build(fusion_layers=1)
    add_adapters(model, 2)
    args = OptimizerArguments(learning_rate=4e-4, backbone_learning_rate=1e-6)
    optimizer = build_optimizer(model, args, pretrained=True, device=torch.device("cpu"))
    adapters = {parameter for name, parameter in model.named_parameters() if ".lora_" in name}
    assert {group["peak_lr"] for group in optimizer.param_groups if adapters & set(group["params"])} == {4e-4}


def test_a_fused_step_on_a_cpu_is_the_plain_one_where_convolutions_lie_channels_last() -> None:
    """A fused step walks over weight, gradient and moments as they lie in memory, and checks nothing on a CPU."""
    found = []
    for kind in ("adamw_torch_fused", "adamw_torch"):
        torch.manual_seed(0)
        tower = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 1))
        use_channels_last(tower)
        optimizer = build_optimizer(tower, OptimizerArguments(optim=kind), pretrained=False, device=CPU)
        assert {group["fused"] for group in optimizer.param_groups} == {kind == "adamw_torch_fused"}
        for _ in range(3):
            optimizer.zero_grad()
            tower(torch.randn(2, 3, 8, 8)).square().sum().backward()
            optimizer.step()
        moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        found.append([*tower.parameters(), *moments])
    for fused, plain in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-8)
