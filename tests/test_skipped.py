"""Skipped rows over a run: written once, counted over ranks and restarts, and too many of them end it everywhere."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from mm_utils import ranks
from mm_utils.data.substitutes import SHOWN_IN_VALIDATION
from mm_utils.skipped import SKIPPED_FILE, SkippedImages
from tests.test_ranks import run_on_ranks

CPU = torch.device("cpu")


def skipping(*reasons: str, first: int = 0) -> dict[str, Any]:
    """A batch that skipped images for these reasons."""
    ids = [f"id-{first + place}" for place in range(len(reasons))]
    return {"skipped_ids": ids, "skipped": [f"image {name}: {why}" for name, why in zip(ids, reasons, strict=True)]}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / SKIPPED_FILE).read_text().splitlines()]


def test_nothing_skipped_leaves_nothing_behind(tmp_path: Path) -> None:
    skipped = SkippedImages(tmp_path, 0.01)
    for step in range(1, 4):
        skipped.add(step, skipping())
        assert skipped.settle(64 * step, CPU) == 0
    assert not list(tmp_path.iterdir())


def test_what_is_skipped_is_written_once_and_named_at_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    skipped = SkippedImages(tmp_path, 0.5)
    for step in range(1, 16):
        skipped.add(step, skipping("it has 0 bytes", first=step))
        if step % 5 == 0:
            assert skipped.settle(8 * step, CPU) == step
    assert lines(tmp_path) == [
        {"step": step, "image_id": f"id-{step}", "reason": f"image id-{step}: it has 0 bytes"} for step in range(1, 16)
    ]
    said = [record.message for record in caplog.records]
    assert said[0] == "Step 1 skipped image id-1: it has 0 bytes"
    assert len(said) == 11
    assert said[-1] == f"Whatever else is skipped is in {tmp_path / SKIPPED_FILE} alone"


def test_the_count_goes_on_after_a_restart(tmp_path: Path) -> None:
    before = SkippedImages(tmp_path, 0.01)
    before.add(1, skipping(*["broken"] * 19))
    before.settle(1000, CPU)
    state = json.loads(json.dumps(before.state()))
    after = SkippedImages(tmp_path, 0.01)
    after.load(state)
    assert (after.count, after.state()) == (19, state)
    after.add(2, skipping("broken", first=19))
    with pytest.raises(ValueError, match="20 of 1,900 rows could not be read"):
        after.settle(1900, CPU)
    assert len(lines(tmp_path)) == 20


@pytest.mark.parametrize(("corrupt", "pairs", "stops"), [(19, 20, False), (20, 2000, False), (20, 1999, True)])
def test_a_share_too_many_stops_the_run(corrupt: int, pairs: int, stops: bool, tmp_path: Path) -> None:
    skipped = SkippedImages(tmp_path, 0.01)
    skipped.add(3, skipping(*["broken"] * corrupt))
    if stops:
        with pytest.raises(ValueError, match=f"--max_corrupt_share is 0.01; {corrupt} of {pairs:,} rows"):
            skipped.settle(pairs, CPU)
    else:
        assert skipped.settle(pairs, CPU) == corrupt


def test_a_disk_that_is_gone_is_noticed_long_before_its_share(tmp_path: Path) -> None:
    skipped = SkippedImages(tmp_path, 0.01)
    skipped.settle(1_000_000, CPU)
    skipped.add(10, skipping(*["read error"] * 60))
    skipped.settle(1_000_060, CPU)
    skipped.add(11, skipping(*["read error"] * 39))  # one of 40 was read
    skipped.settle(1_000_100, CPU)
    skipped.add(12, skipping(*["read error"] * 60))
    skipped.settle(1_000_160, CPU)
    again = SkippedImages(tmp_path, 0.01)
    again.load(skipped.state())
    again.add(13, skipping(*["read error"] * 40))
    with pytest.raises(ValueError, match="the training data is out of reach; 100 rows one after the other"):
        again.settle(1_000_200, CPU)


def test_a_good_step_ends_the_succession(tmp_path: Path) -> None:
    skipped = SkippedImages(tmp_path, 0.01)
    pairs = 1_000_000
    for step in range(1, 9):
        skipped.add(step, skipping(*["read error"] * (60 if step % 2 else 0)))
        pairs += 60
        skipped.settle(pairs, CPU)
    assert skipped.count == 240


def test_the_error_names_the_most_frequent_reasons_the_file_and_the_remedy(tmp_path: Path) -> None:
    skipped = SkippedImages(tmp_path, 0.01)
    kinds = {"truncated ({} bytes missing)": 9, "cannot identify image file": 6, "it has 0 bytes": 4, "odd": 2}
    reasons = [f"/data/{n}.jpg: {kind.format(n)}" for kind, times in kinds.items() for n in range(times)]
    skipped.add(1, skipping(*reasons))
    with pytest.raises(ValueError, match="max_corrupt_share") as caught:
        skipped.settle(64, CPU)
    message = str(caught.value)
    assert "9 x truncated (N bytes missing); 6 x cannot identify image file; 4 x it has N bytes. " in message
    assert str(tmp_path / SKIPPED_FILE) in message
    assert "scripts/prepare_data.py" in message
    assert "\n" not in message


def test_rows_of_validation_are_written_down_and_not_counted(tmp_path: Path) -> None:
    skipped = SkippedImages(tmp_path, 0.01)
    skipped.add(1, skipping(*[f"shard a, row 3: {SHOWN_IN_VALIDATION}"] * 200))
    assert skipped.settle(200, CPU) == 0
    assert len(lines(tmp_path)) == 200


def three_steps(folder: Path) -> list[Any]:
    """Rank 1 alone has corrupt rows; what each `settle` gave, and the last step's error."""
    os.environ |= {"RANK": str(ranks.rank()), "LOCAL_RANK": str(ranks.rank()), "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"WORLD_SIZE": str(ranks.world_size()), "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    from mm_utils.run import make_accelerator

    make_accelerator()
    skipped = SkippedImages(folder, 0.1)
    seen: list[Any] = []
    for step in (1, 2, 3):
        skipped.add(step, skipping(*["broken"] * (9 * ranks.rank()), first=100 * step))
        try:
            seen.append(skipped.settle(50 * step, CPU))
        except ValueError as error:
            seen.append(str(error))
    return [*seen, skipped.state()]


def test_all_ranks_count_alike_and_stop_at_the_same_step(tmp_path: Path) -> None:
    one, other = run_on_ranks(2, three_steps, tmp_path)
    assert one == other
    assert one[:2] == [9, 18]
    assert one[2].startswith("--max_corrupt_share is 0.1; 27 of 150 rows could not be read, most often: 27 x broken.")
    assert len(lines(tmp_path)) == 27
