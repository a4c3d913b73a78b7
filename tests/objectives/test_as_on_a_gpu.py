"""What is computed otherwise on a GPU, computed that way on a CPU: sums in a fixed order, products for convolutions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mm_utils.model.adapt import PatchProduct, multiply_patches
from mm_utils.model.fusion import rows_of
from mm_utils.objectives.build import ObjectiveArguments, build_objective
from mm_utils.objectives.grad_cache import backward
from tests.kit.models import TEXT, VISION, batch_for, build
from tests.kit.objectives import ALONE, KINDS, global_batch, tiny_objective

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
        tensors = [each for each in args if isinstance(each, Tensor)]
        if (
            name in UNORDERED | ATTENTION | CONVOLUTION
            and tensors[0].is_floating_point()
            and not self._is_whole(name, args)
        ):
            self.found.add(name)
        return func(*args, **(kwargs or {}))

    def _is_whole(self, name: str, args: Any) -> bool:
        """An average pool whose windows do not overlap adds nothing up."""
        if name != "_adaptive_avg_pool2d_backward":
            return False
        return all(large % small == 0 for large, small in zip(args[1].shape[-2:], args[0].shape[-2:], strict=True))


@contextmanager
def pretended_gpu() -> Iterator[None]:
    with (
        mock.patch("mm_utils.model.fusion.on_gpu", return_value=True),
        mock.patch("mm_utils.model.adapt.on_gpu", return_value=True),
    ):
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_every_term_have_a_fixed_order(kind: str) -> None:
    objective = tiny_objective(kind)
    multiply_patches(objective.model.vision_model)
    with pretended_gpu(), Unordered() as mode:
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
    batch |= {"ids": torch.arange(8).view(4, 2), "lengths": [9, 7, 5, 3]}  # type: ignore[dict-item]
    with pretended_gpu(), Unordered() as mode:
        backward(ALONE, objective, batch, 5, None)
    allowed = ALLOWED.get(vision, set()) | ALLOWED.get(text, set())
    assert mode.found - ATTENTION - CONVOLUTION <= allowed
    assert bool(mode.found & allowed) == bool(allowed)
    if vision == "vit":
        assert not mode.found & CONVOLUTION


@pytest.mark.parametrize("size", [(32, 32), (35, 33)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_patches_as_a_product_are_the_convolution(size: tuple[int, int], layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 24, 8, 8).to(memory_format=layout)
    pixels, found = torch.randn(5, 3, *size).to(memory_format=layout), []
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
    values, places = torch.randn(3, 4, 2), torch.tensor([2, 0, 2])
    with pretended_gpu():
        indexed = rows_of(values, places, dim)
    assert torch.equal(indexed, rows_of(values, places, dim))
