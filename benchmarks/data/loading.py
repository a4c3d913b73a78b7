"""Measure what loading a pair costs: this loader and others, over the same pairs, in turn.

2,048 synthetic photographs, made once, in under ten minutes on two cores:
    python -m benchmarks.data.loading
Your own pairs, some of the readers, all figures to a file, the table and a picture beside it:
    python -m benchmarks.data.loading --train_file pairs.jsonl --contestants datasets,tandem_jpeg --output_file loading.json
How much memory the main process needs for the metadata of 10 thousand and of a million pairs:
    python -m benchmarks.data.loading --memory

What the readers do, and what is equal for all, is described in `benchmarks/rivals/readers.py`. Those that read another format
read what `scripts/prepare_data.py` made of the same files; `webdataset`, `litdata`, `mosaic` (package mosaicml-streaming)
and `lmdb` take part where they are installed. Each is a process of its own with its workers. First it reads an epoch and is
checked: every pair once, and the right image. Then all run in turn, `--rounds` times, each time from another one on, and
stand still between their turns, so what slows the machine down hits all alike. Figures are medians over the rounds.

CPU time, of the process and its workers, is what a training loop on the same cores loses. `relative` is images per CPU second, to the first contestant. `kB moved` is what a
pair's pixels take on their way to the training process. The first batch is that of a fresh loader in a warm process. Files
are in memory after the check, so no disk is measured. Where a library starts its workers anew after an epoch, fewer than
half of the turns are hit, and the median leaves it out.
"""

import hashlib
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import datasets

from benchmarks.harness import ROOT, TurnTaker, draw_bars, machine
from mm_utils.arguments import arg, parse_args
from mm_utils.distributed import RunError
from mm_utils.run.start import run_script
from mm_utils.text import markdown_table

logger = logging.getLogger(__name__)

PROGRAM = ROOT / "benchmarks/rivals/reader_process.py"
CONTESTANTS = (
    "datasets,tandem_originals,tandem_jpeg,tandem_jpeg_fixed,tandem_raw,tandem_raw_fixed,tandem_stream,lmdb,memmap,"
    "webdataset,litdata,mosaic"
)
COLUMNS = {
    "contestant": "reader", "images_per_second": "images/s", "cpu_ms": "CPU ms per image", "relative": "relative",
    "kb_stored": "kB per pair on disk", "kb_moved": "kB moved per image", "first_batch": "first batch, s",
}  # fmt: skip
MEMORY_COLUMNS = {"rows": "pairs", "resident": "MiB more", "private": "without pages of mapped files"}
METADATA_ROWS = (10_000, 1_000_000)


@dataclass
class LoadingBenchmarkArguments:
    """What to measure, how often."""

    train_file: str | None = arg(None, "Pairs to read, a table that names image files; default: synthetic ones.")
    images: int = arg(2048, "At most N pairs are read.")
    contestants: str = arg(CONTESTANTS, "Who takes part; figures are relative to the first.")
    batch_size: int = arg(64, "Pairs per batch.")
    image_size: int = arg(224, "Side of the square in pixels.")
    num_workers: int = arg(2, "Worker processes of each loader.")
    rounds: int = arg(5, "How often each contestant has its turn.")
    batches_per_round: int = arg(12, "Counted batches of a turn.")
    memory: bool = arg(False, "Measure memory over the number of pairs instead.")
    cache_dir: str | None = arg(None, "Where the stores are made; default in the datasets cache.")
    output_file: str | None = arg(
        None, "Write all figures to this JSON file; beside it table (.md) and picture (.png)."
    )

    def __post_init__(self) -> None:
        self.names = self.contestants.split(",")
        if unknown := set(self.names) - set(CONTESTANTS.split(",")):
            raise ValueError(f"--contestants has {', '.join(sorted(unknown))}; choose from {CONTESTANTS}.")
        if min(self.batch_size, self.rounds, self.batches_per_round, self.num_workers + 1) < 1:
            raise ValueError("--batch_size, --rounds and --batches_per_round count from 1, --num_workers from 0.")
        if self.train_file and not Path(self.train_file).is_file():
            raise ValueError(f"--train_file is {self.train_file}; there is no such file. Check the path.")
        if self.images < self.batch_size * max(1, self.num_workers):
            raise ValueError(f"--images is {self.images}; that is not a batch for each worker. Give more.")

    @property
    def folder(self) -> Path:
        """Where the stores of these pairs are made."""
        named: list[int | str] = [self.image_size, self.images]
        if self.train_file:
            named += [str(Path(self.train_file).resolve()), Path(self.train_file).stat().st_mtime_ns]
        name = hashlib.blake2b(json.dumps(named).encode(), digest_size=8).hexdigest()
        return Path(self.cache_dir or datasets.config.HF_DATASETS_CACHE, "tandem_loading", name)


def compete(args: LoadingBenchmarkArguments) -> list[dict[str, Any]]:
    """One result per contestant, measured in turn."""
    results: list[dict[str, Any]] = [{"contestant": name, "turns": []} for name in args.names]
    shared = {
        name: getattr(args, name) for name in ("train_file", "images", "batch_size", "num_workers", "image_size")
    }
    field: list[TurnTaker] = []
    try:
        for result in results:
            field.append(TurnTaker(PROGRAM))
            task = {"contestant": result["contestant"], "cache_dir": str(args.folder), **shared}
            result |= field[-1].ask(task)
            if "missing" in result:
                field[-1].error = f"not installed: {result['missing']}"
            if wrong := field[-1].ask({"check": True}).get("fault"):
                field[-1].error = wrong
            result |= field[-1].ask({"open": True})
            field[-1].ask({"batches": 2})  # the first ever do not count
            logger.info("%s: %s", result["contestant"], field[-1].error or "every pair once, ready")
        for turn in range(args.rounds):
            for place in [*range(turn % len(field), len(field)), *range(turn % len(field))]:
                results[place]["turns"].append(field[place].ask({"batches": args.batches_per_round}))
            logger.info("round %d of %d", turn + 1, args.rounds)
    finally:
        for contestant in field:
            contestant.end()
    for result, contestant in zip(results, field, strict=True):
        result |= {"error": contestant.error} if contestant.error else summarise(result)
    for result in results:
        both = "error" not in result and "error" not in results[0]
        result["relative"] = results[0]["cpu_ms"] / result["cpu_ms"] if both else None
    return results


def summarise(result: dict[str, Any]) -> dict[str, Any]:
    """The figures of a contestant from its turns."""
    turns = result["turns"]
    return {
        "images_per_second": round(median(turn["images"] / turn["seconds"] for turn in turns)),
        "cpu_ms": median(1000 * turn["cpu_seconds"] / turn["images"] for turn in turns),
        "kb_stored": result["bytes_per_pair"] / 1000,
        "kb_moved": turns[0]["moved"] / turns[0]["images"] / 1000,
    }


def grow(folder: Path) -> list[dict[str, Any]]:
    """Return what the main process takes for each number of rows, each in a process of its own.

    A process before it writes the rows and their tokens to disk.
    """
    results = []
    for count in METADATA_ROWS:
        for _ in ("write", "measure"):
            process = TurnTaker(PROGRAM)
            answer = process.ask({"metadata_rows": count, "cache_dir": str(folder)})
            process.end()
            if process.error:
                raise RunError(f"{count} rows failed: {process.error}")
        results.append({"rows": count} | {name: answer[name] / 2**20 for name in ("resident", "private")})
    return results


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the script and return its figures; `argv` lets tests and notebooks call it."""
    # 1. Arguments.
    args = parse_args(LoadingBenchmarkArguments, argv=argv, doc=__doc__)[LoadingBenchmarkArguments]
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logger.setLevel(logging.INFO)
    args.folder.mkdir(parents=True, exist_ok=True)

    # 2. Measure.
    results = grow(args.folder) if args.memory else compete(args)

    # 3. Report.
    shown = MEMORY_COLUMNS if args.memory else COLUMNS
    lines = [markdown_table(list(shown.values()), [[result.get(name) for name in shown] for result in results]), ""]
    lines += [f"- {result['contestant']}: {result['error']}" for result in results if "error" in result]
    text = "\n".join([*lines, "- " + "; ".join(f"{name}: {value}" for name, value in machine().items())])
    sys.stdout.write(text + "\n")
    if args.output_file:
        path = Path(args.output_file)
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
        if bars := {result["contestant"]: 1000 / result["cpu_ms"] for result in results if "cpu_ms" in result}:
            draw_bars(bars, "Images per CPU second", "tandem", path.with_suffix(".png"))
    return {"results": results}


if __name__ == "__main__":
    run_script(main)
