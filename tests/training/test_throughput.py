"""Readings of the hardware, and when advice is given."""

import logging
import re

import pytest
import torch
from transformers import TrainerControl, TrainerState

from mm_utils.training.throughput import LoaderAdvice, gpu_utilisation
from tests.kit.models import build

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_utilisation_is_a_share(monkeypatch):
    monkeypatch.setattr("torch.cuda.utilization", lambda device: 37)
    assert gpu_utilisation(CUDA) == pytest.approx(0.37)
    assert gpu_utilisation(CPU) is None


@pytest.mark.parametrize("error", [ModuleNotFoundError("nvidia-ml-py"), RuntimeError("driver"), OSError()])
def test_utilisation_never_raises(error, monkeypatch):
    def fail(device):
        raise error

    monkeypatch.setattr("torch.cuda.utilization", fail)
    assert gpu_utilisation(CUDA) is None


class Run:
    """A run whose log is written by hand."""

    def __init__(self, workers: int = 2, model: torch.nn.Module | None = None, main: bool = True):
        self.advice, self.model = LoaderAdvice(lambda: workers), model or build()
        self.state = TrainerState(is_world_process_zero=main)
        self.advice.on_train_begin(None, self.state, TrainerControl(), model=self.model)

    def log(self, *waits: float, **other: float) -> None:
        for wait in waits:
            self.write({"loss": 1.0, "data_wait": wait, **other})

    def write(self, logs: dict[str, float]) -> None:
        self.advice.on_log(None, self.state, TrainerControl(), model=self.model, logs=logs)


@pytest.fixture
def said(caplog, monkeypatch):
    """Warnings so far, on a machine of 8 cores, of which one trains."""
    monkeypatch.setattr("mm_utils.distributed.available_cores", lambda: 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    caplog.set_level(logging.WARNING, logger="mm_utils")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "mm_utils.training.throughput"]


@pytest.mark.parametrize(
    ("waits", "main"),
    [
        ((0.9,), True),
        ((0.9, 0.9), True),  # the first line holds the start of the workers
        ((0.9, 0.1, 0.9), True),
        ((0.0, 0.9, 0.1, 0.9, 0.1), True),
        ((0.0, 0.2, 0.2, 0.2), True),
        ((0.5, 0.5, 0.5), False),  # another process
    ],
)
def test_silent_while_the_loader_keeps_up(waits, main, said):
    Run(main=main).log(*waits)
    assert said() == []


def test_speaks_at_the_second_line_and_once_a_run(said):
    run = Run()
    run.log(0.0, 0.5)
    assert said() == []
    run.log(0.5)
    assert len(said()) == 1
    run.log(0.0, 0.9, 0.9, 0.9)
    assert len(said()) == 1
    run.advice.on_train_begin(None, run.state, TrainerControl(), model=run.model)
    run.log(0.9, 0.9)
    assert len(said()) == 1
    run.log(0.9)
    assert len(said()) == 2


def test_an_evaluation_in_between_changes_nothing(said):
    run = Run()
    run.write({"eval_text_to_image_recall@1": 0.1})
    run.log(0.0, 0.5)
    run.write({"eval_text_to_image_recall@1": 0.2})
    assert said() == []
    run.log(0.5)
    assert len(said()) == 1


@pytest.mark.parametrize(
    ("workers", "processes", "frozen", "waits", "message"),
    [
        (
            2,
            1,
            False,
            (0.5, 0.5),
            r"^data_wait is 0.50;.*\(loader workers: 2, spare cores: 7\).*to 4\.$",
        ),  # half the time
        (0, 1, False, (0.5, 0.5), r"\(loader workers: 0, spare cores: 7\).* Raise --dataloader_num_workers to 1\.$"),
        (0, 1, False, (0.75, 0.75), r"^data_wait is 0.75;.* Raise --dataloader_num_workers to 3\.$"),
        (1, 1, False, (0.25, 0.25), r" Raise --dataloader_num_workers to 2\.$"),
        (4, 1, False, (0.75, 0.75), r" Raise --dataloader_num_workers to 7\.$"),  # no more than there are cores
        (6, 1, False, (1.0, 1.0), r" Raise --dataloader_num_workers to 7\.$"),
        (1, 4, False, (0.5, 0.5), r"spare cores: 1\)(?!.*--dataloader_num_workers)"),
        (7, 1, False, (0.4, 0.6), r"^data_wait is 0.50;(?!.*--cache_features).*2\.0 times the compute"),
        (7, 1, True, (0.5, 0.5), "--cache_features"),
    ],
)
def test_what_helps_is_advised(workers, processes, frozen, waits, message, said, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    model = build()
    if frozen:
        model.freeze("vision")
    Run(workers, model).log(0.0, *waits)
    [found] = said()
    assert re.search(message, found), found
