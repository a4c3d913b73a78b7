"""Packed captions: the embeddings, states and gradients of the padded pass, in one pass over the tokens there are."""

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModel

from mm_utils.distributed import RunError
from mm_utils.extras.packing import packing as packing_module
from mm_utils.extras.packing.packing import PackedTower, encode_packed, pack_captions
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives import ObjectiveArguments, build_objective
from mm_utils.objectives.encoding import ENCODERS, PASS_TOKENS, computed_tokens, encode_in_groups, knows_padding
from tests.kit.host_reads import HostReads
from tests.kit.objectives import global_batch, tiny_objective

WIDTHS = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
}
ENDS = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3, "pad_token_id": 0}
TOWERS: dict[str, dict[str, Any]] = {
    "bert": WIDTHS,
    "roberta": {**WIDTHS, "max_position_embeddings": 40, "pad_token_id": 1},
    "electra": {**WIDTHS, "embedding_size": 16},
    "distilbert": {"vocab_size": 50, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
    "modernbert": {**WIDTHS, **ENDS, "local_attention": 4, "global_attn_every_n_layers": 2},
}
OTHERS: dict[str, dict[str, Any]] = {
    "mpnet": {**WIDTHS, "pad_token_id": 1},
    "deberta-v2": WIDTHS,
    "albert": {**WIDTHS, "embedding_size": 16},
    "clip_text_model": {**WIDTHS, **ENDS},
}
LENGTHS = [11, 9, 9, 4, 1, 1]


def make_model(kind: str, pooling: str = "auto", fusion_layers: int = 2) -> FusionDualEncoderModel:
    torch.manual_seed(0)
    vision = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4, "image_size": 16}
    text = AutoModel.from_config(AutoConfig.for_model(kind, **{**TOWERS, **OTHERS}[kind]))
    vision_model = AutoModel.from_config(AutoConfig.for_model("convnext", **vision))
    model = FusionDualEncoderModel.from_backbones(
        vision_model, text, text_pooling=pooling, fusion_layers=fusion_layers
    ).double()
    with torch.no_grad():
        for weight in model.parameters():  # so that attention is far from uniform
            weight.add_(0.2 * torch.randn(weight.shape, dtype=weight.dtype))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def captions(pad: int, lengths: list[int] = LENGTHS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = (torch.arange(12) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(4, 50, mask.shape, generator=generator)
    return ids.masked_fill(mask == 0, pad), mask


def encoded(model: FusionDualEncoderModel, ids: Tensor, mask: Tensor, lengths: list[int] | None) -> list[Tensor]:
    """Embeddings, states of the tokens, and the gradient of a function of both."""
    model.zero_grad()
    embeds, states = encode_in_groups(model, ids, mask, lengths)
    states = states[mask.bool()]
    weights = (torch.linspace(-1, 1, each.numel(), dtype=each.dtype).view_as(each) for each in (embeds, states))
    sum((each * weight).sum() for each, weight in zip((embeds, states), weights, strict=True)).backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return [embeds.detach(), states.detach(), *gradients]


@pytest.mark.parametrize("kind", [*TOWERS, *OTHERS])
def test_a_device_is_not_asked_for_what_is_known(kind: str) -> None:
    """Whether a text is padded; towers compute the same, to the bit."""
    model = make_model(kind).eval()
    for lengths in ([12, 12, 12], [12, 5, 1]):
        texts = captions(model.text_model.config.pad_token_id or 0, lengths)
        asked = model.encode_text(*texts)
        with knows_padding(min(lengths) < 12), HostReads() as reads:
            found = model.encode_text(*texts)
        assert all(map(torch.equal, found, asked))
        assert not [place for place in reads.found if place.startswith("masking_utils")]


def test_texts_without_a_mask_stay_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """SigLIP's are padded, and their padding is read like words."""
    model, masks = make_model("bert").eval(), []
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *given, attn_mask=None, **named: (
            masks.append(attn_mask) or attend(*given, attn_mask=attn_mask, **named)
        ),
    )
    with knows_padding(True):
        model.text_model(input_ids=captions(0)[0])
    assert masks == [None] * len(masks)
    assert masks


@pytest.mark.parametrize(
    ("kind", "pooling"), [*((kind, "auto") for kind in TOWERS), ("bert", "pooler"), ("bert", "cls")]
)
@pytest.mark.parametrize("order", [1, -1], ids=["sorted", "rising"])
def test_packed_equals_padded(kind: str, pooling: str, order: int) -> None:
    model = make_model(kind, pooling)
    lengths = LENGTHS[::order]
    ids, mask = captions(model.text_model.config.pad_token_id or 0, lengths)
    right = encoded(model, ids, mask, None)
    assert pack_captions(model)
    assert model.text_model in ENCODERS
    found = encoded(model, ids, mask, lengths)
    assert len(found) == len(right)
    for value, expected in zip(found, right, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11)
    # Without lengths, as in evaluation, nothing changes.
    assert all(torch.equal(one, other) for one, other in zip(encoded(model, ids, mask, None), right, strict=True))


@pytest.mark.parametrize("kind", OTHERS)
def test_other_towers_stay_as_they_are(kind: str) -> None:
    model = make_model(kind)
    before = model.text_model.config._attn_implementation
    assert not pack_captions(model)
    assert model.text_model not in ENCODERS
    assert model.text_model.config._attn_implementation == before
    ids, mask = captions(model.text_model.config.pad_token_id or 0)
    for value, right in zip(encoded(model, ids, mask, LENGTHS), encoded(model, ids, mask, None), strict=True):
        torch.testing.assert_close(value, right, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["contrastive", "sigmoid_matching", "masked_lm", "self_distillation"])
def test_objectives_give_the_loss_and_gradients_of_the_padded_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PASS_TOKENS, "cpu", 2)
    found = []
    for packed in (True, False):
        objective, shapes = tiny_objective(kind), []
        objective.groups_texts = packed
        assert not packed or pack_captions(objective.model)
        objective.model.text_model.register_forward_hook(
            lambda module, given, out, shapes=shapes: shapes.append(tuple(out.last_hidden_state.shape[:2]))
        )
        batch = global_batch(kind)
        report = objective(batch, 0)
        report["loss"].backward()
        if packed:
            assert set(shapes) == {(1, sum(batch["lengths"]))}
        gradients = {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}
        found.append({"loss": report["loss"].detach(), **gradients})
    for name, right in found[1].items():
        torch.testing.assert_close(found[0][name], right, rtol=1e-6, atol=1e-8 * float(right.abs().max() + 1e-3))


def test_the_flag_packs_or_says_why_not(caplog: pytest.LogCaptureFixture) -> None:
    args = ObjectiveArguments("contrastive:1", pack_captions=True)
    model = make_model("bert", fusion_layers=0)
    build_objective(model, args, 0)
    assert model.text_model in ENCODERS
    assert computed_tokens(model, LENGTHS, "cuda") == sum(LENGTHS)
    other = make_model("mpnet", fusion_layers=0)
    with caplog.at_level(logging.WARNING):
        build_objective(other, args, 0)
    assert other.text_model not in ENCODERS
    assert computed_tokens(other, LENGTHS, "cuda") == 11 * 6
    assert "--set pack_captions is true; a MPNetModel cannot be packed" in caplog.text


def test_what_is_saved_says_nothing_of_it(tmp_path: Path) -> None:
    files = []
    for packed in (False, True):
        model = make_model("bert")
        assert not packed or pack_captions(model)
        model.save_pretrained(tmp_path / str(packed))
        files.append(json.loads((tmp_path / str(packed) / "config.json").read_text()))
    assert files[0] == files[1]


def test_dropout_of_attention_is_refused() -> None:
    model = make_model("bert")
    assert pack_captions(model)
    model.text_model.encoder.layer[0].attention.self.dropout.p = 0.1
    with pytest.raises(RunError, match="Set --backbone_dropout off"):
        encode_packed(0, model, *captions(0), LENGTHS)


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_the_kernel_of_gpus_takes_what_it_is_given(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass on a GPU that is only pretended: shapes and types fit the kernel's signature, and nothing waits for a value."""
    real = packing_module._varlen_attn()
    assert real is not None
    calls = []

    def kernel_of_gpus(
        *args: Any, **named: Any
    ) -> torch.Tensor:  # torch's own asks a driver which kernel it should run
        given = inspect.signature(real).bind(*args, **named).arguments
        query, ends = given["query"], given["cu_seq_q"]
        assert query.shape == given["key"].shape == given["value"].shape
        assert query.dtype == torch.bfloat16
        assert (ends.dtype, len(ends), given["cu_seq_k"] is ends) == (torch.int32, len(LENGTHS) + 1, True)
        assert (given["max_q"], given["max_k"], given["window_size"]) == (12, 12, (-1, -1))
        calls.append(query.shape)
        return torch.empty_like(query)

    monkeypatch.setattr(packing_module, "_varlen_attn", lambda: kernel_of_gpus)
    config, kernel = AutoConfig.for_model(kind, **TOWERS[kind]), {"attn_implementation": packing_module._NAME}
    with FakeTensorMode(), torch.device("cuda"):
        half, full = (AutoModel.from_config(config, dtype=of, **kernel) for of in (torch.bfloat16, torch.float32))
        ids, mask = (torch.ones(6, 12, dtype=torch.long) for _ in range(2))
        output = PackedTower(half.eval(), 0, sum(LENGTHS))(ids, mask, output_hidden_states=True)
        assert output.last_hidden_state.shape == (6, 12, 32)
        assert output.last_hidden_state.device.type == "cuda"
        with pytest.raises(RunError, match="mixed_precision"):
            PackedTower(full.eval(), 0, sum(LENGTHS))(ids, mask)
    assert {shape[0] for shape in calls} == {sum(LENGTHS)}


def test_an_attention_without_a_scale_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_an_older_torch(query: Any, key: Any, value: Any, cu_seq_q: Any, is_causal: bool = False) -> None: ...

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", of_an_older_torch)
    assert packing_module._varlen_attn() is None
    with pytest.raises(ValueError, match="varlen_attn"):
        packing_module.pack_captions(None)  # type: ignore[arg-type]
