"""The micro-batch that fits: a straight line through two trials, on an allocator whose memory is known."""

import mmap
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModel

from mm_utils.copies import HostCopy
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.build import ObjectiveArguments, build_objective
from mm_utils.objectives.grad_cache import backward
from mm_utils.training import memory
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


@pytest.mark.parametrize("hidden", [20, 100, 400])
def test_pairs_that_another_allocation_outweighs_do_not_bend_the_line(hidden: int) -> None:
    def peak(pairs: int) -> int:
        return 10**6 + 1000 * max(pairs, hidden)

    found = largest_that_fits(peak, [8, 32], 10**7, 10**5)
    assert peak(found) <= 9 * 10**6 < peak(found + 8)


def test_a_third_trial_confirms_the_line() -> None:
    asked: list[int] = []

    def peak(pairs: int) -> int:
        asked.append(pairs)
        return 100 * pairs

    assert largest_that_fits(peak, [8, 32], 10**6, 512) == 512
    assert asked == [8, 32, 128]


def test_memory_that_does_not_grow_sets_no_limit() -> None:
    assert largest_that_fits(lambda pairs: 5, [8, 32], 4, 512) == 512


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


def test_this_machine_has_memory() -> None:
    assert 2**20 < memory.peak_bytes(CPU) < memory.available_bytes(CPU)


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_of_a_process():
    def of(path: str, name: str) -> float:
        [line] = [line for line in Path(path).read_text().splitlines() if line.startswith(f"{name}:")]
        return int(line.split()[1]) / 2**20

    most = of("/proc/self/status", "VmHWM")
    assert 0.95 * most <= peak_bytes(CPU) / 2**30 <= of("/proc/meminfo", "MemTotal")


def test_peak_memory_of_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: 3 * 2**30)
    assert peak_bytes(torch.device("cuda")) == 3 * 2**30


class StoredBytes(TorchDispatchMode):
    """Count the bytes of tensors that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self.known: set[int] = set()

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.drop, key, size)

    def drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for each in tree_iter(output):
            if isinstance(each, torch.Tensor):
                self.add(each)
        return output


AVAILABLE = 2**27


@pytest.mark.parametrize("vocabulary", [pytest.param(100, marks=pytest.mark.slow), 20_000])
def test_what_is_found_fits_whatever_the_vocabulary(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose weights and gradients weigh more than the activations of a small trial; no tensor has memory here."""
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    model = FusionDualEncoderModel.from_backbones(
        AutoModel.from_config(AutoConfig.for_model("vit", **config, image_size=32, patch_size=8)),
        AutoModel.from_config(AutoConfig.for_model("bert", **config, vocab_size=vocabulary)),
        fusion_layers=0,
    )
    accelerator, objective = Accelerator(cpu=True), build_objective(model, ObjectiveArguments("contrastive"), 0)
    objective.train()
    monkeypatch.setattr(torch.__future__, "get_overwrite_module_params_on_conversion", lambda: True)
    batch = {"input_ids": torch.ones(4, 16, dtype=torch.long), "pixel_values": torch.zeros(4, 3, 32, 32)}
    with FakeTensorMode(allow_non_fake_inputs=True):
        objective = objective._apply(torch.empty_like)
    stored = StoredBytes()

    def reset(device: torch.device) -> None:
        stored.peak = stored.now

    monkeypatch.setattr(
        HostCopy, "numpy", lambda copy: np.zeros(copy._values.shape, dtype=bool)
    )  # no pair shares an id
    monkeypatch.setattr(search, "available_bytes", lambda device: AVAILABLE)
    monkeypatch.setattr(search, "reset_peak", reset)
    monkeypatch.setattr(search, "peak_bytes", lambda device: stored.peak)
    with FakeTensorMode(allow_non_fake_inputs=True), stored:
        for weight in objective.parameters():
            stored.add(weight)
        found = find_micro_batch_size(accelerator, objective, batch, 10**4, 16)
        moments = 8 * sum(weight.numel() for weight in objective.parameters())
        peaks = []
        for pairs in (found, round(1.25 * found)):
            stored.peak = stored.now
            backward(accelerator, objective, search.synthetic_batch(batch, pairs, 16, ()), 0, pairs)
            peaks.append(stored.peak + moments)
            objective.zero_grad()
    assert peaks[0] <= AVAILABLE < peaks[1]
    assert all(weight.grad is None for weight in objective.parameters())
