"""The micro-batch that fits: a straight line through two trials, on an allocator whose memory is known."""

import mmap
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mm_utils.training import micro_batch as search
from mm_utils.training.memory import peak_bytes, reset_peak
from mm_utils.training.micro_batch import HEADROOM, find_micro_batch_size, largest_that_fits
from tests.kit.objectives import ALONE, global_batch, tiny_objective


def test_trials_have_regions_where_batches_do() -> None:
    objective, batch = tiny_objective("regions"), global_batch()
    tried = search.synthetic_batch(batch, 5, 7, objective.readers)
    assert {name: len(value) for name, value in tried.items()} == dict.fromkeys(tried, 5)
    assert {name for name in tried if name.startswith("region_")} == {
        name for name in batch if name.startswith("region_")
    }
    assert all(value.isfinite() for value in objective(tried, 0).values())
    assert not any(
        name.startswith("region_") for name in search.synthetic_batch({"input_ids": batch["input_ids"]}, 5, 7, ())
    )


def test_trials_have_negatives_where_batches_do() -> None:
    objective, batch = tiny_objective("matching_with_negatives"), global_batch("negatives")
    tried = search.synthetic_batch(batch, 5, 7, objective.readers)
    assert {name: tuple(value.shape) for name, value in tried.items() if name.startswith("negative_")} == {
        "negative_input_ids": (5, 7),
        "negative_attention_mask": (5, 7),
    }
    assert all(value.isfinite() for value in objective(tried, 0).values())


@given(
    fixed=st.integers(0, 10**10),
    per_pair=st.integers(1, 10**8),
    available=st.integers(10**9, 10**11),
    largest=st.integers(33, 10**5),
)
def test_what_is_found_fits_and_little_more_would(fixed: int, per_pair: int, available: int, largest: int) -> None:
    def peak(pairs: int) -> int:
        return fixed + per_pair * pairs

    found = largest_that_fits(peak, [8, 32], available, largest)
    limit = available * (1 - HEADROOM)
    assert 1 <= found <= largest
    assert found == 1 or peak(found) <= limit
    assert found == largest or peak(found + 8) > limit
    assert found in (1, largest) or found < 8 or found % 8 == 0


CPU = torch.device("cpu")


def accelerator() -> Any:
    return SimpleNamespace(**vars(ALONE))


@pytest.mark.parametrize(("available", "found"), [(10**6, 48), (10**9, 200), (100, 1)])
def test_the_objective_is_tried_with_the_longest_captions(
    available: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, seen = tiny_objective("contrastive_matching"), []
    moments = 8 * sum(parameter.numel() for parameter in objective.parameters())
    objective.model.text_model.register_forward_hook(
        lambda module, given, out: seen.append(tuple(out.last_hidden_state.shape[:2]))
    )
    # As if every pair took 16 kB on top of 100 kB.
    monkeypatch.setattr(search, "peak_bytes", lambda device: 100_000 + 16_000 * max(rows for rows, _ in seen[-2:]))
    monkeypatch.setattr(search, "available_bytes", lambda device: available + moments)
    assert find_micro_batch_size(accelerator(), objective, global_batch(), 200, 24) == found
    assert {8, 32} <= {rows for rows, _ in seen} <= {8, 32, 100, 128}
    assert {length for _, length in seen} == {24}
    assert all(parameter.grad is None for parameter in objective.parameters())


def test_a_small_share_is_not_tried_at_all() -> None:
    assert find_micro_batch_size(accelerator(), torch.nn.Linear(1, 1), {}, 8, 64) == 8


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is never reset")
def test_peak_memory_begins_anew() -> None:
    """Measured on fresh pages, because an allocator may have some left from before."""
    reset_peak(CPU)
    before = peak_bytes(CPU)
    with mmap.mmap(-1, 2**27) as kept:
        for place in range(0, 2**27, mmap.PAGESIZE):
            kept[place] = 1
        assert peak_bytes(CPU) - before == pytest.approx(2**27, rel=0.2)
    reset_peak(CPU)
    assert peak_bytes(CPU) - before < 2**26
