"""A run of the real trainer whose steps take milliseconds, to be ended by force at a chosen place and gone on with."""

import hashlib
import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from mm_utils import distributed
from mm_utils.checkpointing.files import find_checkpoint, step_of
from mm_utils.objectives.objective import JointObjective
from mm_utils.reliability.skipped import SkippedSamples
from mm_utils.reliability.watchdog import HangDetection
from mm_utils.run.start import make_accelerator
from mm_utils.training.arguments import OptimizerArguments, TrainingArguments
from mm_utils.training.callbacks import Throughput
from mm_utils.training.optim import OPTIMIZERS, build_optimizer
from mm_utils.training.stages import remaining, stages_of
from mm_utils.training.trainer import Trainer, Training
from tests.kit.objectives import tiny_objective
from tests.kit.processes import forks, let_accelerate_find_ranks

ROWS = 20
BATCH = 6
STEPS = 10  # an epoch ends within steps 4, 7 and 10
Strike = Callable[[str, int], None]
"""Called with a place and the step that is being taken, from 1: "batch", "forward", "end", "evaluation", "save"."""


def nothing(place: str, step: int) -> None:
    """No fault."""


@dataclass
class TinyRun:
    """The settings of a run.

    Attributes:
        strike: called wherever a fault may be injected.
        dropout: of the text tower; it depends on the number of processes.
        exact: 64-bit numbers.
        patience: of early stopping.
        new_head: the head was not trained before this run.
        head_share: of the steps, in which it learns; with 0, the run is one stage.
        rerank_weights: what an evaluation finds.
        figures: what an evaluation after a step measures, besides the score.
    """

    folder: Path
    resume: str | None = "latest"
    strike: Strike = nothing
    dropout: float = 0.1
    exact: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    patience: int = 100
    new_head: bool = False
    head_share: float = 0.0
    rerank_weights: dict[str, float] = field(default_factory=dict)
    figures: Mapping[int, dict[str, float]] = field(default_factory=dict)


class Batches:
    """This rank's share of the batches of some steps: functions of the step, as those of the loaders."""

    def __init__(self, run: TinyRun, start: int, stop: int, seen: list[list[int]], size: int = BATCH):
        self.run = run
        self.start = start
        self.stop = stop
        self.seen = seen
        self.size = size
        self.wait = 0.0
        self.check: Callable[[], None] | None = None

    def with_check(self, check: Callable[[], None] | None) -> "Batches":
        self.check = check
        return self

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step in range(self.start, self.stop):
            if self.check is not None:
                self.check()
            self.run.strike("batch", step + 1)
            rows = [self.row(step * self.size + place) for place in range(self.size)]
            mine = distributed.share(self.size, distributed.rank(), distributed.world_size())
            self.seen.append([rows[place] for place in mine])
            batch = batch_of(self.seen[-1])
            yield batch | {"pixel_values": batch["pixel_values"].double()} if self.run.exact else batch

    def row(self, position: int) -> int:
        epoch, place = divmod(position, ROWS)
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
        return int(order[place])


def batch_of(rows: list[int]) -> dict[str, Any]:
    generators = [torch.Generator().manual_seed(row) for row in rows]
    lengths = [3 + row % 6 for row in rows]
    mask = (torch.arange(8) < torch.tensor(lengths)[:, None]).long()
    return {
        "pixel_values": torch.stack([torch.randn(3, 16, 16, generator=each) for each in generators]),
        "input_ids": torch.stack([torch.randint(5, 50, (8,), generator=each) for each in generators]) * mask,
        "attention_mask": mask,
        "ids": torch.tensor(rows)[:, None].repeat(1, 2),
        "rows": torch.tensor(rows),
        "lengths": lengths,
        "image_ids": [str(row) for row in rows],
        "skipped": [],
        "skipped_ids": [],
    }


class Processor:
    """Saves something."""

    def save_pretrained(self, folder: Path) -> None:
        Path(folder, "processor_config.json").write_text("{}")


class _Places(TrainerCallback):
    """Strikes at the end of a step and when a checkpoint is complete."""

    def __init__(self, strike: Strike):
        self.strike = strike

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.strike("end", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, checkpoint: Path, **kwargs: Any) -> None:
        self.strike("saved", step_of(checkpoint))


def build(run: TinyRun, seen: list[list[int]]) -> Trainer:
    """The trainer of a run in one stage; `seen` will hold the rows of every step that it takes."""
    [trainer] = trainers(replace(run, head_share=0.0), seen)
    return trainer


def trainers(run: TinyRun, seen: list[list[int]], checkpoint: Path | None = None) -> Iterator[Trainer]:
    """The trainer of each stage from that of a checkpoint on, built when the one before has trained."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if distributed.world_size() > 1:
        let_accelerate_find_ranks()
    accelerator = make_accelerator()
    torch.set_num_threads(1)
    given = {"max_steps": STEPS, "save_steps": 3, "eval_steps": 4, "logging_steps": 1}
    given |= {"load_best_model_at_end": False, "early_stopping_patience": run.patience, "global_batch_size": BATCH}
    given |= {"metric_for_best_model": "score"} | run.arguments
    kind = type("Arguments", (TrainingArguments,), {"save_total_limit": given.pop("save_total_limit", 2)})
    args = kind(output_dir=str(run.folder), **given)
    objective = tiny_objective("contrastive_matching")
    assert isinstance(objective, JointObjective)
    objective.to(torch.double if run.exact else torch.float)
    objective.added = frozenset(["fusion."] if run.new_head else [])
    for name, parameter in objective.named_parameters():
        parameter.requires_grad_("pooler" not in name)  # which takes no part
    for module in objective.modules():
        if isinstance(module, nn.Dropout):
            module.p = run.dropout
    OPTIMIZERS["smooth_adamw"] = (torch.optim.AdamW, {"betas": (0.9, 0.98), "eps": 1e-3})
    learning = OptimizerArguments(learning_rate=1e-2, optim="smooth_adamw")
    data = SimpleNamespace(
        train_batches=lambda start, stop: Batches(run, start, stop, seen, args.global_batch_size),
        eval_loader=Batches(run, 0, 2, []),
        num_rows=ROWS,
        max_seq_length=8,
        identity={"data": "rows"},
        processor=Processor(),
    )
    watching = [HangDetection(args.ddp_timeout), Throughput(accelerator.device), SkippedSamples(), _Places(run.strike)]
    objective.register_forward_pre_hook(lambda *_: run.strike("forward", trainer.state.global_step + 1))
    for stage in remaining(stages_of(objective, args, run.head_share, ROWS), checkpoint):
        stage.freeze_others(objective)
        optimizer = build_optimizer(objective.model, learning, pretrained=False, device=accelerator.device)
        measures = [lambda model, loader, _: _score(run, trainer, model, loader)]  # noqa: B023
        training = Training(args, learning, accelerator, data, measures, watching)
        trainer = Trainer(training, objective, optimizer, stage)
        yield trainer


def _score(run: TinyRun, trainer: Trainer, model: Any, loader: Any) -> dict[str, float]:
    model.config.rerank_weights = run.rerank_weights
    score = torch.zeros(())
    for number, _ in enumerate(loader):
        if number:
            run.strike("evaluation", trainer.state.global_step)
    with torch.no_grad():
        for parameter in model.parameters():
            score = score + parameter.detach().double().sum()
    return {"score": float(score), **run.figures.get(trainer.state.global_step, {})}


def train(run: TinyRun) -> tuple[int, int, list[list[int]]]:
    """Run to the end or to an interruption: the signal's number or 0, the last step, the rows of every step."""
    run.folder.mkdir(parents=True, exist_ok=True)
    seen = []
    metrics = {}
    checkpoint = find_checkpoint(run.resume, run.folder)
    for number, trainer in enumerate(trainers(run, seen, checkpoint)):
        try:
            metrics = trainer.train(None if number else checkpoint, known=metrics)
        except SystemExit as stopped:
            return int(str(stopped.code)) - 128, trainer.state.global_step, seen
        if trainer.ends_run:
            break
    return 0, trainer.state.global_step, seen


def alone(function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """Call a module's function in a process of its own: its exit status, minus a signal's number, and what it returned."""
    with tempfile.TemporaryDirectory() as folder:
        process = forks().Process(target=_tell, args=(folder, function, args))
        process.start()
        process.join(300)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{function.__name__} hangs")
        told = Path(folder, "told")
        return process.exitcode, pickle.loads(told.read_bytes()) if told.is_file() else None


def _tell(folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    Path(folder, "telling").write_bytes(pickle.dumps(function(*args)))
    Path(folder, "telling").rename(Path(folder, "told"))


def digest(folder: Path) -> str:
    """The checksum of the final weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def losses(folder: Path) -> dict[int, float]:
    """Losses of the steps in the log; a step or an evaluation that occurs twice is an error."""
    found = {True: {}, False: {}}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows = found["loss" in row]
        assert row["step"] not in rows, f"step {row['step']} is in the log twice"
        rows[row["step"]] = row.get("loss", 0.0)
    return found[True]


@dataclass
class Signalled:
    """Sends a signal to this process at a place of a step, n times."""

    place: str
    step: int
    number: int
    times: int = 1

    def __call__(self, place: str, step: int) -> None:
        if (place, step) == (self.place, self.step):
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


def exiting(run: TinyRun) -> None:
    """Ends as a script does."""
    number, _, _ = train(run)
    raise SystemExit(128 + number if number else 0)


def exact_run(folder: Path, **arguments: Any) -> TinyRun:
    return TinyRun(folder, dropout=0.0, exact=True, arguments=arguments)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)
