"""Compiled layers, and attention over short sequences."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from mm_utils.model import compile
from mm_utils.model.short_attention import ShortAttention
from tests.kit.objectives import global_batch, tiny_objective


@pytest.mark.parametrize("kind", ["contrastive_matching", "captioning"])
def test_layers_of_a_kind_are_one_graph_without_breaks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced, and run as they are: an objective over texts of other lengths in every step, and its gradients."""
    compile_function = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda what, dynamic, options: compile_function(what, dynamic=dynamic, backend="eager")
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = tiny_objective(kind)
    compiled = tiny_objective(kind)
    compile.compile_layers(compiled.model)
    kinds = {
        type(layer)
        for part in (plain.model.vision_model, plain.model.text_model, plain.model.fusion)
        for layer in compile.equal_layers(part)
    }
    for length in (16, 14, 13):
        batch = global_batch(kind)
        for name in ("input_ids", "attention_mask"):
            batch[name] = batch[name][:, :length]
        found = []
        for objective in (plain, compiled):
            objective.zero_grad()
            objective(batch, length)["loss"].backward()
            found.append([weight.grad for weight in objective.parameters() if weight.grad is not None])
        for value, right in zip(*found, strict=True):
            torch.testing.assert_close(value, right, rtol=1e-9, atol=1e-12)
        assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2 * len(kinds)
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_classifier_without_a_text_encoder_is_compiled() -> None:
    model = tiny_objective("contrastive").model
    model.text_model = None
    compile.compile_layers(model)
    layer = next(compile.equal_layers(model.vision_model))
    assert isinstance(layer.forward, partial)


@pytest.mark.parametrize(
    ("asked", "steps", "device", "compiles"),
    [(None, 5000, "cuda", True), (None, 100, "cuda", False), (None, 5000, "cpu", False), (True, 1, "cpu", True), (False, 5000, "cuda", False)],
)  # fmt: skip
def test_long_runs_on_a_gpu_compile(
    asked: bool | None, steps: int, device: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    monkeypatch.setattr(compile, "compile_layers", compiled.append)
    compile.compile_if_repaid(tiny_objective("contrastive").model, asked, steps, torch.device(device))
    assert bool(compiled) == compiles


HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # Triton's interpreter has no bf16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("length", "kind"), [(13, "plain"), (29, "masked"), (50, "plain"), (40, "causal")])
def test_short_attention_is_attention(length: int, kind: str) -> None:
    """Values and gradients beside fp64, no farther than torch's own in half precision; without a GPU, by Triton's interpreter (tests/conftest.py)."""
    torch.manual_seed(0)
    given = [torch.randn(3, length, 2, 64).to(DEVICE, HALF) for _ in range(4)]
    mask = None
    if kind == "masked":
        mask = (torch.arange(length) < torch.tensor([29, 11, 3])[:, None])[:, None, None].to(DEVICE)

    def results(of, dtype):
        *inputs, grad = [each.to(dtype).requires_grad_() for each in given]
        out = of(*inputs)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    def plain(*inputs):
        query, key, value = [each.transpose(1, 2) for each in inputs]
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=kind == "causal").transpose(1, 2)

    ours = results(lambda *inputs: ShortAttention.apply(*inputs, mask, kind == "causal", 64**-0.5), HALF)
    for mine, theirs, right in zip(ours, results(plain, HALF), results(plain, torch.float64), strict=True):
        assert (mine.double() - right).norm() < 1.2 * (theirs.double() - right).norm()
