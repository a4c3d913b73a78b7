"""What is placed how, and what is refused, with the reason."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import DistributedType

from mm_utils import distributed
from mm_utils.arguments import Parsed
from mm_utils.data.batches.order import GlobalOrder
from mm_utils.extras.placement.flags import Placement, PlacementArguments
from mm_utils.extras.placement.preparation import Apart
from mm_utils.extras.placement.split import Split
from mm_utils.extras.streams.flags import StreamingArguments
from mm_utils.objectives import Objective
from mm_utils.training.arguments import TrainingArguments
from tests.kit.objectives import tiny_model, tiny_objective

DATA = SimpleNamespace(order=object.__new__(GlobalOrder), features=None)
MACHINES = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU, scaler=None)


def split(placement: str, objective: Objective | None = None, data: Any = DATA, machines: Any = MACHINES, **args: Any):
    attached: Any = Placement.attach(Parsed([PlacementArguments(placement=placement)]))
    assert isinstance(attached, Apart)
    return attached.choose_split(TrainingArguments(**args), machines, objective or tiny_objective("contrastive"), data)


@pytest.fixture(autouse=True)
def four_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 4)


@pytest.mark.parametrize("wrong", ["", "apart:0", "apart:", "auto", "together:1", "apart:two", "elsewhere"])
def test_another_placement_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=f"--placement is {wrong}; give together, apart "):
        PlacementArguments(placement=wrong)


def test_a_given_split_is_taken_and_both_sides_have_a_process() -> None:
    assert split("apart:3") == Split(3, 1)
    assert split("apart") == Split(2, 2)
    assert Placement.attach(Parsed([PlacementArguments()])) is None
    with pytest.raises(ValueError, match=r"of 4 processes that leaves none for the texts\. Give at most apart:3"):
        split("apart:4")


def test_one_process_has_both_encoders(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 1)
    caplog.set_level(logging.INFO, logger="mm_utils")
    assert split("apart") is split("apart:2") is None
    assert "on the one process" in caplog.text


def test_shares_by_speed_are_of_pairs_and_not_of_streams() -> None:
    with pytest.raises(ValueError, match=r"--placement is apart; --balance assigns images and texts together"):
        PlacementArguments(balance=True, placement="apart")
    with pytest.raises(ValueError, match=r"--balance is set; a stream is assigned .* Drop it, or --streaming"):
        Placement.attach(Parsed([PlacementArguments(balance=True), StreamingArguments(streaming=True)]))


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "captioning": ("captioning, which needs an image and its text on one process", {"objective": "captioning"}),
    "matching": ("matching, which needs an image", {"objective": "contrastive_matching"}),
    "regions": ("regions, which needs an image", {"objective": "regions"}),
    "self_distillation": ("self_distillation, which needs further embeddings", {"objective": "self_distillation"}),
    "distillation": ("distillation, which needs further embeddings", {"objective": "distillation"}),
    "own": ("Uniformity, which needs further embeddings", {"objective": "own"}),
    "classifier": ("a Objective does not train two encoders", {"objective": lambda: Objective(tiny_model())}),
    "fsdp": ("FSDP2 divides", {"machines": SimpleNamespace(distributed_type=DistributedType.FSDP, scaler=None)}),
    "deepspeed": ("DeepSpeed div", {"machines": SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, scaler=None)}),
    "fp16": ("Use bf16", {"machines": SimpleNamespace(distributed_type=DistributedType.MULTI_GPU, scaler=object())}),
    "stream": ("--streaming assigns", {"data": SimpleNamespace(order=object(), features=None)}),
    "features": ("--cache_features has run", {"data": SimpleNamespace(order=DATA.order, features=object())}),
    "auto": ("--micro_batch_size auto tries", {"micro_batch_size": "auto"}),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_apart_is_refused(case: str) -> None:
    reason, given = REFUSED[case]
    if "objective" in given:
        made = given["objective"]
        given = given | {"objective": made() if callable(made) else tiny_objective(made)}
    with pytest.raises(ValueError, match=f"--placement is apart; .*{reason}.*[Tt]ogether|{reason}.*Give a number"):
        split("apart", **given)
