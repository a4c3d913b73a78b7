"""A loop on Accelerate alone, as its guide and example `checkpointing.py` write it.

Seedable sampler (the default of its `Trainer`), `set_epoch`, `skip_first_batches` for the epoch that was begun, or a
StatefulDataLoader; folders named, rotated and found again by `ProjectConfiguration`; the step is an object of one's own
registered for checkpoints.
"""

import importlib.util
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.rivals.reliability.trials import BATCH, SEED, Case, Run

FILES = {
    "model": "model.safetensors",
    "optimizer": "optimizer.bin",
    "schedule": "scheduler.bin",
    "random": "random_states_0.pkl",
}
"""What a checkpoint's files are called."""


def has(case: Case) -> bool:
    """Whether it can train so: a loader with a state is torchdata's."""
    return not case.stateful or importlib.util.find_spec("torchdata") is not None


class Towers(nn.Module):
    """Two towers of one layer, and the contrastive loss over the local batch."""

    def __init__(self, parameters: int, dropout: float = 0.0):
        super().__init__()
        width = max(16, parameters // 18)  # 8 weights and a bias each
        self.image, self.text, self.dropout = nn.Linear(8, width), nn.Linear(8, width), nn.Dropout(dropout)

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        """The loss of these pairs."""
        logits = self.dropout(self.image(image)) @ self.dropout(self.text(text)).T
        return {"loss": F.cross_entropy(logits, torch.arange(len(logits)))}


class Shapes(nn.Module):
    """Parameters of given shapes and a cheap loss: what matters is their checkpoint."""

    def __init__(self, shapes: list[list[int]]):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        """A sum, so that every parameter has a gradient."""
        return {"loss": torch.stack([weight.mean() for weight in self.weights]).sum()}


class Pairs(torch.utils.data.Dataset):
    """Rows as functions of their number, but for an augmentation by torch's generator."""

    def __init__(self, case: Case):
        self.case = case

    def __len__(self) -> int:
        return self.case.rows

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        image, text = torch.randn(2, 8, generator=torch.Generator().manual_seed(1000 + row))
        return {"image": image + 0.1 * torch.rand(8) if self.case.augment else image, "text": text}


class Progress:
    """How far the run is."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """For Accelerate."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For Accelerate."""
        self.step = state["step"]


def checkpoints(folder: str | Path) -> list[Path]:
    """A run's checkpoints, oldest first."""
    found = Path(folder, "checkpoints").glob("checkpoint_*")
    return sorted(found, key=lambda path: int(path.name.rpartition("_")[2]))


def agreed(run: Run) -> None:
    """Train; a signal to one process is agreed upon by all, by Accelerate's trigger."""
    train(run, agree=True)


def train(run: Run, agree: bool = False, shapes: list[list[int]] | None = None) -> None:
    """Train, from the newest checkpoint if asked to."""
    case = run.case
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=case.accumulate,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=case.sampler == "seedable", use_stateful_dataloader=case.stateful
        ),
        project_config=ProjectConfiguration(run.folder, automatic_checkpoint_naming=True, total_limit=run.keep),
    )
    set_seed(SEED)
    module = Shapes(shapes) if shapes else Towers(run.parameters, case.dropout)
    bare = torch.optim.AdamW(module.parameters(), lr=1e-2)
    rows = torch.utils.data.DataLoader(Pairs(case), batch_size=BATCH, shuffle=True, num_workers=case.workers)
    decay = torch.optim.lr_scheduler.LinearLR(bare, 1.0, 0.1, 50)
    model, optimizer, loader, scheduler = accelerator.prepare(module, bare, rows, decay)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if run.resume and (found := checkpoints(run.folder)):
        accelerator.load_state()
        accelerator.project_configuration.iteration = int(found[-1].name.rpartition("_")[2]) + 1
        run.loaded(progress.step, module, bare)
    stop = Stop(accelerator, agree)
    if run.stop_on_sigterm:
        signal.signal(signal.SIGTERM, stop.ask)

    for batch in batches(accelerator, loader, case, progress.step, run.steps):
        with accelerator.accumulate(model):
            if progress.step + 1 == run.nan_at:
                batch["image"] *= float("nan")
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        progress.step += 1
        run.stepped(progress.step, module, bare)
        stopping = stop.is_asked()
        if stopping or progress.step in run.saves:
            accelerator.save_state()
        run.went_on(progress.step)
        if stopping:
            raise SystemExit(143)
    run.ended(progress.step, module)


def batches(accelerator: Accelerator, loader: Any, case: Case, step: int, stop: int) -> Iterator[dict[str, Tensor]]:
    """The batches of steps `step` to `stop`; the first epoch may be one that was begun."""
    begun, skipped = divmod(step, len(loader))
    for epoch in count(begun):
        active = loader
        if epoch == begun and skipped and not case.stateful:  # a loader with a state skips by itself
            active = accelerator.skip_first_batches(loader, skipped)
        if case.set_epoch:
            active.set_epoch(epoch)
        for batch in active:
            if step == stop:
                return
            yield batch
            step += 1


class Stop:
    """Whether SIGTERM came: here, or with `agree` anywhere."""

    def __init__(self, accelerator: Accelerator, agree: bool):
        self.accelerator, self.agree, self.asked = accelerator, agree, False

    def ask(self, number: int, frame: Any) -> None:
        """Handle the signal: no more than note it."""
        self.asked = True

    def is_asked(self) -> bool:
        """Whether to save and end; called on all processes after a step."""
        if self.agree and self.asked:
            self.accelerator.set_trigger()
        return self.accelerator.check_trigger() if self.agree else self.asked
