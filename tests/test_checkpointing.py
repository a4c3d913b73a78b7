"""Checkpoints: folders are complete or absent, and what they hold comes back, to any number of processes, sharded or not."""

import json
import logging
import os
import shutil
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from transformers import TrainerState

from mm_utils import distributed
from mm_utils.checkpointing import files
from mm_utils.checkpointing.files import (
    STATE_FILE,
    SUMS_FILE,
    checkpoint_folders,
    find_checkpoint,
    remove_unfinished,
    seal_model,
    set_aside,
    verify,
    write_checkpoint,
)
from mm_utils.checkpointing.state import (
    OPTIMIZER_FILE,
    RUN_FILE,
    Snapshot,
    TrainingState,
    copy_to_host,
    load_optimizer,
    optimizer_tensors,
)
from mm_utils.checkpointing.writer import CheckpointWriter, remove_old_checkpoints
from mm_utils.distributed import RunError
from mm_utils.files import changed_since_sums, sha256
from mm_utils.model import adapt
from mm_utils.model.adapt import add_adapters, load_weights
from mm_utils.objectives.objective import JointObjective
from mm_utils.sharding import full_tensor
from mm_utils.training.arguments import OptimizerArguments
from mm_utils.training.optim import build_optimizer
from scripts import verify_checkpoints
from tests.kit.objectives import sharded, tiny_objective
from tests.kit.processes import run_on_ranks
from tests.kit.tiny_run import Processor

FILES = {"model.safetensors": b"weights" * 9, "deep/er/tokens.txt": b"a\nb\n"}


def write_files(folder: Path, step: int = 1) -> None:
    for name, content in {**FILES, STATE_FILE: b'{"global_step": %d}' % step}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def saved(output_dir: Path, *steps: int) -> Path:
    for step in steps:
        write_checkpoint(output_dir / f"checkpoint-{step}", partial(write_files, step=step))
    return output_dir / f"checkpoint-{steps[-1]}"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def steps_in(output_dir: Path) -> list[int]:
    return [files.step_of(path) for path in checkpoint_folders(output_dir)]


# -- writing ------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names of open files come from /proc")
def test_all_is_on_the_disk_before_it_has_its_name_and_before_older_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    events = []
    fsync = os.fsync
    rename = Path.rename

    def noted_fsync(handle):
        path = os.readlink(f"/proc/self/fd/{handle}")
        events.append(("fsync", path, os.path.getsize(path) if os.path.isfile(path) else 0))
        fsync(handle)

    def noted_rename(path, target):
        events.append(("rename", str(path), 0))
        return rename(path, target)

    monkeypatch.setattr("os.fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    final = saved(tmp_path, 2)
    remove_old_checkpoints(tmp_path, 1, [])
    temporary = str(tmp_path / ".checkpoint-2.tmp")
    renamed = events.index(("rename", temporary, 0))
    before = events[:renamed]
    after = events[renamed + 1 :]
    for path in (path for path in final.rglob("*") if path.is_file()):
        name = f"{temporary}/{path.relative_to(final)}"
        assert ("fsync", name, path.stat().st_size) in before, f"{path.name}, or its end, is not on the disk"
    assert {f"{temporary}{folder}" for folder in ("", "/deep", "/deep/er")} <= {path for _, path, _ in before}
    assert before[-1] == ("fsync", temporary, 0)
    assert after == [("fsync", str(tmp_path), 0), ("rename", str(tmp_path / "checkpoint-1"), 0)]


def test_leftovers_of_a_killed_run_are_removed_and_a_replaced_checkpoint_is_restored(tmp_path: Path) -> None:
    path = saved(tmp_path, 1, 2, 3)
    for name in (".checkpoint-4.tmp", ".checkpoint-1.removed"):
        shutil.copytree(path, tmp_path / name)
    path.rename(tmp_path / ".checkpoint-3.replaced")  # killed between the two renames
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / ".checkpoint-2.replaced")  # killed after them
    remove_unfinished(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


# -- finding ------------------------------------------------------------------------------------------------------------


def test_the_latest_is_the_highest_number_that_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find_checkpoint("latest", tmp_path) is None
    saved(tmp_path, 10, 9, 100)
    for name in ("checkpoint-1000.superseded", ".checkpoint-1000.tmp", "checkpoint-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-2000").symlink_to(tmp_path / "checkpoint-9")
    os.utime(tmp_path / "checkpoint-9", (9e9, 9e9))  # the clock is of no account
    assert steps_in(tmp_path) == [9, 10, 100]
    assert find_checkpoint("latest", tmp_path) == tmp_path / "checkpoint-100"
    flip(tmp_path / "checkpoint-100/model.safetensors")
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint("latest", tmp_path) == tmp_path / "checkpoint-10"
    assert "checkpoint-100 is damaged and passed over: model.safetensors is not what was written" in caplog.text
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}" / SUMS_FILE).write_bytes(b"")
    with pytest.raises(ValueError, match=r"none of the checkpoints in .* is whole"):
        find_checkpoint("latest", tmp_path)


def test_damage_behind_the_first_block_of_a_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(2**22 + 9))
    seal_model(tmp_path)
    assert verify(tmp_path) == []
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    [wrong] = verify(tmp_path)
    assert wrong.startswith("model.safetensors")


def test_the_sums_of_a_model_name_its_files(tmp_path: Path) -> None:
    others = ("README.md", "log.txt", "results.json")  # somebody may write into these
    for name in ("model.safetensors", "config.json", "fusion.py", "dual_encoder/config.json", *others):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    seal_model(tmp_path)
    lines = (tmp_path / SUMS_FILE).read_text().splitlines()
    assert [line.split("  ")[1] for line in lines] == [
        *("config.json", "dual_encoder/config.json", "fusion.py", "model.safetensors")
    ]
    (tmp_path / "config.json").unlink()
    (tmp_path / "README.md").write_text("my own words")
    [wrong] = verify(tmp_path)
    assert wrong.startswith("config.json cannot be read")


def test_what_was_changed_in_a_finished_model_is_found_and_only_what_was_touched_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    read = []
    (folder / "dual_encoder").mkdir(parents=True)
    for name in ("model.safetensors", "config.json", "tokenizer.json", "dual_encoder/config.json"):
        (folder / name).write_text(name)
    seal_model(folder)
    monkeypatch.setattr("mm_utils.files.sha256", lambda path: read.append(path.name) or sha256(path))
    time.sleep(0.02)  # the system's clock of files has steps of some milliseconds
    os.utime(folder / SUMS_FILE)
    assert (changed_since_sums(folder), read) == ([], [])
    copied = shutil.copytree(folder, tmp_path / "copy")
    for name in ("config.json", "tokenizer.json"):
        (copied / name).touch()
    assert changed_since_sums(copied) == []
    assert {"config.json", "tokenizer.json"} <= set(read)
    time.sleep(0.02)
    read.clear()
    os.utime(copied / SUMS_FILE)
    assert (changed_since_sums(copied), read) == ([], [])
    dates = (folder / "model.safetensors").stat()
    (tmp_path / "older").write_text("other weights")
    os.utime(tmp_path / "older", ns=(dates.st_atime_ns, dates.st_mtime_ns - 10**9))
    (tmp_path / "older").replace(folder / "model.safetensors")  # its date of writing is before that of the sums
    (folder / "dual_encoder/config.json").write_text("not what is loaded")
    (folder / "tokenizer.json").unlink()
    assert (changed_since_sums(folder), read) == (["model.safetensors", "tokenizer.json"], ["model.safetensors"])
    (folder / SUMS_FILE).unlink()
    assert changed_since_sums(folder) == []


# -- removing -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("limit", "keep", "left"),
    [(1, [], [10]), (2, [], [9, 10]), (1, [1], [1, 10]), (5, [], [1, 2, 9, 10])],
)
def test_the_newest_and_the_best_stay(limit: int, keep: list[int], left: list[int], tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 9, 10)
    remove_old_checkpoints(tmp_path, limit, keep)
    assert steps_in(tmp_path) == left


def test_checkpoints_after_the_resumed_step_are_set_aside(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "checkpoint-2.superseded").mkdir()  # of an earlier time
    set_aside(tmp_path, 1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2.superseded"]
    assert (tmp_path / "checkpoint-2.superseded/model.safetensors").exists()


def test_a_checkpoint_stays_until_callbacks_which_push_it_were_told(tmp_path: Path) -> None:
    def write(folder):
        (folder / STATE_FILE).write_text("{}")

    writer = CheckpointWriter(tmp_path, 1)
    snapshot = SimpleNamespace(weights={"weight": torch.ones(2)}, write=write)
    for step in (1, 2):
        writer.start(step, snapshot, ())  # type: ignore[arg-type]
    writer.wait()
    assert steps_in(tmp_path) == [1, 2]
    assert [writer.saved(), writer.saved(), writer.saved()] == [1, 2, 0]
    writer.start(3, snapshot, ())  # type: ignore[arg-type]
    writer.wait()
    assert steps_in(tmp_path) == [3]


# -- the script that reads them ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("damaged", ["checkpoint-10", "model"])
def test_damage_is_told_by_place_and_file(damaged: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 9, 10)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    seal_model(tmp_path)
    flags = ["--output_dir", str(tmp_path)]
    with caplog.at_level(logging.INFO, "scripts.verify_checkpoints"):
        assert verify_checkpoints.main(flags) == {"checkpoints": 2}
        flip(tmp_path / damaged.removeprefix("model") / "model.safetensors")
        with pytest.raises(RunError, match=rf"Damaged in .*: {damaged}\. Restore"):
            verify_checkpoints.main(flags)
    [last] = [line for line in caplog.text.splitlines() if "SHA-256 differs" in line]
    assert last.startswith(f"{damaged} ")
    assert "model.safetensors" in last


def test_a_folder_without_checkpoints_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it holds no checkpoint-N folder"):
        verify_checkpoints.main(["--output_dir", str(tmp_path)])


# -- what a checkpoint holds -------------------------------------------------------------------------------------------
KIND = "sigmoid_matching"  # temperature and bias: two vectors of one, of which one rank holds both
Parts = tuple[JointObjective, torch.optim.AdamW]


def parts(shard: bool = False, lora_rank: int = 0, **named: str) -> Parts:
    objective = tiny_objective(KIND)
    if lora_rank:
        objective.model.freeze("vision")
        add_adapters(objective.model, lora_rank)
    if shard:
        objective = sharded(objective)
    args = OptimizerArguments(**named)  # type: ignore[arg-type]
    optimizer = build_optimizer(objective.model, args, pretrained=False, device=torch.device("cpu"))
    return objective, optimizer


def learn(objective: JointObjective, optimizer: torch.optim.AdamW, steps: int) -> None:
    """Steps whose gradients are functions of the weights alone, the same however these are sharded."""
    for _ in range(steps):
        for parameter in objective.parameters():
            if parameter.requires_grad:
                parameter.grad = (parameter.detach() * 3).cos()
        optimizer.step()


def snapshot_of(objective: JointObjective, optimizer: torch.optim.AdamW) -> Snapshot:
    state = TrainerState(global_step=3, log_history=[{"step": 1, "loss": 0.5}])
    processor = Processor()
    main = distributed.rank() == 0
    accelerator = SimpleNamespace(is_main_process=main, scaler=None, distributed_type=DistributedType.NO)
    captured = TrainingState(accelerator, Path(), processor, objective, optimizer)
    return captured.capture(state, {"identity": {"seed": 1}})


def save(folder: Path, shard: bool = False, lora_rank: int = 0) -> dict[str, torch.Tensor]:
    trained = parts(shard, lora_rank)
    learn(*trained, 2)
    snapshot = snapshot_of(*trained)
    if distributed.rank() == 0:
        folder.mkdir()
        snapshot.write(folder)
    return everything(*trained)


def load(folder: Path, shard: bool = False, lora_rank: int = 0) -> list[dict[str, torch.Tensor]]:
    """What is loaded, and what it becomes in a further step."""
    objective, optimizer = parts(shard, lora_rank)
    load_weights(objective.model, folder)
    load_optimizer(optimizer, objective, folder)
    loaded = everything(objective, optimizer)
    learn(objective, optimizer, 1)
    return [loaded, everything(objective, optimizer)]


def everything(*trained: Any) -> dict[str, torch.Tensor]:
    """All that training changes, whole."""
    objective, optimizer = trained
    found = {f"weight {name}": value for name, value in objective.model.state_dict().items()}
    found |= {f"optimizer {name}": value for name, value in optimizer_tensors(optimizer, objective).items()}
    return {name: full_tensor(value.detach()).clone().reshape(-1) for name, value in found.items()}


def assert_same(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_all_that_training_changes_comes_back_bit_for_bit(lora_rank: int, tmp_path: Path) -> None:
    if lora_rank:
        pytest.importorskip("peft")
    right = save(tmp_path / "checkpoint-3", lora_rank=lora_rank)
    assert_same(load(tmp_path / "checkpoint-3", lora_rank=lora_rank)[0], right)
    assert (tmp_path / "checkpoint-3" / adapt.FILE).exists() == bool(lora_rank)
    assert any(name.endswith("exp_avg_sq") for name in right)
    assert {"optimizer model.logit_bias|step", "weight logit_bias"} <= right.keys()
    assert TrainerState.load_from_json(str(tmp_path / "checkpoint-3" / STATE_FILE)).global_step == 3
    assert json.loads((tmp_path / "checkpoint-3" / RUN_FILE).read_text()) == {"identity": {"seed": 1}, "scaler": None}
    endings = {path.suffix for path in (tmp_path / "checkpoint-3").iterdir()}
    assert endings == {".safetensors", ".json", ".py"}, "no file is a pickle"


def test_adafactor_comes_back(tmp_path: Path) -> None:
    """Its state has other shapes than the parameters."""
    straight = parts(optim="adafactor")
    (objective, optimizer) = parts(optim="adafactor")
    learn(*straight, 3)
    learn(objective, optimizer, 2)
    save_file(optimizer_tensors(optimizer, objective), tmp_path / OPTIMIZER_FILE)
    optimizer.state.clear()
    load_optimizer(optimizer, objective, tmp_path)
    learn(objective, optimizer, 1)
    assert_same(everything(objective, optimizer), everything(*straight))


def test_moments_lie_in_memory_as_their_parameters(tmp_path: Path) -> None:
    """A fused optimizer on a GPU refuses others, and convolutions are channels-last."""
    save(tmp_path / "checkpoint-3")
    objective, optimizer = parts()
    adapt.use_channels_last(objective.model.vision_model)
    load_optimizer(optimizer, objective, tmp_path / "checkpoint-3")
    assert any(not parameter.is_contiguous() for parameter in optimizer.state)
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].stride() == state["exp_avg_sq"].stride() == parameter.stride()


def save_and_load(written: Path, given: Path) -> tuple[Any, Any]:
    return save(written, shard=True), load(given, shard=True)


def test_sharded_and_whole_read_each_other(tmp_path: Path) -> None:
    """And a step further both are where one is that was never stored."""
    whole = tmp_path / "checkpoint-3"
    in_parts = tmp_path / "sharded" / "checkpoint-3"
    in_parts.parent.mkdir()
    saved = save(whole)
    on_ranks = run_on_ranks(2, save_and_load, in_parts, whole)
    straight = parts()
    learn(*straight, 3)
    for loaded, goes_on in (*(read for _, read in on_ranks), load(in_parts)):
        assert_same(loaded, saved)
        assert_same(goes_on, everything(*straight))
    for written, _ in on_ranks:
        assert_same(written, saved)


def test_a_copy_holds_tied_weights_once_and_is_whole() -> None:
    weight = torch.rand(4, 3)
    tied = {"a": weight, "b": weight, "view": weight.t()}
    found = copy_to_host(tied, True)
    assert_same(found, tied)
    assert found["view"].is_contiguous()
    assert found["a"].data_ptr() == found["b"].data_ptr() != weight.data_ptr()
    assert copy_to_host(tied, False) == {}


def test_training_goes_on_while_a_snapshot_is_written(tmp_path: Path) -> None:
    """Weights, optimizer state, log and configuration change after the copy; what is written does not."""
    objective, optimizer = parts()
    learn(objective, optimizer, 1)
    right = everything(objective, optimizer)
    snapshot = snapshot_of(objective, optimizer)
    learn(objective, optimizer, 2)
    (tmp_path / "checkpoint-3").mkdir()
    snapshot.write(tmp_path / "checkpoint-3")
    assert_same(load(tmp_path / "checkpoint-3")[0], right)


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    save(folder)
    objective, _ = parts()
    objective.model.vision_model.requires_grad_(False)
    optimizer = build_optimizer(objective.model, OptimizerArguments(), pretrained=False, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"parameters that are not trained now, such as model\.vision_model"):
        load_optimizer(optimizer, objective, folder)
