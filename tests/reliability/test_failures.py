"""The first failure of real processes is reported once and ends all of them."""

import os
import signal
from pathlib import Path

import pytest
import torch

from mm_utils import distributed
from mm_utils.reliability import failures
from tests.kit.ranks import run_on_ranks
from tests.kit.runs import Ended, after_step, endless, launch, launch_together, steps

CPU = torch.device("cpu")


def fails_with_a_bug() -> None:
    for step, _, _ in steps(10**6):
        if step == 5 and distributed.rank() == 1:
            raise KeyError("a bug")


def test_a_failure_is_reported_once_and_ends_all_processes() -> None:
    endings = launch(3, fails_with_a_bug)
    assert [ended.status for ended in endings] == [1, 1, 1]
    assert max(ended.seconds for ended in endings) < 20
    assert sum(ended.text.count("Traceback") for ended in endings) == 1
    assert "Process 1 failed" in endings[1].text
    assert "KeyError: 'a bug'" in endings[1].text
    for rank in (0, 2):
        [line] = endings[rank].text.splitlines()
        assert line.endswith("Stopped, because process 1 failed: KeyError: 'a bug'.")


def fails_while_others_wait_for_its_data() -> None:
    if distributed.rank() == 0:
        raise ValueError("--train_file is x.jsonl; there is no such file.\nGive one with token=abcdefghijkl.")
    distributed.any_rank(False, CPU)


def test_a_failure_of_process_0_before_training_is_reported_without_secrets() -> None:
    """Process 0 holds the store, so the others would read nothing if it left at once."""
    endings = launch(3, fails_while_others_wait_for_its_data)
    assert [ended.status for ended in endings] == [1, 1, 1]
    assert not any("Traceback" in ended.text for ended in endings)
    assert "ERROR --train_file is x.jsonl" in endings[0].text
    for ended in endings[1:]:
        [line] = ended.text.splitlines()
        assert "process 0 failed: ValueError: --train_file is x.jsonl; there is no such file. Give one with " in line
        assert "abcdefghijkl" not in line


def all_make_the_same_mistake() -> None:
    distributed.any_rank(False, CPU)
    raise ValueError("--seed is wrong.")


def test_an_error_of_all_processes_is_reported_by_one() -> None:
    endings = launch(3, all_make_the_same_mistake)
    assert [ended.status for ended in endings] == [1, 1, 1]
    assert sum("ERROR --seed is wrong." in ended.text for ended in endings) == 1


@pytest.fixture(scope="module")
def killed() -> list[list[Ended]]:
    """Two runs of three processes: in each, another one is killed."""
    return launch_together([(3, endless, after_step(5, signal.SIGKILL, rank)) for rank in range(2)])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_is_named(rank: int, killed: list[list[Ended]]) -> None:
    endings = killed[rank]
    left = [ended for other, ended in enumerate(endings) if other != rank]
    assert endings[rank].status == -9
    assert [ended.status for ended in left] == [1, 1]
    assert max(ended.seconds for ended in left) - endings[rank].seconds < 10
    for ended in left:
        [line] = ended.lines
        assert f"process {rank} " in line
        assert "ended without an error message" in line
        assert "Traceback" not in ended.text


def leaves_without_a_failure() -> None:
    for step, _, _ in steps(10):
        if step == 5:
            raise SystemExit(143)


def test_an_interrupted_run_is_no_failure() -> None:
    for ended in launch(2, leaves_without_a_failure):
        assert (ended.status, ended.text) == (143, "")


def two_loops(folder: Path) -> tuple[int, bool]:
    os.chdir(folder)
    for _ in range(2):
        for _ in steps(3):
            assert failures.is_monitoring()
    return distributed.rank(), failures.is_monitoring()


def test_training_outside_of_a_script_is_monitored_while_it_runs(tmp_path: Path) -> None:
    assert run_on_ranks(2, two_loops, tmp_path) == [(0, False), (1, False)]
