"""The made-up devices are as slow as stated, and shares by speed help."""

from typing import Any

import pytest

from benchmarks.processes import balance
from tests.kit.ranks import run_on_ranks
from tests.kit.training_runs import accelerator_of_this_rank


def settings_on_this_rank(argv: list[str]) -> list[dict[str, Any]]:
    accelerator_of_this_rank()
    return balance.main(argv)


@pytest.mark.slow
def test_a_slow_process_gets_fewer_rows_and_the_step_takes_less_time() -> None:
    flags = ["--slower", "1,4", "--milliseconds", "60", "--pairs", "20", "--steps", "3", "--fusion_layers", "0"]
    [rows, _] = run_on_ranks(2, settings_on_this_rank, flags)
    alike, slow = rows
    assert sum(alike["rows"]) == sum(slow["rows"]) == 20
    assert slow["rows"][1] <= 8
    assert slow["equal"] > 10 * 0.24
    assert slow["ideal"] == pytest.approx(20 * 0.06 / 1.25)
    assert slow["ideal"] < slow["balanced"] < 0.9 * slow["equal"]
