"""The signature of the other placement: where the encoders are only changes the speed.

Six steps of the real trainer on the embedded data set, as in `tests.distributed.test_signature`, with encoders together and
apart on 1 to 4 processes, whole and in parts, straight through or continued by another number of processes and in another
placement. The average of the weights is what is saved in the end.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from mm_utils.data.loading.loaders import LoaderArguments, Loaders, image_geometry
from mm_utils.data.loading.tokens import global_order, tokenize_splits
from mm_utils.data.pairs import iterate_captions, load_pairs
from mm_utils.data.sources.source import DataArguments
from mm_utils.model.build import ModelArguments, build_model
from mm_utils.model.processor import load_processor
from mm_utils.objectives import ObjectiveArguments, build_objective
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.callbacks import TemperatureClamp
from mm_utils.training.optim import build_optimizer
from mm_utils.training.placement.apart import ApartObjective
from mm_utils.training.trainer import Trainer
from tests.distributed.test_signature import (
    ADAM,
    BATCH,
    STEPS,
    STOP,
    TEXT,
    TOLERANCE,
    VISION,
    Watched,
    accelerator_of_this_rank,
    error,
    weights_of,
)
from tests.test_distributed import run_on_ranks


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
    with accelerator.main_process_first():
        pairs = load_pairs(DataArguments(max_train_samples=256))
        processor = load_processor(model_args, iterate_captions(pairs["train"]))
        rows = tokenize_splits(pairs, processor.tokenizer, 64)["train"]
    found = []
    for case in cases:
        folder = root / case.folder
        folder.mkdir(parents=True, exist_ok=True)
        args = TrainingArguments(
            output_dir=str(folder), global_batch_size=BATCH, max_steps=STEPS, save_steps=STOP, ema_decay=0.9,
            micro_batch_size=None if case.part is None else str(case.part), placement=case.placement,
        )  # fmt: skip
        torch.manual_seed(args.seed)
        model = build_model(model_args, processor.tokenizer)
        objective = build_objective(model, ObjectiveArguments(case.objective), args.seed, processor.tokenizer)
        optimizer = build_optimizer(model, ADAM, pretrained=False, device=accelerator.device)
        order = global_order(rows, args.batch_sizes, args.seed)
        no_workers = LoaderArguments(dataloader_num_workers="0")
        loaders = Loaders(no_workers, accelerator.device, processor.tokenizer.pad_token_id, *image_geometry(processor))
        watched: list[Watched] = []

        def batches(loaders: Loaders, order: Any, watched: list[Watched], first: int, stop: int) -> Any:
            watched.append(Watched(loaders.train(rows, order, first, stop)))
            return watched[-1]

        data: Any = SimpleNamespace(
            train_batches=partial(batches, loaders, order, watched),
            loaders=loaders,
            order=order,
            features=None,
            num_rows=len(rows),
            max_seq_length=64,
            identity={},
            processor=processor,
            eval_loader=None,
        )
        trainer = Trainer(args, ADAM, accelerator, objective, optimizer, data, callbacks=[TemperatureClamp(100.0)])
        trainer.train(root / case.goes_on / f"checkpoint-{STOP}" if case.goes_on else None)
        placed = trainer.captured.objective
        found.append((placed.split.mine if isinstance(placed, ApartObjective) else "both", watched[-1].image_ids))
    return found


@pytest.mark.slow
def test_placement_only_changes_the_speed(tmp_path: Path) -> None:
    for name, config in (("vision", VISION), ("text", TEXT)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    configs = {f"{name}_config": str(tmp_path / f"{name}.json") for name in ("vision", "text")}
    model_args = ModelArguments(**configs, patch_dropout=0.25)
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
