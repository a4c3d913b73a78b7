"""What loading a pair costs: this loader and others, over the same pairs, in turn.

    python -m benchmarks.loading            # 2,048 synthetic photographs, made once
    python -m benchmarks.loading --train_file pairs.jsonl --contestants datasets,tandem,lmdb

- `datasets`: the normal way. Its `Image` feature decodes the original files, `with_transform` resizes, takes the centre and normalises in
  fp32 with torchvision, a stock `DataLoader` stacks.
- `tandem_originals`: this project's loader over the original files; `tandem`: over the JPEGs that scripts/prepare_data.py makes of them,
  in memory-mapped Arrow; `tandem_raw`: over its raw pixels (`--store raw`).
- `lmdb`: the prepared JPEG bytes in LMDB, beside Arrow, through a stock `DataLoader`.

All but `datasets` decode, crop and resize with the same code. Each reader is a process with
its workers, and first reads an epoch: it is compared if every pair comes once. Then all run in turn and stand still between their
turns. CPU time is of the process and its workers; `relative` is images per CPU second, to the first. Files are in memory.
"""

import argparse
import hashlib
import importlib.util
import json
import logging
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor

from benchmarks.harness import compete, cpu_seconds, flags_of, names, print_table
from mm_utils.data import media
from mm_utils.data.arguments import DataArguments, LoaderArguments
from mm_utils.data.batches.loaders import Loaders
from mm_utils.data.batches.order import GlobalOrder, RankBatches
from mm_utils.data.batches.sizes import BatchSizes
from mm_utils.data.batches.tokens import pad_captions, tokenize_captions
from mm_utils.data.images import read_pixels
from mm_utils.data.media.medium import image_geometry, squares
from mm_utils.data.pairs import load_pairs
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.processor import load_processor
from mm_utils.stored import stored
from scripts import prepare_data

Batches = Iterator[dict[str, Any]]

SEED = 42
ENDLESS = 10**6


def photographs(folder: Path, images: int) -> Path:
    """`pairs.jsonl` of synthetic photographs of 640 x 480: noise whose spectrum falls as 1/f, like photographs', around one colour."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in range(images + 2):
        rng = np.random.default_rng(seed)
        width, height = (640, 480) if seed % 3 else (480, 640)
        pixels = np.full((height, width, 3), rng.uniform(40, 215, 3), np.float32)
        for octave in range(1, 9):  # every octave has the same power
            cells = rng.integers(0, 256, (max(2, height >> octave), max(2, width >> octave), 3), dtype=np.uint8)
            layer = Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC)
            pixels += (np.asarray(layer, np.float32) - 127.5) * 0.2
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / f"{seed:06d}.jpg", quality=90)
        split = "train" if seed < images else "validation"
        rows.append({"image": f"{seed:06d}.jpg", "caption": f"photograph {seed} of many", "split": split})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / "pairs.jsonl"


class Bench:
    """What all readers share: the prepared pairs, their tokens, the order, and the crop."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.source = Path(
            args.train_file or self.made("photographs", partial(photographs, images=args.images)) / "pairs.jsonl"
        )
        self.loader_args = LoaderArguments(dataloader_num_workers=str(args.num_workers))
        processor = load_processor(ModelArguments(image_size=args.image_size), ("a photograph",))
        self.tokenizer = processor.tokenizer
        self.geometry = image_geometry(processor)
        prepared = self.prepared("jpeg")
        whole = args.batch_size * max(1, args.num_workers)
        self.count = min(args.images, len(prepared)) // whole * whole
        if not self.count:
            raise ValueError(
                f"{self.source} has {len(prepared)} pairs; a batch for each worker takes {whole}. Give more."
            )
        self.rows = self.tokenized(prepared)
        self.ids: list[str] = self.rows["id"][:]
        self.tokens: list[list[int]] = [captions[0] for captions in self.rows["input_ids"]]
        self.order = GlobalOrder(len(self.rows), BatchSizes((0,), (args.batch_size,)), SEED)

    def made(self, name: str, write: Callable[[Path], Any]) -> Path:
        """Return a folder of this benchmark, which `write` fills if it is not there; all contestants share it."""
        return stored("loading", f"{self.args.key}-{name}", write, self.args.cache_dir)

    def prepared(self, store: str) -> datasets.Dataset:
        """The training pairs that scripts/prepare_data.py makes of the source."""
        flags = ["--sources", str(self.source), "--store", store, "--image_size", str(self.args.image_size)]
        folder = self.made(store, lambda new: prepare_data.main([*flags, "--output_dir", str(new / "pairs")]))
        return load_pairs(DataArguments(dataset_name=str(folder / "pairs")))["train"]

    def tokenized(self, rows: datasets.Dataset) -> datasets.Dataset:
        """As many rows as are compared, with tokens."""
        return tokenize_captions(rows.select(range(self.count)), self.tokenizer, self.loader_args.max_seq_length)

    def originals(self) -> datasets.Dataset:
        """The source's pairs, in the order of the prepared set."""
        loaded = load_pairs(DataArguments(train_file=str(self.source)))
        rows = datasets.concatenate_datasets(list(loaded.values()))
        place = {name: row for row, name in enumerate(rows["id"])}
        return rows.select([place[name] for name in self.ids])

    def example(self, row: int, epoch: int, content: bytes) -> tuple[Tensor, int]:
        """The square of an encoded image and its row, decoded and cropped as this project does it."""
        least = int(self.args.image_size * self.loader_args.min_crop_area**-0.5) + 1
        rng = random.Random(f"{SEED} {epoch} {self.ids[row]}")
        pixels = read_pixels({"bytes": content, "path": None}, least)[0]
        return squares([pixels], self.args.image_size, self.loader_args.min_crop_area, rng)[0][0], row

    def collate(self, examples: Sequence[tuple[Tensor, int]]) -> dict[str, Any]:
        """As default collating, with captions padded to the longest; the peers' tokens lie ready in memory."""
        pixels, rows = zip(*examples, strict=True)
        input_ids, mask = pad_captions([self.tokens[row] for row in rows], self.tokenizer.pad_token_id)
        tokens = {"input_ids": input_ids, "attention_mask": mask}
        return {"pixel_values": torch.stack(pixels), **tokens, "image_ids": [self.ids[row] for row in rows]}

    def stock_loader(self, rows: Any, batches: Any, collate: Callable) -> Batches:
        """A `DataLoader` with its defaults, and workers that stay."""
        workers = self.args.num_workers
        options = {"num_workers": workers, "persistent_workers": bool(workers), "collate_fn": collate}
        return iter(DataLoader(rows, batch_sampler=batches, **options))


# -- readers ----------------------------------------------------------------------------------------------------------


def plain_datasets(bench: Bench) -> Batches:
    """Every image is decoded whole, resized with torchvision and normalised in fp32."""
    size, mean, std = bench.geometry
    transform = Compose([Resize(size, InterpolationMode.BICUBIC), CenterCrop(size), ToTensor(), Normalize(mean, std)])
    columns = {"image": [image["path"] for image in bench.originals()["image"]], "row": list(range(bench.count))}
    rows = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())

    def transformed(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"pixels": [transform(image.convert("RGB")) for image in batch["image"]], "row": batch["row"]}

    def collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
        return bench.collate([(example["pixels"], example["row"]) for example in examples])

    batches = [[row for row, _ in batch] for batch in RankBatches(bench.order, 0, 2000)]
    return bench.stock_loader(rows.with_transform(transformed), batches, collate)


def tandem(bench: Bench, rows: datasets.Dataset) -> Batches:
    """`Loaders.train`, without what `DeviceLoader` does on the device."""
    medium = media.Image(*bench.geometry, bench.loader_args.min_crop_area)
    loaders = Loaders(bench.loader_args, torch.device("cpu"), bench.tokenizer.pad_token_id, medium)
    order = GlobalOrder(len(rows), BatchSizes((0,), (bench.args.batch_size,)), SEED)
    return iter(loaders.train(rows, order, 0, ENDLESS).loader)


class LmdbPairs(Dataset):
    """Number -> encoded image; opened in the worker that reads it."""

    def __init__(self, bench: Bench):
        self.bench = bench
        self.transaction: Any = None
        self.folder = bench.made(f"lmdb-{bench.count}", self.write)

    def write(self, folder: Path) -> None:
        """Write all prepared images."""
        import lmdb

        contents = [image["bytes"] for image in self.bench.rows["image"]]
        size = 2 * sum(map(len, contents)) + 2**24
        with lmdb.open(str(folder), map_size=size) as environment, environment.begin(write=True) as transaction:
            for row, content in enumerate(contents):
                transaction.put(f"{row:08d}".encode(), content)

    def __getitem__(self, draw: tuple[int, int]) -> tuple[Tensor, int]:
        if self.transaction is None:
            import lmdb

            environment = lmdb.open(str(self.folder), readonly=True, lock=False, readahead=False)
            self.transaction = environment.begin(buffers=True)
        return self.bench.example(*draw, self.transaction.get(f"{draw[0]:08d}".encode()))


def lmdb_pairs(bench: Bench) -> Batches:
    """A stock loader in this project's order."""
    return bench.stock_loader(LmdbPairs(bench), RankBatches(bench.order, 0, ENDLESS), bench.collate)


READERS: dict[str, Callable[[Bench], Batches]] = {
    "datasets": plain_datasets,
    "tandem_originals": lambda bench: tandem(bench, bench.tokenized(bench.originals())),
    "tandem": lambda bench: tandem(bench, bench.rows),
    "tandem_raw": lambda bench: tandem(bench, bench.tokenized(bench.prepared("raw"))),
    "lmdb": lmdb_pairs,
}


class Reader:
    """One reader in its process: each question is a number of batches to take; 0 for an epoch, which is checked."""

    def __init__(self, task: tuple[str, argparse.Namespace]):
        name, args = task
        logging.disable(logging.WARNING)
        warnings.filterwarnings("ignore")
        transformers.logging.set_verbosity_error()
        datasets.disable_progress_bars()
        self.bench = Bench(args)
        self.batches = READERS[name](self.bench)
        self.place = torch.empty(0)

    def __call__(self, batches: int) -> dict[str, Any]:
        """Images, CPU and wall seconds, and bytes of pixels of these batches."""
        if not batches:
            ids: list[str] = []
            while len(ids) < self.bench.count:
                ids += next(self.batches)["image_ids"]
            if sorted(ids) != sorted(self.bench.ids):
                raise ValueError(f"of {self.bench.count} pairs, {len(set(ids))} came in an epoch; not compared")
            return {}
        images = moved = 0
        cpu = cpu_seconds()
        start = time.perf_counter()
        for _ in range(batches):
            pixels = next(self.batches)["pixel_values"]
            if self.place.dtype != pixels.dtype or len(self.place) < len(pixels):
                self.place = torch.empty_like(pixels)
            self.place[: len(pixels)].copy_(pixels)  # as on their way to a device
            images = images + len(pixels)
            moved = moved + pixels.nbytes
        seconds = time.perf_counter() - start
        return {"rate": images / seconds, "cpu": 1e3 * (cpu_seconds() - cpu) / images, "kB": moved / images / 1e3}


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Print the table and return its rows."""
    parser = flags_of(__doc__)
    parser.add_argument("--train_file", help="pairs to read, a table that names image files; default: synthetic ones")
    parser.add_argument("--images", type=int, default=2048, help="at most N pairs are read")
    parser.add_argument("--contestants", type=names([*READERS]), default=",".join(READERS), help="who takes part")
    parser.add_argument("--batch_size", type=int, default=64, help="pairs per batch")
    parser.add_argument("--image_size", type=int, default=224, help="side of the square in pixels")
    parser.add_argument("--num_workers", type=int, default=2, help="worker processes of each loader")
    parser.add_argument("--rounds", type=int, default=5, help="how often each has its turn")
    parser.add_argument("--batches", type=int, default=12, help="counted batches of a turn")
    parser.add_argument("--cache_dir", help="where the stores are made; default: in the cache of datasets")
    args = parser.parse_args(argv)
    named = json.dumps([args.image_size, args.images, args.train_file and str(Path(args.train_file).resolve())])
    args.key = hashlib.blake2b(named.encode(), digest_size=8).hexdigest()
    present = [name for name in args.contestants if name != "lmdb" or importlib.util.find_spec("lmdb")]
    rows: list[dict[str, Any]] = []
    for name, contestant, turns in compete(Reader, present, args, (0, 2), args.batches, args.rounds):
        rows.append({"reader": name})
        if contestant.error:
            rows[-1]["error"] = contestant.error
            continue
        cpu = rows[-1]["CPU ms per image"] = median(turn["cpu"] for turn in turns)
        rows[-1]["relative"] = rows[0].get("CPU ms per image", float("nan")) / cpu
        rows[-1] |= {"images/s": median(turn["rate"] for turn in turns), "kB moved per image": turns[0]["kB"]}
    print_table(rows, [] if present == args.contestants else ["lmdb is not installed"])
    return rows


if __name__ == "__main__":
    main()
