"""Fine-tune a trained model on classes: of pairs (entailment, questions with frequent answers) or of media.

On a laptop, from the model that scripts/pretrain.py trained: the colour of the things in a picture
    python scripts/finetune.py --model_name_or_path outputs/pretrain-1

The same from both embeddings side by side, for comparison:
    python scripts/finetune.py --model_name_or_path outputs/pretrain-1 --classifier_inputs pair

Questions about your own images:
    python scripts/finetune.py --model_name_or_path outputs/mine --train_file questions.jsonl \\
        --caption_column question --label_column answer

A folder of images per class; adapters in a vision transformer, and weights between start and end:
    python scripts/finetune.py --model_name_or_path outputs/mine --dataset_name scans/ \\
        --lora_rank 8 --freeze_text --wise_ft
"""

import logging
from collections.abc import Sequence

from mm_utils.arguments import parse_args, parse_first
from mm_utils.data.arguments import EvaluatedDataArguments, LoaderArguments
from mm_utils.finetuning.arguments import ClassifierArguments, LabelArguments
from mm_utils.training.arguments import FinetuningArguments, OptimizerArguments

FLAGS = (
    *(EvaluatedDataArguments, LabelArguments, LoaderArguments, ClassifierArguments),
    *(OptimizerArguments, FinetuningArguments),
)

if __name__ == "__main__":
    parse_first(*FLAGS, doc=__doc__)

import torch
from transformers import TrainerCallback

from mm_utils.checkpointing.files import find_checkpoint
from mm_utils.evaluation.retrieval import Evaluate
from mm_utils.finetuning.classifier import build_classifier
from mm_utils.finetuning.evaluator import ClassificationEvaluator
from mm_utils.finetuning.finish import finish_finetuning
from mm_utils.finetuning.labels import open_task
from mm_utils.finetuning.objective import ClassificationObjective
from mm_utils.hub import HubPusher, push
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderForClassification
from mm_utils.model.processor import load_processor_of
from mm_utils.reliability.signals import Leaving
from mm_utils.run.callbacks import all_callbacks, own_callbacks
from mm_utils.run.dry_run import dry_run
from mm_utils.run.finish import Trained
from mm_utils.run.flags import check_flags
from mm_utils.run.start import run_script, start_run
from mm_utils.training.feature_cache import cache_features
from mm_utils.training.optim import build_optimizer
from mm_utils.training.starts import interpolate_weights, weights_of_start
from mm_utils.training.trackers import Tracking
from mm_utils.training.trainer import Trainer, Training

logger = logging.getLogger(__name__)


def main(
    argv: Sequence[str] | None = None, callbacks: Sequence[TrainerCallback] = (), evaluators: Sequence[Evaluate] = ()
) -> dict[str, float]:
    """Run the script and return its metrics; the arguments are those of scripts/pretrain.py's."""
    # 1. Arguments: dataclass defaults < --config file < command line.
    given = parse_args(*FLAGS, argv=argv, doc=__doc__)
    classifier_args = given[ClassifierArguments]
    check_flags(given)
    callbacks = [*own_callbacks(given["callbacks"]), *callbacks]
    if given["dry_run"]:
        return dry_run(main, "finetune", argv, given)
    run = start_run("finetune", given)

    # 2. Data: labelled rows, read with the processor of the model to start from.
    processor = load_processor_of(classifier_args.model_name_or_path)
    sources = given[EvaluatedDataArguments], given[LabelArguments], given[LoaderArguments]
    task, data = open_task(run.accelerator, *sources, run.args, processor, run.fits_batch)
    run = run.settled(data)
    args = run.args
    accelerator = run.accelerator
    logger.info("%s classes", f"{len(task.classes):,}")

    # 3. Model, objective, optimizer; frozen towers run once before the first step.
    resume_from = find_checkpoint(args.resume_from_checkpoint, args.output_dir)
    model = build_classifier(classifier_args, task.classes, has_texts=task.has_texts)
    objective = ClassificationObjective(model, torch.tensor(data.splits["train"]["label"][:]), args.seed)
    optimizer_args = given[OptimizerArguments]
    optimizer = build_optimizer(model, optimizer_args, pretrained=True, device=accelerator.device)
    evaluator = ClassificationEvaluator(data.splits["validation"])
    measures: list[Evaluate] = [evaluator, *evaluators]
    if given["cache_features"]:
        data = cache_features(data, objective, accelerator, measures, run.feature_root)
    start = weights_of_start(model, objective.added) if args.wise_ft else None

    # 4. Train.
    hub = HubPusher(run.output_dir, args.hub_model_id, args.hub_strategy) if args.push_to_hub else None
    tracking = Tracking(args.report_to, run.name, run.output_dir, run.settings)
    every = all_callbacks(run, [hub, tracking, *callbacks])
    training = Training(args, optimizer_args, accelerator, data, measures, every, given.learnt)
    trainer = Trainer(training, objective, optimizer)
    with Leaving(args.resume_command):
        metrics = trainer.train(resume_from)

        # 5. Finish, with the saved model: weights between start and end, the test split, classes, model card, push.
        if start is not None:
            _, metrics = interpolate_weights(start, model, data, measures, args, accelerator)
        # as it was saved: the chosen weights, with adapters merged into them
        saved = FusionDualEncoderForClassification.from_pretrained(run.output_dir).to(accelerator.device).eval()
        if "test" in data.splits:
            evaluator = ClassificationEvaluator(data.splits["test"])
            found = evaluator(saved, data.evaluation("test"), accelerator)
            metrics |= {f"test_{name}": value for name, value in found.items()}
        repository = hub.repository if hub else None
        trained = Trained(run, given, data, model, [trainer.stage], metrics, trainer.choice, repository)
        finish_finetuning(trained, saved, task, evaluator, argv)
        tracking.finish()
        push(hub, accelerator)
        return metrics


if __name__ == "__main__":
    run_script(main)
