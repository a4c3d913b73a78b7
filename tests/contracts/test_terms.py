"""What every term of the loss keeps, however the global batch is divided, padded or ordered: one table of kinds x rules."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mm_utils import distributed
from mm_utils.model.adapt import PatchProduct, multiply_patches
from mm_utils.model.arguments import ObjectiveArguments
from mm_utils.model.fusion import rows_of
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.build import build_objective
from mm_utils.objectives.grad_cache import backward
from mm_utils.objectives.losses import TILE_ELEMENTS
from mm_utils.objectives.objective import JointObjective
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.stages import stages_of
from tests.kit.models import TEXT, VISION, batch_for, build
from tests.kit.objectives import (
    ALONE,
    KINDS,
    PAIRS,
    SPLITS,
    TERMS,
    assert_same,
    global_batch,
    measured,
    same_gradients,
    share_of,
    step,
    step_in_parts,
    tiny_objective,
)
from tests.kit.processes import run_on_ranks

of_every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def whole(kind: str) -> dict[str, Any]:
    return step(tiny_objective(kind), global_batch(kind), 5)


@pytest.mark.parametrize(
    ("kind", "size"), [*((kind, 2) for kind in KINDS), *(("everything", size) for size in (1, 4, 5, 8))]
)
def test_parts_give_the_gradient_of_the_whole(kind: str, size: int) -> None:
    assert_same(step_in_parts(tiny_objective(kind), global_batch(kind), size), whole(kind))
    assert whole(kind)["gradients"]["model.logit_scale"].abs() > 1e-4


def steps_on_this_rank(splits: list[tuple[int, ...]], size: int | None) -> list[dict[str, Any]]:
    found = []
    distributed.BUCKET_ELEMENTS = 300  # gradients are sent in many buckets
    TILE_ELEMENTS["cpu"] = 3 * PAIRS  # tiles of 3 rows
    for number, kind in enumerate(KINDS[:: size or 1]):
        sizes = splits[number % len(splits)]
        low = sum(sizes[: distributed.rank()])
        mine = share_of(global_batch(kind), low, low + sizes[distributed.rank()])
        take = step_in_parts(tiny_objective(kind), mine, size) if size else step(tiny_objective(kind), mine, 5)
        found.append({"kind": kind, **take})
    return found


@pytest.mark.parametrize("size", [None, 2])
def test_ranks_give_the_gradient_of_one_process(size: int | None) -> None:
    """Shares are uneven, and some empty. In parts, of which ranks have different numbers, `backward` averages by itself."""
    world = 2 if size else 3
    by_rank = run_on_ranks(world, steps_on_this_rank, SPLITS[world], size)
    for by_case in zip(*by_rank, strict=True):
        right = whole(by_case[0]["kind"])
        mean = dict.fromkeys(right["gradients"], 0)
        for found in by_case:
            assert found["report"] == by_case[0]["report"]  # to the last bit: ranks must not decide differently
            assert found["report"] == pytest.approx(right["report"], rel=1e-6, abs=3e-7)
            if size:
                same_gradients(found["gradients"], right["gradients"])
            mean = {name: value + found["gradients"][name] / world for name, value in mean.items()}
        same_gradients(mean, right["gradients"])


def mixed(batch: dict[str, Any]) -> dict[str, Any]:
    """Another order of the rows."""
    places = torch.tensor([4, 0, 8, 2, 6, 1, 7, 3, 5])
    found = {}
    for name, value in batch.items():
        found[name] = [value[place] for place in places] if isinstance(value, list) else value[places]
    return found


def padded(batch: dict[str, Any]) -> dict[str, Any]:
    """Longer padding."""
    names = [name for name in batch if name.endswith(("input_ids", "attention_mask"))]
    return batch | {name: torch.nn.functional.pad(batch[name], (0, 8)) for name in names}


@of_every_kind
@pytest.mark.parametrize("change", [mixed, padded])
def test_order_and_padding_change_nothing(kind: str, change: Any) -> None:
    found = step(tiny_objective(kind), change(global_batch(kind)), 5)
    assert found["report"] == pytest.approx(whole(kind)["report"], rel=1e-6, abs=3e-7)
    right = {name: value for name, value in whole(kind)["gradients"].items() if "position_embeddings" not in name}
    same_gradients(found["gradients"], right, of_largest=1e-7)


@of_every_kind
def test_a_batch_without_a_readable_image_or_without_negatives(kind: str) -> None:
    nothing = step(tiny_objective(kind), share_of(global_batch(kind), 0, 0), 0)
    assert nothing["report"]["loss"] == 0
    assert not any(values.any() for values in nothing["gradients"].values())
    batch = global_batch(kind)
    batch["ids"] = torch.zeros_like(batch["ids"])  # all show one image
    found = step(tiny_objective(kind), batch, 0)
    assert all(torch.tensor(value).isfinite() for value in found["report"].values())
    assert all(value.isfinite().all() for value in found["gradients"].values())
    assert found["report"]["contrastive_loss"] == 0 or "sigmoid" in TERMS[kind]


@of_every_kind
def test_every_trained_parameter_gets_a_gradient_in_half_precision_too(kind: str) -> None:
    """DDP waits for those of all of them. Parts are rounded as the whole is, and no weight is cast for both passes."""
    half = SimpleNamespace(**vars(ALONE) | {"autocast": lambda: torch.autocast("cpu", torch.bfloat16)})
    found = []
    for size in (None, 3):
        objective = tiny_objective(kind).float()
        batch = global_batch(kind)
        batch |= {
            name: value.float() for name, value in batch.items() if getattr(value, "dtype", None) == torch.double
        }
        found.append(measured(objective, backward(half, objective, batch, 5, size)))
        missing = [name for name, value in objective.named_parameters() if value.requires_grad and value.grad is None]
        assert [name for name in missing if "text_model.pooler" not in name] == []
        assert found[-1]["report"]["loss"] == pytest.approx(whole(kind)["report"]["loss"], rel=0.1)
    one = torch.cat([value.flatten() for value in found[0]["gradients"].values()])
    other = torch.cat([value.flatten() for value in found[1]["gradients"].values()])
    assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.97


@pytest.mark.parametrize("kind", ["captioning", "matching_with_negatives"])
def test_a_stage_trains_its_part_as_all_at_once_would(kind: str) -> None:
    """Of the encoders' stage the head's terms are left out; in the head's, the encoders get no gradient."""
    objective = tiny_objective(kind)
    batch = global_batch(kind)
    found = {}
    stages = stages_of(objective, TrainingArguments(max_steps=10), 0.5, 9)
    for stage in stages:
        stage.freeze_others(objective)
        found = step(objective, batch, 5)
        term = TERMS[kind].split(",")[1].split(":")[0]
        assert (f"{term}_loss" in found["report"]) == (stage.name == "head")
        assert {name for name, value in found["gradients"].items() if value.any()} <= stage.trains.keys()
        assert all(parameter.grad is None for parameter in objective.parameters() if not parameter.requires_grad)
    same_gradients(found["gradients"], {name: whole(kind)["gradients"][name] for name in stages[1].trains})


# -- from the stored output of frozen towers ------------------------------------------------------------------------------
TOWERS = {"vision": ("vision",), "text": ("text",), "both": ("vision", "text")}


def frozen_objective(kind: str, towers: str) -> JointObjective:
    objective = tiny_objective(kind)
    for name in TOWERS[towers]:
        objective.model.freeze(name)
    return objective.train()


def with_features(objective: JointObjective, kind: str, towers: str) -> dict[str, Any]:
    """The batch with the frozen towers' output, unrounded, in place of the images."""
    model = objective.model
    batch = global_batch(kind)
    with torch.no_grad():
        if towers != "text":
            batch["vision_pooled"], taps = model.vision_features(batch.pop("pixel_values"), objective.reads_pairs)
            batch |= {f"vision_taps_{place}": tap for place, tap in enumerate(taps)}
        if towers != "vision":
            batch["text_pooled"], states = model.text_features(batch["input_ids"], batch["attention_mask"])
            batch |= {"text_states": states} if objective.reads_pairs else {}
    return batch


@pytest.mark.parametrize("towers", TOWERS)
@pytest.mark.parametrize(
    "kind", ["contrastive", "contrastive_matching", "matching_with_negatives", "captioning", "everything"]
)
def test_features_give_the_gradient_of_the_towers(kind: str, towers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    live = step(frozen_objective(kind, towers), global_batch(kind), 3)
    objective = frozen_objective(kind, towers)
    batch = with_features(objective, kind, towers)
    if kind in ("contrastive", "contrastive_matching"):
        in_parts = step_in_parts(frozen_objective(kind, towers), batch, 4)
        assert_same(in_parts, step_in_parts(frozen_objective(kind, towers), global_batch(kind), None))
    for name in TOWERS[towers]:
        if name == "vision" or "negatives" not in kind:  # texts that are not stored
            monkeypatch.setattr(
                FusionDualEncoderModel, f"{name}_features", lambda *_, **__: pytest.fail("a tower ran")
            )
    assert_same(step(objective, batch, 3), live)


# -- sums in a fixed order, as on a GPU -----------------------------------------------------------------------------------
# What torch.use_deterministic_algorithms lists as without a fixed order of sums on CUDA, in floating point. Attention is in
# addition: its kernels add up the gradient of queries block by block of keys.
UNORDERED = {
    "index_add", "index_add_", "index_reduce", "scatter_add", "scatter_add_", "scatter_reduce", "put_", "cumsum", "histc",
    "bincount", "kthvalue", "median", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward", "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward",
    "avg_pool3d_backward", "fractional_max_pool2d_backward", "upsample_linear1d_backward", "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward", "upsample_trilinear3d_backward", "_upsample_bilinear2d_aa_backward",
    "_upsample_bicubic2d_aa_backward", "reflection_pad1d_backward", "reflection_pad2d_backward",
    "replication_pad2d_backward", "grid_sampler_2d_backward", "_embedding_bag_backward", "_ctc_loss_backward",
    "nll_loss2d_forward",
}  # fmt: skip
ATTENTION = {"_scaled_dot_product_flash_attention_for_cpu_backward"}
CONVOLUTION = {"convolution_backward"}
ALLOWED = {  # docs/reliability.md names them
    "resnet": {"max_pool2d_with_indices_backward"},
    "deberta": {"scatter_add_", "scatter_add"},
}


class Unordered(TorchDispatchMode):
    """Collects operations on floating-point values whose sums have no fixed order on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in UNORDERED | ATTENTION | CONVOLUTION:
            first = next(each for each in args if isinstance(each, Tensor))
            # An average pool whose windows do not overlap adds nothing up.
            adds_up = name != "_adaptive_avg_pool2d_backward" or any(
                large % small for large, small in zip(args[1].shape[-2:], args[0].shape[-2:], strict=True)
            )
            self.found |= {name} if first.is_floating_point() and adds_up else set()
        return func(*args, **(kwargs or {}))


@contextmanager
def pretended_gpu() -> Iterator[Unordered]:
    places = ("mm_utils.model.fusion.on_gpu", "mm_utils.model.adapt.on_gpu")
    with mock.patch(places[0], return_value=True), mock.patch(places[1], return_value=True), Unordered() as mode:
        yield mode


@of_every_kind
def test_sums_of_every_term_have_a_fixed_order(kind: str) -> None:
    objective = tiny_objective(kind)
    multiply_patches(objective.model.vision_model)
    with pretended_gpu() as mode:
        backward(ALONE, objective, global_batch(kind), 5, None)
    assert mode.found <= ATTENTION | CONVOLUTION


@pytest.mark.parametrize(
    ("vision", "text"), [*((name, "bert") for name in VISION), *(("vit", name) for name in TEXT if name != "bert")]
)
def test_towers_add_up_in_a_fixed_order(vision: str, text: str) -> None:
    """What is allowed is found, or the list is longer than it has to be."""
    model = build(vision, text, fusion_layers=1, fusion_max_tokens=9).train()
    objective = build_objective(model, ObjectiveArguments("contrastive:1,captioning:1"), 0)
    multiply_patches(model.vision_model)
    batch = batch_for(model, (9, 7, 5, 3))
    with pretended_gpu() as mode:
        backward(ALONE, objective, batch | {"ids": torch.arange(8).view(4, 2), "lengths": [9, 7, 5, 3]}, 5, None)
    allowed = ALLOWED.get(vision, set()) | ALLOWED.get(text, set())
    assert mode.found - ATTENTION - CONVOLUTION <= allowed
    assert bool(mode.found & allowed) == bool(allowed)
    assert vision != "vit" or not mode.found & CONVOLUTION


@pytest.mark.parametrize("size", [(32, 32), (35, 33)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_patches_as_a_product_are_the_convolution(size: tuple[int, int], layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 24, 8, 8).to(memory_format=layout)
    pixels = torch.randn(5, 3, *size).to(memory_format=layout)
    found = []
    for product in (False, True):
        if product:
            tower = nn.Sequential(conv)
            multiply_patches(tower)
            conv = tower[0]  # type: ignore[assignment]
            assert type(conv) is PatchProduct
            assert torch.equal(conv(pixels), found[0][0])  # without a GPU, it keeps its bits
        conv.zero_grad()
        with pretended_gpu():
            embeds = conv(pixels)
        (embeds * torch.linspace(-1, 1, embeds.numel()).view_as(embeds)).sum().backward()
        found.append(
            [embeds.detach(), *(weight.grad.clone() for weight in conv.parameters() if weight.grad is not None)]
        )
    for mine, right in zip(found[1], found[0], strict=True):
        assert mine.shape == right.shape
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_are_the_same_by_either_way(dim: int) -> None:
    values = torch.randn(3, 4, 2)
    places = torch.tensor([2, 0, 2])
    with pretended_gpu():
        indexed = rows_of(values, places, dim)
    assert torch.equal(indexed, rows_of(values, places, dim))
