"""Rows are dealt as the loaders deal them, and the table has every batch size."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.processes import placement
from mm_utils import distributed
from mm_utils.extras.placement.split import Split
from mm_utils.model.build import ModelArguments
from tests.kit.ranks import run_on_ranks
from tests.kit.training_runs import accelerator_of_this_rank

SIZES = {"vision_config": "tiny", "text_config": "tiny", "image_size": 32, "vocab_size": 100}


def test_every_row_is_of_one_process_that_has_images(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = placement.Rows(7, ModelArguments(**SIZES), torch.device("cpu"))  # type: ignore[arg-type]
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    for division, counts in ((rows.loaders.division, [3, 2, 2]), (Split(2, 1).division, [4, 3, 0])):
        rows.loaders.division, shares = division, []
        for rank in range(3):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            shares.append(rows.batch())
        assert [len(share["pixel_values"]) for share in shares] == counts
        assert sorted(name for share in shares for name in share["image_ids"]) == list("0123456")
        for share in shares:
            assert share["lengths"] == sorted(share["lengths"], reverse=True)
            assert share["attention_mask"].sum(1).tolist() == share["lengths"]


def measured_on_this_rank(file: Path) -> list[dict[str, Any]]:
    accelerator_of_this_rank()
    flags = [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]
    return placement.main(
        [*flags, *("--pairs", "8,12", "--rounds", "1", "--steps", "1", "--warm_up", "1", "--output_file", str(file))]
    )


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    results = run_on_ranks(2, measured_on_this_rank, tmp_path / "placement.json")
    assert [row["pairs"] for row in results[0]] == [8, 12]
    assert all(min(row["together_measured"], row["apart_measured"]) > 0 for row in results[0])
    assert (tmp_path / "placement.md").read_text().count("| 1 of 2 |") == 2
