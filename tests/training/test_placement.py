"""Where the image encoder is changes the speed alone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mm_utils import distributed
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.placement import place_encoders
from tests.kit.tiny_run import TinyRun, build

ARGUMENTS = {"max_steps": 3, "eval_steps": 100, "save_steps": 0, "logging_steps": 100, "micro_batch_size": "3"}
PLACES = {"vision_device": "cpu"}


def test_a_placed_encoder_learns_the_same(tmp_path: Path) -> None:
    learnt = []
    for name, places in (("together", {}), ("placed", PLACES)):
        (tmp_path / name).mkdir()
        trainer = build(TinyRun(tmp_path / name, arguments=ARGUMENTS | places), [])
        towers = (trainer.model.vision_model, trainer.model.text_model)
        hooks = [len(tower._forward_hooks) for tower in towers]
        assert hooks == ([1, 0] if places else [0, 0])
        trainer.train()
        learnt.append(dict(trainer.model.state_dict()))
    for name, value in learnt[0].items():
        assert torch.equal(learnt[1][name], value), name


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu: Any = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"--vision_device is cpu; there are 2 processes"):
        place_encoders(TrainingArguments(vision_device="cpu"), cpu, SimpleNamespace())  # type: ignore[arg-type]
