"""Train an image encoder and a text encoder together, from pairs of images and captions.

On a laptop, with the embedded data set, in under four minutes:
    accelerate launch scripts/pretrain.py

Your own pairs, from pretrained encoders, on every GPU that `accelerate config` was told of:
    accelerate launch scripts/pretrain.py --train_file pairs.jsonl --output_dir outputs/mine
        --vision_model_name_or_path facebook/dinov2-small --text_model_name_or_path sentence-transformers/all-MiniLM-L6-v2

What that will take in time, memory and disk, tried in a minute:
    accelerate launch scripts/pretrain.py --train_file pairs.jsonl --dry_run

Parquet or tar shards, read while training goes on:
    accelerate launch scripts/pretrain.py --streaming --train_file "shards/web-{0000..0999}.tar" --max_steps 20000

Go on after an interruption, on any number of GPUs:
    accelerate launch scripts/pretrain.py --config outputs/mine/config.yaml --resume_from_checkpoint latest
"""

import logging
from functools import partial

from datasets import DatasetDict
from transformers import EarlyStoppingCallback

from mm_utils.arguments import parse_args, to_dict
from mm_utils.callbacks import ProgressBar, TemperatureClamp
from mm_utils.checkpoints import find_checkpoint
from mm_utils.data.loaders import LoaderArguments, Loaders
from mm_utils.data.regions import tokenize_pairs
from mm_utils.data.sources import DataArguments, iterate_captions, load_pairs
from mm_utils.data.stream.stream import StreamingArguments, open_stream
from mm_utils.data.tokens import fingerprint, global_order
from mm_utils.diagnosis import CollapseWarning, with_health
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
from mm_utils.preflight import check_loading
from mm_utils.regions import PointingEvaluator, report_pointing, with_pointing
from mm_utils.run import RunArguments, run_script, start_run
from mm_utils.tracking import Tracking
from mm_utils.trainer import Trainer
from mm_utils.training_arguments import TrainingArguments
from mm_utils.word_order import order_texts

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the script and return its metrics; `argv` lets tests and notebooks call it."""
    # 1. Arguments: dataclass defaults < --config file < command line.
    groups = (
        *(DataArguments, StreamingArguments, LoaderArguments, FeatureCacheArguments),
        *(ModelArguments, ObjectiveArguments, OptimizerArguments, TrainingArguments, EvaluationArguments),
        *(HubArguments, RunArguments),
    )
    parsed = parse_args(*groups, argv=argv, doc=__doc__)
    data_args, stream_args, loader_args, cache_args, *others = parsed
    model_args, objective_args, optimizer_args, args, eval_args, hub_args, run_args = others
    stream_args.check(loader_args.length_bucket_window, loader_args.look_alikes, cache_args.cache_features)
    objective_args.check(stream_args.streaming, cache_args.cache_features, model_args.patch_dropout)
    accelerator = start_run("pretrain", args, *parsed, report_to=run_args.report_to, dry_run=run_args.dry_run)
    tracking = Tracking(accelerator, "pretrain", to_dict(*parsed), args.output_dir)
    rehearsal = Rehearsal(accelerator, args, hub_args) if run_args.dry_run else None

    # 2. Data: the main process fills the cache first, the others read it.
    with accelerator.main_process_first():
        stream = open_stream(data_args, stream_args, args.batch_sizes, args.seed) if stream_args.streaming else None
        pairs = DatasetDict(validation=stream.validation) if stream else load_pairs(data_args)
        processor = load_processor(model_args, stream.captions() if stream else iterate_captions(pairs["train"]))
        if rehearsal:
            pairs, stream = rehearsal.sample(stream or pairs, processor, loader_args.max_seq_length), None
        pairs = tokenize_pairs(
            pairs,
            processor.tokenizer,
            loader_args.max_seq_length,
            data_args.preprocessing_num_workers,
            regions=objective_args.reads_regions,
        )
    loaders = Loaders(
        loader_args,
        accelerator.device,
        processor.tokenizer.pad_token_id,
        *image_geometry(processor),
        regions=objective_args.reads_regions,
    )
    check_loading(loaders, args.batch_sizes.sizes[-1], args.per_device_eval_batch_size, streaming=bool(stream))
    logger.info("%s", ", ".join(f"{name}: {len(split):,} images" for name, split in pairs.items()))

    # 3. Model, objective, optimizer.
    model = build_model(model_args, processor.tokenizer)
    objective = build_objective(model, objective_args, args.seed, processor.tokenizer)
    optimizer = build_optimizer(model, optimizer_args, pretrained=model_args.pretrained, device=accelerator.device)
    counts = (f"{model.num_parameters(only_trainable=trained):,}" for trained in (False, True))
    logger.info("%s parameters, %s of them trained", *counts)
    flops = measure_flops(model, loaders.image_size, loader_args.max_seq_length, not cache_args.cache_features)

    # 4. Train.
    if stream:
        trained_on = (stream.num_rows, stream.fingerprint)
        train_batches = partial(loaders.stream, stream, processor.tokenizer)
    else:
        rows = pairs["train"]
        trained_on = (len(rows), fingerprint(rows))
        order = global_order(
            rows, args.batch_sizes, args.seed, loader_args.length_bucket_window, loader_args.look_alikes
        )
        rows = cache_features(cache_args, rows, objective, loaders, accelerator, args.per_device_eval_batch_size)
        train_batches = partial(loaders.train, rows, order)
    order_pairs = order_texts(pairs["validation"], processor.tokenizer, loader_args.max_seq_length)
    evaluator, pusher = RetrievalEvaluator(eval_args, order_pairs), HubPusher(hub_args, args.output_dir)
    pointing = PointingEvaluator() if loaders.regions else None
    callbacks = [
        ProgressBar(),
        TemperatureClamp(objective_args.max_logit_scale),
        HubCallback(pusher),
        CollapseWarning(optimizer_args.warmup_ratio, objective_args.max_logit_scale),
        *([rehearsal] if rehearsal else []),
    ]
    if not cache_args.cache_features:
        callbacks.append(LoaderAdvice(lambda: loaders.workers))
    if args.early_stopping_patience:
        callbacks.append(EarlyStoppingCallback(args.early_stopping_patience))
    trainer = Trainer(
        args,
        optimizer_args,
        accelerator,
        objective,
        optimizer,
        processor,
        train_batches=train_batches,
        num_rows=trained_on[0],
        eval_loader=loaders.evaluation(pairs["validation"], args.per_device_eval_batch_size),
        evaluate=with_pointing(with_health(evaluator), pointing),
        callbacks=callbacks,
        max_seq_length=loader_args.max_seq_length,
        flops=flops,
        identity={"data": trained_on[1], **loader_args.order},
        tracking=tracking,
    )
    metrics = trainer.train(resume_from=find_checkpoint(args.resume_from_checkpoint, args.output_dir))

    # 5. Finish: pictures, model card, push, and what one would want next.
    report_pointing(accelerator, pointing, pairs["validation"], args.output_dir)
    finish_run(accelerator, args.output_dir, model, pairs, evaluator, metrics, to_dict(*parsed), pusher, trained_on)
    if rehearsal:
        metrics = rehearsal.forecast(trainer, flops)
    tracking.finish()
    return metrics


if __name__ == "__main__":
    run_script(main)
