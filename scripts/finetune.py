"""Fine-tune a trained model on classes: of pairs (entailment, questions with frequent answers), of images, or of texts.

On a laptop, from what scripts/pretrain.py left: does a text describe the picture, how many things, which colour?
    accelerate launch scripts/finetune.py --model_name_or_path outputs/pretrain-1 --task scenes:colour

The same by both embeddings side by side, for comparison:
    accelerate launch scripts/finetune.py --model_name_or_path outputs/pretrain-1 --task scenes:colour
        --classifier_inputs pair

Questions about your own images, answered by one of the 1,000 most frequent answers:
    accelerate launch scripts/finetune.py --model_name_or_path outputs/mine --train_file questions.jsonl
        --text_column question --label_column answers --num_answers 1000

A folder of images per class; adapters in the vision tower, lower layers slower, weights between start and end:
    accelerate launch scripts/finetune.py --model_name_or_path outputs/mine --dataset_name scans/
        --lora_rank 8 --lora_towers vision --layerwise_lr_decay 0.9 --wise_ft
"""

import logging
from functools import partial
from pathlib import Path

import torch
from transformers import EarlyStoppingCallback

from mm_utils.adapters import LoraArguments, merged
from mm_utils.arguments import parse_args, to_dict
from mm_utils.callbacks import ProgressBar
from mm_utils.checkpoints import find_checkpoint
from mm_utils.classification import ClassificationObjective, ClassifierArguments, build_classifier, weigh_classes
from mm_utils.data.labelled_pairs import TaskArguments, load_task
from mm_utils.data.loaders import LoaderArguments, Loaders
from mm_utils.data.tokens import fingerprint, global_order, tokenize_splits
from mm_utils.finetuning import ClassificationEvaluator, FinetuningArguments, finish_finetuning
from mm_utils.finish import HubCallback
from mm_utils.hub import HubArguments, HubPusher
from mm_utils.interpolation import InterpolationArguments, choose_between
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderForClassification
from mm_utils.models import image_geometry, load_processor_of
from mm_utils.monitor import LoaderAdvice
from mm_utils.optim import OptimizerArguments, build_optimizer
from mm_utils.preflight import check_loading
from mm_utils.run import run_script, start_run
from mm_utils.tracking import Tracking
from mm_utils.trainer import Trainer

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the script and return its metrics; `argv` lets tests and notebooks call it."""
    # 1. Arguments: dataclass defaults < --config file < command line.
    data = (TaskArguments, LoaderArguments, ClassifierArguments, LoraArguments)
    learning = (OptimizerArguments, FinetuningArguments, InterpolationArguments, HubArguments)
    parsed = parse_args(*data, *learning, argv=argv, doc=__doc__)
    task_args, loader_args, classifier_args, lora_args, *others = parsed
    optimizer_args, args, interpolation_args, hub_args = others
    accelerator = start_run("finetune", args, *parsed, report_to=args.report_to)
    tracking = Tracking(accelerator, "finetune", to_dict(*parsed), args.output_dir)

    # 2. Data: the main process fills the cache first, the others read it.
    processor = load_processor_of(classifier_args.model_name_or_path)
    with accelerator.main_process_first():
        task = load_task(task_args)
        task.splits = tokenize_splits(
            task.splits, processor.tokenizer, loader_args.max_seq_length, task_args.preprocessing_num_workers
        )
    rows = task.splits["train"]
    loaders = Loaders(loader_args, accelerator.device, processor.tokenizer.pad_token_id, *image_geometry(processor))
    check_loading(loaders, args.batch_sizes.sizes[-1], args.per_device_eval_batch_size)
    counts = ", ".join(f"{name}: {len(split):,} rows" for name, split in task.splits.items())
    logger.info("%s; %s classes", counts, f"{len(task.classes):,}")

    # 3. Model, objective, optimizer.
    model = build_classifier(
        classifier_args, lora_args, task.classes, has_images=task.has_images, has_texts=task.has_texts
    )
    start = {name: value.clone() for name, value in merged(model.state_dict()).items() if interpolation_args.wise_ft}
    labels = torch.tensor(rows["label"][:])
    weights = weigh_classes(labels, len(task.classes), classifier_args.class_weights)
    objective = ClassificationObjective(model, labels, weights)
    optimizer = build_optimizer(model, optimizer_args, pretrained=True, device=accelerator.device)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    logger.info("%s parameters, %s of them trained", f"{model.num_parameters():,}", f"{trained:,}")

    # 4. Train.
    order = global_order(rows, args.batch_sizes, args.seed, loader_args.length_bucket_window)
    evaluator, pusher = (
        ClassificationEvaluator(task.splits["validation"], len(task.classes)),
        HubPusher(hub_args, args.output_dir),
    )
    eval_loader = loaders.evaluation(task.splits["validation"], args.per_device_eval_batch_size)
    callbacks = [ProgressBar(), HubCallback(pusher), LoaderAdvice(lambda: loaders.workers)]
    if args.early_stopping_patience:
        callbacks.append(EarlyStoppingCallback(args.early_stopping_patience))
    trainer = Trainer(
        args,
        optimizer_args,
        accelerator,
        objective,
        optimizer,
        processor,
        train_batches=partial(loaders.train, rows, order),
        num_rows=len(rows),
        eval_loader=eval_loader,
        evaluate=evaluator,
        callbacks=callbacks,
        max_seq_length=loader_args.max_seq_length,
        identity={"data": fingerprint(rows), **loader_args.order},
        tracking=tracking,
    )
    metrics = trainer.train(resume_from=find_checkpoint(args.resume_from_checkpoint, args.output_dir))

    # 5. Finish, with what was saved: weights in between, the test split, pictures, model card, push.
    folder = Path(args.output_dir)
    saved = FusionDualEncoderForClassification.from_pretrained(folder).to(accelerator.device).eval()
    if interpolation_args.wise_ft:
        found = choose_between(
            interpolation_args, start, saved, evaluator, eval_loader, accelerator, args.metric_for_best_model, folder
        )
        metrics = {f"eval_{name}": value for name, value in found.items()}
    if "test" in task.splits:
        evaluator = ClassificationEvaluator(task.splits["test"], len(task.classes))
        loader = loaders.evaluation(task.splits["test"], args.per_device_eval_batch_size)
        metrics |= {f"test_{name}": value for name, value in evaluator(saved, loader, accelerator).items()}
    finish_finetuning(accelerator, folder, saved, task, evaluator, metrics, to_dict(*parsed), pusher)
    tracking.finish()
    return metrics


if __name__ == "__main__":
    run_script(main)
