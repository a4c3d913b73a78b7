"""The table and the picture of recall by the number of pairs, and that the contestants' flags are known."""

from pathlib import Path

import pytest

from benchmarks.pairs import CONTESTANTS, START, PairsArguments, draw, report
from mm_utils.arguments import parse_args
from mm_utils.run.flags import PRETRAINING


def row(name: str, size: int, seed: int, recall: float) -> dict:
    return {"contestant": name, "size": size, "seed": seed, "start": 0.2, "mean_recall": recall}


def test_the_table_has_means_and_gains_over_the_closed_form_of_the_same_seed(tmp_path: Path) -> None:
    results = [
        row(START, 300, 0, 0.2),
        row("default", 300, 0, 0.3),
        row("default", 300, 1, 0.3),
        row("mlp", 600, 0, 0.1),
    ]
    *_, first, second = report(results, ["default", "mlp"]).splitlines()
    assert first == "| 300 | 0.200 | 0.300 ± 0.000 (+0.100 ± 0.000) |  | 2 |"
    assert second == "| 600 |  |  | 0.100 (-0.100) | 1 |"
    draw(results, ["default", "mlp"], tmp_path / "pairs.png")
    assert (tmp_path / "pairs.png").stat().st_size > 0


def test_contestants_are_flags_of_a_run() -> None:
    for words in CONTESTANTS.values():
        parse_args(*PRETRAINING, argv=words.split())
    with pytest.raises(ValueError, match="--contestants has head; choose from"):
        PairsArguments(contestants="default,head")
