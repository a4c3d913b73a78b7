"""A model in training: adapters, unused parameters, dropout, groups of captions."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, BertConfig, Dinov2Config

from mm_utils.model.adapt import (
    add_adapters,
    freeze_unused,
    load_weights,
    merged,
    save_adapters,
    switch_off_dropout,
)
from mm_utils.model.join import join_backbones, probe_input
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.row_noise import RowDropout, row_keys, set_row_keys
from mm_utils.training.starts import weights_of_start
from tests.kit.models import IMAGE, TOWER, batch_for, build

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def tiny() -> FusionDualEncoderModel:
    return build(fusion_layers=1)


def stirred(model: FusionDualEncoderModel) -> FusionDualEncoderModel:
    """The model as after some training: the adapters have an effect."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def outputs(model: FusionDualEncoderModel) -> torch.Tensor:
    return model(**batch_for(model)).match_logits


def test_a_checkpoint_holds_the_merged_model_and_its_adapters(tmp_path: Path) -> None:
    model = tiny()
    again = tiny()
    for each in (model, again):
        add_adapters(each, 2)
    stirred(model).save_pretrained(tmp_path, state_dict=merged(model.state_dict()))
    save_adapters(model.state_dict(), tmp_path)
    plain = FusionDualEncoderModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(outputs(plain), outputs(model), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(outputs(model), outputs(tiny()), atol=1e-3)
    load_weights(again, tmp_path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
    (tmp_path / "adapters.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no adapters.safetensors; it was written without --lora_rank"):
        load_weights(again, tmp_path)
    load_weights(tiny(), tmp_path)  # without adapters the merged weights are all there is


# -- towers in training -------------------------------------------------------------------------------------------------
def test_parameters_without_a_gradient_are_frozen_and_no_others() -> None:
    dinov2 = Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, **IMAGE)
    towers = (AutoModel.from_config(config) for config in (dinov2, BertConfig(**TOWER, vocab_size=100)))
    model = join_backbones(*towers).train()

    def trained():
        return {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    before = trained()
    number = freeze_unused(model)
    pooler = {f"text_model.pooler.dense.{name}" for name in ("weight", "bias")}
    assert before - trained() == {"vision_model.embeddings.mask_token", *pooler}
    assert number == sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    ids = torch.randint(0, 100, (3, 6))
    output = model(input_ids=ids, pixel_values=torch.randn(3, 3, 32, 32), return_loss=True)
    (output.loss + output.match_logits.sum()).backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trained()


DROPOUT = {
    "vit": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2},
    "beit": {"drop_path_rate": 0.3, "attention_probs_dropout_prob": 0.2},
    "data2vec-vision": {"attention_probs_dropout_prob": 0.4},  # reads its config in every forward
    "dinov3_vit": {"pos_embed_rescale": 2.0, "attention_dropout": 0.2},  # moves positions at random
    "bert": {},
    "deberta-v2": {},
}


@pytest.mark.parametrize("kind", DROPOUT)
def test_dropout_of_backbones_is_switched_off_and_stays_in_their_configs(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    is_vision = "bert" not in kind
    torch.manual_seed(0)
    shape = {"image_size": 16, "patch_size": 8} if is_vision else {"vocab_size": 50}
    own = AutoModel.from_config(AutoConfig.for_model(kind, **{**SMALL, **shape, **DROPOUT[kind]}))
    model = tiny()
    setattr(model, "vision_model" if is_vision else "text_model", own)
    given = own.config.to_dict()
    inputs = probe_input(own, "vision" if is_vision else "text")
    own.train()
    assert len({own(**inputs).last_hidden_state.square().sum().item() for _ in range(9)}) > 1
    with caplog.at_level(logging.INFO):
        switch_off_dropout(model)
    assert own.training
    assert torch.equal(own(**inputs).last_hidden_state, own.eval()(**inputs).last_hidden_state)
    assert own.config.to_dict() == given
    assert f"The {'vision' if is_vision else 'text'} backbone trains without its own dropout (" in caplog.text


# -- dropout by row -----------------------------------------------------------------------------------------------------
def test_masks_follow_the_row_and_the_step_and_not_the_batch() -> None:
    ids = torch.tensor([[3, 1], [7, 2], [9, 2], [3, 2], [5, 5], [7, 1]])
    keys = row_keys(ids, 10)
    other_step = row_keys(ids, 11)
    assert len({*keys.tolist(), *other_step.tolist()}) == 12
    layer = RowDropout(0.4)
    values = torch.arange(1.0, 1 + 6 * 20 * 4, 4).view(6, 20)

    def drawn(keys, rows=slice(None)):
        set_row_keys(layer, None if keys is None else keys[rows])
        return layer(values[rows])

    whole = drawn(keys)
    assert torch.equal(drawn(keys, slice(2, 5)), whole[2:5])
    assert torch.equal(drawn(keys), whole)
    assert not torch.equal(drawn(other_step), whole)
    assert not torch.equal(drawn(None), drawn(None))
    layer.eval()
    assert (drawn(keys) != 0).all()
    layer = RowDropout(0.3)
    set_row_keys(layer, row_keys(torch.arange(500), 4))
    assert abs((layer(torch.ones(500, 64)) == 0).float().mean().item() - 0.3) < 0.01


def test_the_start_of_wise_ft_has_merged_adapters_under_the_names_of_a_saved_model() -> None:
    model = build(fusion_layers=1)
    names = {name for name in model.state_dict() if not name.startswith("fusion.")}
    add_adapters(model, 2)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    start = weights_of_start(model)
    right = merged(model.state_dict())
    assert names <= start.keys()
    assert all(torch.equal(start[name], right[name]) for name in names)
