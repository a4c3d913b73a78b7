"""The same trials under this project's Trainer and Loaders, as in `scripts/pretrain.py`."""

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import Features, Sequence, Value
from datasets import Image as ImageColumn
from PIL import Image
from transformers import ProcessorMixin, TrainerCallback

from benchmarks.rivals.reliability.trials import BATCH, CASES, SEED, Case, Run
from mm_utils.checkpointing.files import checkpoint_folders, find_checkpoint, newest_checkpoint, step_of, verify
from mm_utils.data import media
from mm_utils.data.batches.loaders import DeviceLoader, LoaderArguments, Loaders
from mm_utils.data.batches.order import GlobalOrder
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.media.medium import image_geometry
from mm_utils.data.pairs import iterate_captions, load_pairs
from mm_utils.data.rows.source import DataArguments
from mm_utils.distributed import world_size
from mm_utils.extras.streams.flags import StreamingArguments
from mm_utils.extras.streams.loader import train_stream
from mm_utils.extras.streams.stream import open_stream
from mm_utils.model.build import ModelArguments, build_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import load_processor
from mm_utils.objectives import ObjectiveArguments, build_objective
from mm_utils.run.start import make_accelerator
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.optim import OptimizerArguments, build_optimizer
from mm_utils.training.trainer import Trainer

FILES = {
    "model": "model.safetensors",
    "optimizer": "optimizer.safetensors",
    "schedule": "trainer_state.json",
    "random": "run.json",
}
"""What stands for the files of others: the schedule is a function of the step, randomness one of seed and step."""

WIDTH, BLOCKS = 32, 2
MAX_TOKENS = 16
FEATURES = Features({"image": ImageColumn(decode=False), "captions": Sequence(Value("string")), "id": Value("string")})


def checkpoints(folder: str | Path) -> list[Path]:
    """A run's checkpoints, oldest first."""
    return checkpoint_folders(Path(folder))


def newest_step(folder: str | Path) -> int:
    """The step of the newest checkpoint that is whole; 0 without one."""
    path, _ = newest_checkpoint(Path(folder))
    return 0 if path is None else step_of(path)


def verify_newest(run: Run) -> None:
    """Report how long it takes to find the newest complete checkpoint, with every byte read."""
    start = time.monotonic()
    wrong = verify(checkpoint_folders(Path(run.folder))[-1])
    run.tell("verified", seconds=time.monotonic() - start, wrong=wrong)


class Ours:
    """This project, with data in a folder that `prepare` filled."""

    def __init__(self, data: Path, preset: str = ""):
        self.data, self.preset = data, preset

    def prepare(self, run: Run) -> None:
        """Write the pairs that all trials train on; also fills the caches."""
        self.data.mkdir(parents=True, exist_ok=True)
        for count in sorted({case.rows for case in CASES}):
            table = pa.Table.from_pylist([_row(number) for number in range(count)], FEATURES.arrow_schema)
            pq.write_table(table, self.data / f"train-{count}.parquet", row_group_size=8)
        held_out = pa.Table.from_pylist([_row(number) for number in range(100, 104)], FEATURES.arrow_schema)
        pq.write_table(held_out, self.data / "validation.parquet")

    def tell_shapes(self, run: Run) -> None:
        """Report the shapes of all trained parameters of the preset's model."""
        model, _ = self._model(run)
        run.tell("shapes", shapes=[list(value.shape) for value in model.parameters() if value.requires_grad])

    def train(self, run: Run) -> None:
        """Train, from the newest whole checkpoint if asked to."""
        accelerator = make_accelerator()
        Path(run.folder).mkdir(parents=True, exist_ok=True)
        args = TrainingArguments(
            output_dir=run.folder,
            global_batch_size=BATCH * world_size(),
            micro_batch_size=str(BATCH // run.case.accumulate) if run.case.accumulate > 1 else None,
            max_steps=run.steps,
            save_steps=0,  # decided by the callback
            save_total_limit=run.keep,
            logging_steps=0,
            seed=SEED,
        )
        optimizing = OptimizerArguments(learning_rate=1e-3)
        torch.manual_seed(SEED)
        with accelerator.main_process_first():  # it fills the cache
            model, processor = self._model(run)
            self._loader(run, args, processor, 0, run.steps)
        objective = build_objective(model, ObjectiveArguments("contrastive"), SEED, processor.tokenizer)
        optimizer = build_optimizer(model, optimizing, pretrained=False, device=accelerator.device)
        trainer = Trainer(
            args,
            optimizing,
            accelerator,
            objective,
            optimizer,
            SimpleNamespace(  # type: ignore[arg-type]
                train_batches=lambda start, stop: Told(run, self._loader(run, args, processor, start, stop), start),
                num_rows=run.case.rows,
                max_seq_length=MAX_TOKENS,
                identity={},
                processor=processor,
                eval_loader=None,
            ),
            callbacks=[Telling(run)],
        )
        trainer.train(find_checkpoint("latest", run.folder) if run.resume else None)
        run.ended(trainer.state.global_step, model)

    def _model(self, run: Run) -> tuple[FusionDualEncoderModel, ProcessorMixin]:
        wide = {"hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "num_attention_heads": 2}
        inner = max(64, run.parameters // (2 * WIDTH * BLOCKS))
        dropout = run.case.dropout
        vision = {"model_type": "vit", **wide, "intermediate_size": inner, "patch_size": 16, "image_size": 32}
        text = {"model_type": "bert", **wide, "intermediate_size": 64, "hidden_dropout_prob": dropout}
        text["attention_probs_dropout_prob"] = dropout
        folder = Path(run.folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, config in (("vision", vision), ("text", text)):
            (folder / f"{name}.json").write_text(json.dumps(config))
        model_args = ModelArguments(
            vision_config=self.preset or str(folder / "vision.json"),
            text_config=self.preset or str(folder / "text.json"),
            image_size=32,
            fusion_layers=0,
        )
        processor = load_processor(model_args, iterate_captions(load_pairs(self._data(run.case))["train"]))
        return build_model(model_args, processor.tokenizer), processor

    def _loader(
        self, run: Run, args: TrainingArguments, processor: ProcessorMixin, start: int, stop: int
    ) -> DeviceLoader:
        case = run.case
        loader_args = LoaderArguments(
            max_seq_length=MAX_TOKENS,
            dataloader_num_workers=str(case.workers),
            min_crop_area=0.5 if case.augment else 1.0,
            color_jitter=0.3 if case.augment else 0.0,
        )
        tokenizer = processor.tokenizer
        loaders = Loaders(
            loader_args,
            torch.device("cpu"),
            tokenizer.pad_token_id,
            media.Image(*image_geometry(processor), loader_args.min_crop_area),
        )
        if case.stateful:
            streaming = StreamingArguments(streaming=True, shuffle_block_size=16 if case.sampler == "random" else 8)
            stream = open_stream(self._data(case), streaming, args.batch_sizes, SEED)
            return train_stream(loaders, stream, tokenizer, start, stop)
        rows = tokenize_captions(load_pairs(self._data(case))["train"], tokenizer, MAX_TOKENS)
        order = GlobalOrder(len(rows), args.batch_sizes, SEED)
        return loaders.train(rows, order, start, stop)

    def _data(self, case: Case) -> DataArguments:
        train, held_out = self.data / f"train-{case.rows}.parquet", self.data / "validation.parquet"
        return DataArguments(train_file=str(train), validation_file=str(held_out))


class Told:
    """A loader that reports when the next batch is asked for, and yields NaN once if it is to."""

    def __init__(self, run: Run, loader: DeviceLoader, start: int):
        self.run, self.loader, self.start = run, loader, start

    @property
    def wait(self) -> float:
        """As of the loader."""
        return self.loader.wait

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step, batch in enumerate(self.loader, self.start + 1):
            if step == self.run.nan_at:
                batch["pixel_values"] *= float("nan")
            yield batch
            self.run.went_on(step)


class Telling(TrainerCallback):
    """Saves when the run says so, and tells what happens."""

    def __init__(self, run: Run):
        self.run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report what was loaded."""
        if state.global_step:
            self.run.loaded(state.global_step, kwargs["model"], kwargs["optimizer"].optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the step; a checkpoint follows if it is due."""
        control.should_save = state.global_step in self.run.saves
        self.run.stepped(state.global_step, kwargs["model"], kwargs["optimizer"].optimizer)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report that a checkpoint is complete."""
        self.run.tell("saved", step=step_of(kwargs["checkpoint"]))


def _row(number: int) -> dict[str, Any]:
    buffer = io.BytesIO()
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(0, 256, (36, 40, 3), dtype=torch.uint8, generator=generator)
    Image.fromarray(pixels.numpy()).save(buffer, "PNG")
    caption = " ".join(["picture", *str(number), *["again"] * (number % 5)])
    return {"image": {"bytes": buffer.getvalue(), "path": None}, "captions": [caption], "id": f"id-{number}"}
