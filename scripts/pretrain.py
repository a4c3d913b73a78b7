"""Train an image encoder and a text encoder together, from pairs of images and captions.

On a laptop, with the embedded data set, in about four minutes:
    python scripts/pretrain.py

Your own pairs, from a frozen CLIP (recipes/photographs.yaml):
    python scripts/pretrain.py --train_file pairs.jsonl --output_dir outputs/mine

From two encoders of your choice, all of a CLIP, or from scratch with 100,000 pairs and more:
    python scripts/pretrain.py --train_file pairs.jsonl --output_dir outputs/mine --config recipes/two_encoders.yaml
    python scripts/pretrain.py --train_file pairs.jsonl --output_dir outputs/mine --config recipes/clip.yaml
    python scripts/pretrain.py --train_file pairs.jsonl --output_dir outputs/mine --vision_config small --text_config small

The time, memory and disk that it will take, tried in a minute:
    python scripts/pretrain.py --train_file pairs.jsonl --dry_run

Parquet or tar shards, read while training goes on:
    python scripts/pretrain.py --streaming --train_file "shards/web-{0000..0999}.tar" --max_steps 20000

Continue after an interruption, on any number of GPUs:
    python scripts/pretrain.py --config outputs/mine/config.yaml --resume_from_checkpoint latest
"""

from collections.abc import Sequence
from functools import partial

from mm_utils.arguments import parse_args, parse_first
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
from mm_utils.data.training_data import TrainingData, open_data
from mm_utils.evaluation.retrieval import Evaluate, RetrievalEvaluator
from mm_utils.model.build import build_model, fit_positions
from mm_utils.model.compile import compile_if_repaid
from mm_utils.model.processor import load_processor
from mm_utils.objectives.build import build_objective, readers_of
from mm_utils.objectives.validation_loss import ValidationLoss
from mm_utils.reliability.signals import Leaving
from mm_utils.run.callbacks import RunContext, all_callbacks, attach, has_baseline
from mm_utils.run.dry_run import dry_run
from mm_utils.run.finish import finish_run
from mm_utils.run.flags import check_flags
from mm_utils.run.recipes import recipe_for
from mm_utils.run.start import run_script, start_run
from mm_utils.training.optim import build_optimizer
from mm_utils.training.stages import remaining, stages_of
from mm_utils.training.trainer import Trainer


def main(
    argv: Sequence[str] | None = None, callbacks: Sequence[TrainerCallback] = (), evaluators: Sequence[Evaluate] = ()
) -> dict[str, float]:
    """Run the script and return its metrics; the arguments let notebooks and launchers call it.

    Args:
        argv: the command line; None for that of the process.
        callbacks: called at the events of `mm_utils.training.trainer` and `mm_utils.run.callbacks`.
        evaluators: called with (model, loader, accelerator) at every evaluation; their metrics are logged.
    """
    # 1. Arguments: dataclass defaults < --config file < command line.
    given = parse_args(*FLAGS, argv=argv, doc=__doc__)
    recipe = recipe_for(given)  # of pairs of one's own, by the start that is named
    if recipe.path:
        given = parse_args(*FLAGS, argv=argv, doc=__doc__, recipe=recipe.path, without=recipe.without)
    check_flags(given)
    attached = attach(given, callbacks)
    model_args, objective_args = given[ModelArguments], given[ObjectiveArguments]
    if given["dry_run"]:
        return dry_run(main, "pretrain", argv, given[TrainingArguments], given.settings)
    run = start_run("pretrain", given)
    args = run.args
    recipe.announce()

    # 2. Data: files, a prepared set or a stream; the processor may learn its vocabulary from the captions.
    opening = (args, partial(load_processor, model_args), readers_of(objective_args))
    data: TrainingData
    if given["streaming"]:
        data = open_streamed(run.accelerator, given, *opening)
    else:
        data_args, loader_args = given[DataArguments], given[LoaderArguments]
        data = open_data(run.accelerator, data_args, loader_args, *opening, fits_batch=run.fits_batch)

    # 3. Model and objective.
    resume_from = find_checkpoint(args.resume_from_checkpoint, args.output_dir)
    model = build_model(model_args, data.processor.tokenizer, data.medium)
    fit_positions(model, data.max_seq_length)
    rows = data.splits.get("train")
    objective = build_objective(model, objective_args, args.seed, rows)
    is_model = has_baseline(given, data, attached)  # before the first step
    run = run.settled(data, is_model)

    # 4. Train, first the encoders, then the fusion head.
    retrieval = RetrievalEvaluator(given[EvaluationArguments], fits=True)
    loss = ValidationLoss(objective.weights, retrieval, run.args.batch_sizes.sizes[-1])
    own = given[EvaluationArguments].own_evaluators()
    measures: list[Evaluate] = [retrieval, loss, *objective.evaluators(data.medium), *own, *evaluators]
    context = RunContext(
        *(run, given, data, model, objective, measures, resume_from, is_model), retrieval=retrieval, callbacks=attached
    )
    context.call("on_start")
    optimizer_args, every = given[OptimizerArguments], all_callbacks(run, attached)
    stages = stages_of(objective, run.args, optimizer_args.head_share, data.num_rows)
    context.stages = stages
    compile_if_repaid(model, model_args.torch_compile, stages[-1].end, run.accelerator.device)
    with Leaving(run.args.resume_command):
        for stage in remaining(stages, resume_from):
            stage.freeze_others(objective)
            optimizer = build_optimizer(
                model,
                optimizer_args,
                pretrained=model_args.pretrained,
                device=run.accelerator.device,
                has_baseline=is_model,
            )
            trainer = Trainer(
                *(run.args, optimizer_args, run.accelerator, objective, optimizer, data, context.evaluators, every),
                flags=given.learnt,
                stage=stage,
            )
            context.metrics = trainer.train(resume_from, context.evaluates_start, context.metrics)
            context.choice = f"{context.choice} {trainer.choice}".strip()
            resume_from = None
            if trainer.ends_run:
                break

        # 5. Finish: what callbacks save, pictures, model card, push, and the next commands.
        context.call("on_finish")
        finish_run(context, argv)
        return context.metrics


if __name__ == "__main__":
    run_script(main)
