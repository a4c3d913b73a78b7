"""What is found before a run begins: disks and limits that are too small, devices that cannot, ranks that differ."""

import logging
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState

from mm_utils import preflight, ranks
from mm_utils.data import loaders as loaders_module
from mm_utils.data.loaders import LoaderArguments, Loaders
from mm_utils.data.ring import PixelRing
from tests.test_ranks import run_on_ranks

MIB = 2**20


@pytest.fixture(autouse=True)
def alone() -> None:
    """The processes' state, which a script has by its accelerator."""
    PartialState()


def free_space(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Let every disk have so many bytes free."""
    monkeypatch.setattr(
        os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_bfree=free, f_blocks=2 * free, f_frsize=1)
    )


# -- ranks that differ --------------------------------------------------------------------------------------------------


def join_ranks() -> None:
    rank, world = str(ranks.rank()), str(ranks.world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
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
    rank = ranks.rank()
    alike = {"learning_rate": 1e-3, "seed": 1, "output_dir": f"of-{rank}", "dataloader_num_workers": str(rank)}
    found = [message_of(preflight.agree_on_start, alike)]
    found.append(message_of(preflight.agree_on_start, {**alike, "learning_rate": 1e-3 if rank != 1 else 2e-3}))
    found.append(message_of(preflight.agree_on_start, alike if rank else {**alike, "extra": 1}))
    packages = {"torch": "2.9" if rank else "2.8"}
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(preflight, "versions", lambda: packages)
    found.append(message_of(preflight.agree_on_start, alike))
    packages.clear()
    monkeypatch.setattr(preflight, "code_digest", lambda: f"digest {rank // 2}")
    found.append(message_of(preflight.agree_on_start, alike))
    monkeypatch.undo()
    found.append(message_of(preflight.agree_on, "the data's fingerprint", "abc"))
    found.append(message_of(preflight.agree_on, "the data's fingerprint", "abc" if rank else "abd"))
    found.append(message_of(preflight.settle, "disk is full" if rank == 2 else None))
    return found


def test_ranks_that_differ_say_in_what_and_all_of_them_stop() -> None:
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


def test_a_single_process_agrees_with_itself() -> None:
    preflight.agree_on_start({"path": Path("a"), "rate": float("nan")})


def warn_on_ranks(folder: str) -> None:
    join_ranks()
    logging.basicConfig(filename=f"{folder}/{ranks.rank()}.log")
    preflight.settle(None, ["one machine is small"] if ranks.rank() else ["one machine is small", "another"])


def test_a_warning_of_several_ranks_is_given_once(tmp_path: Path) -> None:
    run_on_ranks(2, warn_on_ranks, str(tmp_path))
    said = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert said.count("one machine is small") == said.count("another") == 1


# -- devices ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "--mixed_precision is fp16; fp16 needs a GPU. Use bf16"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "fp8 needs a GPU"),
        (
            {"ACCELERATE_USE_CPU": "false", "CUDA_VISIBLE_DEVICES": "0,1"},
            "CUDA_VISIBLE_DEVICES is 0,1; .* sees no GPU",
        ),
        ({"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "0"}, None),
        ({"ACCELERATE_USE_CPU": "false", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, None),
    ],
)
def test_what_a_machine_without_gpus_cannot_do(
    variables: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in ({"ACCELERATE_USE_CPU": "true"} | variables).items():
        monkeypatch.setenv(name, value)
    if message is None:
        preflight.check_precision()
    else:
        with pytest.raises(ValueError, match=message):
            preflight.check_precision()


@pytest.mark.parametrize(
    ("precision", "capability", "message"),
    [
        ("bf16", (7, 5), "Old GPU computes none. Use fp16"),
        ("fp8", (8, 0), "Old GPU computes none. Use bf16"),
        ("bf16", (8, 0), None),
        ("fp8", (9, 0), None),
        ("fp16", (7, 0), None),
    ],
)
def test_what_an_old_gpu_cannot_do(
    precision: str, capability: tuple[int, int], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Old GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capability >= (8, 0))
    if message is None:
        preflight.check_precision()
    else:
        with pytest.raises(ValueError, match=message):
            preflight.check_precision()


def test_gpus_of_two_kinds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    preflight.check_devices(torch.device("cpu"))
    assert not caplog.text
    monkeypatch.setattr(preflight, "gather_object", lambda names: [*names, "H100", "A100", "H100"])
    preflight.check_devices(torch.device("cpu"))
    assert "Devices are A100, H100, cpu; every step takes as long as on the slowest" in caplog.text


# -- limits of the machine ----------------------------------------------------------------------------------------------


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """The limit of open files, put back afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_of_open_files_is_raised(limits: tuple[int, int]) -> None:
    hard = limits[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    raised = preflight.allow_open_files()
    assert raised is not None
    assert raised > 512 or hard == 512
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (raised, hard)
    assert preflight.allow_open_files() == raised


def loaders(workers: str, size: int = 224) -> Loaders:
    return Loaders(LoaderArguments(dataloader_num_workers=workers), torch.device("cpu"), 0, size, [0.5] * 3, [0.5] * 3)


def test_few_open_files(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    free_space(monkeypatch, 2**40)
    preflight.check_loading(loaders("0"), 64, 64)
    assert not caplog.text
    preflight.check_loading(loaders("2"), 64, 64)
    assert "ulimit -n is 256; data workers" in caplog.text
    caplog.clear()
    preflight.check_loading(loaders("0"), 64, 64, streaming=True)
    assert "ulimit -n is 256" in caplog.text


def test_slots_are_counted_as_the_loader_has_them() -> None:
    assert preflight._IN_FLIGHT == loaders_module._PREFETCH
    assert PixelRing(1, loaders_module._PREFETCH, 1, 2).slots == preflight._IN_RING


def test_a_container_with_little_shared_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free_space(monkeypatch, 64 * MIB)
    preflight.check_loading(loaders("0"), 256, 256)
    preflight.check_loading(loaders("1", size=32), 64, 64)
    assert not caplog.text
    with pytest.raises(
        ValueError, match=r"^/dev/shm has 64.0 MiB free; 4 data workers .* --dataloader_num_workers 0.$"
    ):
        preflight.check_loading(loaders("4"), 256, 256)


def test_shared_memory_that_may_suffice_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = 3 * 224**2 * 64
    free_space(monkeypatch, 9 * batch)
    preflight.check_loading(loaders("2"), 64, 64)
    assert "or pass --dataloader_num_workers 0." in caplog.text
    assert "--shm-size=1g" in caplog.text


def test_auto_takes_the_workers_that_find_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loaders_module, "cores_per_process", lambda: 9)
    free_space(monkeypatch, 3 * 12 * 3 * 224**2 * 64 + 1000)
    made = loaders("auto")
    assert made.workers == 8
    preflight.check_loading(made, 64, 64)
    assert made.workers == 3
    assert "so there will be 3." in caplog.text


def test_the_processes_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free_space(monkeypatch, 24 * 3 * 224**2 * 64)
    preflight.check_loading(loaders("2"), 64, 64)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="2 data workers in each of 8 processes"):
        preflight.check_loading(loaders("2"), 64, 64)


def test_a_streamed_batch_is_made_by_all_workers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    free_space(monkeypatch, 20 * 3 * 224**2 * 1024)
    with pytest.raises(ValueError, match="/dev/shm"):
        preflight.check_loading(loaders("8"), 1024, 1)
    preflight.check_loading(loaders("8"), 1024, 1, streaming=True)


# -- the output folder --------------------------------------------------------------------------------------------------


def test_folders_that_hold_other_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()

    def why(folder: str, **config: Any) -> str:
        return preflight.misplaced(Path(folder), config) or ""

    assert "it is the root of a disk. Give a folder of its own" in why("/")
    assert "it is your home folder" in why(str(tmp_path / "home"))
    assert "--train_file is data/pairs.jsonl, and" in why("data", train_file="data/pairs.jsonl")
    assert "--train_file is pairs.jsonl, and" in why(".", train_file="pairs.jsonl")
    assert "--validation_file is data/v.csv" in why("data/v.csv", validation_file="data/v.csv")
    assert "--dataset_dir is images" in why("images", dataset_dir="images")
    assert "--dataset_dir is images" in why("images/run", dataset_dir="images")
    assert "--dataset_name is images" in why("other/../images", dataset_name="images")
    assert "--model_name_or_path is images" in why("images", model_name_or_path="images")


def test_folders_that_are_the_runs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    settings = {"train_file": "data/pairs.jsonl", "model_name_or_path": "model", "dataset_name": "user/set", "seed": 1}
    for folder in ("outputs/mine", "data/run", "model/finetuned"):
        assert preflight.misplaced(Path(folder), settings) is None
    assert preflight.misplaced(Path("data"), {"train_file": "hf://data/x.parquet", "dataset_dir": None}) is None


def add_checkpoint(folder: Path, step: int, size: int) -> None:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    with open(path / "model.safetensors", "wb") as file:
        file.truncate(size)


@pytest.mark.parametrize(
    ("free", "there", "kept", "outcome"),
    [
        (30, 0, 2, ""),
        (29, 0, 2, "warning"),
        (10, 0, 2, "warning"),
        (9, 0, 2, "error"),
        (20, 1, 2, ""),
        (10, 2, 2, ""),
        (10, 5, 2, ""),
        (9, 2, 2, "error"),
        (20, 0, None, ""),
        (19, 0, None, "warning"),
    ],
)
def test_room_for_checkpoints(
    free: int,
    there: int,
    kept: int | None,
    outcome: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`free` in MiB; a checkpoint takes 10."""
    for step in range(there):
        add_checkpoint(tmp_path, step, 10 * MIB)
    free_space(monkeypatch, free * MIB)
    if outcome == "error":
        with pytest.raises(ValueError, match=rf"^{tmp_path} has {free}.0 MiB free; a checkpoint takes 10.0 MiB"):
            preflight.check_disk(tmp_path, 10 * MIB, kept)
    else:
        preflight.check_disk(tmp_path, 10 * MIB, kept)
    assert ("Free some, lower --save_total_limit" in caplog.text) == (outcome == "warning")


def test_a_real_disk_that_is_too_small(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting takes more rights")
    try:
        preflight.check_disk(tmp_path, MIB, 2)
        add_checkpoint(tmp_path, 1, 0)
        (tmp_path / "checkpoint-1" / "model.safetensors").write_bytes(b"x" * 3 * MIB)
        with pytest.raises(ValueError, match=r"has 1.0 MiB free; a checkpoint takes 3.0 MiB"):
            preflight.check_disk(tmp_path, 3 * MIB, 2)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
