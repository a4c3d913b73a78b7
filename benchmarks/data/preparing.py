"""Measure what preparing an image costs on one core, beside a plain Pillow loop.

    python -m benchmarks.data.preparing
    python -m benchmarks.data.preparing --images photos/ --image_size 336 --output_file preparing.json

`tandem` reads, checks, hashes, fingerprints, shrinks and stores (`mm_utils.data.prepare.ingest`, the part of `prepare_data.py` that
runs on all cores); `pillow` opens, resizes (bicubic) and saves as JPEG of the same quality, and checks nothing. Both read
the same files and write their results. They take turns in one process and on one thread; the figures are medians.
"""

import json
import logging
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.harness import machine
from mm_utils.arguments import arg, parse_args
from mm_utils.data.images import JPEG_QUALITY
from mm_utils.data.prepare.checks import CheckArguments
from mm_utils.data.prepare.ingest import OVERSIZE, Chunk, Storage, ingest
from mm_utils.data.rows.records import FileImage, Record
from mm_utils.run.start import run_script, set_up_logging
from mm_utils.text import markdown_table

logger = logging.getLogger(__name__)


@dataclass
class PreparingBenchmarkArguments:
    """What to measure."""

    images: str | None = arg(None, "A folder of images; default: 256 drawn photographs of 640 x 480 pixels.")
    most: int = arg(256, "Images per turn.")
    image_size: int = arg(224, "As of prepare_data.")
    rounds: int = arg(5, "Turns of each; the median counts.")
    output_file: str | None = arg(None, "Also write the figures to this JSON file.")

    def __post_init__(self) -> None:
        if min(self.most, self.rounds) < 1:
            raise ValueError("--most and --rounds count from 1.")


def draw_photographs(folder: Path, count: int) -> None:
    """JPEGs of 640 x 480 pixels and about 100 kB: noise of every scale, as photographs have."""
    for number in range(count):
        rng = np.random.default_rng(number)
        picture = np.zeros((480, 640, 3), np.float32)
        for cells in (4, 8, 16, 32, 64, 128):
            noise = rng.integers(0, 256, (cells * 3 // 4, cells, 3), dtype=np.uint8)
            picture += np.asarray(Image.fromarray(noise).resize((640, 480), Image.Resampling.BICUBIC)) / cells**0.7
        picture = 255 * (picture - picture.min()) / (picture.max() - picture.min())
        picture += rng.normal(0, 5, picture.shape)  # the sensor's own
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.jpg", quality=90)


def tandem(paths: list[Path], folder: Path, short_side: int) -> None:
    """One chunk of `prepare_data`."""
    records = [Record("images", path.name, None, FileImage(str(path)), [f"image {path.stem}"]) for path in paths]
    ingest(Chunk(0, tuple(records)), folder, CheckArguments(), Storage("jpeg", short_side))


def pillow(paths: list[Path], folder: Path, short_side: int) -> None:
    """What one would write in a notebook."""
    for number, path in enumerate(paths):
        image = Image.open(path).convert("RGB")
        scale = short_side / min(image.size)
        size = (round(image.width * scale), round(image.height * scale))
        image.resize(size, Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=JPEG_QUALITY)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the script; return milliseconds of CPU an image. Tests and notebooks give `argv`."""
    # 1. Arguments: dataclass defaults < --config file < command line.
    args = parse_args(PreparingBenchmarkArguments, argv=argv, doc=__doc__)[PreparingBenchmarkArguments]
    set_up_logging()
    torch.set_num_threads(1)

    with tempfile.TemporaryDirectory() as scratch:
        # 2. Images.
        source = Path(args.images or scratch)
        if not args.images:
            draw_photographs(source, args.most)
        paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))[
            : args.most
        ]
        if not paths:
            raise ValueError(f"--images is {args.images}; it holds no .jpg, .jpeg or .png file. Give another folder.")
        size = statistics.mean(os.path.getsize(path) for path in paths)
        logger.info("%d images of %.0f kB", len(paths), size / 1e3)

        # 3. Turns.
        spent: dict[str, list[float]] = {contestant.__name__: [] for contestant in (pillow, tandem)}
        for _ in range(args.rounds):
            for contestant in (pillow, tandem):
                with tempfile.TemporaryDirectory() as folder:
                    begin = time.process_time()
                    contestant(paths, Path(folder), round(OVERSIZE * args.image_size))
                    spent[contestant.__name__].append((time.process_time() - begin) / len(paths) * 1e3)

    # 4. The table.
    medians = {name: statistics.median(times) for name, times in spent.items()}
    rows = [(name, each, 1e3 / each, medians["pillow"] / each) for name, each in medians.items()]
    logger.info("%s", machine())
    logger.info("\n%s", markdown_table(("", "CPU ms an image", "images a second and core", "speed"), rows))
    if args.output_file:
        result = {"machine": machine(), "image_bytes": size, "milliseconds": medians}
        Path(args.output_file).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return medians


if __name__ == "__main__":
    run_script(main)
