"""Train an image encoder and a text encoder together, from pairs of images and captions.

On a laptop, with the embedded data set, in under four minutes:
    accelerate launch scripts/pretrain.py

Your own pairs, from pretrained encoders, on every GPU that `accelerate config` was told of:
    accelerate launch scripts/pretrain.py --train_file pairs.jsonl --output_dir outputs/mine
        --vision_model_name_or_path facebook/dinov2-small --text_model_name_or_path sentence-transformers/all-MiniLM-L6-v2

What that will take in time, memory and disk, tried in a minute:
    accelerate launch scripts/pretrain.py --train_file pairs.jsonl --dry_run

Go on after an interruption, on any number of GPUs:
    accelerate launch scripts/pretrain.py --config outputs/mine/config.yaml --resume_from_checkpoint latest
"""

import logging

from transformers import EarlyStoppingCallback

from mm_utils.arguments import parse_args, to_dict
from mm_utils.callbacks import ProgressBar, TemperatureClamp
from mm_utils.checkpoints import find_checkpoint
from mm_utils.data.loaders import LoaderArguments, Loaders
from mm_utils.data.sources import DataArguments, iterate_captions, load_pairs
from mm_utils.data.tokens import global_order, tokenize_splits
from mm_utils.dry_run import Rehearsal
from mm_utils.feature_cache import FeatureCacheArguments, cache_features
from mm_utils.finish import HubCallback, finish_run
from mm_utils.flops import measure_flops
from mm_utils.hub import HubArguments, HubPusher
from mm_utils.metrics import EvaluationArguments, RetrievalEvaluator
from mm_utils.models import ModelArguments, build_model, image_geometry, load_processor
from mm_utils.monitor import LoaderAdvice
from mm_utils.objectives import ObjectiveArguments, build_objective
from mm_utils.optim import OptimizerArguments, build_optimizer
from mm_utils.run import RunArguments, run_script, start_run
from mm_utils.trainer import Trainer
from mm_utils.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the script and return its metrics; `argv` lets tests and notebooks call it."""
    # 1. Arguments: dataclass defaults < --config file < command line.
    towers = (DataArguments, LoaderArguments, ModelArguments, ObjectiveArguments, OptimizerArguments)
    groups = (*towers, FeatureCacheArguments, TrainingArguments, EvaluationArguments, HubArguments, RunArguments)
    parsed = parse_args(*groups, argv=argv, doc=__doc__)
    data_args, loader_args, model_args, objective_args, optimizer_args, *others = parsed
    cache_args, args, eval_args, hub_args, run_args = others
    accelerator = start_run("pretrain", args, *parsed, report_to=run_args.report_to, dry_run=run_args.dry_run)
    rehearsal = Rehearsal(accelerator, args, hub_args) if run_args.dry_run else None

    # 2. Data: the main process fills the cache first, the others read it.
    with accelerator.main_process_first():
        pairs = load_pairs(data_args)
        processor = load_processor(model_args, iterate_captions(pairs["train"]))
        if rehearsal:
            pairs = rehearsal.sample(pairs, processor, loader_args.max_seq_length)
        pairs = tokenize_splits(
            pairs, processor.tokenizer, loader_args.max_seq_length, data_args.preprocessing_num_workers
        )
    order = global_order(pairs["train"], args.batch_sizes, args.seed, loader_args.length_bucket_window)
    loaders = Loaders(loader_args, accelerator.device, processor.tokenizer.pad_token_id, *image_geometry(processor))
    logger.info("%s", ", ".join(f"{name}: {len(split):,} images" for name, split in pairs.items()))

    # 3. Model, objective, optimizer.
    model = build_model(model_args, processor.tokenizer)
    objective = build_objective(model, objective_args, args.seed)
    optimizer = build_optimizer(model, optimizer_args, pretrained=model_args.pretrained, device=accelerator.device)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    logger.info("%s parameters, %s of them trained", f"{model.num_parameters():,}", f"{trained:,}")
    rows = cache_features(cache_args, pairs["train"], objective, loaders, accelerator, args.per_device_eval_batch_size)
    flops = measure_flops(model, loaders.image_size, loader_args.max_seq_length, not cache_args.cache_features)

    # 4. Train.
    evaluator, pusher = RetrievalEvaluator(eval_args.rerank_top_k), HubPusher(hub_args, args.output_dir)
    callbacks = [ProgressBar(), TemperatureClamp(objective_args.max_logit_scale), HubCallback(pusher)]
    if not cache_args.cache_features:
        callbacks.append(LoaderAdvice(loader_args.num_workers))
    if rehearsal:
        callbacks.append(rehearsal)
    if args.early_stopping_patience:
        callbacks.append(EarlyStoppingCallback(args.early_stopping_patience))
    trainer = Trainer(
        args,
        optimizer_args,
        accelerator,
        objective,
        optimizer,
        processor,
        train_batches=lambda start, stop: loaders.train(rows, order, start, stop),
        num_rows=len(pairs["train"]),
        eval_loader=loaders.evaluation(pairs["validation"], args.per_device_eval_batch_size),
        evaluate=evaluator,
        callbacks=callbacks,
        max_seq_length=loader_args.max_seq_length,
        flops=flops,
    )
    metrics = trainer.train(resume_from=find_checkpoint(args.resume_from_checkpoint, args.output_dir))

    # 5. Finish: pictures, model card, push, and what one would want next.
    finish_run(accelerator, args.output_dir, model, pairs, evaluator, metrics, to_dict(*parsed), pusher)
    if rehearsal:
        metrics = rehearsal.forecast(trainer, flops)
    accelerator.end_training()
    return metrics


if __name__ == "__main__":
    run_script(main)
