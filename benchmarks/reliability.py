"""Ways to interrupt and resume a training run, beside plain Accelerate: are the weights equal, bit for bit?

    python -m benchmarks.reliability
    python -m benchmarks.reliability --cases 1,12,13 --contestants tandem,accelerate

Each of 21 cases trains 16 steps on two processes (gloo, CPU), once straight, with a checkpoint on the way, and once from that
checkpoint. Right is that it goes on at the checkpoint's step and ends with the straight run's weights. `tandem` is
scripts/pretrain.py, with what stands there for a way of Accelerate's in brackets. `accelerate` is a loop as Accelerate's guide and
example `checkpointing.py` write it: seedable sampler, `set_epoch`, `skip_first_batches`, or torchdata's StatefulDataLoader where the
loader has a state.
"""

import hashlib
import importlib.util
import io
import json
import multiprocessing
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import TrainerCallback

from benchmarks.harness import flags_of, names, numbers, print_table
from scripts import pretrain

# Passes of the loop, pairs of a process in each, seed of everything, processes
STEPS = 16
BATCH = 4
SEED = 7
RANKS = 2
SECONDS = 300  # that a run may take


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        title: what the table calls it.
        sampler: `seedable` or `random`, as Accelerate calls them.
        stateful: the loader's own state is saved; here: pairs are streamed.
        set_epoch: the loop tells the loader which epoch it is; here, without: resumed twice.
        save: after how many passes of the loop a checkpoint is saved.
        accumulate: passes of the loop that make one optimizer step; here: parts of the batch.
    """

    title: str
    workers: int = 0
    rows: int = 64
    save: int = 5
    sampler: str = "seedable"
    stateful: bool = False
    set_epoch: bool = True
    dropout: float = 0.0
    augment: bool = False
    accumulate: int = 1


CASES = (
    Case("plain"),
    Case("2 workers", workers=2),
    Case("61 rows, no multiple of the batch", rows=61),
    Case("saved at the end of an epoch", save=8),
    Case("saved in epoch 2", save=12),
    Case("another order (similar captions together)", sampler="random"),
    Case("loader with a state (streaming)", stateful=True),
    Case("the same, another order (other blocks)", stateful=True, sampler="random"),
    Case("the same, saved in epoch 2", stateful=True, save=12),
    Case("the same, 61 rows", stateful=True, rows=61),
    Case("accumulation over 4, saved at a step (batch in 4 parts)", accumulate=4, save=4),
    Case("dropout 0.3", dropout=0.3),
    Case("augmentation", augment=True),
    Case("augmentation, 2 workers", augment=True, workers=2),
    Case("saved in epoch 2, set_epoch not called (resumed twice)", set_epoch=False, save=12),
    Case("another order, saved in epoch 2 (similar captions together)", sampler="random", save=12),
    Case("loader with a state, 2 workers (streaming)", stateful=True, workers=2),
    Case("the same, another order (other blocks)", stateful=True, workers=2, sampler="random"),
    Case("the same, augmentation", stateful=True, workers=2, augment=True),
    Case("loader with a state, saved at the end of an epoch (streaming)", stateful=True, save=8),
    Case("accumulation over 4, saved inside (batch in 4 parts)", accumulate=4),
)


@dataclass(frozen=True)
class Run:
    """What each process of a contestant does: train in `folder`, save after `save` passes, from the newest checkpoint or not."""

    case: Case
    folder: Path
    data: Path
    save: int
    resume: bool

    def began(self, step: int) -> None:
        """Write down the step of the checkpoint that was loaded."""
        (self.folder / "began").write_text(str(step))

    def ended(self, model: nn.Module) -> None:
        """Write down a digest of the weights."""
        digest = hashlib.sha256()
        for name, value in sorted(model.state_dict().items()):
            digest.update(name.removeprefix("module.").encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        if os.environ["RANK"] == "0":
            (self.folder / "ended").write_text(digest.hexdigest())


class Watch(TrainerCallback):
    """Saves when the run says so, and writes down where it begins and how it ends."""

    def __init__(self, run: Run):
        self.run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write down the step that was resumed."""
        self.run.began(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save if it is due; write down the weights of the last step."""
        control.should_save = state.global_step == self.run.save
        if state.global_step == state.max_steps:
            self.run.ended(kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the process, as the final evaluation says nothing here."""
        os._exit(0)


# -- this project -----------------------------------------------------------------------------------------------------


def tandem(run: Run) -> None:
    """scripts/pretrain.py."""
    case = run.case
    configs = write_data(run.data, case)
    flags = [
        *("--train_file", str(run.data / f"train-{case.rows}.parquet"), "--output_dir", str(run.folder)),
        *("--validation_file", str(run.data / "validation.parquet"), "--objectives", "contrastive"),
        *("--vision_config", configs[0], "--text_config", configs[1], "--image_size", "32", "--fusion_layers", "0"),
        *("--global_batch_size", str(BATCH * RANKS), "--max_steps", str(STEPS), "--seed", str(SEED)),
        *("--learning_rate", "1e-3", "--max_seq_length", "16", "--dataloader_num_workers", str(case.workers)),
        *("--save_steps", "0", "--eval_steps", "0", "--min_crop_area", "0.5" if case.augment else "1"),
    ]
    if case.accumulate > 1:
        flags += ["--micro_batch_size", str(BATCH // case.accumulate)]
    if case.stateful:
        flags += ["--streaming", "--train_file", str(run.data / f"train-{case.rows}-{{0..7}}.parquet")]
    pretrain.main([*flags, *(["--resume_from_checkpoint", "latest"] if run.resume else [])], [Watch(run)])


TEXT = datasets.Value("string")
FEATURES = datasets.Features({"image": datasets.Image(decode=False), "captions": [TEXT], "id": TEXT})


def write_data(folder: Path, case: Case) -> tuple[str, str]:
    """Write the pairs and the configs of both encoders, if they are not there; return the configs' paths."""
    vision = folder / "vision.json"
    text = folder / f"text-{case.dropout}.json"
    if not text.exists():
        for name, rows in (("train-64", range(64)), ("train-61", range(61)), ("validation", range(100, 104))):
            table = pa.Table.from_pylist([draw_pair(number) for number in rows], FEATURES.arrow_schema)
            pq.write_table(table, folder / f"{name}.parquet")
            for shard in range(8):
                pq.write_table(table.slice(8 * shard, 8), folder / f"{name}-{shard}.parquet")
        wide = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        dropout = {"hidden_dropout_prob": case.dropout, "attention_probs_dropout_prob": case.dropout}
        vision.write_text(json.dumps({"model_type": "vit", **wide, "patch_size": 16, "image_size": 32}))
        text.write_text(json.dumps({"model_type": "bert", **wide, **dropout}))
    return str(vision), str(text)


def draw_pair(number: int) -> dict[str, Any]:
    """A row with an image of noise."""
    buffer = io.BytesIO()
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(0, 256, (36, 40, 3), dtype=torch.uint8, generator=generator)
    Image.fromarray(pixels.numpy()).save(buffer, "PNG")
    caption = " ".join(["picture", *str(number), *["again"] * (number % 5)])
    return {"image": {"bytes": buffer.getvalue(), "path": None}, "captions": [caption], "id": f"id-{number}"}


# -- plain Accelerate -------------------------------------------------------------------------------------------------


class Encoders(nn.Module):
    """Two encoders of one layer, and the contrastive loss over the local batch."""

    def __init__(self, dropout: float):
        super().__init__()
        self.image = nn.Linear(8, 16)
        self.text = nn.Linear(8, 16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        """The loss of these pairs."""
        logits = self.dropout(self.image(image)) @ self.dropout(self.text(text)).T
        return {"loss": F.cross_entropy(logits, torch.arange(len(logits)))}


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
    """How far the run is; registered for checkpoints."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        """For Accelerate."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For Accelerate."""
        self.step = state["step"]


def accelerate(run: Run) -> None:
    """The loop of Accelerate's guide."""
    case = run.case
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=case.accumulate,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=case.sampler == "seedable", use_stateful_dataloader=case.stateful
        ),
        project_config=ProjectConfiguration(str(run.folder), automatic_checkpoint_naming=True),
    )
    set_seed(SEED)
    bare = Encoders(case.dropout)
    adam = torch.optim.AdamW(bare.parameters(), lr=1e-2)
    rows = torch.utils.data.DataLoader(Pairs(case), batch_size=BATCH, shuffle=True, num_workers=case.workers)
    decay = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.1, 50)
    model, optimizer, loader, scheduler = accelerator.prepare(bare, adam, rows, decay)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if run.resume:
        accelerator.load_state()
        accelerator.project_configuration.iteration = 1
    run.began(progress.step)
    for batch in batches(accelerator, loader, case, progress.step):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        progress.step += 1
        if progress.step == run.save:
            accelerator.save_state()
    run.ended(bare)


def batches(accelerator: Accelerator, loader: Any, case: Case, step: int) -> Iterator[dict[str, Tensor]]:
    """The batches after `step`; the first epoch may be one that was begun."""
    begun, skipped = divmod(step, len(loader))
    for epoch in count(begun):
        active = loader
        if epoch == begun and skipped and not case.stateful:  # a loader with a state skips by itself
            active = accelerator.skip_first_batches(loader, skipped)
        if case.set_epoch:
            active.set_epoch(epoch)
        for batch in active:
            if step == STEPS:
                return
            yield batch
            step += 1


# -- processes --------------------------------------------------------------------------------------------------------

CONTESTANTS: dict[str, Callable[[Run], None]] = {"tandem": tandem, "accelerate": accelerate}


def train(contestant: str, run: Run) -> str:
    """Train on forked processes; return why that failed, or nothing."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "ended").unlink(missing_ok=True)
    context = multiprocessing.get_context("fork")  # everything is imported once
    ranks = [context.Process(target=work, args=(contestant, run, rank, port)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(SECONDS)
        process.kill()
        process.join()
    lines = (run.folder / "log").read_text(errors="replace").strip().splitlines()
    return "" if (run.folder / "ended").exists() else lines[-1][:200] if lines else "it ended without a word"


def work(contestant: str, run: Run, rank: int, port: int) -> None:
    """One process."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in where.items()}
    os.environ |= {"MASTER_ADDR": "localhost", "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false"}
    printed = os.open(run.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    torch.set_num_threads(1)
    try:
        CONTESTANTS[contestant](run)
    except BaseException as error:
        os.write(printed, f"\n{type(error).__name__}: {' '.join(str(error).split())}\n".encode())
    os._exit(0)  # an orderly end of gloo and of worker processes takes seconds


def try_case(contestant: str, case: Case, folder: Path, data: Path) -> str:
    """Train straight and from a checkpoint; return what is wrong, or nothing."""
    straight = folder / "straight"
    resumed = folder / "resumed"
    problem = train(contestant, Run(case, straight, data, case.save, resume=False))
    if problem:
        return problem
    right = (straight / "ended").read_text()
    shutil.copytree(straight, resumed)
    again = case.save if case.set_epoch else case.save + 2  # resumed twice: once more, in the same epoch
    for save, step in ((again, case.save), (0, again)) if not case.set_epoch else ((0, case.save),):
        if problem := train(contestant, Run(case, resumed, data, save, resume=True)):
            return problem
        began = int((resumed / "began").read_text())
        if began != step:
            return f"it went on at step {began}"
    return "" if (resumed / "ended").read_text() == right else "other weights"


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Print the table and return its rows."""
    parser = flags_of(__doc__)
    parser.add_argument(
        "--contestants", type=names([*CONTESTANTS]), default=",".join(CONTESTANTS), help="who takes part"
    )
    parser.add_argument(
        "--cases", type=numbers, default=range(1, len(CASES) + 1), help="numbers of cases; default: all"
    )
    args = parser.parse_args(argv)
    stateful = "accelerate" in args.contestants and any(CASES[number - 1].stateful for number in args.cases)
    if stateful and not importlib.util.find_spec("torchdata"):
        parser.error("cases of a loader with a state need torchdata: pip install torchdata, or choose other --cases")
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="reliability-") as temporary:
        datasets.config.HF_DATASETS_CACHE = Path(temporary, "cache")
        data = Path(temporary, "data")
        data.mkdir()
        for number in args.cases:
            case = CASES[number - 1]
            write_data(data, case)
            rows.append({"equal weights after a resume": f"{number} {case.title}"})
            for name in args.contestants:
                folder = Path(temporary, f"{number}-{name}")
                problem = try_case(name, case, folder, data)
                rows[-1][name] = "**no**" if problem else "yes"
                notes += [f"{number}, {name}: {problem}"] if problem else []
                shutil.rmtree(folder, ignore_errors=True)
    total = {name: f"{sum(row[name] == 'yes' for row in rows)} of {len(rows)}" for name in args.contestants}
    rows.append({"equal weights after a resume": "all", **total})
    print_table(rows, notes)
    return rows


if __name__ == "__main__":
    main()
