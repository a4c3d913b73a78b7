"""The gradient of a whole objective does not depend on how the global batch is divided among processes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

from mm_utils import ranks
from mm_utils.losses import gather_batch, same_pair
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives import (
    ContrastiveMatchingObjective,
    ContrastiveObjective,
    Objective,
    ObjectiveArguments,
    build_objective,
)
from tests.test_ranks import run_on_ranks

PAIRS = 9
SPLITS = {2: [(5, 4), (8, 1), (9, 0)], 3: [(3, 3, 3), (2, 6, 1), (0, 5, 4)]}
WEIGHTS = {"contrastive": 1.0, "matching": 0.7}
KINDS = ("contrastive", "contrastive_matching", "sigmoid", "sigmoid_matching")


def tiny_model(fusion_layers: int = 2) -> FusionDualEncoderModel:
    """A ConvNeXt and a BERT of a few channels, in fp64, without dropout; the same one in every process."""
    torch.manual_seed(0)
    vision = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4, "image_size": 16}
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = FusionDualEncoderModel.from_backbones(
        AutoModel.from_config(AutoConfig.for_model("convnext", **vision)),
        AutoModel.from_config(AutoConfig.for_model("bert", **text, **dropout, vocab_size=50)),
        fusion_layers=fusion_layers,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, so that each has something to say
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.double().train()


def tiny_objective(kind: str) -> ContrastiveObjective:
    matches = kind.endswith("matching")
    model = tiny_model(fusion_layers=2 if matches else 0)
    if kind.startswith("sigmoid"):
        model.add_logit_bias()
        model.logit_bias.data.fill_(-2.0)  # at -10, the gradient of most pairs is too small to be compared
    if not matches:
        return ContrastiveObjective(model)
    return ContrastiveMatchingObjective(model, *WEIGHTS.values(), seed=3)


def global_batch() -> dict[str, Any]:
    """Captions of 3 to 11 tokens; two pairs share an image, two others a caption."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([3, 11, 4, 5, 9, 3, 7, 6, 10])
    mask = (torch.arange(16) < lengths[:, None]).long()
    ids = torch.arange(2 * PAIRS).view(PAIRS, 2)
    ids[7, 0], ids[6, 1] = ids[1, 0], ids[3, 1]
    return {
        "pixel_values": torch.randn(PAIRS, 3, 16, 16, generator=generator, dtype=torch.double),
        "input_ids": torch.randint(1, 50, (PAIRS, 16), generator=generator) * mask,
        "attention_mask": mask,
        "ids": ids,
        "lengths": lengths.tolist(),
    }


def share_of(batch: dict[str, Any], low: int, high: int) -> dict[str, Any]:
    """Rows `low` to `high`, cut to their own longest caption, as a rank's collator would."""
    mine = {name: value[low:high] for name, value in batch.items()}
    longest = max(mine["lengths"], default=1)
    return mine | {name: mine[name][:, :longest] for name in ("input_ids", "attention_mask")}


def step(objective: Objective, batch: dict[str, Tensor], number: int) -> dict[str, Any]:
    """Reported values and gradients of one step, as plain lists."""
    objective.zero_grad(set_to_none=True)
    report = objective(batch, number)
    report["loss"].backward()
    return {
        "report": {name: value.item() for name, value in report.items()},
        "gradients": {
            name: (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).tolist()
            for name, parameter in objective.named_parameters()
        },
    }


def steps_on_this_rank(splits: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    found = []
    for kind in KINDS:
        objective = tiny_objective(kind)
        for number, sizes in enumerate(splits):
            low = sum(sizes[: ranks.rank()])
            mine = share_of(global_batch(), low, low + sizes[ranks.rank()])
            found.append({"kind": kind, "step": number} | step(objective, mine, number))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_and_values_do_not_depend_on_the_processes(world: int) -> None:
    by_rank = run_on_ranks(world, steps_on_this_rank, SPLITS[world])
    for by_case in zip(*by_rank, strict=True):
        alone = step(tiny_objective(by_case[0]["kind"]), global_batch(), by_case[0]["step"])
        for found in by_case:
            assert found["report"] == by_case[0]["report"]  # to the last bit: ranks must not decide differently
            assert found["report"] == pytest.approx(alone["report"], rel=1e-6, abs=3e-7)
        largest = max(torch.tensor(values).abs().max().item() for values in alone["gradients"].values())
        for name, values in alone["gradients"].items():
            right = torch.tensor(values, dtype=torch.double)
            average = torch.tensor([found["gradients"][name] for found in by_case], dtype=torch.double).mean(0)
            # The head's logits are rounded to fp32 on purpose; all else is fp64.
            torch.testing.assert_close(
                average, right, rtol=1e-6, atol=1e-8 * largest, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert abs(torch.tensor(alone["gradients"]["model.logit_scale"])) > 1e-3


def test_padding_changes_nothing() -> None:
    batch = global_batch()
    longer = batch | {
        name: torch.nn.functional.pad(batch[name], (0, 8), value=0) for name in ("input_ids", "attention_mask")
    }
    short, long = (step(tiny_objective("contrastive_matching"), each, 0) for each in (batch, longer))
    assert short["report"] == pytest.approx(long["report"], rel=1e-6)
    for name, values in short["gradients"].items():
        if "position_embeddings" not in name:
            torch.testing.assert_close(torch.tensor(long["gradients"][name]), torch.tensor(values))


def test_report_adds_up() -> None:
    report = step(tiny_objective("contrastive_matching"), global_batch(), 0)["report"]
    total = WEIGHTS["contrastive"] * report["contrastive_loss"] + WEIGHTS["matching"] * report["matching_loss"]
    assert report["loss"] == pytest.approx(total, rel=1e-6)
    assert report["temperature"] == pytest.approx(math.exp(-float(tiny_model().logit_scale.detach())))
    assert report["matching_lift"] == pytest.approx(0.6365 - report["matching_loss"], abs=1e-6)
    assert 0 <= report["matching_accuracy"] <= 1
    alone = step(tiny_objective("contrastive"), global_batch(), 0)["report"]
    assert set(alone) == {"loss", "contrastive_loss", "temperature"}
    sigmoid = step(tiny_objective("sigmoid"), global_batch(), 0)["report"]
    assert (set(sigmoid) - set(alone), sigmoid["logit_bias"]) == ({"logit_bias"}, -2.0)


def test_the_weight_counts_without_matching_too() -> None:
    once, thrice = tiny_objective("contrastive"), tiny_objective("contrastive")
    thrice.weight = 3.0
    found, right = (step(objective, global_batch(), 0) for objective in (thrice, once))
    assert found["report"]["loss"] == pytest.approx(3 * right["report"]["loss"])
    for name, values in right["gradients"].items():
        torch.testing.assert_close(torch.tensor(found["gradients"][name]), 3 * torch.tensor(values))


def test_negatives_do_not_depend_on_the_order_of_the_batch() -> None:
    """So a batch may be sorted, and ranks may hold whichever rows of it."""
    batch, objective = global_batch(), tiny_objective("contrastive_matching")
    places = torch.tensor([4, 0, 8, 2, 6, 1, 7, 3, 5])
    mixed = {
        name: [value[place] for place in places] if isinstance(value, list) else value[places]
        for name, value in batch.items()
    }
    found, right = step(objective, mixed, 3), step(objective, batch, 3)
    assert found["report"] == pytest.approx(right["report"], rel=1e-6)
    largest = max(torch.tensor(values).abs().max().item() for values in right["gradients"].values())
    for name, values in right["gradients"].items():
        torch.testing.assert_close(
            torch.tensor(found["gradients"][name]), torch.tensor(values), rtol=1e-6, atol=1e-7 * largest
        )


def test_negatives_follow_the_step_and_the_seed() -> None:
    objective = tiny_objective("contrastive_matching")
    value = [step(objective, global_batch(), number)["report"]["matching_loss"] for number in (0, 0, 1, 2)]
    assert value[0] == value[1]
    assert len(set(value)) == 3
    objective.seed = 2**31
    assert step(objective, global_batch(), 0)["report"]["matching_loss"] != value[0]


@pytest.mark.parametrize("number", range(8))
def test_matching_pairs(number: int) -> None:
    """Every pair as a positive, and each image and each text once with a wrong partner that is no known positive."""
    objective, batch = tiny_objective("contrastive_matching"), global_batch()
    encoded = objective.encode(batch, match=True)
    shared = gather_batch(encoded.image_nE, encoded.text_nE, batch["ids"])
    image, text, is_match, total = objective._draw_pairs(shared, encoded.scale.detach(), number)
    assert total == len(image) == len(text) == 3 * PAIRS
    everyone = list(range(PAIRS))
    assert image[is_match].tolist() == text[is_match].tolist() == everyone
    assert image[PAIRS : 2 * PAIRS].tolist() == text[2 * PAIRS :].tolist() == everyone
    assert not same_pair(batch["ids"], batch["ids"])[image[~is_match], text[~is_match]].any()


def test_texts_and_images_are_drawn_apart() -> None:
    """With one noise for both directions, image i would get text j exactly where text i gets image j."""
    same = torch.full((100, 4), 0.5)
    shared = gather_batch(same, same, torch.arange(200).view(100, 2))
    image, text, _, _ = tiny_objective("contrastive_matching")._draw_pairs(shared, torch.tensor(1.0), 0)
    assert (text[100:200] == image[200:]).sum() < 8  # one in expectation


def test_matching_without_any_negative() -> None:
    batch = global_batch()
    batch["ids"][:, 0] = 5
    found = step(tiny_objective("contrastive_matching"), batch, 0)
    assert found["report"]["contrastive_loss"] == 0
    assert math.isfinite(found["report"]["matching_loss"])
    assert all(torch.tensor(values).isfinite().all() for values in found["gradients"].values())


def test_a_batch_without_a_readable_image() -> None:
    for kind in KINDS:
        found = step(tiny_objective(kind), share_of(global_batch(), 0, 0), 0)
        assert found["report"]["loss"] == 0
        assert all(not torch.tensor(values).any() for values in found["gradients"].values())


def test_build_objective() -> None:
    model = tiny_model()
    assert isinstance(build_objective(model, ObjectiveArguments(), 0), ContrastiveMatchingObjective)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert isinstance(build_objective(model, ObjectiveArguments("contrastive"), 0), ContrastiveObjective)
    assert not any(parameter.requires_grad for parameter in model.fusion.parameters())
    sigmoid = build_objective(model, ObjectiveArguments("sigmoid:2"), 0)
    assert (sigmoid.weight, model.logit_bias.item(), model.logit_scale.exp().item()) == (2, -10, pytest.approx(10))
    model.logit_bias.data.fill_(-3.0)
    build_objective(model, ObjectiveArguments("sigmoid"), 0)
    assert model.logit_bias.item() == -3  # what was learnt stays
    build_objective(model, ObjectiveArguments("contrastive"), 0)
    assert "logit_bias" not in model.state_dict()
    with pytest.raises(ValueError, match=r"no fusion head\. Set --fusion_layers"):
        build_objective(tiny_model(fusion_layers=0), ObjectiveArguments(), 0)


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("contrastive", {"contrastive": 1}),
        ("contrastive:2", {"contrastive": 2}),
        ("sigmoid:1,matching", {"sigmoid": 1, "matching": 1}),
        ("contrastive:1,matching:0", {"contrastive": 1}),
        (" contrastive:1e-1 , matching:.5", {"contrastive": 0.1, "matching": 0.5}),
    ],
)
def test_objective_arguments(text: str, weights: dict[str, float]) -> None:
    assert ObjectiveArguments(text).weights == weights


@pytest.mark.parametrize(
    "text",
    [
        *("", "matching", "contrastive:one", "contrastive:1,matchin:1", "contrastive:1,", "contrastive=1"),
        *(
            "contrastive,sigmoid",
            "contrastive:0",
            "contrastive:0,matching:1",
            "contrastive:1,matching:-1",
            "contrastive:nan",
        ),
    ],
)
def test_objective_arguments_errors_name_the_flag(text: str) -> None:
    with pytest.raises(ValueError, match="--objectives"):
        ObjectiveArguments(text)
