"""What CPUs cannot say: the same step on a GPU, in half precision, in parts, resumed. Skipped without a GPU.

With TANDEM_GPU_TESTS=cpu they run on the CPU, to rehearse them.
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch.nn import functional as F

from mm_utils.objectives.contrastive import sigmoid_loss
from mm_utils.objectives.grad_cache import backward
from mm_utils.objectives.losses import gather_batch, info_nce
from scripts import pretrain
from tests.kit.objectives import (
    ALONE,
    KINDS,
    dense_info_nce,
    dense_sigmoid,
    global_batch,
    measured,
    step_in_parts,
    tiny_objective,
)

DEVICE = os.environ.get("TANDEM_GPU_TESTS", "cuda")
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no GPU")


def on_gpu(batch: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """The batch on the GPU, floating-point values in `dtype`."""

    def moved(value):
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(DEVICE, dtype if value.is_floating_point() else None)

    return {name: moved(value) for name, value in batch.items()}


def gpu_step(
    kind: str, parts: int | None = None, dtype: torch.dtype = torch.float64, half: Any = None
) -> dict[str, Any]:
    """One step of the objective on the GPU; `half` is the type of autocast."""
    accelerator = SimpleNamespace(**vars(ALONE))
    accelerator.device = torch.device(DEVICE)
    if half is not None:
        accelerator.autocast = lambda: torch.autocast(DEVICE, half)
    objective = tiny_objective(kind).to(DEVICE, dtype)
    torch.manual_seed(0)
    return measured(objective, backward(accelerator, objective, on_gpu(global_batch(kind), dtype), 5, parts))


def assert_close(found: dict[str, Any], right: dict[str, Any], tolerance: float) -> None:
    """Losses within `tolerance`, each gradient within it of the largest of all."""
    assert found["report"]["loss"] == pytest.approx(right["report"]["loss"], rel=tolerance, abs=tolerance)
    largest = max(float(gradient.abs().max()) for gradient in right["gradients"].values())
    for name, gradient in right["gradients"].items():
        off = float((found["gradients"][name].cpu().double() - gradient.cpu().double()).abs().max())
        assert off <= tolerance * largest, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_a_cpu(kind: str) -> None:
    assert_close(gpu_step(kind), step_in_parts(tiny_objective(kind), global_batch(kind), None), 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_the_whole(kind: str) -> None:
    assert_close(gpu_step(kind, parts=4), gpu_step(kind), 2e-6)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["contrastive", "sigmoid_matching", "captioning"])
def test_half_precision_is_near_fp32(kind: str, half: torch.dtype) -> None:
    right = step_in_parts(tiny_objective(kind), global_batch(kind), None)
    assert_close(gpu_step(kind, dtype=torch.float32, half=half), right, 0.06)


@pytest.mark.parametrize(("loss", "dense"), [(info_nce, dense_info_nce), (sigmoid_loss, dense_sigmoid)])
def test_a_tiled_loss_is_the_dense_one(loss: Any, dense: Any) -> None:
    """The loss of 3,000 pairs in fp32; TF32 must be off in it."""
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator().manual_seed(0)
    image, text = (F.normalize(torch.randn(3000, 256, generator=generator), dim=1) for _ in range(2))
    ids = torch.arange(6000).view(3000, 2)
    scalars = [torch.tensor(50.0)] + [torch.tensor(-10.0)] * (loss is sigmoid_loss)
    found, right = (
        [each.detach().to(*where).requires_grad_() for each in (image, text, *scalars)]
        for where in ((DEVICE, torch.float32), ("cpu", torch.float64))
    )
    ours = loss(*found, gather_batch(found[0].detach(), found[1].detach(), ids.to(DEVICE)))
    theirs = dense(*right, ids)
    ours.backward()
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    for mine, reference in zip(found, right, strict=True):
        assert mine.grad is not None
        assert reference.grad is not None
        off = (mine.grad.cpu().double() - reference.grad).norm() / reference.grad.norm()
        assert off < 1e-4


def weights(folder: Path) -> torch.Tensor:
    """All weights of a saved model, in one row."""
    return torch.cat([value.double().flatten() for value in load_file(folder / "model.safetensors").values()])


def run(flags: list[str], monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    """A run in this process, whose libraries are loaded, with an accelerator of its own."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    AcceleratorState._reset_state(reset_partial_state=True)
    flags = [*flags[:12], *flags[16:]]  # of the tiny ones those of the head are left out
    pretrain.main([*flags, "--objectives", "contrastive:1", "--fusion_layers", "0", "--eval_steps", "0"])
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(("precision", "compiled"), [("bf16", "false"), ("fp16", "false"), ("bf16", "true")])
def test_a_resumed_run_is_the_whole_run(
    tiny_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, compiled: str
) -> None:
    """Contrastive, bit for bit: no backward pass in it adds up in an order that changes.

    Compiled, up to rounding: how a sum over tokens is split depends on the lengths of the first batch that a process sees.
    """
    flags = [*tiny_flags, "--max_steps", "6", "--save_steps", "3", "--torch_compile", compiled]
    flags += ["--output_dir", str(tmp_path)]
    run(flags, monkeypatch, ACCELERATE_MIXED_PRECISION=precision)
    whole = weights(tmp_path)
    torch._dynamo.reset()  # as a new process compiles
    resume = ["--resume_from_checkpoint", str(tmp_path / "checkpoint-3")]
    run([*flags, *resume], monkeypatch, ACCELERATE_MIXED_PRECISION=precision)
    off = (weights(tmp_path) - whole).norm() / whole.norm()
    assert off <= (1e-4 if compiled == "true" else 0.0)


def test_a_cpu_accelerator_beside_a_gpu_one_breaks_nothing(
    tiny_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run on CPUs on a machine with a GPU trains there and nowhere else."""
    for device, on_cpu in (("cpu", "true"), (DEVICE, "false")):
        caplog.clear()
        run([*tiny_flags, "--output_dir", str(tmp_path / on_cpu)], monkeypatch, ACCELERATE_USE_CPU=on_cpu)
        assert f"1 x {device}" in caplog.text
