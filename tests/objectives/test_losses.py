"""The exact losses against ten lines of dense fp64; `tests/contracts/test_terms.py` divides their batch among processes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from mm_utils.objectives.contrastive import sigmoid_loss
from mm_utils.objectives.losses import gather_batch, info_nce, same_pair
from mm_utils.objectives.matching import hard_negatives
from tests.kit.objectives import dense_info_nce, dense_sigmoid


def tiled_info_nce(image: Tensor, text: Tensor, scale: Tensor, ids: Tensor, tile: int | None = None) -> Tensor:
    return info_nce(image, text, scale, gather_batch(image, text, ids), tile)


def tiled_sigmoid(
    image: Tensor, text: Tensor, scale: Tensor, bias: Tensor, ids: Tensor, tile: int | None = None
) -> Tensor:
    return sigmoid_loss(image, text, scale, bias, gather_batch(image, text, ids), tile)


LOSSES = {"info_nce": (tiled_info_nce, dense_info_nce, 1), "sigmoid": (tiled_sigmoid, dense_sigmoid, 2)}
"""By name, the loss, its definition, and how many of scale and bias it takes."""


def with_gradients(loss: Any, *inputs: Tensor, **rest: Any) -> list[Tensor]:
    """Value and gradients of `loss(image, text, scale, ids)`, or with a bias behind the scale."""
    *leaves, ids = inputs
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    value = loss(*leaves, ids, **rest)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def make_batch(
    count: int, width: int, seed: int = 0, images: int = 10**6, captions: int = 10**6
) -> tuple[Tensor, Tensor, Tensor]:
    """Unit embeddings in fp64 and ids, of which few distinct ones make duplicates."""
    generator = torch.Generator().manual_seed(seed)
    image, text = torch.randn(2, count, width, generator=generator, dtype=torch.double)
    highest = torch.tensor([images, captions])
    ids = (torch.rand(count, 2, generator=generator) * highest).long()
    return normalize(image, dim=1), normalize(text, dim=1), ids


Batch = tuple[Tensor, Tensor, Tensor]
SEEDS = st.integers(0, 2**20)
BATCHES = st.builds(make_batch, st.integers(1, 14), st.integers(1, 9), SEEDS, st.integers(1, 20), st.integers(1, 20))
SCALES = st.floats(-4, 5).map(lambda logarithm: torch.tensor(logarithm, dtype=torch.double).exp())
TILES = st.one_of(st.none(), st.integers(1, 16))


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-9, atol=1e-12)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300))


@pytest.mark.parametrize("name", LOSSES)
@given(batch=BATCHES, scale=SCALES, tile=TILES, bias=st.floats(-40, 40))
@settings(max_examples=30)
def test_equals_the_definition(name: str, batch: Batch, scale: Tensor, tile: int | None, bias: float) -> None:
    image, text, ids = batch
    loss, dense, count = LOSSES[name]
    scalars = (scale, torch.tensor(bias, dtype=torch.double))[:count]
    found = with_gradients(loss, image, text, *scalars, ids, tile=tile)
    assert_equal(found, with_gradients(dense, image, text, *scalars, ids))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("scale", "bias"), [(1.0, -10.0), (14.3, -10.0), (100.0, -10.0), (1e4, 0.0), (1e-3, -100.0)])
def test_fp32_is_as_good_as_it_can_be_also_under_autocast(name: str, scale: float, bias: float) -> None:
    image, text, ids = make_batch(64, 32, images=60)
    loss, dense, count = LOSSES[name]
    double = torch.tensor([scale, bias], dtype=torch.double)[:count]
    inputs = image.float(), text.float(), *double.float(), ids
    exact = with_gradients(dense, *inputs)
    found = with_gradients(loss, *inputs, tile=10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = with_gradients(loss, *inputs, tile=10)
    right = with_gradients(dense, image, text, *double, ids)
    for value, again, fp32, expected in zip(found, inside, exact, right, strict=True):
        assert value.dtype == torch.float32
        assert torch.equal(again, value)
        bound = max(1e-5 * max(1.0, scale / 100), 2 * relative_error(fp32, expected))
        assert relative_error(value, expected) < bound


def test_fp32_gradient_survives_convergence() -> None:
    """At a loss of 1e-10, softmax - 1 is 0 in fp32, and with it half of the gradient of plain cross-entropy."""
    generator = torch.Generator().manual_seed(0)
    image = torch.linalg.qr(torch.randn(16, 16, generator=generator, dtype=torch.double))[0][:8]
    text = normalize(image + 0.02 * torch.randn(8, 16, generator=generator, dtype=torch.double), dim=1)
    image = image.float()
    text = text.float()
    ids = torch.arange(8)[:, None].expand(-1, 2)
    scale = torch.tensor(25.0)
    right = with_gradients(dense_info_nce, image.double(), text.double(), scale.double(), ids)
    assert 1e-11 < right[0] < 1e-9
    found = with_gradients(tiled_info_nce, image, text, scale, ids)
    plain = with_gradients(dense_info_nce, image, text, scale, ids)
    assert max(relative_error(value, expected) for value, expected in zip(found, right, strict=True)) < 1e-4
    assert max(relative_error(value, expected) for value, expected in zip(plain[1:], right[1:], strict=True)) > 0.1


def test_fp16_under_a_loss_scaler() -> None:
    """Gradients of 1e-6 do not exist in fp16; multiplied by the scaler's 65536 in fp32 first, they are."""
    image, text, ids = make_batch(256, 8)
    image = image.half()
    text = text.half()
    scaled = with_gradients(lambda *values: 65536 * tiled_info_nce(*values), image, text, torch.tensor(0.05), ids)
    double = image.double(), text.double(), torch.tensor(0.05, dtype=torch.double), ids
    right = with_gradients(lambda *values: 65536 * dense_info_nce(*values), *double)
    for value, expected in zip(scaled, right, strict=True):
        assert value.isfinite().all()
        assert relative_error(value, expected) < 1e-3


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_no_quadratic_tensor() -> None:
    count = 128
    width = 4
    tile = 4
    image, text, ids = make_batch(count, width)
    scale = torch.tensor(10.0, dtype=torch.double)
    with Largest() as dense:
        with_gradients(dense_info_nce, image, text, scale, ids)
    with Largest() as tiled:
        with_gradients(tiled_info_nce, image, text, scale, ids, tile=tile)
        hard_negatives(image, text, scale, gather_batch(image, text, ids), key=0, tile=tile)
        with_gradients(tiled_sigmoid, image, text, scale, -scale, ids, tile=tile)
    assert dense.elements >= count**2
    assert tiled.elements <= 2 * count * width  # the embeddings


# -- hard negatives --------------------------------------------------------------------------------------------------------
@given(
    count=st.integers(1, 20),
    images=st.integers(1, 12),
    captions=st.integers(1, 12),
    log_scale=st.floats(-5, 10),
    key=st.integers(-(2**70), 2**70),
    seed=SEEDS,
)
@settings(max_examples=20)
def test_a_known_positive_is_never_drawn(
    count: int, images: int, captions: int, log_scale: float, key: int, seed: int
) -> None:
    image, text, ids = make_batch(count, 3, seed, images, captions)
    batch = gather_batch(image, text, ids)
    scale = torch.tensor(log_scale).exp()
    drawn = hard_negatives(image, text, scale, batch, key)
    positive = same_pair(ids, ids)
    assert drawn.shape == (count,)
    assert drawn.dtype == torch.long
    assert ((drawn == -1) == positive.all(1)).all()
    rows = (drawn >= 0).nonzero()[:, 0]
    assert not positive[rows, drawn[rows]].any()
    for tile in (1, 3, 20):
        assert torch.equal(hard_negatives(image, text, scale, batch, key, tile), drawn)


def test_distribution_is_softmax() -> None:
    """Chi-square of 40 x 256 draws among eight kinds of columns; the noise is a hash, so the figure never changes."""
    count = 256
    kinds = 8
    kind = torch.arange(count) % kinds
    keys = normalize(torch.randn(kinds, 4, generator=torch.Generator().manual_seed(1)), dim=1)[kind]
    queries = keys[:1].expand(count, -1).contiguous()
    ids = torch.arange(2 * count).view(count, 2)
    ids[:32, 0] = 0  # 32 rows exclude each other
    batch = gather_batch(queries, keys, ids)
    scale = torch.tensor(1.5)
    probability = (scale * queries @ keys.T).masked_fill(same_pair(ids, ids), -torch.inf).softmax(1)
    draws = torch.stack([hard_negatives(queries, keys, scale, batch, key) for key in range(40)])
    expected = 40 * torch.zeros(count, kinds).index_add_(1, kind, probability).sum(0)
    seen = torch.bincount(kind[draws].flatten(), minlength=kinds)
    assert float(((seen - expected) ** 2 / expected).sum()) < 24.3  # 1 in 1000 for 7 degrees of freedom
    single = torch.bincount(draws.flatten(), minlength=count) / draws.numel()
    error = (single - probability.mean(0)).abs() / (probability.mean(0) / draws.numel()).sqrt()
    assert error.max() < 4.5  # standard deviations, of 256
