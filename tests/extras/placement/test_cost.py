"""The prediction of `--placement auto`: what it is made of, and when it chooses which."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mm_utils import distributed
from mm_utils.extras.placement import cost
from mm_utils.extras.placement.cost import Costs, Encoder, Link, Prediction, predict
from mm_utils.extras.placement.split import PARTS, parameters_of
from mm_utils.objectives.padding import encode_in_groups
from mm_utils.training.arguments import TrainingArguments
from tests.kit.objectives import ALONE, global_batch, tiny_objective

FREE = Link(0.0, math.inf)
ENCODERS = st.builds(Encoder, st.floats(0, 1), st.floats(1e-4, 1), st.integers(0, 2**30))


@given(ENCODERS, ENCODERS, st.integers(2, 16), st.integers(1, 64), st.sampled_from([None, 3, 8]))
def test_by_compute_alone_apart_saves_a_pass_at_most(
    vision: Encoder, text: Encoder, world: int, share: int, part: int | None
) -> None:
    """The same rows are encoded; what any pass costs is spent on one encoder, not two."""
    costs = Costs(vision, text, FREE, world, 256, 32, part)
    apart, images = costs.best_split(share * world)
    assert 1 <= images < world
    assert apart == costs.apart(share * world, images)
    rows = share * (vision.per_pair + text.per_pair)
    assert apart >= rows * (1 - 1e-9)
    if part is None:
        fixed = vision.fixed + text.fixed
        assert costs.together(share * world) == pytest.approx(rows + fixed)


def test_a_ring_sends_every_gradient_twice() -> None:
    link = Link(0.5, 100.0)
    assert link.reduce(400, 2) == pytest.approx(0.5 + 4)
    assert link.reduce(400, 4) == pytest.approx(0.5 + 6)
    assert link.gather(400, 4) == pytest.approx(0.5 + 3)
    assert (link.reduce(400, 1), link.gather(400, 1)) == (0.0, 0.0)


def test_a_slow_link_decides_for_apart_and_a_fast_one_against_it() -> None:
    encoders = (Encoder(0.01, 0.004, 40 * 10**6), Encoder(0.01, 0.002, 80 * 10**6))
    for bandwidth, part, wins in ((10e9, None, False), (20e6, None, True), (100e6, 4, True)):
        costs = Costs(*encoders, Link(1e-4, bandwidth), 2, 256, 32, part)
        assert (costs.apart(64, 1) < costs.together(64)) is wins
    slow, wanted = Costs(*encoders, Link(1e-4, 20e6), 4, 256, 32, None), {1: 3, 2: 2, 3: 1}
    assert slow.best_split(64)[1] in wanted  # and its time is the least of all
    assert slow.best_split(64)[0] == min(slow.apart(64, images) for images in wanted)


def test_a_process_updates_the_weights_that_it_trains() -> None:
    costs = Costs(Encoder(0, 0.1, 0, 0.5), Encoder(0, 0.1, 0, 0.25), FREE, 2, 0, 0, None)
    assert costs.together(4) == pytest.approx(0.4 + 0.75)
    assert costs.apart(4, 1) == pytest.approx(0.4 + 0.5)


def test_gradients_that_travel_beside_the_backward_pass_cost_what_is_left() -> None:
    encoders = (Encoder(0, 0.03, 10**6), Encoder(0, 0.03, 10**6))
    fast, slow = (Costs(*encoders, Link(0, bandwidth), 2, 0, 0, None) for bandwidth in (10e6, 1e6))
    assert fast.together(20) == pytest.approx(0.6)  # 0.2 s of sending, behind 0.4 s
    assert slow.together(20) == pytest.approx(0.6 + 2 - 0.4)
    in_parts = Costs(*encoders, Link(0, 10e6), 2, 0, 0, 5)
    assert in_parts.together(20) == pytest.approx(
        0.6 + 2 * 0.03 * 5 / 3
    )  # 0.2 s of sending, behind those of the last part


@pytest.mark.parametrize(
    ("shares", "noise", "reason"),
    [
        ([0.80] * 7, 0, None),
        ([0.97] * 7, 0, "apart saves less than 15% of a step"),
        ([1.20] * 7, 0, "apart is slower"),
        ([0.78, 0.79, 0.79, 0.80, 0.82, 0.83, 1.90], 0.02, None),  # of one round, disturbed by something else
        ([1.10, 0.70, 1.30, 0.80, 1.00, 0.90, 0.70], 0.20, "the two differ by less than the noise of these measurements, 20%"),
        ([1.30, 0.80, 1.20, 0.95, 1.10, 0.90, 1.04], 0.15, "the two differ by less than the noise of these measurements, 15%"),
    ],
)  # fmt: skip
def test_a_difference_below_the_noise_leaves_encoders_together(
    shares: list[float], noise: float, reason: str | None
) -> None:
    def costs(share: float) -> Costs:
        """Of 2 pairs: together 1 second; apart `share`, above 2/3."""
        return Costs(Encoder(0, share / 2, 0), Encoder(0, 0, 0, 1 - share / 2), FREE, 2, 0, 0, None)

    prediction = Prediction(2, costs(sorted(shares)[3]), tuple(map(costs, shares)))
    assert prediction.saved == pytest.approx(1 - sorted(shares)[3])
    assert prediction.noise == pytest.approx(noise)
    said = prediction.reason_for_together
    assert said is None if reason is None else said is not None and said.startswith(reason)


def test_measuring_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "any_rank", lambda here, device: here)
    monkeypatch.setattr(distributed, "max_over_ranks", lambda numbers, device: numbers)
    monkeypatch.setattr(cost.GradientAverage, "receive", lambda average: None)
    monkeypatch.setattr(cost, "ROUNDS", 3)
    monkeypatch.setattr(cost, "SAMPLE_SECONDS", 1e-9)
    seen: list[int] = []
    monkeypatch.setattr(
        "mm_utils.extras.placement.apart.encode_in_groups",
        lambda model, ids, *rest, **named: seen.append(len(ids)) or encode_in_groups(model, ids, *rest, **named),
    )
    objective = tiny_objective("contrastive")
    norm = torch.nn.BatchNorm1d(16).double()

    def count(module: Any, given: Any, out: Any) -> None:
        norm(out.pooler_output)  # which changes its running statistics

    objective.model.vision_model.register_forward_hook(count)
    objective.model.vision_model.norm = norm
    before = {name: value.clone() for name, value in objective.state_dict().items()}
    accelerator: Any = SimpleNamespace(**vars(ALONE))
    random = torch.get_rng_state()
    prediction = predict(TrainingArguments(), accelerator, objective, global_batch())
    costs = prediction.costs
    assert torch.equal(torch.get_rng_state(), random)
    assert {
        name: value for name, value in objective.state_dict().items() if not torch.equal(value, before[name])
    } == {}
    assert all(parameter.grad is None for parameter in objective.parameters())
    assert set(seen) == {9, 18}
    trained = {name: sum(p.nbytes for _, p in parameters_of(objective.model, name)) for name in PARTS}
    assert (costs.vision.gradient_bytes, costs.text.gradient_bytes) == (trained["vision"], trained["text"])
    assert min(costs.vision.update, costs.text.update) > 0
    assert min(costs.vision.seconds(8, None), costs.text.seconds(8, None), costs.link.bandwidth) > 0
    seen.clear()
    assert len(set(prediction.rounds)) == 3
    assert prediction.noise >= 0
    predict(TrainingArguments(micro_batch_size="4"), accelerator, objective, global_batch())
    assert set(seen) == {2, 4}
