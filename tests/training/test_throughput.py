"""Readings of the hardware, and when advice is given."""

import logging

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


def test_utilisation_on_this_machine():
    share = gpu_utilisation(CUDA)
    assert share is None or 0 <= share <= 1


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
    "waits",
    [
        (0.9,),
        (0.9, 0.9),  # the first line holds the start of the workers
        (0.9, 0.1, 0.9),
        (0.0, 0.9, 0.1, 0.9, 0.1),
        (0.0, 0.2, 0.2, 0.2),
    ],
)
def test_silent_while_the_loader_keeps_up(waits, said):
    Run().log(*waits)
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


def test_only_the_main_process_speaks(said):
    Run(main=False).log(0.5, 0.5, 0.5)
    assert said() == []


@pytest.mark.parametrize(
    ("workers", "wait", "advised"),
    [
        (2, 0.5, 4),  # twice as many, to halve the time of a step
        (0, 0.5, 1),
        (0, 0.75, 3),
        (1, 0.25, 2),
        (4, 0.75, 7),  # no more than there are cores
        (6, 1.0, 7),
    ],
)
def test_more_workers_while_there_are_cores(workers, wait, advised, said):
    run = Run(workers)
    run.log(0.0, wait, wait)
    [message] = said()
    assert message.startswith(f"data_wait is {wait:.2f};")
    assert f"(loader workers: {workers}, spare cores: 7)" in message
    assert message.endswith(f" Raise --dataloader_num_workers to {advised}.")


def test_cores_are_shared_with_the_other_processes(said, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    Run(1).log(0.0, 0.5, 0.5)
    [message] = said()
    assert "spare cores: 1)" in message
    assert "--dataloader_num_workers" not in message


def test_without_cores_to_spare_says_what_a_larger_model_costs(said):
    Run(7).log(0.0, 0.4, 0.6)
    [message] = said()
    assert message.startswith("data_wait is 0.50;")
    assert "2.0 times the compute" in message
    assert "--cache_features" not in message


def test_features_of_a_frozen_tower_can_be_cached(said):
    model = build()
    model.freeze("vision")
    Run(7, model).log(0.0, 0.5, 0.5)
    [message] = said()
    assert "--cache_features" in message
