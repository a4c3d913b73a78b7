"""What a default run enters: budgets of files and lines, measured by tracing."""

from pathlib import Path

import pytest

from tests.kit.house import ROAD
from tests.kit.road import trace

pytestmark = pytest.mark.slow

FEW = ["--max_steps", "3", "--max_train_samples", "64", "--max_eval_samples", "32", "--global_batch_size", "32"]


def test_the_road_of_a_default_run_stays_short(tmp_path: Path, own_cache: Path) -> None:
    road = trace([*FEW, "--output_dir", str(tmp_path / "run")])
    found = {name: (len(files), sum(files.values())) for name, files in road.items()}
    over = {name: found[name] for name, most in ROAD.items() if found[name] > most or found[name][1] > most[1]}
    assert not over, f"{over} of {ROAD}; see `make road`"
