"""The same model and rows under `transformers.Trainer`, as its scripts call it."""

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.rivals.reliability.plain_accelerate import Pairs, Shapes, Towers
from benchmarks.rivals.reliability.trials import BATCH, SEED, Case, Run

FILES = {
    "model": "model.safetensors",
    "optimizer": "optimizer.pt",
    "schedule": "scheduler.pt",
    "random": "rng_state.pth",
}
"""What a checkpoint's files are called."""


def has(case: Case) -> bool:
    """Whether it has this way: no saves between steps, no epochs unset, no loader state."""
    return not case.stateful and case.set_epoch and case.save % case.accumulate == 0


class Told(TrainerCallback):
    """Saves when the run says so, and tells what happens."""

    def __init__(self, run: Run):
        self.run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report what was loaded."""
        if state.global_step:
            accumulated = state.global_step * self.run.case.accumulate
            self.run.loaded(accumulated, kwargs["model"], kwargs["optimizer"].optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the step; a checkpoint follows if it is due."""
        step = state.global_step * self.run.case.accumulate
        control.should_save = step in self.run.saves
        self.run.stepped(step, kwargs["model"], kwargs["optimizer"].optimizer)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report that the loop goes on."""
        self.run.went_on(state.global_step * self.run.case.accumulate)


class Collate:
    """Stacks rows; those of one pass of the loop are NaN."""

    def __init__(self, nan_at: int):
        self.nan_at, self.count = nan_at, 0

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Stack the rows of a batch."""
        self.count += 1
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        if self.count == self.nan_at:
            batch["image"] *= float("nan")
        return batch


def checkpoints(folder: str | Path) -> list[Path]:
    """A run's checkpoints, oldest first."""
    found = Path(folder).glob("checkpoint-*")
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def train(run: Run, shapes: list[list[int]] | None = None) -> None:
    """Train, from the newest checkpoint if asked to."""
    set_seed(SEED)
    model = Shapes(shapes) if shapes else Towers(run.parameters, run.case.dropout)
    arguments = TrainingArguments(
        output_dir=run.folder,
        max_steps=run.steps // run.case.accumulate,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=run.case.accumulate,
        learning_rate=1e-2,
        save_strategy="no",  # decided by the callback
        save_total_limit=run.keep,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        dataloader_num_workers=run.case.workers,
        accelerator_config={"use_seedable_sampler": run.case.sampler == "seedable"},
        enable_jit_checkpoint=run.stop_on_sigterm,
    )
    trainer = Trainer(model, arguments, Collate(run.nan_at), Pairs(run.case), callbacks=[Told(run)])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(run.folder) if run.resume else None)
    run.ended(trainer.state.global_step * run.case.accumulate, model)
