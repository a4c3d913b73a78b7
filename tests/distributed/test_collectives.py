"""Faults that processes share, and steps of sharded weights, which are those of whole ones; gathering: tests/contracts/test_terms.py.

`fully_shard` is on towers, the head's layers and the objective.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import FSDPModule

from mm_utils import distributed
from mm_utils.distributed import RunError, full_tensor
from mm_utils.objectives.grad_cache import backward
from tests.kit.objectives import ALONE, assert_same, global_batch, sharded, share_of, step_in_parts, tiny_objective
from tests.kit.processes import run_on_ranks

WORLD = 3
KINDS = ("contrastive", "sigmoid_matching")
SIZES = (5, 3, 1)


def everything() -> tuple[Any, ...]:
    return shared_faults(), steps_on_this_rank(SIZES)


@pytest.fixture(scope="module")
def on_ranks() -> list[tuple[Any, ...]]:
    """What each rank found, of all tests in one launch."""
    return run_on_ranks(WORLD, everything)


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_shares_are_contiguous_complete_and_even(count: int, parts: int) -> None:
    shares = [distributed.share(count, part, parts) for part in range(parts)]
    assert [row for share in shares for row in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


FAULTS = (ValueError("pairs.csv, line 2, is empty"), RunError("the folder is taken"), KeyError("a defect"))


def shared_faults() -> list[str]:
    found = []
    for place, fault in enumerate(FAULTS):
        for at in (0, 1):

            def fail(at: int = at, fault: Exception = fault) -> int:
                if distributed.rank() == at:
                    raise fault
                return distributed.rank() + 7

            def go_first(fail: Callable[[], int] = fail) -> int:
                with distributed.first_then_others():
                    return fail()

            for work in (lambda: distributed.on_first(fail), go_first):
                try:
                    found.append(f"{place}{at} {work()}")
                except Exception as error:
                    found.append(f"{place}{at} {type(error).__name__} {error}")
    return found


def test_what_fails_on_one_rank_fails_on_all_with_its_words(on_ranks: list[tuple[Any, ...]]) -> None:
    for rank, (found, _) in enumerate(on_ranks):
        wanted = []
        for place, fault in enumerate(FAULTS):
            told = f"{type(fault).__name__} {fault}"
            for at in (0, 1):
                if place == 2 and rank != at:
                    told = f"PeerError process {at} failed: {fault!r}"
                wanted += [f"{place}{at} {told if at == 0 else 7}", f"{place}{at} {told}"]
                told = f"{type(fault).__name__} {fault}"
        assert found == wanted


@contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """What accelerate's `no_sync` does to FSDP2 models."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


SHARDED = SimpleNamespace(**{**vars(ALONE), "no_sync": no_sync, "distributed_type": DistributedType.FSDP})


def steps_on_this_rank(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    low = sum(sizes[: distributed.rank()])
    mine = share_of(global_batch(), low, low + sizes[distributed.rank()])
    found = []
    for kind in KINDS:
        for micro_batch_size in (None, 9, 2):
            objective = sharded(tiny_objective(kind))
            assert isinstance(objective, FSDPModule)
            report = backward(SHARDED, objective, mine, 5, micro_batch_size)
            gradients = {
                name: full_tensor(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
                for name, parameter in objective.named_parameters()
            }
            values = {name: value.item() for name, value in report.items()}
            found.append({"kind": kind, "report": values, "gradients": gradients})
    return found


def test_sharded_gradients_are_those_of_one_process(on_ranks: list[tuple[Any, ...]]) -> None:
    for _, found in on_ranks:
        for case in found:
            right = step_in_parts(tiny_objective(case["kind"]), global_batch(), None)
            case["gradients"] = {
                name: gradient.view(right["gradients"][name].shape) for name, gradient in case["gradients"].items()
            }
            assert_same(case, right)
