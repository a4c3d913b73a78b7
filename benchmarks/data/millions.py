"""Measure what grows with the number of rows: settling, near copies, writing, opening, vocabulary, tokens, order.

Rows are drawn: hashes that are evenly spread, captions of 12 words, one tiny picture for all. So nothing is decoded, and what is left is
what one process does for all rows. Near copies are searched for some of the choices of bands, and the time of all is reckoned from them.

    python -m benchmarks.data.millions
    python -m benchmarks.data.millions --rows 10000000 --searches 11 --folder /data/scratch

A line a phase: seconds of the processors, children's too, seconds, and how much more memory of its own the process held at most.
"""

import io
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import psutil
import pyarrow as pa
from PIL import Image

from mm_utils.arguments import arg, parse_args
from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.data.batches.tokens import fingerprint, tokenize_captions
from mm_utils.data.pairs import iterate_captions, load_pairs
from mm_utils.data.prepare.dedup_and_split import ReconcileArguments, reconcile
from mm_utils.data.prepare.ingest import PART_SCHEMA
from mm_utils.data.prepare.on_disk import content_fingerprint, write_findings, write_pairs
from mm_utils.data.prepare.perceptual_hash import FINGERPRINT, choices, pairs_of_choice
from mm_utils.data.rows.source import DataArguments
from mm_utils.extras.data_reports.summary import caption_figures
from mm_utils.model.processor import cached_tokenizer
from mm_utils.run.start import run_script
from mm_utils.text import markdown_table

WORDS = 2_000  # distinct ones
_PART = 2048  # rows of a part, as preparing writes them


@dataclass
class MillionsBenchmarkArguments:
    """How many rows, and what is measured of them."""

    rows: int = arg(100_000, "Rows.")
    searches: int = arg(11, "Choices of bands that are searched for near copies; 0 for all.")
    batch: int = arg(32_768, "Pairs of a batch that is drawn.")
    num_proc: int = arg(1, "Processes that tokenise.")
    folder: str | None = arg(None, "Where rows are written, 1.5 kB each; default: a folder that is removed.")


def write_part(path: Path, first: int, count: int, image: bytes, rng: np.random.Generator) -> None:
    """Write a part of drawn rows as preparing does."""
    words = np.array([f"word{number}" for number in range(WORDS)])
    digits = rng.bytes(32 * count).hex()
    hashes = [digits[at : at + 64] for at in range(0, len(digits), 64)]
    names = [str(first + row) for row in range(count)]
    captions = [
        [" ".join([*chosen, name])]
        for chosen, name in zip(words[rng.integers(0, WORDS, (count, 11))], names, strict=True)
    ]
    prints = rng.bytes(FINGERPRINT.itemsize * count)
    known: dict[str, Any] = {
        "id": names,
        "medium": ["image"] * count,
        "image": [{"bytes": image, "path": None}] * count,
        **dict.fromkeys(("width", "height", "original_width", "original_height"), [16] * count),
        "captions": captions,
        "source": ["drawn"] * count,
        "where": [f"row {name}" for name in names],
        "image_hash": hashes,
        "stored_hash": hashes,
        "stored_bytes": [len(image)] * count,
        "original_bytes": [len(image)] * count,
        "fingerprint": [prints[at : at + FINGERPRINT.itemsize] for at in range(0, len(prints), FINGERPRINT.itemsize)],
    }
    columns = [
        pa.array(known[each.name], each.type) if each.name in known else pa.nulls(count, each.type)
        for each in PART_SCHEMA
    ]
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, PART_SCHEMA) as writer:
        writer.write_table(pa.table(columns, PART_SCHEMA))


class Phases:
    """Measures phases of this process."""

    def __init__(self) -> None:
        self.figures: list[dict[str, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block."""
        most, over = [_own_memory()], threading.Event()

        def watch() -> None:
            while not over.wait(0.05):
                most.append(_own_memory())

        watching = threading.Thread(target=watch)
        watching.start()
        begin, clock = _seconds(), time.perf_counter()
        yield
        spent, waited = _seconds() - begin, time.perf_counter() - clock
        over.set()
        watching.join()
        self.figures.append(
            {
                "phase": name,
                "CPU s": round(spent, 2),
                "s": round(waited, 2),
                "MB more": round((max(most) - most[0]) / 1e6),
            }
        )
        sys.stderr.write(f"{self.figures[-1]}\n")


def _own_memory() -> int:
    """Return bytes of this process that are not those of files."""
    found = psutil.Process().memory_info()
    return int(found.rss - found.shared)


def _seconds() -> float:
    return sum(os.times()[:4])


def some_of(searches: int, spent: list[float]) -> Callable[..., Iterator[Any]]:
    """Return a search of evenly spread choices, which appends the seconds that all would take, reckoned."""

    def search(hashes_N: np.ndarray, radius: int, sift: Callable[[np.ndarray], Any]) -> Iterator[Any]:
        listed = choices(len(hashes_N), radius)
        chosen = listed[:: max(1, len(listed) // (searches or len(listed)))]
        begin = time.process_time()
        for choice in chosen:
            yield from map(sift, pairs_of_choice(hashes_N, radius, choice))
        spent.append((time.process_time() - begin) * len(listed) / len(chosen))

    return search


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Print and return the figures of every phase."""
    args = parse_args(MillionsBenchmarkArguments, argv=argv, doc=__doc__)[MillionsBenchmarkArguments]
    logging.basicConfig(level=logging.WARNING)
    phases, spent, buffer = Phases(), list[float](), io.BytesIO()
    Image.new("RGB", (16, 16), (1, 2, 3)).save(buffer, "PNG")
    with tempfile.TemporaryDirectory(dir=args.folder) as base:
        # 1. Parts, as many processes would have left them.
        datasets.config.HF_DATASETS_CACHE = Path(base, "cache")
        parts, rng = list[Path](), np.random.default_rng(0)
        for first in range(0, args.rows, _PART):
            parts.append(Path(base, f"part-{len(parts):06d}.arrow"))
            write_part(parts[-1], first, min(_PART, args.rows - first), buffer.getvalue(), rng)

        # 2. What preparing does with all rows.
        with phases.phase("settle"):
            found = reconcile(
                parts, ReconcileArguments(), {"drawn": None}, Path(base, "leaks"), search=some_of(args.searches, spent)
            )
        with phases.phase("write"):
            pairs = write_pairs(found, parts, Path(base, "set"))
        with phases.phase("captions and digest of the report"):
            caption_figures(pairs, False)
            content_fingerprint(pairs)
        write_findings(Path(base, "set"), {}, [])
        del found

        # 3. What training does before its first step.
        with phases.phase("open"):
            rows = load_pairs(DataArguments(dataset_name=str(Path(base, "set"))))["train"]
        with phases.phase("vocabulary"):
            tokenizer = cached_tokenizer(iterate_captions(rows), 8192)
        with phases.phase("tokens"):
            rows = tokenize_captions(rows, tokenizer, 64, args.num_proc)
        with phases.phase("fingerprint"):
            fingerprint(rows)
        with phases.phase("order and a batch"):
            order = GlobalOrder(len(rows), BatchSizes((0,), (min(args.batch, len(rows)),)), seed=0)
            order.batch(0)
    figures = [
        *phases.figures,
        {"phase": f"near copies, of {args.searches} searches", "CPU s": round(spent[-1]), "s": "", "MB more": ""},
    ]
    sys.stdout.write(markdown_table(list(figures[0]), [list(each.values()) for each in figures]) + "\n")
    return figures


if __name__ == "__main__":
    run_script(main)
