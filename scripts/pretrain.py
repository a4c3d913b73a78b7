"""Train an image encoder and a text encoder together, from pairs of images and captions.

On a laptop, with the embedded data set, in about four minutes:
    accelerate launch scripts/pretrain.py

Your own pairs, from pretrained encoders, on every GPU that `accelerate config` has set up:
    accelerate launch scripts/pretrain.py --train_file pairs.jsonl --output_dir outputs/mine \\
        --vision_model_name_or_path facebook/dinov2-small --text_model_name_or_path sentence-transformers/all-MiniLM-L6-v2

The time, memory and disk that it will take, tried in a minute:
    accelerate launch scripts/pretrain.py --train_file pairs.jsonl --dry_run

Parquet or tar shards, read while training goes on:
    accelerate launch scripts/pretrain.py --streaming --train_file "shards/web-{0000..0999}.tar" --max_steps 20000

Continue after an interruption, on any number of GPUs:
    accelerate launch scripts/pretrain.py --config outputs/mine/config.yaml --resume_from_checkpoint latest
"""

from collections.abc import Sequence
from functools import partial

from transformers import TrainerCallback

from mm_utils.arguments import parse_args
from mm_utils.checkpointing.files import find_checkpoint
from mm_utils.checkpointing.state import write_model
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.rows.source import DataArguments
from mm_utils.data.streams.stream import StreamingArguments
from mm_utils.evaluation.retrieval import EvaluationArguments
from mm_utils.extras.dry_run.dry_run import dry_run
from mm_utils.extras.frozen.feature_cache import FeatureCacheArguments, cache_features
from mm_utils.extras.frozen.teacher import cache_teacher
from mm_utils.extras.several_media.evaluators import evaluate_media, make_evaluators
from mm_utils.extras.several_media.mixture import MediaArguments, open_media
from mm_utils.extras.several_media.per_medium import build_media
from mm_utils.extras.starts.interpolation import InterpolationArguments, choose_between, copy_weights
from mm_utils.extras.starts.projection_start import ProjectionStartArguments, start_projections
from mm_utils.model.adapt import LoraArguments
from mm_utils.model.build import ModelArguments
from mm_utils.model.flops import measure_flops
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import load_processor
from mm_utils.objectives import ObjectiveArguments, build_objective
from mm_utils.reports.hub import HubArguments
from mm_utils.run.callbacks import default_callbacks
from mm_utils.run.checks import check_model
from mm_utils.run.finish import finish_run
from mm_utils.run.start import RunArguments, run_script, start_run
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.callbacks import TemperatureClamp
from mm_utils.training.diagnosis import CollapseWarning
from mm_utils.training.optim import OptimizerArguments, build_optimizer
from mm_utils.training.trainer import Trainer


def main(argv: Sequence[str] | None = None, callbacks: Sequence[TrainerCallback] = ()) -> dict[str, float]:
    """Run the script and return its metrics; `argv` and `callbacks` let notebooks and launchers call it."""
    # 1. Arguments: dataclass defaults < --config file < command line.
    given = parse_args(
        *(DataArguments, MediaArguments, StreamingArguments, LoaderArguments, FeatureCacheArguments),
        *(ModelArguments, LoraArguments, ProjectionStartArguments, ObjectiveArguments, OptimizerArguments),
        *(TrainingArguments, EvaluationArguments, InterpolationArguments, HubArguments, RunArguments),
        argv=argv,
        doc=__doc__,
    )
    data_args, media_args, stream_args = given[DataArguments], given[MediaArguments], given[StreamingArguments]
    loader_args, cache_args, model_args = given[LoaderArguments], given[FeatureCacheArguments], given[ModelArguments]
    lora_args, start_args, objective_args = (
        given[LoraArguments],
        given[ProjectionStartArguments],
        given[ObjectiveArguments],
    )
    optimizer_args, args, eval_args = given[OptimizerArguments], given[TrainingArguments], given[EvaluationArguments]
    interpolation_args, hub_args, run_args = given[InterpolationArguments], given[HubArguments], given[RunArguments]
    media_args.check(given.settings)
    stream_args.check(loader_args.similar_captions_per_batch, cache_args.cache_features, args.balance)
    objective_args.check(given.settings)
    interpolation_args.check(model_args, bool(start_args.closed_form_images) and not stream_args.streaming)
    check_model(model_args.model_name_or_path)
    check_model(objective_args.teacher_name_or_path, "--teacher_name_or_path")
    if run_args.dry_run:
        return dry_run(main, "pretrain", argv, args, given.settings)
    run = start_run("pretrain", args, run_args, hub_args, given.settings)

    # 2. Data: files, a prepared set or a stream; the processor may learn its vocabulary from the captions.
    readers, make_processor = objective_args.readers, partial(load_processor, model_args)
    data = open_media(run.accelerator, data_args, media_args, stream_args, loader_args, args, make_processor, readers)

    # 3. Model, objective, optimizer.
    resume_from = find_checkpoint(args.resume_from_checkpoint, args.output_dir)
    model = build_media(model_args, data.processor.tokenizer, lora_args, list(data.media), resume_from)
    known = interpolation_args.known_weights(model)  # before the objective adds new ones
    objective = build_objective(model, objective_args, args.seed, data.processor.tokenizer)
    highest_scale = objective_args.highest_scale(model)  # before a checkpoint is loaded
    has_baseline, is_pretrained = start_args.has_baseline(model_args, data), model_args.pretrained
    optimizer = build_optimizer(
        model, optimizer_args, pretrained=is_pretrained, device=run.accelerator.device, has_baseline=has_baseline
    )
    flops = measure_flops(model, data.loaders.blank(1).shape[1:], data.max_seq_length, not cache_args.cache_features)
    if resume_from is None or interpolation_args.wise_ft:
        start_projections(start_args, model_args, data, model, run.accelerator)
    start = copy_weights(model, known)
    cache_features(cache_args, data, objective, run.accelerator)
    cache_teacher(objective_args.teacher_name_or_path, data, objective, run.accelerator)

    # 4. Train.
    evaluators, of_terms = make_evaluators(eval_args, data), objective.evaluators(data.medium)
    evaluate = evaluate_media(evaluators, data, args.seed, of_terms)
    watchers = TemperatureClamp(highest_scale), CollapseWarning(optimizer_args.warmup_ratio, highest_scale)
    callbacks = [*default_callbacks(run, objective, data, flops), *watchers, *callbacks]
    trainer = Trainer(args, optimizer_args, run.accelerator, objective, optimizer, data, evaluate, callbacks)
    args.settle_eval_steps(trainer.state.max_steps, has_baseline)
    metrics = trainer.train(resume_from, has_baseline and not interpolation_args.wise_ft)  # whose alpha 0 is the start

    # 5. Finish: interpolated weights, pictures, model card, push, and the next commands.
    if interpolation_args.wise_ft:
        model = FusionDualEncoderModel.from_pretrained(run.output_dir).to(run.accelerator.device).eval()
        save = partial(write_model, model=model, processor=data.processor)
        rest = data.evaluation("validation"), run.accelerator, "mean_recall", run.output_dir
        found = choose_between(interpolation_args, start, model, evaluate, *rest, save=save)
        metrics = {f"eval_{name}": value for name, value in found.items()}
    for evaluator in of_terms:
        evaluator.report(run.accelerator, data.splits["validation"], data.loaders, run.output_dir)
    finish_run(run, model, data, evaluators, metrics, argv)
    return metrics


if __name__ == "__main__":
    run_script(main)
