"""Measure zero-shot classification: an image, clip or sound is given the class whose text, "a photo of a {}.", is nearest.

A folder of images, clips or sounds per class, with the table of confusions:
    python scripts/eval_zero_shot.py --model_name_or_path outputs/mine --dataset_name scans/ \\
        --classes names.txt --output_dir outputs/zero-shot

Templates of your own:
    python scripts/eval_zero_shot.py --model_name_or_path outputs/mine --dataset_name scans/ \\
        --templates "a scan of a {}." "{}, seen from above"
"""

import logging
from dataclasses import dataclass

from mm_utils.arguments import arg, parse_args, parse_first, required
from mm_utils.data.arguments import EvaluatedDataArguments, ReadingArguments
from mm_utils.finetuning.arguments import ZeroShotArguments


@dataclass
class EvalZeroShotArguments:
    """The model to evaluate, and the folder of the results."""

    model_name_or_path: str = required("The model: a run's folder, a checkpoint, or a Hub id.")
    output_dir: str | None = arg(None, "Also write metrics.json and classes.csv to this folder.")


FLAGS = (EvalZeroShotArguments, EvaluatedDataArguments, ZeroShotArguments, ReadingArguments)

if __name__ == "__main__":
    parse_first(*FLAGS, doc=__doc__)

from mm_utils import distributed
from mm_utils.data.batches.loaders import EVALUATION_BATCH, make_loaders
from mm_utils.data.media.medium import kind_of_processor
from mm_utils.files import writable_folder
from mm_utils.finetuning.evaluator import report_classes
from mm_utils.finetuning.zero_shot import ZeroShotEvaluator, accuracy_lines, load_labelled
from mm_utils.model.build import open_model
from mm_utils.run.start import make_accelerator, report_metrics, run_script

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the script and return its metrics; `argv` lets tests and notebooks call it."""
    # 1. Arguments: dataclass defaults < --config file < command line.
    given = parse_args(*FLAGS, argv=argv, doc=__doc__)
    args = given[EvalZeroShotArguments]
    data_args = given[EvaluatedDataArguments]
    zero_shot_args = given[ZeroShotArguments]
    loader_args = given[ReadingArguments]
    given.refuse("max_train_samples", "nothing is trained")
    given.refuse("caption_column", "classes of media are measured")
    accelerator = make_accelerator()

    # 2. Model.
    model, processor = open_model(args.model_name_or_path)
    if args.output_dir:
        writable_folder(args.output_dir, "--output_dir")

    # 3. Data: the main process fills the cache first, the others read it.
    with distributed.first_then_others():
        images = load_labelled(data_args, zero_shot_args, kind_of_processor(processor))
    loaders = make_loaders(loader_args, accelerator.device, processor)
    counts = f"{len(images.rows):,}", loaders.medium.kind, f"{len(images.classes):,}"
    logger.info("%s: %s %ss, %s classes", images.split, *counts)

    # 4. Evaluate.
    evaluator = ZeroShotEvaluator(images, processor.tokenizer, loader_args.max_seq_length, zero_shot_args)
    loader = loaders.evaluation(images.rows, EVALUATION_BATCH)
    metrics, guesses = evaluator(accelerator.unwrap_model(accelerator.prepare(model)), loader, accelerator)

    # 5. Report.
    report_metrics(accelerator, accuracy_lines(metrics), metrics, args.output_dir, images.split)
    if folder := args.output_dir:
        distributed.on_first(lambda: report_classes(guesses, images.classes, folder))
    accelerator.end_training()
    return metrics


if __name__ == "__main__":
    run_script(main)
