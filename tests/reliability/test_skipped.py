"""Skipped rows are listed once and counted over ranks and restarts; too many end the run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState

from mm_utils import distributed
from mm_utils.data.batches.order import SHOWN_IN_VALIDATION
from mm_utils.files import append_rows
from mm_utils.reliability.skipped import SKIPPED_FILE, SkippedSamples
from mm_utils.run.start import make_accelerator
from mm_utils.training.arguments import TrainingArguments
from tests.kit.ranks import let_accelerate_find_ranks, run_on_ranks


class Run:
    """Steps of `batch` rows, of which some are skipped for the given reasons."""

    def __init__(self, folder: Path, max_corrupt_share: float = 0.01, batch: int = 100, step: int = 0):
        self.skipped, self.state = SkippedSamples(), TrainerState(global_step=step)
        self.args: Any = TrainingArguments(str(folder), global_batch_size=batch, max_corrupt_share=max_corrupt_share)
        self.event("on_train_begin")

    def event(self, name: str, **values: Any) -> None:
        model = SimpleNamespace(device=torch.device("cpu"))
        getattr(self.skipped, name)(self.args, self.state, TrainerControl(), model=model, **values)

    def log(self) -> int:
        logs: dict[str, Any] = {"loss": 1.0}
        self.event("on_log", logs=logs)
        return logs.get("skipped_images", 0)

    def step(self, *reasons: str, first: int = 0) -> None:
        self.state.global_step += 1
        ids = [f"id-{first + place}" for place in range(len(reasons))]
        skipped = [f"image {name}: {why}" for name, why in zip(ids, reasons, strict=True)]
        self.event("on_step_end", batch={"skipped_ids": ids, "skipped": skipped})

    def resumed(self) -> "Run":
        """Return the run as a checkpoint of this one restores it."""
        self.event("on_save_begin")
        state, args = json.loads(json.dumps(self.skipped.state())), self.args
        other = Run(Path(args.output_dir), args.max_corrupt_share, args.global_batch_size, self.state.global_step)
        vars(other.skipped).update(state["attributes"])
        return other


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / SKIPPED_FILE).read_text().splitlines()]


def test_skipped_rows_are_written_once_and_the_first_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, 0.5)
    for step in range(1, 16):
        run.step("it has 0 bytes", first=step)
        assert step % 5 or run.log() == step
    append_rows(tmp_path / SKIPPED_FILE, [{"step": 16}])  # of a step after the checkpoint, which is taken again
    after = run.resumed()
    assert lines(tmp_path) == [
        {"step": step, "image_id": f"id-{step}", "reason": f"image id-{step}: it has 0 bytes"} for step in range(1, 16)
    ]
    assert after.skipped.state() == {"args": {}, "attributes": {"count": 15, "pairs": 1500, "in_succession": 0}}
    said = [record.message for record in caplog.records]
    assert said[0] == "Step 1 skipped image id-1: it has 0 bytes"
    assert len(said) == 11
    assert said[-1] == f"From here on, skipped rows are listed in {tmp_path / SKIPPED_FILE} only"


SHOWN = f"shard a, row 3: {SHOWN_IN_VALIDATION}"


@pytest.mark.parametrize(
    ("reason", "corrupt", "pairs", "stops"),
    [("broken", 19, 20, False), ("broken", 20, 2000, False), ("broken", 20, 1999, True), (SHOWN, 200, 200, False)],
)
def test_too_large_a_share_stops_the_run(reason: str, corrupt: int, pairs: int, stops: bool, tmp_path: Path) -> None:
    """Rows that validation has are listed but not counted."""
    run = Run(tmp_path, batch=pairs)
    run.step(*[reason] * corrupt)
    if stops:
        with pytest.raises(ValueError, match=f"--max_corrupt_share is 0.01; {corrupt} of {pairs:,} rows"):
            run.log()
    else:
        assert run.log() == (0 if reason == SHOWN else corrupt)
    assert len(lines(tmp_path)) == corrupt


def test_a_lost_disk_stops_the_run_long_before_its_share(tmp_path: Path) -> None:
    run = Run(tmp_path, batch=60, step=20_000)
    for unreadable in (0, 60, 59, 60):  # one of 60 was read
        run.step(*["read error"] * unreadable)
        run.log()
    again = run.resumed()
    again.step(*["read error"] * 60)
    with pytest.raises(ValueError, match="the training data is out of reach; 120 rows one after the other"):
        again.log()


def three_steps(folder: Path) -> list[Any]:
    """Return the logged counts, or errors, of steps in which only rank 1 has unreadable rows."""
    let_accelerate_find_ranks()
    make_accelerator()
    run = Run(folder, 0.1, batch=50)
    seen: list[Any] = []
    for step in (1, 2, 3):
        run.step(*["broken"] * (9 * distributed.rank()), first=100 * step)
        try:
            seen.append(run.log())
        except ValueError as error:
            seen.append(str(error))
    return [*seen, run.skipped.state()]


def test_all_ranks_have_the_same_count_and_stop_at_the_same_step(tmp_path: Path) -> None:
    one, other = run_on_ranks(2, three_steps, tmp_path)
    assert one == other
    assert one[:2] == [9, 18]
    assert one[2].startswith("--max_corrupt_share is 0.1; 27 of 150 rows could not be read, most often: 27 x broken.")
    assert len(lines(tmp_path)) == 27
