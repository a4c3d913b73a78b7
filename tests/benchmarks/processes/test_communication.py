"""The formulas of docs/communication.md say what a step exchanges, to the byte."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import communication
from benchmarks.processes.communication import TRIED
from tests.kit.ranks import run_on_ranks
from tests.kit.training_runs import TEXT, VISION, accelerator_of_this_rank


def steps_on_this_rank(argv: list[str]) -> list[dict[str, Any]]:
    accelerator_of_this_rank()
    return communication.main(argv)


@pytest.fixture
def towers(tmp_path: Path) -> list[str]:
    """Flags of a model that is built in no time."""
    for name, config in (("vision", VISION), ("text", TEXT)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    return [
        "--vision_config", f"{tmp_path}/vision.json", "--text_config", f"{tmp_path}/text.json", "--projection_dim",
        "24",
    ]  # fmt: skip


def test_what_is_counted_is_what_was_predicted(towers: list[str]) -> None:
    """Two processes have 4 and 5 of 9 pairs, in one part and in several; DDP's own averages are counted in its buckets."""
    for results in run_on_ranks(2, steps_on_this_rank, [*towers, "--pairs", "9", "--micro_batch_size", "2"]):
        assert [row["objectives"] for row in results] == [name for name in TRIED for _ in range(2)]
        for row in results:
            assert sum(row["predicted"].values()) == row["counted"], row
            assert row["predicted"]["gradients"] > 1e5


@pytest.mark.slow
def test_three_processes_with_widths_and_without_negatives(towers: list[str]) -> None:
    flags = [
        *towers, "--pairs", "10", "--negatives", "0", "--matryoshka_dims", "8,16", "--objectives_tried",
        "sigmoid,matching/contrastive",
    ]  # fmt: skip
    for results in run_on_ranks(3, steps_on_this_rank, flags):
        for row in results:
            assert sum(row["predicted"].values()) == pytest.approx(row["counted"], rel=1e-12), row
