"""Where the encoders are, and how many rows a process has, changes the speed alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mm_utils import distributed
from mm_utils.data.batches.order import EQUAL_SHARES, Division, GlobalOrder
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.placement import place_encoders, share_batches
from tests.kit.tiny_run import TinyRun, build

ARGUMENTS = {"max_steps": 3, "eval_steps": 100, "save_steps": 0, "logging_steps": 100, "micro_batch_size": "3"}
PLACES = {"vision_device": "cpu", "text_device": "cpu"}


def test_placed_encoders_learn_the_same(tmp_path: Path) -> None:
    learnt = []
    for name, places in (("together", {}), ("placed", PLACES)):
        (tmp_path / name).mkdir()
        trainer = build(TinyRun(tmp_path / name, arguments=ARGUMENTS | places), [])
        towers = (trainer.model.vision_model, trainer.model.text_model)
        hooks = [len(tower._forward_hooks) for tower in towers]
        assert hooks == ([1, 1] if places else [0, 0])
        trainer.train()
        learnt.append(dict(trainer.model.state_dict()))
    for name, value in learnt[0].items():
        assert torch.equal(learnt[1][name], value), name


def test_several_processes_and_heads_that_share_the_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, objective = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(model=SimpleNamespace(token_head=1))
    args: Any = TrainingArguments(text_device="cpu")
    with pytest.raises(
        ValueError, match=r"--text_device cpu is set; --objectives predicts words .* Drop --text_device"
    ):
        place_encoders(args, cpu, objective)  # type: ignore[arg-type]
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"--text_device cpu is set; there are 2 processes"):
        place_encoders(args, cpu, objective)  # type: ignore[arg-type]


def test_shares_are_one_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    data: Any = SimpleNamespace(order=object.__new__(GlobalOrder), loaders=SimpleNamespace(division=EQUAL_SHARES))
    share_batches(TrainingArguments(), data)
    assert data.loaders.division == EQUAL_SHARES
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    share_batches(TrainingArguments(rank_shares="2,1"), data)
    assert data.loaders.division == Division((2.0, 1.0))
    for wrong in ("2", "2,0", "2,1,1", "2,x"):
        with pytest.raises(ValueError, match=f"rank_shares is {wrong}; there are 2 processes. Give a number above 0"):
            share_batches(TrainingArguments(rank_shares=wrong), data)
