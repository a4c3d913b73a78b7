"""Measure text-to-image and image-to-text retrieval of a trained model, with and without re-ranking by its fusion head.

The test split of the embedded data set:
    accelerate launch scripts/eval_retrieval.py --model_name_or_path outputs/pretrain-1 --split test

Your own pairs, re-ranking the first 32 of every query, with the curve of recall against their number and what it costs:
    accelerate launch scripts/eval_retrieval.py --model_name_or_path outputs/mine --train_file pairs.jsonl
        --split validation --rerank_top_k 32 --output_dir outputs/retrieval
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from mm_utils.arguments import arg, parse_args
from mm_utils.data.loaders import LoaderArguments, Loaders
from mm_utils.data.sources import DataArguments, load_pairs
from mm_utils.data.tokens import tokenize_captions
from mm_utils.diagnosis import with_health
from mm_utils.flops import measure_flops
from mm_utils.metrics import EvaluationArguments, RetrievalEvaluator
from mm_utils.models import image_geometry, load_model, load_processor_of
from mm_utils.retrieval_report import report_retrieval
from mm_utils.run import RunError, make_accelerator, report_figures, run_script
from mm_utils.word_order import order_texts

logger = logging.getLogger(__name__)


@dataclass
class EvalRetrievalArguments:
    """What to evaluate, on what."""

    model_name_or_path: str | None = arg(None, "The model: the folder that a run left, a checkpoint, or a Hub id.")
    split: str = arg("validation", "Which split: train, validation or test.")
    per_device_eval_batch_size: int = arg(64, "Images per process and forward; it does not change the result.")
    output_dir: str | None = arg(None, "Also leave metrics.json, reranking.json and reranking.png in this folder.")

    def __post_init__(self) -> None:
        if self.model_name_or_path is None:
            raise ValueError("--model_name_or_path is missing; give the folder that a run left, or a Hub id.")


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the script and return its metrics; `argv` lets tests and notebooks call it."""
    # 1. Arguments: dataclass defaults < --config file < command line.
    groups = (EvalRetrievalArguments, EvaluationArguments, DataArguments, LoaderArguments)
    args, eval_args, data_args, loader_args = parse_args(*groups, argv=argv, doc=__doc__)
    accelerator = make_accelerator()

    # 2. Data: the main process fills the cache first, the others read it.
    processor = load_processor_of(args.model_name_or_path)
    with accelerator.main_process_first():
        pairs = load_pairs(data_args, need_train=args.split == "train")
        if args.split not in pairs:
            raise RunError(f"--split is {args.split}; the data has {', '.join(pairs)}.")
        rows = tokenize_captions(pairs[args.split], processor.tokenizer, loader_args.max_seq_length)
        if args.output_dir:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    loaders = Loaders(loader_args, accelerator.device, processor.tokenizer.pad_token_id, *image_geometry(processor))
    captions = sum(map(len, rows["captions"]))
    logger.info("%s: %s images, %s captions", args.split, f"{len(rows):,}", f"{captions:,}")

    # 3. Model.
    model = load_model(args.model_name_or_path).eval()
    flops = measure_flops(model, loaders.image_size, loader_args.max_seq_length)
    model = accelerator.prepare(model)

    # 4. Evaluate.
    order = order_texts(rows, processor.tokenizer, loader_args.max_seq_length)
    evaluator = RetrievalEvaluator(eval_args, order)
    loader = loaders.evaluation(rows, args.per_device_eval_batch_size)
    metrics = with_health(evaluator)(accelerator.unwrap_model(model), loader, accelerator)

    # 5. Report.
    report_retrieval(accelerator, evaluator, flops, args.output_dir)
    report_figures(accelerator, metrics, str(Path(args.output_dir, "metrics.json")) if args.output_dir else None)
    accelerator.end_training()
    return metrics


if __name__ == "__main__":
    run_script(main)
