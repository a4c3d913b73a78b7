"""What a checkpoint holds comes back: by name, whole, to any number of processes, sharded or not."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from transformers import TrainerState

from mm_utils import distributed
from mm_utils.checkpointing.files import STATE_FILE
from mm_utils.checkpointing.state import (
    OPTIMIZER_FILE,
    RUN_FILE,
    Snapshot,
    TrainingState,
    copy_to_host,
    load_optimizer,
    optimizer_tensors,
)
from mm_utils.distributed import full_tensor
from mm_utils.model import adapt
from mm_utils.model.adapt import add_adapters, load_weights
from mm_utils.objectives.joint import JointObjective
from mm_utils.training.optim import OptimizerArguments, build_optimizer
from tests.kit.objectives import sharded, tiny_objective
from tests.kit.processes import run_on_ranks
from tests.kit.tiny_run import Processor

KIND = "sigmoid_matching"  # temperature and bias: two vectors of one, of which one rank holds both
Parts = tuple[JointObjective, torch.optim.AdamW]


def parts(shard: bool = False, lora_rank: int = 0, **named: str) -> Parts:
    objective = tiny_objective(KIND)
    if lora_rank:
        objective.model.freeze("vision")
        add_adapters(objective.model, lora_rank)
    if shard:
        objective = sharded(objective)
    args: Any = OptimizerArguments(**named)  # type: ignore[arg-type]
    optimizer: Any = build_optimizer(objective.model, args, pretrained=False, device=torch.device("cpu"))
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
    processor: Any = Processor()
    main = distributed.rank() == 0
    accelerator: Any = SimpleNamespace(is_main_process=main, scaler=None, distributed_type=DistributedType.NO)
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
    straight, (objective, optimizer) = parts(optim="adafactor"), parts(optim="adafactor")
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
    whole, in_parts = tmp_path / "checkpoint-3", tmp_path / "sharded" / "checkpoint-3"
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
