"""Measure text-to-image and image-to-text retrieval of a trained model, with and without re-ranking by its fusion head.

The test split of the embedded data set:
    python scripts/eval_retrieval.py --model_name_or_path outputs/pretrain-1 --split test

Your own pairs, re-ranking the first 32 of every query, with all figures and their intervals in outputs/retrieval/metrics.json:
    python scripts/eval_retrieval.py --model_name_or_path outputs/mine --train_file pairs.jsonl \\
        --split validation --rerank_top_k 32 --output_dir outputs/retrieval

A benchmark, from your files:
    python scripts/eval_retrieval.py --model_name_or_path outputs/mine --split test \\
        --train_file dataset_flickr30k.json --image_root flickr30k-images
"""

import logging
from dataclasses import dataclass

from mm_utils.arguments import arg, parse_args, parse_first, required
from mm_utils.data.arguments import EvaluatedDataArguments, ReadingArguments
from mm_utils.evaluation.arguments import EvaluationArguments


@dataclass
class EvalRetrievalArguments:
    """The model and the split to evaluate."""

    model_name_or_path: str = required("The model: a run's folder, a checkpoint, or a Hub id.")
    split: str = arg("validation", "The split: train, validation or test.")
    output_dir: str | None = arg(None, "Write metrics.json, with all figures and their intervals, to this folder.")


FLAGS = (EvalRetrievalArguments, EvaluationArguments, EvaluatedDataArguments, ReadingArguments)

if __name__ == "__main__":
    parse_first(*FLAGS, doc=__doc__)

from datasets import DatasetDict

from mm_utils import distributed
from mm_utils.data.batches.loaders import EVALUATION_BATCH, make_loaders
from mm_utils.data.batches.tokens import tokenize_splits
from mm_utils.data.pairs import load_split
from mm_utils.evaluation.metrics import half_widths
from mm_utils.evaluation.recall_table import recall_table
from mm_utils.evaluation.retrieval import RetrievalEvaluator, in_turn
from mm_utils.files import writable_folder
from mm_utils.model.build import open_model
from mm_utils.objectives.grounding.evaluation import of_split
from mm_utils.run.start import make_accelerator, report_metrics, run_script

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the script and return its metrics; `argv` lets tests and notebooks call it."""
    # 1. Arguments: dataclass defaults < --config file < command line.
    given = parse_args(*FLAGS, argv=argv, doc=__doc__)
    args = given[EvalRetrievalArguments]
    eval_args = given[EvaluationArguments]
    data_args = given[EvaluatedDataArguments]
    loader_args = given[ReadingArguments]
    accelerator = make_accelerator()

    # 2. Model.
    model, processor = open_model(args.model_name_or_path)
    if args.output_dir:
        writable_folder(args.output_dir, "--output_dir")
    if model.fusion is None:
        given.refuse("rerank_top_k", "the model has no fusion head")

    # 3. Data: the main process fills the cache first, the others read it.
    with distributed.first_then_others():
        split = args.split
        rows = load_split(data_args, args.split)
        moments = of_split(rows)
        others = [] if moments is None else [moments]
        readers = [reader for each in others for reader in each.readers]
        length = loader_args.max_seq_length
        rows = tokenize_splits(DatasetDict({split: rows}), processor.tokenizer, length, readers=readers)[split]
    loaders = make_loaders(loader_args, accelerator.device, processor, readers)
    captions = sum(map(len, rows["captions"]))
    logger.info("%s: %s %ss, %s captions", split, f"{len(rows):,}", loaders.medium.kind, f"{captions:,}")

    # 4. Evaluate.
    evaluator = RetrievalEvaluator(eval_args)
    loader = loaders.evaluation(rows, EVALUATION_BATCH)
    # `prepare` moves it to the device; an evaluation calls the model itself, without DDP around it
    model = accelerator.unwrap_model(accelerator.prepare(model))
    metrics = in_turn(evaluator, *others, *eval_args.own_evaluators())(model, loader, accelerator)

    # 5. Report.
    if accelerator.is_main_process:
        shown = {f"eval_{name}": value for name, value in metrics.items()}
        table = recall_table(shown, evaluator.split, loaders.medium.kind)
        lines = table.lines(f"the {split} split")
        report_metrics(accelerator, lines, metrics | half_widths(evaluator.directions), args.output_dir, split)
    accelerator.end_training()
    return metrics


if __name__ == "__main__":
    run_script(main)
