"""Train an image encoder and a text encoder together, from pairs of images and captions.

On a laptop, with the embedded data set, in about four minutes:
    python scripts/pretrain.py

Your own pairs, from a frozen CLIP (recipes/photographs.yaml):
    python scripts/pretrain.py --train_file pairs.jsonl --output_dir outputs/mine

From two encoders of your choice, all of a CLIP, or from scratch with 100,000 pairs and more:
    python scripts/pretrain.py --train_file pairs.jsonl --output_dir outputs/mine --config recipes/two_encoders.yaml
    python scripts/pretrain.py --train_file pairs.jsonl --output_dir outputs/mine --config recipes/clip.yaml
    python scripts/pretrain.py --train_file pairs.jsonl --output_dir outputs/mine --vision_config small --text_config small

The time, memory and disk that it will take, by a few steps of it:
    python scripts/pretrain.py --train_file pairs.jsonl --dry_run

Parquet or tar shards, read while training goes on:
    python scripts/pretrain.py --streaming --train_file "shards/web-{0000..0999}.tar" --max_steps 20000

Continue after an interruption, on any number of GPUs:
    python scripts/pretrain.py --config outputs/mine/config.yaml --resume_from_checkpoint latest
"""

from collections.abc import Sequence
from functools import partial

from mm_utils.arguments import parse_first
from mm_utils.data.arguments import DataArguments, LoaderArguments, StreamingArguments
from mm_utils.evaluation.arguments import EvaluationArguments
from mm_utils.model.arguments import ModelArguments, ObjectiveArguments
from mm_utils.training.arguments import OptimizerArguments, TrainingArguments

FLAGS = (
    *(DataArguments, LoaderArguments, ModelArguments, ObjectiveArguments),
    *(OptimizerArguments, TrainingArguments, EvaluationArguments, StreamingArguments),
)

if __name__ == "__main__":
    parse_first(*FLAGS, doc=__doc__)

from transformers import TrainerCallback

from mm_utils.checkpointing.files import find_checkpoint
from mm_utils.data.streams.stream import open_streamed
from mm_utils.data.training_data import open_data
from mm_utils.evaluation.retrieval import Evaluate, RetrievalEvaluator
from mm_utils.hub import HubPusher, push
from mm_utils.model.build import build_model, fit_positions
from mm_utils.model.compile import compile_if_repaid
from mm_utils.model.processor import load_processor
from mm_utils.objectives.build import build_objective, readers_of
from mm_utils.objectives.validation_loss import ValidationLoss
from mm_utils.reliability.signals import Leaving
from mm_utils.run.callbacks import all_callbacks, own_callbacks
from mm_utils.run.dry_run import dry_run
from mm_utils.run.finish import Trained, finish_run
from mm_utils.run.flags import check_flags
from mm_utils.run.recipes import parse_with_recipe
from mm_utils.run.start import run_script, start_run
from mm_utils.training.feature_cache import cache_features
from mm_utils.training.optim import build_optimizer
from mm_utils.training.stages import remaining, stages_of
from mm_utils.training.starts import has_baseline, initialise, interpolate_weights, weights_of_start
from mm_utils.training.teacher import distill
from mm_utils.training.trackers import Tracking
from mm_utils.training.trainer import Trainer, Training
from mm_utils.training.warnings import CollapseWarning


def main(
    argv: Sequence[str] | None = None, callbacks: Sequence[TrainerCallback] = (), evaluators: Sequence[Evaluate] = ()
) -> dict[str, float]:
    """Run the script and return its metrics; the arguments let notebooks and launchers call it.

    Args:
        argv: the command line; None for that of the process.
        callbacks: called at the events of `mm_utils.training.trainer`.
        evaluators: called with (model, loader, accelerator) at every evaluation; their metrics are logged.
    """
    # 1. Arguments: dataclass defaults < recipe < --config file < command line.
    given, recipe = parse_with_recipe(*FLAGS, argv=argv, doc=__doc__)
    check_flags(given)
    callbacks = [*own_callbacks(given["callbacks"]), *callbacks]
    model_args = given[ModelArguments]
    if given["dry_run"]:
        return dry_run(main, "pretrain", argv, given)
    run = start_run("pretrain", given)
    accelerator = run.accelerator
    optimizer_args = given[OptimizerArguments]
    recipe.announce()

    # 2. Data: files, a prepared set or a stream; the processor may learn its vocabulary from the captions.
    opening = (run.args, partial(load_processor, model_args), readers_of(given[ObjectiveArguments]))
    if not given["streaming"]:
        data = open_data(
            accelerator, given[DataArguments], given[LoaderArguments], *opening, fits_batch=run.fits_batch
        )
    else:
        data = open_streamed(accelerator, given, *opening)

    # 3. Model, objective, and what measures them.
    resume_from = find_checkpoint(run.args.resume_from_checkpoint, run.args.output_dir)
    model = build_model(model_args, data.processor.tokenizer, data.medium)
    fit_positions(model, data.max_seq_length)
    objective = build_objective(model, given[ObjectiveArguments], run.args.seed, data.splits.get("train"))
    is_model = has_baseline(given, data)  # before the first step
    run = run.settled(data, is_model)
    args = run.args
    retrieval = RetrievalEvaluator(given[EvaluationArguments], fits=True)  # fits the weights of re-ranking
    measures: list[Evaluate] = [
        retrieval,
        ValidationLoss(objective.weights, retrieval, args.batch_sizes.sizes[-1]),
        *objective.evaluators(data.medium),
        *given[EvaluationArguments].own_evaluators(),
        *evaluators,
    ]

    # 4. Before the first step: frozen towers and a teacher run once, and projections start from closed form.
    if model_args.cache_features:
        data = cache_features(data, objective, accelerator, measures, run.feature_root)
    data = distill(data, objective, given["teacher_name_or_path"], accelerator, run.feature_root)
    initialise(model, data, given, measures, resume_from, run.output_dir, accelerator)
    start = weights_of_start(model, objective.added) if args.wise_ft else None

    # 5. Train, first the encoders, then the fusion head.
    hub = HubPusher(run.output_dir, args.hub_model_id, args.hub_strategy) if args.push_to_hub else None
    tracking = Tracking(args.report_to, run.name, run.output_dir, run.settings)
    stages = stages_of(objective, args, optimizer_args.head_share, data.num_rows)
    compile_if_repaid(model, model_args.torch_compile, stages[-1].end, accelerator.device)
    training = Training(
        args,
        optimizer_args,
        accelerator,
        data,
        measures,
        callbacks=all_callbacks(run, [CollapseWarning(optimizer_args), hub, tracking, *callbacks]),
        flags=given.learnt,
    )
    metrics: dict[str, float] = {}
    choices: list[str] = []
    with Leaving(args.resume_command):
        for stage in remaining(stages, resume_from):
            stage.freeze_others(objective)
            optimizer = build_optimizer(
                model,
                optimizer_args,
                pretrained=model_args.pretrained,
                device=accelerator.device,
                has_baseline=is_model,
            )
            trainer = Trainer(training, objective, optimizer, stage)
            # the first stage that is left begins at the checkpoint, the others with what it learnt
            metrics = trainer.train(None if choices else resume_from, is_model and not args.wise_ft, metrics)
            choices.append(trainer.choice)
            if trainer.ends_run:
                break

        # 6. Finish: weights between start and end, pictures, model card, the next commands, push.
        if start is not None:
            model, metrics = interpolate_weights(start, model, data, measures, args, accelerator, retrieval)
        trained = Trained(
            run,
            given,
            data,
            model,
            stages,
            metrics,
            choice=" ".join(filter(None, choices)),
            repository=hub.repository if hub else None,
        )
        finish_run(trained, retrieval, argv, resumed=resume_from is not None)
        tracking.finish()
        push(hub, accelerator)
        return metrics


if __name__ == "__main__":
    run_script(main)
