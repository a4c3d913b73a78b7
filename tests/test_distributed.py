"""Collectives of `mm_utils.distributed` between real processes."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_utils import distributed
from mm_utils.distributed import RunError
from tests.kit.ranks import run_on_ranks


def one_tensor_per_rank(sizes: list[int]) -> list[torch.Tensor]:
    everything = torch.arange(3.0 * sum(sizes)).view(-1, 3)
    return list(everything.split(sizes))


def collectives(cases: list[list[int]]) -> list[dict[str, Any]]:
    found = []
    for sizes in cases:
        mine = one_tensor_per_rank(sizes)[distributed.rank()].requires_grad_()
        seen = distributed.gather_sizes(len(mine), torch.device("cpu"))
        ragged = torch.full((len(mine), distributed.rank() + 1), distributed.rank(), dtype=torch.long)
        summed = torch.tensor([1.0, distributed.rank()], requires_grad=True)
        found.append(
            {
                "world": (distributed.world_size(), distributed.rank()),
                "sizes": seen,
                "gathered": distributed.gather(mine, seen),
                "ragged": distributed.gather_ragged(ragged, seen, pad=7),
                "sum": distributed.sum_over_ranks(summed),
                "untouched": summed.tolist(),
            }
        )
    return found


def test_collectives_between_processes() -> None:
    world, cases = 3, [[2, 2, 2], [3, 1, 4], [0, 2, 1], [4, 0, 0], [0, 0, 0]]
    results = run_on_ranks(world, collectives, cases)
    for rank, found in enumerate(results):
        for sizes, seen in zip(cases, found, strict=True):
            assert seen["world"] == (world, rank)
            assert seen["sizes"] == sizes
            assert torch.equal(seen["gathered"], torch.cat(one_tensor_per_rank(sizes)))
            assert not seen["gathered"].requires_grad
            owners = [owner for owner, size in enumerate(sizes) for _ in range(size)]
            expected = [[owner] * (owner + 1) + [7] * (world - owner - 1) for owner in owners]
            assert seen["ragged"].tolist() == expected
            assert seen["sum"].tolist() == [world, sum(range(world))]
            assert not seen["sum"].requires_grad
            assert seen["untouched"] == [1.0, rank]


@given(st.integers(0, 10_000), st.integers(1, 64))
@settings(max_examples=50)
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


def test_what_fails_on_one_rank_fails_on_all_with_its_words() -> None:
    of_ranks = run_on_ranks(3, shared_faults)
    for rank, found in enumerate(of_ranks):
        wanted = []
        for place, fault in enumerate(FAULTS):
            told = f"{type(fault).__name__} {fault}"
            for at in (0, 1):
                if place == 2 and rank != at:
                    told = f"PeerError process {at} failed: {fault!r}"
                wanted += [f"{place}{at} {told if at == 0 else 7}", f"{place}{at} {told}"]
                told = f"{type(fault).__name__} {fault}"
        assert found == wanted
