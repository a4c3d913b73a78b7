"""Whole runs with FSDP2 and DeepSpeed, as `accelerate launch` starts them: they learn what one process learns.

As a script, it is scripts/pretrain.py with FSDP2, which Accelerate does not offer on CPUs, and with units small enough for tiny
models: ACCELERATE_TORCH_DEVICE=cpu accelerate launch --config_file accelerate_configs/fsdp2.yaml -m tests.distributed.test_backends ...
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import FSDPModule

from mm_utils import distributed
from mm_utils.distributed import RunError
from mm_utils.objectives.grad_cache import backward
from mm_utils.run.start import run_script
from mm_utils.sharding import full_tensor
from mm_utils.training import objective_cache as backends
from mm_utils.training.objective_cache import configure_deepspeed, configure_fsdp
from scripts import pretrain
from tests.kit.objectives import ALONE, global_batch, sharded, share_of, step_in_parts, tiny_objective
from tests.kit.objectives import assert_same as same_step
from tests.kit.processes import ROOT, ROUNDED, launch, losses, rows_of, run_on_ranks, weights


def run(flags: list[str], folder: Path, precision: str = "no", config: str = "fsdp2") -> None:
    """Two processes to the end of a run, in `folder`."""
    words = ["--config_file", str(ROOT / f"accelerate_configs/{config}.yaml"), "--mixed_precision", precision]
    words += ["--num_processes", "2", "--main_process_port", "0"]
    if config == "two_processes":
        words = [*words, str(ROOT / "scripts/pretrain.py")]
        environment = {"ACCELERATE_USE_CPU": "true"}
    else:
        words += ["-m", "tests.distributed.test_backends"]
        environment = {"ACCELERATE_TORCH_DEVICE": "cpu", "DS_ACCELERATOR": "cpu"}
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    ended = launch([*words, *flags, "--output_dir", str(folder)], folder.parent, PYTHONPATH=path, **environment)
    assert ended.returncode == 0, ended.stderr
    assert f"2 x cpu, mixed precision {precision}" in ended.stderr


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=ROUNDED, msg=name)


BACKENDS = [
    "fsdp2",
    pytest.param(
        "deepspeed_zero2",
        marks=pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed"),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("config", BACKENDS)
def test_bf16_rounds_where_it_does_with_ddp(config: str, tiny_flags: list[str], tmp_path: Path) -> None:
    run(tiny_flags, tmp_path / "plain", "bf16", "two_processes")
    run(tiny_flags, tmp_path / "sharded", "bf16", config)
    pretrain.main([*tiny_flags, "--output_dir", str(tmp_path / "whole")])
    first = {name: losses(tmp_path / name)[1] for name in ("plain", "sharded", "whole")}
    assert first["sharded"] == pytest.approx(first["plain"], rel=1e-6)
    assert first["sharded"] != pytest.approx(first["whole"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("config", BACKENDS)
def test_sharded_and_plain_runs_learn_the_same_and_go_on(config: str, tiny_flags: list[str], tmp_path: Path) -> None:
    """Weights, the optimizer's state, and what evaluation finds; batches that do not divide by two.

    With FSDP2 a run goes on from one without, and the reverse; DeepSpeed reads its own checkpoints.
    """
    # Adam would enlarge the rounding of its first gradients.
    flags = [*tiny_flags, "--optim", "sgd", "--learning_rate", "0.1", "--global_batch_size", "7"]
    flags += ["--max_grad_norm", "0.5", "--save_steps", "2", "--eval_steps", "2"]
    plain = tmp_path / "plain"
    sharded = tmp_path / "sharded"
    pretrain.main([*flags, "--output_dir", str(plain)])
    run(flags, sharded, config=config)
    assert losses(sharded) == pytest.approx(losses(plain), rel=1e-5)
    assert_same(weights(sharded), weights(plain))
    found = [
        [row for row in rows_of(folder) if "eval_text_to_image_recall@1" in row][-1] for folder in (plain, sharded)
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-3, abs=1e-5)

    before = plain if config == "fsdp2" else sharded
    resume = ["--resume_from_checkpoint", str(before / "checkpoint-2")]
    run([*flags, *resume], tmp_path / "sharded after", config=config)
    assert_same(weights(tmp_path / "sharded after"), weights(plain))
    if config == "fsdp2":
        resume = ["--resume_from_checkpoint", str(sharded / "checkpoint-2"), "--output_dir", str(tmp_path / "after")]
        pretrain.main([*flags, *resume])
        assert_same(weights(tmp_path / "after"), weights(plain))


def accelerator(kind: str, precision: str = "bf16", **plugin: Any) -> Any:
    """As a configuration of accelerate makes it."""
    state = SimpleNamespace(**{f"{kind}_plugin": SimpleNamespace(**plugin)})
    return SimpleNamespace(
        distributed_type=DistributedType(kind.upper()), state=state, mixed_precision=precision, num_processes=2
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (accelerator("fsdp", fsdp_version=1), "fsdp_version is 1 .*fsdp2.yaml"),
        (accelerator("deepspeed", zero_stage=3), "zero_stage is 3 .*fsdp2.yaml"),
        (accelerator("deepspeed", "fp16", zero_stage=2, deepspeed_config={}), "fp16.*Use bf16, or DDP"),
        (
            accelerator("deepspeed", zero_stage=2, deepspeed_config={"gradient_accumulation_steps": 4}),
            "--micro_batch_size",
        ),
    ],
)
def test_what_they_cannot_do_is_said_at_the_start(given: Any, reason: str) -> None:
    objective = tiny_objective("contrastive")
    is_fsdp = given.distributed_type == DistributedType.FSDP
    configure = configure_fsdp if is_fsdp else partial(configure_deepspeed, max_grad_norm=1.0)
    with pytest.raises(ValueError, match=reason):
        configure(given, objective, 8)


if __name__ == "__main__":
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[method-assign,assignment]
    backends.MIN_BLOCK_PARAMETERS = 1000
    run_script(pretrain.main)


# -- sharded steps and shared faults, between processes ----------------------------------------------------------------
WORLD = 3
KINDS = ("contrastive", "sigmoid_matching")
SIZES = (5, 3, 1)


def everything() -> tuple[Any, ...]:
    return shared_faults(), steps_on_this_rank(SIZES)


@pytest.fixture(scope="module")
def on_ranks() -> list[tuple[Any, ...]]:
    """What each rank found, of all tests in one launch."""
    return run_on_ranks(WORLD, everything)


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_shares_are_contiguous_complete_and_even(count: int, parts: int) -> None:
    shares = [distributed.share(count, part, parts) for part in range(parts)]
    assert [row for share in shares for row in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


FAULTS = (ValueError("pairs.csv, line 2, is empty"), RunError("the folder is taken"), KeyError("a defect"))


def shared_faults() -> list[str]:
    found = []
    for place, fault in enumerate(FAULTS):
        for at in (0, 1):

            def fail(at=at, fault=fault):
                if distributed.rank() == at:
                    raise fault
                return distributed.rank() + 7

            def go_first(fail=fail):
                with distributed.first_then_others():
                    return fail()

            for work in (lambda: distributed.on_first(fail), go_first):
                try:
                    found.append(f"{place}{at} {work()}")
                except Exception as error:
                    found.append(f"{place}{at} {type(error).__name__} {error}")
    return found


def test_what_fails_on_one_rank_fails_on_all_with_its_words(on_ranks: list[tuple[Any, ...]]) -> None:
    for rank, (found, _) in enumerate(on_ranks):
        wanted = []
        for place, fault in enumerate(FAULTS):
            told = f"{type(fault).__name__} {fault}"
            for at in (0, 1):
                if place == 2 and rank != at:
                    told = f"PeerError process {at} failed: {fault!r}"
                wanted += [f"{place}{at} {told if at == 0 else 7}", f"{place}{at} {told}"]
                told = f"{type(fault).__name__} {fault}"
        assert found == wanted


@contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """What accelerate's `no_sync` does to FSDP2 models."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


SHARDED = SimpleNamespace(**{**vars(ALONE), "no_sync": no_sync, "distributed_type": DistributedType.FSDP})


def steps_on_this_rank(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    low = sum(sizes[: distributed.rank()])
    mine = share_of(global_batch(), low, low + sizes[distributed.rank()])
    found = []
    for kind in KINDS:
        for micro_batch_size in (None, 9, 2):
            objective = sharded(tiny_objective(kind))
            assert isinstance(objective, FSDPModule)
            report = backward(SHARDED, objective, mine, 5, micro_batch_size)
            gradients = {
                name: full_tensor(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
                for name, parameter in objective.named_parameters()
            }
            values = {name: value.item() for name, value in report.items()}
            found.append({"kind": kind, "report": values, "gradients": gradients})
    return found


def test_sharded_gradients_are_those_of_one_process(on_ranks: list[tuple[Any, ...]]) -> None:
    for _, found in on_ranks:
        for case in found:
            right = step_in_parts(tiny_objective(case["kind"]), global_batch(), None)
            case["gradients"] = {
                name: gradient.view(right["gradients"][name].shape) for name, gradient in case["gradients"].items()
            }
            same_step(case, right)
