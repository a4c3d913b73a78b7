"""The flags of the training loop and of the optimizer, named as in `transformers.TrainingArguments`."""

import shlex
import sys
from dataclasses import dataclass, replace
from typing import ClassVar

from mm_utils.arguments import arg, in_notebook, launch_command, launcher
from mm_utils.data.batches.sizes import BatchSizes

# In the output folder:
CONFIG_FILE = "config.yaml"  # all arguments
METRICS_FILE = "metrics.jsonl"  # a row per log and per evaluation
NONFINITE_FILE = "nonfinite_steps.jsonl"  # step, figures and image ids


def greater_is_better(metric: str) -> bool:
    """Return whether a higher value of a metric is better: of all but losses and ranks."""
    return not metric.endswith(("loss", "rank"))


@dataclass(frozen=True)
class TrainingArguments:
    """Training: batch size, length, evaluation, checkpoints."""

    output_dir: str | None = arg(
        None,
        "The folder of the run; default: a new outputs/<script>-N.",
        decides="place",
        usual=True,
        per_machine=True,
    )
    resume_from_checkpoint: str | None = arg(
        None,
        "A checkpoint-N folder, or 'latest': the newest that is undamaged (a first start if there is none).",
        decides="place",
        usual=True,
    )
    global_batch_size: int = arg(
        64, "Pairs per step, over all processes. It decides what is learnt.", decides="place", usual=True, least=2
    )
    batch_size_schedule: str | None = arg(
        None,
        "Grow the batch: step:size,step:size, e.g. 0:256,2000:512; replaces --global_batch_size.",
        decides="place",
    )
    micro_batch_size: str | None = arg(
        None,
        "Pairs per process whose activations are held at a time, or 'auto', when memory is short. It does not change what is "
        "learnt, and is halved when memory runs out.",
        decides="speed",
        usual=True,
    )
    num_train_epochs: float = arg(12.0, "Passes over the training rows.", decides="length", usual=True)
    max_steps: int = arg(-1, "Steps to take instead of --num_train_epochs.", decides="length", usual=True, least=-1)
    logging_steps: int = arg(
        -1, "Log every N steps; -1 = 10, or a tenth of a run that is shorter than 100.", decides="report", least=-1
    )
    eval_steps: int = arg(
        -1,
        "Evaluate every N steps; 0 = only at the end; -1 = before the first step and five times, if the run starts from "
        "a closed form or a whole model, else only at the end.",
        decides="report",
        usual=True,
        least=-1,
    )
    save_steps: int = arg(
        500, "Save a resumable checkpoint every N steps, and at the end; 0 = never.", decides="report", usual=True
    )
    metric_for_best_model: str = arg(
        "mean_recall",
        "The metric of early stopping and of the best checkpoint, e.g. loss, that of the validation split.",
    )
    load_best_model_at_end: bool = arg(
        True,
        "Keep the best evaluated weights instead of the last, if there are evaluations and checkpoints on the way.",
    )
    early_stopping_patience: int = arg(
        0, "Stop after N evaluations without a better metric; 0 = never.", decides="length"
    )
    max_corrupt_share: float = arg(
        0.01,
        "Stop once more than this share of the training rows cannot be read; each is replaced by another.",
        decides="length",
        most=1,
    )
    ddp_timeout: float = arg(
        300.0,
        "Seconds that processes wait for each other within a step before the run stops and names the stalled one.",
        decides="speed",
        least=1,
    )
    wise_ft: bool = arg(
        False,
        "Measure weights between the start (alpha 0) and the end (alpha 1) on the validation split, and save the best.",
    )
    vision_device: str | None = arg(
        None, "The device of the image encoder, e.g. cuda:1, in a run of one process.", decides="speed"
    )
    seed: int = arg(
        42, "Seed of initial weights, order of data, crops, negatives and dropout.", usual=True, most=2**32 - 1
    )
    dry_run: bool = arg(
        False,
        "Try the run on a few pairs, log what it will take in time, memory and disk, and leave nothing.",
        decides="report",
        usual=True,
    )
    callbacks: str | None = arg(
        None,
        "Callbacks of your own, module.Class[,module.Class], made without arguments: docs/objectives.md#what-you-can-attach.",
    )
    report_to: str | None = arg(
        None,
        "Trackers that accelerate knows and that are installed, e.g. tensorboard or tensorboard,wandb; 'none' for none.",
        decides="report",
        usual=True,
    )
    push_to_hub: bool = arg(False, "Push the model to the Hugging Face Hub.", decides="report", usual=True)
    hub_model_id: str | None = arg(
        None, "Repository: 'name' or 'namespace/name'; by default output_dir's name.", decides="place"
    )
    hub_strategy: str = arg(
        "end",
        "end: push once, at the end; checkpoint: also the newest checkpoint at every save, as last-checkpoint.",
        choices=["end", "checkpoint"],
        decides="report",
    )
    # No flags:
    save_total_limit: ClassVar[int] = 2  # checkpoints, in addition to the best ones
    script = "pretrain"  # whose command resumes a run that a notebook has started

    def __post_init__(self) -> None:
        if self.max_steps == 0 or (self.max_steps < 0 and self.num_train_epochs <= 0):
            raise ValueError(
                f"--max_steps is {self.max_steps} and --num_train_epochs {self.num_train_epochs:g}; there is nothing to train. "
                "Give a number of steps from 1."
            )
        object.__setattr__(self, "metric_for_best_model", self.metric_for_best_model.removeprefix("eval_"))
        size = self.micro_batch_size
        if size not in (None, "auto") and not (str(size).isdecimal() and int(size) > 0):
            raise ValueError(f"--micro_batch_size is {size}; give at least 1, 'auto', or leave it out.")
        self.batch_sizes  # noqa: B018  (complain now, not after the data is loaded)
        if self.early_stopping_patience and self.eval_steps <= 0:
            raise ValueError("--early_stopping_patience needs evaluations: set --eval_steps.")

    @property
    def resume_command(self) -> str:
        """The command that resumes this run, to be pasted in the working folder."""
        words = ["--config", f"{self.output_dir}/{CONFIG_FILE}", "--resume_from_checkpoint", "latest"]
        if in_notebook():
            return launch_command(self.script, words)
        return f"{launcher()} {shlex.join([sys.argv[0], *words])}"

    @property
    def batch_sizes(self) -> BatchSizes:
        """The global batch size as a function of the step."""
        if self.batch_size_schedule is not None:
            return BatchSizes.parse(self.batch_size_schedule)
        return BatchSizes((0,), (self.global_batch_size,))

    @property
    def eval_strategy(self) -> str:
        """As transformers' callbacks read it."""
        return "steps" if self.eval_steps > 0 else "no"

    @property
    def greater_is_better(self) -> bool:
        """Whether a higher value of `--metric_for_best_model` is better; `EarlyStoppingCallback` reads it."""
        return greater_is_better(self.metric_for_best_model)

    @property
    def keeps_best(self) -> bool:
        """True if the best evaluated weights are saved on the way, and kept."""
        return self.load_best_model_at_end and self.eval_steps > 0 and self.save_steps > 0

    def settled(self, sizes: BatchSizes, num_rows: int, has_baseline: bool) -> "TrainingArguments":
        """Return these arguments with what depends on the data: batches of `sizes`, and how often a run is evaluated.

        `has_baseline`: the weights before the first step are a model.
        """
        args = replace(self, global_batch_size=sizes.sizes[0]) if self.batch_size_schedule is None else self
        if args.eval_steps >= 0:
            return args
        return replace(args, eval_steps=-(-args.total_steps(num_rows) // 5) if has_baseline else 0)

    def total_steps(self, num_rows: int) -> int:
        """Return the number of steps of the whole run, for a training split of `num_rows`."""
        if self.max_steps > 0:
            return self.max_steps
        pairs = round(self.num_train_epochs * num_rows)
        step = self.batch_sizes.step_of(pairs)  # with the first pair too many: taken if half of its batch is wanted
        return max(1, step + (2 * (pairs - self.batch_sizes.before(step)) > self.batch_sizes.at(step)))


@dataclass(frozen=True)
class FinetuningArguments(TrainingArguments):
    """Training: as for pre-training, with other defaults."""

    num_train_epochs: float = arg(3.0, "Passes over the training rows.", decides="length", usual=True)
    metric_for_best_model: str = arg("accuracy", "The metric of early stopping, of the best checkpoint and of alpha.")
    script = "finetune"


@dataclass
class OptimizerArguments:
    """Optimizer and its schedule."""

    learning_rate: float | None = arg(
        None,
        "Peak learning rate of newly initialised parameters; default: 1e-3, and less for a transformer from scratch that is "
        "wider or deeper than the tiny one.",
        usual=True,
    )
    backbone_learning_rate: float | None = arg(
        None,
        "Peak learning rate of the two backbones, and of projections that are not new; default: a tenth of --learning_rate if "
        "pretrained, else that of new parameters.",
    )
    head_share: float = arg(
        0.5,
        "Share of the steps, the last ones, in which the fusion head is trained, on encoders that stay as they are; before them, "
        "the encoders alone. 0 = all at once. It plays no part without a term of the head.",
        most=0.999,
    )
    weight_decay: float = arg(
        0.1,
        "Decay of matrices; never of norms, biases and scalars, class tokens and embeddings of positions.",
        most=100,
    )
    optim: str = arg(
        "adamw_torch_fused",
        "As in transformers: adamw_torch_fused, which is fused on GPUs and CPUs, adamw_torch, sgd, adafactor.",
        choices=["adamw_torch_fused", "adamw_torch", "sgd", "adafactor"],
    )
    lr_scheduler_type: str = arg(
        "cosine",
        "As in transformers: cosine, linear, constant_with_warmup, warmup_stable_decay (which falls in the last fifth), "
        "cosine_with_min_lr (to a tenth) and others.",
        choices=[
            *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"),
            *("inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay"),
        ],
    )
    warmup_ratio: float | None = arg(
        None,
        "Share of the steps in which the rate rises linearly from zero; default: 0.05, but at least 20 steps, and at "
        "most 0.4.",
        most=1,
    )
    max_grad_norm: float = arg(1.0, "Clip gradients to this norm; 0 turns clipping off.")
