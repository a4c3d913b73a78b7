"""Fine-tune a trained model on classes: of pairs (entailment, questions with frequent answers), of media, or of texts.

On a laptop, from the model that scripts/pretrain.py trained: the colour of the things in a picture
    accelerate launch scripts/finetune.py --model_name_or_path outputs/pretrain-1 --task scenes:colour

The same from both embeddings side by side, for comparison:
    accelerate launch scripts/finetune.py --model_name_or_path outputs/pretrain-1 --task scenes:colour \\
        --classifier_inputs pair

Questions about your own images, answered by one of the 1,000 most frequent answers:
    accelerate launch scripts/finetune.py --model_name_or_path outputs/mine --train_file questions.jsonl \\
        --text_column question --label_column answers --num_answers 1000

Sounds of a prepared set, whose captions tell the classes; a folder per class, or a file with a column of labels, goes as well:
    accelerate launch scripts/finetune.py --model_name_or_path outputs/sounds --dataset_name data/sounds

A folder of images per class; adapters in a vision transformer, lower layers slower, weights between start and end:
    accelerate launch scripts/finetune.py --model_name_or_path outputs/mine --dataset_name scans/ \\
        --lora_rank 8 --lora_towers vision --layerwise_lr_decay 0.9 --wise_ft
"""

import logging
from collections.abc import Sequence

import torch
from transformers import TrainerCallback

from mm_utils.arguments import parse_args
from mm_utils.checkpointing.files import find_checkpoint
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.labels import TaskArguments
from mm_utils.data.training_data import open_task
from mm_utils.evaluation.classification import ClassificationEvaluator
from mm_utils.extras.dry_run.dry_run import dry_run
from mm_utils.extras.starts.interpolation import TENTHS, InterpolationArguments, choose_between, copy_weights
from mm_utils.model.adapt import LoraArguments
from mm_utils.model.classifier import ClassifierArguments, build_classifier
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderForClassification
from mm_utils.model.processor import load_processor_of
from mm_utils.objectives.classification import ClassificationObjective, weigh_classes
from mm_utils.reports.hub import HubArguments
from mm_utils.run.callbacks import default_callbacks
from mm_utils.run.checks import check_model
from mm_utils.run.finish import finish_finetuning
from mm_utils.run.start import RunArguments, run_script, start_run
from mm_utils.training.arguments import FinetuningArguments
from mm_utils.training.optim import OptimizerArguments, build_optimizer
from mm_utils.training.trainer import Trainer

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None, callbacks: Sequence[TrainerCallback] = ()) -> dict[str, float]:
    """Run the script and return its metrics; `argv` and `callbacks` let notebooks and launchers call it."""
    # 1. Arguments: dataclass defaults < --config file < command line.
    given = parse_args(
        *(TaskArguments, LoaderArguments, ClassifierArguments, LoraArguments, OptimizerArguments),
        *(FinetuningArguments, InterpolationArguments, HubArguments, RunArguments),
        argv=argv,
        doc=__doc__,
    )
    task_args, loader_args, classifier_args = given[TaskArguments], given[LoaderArguments], given[ClassifierArguments]
    lora_args, optimizer_args, args = given[LoraArguments], given[OptimizerArguments], given[FinetuningArguments]
    interpolation_args, hub_args, run_args = given[InterpolationArguments], given[HubArguments], given[RunArguments]
    check_model(classifier_args.model_name_or_path)
    if run_args.dry_run:
        return dry_run(main, "finetune", argv, args, given.settings)
    run = start_run("finetune", args, run_args, hub_args, given.settings)

    # 2. Data: labelled rows, read with the processor of the model to start from.
    processor = load_processor_of(classifier_args.model_name_or_path)
    task, data = open_task(run.accelerator, task_args, loader_args, args, processor)
    rows, classes = data.splits["train"], len(task.classes)
    logger.info("%s classes", f"{classes:,}")

    # 3. Model, objective, optimizer.
    model = build_classifier(
        classifier_args, lora_args, task.classes, has_images=task.has_images, has_texts=task.has_texts
    )
    start = copy_weights(model, interpolation_args.known_weights(model))
    labels = torch.tensor(rows["label"][:])
    weights = weigh_classes(labels, classes, classifier_args.class_weights)
    objective = ClassificationObjective(model, labels, weights)
    optimizer = build_optimizer(model, optimizer_args, pretrained=True, device=run.accelerator.device)

    # 4. Train.
    evaluator = ClassificationEvaluator(data.splits["validation"], classes)
    trainer = Trainer(
        args,
        optimizer_args,
        run.accelerator,
        objective,
        optimizer,
        data,
        evaluate=evaluator,
        callbacks=[*default_callbacks(run, objective, data), *callbacks],
    )
    metrics = trainer.train(resume_from=find_checkpoint(args.resume_from_checkpoint, args.output_dir))

    # 5. Finish, with the saved model: interpolated weights, the test split, pictures, model card, push.
    saved = FusionDualEncoderForClassification.from_pretrained(run.output_dir).to(run.accelerator.device).eval()
    if interpolation_args.wise_ft:
        found = choose_between(
            interpolation_args,
            start,
            saved,
            evaluator,
            data.evaluation("validation"),
            run.accelerator,
            args.metric_for_best_model,
            run.output_dir,
            TENTHS,
        )
        metrics = {f"eval_{name}": value for name, value in found.items()}
    if "test" in data.splits:
        evaluator = ClassificationEvaluator(data.splits["test"], classes)
        found = evaluator(saved, data.evaluation("test"), run.accelerator)
        metrics |= {f"test_{name}": value for name, value in found.items()}
    finish_finetuning(run, saved, task, data.fingerprint, evaluator, metrics, argv)
    return metrics


if __name__ == "__main__":
    run_script(main)
