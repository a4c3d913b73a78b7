"""Faults that are found at the start: ranks that differ, devices that are too old, launchers that have ended."""

import json
import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from mm_utils import distributed
from mm_utils.arguments import parse_args
from mm_utils.model.checks import check_model
from mm_utils.run import checks
from mm_utils.run.flags import PRETRAINING
from mm_utils.run.start import make_accelerator
from tests.kit.processes import fork, read_report, wait_until
from tests.kit.ranks import let_accelerate_find_ranks, run_on_ranks

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl and /proc are of Linux")
ROOT = Path(__file__).parents[2]


# -- launchers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["HOROVOD_RANK", "HOROVOD_SIZE"])
def test_horovod_is_refused_with_what_to_use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check_launcher()
    monkeypatch.setenv(name, "0")
    with pytest.raises(distributed.RunError, match=r"horovodrun.* Use accelerate launch or torchrun, or Ray"):
        make_accelerator()


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({}, "1 of the 4 GPUs of this machine train"),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "8"}, "2 of the 4 GPUs of this machine train"),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}, None),
        ({"WORLD_SIZE": "8"}, None),  # a launcher that does not say how many are here
    ],
)
def test_gpus_that_do_not_train_are_reported(
    variables: dict[str, str], line: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO, "mm_utils"):
        checks.report_launch(torch.device("cpu"))
        assert not caplog.messages
        checks.report_launch(torch.device("cuda"))
    assert [message.partition(",")[0] for message in caplog.messages] == ([line] if line else [])


@pytest.mark.parametrize(
    ("words", "given", "shared", "warned"),
    [
        (["--nnodes=1:4", "pretrain.py"], None, "True", "1:4"),
        (["--nnodes", "2:3", "pretrain.py", "--nnodes", "1"], None, "True", "2:3"),
        (["pretrain.py"], "1:2", "True", "1:2"),
        (["--nnodes=1:4", "pretrain.py"], None, "False", None),  # the variable is set
        (["--nnodes=4", "pretrain.py"], "1:2", "True", None),
        (["--nnodes=4:4", "pretrain.py"], None, "True", None),
        (["pretrain.py"], None, None, None),
    ],
)
def test_an_elastic_launch_that_would_end_is_reported(
    words: list[str],
    given: str | None,
    shared: str | None,
    warned: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(checks, "_command", lambda _: ["/usr/bin/python", "/usr/bin/torchrun", *words])
    for name, value in (("PET_NNODES", given), ("TORCHELASTIC_USE_AGENT_STORE", shared)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    checks.report_launch(torch.device("cpu"))
    assert len(caplog.messages) == (warned is not None)
    if warned:
        assert caplog.messages[0].startswith(
            f"--nnodes is {warned} and TORCH_DISABLE_SHARE_RDZV_TCP_STORE is not set;"
        )


# -- ranks that differ --------------------------------------------------------------------------------------------------
def join_ranks() -> None:
    let_accelerate_find_ranks()
    PartialState(cpu=True)


def message_of(check: Any, *args: Any) -> str | None:
    try:
        check(*args)
    except ValueError as error:
        return str(error)
    return None


def disagreements() -> list[str | None]:
    """On each of three ranks, the messages of several checks."""
    join_ranks()
    rank = distributed.rank()
    own = ["--output_dir", f"of-{rank}", "--dataloader_num_workers", str(rank), "--image_root", str(rank)]
    alike = parse_args(*PRETRAINING, argv=own).common
    found = [message_of(checks.check_equal_start, alike)]
    found.append(message_of(checks.check_equal_start, {**alike, "learning_rate": 1e-3 if rank != 1 else 2e-3}))
    found.append(message_of(checks.check_equal_start, alike if rank else {**alike, "extra": 1}))
    packages = {"torch": "2.9" if rank else "2.8"}
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(checks, "versions", lambda: packages)
    found.append(message_of(checks.check_equal_start, alike))
    packages.clear()
    monkeypatch.setattr(checks, "code_digest", lambda: f"digest {rank // 2}")
    found.append(message_of(checks.check_equal_start, alike))
    monkeypatch.undo()
    found.append(message_of(distributed.check_equal_on_all_ranks, {"the data's fingerprint": "abc"}))
    found.append(
        message_of(distributed.check_equal_on_all_ranks, {"the data's fingerprint": "abc" if rank else "abd"})
    )
    found.append(message_of(distributed.raise_everywhere, "disk is full" if rank == 2 else None))
    return found


def test_ranks_that_differ_all_stop_with_the_difference() -> None:
    [found, *others] = run_on_ranks(3, disagreements)
    assert all(other == found for other in others)
    alike, rate, extra, version, code, agreed, data, full = found
    assert alike is None
    assert agreed is None
    assert "--learning_rate is 0.001 on ranks 0, 2 and 0.002 on rank 1; it differs between processes. " in rate
    assert "--extra is 1 on rank 0 and missing on ranks 1, 2;" in extra
    assert 'torch is "2.8" on rank 0 and "2.9" on ranks 1, 2;' in version
    assert 'the code of mm_utils is "digest 0" on ranks 0, 1 and "digest 1" on rank 2;' in code
    assert 'the data\'s fingerprint is "abd" on rank 0' in data
    assert full == "disk is full"
    assert all("\n" not in message for message in found if message)


def warn_on_ranks(folder: str) -> None:
    join_ranks()
    logging.basicConfig(filename=f"{folder}/{distributed.rank()}.log")
    distributed.raise_everywhere(
        None, ["one machine is small"] if distributed.rank() else ["one machine is small", "another"]
    )


def test_a_warning_of_several_ranks_is_given_once(tmp_path: Path) -> None:
    run_on_ranks(2, warn_on_ranks, str(tmp_path))
    said = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert said.count("one machine is small") == said.count("another") == 1


# -- devices ------------------------------------------------------------------------------------------------------------
GPU = {"ACCELERATE_USE_CPU": "false"}
PRECISIONS: list[tuple[str, dict[str, str], tuple[int, int] | None, str | None]] = [
    # the precision, further variables, what the GPU is capable of, and what the message says
    ("fp16", {}, None, "--mixed_precision is fp16; fp16 needs a GPU. Use bf16"),
    ("fp8", {}, None, "fp8 needs a GPU"),
    ("no", {**GPU, "CUDA_VISIBLE_DEVICES": "0,1"}, None, "CUDA_VISIBLE_DEVICES is 0,1; .* sees no GPU"),
    ("no", {"CUDA_VISIBLE_DEVICES": "0"}, None, None),
    ("no", {**GPU, "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None, None),
    ("bf16", {}, None, None),
    ("bf16", GPU, (7, 5), "Old GPU computes none. Use fp16"),
    ("fp8", GPU, (8, 0), "Old GPU computes none. Use bf16"),
    ("bf16", GPU, (8, 0), None),
    ("fp8", GPU, (9, 0), None),
    ("fp16", GPU, (7, 0), None),
]


@pytest.mark.parametrize(("precision", "variables", "capability", "message"), PRECISIONS)
def test_precisions_that_a_machine_refuses(
    precision: str, variables: dict[str, str], capability: tuple[int, int] | None, message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in ({"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": precision} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Old GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capability >= (8, 0))
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        checks.check_precision()


def test_gpus_of_two_kinds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    alone: Any = SimpleNamespace(device=torch.device("cpu"), distributed_type=DistributedType.NO)
    checks.check_devices(alone)
    assert not caplog.text
    monkeypatch.setattr(checks, "gather_object", lambda names: [*names, "H100", "A100", "H100"])
    checks.check_devices(alone)
    assert "Devices are A100, H100, cpu; every step takes as long as on the slowest. Train on devices" in caplog.text


# -- launchers -----------------------------------------------------------------------------------------------------------
@LINUX
def test_launchers_are_known_by_their_command(tmp_path: Path, children: list[int]) -> None:
    for name, known in (("torchrun", True), ("accelerate", True), ("pretrain.py", False), ("accelerate.sh", False)):
        (tmp_path / name).write_text("import time\ntime.sleep(600)\n")
        process = subprocess.Popen([sys.executable, str(tmp_path / name), "launch"])
        children.append(process.pid)
        command = Path(f"/proc/{process.pid}/cmdline")
        assert wait_until(partial(_mentions, command, name))
        assert checks._is_launcher(process.pid) == known
    assert not checks._is_launcher(2**22 + 1)


def _mentions(path: Path, word: str) -> bool:
    return word in path.read_text()


def test_forked_processes_tokenize_with_one_thread(children: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    checks.fork_without_tokenizer_threads()
    _, reading = fork(children, lambda report: report(os.environ["TOKENIZERS_PARALLELISM"]))
    assert read_report(reading) == "false\n"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


# -- the model that is named --------------------------------------------------------------------------------------------
def write_config(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("outputs/mien", "there is no such folder. Did you mean outputs/mine[?] Give the folder of a run"),
        ("./nowhere/at/all", "there is no such folder. Give the folder of a run, or a Hub id such as owner/name"),
        ("mine", "there is no such folder"),
        ("outputs/mine/config.json", "there is no such folder"),
        ("outputs/stopped", "this folder holds no model. Give a checkpoint in it, such as outputs/stopped/checkpoint-12"),
        ("outputs", "this folder holds no model. Give the folder of a run that has ended"),
        ("a vit", "that is a vit, .* give scripts/pretrain.py --vision_model_name_or_path 'a vit'"),
        ("bert", "that is a bert, .* give scripts/pretrain.py --text_model_name_or_path bert"),
        ("llava", "that is a llava, .* --vision_model_name_or_path llava and --text_model_name_or_path llava"),
    ],
)  # fmt: skip
def test_a_model_that_is_none_is_answered_with_what_to_give(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "outputs/mine", model_type="fusion-dual-encoder")
    for step in (2, 12):
        (tmp_path / f"outputs/stopped/checkpoint-{step}").mkdir(parents=True)
    for kind in ("vit", "bert", "llava"):
        write_config(tmp_path / ("a vit" if kind == "vit" else kind), model_type=kind)
    with pytest.raises(ValueError, match=rf"^--model_name_or_path is {name}; {message}"):
        check_model(name)


# -- a machine with a GPU, and a run on its CPUs -------------------------------------------------------------------------
PRETENDED_GPU = """
import runpy, sys, torch

def refuse(*_, **__):
    raise AssertionError("a run on CPUs has used the GPU")

torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
torch.cuda._lazy_init = torch.cuda.mem_get_info = torch.cuda.get_device_properties = torch.Tensor.cuda = refuse
torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None  # torch itself asks in each step
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_run_on_cpus_leaves_the_gpu_alone(tmp_path: Path) -> None:
    flags = [
        "--max_steps", "2", "--max_train_samples", "128", "--max_eval_samples", "8", "--output_dir",
        str(tmp_path / "run"),
    ]  # fmt: skip
    flags += ["--micro_batch_size", "32", "--global_batch_size", "64", "--save_steps", "1"]
    words = [sys.executable, "-c", PRETENDED_GPU, "scripts/pretrain.py", *flags]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "1 x cpu" in done.stdout + done.stderr
    assert (tmp_path / "run/model.safetensors").is_file()
