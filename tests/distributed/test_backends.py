"""Whole runs with FSDP2 and DeepSpeed, as `accelerate launch` starts them: they learn what one process learns.

As a script, it is scripts/pretrain.py with FSDP2, which Accelerate does not offer on CPUs, and with units small enough for tiny
models: ACCELERATE_TORCH_DEVICE=cpu accelerate launch --config_file accelerate_configs/fsdp2.yaml -m tests.distributed.test_backends ...
"""

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from mm_utils.run.start import run_script
from mm_utils.training import prepared as backends
from mm_utils.training.prepared import configure_deepspeed, configure_fsdp
from scripts import pretrain
from tests.kit.objectives import tiny_objective
from tests.kit.processes import ROOT, ROUNDED, launch, losses, rows_of, weights


def run(flags: list[str], folder: Path, precision: str = "no", config: str = "fsdp2") -> None:
    """Two processes to the end of a run, in `folder`."""
    words = ["--config_file", str(ROOT / f"accelerate_configs/{config}.yaml"), "--mixed_precision", precision]
    words += ["--num_processes", "2", "--main_process_port", "0"]
    if config == "two_processes":
        words, environment = [*words, str(ROOT / "scripts/pretrain.py")], {"ACCELERATE_USE_CPU": "true"}
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
    flags += ["--save_steps", "2", "--eval_steps", "2"]
    plain, sharded = tmp_path / "plain", tmp_path / "sharded"
    pretrain.main([*flags, "--output_dir", str(plain)])
    run(flags, sharded, config=config)
    assert losses(sharded) == pytest.approx(losses(plain), rel=1e-5)
    assert_same(weights(sharded), weights(plain))
    found: list[dict[str, Any]] = [
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
    ],
)
def test_what_they_cannot_do_is_said_at_the_start(given: Any, reason: str) -> None:
    objective = tiny_objective("contrastive")
    configure = configure_fsdp if given.distributed_type == DistributedType.FSDP else configure_deepspeed
    with pytest.raises(ValueError, match=reason):
        configure(given, objective, 8)


if __name__ == "__main__":
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[method-assign,assignment]
    backends.MIN_BLOCK_PARAMETERS = 1000
    run_script(pretrain.main)
