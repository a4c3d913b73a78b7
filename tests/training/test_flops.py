"""FLOPs of a training step against counts made by hand and against what a step computes."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.build import ObjectiveArguments, build_objective
from mm_utils.training.flops import FlopCounts, Quadratic, measure_flops
from tests.kit.models import build

WIDTH, MLP, EMBED = 32, 64, 16
PATCHES = 16  # 32 px in patches of 8
TOKENS = PATCHES + 1
LAYERS = 2
LENGTH = 16


def linear(rows: int, inputs: int, outputs: int) -> int:
    return 2 * rows * inputs * outputs


def attention(queries: int, keys: int) -> int:
    return 4 * queries * keys * WIDTH


def layer(length: int, mlp: int = MLP) -> int:
    return 4 * linear(length, WIDTH, WIDTH) + 2 * linear(length, WIDTH, mlp) + attention(length, length)


def bert(length: int) -> int:
    return LAYERS * layer(length) + linear(1, WIDTH, WIDTH) + linear(1, WIDTH, EMBED)


def head(length: int) -> int:
    """Per pair and layer: self-attention, queries and outputs of cross-attention, and a 4 x wide MLP."""
    tokens = length + 1
    cross = sum(2 * linear(tokens, WIDTH, WIDTH) + attention(tokens, (block + 1) * TOKENS) for block in range(LAYERS))
    return LAYERS * layer(tokens, 4 * WIDTH) + cross + linear(1, WIDTH, 1)


VIT = linear(PATCHES, 3 * 8 * 8, WIDTH) + LAYERS * layer(TOKENS) + linear(1, WIDTH, WIDTH) + linear(1, WIDTH, EMBED)
# One tap per block; block k has keys and values of the first k.
IMAGE_SIDE = LAYERS * linear(TOKENS, WIDTH, WIDTH) + (1 + 2) * linear(TOKENS, WIDTH, 2 * WIDTH)


def test_vit_bert_and_head_by_hand():
    counts = measure_flops(build(), 32, 64)
    assert counts.image == VIT
    assert counts.keys_values == IMAGE_SIDE
    for length in (3, 8, 24, 64, 512):
        assert counts.text.at(length) == bert(length)
        assert counts.pair.at(length) == head(length)
        assert counts.text_side.at(length) == LAYERS * linear(length, WIDTH, WIDTH)
    counts = measure_flops(build(fusion_layers=0), 32, 64)
    assert (counts.keys_values, counts.pair.at(64), counts.text_side.at(64), counts.image) == (0, 0, 0, VIT)


def test_a_step_by_hand():
    text, pair, none = Quadratic(1, 10, 100), Quadratic(2, 0, 1), Quadratic(0, 0, 0)
    texts = 2 * (1 + 10 * 2 + 100 * 4) + (1 + 10 * 3 + 100 * 9)
    trained = FlopCounts(1000, 50, text, none, pair, 3, 3)
    assert trained.training_step(3, [2, 3, 2]) == 3 * (3 * 1000 + texts)
    assert trained.training_step(3, [2, 3, 2], 7, 5) == 3 * (3 * 1000 + texts + 3 * 50 + 7 * (2 + 25))
    assert trained._replace(vision_passes=0).training_step(3, [2, 3, 2]) == 3 * texts


@pytest.mark.parametrize(
    ("objectives", "frozen"),
    [
        ("contrastive:1", ()),
        ("contrastive:1", ("text",)),
        ("contrastive:1,matching:1", ("vision",)),
        ("contrastive:1,matching:1", ("vision", "text")),
    ],
)
def test_a_step_costs_what_forward_and_backward_compute(objectives, frozen):
    model, rows = build(), 8
    for tower in frozen:
        model.freeze(tower)
    objective = build_objective(model, ObjectiveArguments(objectives), seed=0).train()
    counts = measure_flops(model, 32, 64)
    ids = torch.arange(rows * LENGTH).view(rows, LENGTH) % 40 + 3
    batch = {
        "pixel_values": torch.randn(rows, 3, 32, 32),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "ids": torch.arange(2 * rows).view(rows, 2),
    }
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        objective(batch, 0)["loss"].backward()
    pairs = 3 * rows if "matching" in objectives else 0
    expected = counts.training_step(rows, [LENGTH] * rows, pairs, LENGTH)
    if "vision" not in frozen:
        expected -= rows * linear(PATCHES, 3 * 8 * 8, WIDTH)  # pixels need no gradient
    # Nor do a frozen tower's states or a pooler that nobody reads; the cosines of the loss come on top.
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)


def test_measuring_changes_nothing_in_the_model():
    model: FusionDualEncoderModel = build("resnet").train()
    model.freeze("text")
    model.text_model.eval()
    model.vision_model.embedder.eval()
    next(model.visual_projection.parameters()).grad = torch.ones(EMBED, 40)
    modes = [module.training for module in model.modules()]
    grads = [parameter.requires_grad for parameter in model.parameters()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    state, fused = torch.get_rng_state(), torch.backends.cuda.flash_sdp_enabled()
    counts = measure_flops(model, 32, 64)
    assert (counts.vision_passes, counts.text_passes) == (3, 1)
    assert measure_flops(model, 32, 64, frozen_towers_run=False).text_passes == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.cuda.flash_sdp_enabled() == fused
    assert torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == modes
    assert True in modes
    assert False in modes
    assert [parameter.requires_grad for parameter in model.parameters()] == grads
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["visual_projection.weight"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name]), name
