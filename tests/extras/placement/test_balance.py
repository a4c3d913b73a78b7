"""Uneven shares by measured speed: as early an end as can be, and the weights of one process."""

import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import TrainerControl, TrainerState

from benchmarks.processes.communication import StepSize, predict
from mm_utils import distributed
from mm_utils.communication import reduced_bytes
from mm_utils.data import media
from mm_utils.data.batches.loaders import LoaderArguments, Loaders
from mm_utils.data.batches.order import EQUAL_SHARES, Division
from mm_utils.extras.placement import balance
from mm_utils.extras.placement.balance import Balance, deal, seconds_per_pair
from mm_utils.objectives import Objective
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.throughput import Communication
from scripts import pretrain
from tests.kit.launches import ROOT, launch, logged, losses
from tests.kit.objectives import ALONE, global_batch, tiny_objective
from tests.kit.ranks import run_on_ranks
from tests.kit.tiny_run import TinyRun, batch_of, build

STEPS, BATCH = 4, 9
TERMS = (["contrastive"], ["contrastive", "matching"])
CASES = list(product(("sigmoid_matching", "self_distillation"), (None, "2")))


def loaders_of(division: Division) -> Loaders:
    """Loaders without workers."""
    arguments = LoaderArguments(dataloader_num_workers="0")
    return Loaders(arguments, torch.device("cpu"), 0, media.Image(8), division=division)


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=9), st.integers(0, 200))
def test_rows_are_dealt_so_that_the_last_ends_as_early_as_can_be(seconds: list[float], more: int) -> None:
    size = len(seconds) + more
    rows = deal(seconds, size)
    assert sum(rows) == size
    assert min(rows) >= 1
    end = max(count * each for count, each in zip(rows, seconds, strict=True))
    # To end earlier, every rank would have fewer rows than fit until then, or the one that it has anyway.
    earlier = [max(1, int(end * (1 - 1e-9) / each)) for each in seconds]
    assert sum(earlier) < size or end == pytest.approx(max(seconds))
    division = Division(tuple(map(float, rows)))
    dealt = [range(size)[division.of_rank(size, rank, len(rows))] for rank in range(len(rows))]
    assert [len(each) for each in dealt] == rows


@given(st.lists(st.floats(1e-3, 10), min_size=2, max_size=9), st.integers(0, 60), st.integers(1, 500))
def test_no_rank_is_left_without_rows_when_batches_grow(seconds: list[float], more: int, growth: int) -> None:
    division = Division(tuple(map(float, deal(seconds, len(seconds) + more))))
    draws = [(row, 0) for row in range(len(seconds) + more + growth)]
    shares = [draws[division.of_rank(len(draws), rank, len(seconds))] for rank in range(len(seconds))]
    assert [draw for share in shares for draw in share] == draws
    assert all(shares)


class Slow:
    """A device with a clock of its own, on which rank 1 needs three times as long for a pair as the others."""

    def __init__(self, objective: Objective):
        self.seconds, self.clock = 0.006 if distributed.rank() == 1 else 0.002, 0.0
        objective.model.vision_model.register_forward_hook(self)
        balance._now = lambda device: self.clock

    def __call__(self, tower: Any, given: Any, output: Any) -> None:
        self.clock += self.seconds * len(output.last_hidden_state)


def train(
    folder: Path, kind: str, micro_batch_size: str | None, exact: bool
) -> tuple[Any, list[list[int]], int, list[float]]:
    """A run on uneven devices if it is `exact`: its division, the rows of every step, its trained parameters, and the
    MiB exchanged in every step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arguments = {
        "global_batch_size": BATCH,
        "max_steps": STEPS,
        "micro_batch_size": micro_batch_size,
        "save_steps": 0,  # when a checkpoint is complete, ranks agree once more
    }
    trainer = build(TinyRun(folder, None, dropout=0.0, exact=exact, kind=kind, arguments=arguments), [])
    data: Any = trainer.data
    seen: list[list[int]] = []

    def batches(start: int, stop: int) -> Any:
        for step in range(start, stop):
            draws = [((7 * step + place) % 20, 0) for place in range(BATCH)]
            mine = draws[data.loaders.division.of_rank(len(draws), distributed.rank(), distributed.world_size())]
            seen.append([row for row, _ in mine])
            batch = batch_of(seen[-1])
            yield batch | {"pixel_values": batch["pixel_values"].double()} if exact else batch

    class Waiting:
        wait = 0.0

        def __init__(self, start: int, stop: int):
            self.batches = batches(start, stop)

        def __iter__(self) -> Any:
            return self.batches

    data.train_batches = Waiting
    data.loaders = loaders_of(EQUAL_SHARES)
    unwrapped: Any = trainer.accelerator.unwrap_model(trainer.objective)
    if exact:
        Slow(unwrapped)
    hangs, *others = trainer.callbacks.callbacks
    metering = Communication(trainer.accelerator.distributed_type)
    trainer.callbacks.callbacks = [
        hangs,
        *([balance_of(trainer.accelerator, unwrapped, trainer.args)] if exact else []),
        metering,
        *others,
    ]
    trainer.train()
    exchanged = list(logged(folder, "comm_mib").values()) if distributed.rank() == 0 else []
    parameters = sum(weight.numel() for weight in unwrapped.parameters() if weight.requires_grad)
    return data.loaders.division.weights, seen[-STEPS:], parameters, exchanged


def balance_of(accelerator: Any, objective: Any, args: TrainingArguments) -> Balance:
    """The callback of a run."""
    found = Balance()
    found.on_start(SimpleNamespace(run=SimpleNamespace(accelerator=accelerator, args=args), objective=objective))
    return found


def runs_on_this_rank(root: Path) -> dict[str, Any]:
    """All that is to be seen on ranks, as starting them is what takes long."""
    world = distributed.world_size()
    cases = [(kind, size) for kind, size in CASES if world > 1 or not size]
    found: dict[str, Any] = {"measured": measured_on_this_rank()}
    found["balanced"] = [train(root / f"{world}-{kind}-{size}", kind, size, True) for kind, size in cases]
    if world > 1:
        metered = {size: train(root / f"metered-{size}", "contrastive_matching", size, False) for size in (None, "2")}
        found["metered"] = {size: (parameters, mib) for size, (*_, parameters, mib) in metered.items()}
    return found


def measured_on_this_rank() -> list[float]:
    objective = tiny_objective("contrastive")
    objective.model.text_model.register_forward_hook(lambda *_: time.sleep(0.6 * distributed.rank()))
    return seconds_per_pair(ALONE, objective, global_batch(), 0, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def on_ranks(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What each rank of a run of one process, and of two, found."""
    return {world: run_on_ranks(world, runs_on_this_rank, folder) for world in (1, 2)}


def test_ranks_of_unequal_speed_end_with_the_weights_of_one_process(on_ranks: Any, folder: Path) -> None:
    for world, by_rank in on_ranks.items():
        for cases in zip(*(found["balanced"] for found in by_rank), strict=True):
            weights = cases[0][0]
            if world == 2:
                assert weights == (7.0, 2.0)
                assert all(
                    [*map(len, step)] == [*weights] for step in zip(*(seen for _, seen, *_ in cases), strict=True)
                )
            together = [[row for _, seen, *_ in cases for row in seen[step]] for step in range(STEPS)]
            assert together == [[(7 * step + place) % 20 for place in range(BATCH)] for step in range(STEPS)]
    for kind, size in CASES:
        right = load_file(folder / f"1-{kind}-None" / "model.safetensors")
        for name, found in load_file(folder / f"2-{kind}-{size}" / "model.safetensors").items():
            message = f"{name} of {kind} in parts of {size}"
            torch.testing.assert_close(found, right[name], rtol=1e-7, atol=1e-9, msg=message)


def test_the_log_has_what_a_step_exchanges(on_ranks: Any) -> None:
    """The formulas, and the flags on which ranks agree after each step; the fusion head is trained in the last two."""
    for size, (parameters, exchanged) in on_ranks[2][0]["metered"].items():
        width = tiny_objective("contrastive").model.config.projection_dim
        step = StepSize(2, 5, width, 8, parameters, has_parts=size is not None)
        agreed = reduced_bytes(7 * 8, 2)
        towers, both = (sum(predict(terms, step).values()) + agreed for terms in TERMS)
        assert exchanged == pytest.approx([each / 2**20 for each in (towers, towers, both, both)], rel=1e-9)


def test_a_rank_that_is_slow_is_measured_as_slow_on_all(on_ranks: Any) -> None:
    (fast, slow), others = (found["measured"] for found in on_ranks[2])
    assert others == [fast, slow]
    assert slow > max(0.3, 1.5 * fast)


WITH_A_SLOW_PROCESS = """
from mm_utils.extras.placement import balance
from scripts import pretrain

measure = balance.seconds_per_pair
balance.seconds_per_pair = lambda *given: [0.1, 0.3][: len(measure(*given))]
pretrain.main()
"""


@pytest.mark.slow
def test_pretrain_deals_by_speed_and_learns_what_one_process_learns(tiny_flags: list[str], tmp_path: Path) -> None:
    """Process 1 is measured, and said to be three times as slow."""
    script, config = tmp_path / "slow.py", str(ROOT / "accelerate_configs/two_processes.yaml")
    script.write_text(WITH_A_SLOW_PROCESS)
    flags = [*tiny_flags, "--balance", "--output_dir", str(tmp_path / "two")]
    environment = {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    two = launch(["--config_file", config, str(script), *flags], tmp_path, **environment)
    assert two.returncode == 0, two.stderr
    assert "--balance: of 8 pairs, process 1 2 (300 ms a pair), process 0 6 (100 ms a pair)" in two.stderr
    pretrain.main([*tiny_flags, "--output_dir", str(tmp_path / "one")])
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)
    assert min(logged(tmp_path / "two", "comm_mib").values()) > 0
    assert not logged(tmp_path / "one", "comm_mib")


# -- measuring -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["contrastive_matching", "masked_lm", "everything", "regions"])
def test_measuring_changes_nothing(kind: str) -> None:
    objective = tiny_objective(kind)
    objective.model.text_model.register_module("norm", torch.nn.BatchNorm1d(16, affine=False, dtype=torch.double))
    objective.model.text_model.register_forward_hook(lambda module, _, out: (module.norm(out[0][:, 0]), None)[1])
    before = {name: value.clone() for name, value in objective.state_dict().items()}
    [seconds] = seconds_per_pair(ALONE, objective, global_batch(kind), 3, 4)
    assert 0 < seconds < 60
    assert all(torch.equal(value, before[name]) for name, value in objective.state_dict().items())
    assert all(parameter.grad is None for parameter in objective.parameters())


@pytest.mark.parametrize(
    ("micro_batch_size", "share", "tried"), [(None, 200, 200), ("50", 200, 50), ("500", 200, 200), ("auto", 200, 32)]
)
def test_no_more_is_tried_than_is_held(micro_batch_size: str | None, share: int, tried: int) -> None:
    assert balance._pairs_tried(TrainingArguments(micro_batch_size=micro_batch_size), share) == tried


def on_two(monkeypatch: pytest.MonkeyPatch, seconds: list[float], **given: Any) -> Any:
    """The division of a run whose two processes were measured so."""
    monkeypatch.setattr(distributed, "world_size", lambda: len(seconds))
    monkeypatch.setattr(balance, "seconds_per_pair", lambda *_: seconds)
    data = SimpleNamespace(train_batches=lambda *_: [{}], loaders=loaders_of(Division((5.0, 1.0))))
    args = TrainingArguments(**{"global_batch_size": 30, **given})
    state = TrainerState(max_steps=9, global_step=given.get("max_steps", 0))
    balance_of(None, None, args).on_train_begin(args, state, TrainerControl(), data=data)
    return data.loaders.division


def test_who_is_equally_fast_gets_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_two(monkeypatch, [0.1, 0.1]) == on_two(monkeypatch, [0.105, 0.1]) == EQUAL_SHARES
    assert on_two(monkeypatch, [0.2, 0.1]) == Division((10.0, 20.0))
    assert on_two(monkeypatch, [0.2, 0.1], batch_size_schedule="0:6,5:60") == Division((2.0, 4.0))


def test_without_steps_or_other_processes_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_two(monkeypatch, [0.2, 0.1], max_steps=9) == Division((5.0, 1.0))
    assert on_two(monkeypatch, [0.2]) == Division((5.0, 1.0))


def test_fewer_pairs_than_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--global_batch_size is 2, for 3 processes; .* Give at least 3, or drop"):
        on_two(monkeypatch, [0.2, 0.1, 0.1], global_batch_size=2)


def test_memory_that_runs_out_names_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(balance, "seconds_per_pair", full)
    data = SimpleNamespace(train_batches=lambda *_: [{}], media={})
    args, state = TrainingArguments(micro_batch_size="16"), TrainerState(max_steps=9)
    with pytest.raises(ValueError, match=r"memory ran out with 16 pairs .* smaller --micro_batch_size"):
        balance_of(None, None, args).on_train_begin(args, state, TrainerControl(), data=data)


def test_many_ranks_are_described_in_one_line() -> None:
    seconds = [0.001 * (1 + rank % 5) for rank in range(64)]
    division = Division(tuple(map(float, deal(seconds, 4096))))
    text = balance._describe(division, seconds)
    assert text.startswith("of 4096 pairs, process 4 ")
    assert text.endswith(" and 56 faster ones the rest")
