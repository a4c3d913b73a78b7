"""The signature of the other placement: where the encoders are only changes the speed.

Four steps of the real trainer on the embedded data set, as in `tests.distributed.test_signature`, with encoders together and
apart on 1 to 4 processes, whole and in parts, straight through or continued by another number of processes and in another
placement. The average of the weights is what is saved in the end.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mm_utils.data.batches.loaders import make_loaders
from mm_utils.extras.placement.apart import ApartObjective
from mm_utils.extras.placement.preparation import Apart
from mm_utils.model.build import ModelArguments
from mm_utils.training.arguments import TrainingArguments
from tests.kit.ranks import run_on_ranks
from tests.kit.training_runs import (
    BATCH,
    NO_WORKERS,
    STEPS,
    STOP,
    TOLERANCE,
    accelerator_of_this_rank,
    encoders,
    error,
    scenes_on_this_rank,
    train,
    weights_of,
)


class Case(NamedTuple):
    """Processes, placement, loss, `--micro_batch_size`, and the run that it goes on from."""

    world: int
    placement: str
    objective: str
    part: int | None = None
    goes_on: str | None = None

    @property
    def folder(self) -> str:
        """The name of its output folder."""
        return "-".join(map(str, self[:4])).replace(":", "_") + ("-resumed" if self.goes_on else "")


def reference(objective: str) -> Case:
    return Case(1, "together", objective)


STRAIGHT = [
    *(reference("contrastive"), reference("sigmoid")),
    *(Case(2, "apart:1", "contrastive"), Case(2, "apart", "sigmoid", 5), Case(2, "together", "contrastive")),
    *(Case(3, "apart:2", "contrastive", 3), Case(3, "apart:1", "sigmoid"), Case(4, "apart:2", "contrastive", 4)),
    *(Case(4, "apart:3", "sigmoid"), Case(4, "auto", "contrastive")),
]
CONTINUED = [
    Case(1, "together", "contrastive", None, Case(3, "apart:2", "contrastive", 3).folder),
    Case(2, "together", "sigmoid", None, Case(4, "apart:3", "sigmoid").folder),
    Case(2, "apart:1", "contrastive", 8, Case(1, "together", "contrastive").folder),
    Case(3, "apart:2", "contrastive", None, Case(2, "apart:1", "contrastive").folder),
    Case(4, "apart:1", "sigmoid", 2, Case(2, "apart", "sigmoid", 5).folder),
]


def on_this_rank(root: Path, cases: Sequence[Case], model_args: ModelArguments) -> list[tuple[str, list[list[str]]]]:
    """Run the cases: of each, this process's encoder, and the images read in each step."""
    accelerator = accelerator_of_this_rank()
    rows, processor = scenes_on_this_rank(accelerator, model_args)
    found = []
    for case in cases:
        args = TrainingArguments(
            output_dir=str(root / case.folder), global_batch_size=BATCH, max_steps=STEPS, save_steps=STOP, ema_decay=0.9,
            micro_batch_size=None if case.part is None else str(case.part),
        )  # fmt: skip
        start = root / case.goes_on / f"checkpoint-{STOP}" if case.goes_on else None
        loaders = make_loaders(NO_WORKERS, accelerator.device, processor)  # whose division a placement may change
        trainer, seen = train(
            model_args,
            case.objective,
            args,
            start,
            processor,
            rows,
            loaders,
            [Apart(case.placement)] if "apart" in case.placement else [],
        )
        placed = trainer.captured.objective
        found.append((placed.split.mine if isinstance(placed, ApartObjective) else "both", seen))
    return found


@pytest.mark.slow
def test_placement_only_changes_the_speed(tmp_path: Path) -> None:
    model_args = encoders(tmp_path, patch_dropout=0.25)
    images: dict[Case, list[Any]] = {}
    for group in (STRAIGHT, CONTINUED):
        for world in range(1, 5):
            cases = [case for case in group if case.world == world]
            by_rank = run_on_ranks(world, on_this_rank, tmp_path, cases, model_args)
            images |= {case: [found[place] for found in by_rank] for place, case in enumerate(cases)}
    for case, by_rank in images.items():
        straight = tmp_path / reference(case.objective).folder
        right, half_way = weights_of(straight), weights_of(straight / f"checkpoint-{STOP}")
        assert error(half_way["visual_projection.weight"], right["visual_projection.weight"]) > 10 * TOLERANCE
        [(_, all_rows)] = images[reference(case.objective)]
        steps = zip(*(read for _, read in by_rank), strict=True)
        together = [sorted(image_id for share in step for image_id in share) for step in steps]
        assert together == [sorted(step) for step in all_rows[STOP if case.goes_on else 0 :]], case
        assert not any(step for mine, read in by_rank if mine == "text" for step in read), case
        if case.placement.startswith("apart"):
            assert {mine for mine, _ in by_rank} == {"vision", "text"}
        for found, expected in (
            (weights_of(tmp_path / case.folder), right),
            *([(weights_of(tmp_path / case.folder / f"checkpoint-{STOP}"), half_way)] if not case.goes_on else []),
        ):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert error(found[name], value) < TOLERANCE, f"{name} after {case}"
