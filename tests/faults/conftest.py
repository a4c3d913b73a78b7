"""Sources full of faults, what is prepared from them, and an uninterrupted run to compare with."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.data.prepare.zoo import Corpus


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> "Corpus":
    """Sources of every format, full of faults, and what must become of each row."""
    from tests.data.prepare.zoo import build  # datasets and torch take seconds, and few modules need them

    return build(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="session")
def prepared(zoo: "Corpus") -> Path:
    """What `prepare_data` makes of the zoo."""
    from scripts.prepare_data import main

    output = zoo.folder / "prepared"
    flags = ("--num_proc", "2", "--max_bad_fraction", "1", "--on_leakage", "drop", "--near_duplicates", "drop")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", zoo.folder / "cache")
        # No address of the zoo gets as far as a connection.
        main(["--sources", *zoo.sources, "--output_dir", str(output), "--allow_download", *flags])
    return output


@pytest.fixture(scope="session")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run, on one process, of what does not depend on their number."""
    from tests.faults.rank_runs import start
    from tests.kit.tiny_run import exact_run

    folder = tmp_path_factory.mktemp("exact") / "run"
    assert start(1, exact_run(folder)).statuses == [0]
    return folder


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with dropout that nothing befell, with its checkpoints of steps 9 and 10."""
    from tests.kit.tiny_run import TinyRun, alone, train

    folder = tmp_path_factory.mktemp("straight") / "run"
    assert alone(train, TinyRun(folder))[0] == 0
    return folder
