"""What the loops of `benchmarks.training` and `benchmarks.learning` share: data, one model, and the peers' batches.

Equal for all are the encoders and their weights, projections and poolers (the stock class knows no other pooling), captions (tokenised
ahead, cut to one length), batch size, device, precision and threads. The peers get more than they have by themselves: this project's
allocator settings, which make training on a CPU several times as fast, and an endless stream of batches, so that no epoch ends and
restarts their workers. Where open_clip is installed, its own `image_transform` and `ClipLoss` are used, else equivalent lines.
"""

import argparse
import importlib.util
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import torch
import torchvision
import transformers
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision.transforms import (
    CenterCrop,
    Compose,
    ConvertImageDtype,
    InterpolationMode,
    Normalize,
    RandomResizedCrop,
    Resize,
    ToTensor,
)

from benchmarks.harness import add_model_flags, model_arguments
from mm_utils.cores import cores_per_process
from mm_utils.data.arguments import DataArguments, LoaderArguments
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.media.medium import image_geometry
from mm_utils.data.pairs import iterate_captions, load_pairs
from mm_utils.model.build import build_model
from mm_utils.model.compile import equal_layers
from mm_utils.model.processor import load_processor
from mm_utils.model.stock import to_dual_encoder
from mm_utils.run.start import make_accelerator
from mm_utils.training.memory import peak_bytes

Batch = dict[str, Any]

SEED = 42
OPEN_CLIP_TOKENS = 77
TRANSFORMERS_TOKENS = 128
ENDLESS = 10**6  # steps of a loader, more than a benchmark takes


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `Bench` reads."""
    parser.add_argument("--train_file", help="pairs, as in scripts/pretrain.py; default: the embedded scenes")
    parser.add_argument("--max_seq_length", type=int, default=64, help="captions are cut to this many tokens")
    parser.add_argument("--dataloader_num_workers", default="auto", help="as in scripts/pretrain.py")
    parser.add_argument("--batch_size", type=int, default=64, help="pairs per step")
    parser.add_argument("--freeze_vision", action="store_true", help="do not train the vision encoder")
    parser.add_argument("--freeze_text", action="store_true", help="do not train the text encoder")
    add_model_flags(parser)


class Bench:
    """One contestant's device, data and model, and a count of the text encoder's tokens."""

    def __init__(self, args: argparse.Namespace, seed: int = SEED):
        self.args = args
        self.accelerator = make_accelerator()
        self.device = self.accelerator.device
        self.batch_size = args.batch_size
        self.max_tokens = args.max_seq_length
        torch.set_num_threads(max(1, cores_per_process()))
        transformers.logging.set_verbosity_error()
        datasets.logging.set_verbosity_error()  # it warns that it cannot hash a scripted transform
        datasets.disable_progress_bars()
        self.loader_args = LoaderArguments(dataloader_num_workers=args.dataloader_num_workers)
        frozen = {"freeze_vision": args.freeze_vision, "freeze_text": args.freeze_text}
        self.model_args = model_arguments(args, **frozen, fusion_layers=0)
        self.splits = load_pairs(DataArguments(train_file=args.train_file))
        processor = load_processor(self.model_args, iterate_captions(self.splits["train"]))
        self.tokenizer = processor.tokenizer
        self.geometry = image_geometry(processor)
        self.pad_token_id = self.tokenizer.pad_token_id
        self.rows = tokenize_captions(self.splits["train"], self.tokenizer, self.max_tokens)
        torch.manual_seed(seed)
        self.model = build_model(self.model_args, self.tokenizer).to(self.device).train()
        self.model.config.text_pooling = "pooler"  # as the peers pool
        self.model.text_model.requires_grad_(not args.freeze_text)
        self.vocabulary = len(self.tokenizer)
        if self.vocabulary < args.vocab_size:
            self.vocabulary = args.vocab_size
            self.model.text_model.resize_token_embeddings(self.vocabulary)
        self.tokens_computed = 0
        self.tokens_real = torch.zeros((), dtype=torch.long, device=self.device)
        self.start_bytes = peak_bytes(self.device)

    def count_tokens_of(self, text_model: torch.nn.Module) -> None:
        """Count what is embedded with gradient, in its first layer; a part embedded twice counts once."""

        def count_computed(layer: torch.nn.Module, args: tuple) -> None:
            if torch.is_grad_enabled():
                self.tokens_computed += args[0].shape[:2].numel()

        def count_real(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                self.tokens_real += kwargs["attention_mask"].sum()

        next(equal_layers(text_model)).register_forward_pre_hook(count_computed)
        text_model.register_forward_pre_hook(count_real, with_kwargs=True)

    def stock_model(self) -> Any:
        """The same model as transformers' class, in the memory layout that it has there; what flags freeze is frozen."""
        stock = to_dual_encoder(self.model).to(self.device).train()
        stock.vision_model.requires_grad_(not self.args.freeze_vision)
        stock.text_model.requires_grad_(not self.args.freeze_text)
        self.count_tokens_of(stock.text_model)
        return stock.to(memory_format=torch.contiguous_format)

    def optimizer_of(self, model: torch.nn.Module, **settings: Any) -> Any:
        """A plain AdamW as the peers' loops build it, prepared for the precision."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return self.accelerator.prepare(torch.optim.AdamW(trained, **settings))

    def random_tokens(self, length: int, width: int) -> Batch:
        """Random captions of one length, padded to `width`, on the device."""
        generator = torch.Generator().manual_seed(SEED)
        drawn = torch.randint(self.vocabulary - 1, (self.batch_size, width), generator=generator)
        mask = (torch.arange(width) < length).long().expand_as(drawn).contiguous()
        input_ids = torch.where(mask.bool(), drawn + (drawn >= self.pad_token_id), self.pad_token_id)
        return {"input_ids": input_ids.to(self.device), "attention_mask": mask.to(self.device)}

    def pairs(self) -> tuple[list[dict[str, Any]], list[list[int]]]:
        """Image and tokens of every pair; for the peers an image is a row for each caption."""
        per_image = list(zip(self.rows["image"], self.rows["input_ids"], strict=True))
        images = [image for image, captions in per_image for _ in captions]
        return images, [ids for _, captions in per_image for ids in captions]

    def endless(self, rows: Any, workers: int, collate: Callable | None = None) -> Iterator[Batch]:
        """Shuffled batches without end, through a `DataLoader` with its default prefetching."""
        if len(rows) < self.batch_size:
            raise ValueError(f"--batch_size is {self.batch_size}; there are {len(rows)} pairs. Give fewer.")
        loader = DataLoader(
            rows,
            batch_size=self.batch_size,
            sampler=RandomSampler(rows, num_samples=ENDLESS * self.batch_size),
            num_workers=workers,
            collate_fn=collate,
            pin_memory=self.device.type == "cuda",
        )
        return iter(loader)


def transformers_batches(bench: Bench) -> Iterator[Batch]:
    """Batches of transformers' contrastive-image-text example: padded tokens, images read when a row is asked for, no workers."""
    size, mean, std = bench.geometry
    whole = [Resize([size], InterpolationMode.BICUBIC), CenterCrop(size)]
    transform = torch.jit.script(torch.nn.Sequential(*whole, ConvertImageDtype(torch.float), Normalize(mean, std)))
    images, captions = bench.pairs()
    padded = [pad_list(ids, TRANSFORMERS_TOKENS, bench.pad_token_id) for ids in captions]
    masks = [[1] * len(ids) + [0] * (TRANSFORMERS_TOKENS - len(ids)) for ids in captions]

    def read(rows: Batch) -> Batch:
        return {**rows, "pixel_values": [transform(read_rgb(image)) for image in rows.pop("image")]}

    def collate(examples: list[Batch]) -> Batch:
        pixels = torch.stack([example["pixel_values"] for example in examples])
        tokens = {name: torch.tensor([row[name] for row in examples]) for name in ("input_ids", "attention_mask")}
        return {"pixel_values": pixels, **tokens}

    columns = {"image": images, "input_ids": padded, "attention_mask": masks}
    return bench.endless(datasets.Dataset.from_dict(columns).with_transform(read), 0, collate)


def read_rgb(image: dict[str, Any]) -> Tensor:
    """Decode an image as torchvision does, channels first."""
    if image["bytes"]:
        data = torch.frombuffer(bytearray(image["bytes"]), dtype=torch.uint8)
        return torchvision.io.decode_image(data, mode=torchvision.io.ImageReadMode.RGB)
    return torchvision.io.read_image(image["path"], mode=torchvision.io.ImageReadMode.RGB)


def open_clip_batches(bench: Bench) -> Iterator[Batch]:
    """Batches of open_clip's CSV data set, with as many workers as this project takes."""
    size, mean, std = bench.geometry
    if importlib.util.find_spec("open_clip"):
        from open_clip.transform import image_transform

        transform = image_transform(size, is_train=True, mean=tuple(mean), std=tuple(std))
    else:
        transform = crops(bench, 0.9)
    return bench.endless(PillowPairs(bench, transform), bench.loader_args.num_workers)


def tuned_batches(bench: Bench) -> Iterator[Batch]:
    """Crops of at least 80 %, and captions cut to the longest of a batch."""
    for batch in bench.endless(PillowPairs(bench, crops(bench, 0.8)), bench.loader_args.num_workers):
        longest = int((batch["input_ids"] != bench.pad_token_id).sum(1).max())
        yield {**batch, "input_ids": batch["input_ids"][:, :longest]}


def crops(bench: Bench, least: float) -> Compose:
    """Random crops of at least this share of the image, normalised."""
    size, mean, std = bench.geometry
    crop = RandomResizedCrop(size, scale=(least, 1.0), interpolation=InterpolationMode.BICUBIC)
    return Compose([to_rgb, crop, ToTensor(), Normalize(mean, std)])


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB."""
    return image.convert("RGB")


class PillowPairs(Dataset):
    """Pairs as open_clip's `CsvDataset` returns them, one at a time, with tokens made ahead."""

    def __init__(self, bench: Bench, transform: Callable[[Image.Image], Tensor]):
        (self.images, self.captions) = bench.pairs()
        self.pad_token_id = bench.pad_token_id
        self.transform = transform

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        image = self.images[place]
        opened = Image.open(io.BytesIO(image["bytes"]) if image["bytes"] else image["path"])
        ids = pad_list(self.captions[place], OPEN_CLIP_TOKENS, self.pad_token_id)
        return {"pixel_values": self.transform(opened), "input_ids": torch.tensor(ids)}


def pad_list(ids: list[int], width: int, pad_token_id: int) -> list[int]:
    """Tokens padded or cut to `width`."""
    return ids[:width] + [pad_token_id] * (width - len(ids))


def synthetic_batches(bench: Bench, width: int) -> Iterator[Batch]:
    """One random batch again and again, normalised, on the device."""
    generator = torch.Generator().manual_seed(SEED)
    pixels = torch.randn(bench.batch_size, 3, bench.geometry[0], bench.geometry[0], generator=generator)
    tokens = bench.random_tokens(min(width, bench.args.synthetic), width)
    return itertools.repeat({"pixel_values": pixels.to(bench.device), **tokens})


def clip_loss() -> Callable[..., Tensor]:
    """open_clip's `ClipLoss` on one process: each direction's logits by its own product."""
    if importlib.util.find_spec("open_clip"):
        from open_clip.loss import ClipLoss

        return ClipLoss()

    def loss(image_NE: Tensor, text_NE: Tensor, scale: Tensor) -> Tensor:
        target = torch.arange(len(image_NE), device=image_NE.device)
        by_image = scale * image_NE @ text_NE.T
        by_text = scale * text_NE @ image_NE.T
        return (F.cross_entropy(by_image, target) + F.cross_entropy(by_text, target)) / 2

    return loss


def mean_of(state_NLC: Tensor, attention_mask_NL: Tensor) -> Tensor:
    """The mean of the tokens that are not padding."""
    weight_NL1 = attention_mask_NL[..., None].to(state_NLC)
    return (state_NLC * weight_NL1).sum(1) / weight_NL1.sum(1)
