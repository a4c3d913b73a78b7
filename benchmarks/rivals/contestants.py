"""The contestants of `benchmarks/training.py`: training loops of one model, each in a process of its own.

Every contestant is a generator that takes one optimizer step per `next`. The process is told which one it is (`Task`), and
answers with what it found; then each question `{"uncounted": u, "counted": n}` makes it take u + n steps and answer with
the time of the last n. After an answer it is stopped, with its loader workers (`benchmarks.harness.TurnTaker`).

- `tandem`: this project's loader, order, objective, gradient caching and optimizer, with the contrastive loss alone; the
  variants take away one thing each, or cut the batch into parts.
- `two_pass_K`: gradient caching as published (arXiv 2101.06983), on this project's loader: K parts are embedded without
  gradient, the loss is taken at the embeddings, and all K are embedded again.
- `transformers`: what `examples/pytorch/contrastive-image-text/run_clip.py` of transformers does, without the callbacks
  and logs of its Trainer: torchvision reads and transforms images in fp32 inside `with_transform`, texts are padded to
  128 tokens, the model returns its own loss, AdamW is fused, gradients are clipped to 1. No loader workers, which is the
  default, or (`transformers_workers`) as many as this project takes.
- `open_clip`: what open_clip's training loop does with a CSV file: Pillow decodes in workers, crops 90 to 100 % of the
  area and normalises in fp32, texts are padded to 77 tokens, `ClipLoss`. Where open_clip is installed, its own
  `image_transform` and `ClipLoss` are used, else equivalent lines; the process says which.

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
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
import torch
import torchvision
import transformers
from accelerate import Accelerator
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision.io import ImageReadMode
from torchvision.transforms import Compose, InterpolationMode, Normalize, RandomResizedCrop, ToTensor
from transformers import VisionTextDualEncoderModel

from benchmarks.harness import give_memory_back, serve, synchronize
from mm_utils import distributed
from mm_utils.data.loading.loaders import DeviceLoader, LoaderArguments, Loaders, image_geometry
from mm_utils.data.loading.order import BatchSizes
from mm_utils.data.loading.tokens import global_order, tokenize_captions
from mm_utils.data.pairs import iterate_captions, load_pairs
from mm_utils.data.sources.source import DataArguments
from mm_utils.model.build import ModelArguments, build_model
from mm_utils.model.flops import measure_flops
from mm_utils.model.processor import load_processor
from mm_utils.objectives import JointObjective, ObjectiveArguments, build_objective
from mm_utils.objectives.grad_cache import backward
from mm_utils.run.start import make_accelerator
from mm_utils.training.memory import peak_bytes
from mm_utils.training.optim import OptimizerArguments, build_optimizer

Batch = dict[str, Any]
Steps = Iterator[None]

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
        on_gpu = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name(self.device) if on_gpu else "cpu",
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
        """Count what is embedded with gradient, so a part that gradient caching embeds twice counts once."""

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
        """The same model as transformers' class, in the memory layout that it has there."""
        stock = self.model.to_dual_encoder().to(self.device).train()  # type: ignore[arg-type]
        if not self.task.peers_channels_last:
            stock.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self.count_tokens_of(stock.text_model)
        return stock

    def layout(self, pixel_values: Tensor) -> Tensor:
        """A peer's images on the device, in its memory layout."""
        wanted = torch.channels_last if self.task.peers_channels_last else torch.contiguous_format
        return pixel_values.to(self.device, non_blocking=True).contiguous(memory_format=wanted)

    def pairs(self) -> tuple[list[dict[str, Any]], list[list[int]]]:
        """Image and caption tokens of every pair, as the peers have them: an image is as many rows as it has captions."""
        per_image = list(zip(self.rows["image"], self.rows["input_ids"], strict=True))
        images = [image for image, captions in per_image for _ in captions]
        return images, [ids for _, captions in per_image for ids in captions]


# -- this project -----------------------------------------------------------------------------------------------------


def tandem(bench: Bench, parts: int = 1, padded_to: int | None = None, grouped: bool = True) -> Steps:
    """This project's step, as `mm_utils.training.trainer` takes it."""
    objective = build_objective(bench.model, ObjectiveArguments("contrastive:1"), SEED)
    objective.groups_texts = grouped
    rates = OptimizerArguments(learning_rate=LEARNING_RATE)
    optimizer = build_optimizer(bench.model, rates, pretrained=bench.model_args.pretrained, device=bench.device)
    objective, optimizer = bench.accelerator.prepare(objective, optimizer)
    bench.count_tokens_of(bench.model.text_model)
    micro_batch_size = -(-bench.task.batch_size // parts) if parts > 1 else None
    for step, batch in enumerate(tandem_batches(bench, padded_to)):
        objective.train()
        backward(bench.accelerator, objective, batch, step, micro_batch_size)
        bench.accelerator.clip_grad_norm_(objective.parameters(), rates.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield


def tandem_batches(bench: Bench, padded_to: int | None = None) -> Iterator[Batch]:
    """This project's batches on the device; `padded_to` pads them further."""
    if bench.task.synthetic:
        pixels = torch.randint(
            256, (bench.task.batch_size, 3, bench.geometry[0], bench.geometry[0]), dtype=torch.uint8
        )
        width = padded_to or bench.max_tokens
        pairs = torch.arange(bench.task.batch_size, device=bench.device)[:, None].expand(-1, 2).contiguous()
        lengths = [min(width, bench.max_tokens)] * bench.task.batch_size
        batch = {
            "pixel_values": pixels.to(bench.device),
            **bench.random_tokens(width),
            "ids": pairs,
            "lengths": lengths,
        }
        return iter(DeviceLoader(itertools.repeat(batch), bench.device, *bench.geometry[1:]))  # type: ignore[arg-type]
    order = global_order(bench.rows, BatchSizes((0,), (bench.task.batch_size,)), SEED)
    loaders = Loaders(bench.loader_args, bench.device, bench.pad_token_id, *bench.geometry)
    batches = iter(loaders.train(bench.rows, order, 0, ENDLESS))
    return batches if padded_to is None else (pad(batch, padded_to, bench.pad_token_id) for batch in batches)


def pad(batch: Batch, width: int, pad_token_id: int) -> Batch:
    """The batch with its captions padded, or cut, to `width` tokens."""
    missing = width - batch["input_ids"].shape[1]
    return {
        **batch,
        "input_ids": F.pad(batch["input_ids"], (0, missing), value=pad_token_id),
        "attention_mask": F.pad(batch["attention_mask"], (0, missing)),
    }


def two_pass(bench: Bench, parts: int) -> Steps:
    """Gradient caching as published; the same seed for both passes of a part makes its dropout the same."""
    model = bench.model
    objective, optimizer = JointObjective(model, {}), bench.optimizer_of(model)
    bench.count_tokens_of(model.text_model)
    cuts = [distributed.share(bench.task.batch_size, part, parts) for part in range(parts)]

    def embed(batch: Batch, cut: range) -> tuple[Tensor, Tensor]:
        torch.manual_seed(cut.start)
        names = ("pixel_values", "input_ids", "attention_mask", "ids", "lengths")
        taken = {name: batch[name][cut.start : cut.stop] for name in names}
        with bench.accelerator.autocast():
            embeds = objective.encode(taken).embeds
            return embeds["image"], embeds["text"]

    for batch in tandem_batches(bench):
        with torch.no_grad():
            embedded = [embed(batch, cut) for cut in cuts]
        image_NE, text_NE = (torch.cat(side).float().requires_grad_() for side in zip(*embedded, strict=True))
        bench.accelerator.backward(clip_loss(image_NE, text_NE, model.logit_scale.exp()))
        assert image_NE.grad is not None
        assert text_NE.grad is not None
        for cut in cuts:
            rows = slice(cut.start, cut.stop)
            image_nE, text_nE = embed(batch, cut)
            pulled = (image_nE * image_NE.grad[rows]).sum() + (text_nE * text_NE.grad[rows]).sum()
            pulled.backward()  # the cached gradients carry the loss scale already
        bench.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


# -- transformers' example --------------------------------------------------------------------------------------------


def transformers_example(bench: Bench, workers: int) -> Steps:
    """The stock class with its own loss, behind torchvision."""
    model = bench.stock_model()
    optimizer = bench.optimizer_of(model, fused=True)
    synthetic = bench.task.synthetic
    batches = synthetic_peer(bench, TRANSFORMERS_TOKENS) if synthetic else transformers_batches(bench, workers)
    for batch in batches:
        batch = {name: value.to(bench.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        batch["pixel_values"] = bench.layout(batch["pixel_values"])
        with bench.accelerator.autocast():
            loss = model(**{**batch, "return_loss": True}).loss
        bench.accelerator.backward(loss)
        bench.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


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


# -- open_clip --------------------------------------------------------------------------------------------------------


def open_clip(bench: Bench) -> Steps:
    """Towers and loss under autocast, no clipping, the temperature clamped after each step."""
    model = bench.stock_model()
    optimizer = bench.optimizer_of(model, betas=(0.9, 0.98), eps=1e-6)
    loss_of: Callable[..., Tensor] = clip_loss
    if open_clip_version():
        from open_clip.loss import ClipLoss

        loss_of = ClipLoss()
    batches = synthetic_peer(bench, OPEN_CLIP_TOKENS) if bench.task.synthetic else open_clip_batches(bench)
    for batch in batches:
        pixel_values, input_ids = (
            bench.layout(batch["pixel_values"]),
            batch["input_ids"].to(bench.device, non_blocking=True),
        )
        optimizer.zero_grad()
        with bench.accelerator.autocast():
            seen = model.vision_model(pixel_values=pixel_values)[1]
            read = model.text_model(input_ids=input_ids, attention_mask=(input_ids != bench.pad_token_id).long())[1]
            image_NE = F.normalize(model.visual_projection(seen), dim=-1)
            text_NE = F.normalize(model.text_projection(read), dim=-1)
            loss = loss_of(image_NE, text_NE, model.logit_scale.exp())
        bench.accelerator.backward(loss)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6052)
        yield


def clip_loss(image_NE: Tensor, text_NE: Tensor, scale: Tensor) -> Tensor:
    """What open_clip's `ClipLoss` computes on one process: each direction's logits by a product of its own."""
    target = torch.arange(len(image_NE), device=image_NE.device)
    by_image, by_text = scale * image_NE @ text_NE.T, scale * text_NE @ image_NE.T
    return (F.cross_entropy(by_image, target) + F.cross_entropy(by_text, target)) / 2


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
    """Pairs as open_clip's `CsvDataset` gives them, one at a time, with tokens made ahead."""

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


def open_clip_version() -> str | None:
    """The installed release of open_clip, if there is one."""
    try:
        return importlib.metadata.version("open_clip_torch")
    except importlib.metadata.PackageNotFoundError:
        return None


# -- what peers share -------------------------------------------------------------------------------------------------


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


# -- one process ------------------------------------------------------------------------------------------------------

CONTESTANTS: dict[str, Callable[[Bench], Steps]] = {
    "tandem": tandem,
    "tandem_ungrouped": partial(tandem, grouped=False),
    "tandem_padded_77": partial(tandem, padded_to=OPEN_CLIP_TOKENS, grouped=False),
    "tandem_cached_2": partial(tandem, parts=2),
    "tandem_cached_4": partial(tandem, parts=4),
    "tandem_cached_8": partial(tandem, parts=8),
    "two_pass_2": partial(two_pass, parts=2),
    "two_pass_8": partial(two_pass, parts=8),
    "transformers": partial(transformers_example, workers=0),
    "transformers_workers": lambda bench: transformers_example(bench, bench.loader_args.num_workers),
    "open_clip": open_clip,
}


def answers() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What this process says to a `Task`, and then to each turn."""
    entered: list[tuple[Bench, Steps]] = []

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if entered:
            return take_turn(*entered[0], **question)
        bench = Bench(Task(**question))
        entered.append((bench, CONTESTANTS[bench.task.contestant](bench)))
        return bench.about()

    return answer


def take_turn(bench: Bench, steps: Steps, uncounted: int, counted: int) -> dict[str, Any]:
    """Seconds and tokens of the counted steps; the most memory before the first step, and so far, in bytes."""
    for _ in range(uncounted):
        next(steps)
    synchronize(bench.device)
    computed, real = bench.tokens_computed, int(bench.tokens_real)
    start = time.perf_counter()
    for _ in range(counted):
        next(steps)
    synchronize(bench.device)
    seconds = time.perf_counter() - start
    give_memory_back(bench.device)
    return {
        "seconds": seconds,
        "pairs": counted * bench.task.batch_size,
        "tokens_computed": bench.tokens_computed - computed,
        "tokens_real": int(bench.tokens_real) - real,
        "start_bytes": bench.start_bytes,
        "peak_bytes": peak_bytes(bench.device),
    }


if __name__ == "__main__":
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
    serve(answers())
