"""How often a model that learnt from little data names the right class: cross-validation over the folds of a file.

    python -m benchmarks.folds --train_file sounds_en/captions.jsonl --group_column source --output_file folds.jsonl \\
        --flags "max_steps=300 global_batch_size=48 objectives=contrastive:1 fusion_layers=0"

A row's class is its captions, which the rows of a class have in common; its guess is the class whose captions, embedded, have the
nearest mean, among the classes of its fold. Each fold is left out once and never looked at: the weights are the last ones. Results are added to the file as they
come; started again, it goes on with what is missing. At the end it writes one accuracy over all rows, each the mean of its seeds, with a
95 % interval over groups of rows.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

from benchmarks.ablations.report import with_interval
from benchmarks.harness import machine
from mm_utils.arguments import arg, parse_args
from mm_utils.evaluation.embeddings import embed_split
from mm_utils.evaluation.metrics import mean_interval
from mm_utils.files import append_rows
from mm_utils.run.start import run_script
from mm_utils.text import markdown_table
from scripts import pretrain

_LAST = "eval_steps=0 load_best_model_at_end=false save_steps=0"


@dataclass
class FoldsArguments:
    """The folds of a file, and how a run learns from the others."""

    train_file: str = arg("captions.jsonl", "Rows with captions and a fold each, as JSON lines.")
    fold_column: str = arg("fold", "Column of the fold.")
    group_column: str | None = arg(None, "Column of what is drawn at random, e.g. the recording; default: the row.")
    seeds: str = arg("0,1,2", "Seeds of the runs.")
    flags: str = arg("", "Further settings of scripts/pretrain.py, e.g. max_steps=300 objectives=contrastive:1.")
    output_file: str = arg("folds.jsonl", "Results, one a line; the table is put beside it.")

    def __post_init__(self) -> None:
        if not all(seed.isdecimal() for seed in self.seeds.split(",")):
            raise ValueError(f"--seeds is {self.seeds!r}; write numbers, e.g. 0,1,2.")


def nearest_class(medium_ME: Tensor, caption_TE: Tensor, class_T: Tensor) -> Tensor:
    """Return each row's class `[M]`: that whose captions' unit embeddings have the nearest mean."""
    classes = int(class_T.max()) + 1
    mean_CE = torch.zeros(classes, caption_TE.shape[1]).index_add(0, class_T, F.normalize(caption_TE, dim=-1))
    return (F.normalize(medium_ME, dim=-1) @ F.normalize(mean_CE, dim=-1).T).argmax(1)


class Guesses:
    """An evaluator that keeps, for each row of the fold that is left out, whether its class is found.

    Args:
        classes: the class of each row.

    Attributes:
        right: of the last evaluation.
    """

    def __init__(self, classes: Sequence[int]):
        self.class_M, self.right = torch.tensor(classes), [False] * len(classes)

    def __call__(self, model: Any, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Guess the class of every row."""
        split = embed_split(model, loader, accelerator)
        if len(split.rows_M) != len(self.class_M):
            raise ValueError(
                f"--train_file has {len(self.class_M)} rows of a fold, and {len(split.rows_M)} can be read."
            )
        class_M = self.class_M[split.rows_M]
        owner_T = (split.caption_key_T[:, None] == split.image_key_M).int().argmax(1)
        found_M = nearest_class(split.image_ME, split.text_TE, class_M[owner_T]) == class_M
        self.right = found_M[split.rows_M.argsort()].tolist()
        return {"class_accuracy": found_M.double().mean().item()}


def learn(rows: Sequence[dict[str, Any]], fold: Any, seed: int, args: FoldsArguments) -> list[bool]:
    """Train on the other folds; return for each row of this one whether its class is found."""
    held_out = [tuple(row["captions"]) for row in rows if row[args.fold_column] == fold]
    classes = {captions: place for place, captions in enumerate(dict.fromkeys(held_out))}
    guesses = Guesses([classes[captions] for captions in held_out])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        split = {True: "validation", False: "train"}
        append_rows(path, [{**row, "split": split[row[args.fold_column] == fold]} for row in rows])
        settings = [f"--set={each}" for each in (*_LAST.split(), *args.flags.split(), f"seed={seed}")]
        root = Path(args.train_file).resolve().parent
        settings += [f"--train_file={path}", f"--image_root={root}", f"--output_dir={folder}/run"]
        pretrain.main(settings, evaluators=[guesses])
    return guesses.right


def report(results: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], args: FoldsArguments) -> str:
    """Each fold's accuracy over seeds, and that of all rows, with its 95 % interval over groups."""
    shares, names, table = [], [], []
    for fold in sorted({found["fold"] for found in results}):
        right_SM = torch.tensor([found["right"] for found in results if found["fold"] == fold]).double()
        own = [(place, row) for place, row in enumerate(rows) if row[args.fold_column] == fold]
        names += [row[args.group_column] if args.group_column else place for place, row in own]
        shares.append(right_SM.mean(0))
        table.append([fold, with_interval(right_SM.mean(1).tolist()), len(own), len(right_SM)])
    number = {name: place for place, name in enumerate(dict.fromkeys(names))}
    mean, half_width = mean_interval(torch.cat(shares), torch.tensor([number[name] for name in names]))
    text = f"Accuracy {mean:.3f} ± {half_width:.3f}: {len(names):,} rows of {len(number):,} groups."
    return f"{markdown_table(['fold left out', 'accuracy', 'rows', 'seeds'], table)}\n\n{text}"


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the script and return its results; `argv` lets tests and notebooks call it."""
    args = parse_args(FoldsArguments, argv=argv, doc=__doc__)[FoldsArguments]
    path = Path(args.output_file)
    rows = [json.loads(line) for line in Path(args.train_file).read_text(encoding="utf-8").splitlines()]
    results = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    done = {(found["fold"], found["seed"]) for found in results}
    for seed in map(int, args.seeds.split(",")):
        for fold in sorted({row[args.fold_column] for row in rows}):
            if (fold, seed) not in done:
                right = learn(rows, fold, seed, args)
                results.append({"fold": fold, "seed": seed, "right": right, **machine()})
                append_rows(path, results[-1:])
    text = report(results, rows, args)
    path.with_suffix(".md").write_text(f"{text}\n", encoding="utf-8")
    sys.stdout.write(f"{text}\n")
    return results


if __name__ == "__main__":
    run_script(main)
