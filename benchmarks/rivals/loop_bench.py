"""What the loops of `contestants.py` share: device, data, model, the peers' batches.

Equal for all: backbones and their weights, projections and poolers (the stock class knows no other pooling), captions
(tokenised ahead, cut to one length), batch size, device, precision, threads, and a learning rate of 1e-6, so that none
diverges. The peers get more than they have by themselves: an allocator that keeps its memory (it makes CPU training
several times as fast) and TF32 where there is (`peers_keep_memory`), and an endless stream of batches, so that no epoch
ends and restarts their workers. They do not freeze batch norms, and take images in channels-last layout only with
`peers_channels_last`.
"""

import importlib.metadata
import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import torch
import torchvision
import transformers
from accelerate import Accelerator
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision.io import ImageReadMode
from torchvision.transforms import Compose, InterpolationMode, Normalize, RandomResizedCrop, ToTensor
from transformers import VisionTextDualEncoderModel

from benchmarks.harness import device_name
from mm_utils import distributed
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.media.medium import image_geometry
from mm_utils.data.pairs import iterate_captions, load_pairs
from mm_utils.data.rows.source import DataArguments
from mm_utils.extras.flops.counts import measure_flops
from mm_utils.model.build import ModelArguments, build_model
from mm_utils.model.processor import load_processor
from mm_utils.run.start import make_accelerator
from mm_utils.training.memory import peak_bytes

Batch = dict[str, Any]

SEED = 42
LEARNING_RATE = 1e-6
OPEN_CLIP_TOKENS, TRANSFORMERS_TOKENS = 77, 128
ENDLESS = 10**6
"""Steps of a loader, more than a benchmark takes."""


@dataclass
class Task:
    """One contestant at one setting.

    Attributes:
        contestant: a name in `CONTESTANTS`.
        batch_size: pairs per step.
        caption_tokens: captions are cut to this many; "real" = --max_seq_length.
        synthetic: random images and captions of exactly `caption_tokens`, one batch that stays on the device; no loader.
        peers_keep_memory, peers_channels_last: see above.
        data, loader, model: fields of DataArguments, LoaderArguments and ModelArguments.
        seed: of new weights and of the peers' order.
    """

    contestant: str
    batch_size: int
    caption_tokens: str
    synthetic: bool
    peers_keep_memory: bool
    peers_channels_last: bool
    data: dict[str, Any]
    loader: dict[str, Any]
    model: dict[str, Any]
    seed: int = SEED


class Bench:
    """What all contestants share: device, data, model, and a count of the text tower's tokens."""

    def __init__(self, task: Task):
        self.task = task
        is_peer = task.contestant.startswith(("transformers", "open_clip"))
        self.accelerator = make_accelerator() if task.peers_keep_memory or not is_peer else Accelerator()
        torch.set_num_threads(max(1, distributed.cores_per_process()))
        transformers.logging.set_verbosity_error()
        datasets.logging.set_verbosity_error()  # it warns that it cannot hash a scripted transform
        datasets.disable_progress_bars()
        self.loader_args = LoaderArguments(**task.loader)
        self.max_tokens = (
            self.loader_args.max_seq_length if task.caption_tokens == "real" else int(task.caption_tokens)
        )
        self.model_args = ModelArguments(
            **{**task.model, "fusion_layers": 0, "vision_pooling": "pooler", "text_pooling": "pooler"}
        )
        self.splits = load_pairs(DataArguments(**task.data))
        train = self.splits["train"]
        processor = load_processor(self.model_args, iterate_captions(train))
        self.tokenizer, self.geometry = processor.tokenizer, image_geometry(processor)
        self.pad_token_id = self.tokenizer.pad_token_id
        self.rows = tokenize_captions(train, processor.tokenizer, self.max_tokens)
        lengths = [len(ids) for captions in self.rows["input_ids"] for ids in captions]
        self.mean_tokens = self.max_tokens if task.synthetic else sum(lengths) / len(lengths)
        torch.manual_seed(task.seed)
        self.model = build_model(self.model_args, processor.tokenizer)
        self.vocabulary = len(processor.tokenizer)
        if task.synthetic and self.vocabulary < self.model_args.vocab_size:
            self.vocabulary = self.model_args.vocab_size
            self.model.text_model.resize_token_embeddings(self.vocabulary)
        self.model.to(self.device).train()  # type: ignore[arg-type]
        self.flops = measure_flops(self.model, self.geometry[0], self.max_tokens)
        self.tokens_computed, self.tokens_real = 0, torch.zeros((), dtype=torch.long, device=self.device)
        self.start_bytes = peak_bytes(self.device)

    @property
    def device(self) -> torch.device:
        """Where training happens."""
        return self.accelerator.device

    def about(self) -> dict[str, Any]:
        """What a reader of the figures wants to know of this process."""
        return {
            "device": device_name(self.device),
            "precision": self.accelerator.mixed_precision,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "open_clip": open_clip_version() or "not installed, equivalent lines",
            "workers": self.loader_args.num_workers,
            "images": len(self.rows),
            "mean_tokens": round(self.mean_tokens, 2),
            "gflop_per_pair": round(self.flops.training_step(1, [round(self.mean_tokens)]) / 1e9, 3),
        }

    def count_tokens_of(self, text_model: torch.nn.Module) -> None:
        """Count what is embedded with gradient; a part embedded twice counts once."""

        def count(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                self.tokens_computed += kwargs["input_ids"].numel()
                self.tokens_real += kwargs["attention_mask"].sum()

        text_model.register_forward_pre_hook(count, with_kwargs=True)

    def optimizer_of(self, model: torch.nn.Module, **settings: Any) -> Any:
        """A plain AdamW as the peers' loops build it, prepared for the precision."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return self.accelerator.prepare(torch.optim.AdamW(trained, lr=LEARNING_RATE, **settings))

    def random_tokens(self, width: int) -> Batch:
        """Random captions of the same length, padded to `width`, on the device."""
        length = min(self.max_tokens, width)
        input_ids = torch.full((self.task.batch_size, width), self.pad_token_id)
        other_ids = torch.tensor([token for token in range(self.vocabulary) if token != self.pad_token_id])
        input_ids[:, :length] = other_ids[torch.randint(len(other_ids), (self.task.batch_size, length))]
        attention_mask = (torch.arange(width) < length).long().expand_as(input_ids).contiguous()
        return {"input_ids": input_ids.to(self.device), "attention_mask": attention_mask.to(self.device)}

    def stock_model(self) -> VisionTextDualEncoderModel:
        """The same model as transformers' class, in the memory layout that it has there; what flags freeze is frozen."""
        stock = self.model.to_dual_encoder().to(self.device).train()  # type: ignore[arg-type]
        stock.vision_model.requires_grad_(not self.model_args.freeze_vision)
        stock.text_model.requires_grad_(not self.model_args.freeze_text)
        if not self.task.peers_channels_last:
            stock.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self.count_tokens_of(stock.text_model)
        return stock

    def layout(self, pixel_values: Tensor) -> Tensor:
        """A peer's images on the device, in its memory layout."""
        wanted = torch.channels_last if self.task.peers_channels_last else torch.contiguous_format
        return pixel_values.to(self.device, non_blocking=True).contiguous(memory_format=wanted)

    def pairs(self) -> tuple[list[dict[str, Any]], list[list[int]]]:
        """Image and tokens of every pair; for the peers an image is a row for each caption."""
        per_image = list(zip(self.rows["image"], self.rows["input_ids"], strict=True))
        images = [image for image, captions in per_image for _ in captions]
        return images, [ids for _, captions in per_image for ids in captions]


def open_clip_version() -> str | None:
    """The installed release of open_clip, if there is one."""
    try:
        return importlib.metadata.version("open_clip_torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def transformers_batches(bench: Bench, workers: int) -> Iterator[Batch]:
    """Batches of the example: columns of padded tokens, images read when a row is asked for."""
    from benchmarks.rivals.plain_contrastive import Transform, collate

    transform = torch.jit.script(Transform(*bench.geometry))
    images, captions = bench.pairs()
    tokens = [pad_list(ids, TRANSFORMERS_TOKENS, bench.pad_token_id) for ids in captions]
    columns = {
        "image": images,
        "input_ids": [ids for ids, _ in tokens],
        "attention_mask": [mask for _, mask in tokens],
    }

    def read(rows: Batch) -> Batch:
        return {**rows, "pixel_values": [transform(read_rgb(image)) for image in rows.pop("image")]}

    rows = datasets.Dataset.from_dict(columns).with_transform(read)
    return endless(bench, rows, workers, collate)


def read_rgb(image: dict[str, Any]) -> Tensor:
    """Decode an image as torchvision does, channels first."""
    if image["bytes"]:
        data = torch.frombuffer(bytearray(image["bytes"]), dtype=torch.uint8)
        return torchvision.io.decode_image(data, mode=ImageReadMode.RGB)
    return torchvision.io.read_image(image["path"], mode=ImageReadMode.RGB)


def open_clip_batches(bench: Bench) -> Iterator[Batch]:
    """Batches of the CSV data set, with as many workers as this project takes."""
    size, mean, std = bench.geometry
    if open_clip_version():
        from open_clip.transform import image_transform

        transform = image_transform(size, is_train=True, mean=tuple(mean), std=tuple(std))
    else:
        crop = RandomResizedCrop(size, scale=(0.9, 1.0), interpolation=InterpolationMode.BICUBIC)
        transform = Compose([crop, to_rgb, ToTensor(), Normalize(mean, std)])
    rows = PillowPairs(*bench.pairs(), transform, bench.pad_token_id)
    return endless(bench, rows, bench.loader_args.num_workers)


class PillowPairs(Dataset):
    """Pairs as open_clip's `CsvDataset` returns them, one at a time, with tokens made ahead."""

    def __init__(
        self, images: list[dict[str, Any]], captions: list[list[int]], transform: Callable, pad_token_id: int
    ):
        self.images, self.captions, self.transform, self.pad_token_id = images, captions, transform, pad_token_id

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        image = self.images[place]
        opened = Image.open(io.BytesIO(image["bytes"]) if image["bytes"] else image["path"])
        ids, _ = pad_list(self.captions[place], OPEN_CLIP_TOKENS, self.pad_token_id)
        return {"pixel_values": self.transform(opened), "input_ids": torch.tensor(ids)}


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB."""
    return image.convert("RGB")


def pad_list(ids: list[int], width: int, pad_token_id: int) -> tuple[list[int], list[int]]:
    """Tokens padded or cut to `width`, and their mask."""
    missing = width - len(ids)
    return ids[:width] + [pad_token_id] * missing, [1] * min(len(ids), width) + [0] * missing


def endless(bench: Bench, rows: Any, workers: int, collate: Callable | None = None) -> Iterator[Batch]:
    """Shuffled batches without end, through a `DataLoader` with its default prefetching."""
    if len(rows) < bench.task.batch_size:
        raise ValueError(f"--batch_sizes has {bench.task.batch_size}; there are {len(rows)} pairs.")
    sampler = RandomSampler(rows, num_samples=ENDLESS * bench.task.batch_size)
    return iter(
        DataLoader(
            rows,
            batch_size=bench.task.batch_size,
            sampler=sampler,
            num_workers=workers,
            collate_fn=collate,
            pin_memory=bench.device.type == "cuda",
        )
    )


def synthetic_peer(bench: Bench, width: int) -> Iterator[Batch]:
    """One random batch again and again, normalised, on the device."""
    shape = (bench.task.batch_size, 3, bench.geometry[0], bench.geometry[0])
    batch = {"pixel_values": torch.randn(shape, device=bench.device), **bench.random_tokens(width)}
    return itertools.repeat(batch)
