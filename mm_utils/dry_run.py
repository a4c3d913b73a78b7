"""`--dry_run`: a run's own road on a few of its pairs, and from it what the whole run will take.

The script runs as ever, with the same parts: the whole source is opened, and a sample of it is tokenised, trained on,
evaluated, saved, loaded again and finished. Batches grow from a few pairs to the real global batch, or for as long as the
time allows; the last step is timed, and where its batch is smaller than the real one, the forecast is extrapolated.

All files are written to a hidden folder beside the output folder, on the same disk, which is removed. What is computed of
the whole source (a download, a tokenizer) stays in the datasets cache, where the real run finds it.
"""

import copy
import logging
import math
import os
import random
import re
import shlex
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from huggingface_hub import HfApi
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    VisionTextDualEncoderModel,
    VisionTextDualEncoderProcessor,
)

from mm_utils import ranks
from mm_utils.checkpoints import find_checkpoint, size_of
from mm_utils.data.preview import describe_pairs
from mm_utils.data.stream.stream import Stream
from mm_utils.flops import FlopCounts
from mm_utils.forecast import Measured, Step, describe_forecast, forecast_disk, forecast_memory, forecast_time
from mm_utils.hub import HubArguments
from mm_utils.memory import free_bytes, peak_bytes
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.models import image_geometry
from mm_utils.run import RunError
from mm_utils.safe_text import one_line
from mm_utils.sandbox import Sandbox, nearest
from mm_utils.trainer import Trainer
from mm_utils.training_arguments import TrainingArguments
from mm_utils.upload import PUSH_ERRORS

logger = logging.getLogger(__name__)

CHECKED, EVALUATED = 256, 32  # images of train that are looked at, and of validation that are evaluated
STEP_SECONDS, LOADER_SECONDS, HUB_SECONDS = 15.0, 4.0, 10.0
FIRST_BATCH, GROWTH = 8, 4


class LoaderPass(NamedTuple):
    """What the loaders of all ranks gave, with nobody computing.

    Attributes:
        rate: images per second.
        workers: of each loader.
        seen: different images.
        unreadable: why some of them could not be decoded.
        length: mean tokens of a caption.
    """

    rate: float
    workers: int
    seen: int
    unreadable: list[str]
    length: float


class Rehearsal(TrainerCallback):
    """A dry run's part in a script: `sample` the pairs, be a callback of the trainer, `forecast` before the end.

    It changes `args` (a temporary output folder, few steps) and `hub_args` (no push). Called on all ranks.

    Raises:
        RunError: if the output folder cannot be written.
        ValueError: if the checkpoint to resume from does not exist.
    """

    def __init__(self, accelerator: Accelerator, args: TrainingArguments, hub_args: HubArguments):
        self.accelerator, self.args, self.planned = accelerator, args, copy.copy(args)
        find_checkpoint(args.resume_from_checkpoint, str(args.output_dir))
        if hub_args.push_to_hub and accelerator.is_main_process:
            _ask_hub()
        hub_args.push_to_hub = False
        self.sandbox = Sandbox(accelerator, Path(str(args.output_dir)))
        self.folder = self.sandbox.folder
        args.output_dir, args.resume_from_checkpoint = str(self.folder), None
        args.eval_steps = args.save_steps = args.early_stopping_patience = 0
        args.load_best_model_at_end = False
        self.sampled: dict[str, int] = {}
        self.total: dict[str, int] = {}
        self.steps: list[Step] = []
        self.seconds: dict[str, float] = {}
        self.with_gradient: set[str] = set()
        logger.info("Dry run: it works in %s, which is removed; nothing is pushed or tracked", self.folder)

    # -- data -------------------------------------------------------------------------------------------------------

    def sample(
        self,
        source: datasets.DatasetDict | Stream,
        processor: VisionTextDualEncoderProcessor,
        max_seq_length: int,
    ) -> datasets.DatasetDict:
        """A seeded sample of every split, at least a global batch of train; says what it looks like.

        Of a stream the first rows of its shards, which are then no stream any more.
        """
        largest = self.planned.batch_sizes.sizes[-1]
        pairs = source.sample(max(CHECKED, largest)) if isinstance(source, Stream) else source
        self.total = {name: len(rows) for name, rows in pairs.items()}
        if isinstance(source, Stream):
            self.total["train"] = source.num_rows
        wanted = {name: max(CHECKED, largest) if name == "train" else EVALUATED for name in pairs}
        self.sampled = {name: min(wanted[name], len(rows)) for name, rows in pairs.items()}
        self._plan_steps(largest)
        self.sandbox.take_cache()
        draw = random.Random(self.args.seed)
        chosen = datasets.DatasetDict(
            {name: pairs[name].select(draw.sample(range(len(pairs[name])), self.sampled[name])) for name in pairs}
        )
        if self.accelerator.is_main_process:
            counts = ", ".join(f"{name} {self.sampled[name]:,} of {self.total[name]:,}" for name in pairs)
            rows = chosen["train"].select(range(min(CHECKED, self.sampled["train"])))
            lines = describe_pairs(rows, processor.tokenizer, max_seq_length, image_geometry(processor)[0])
            logger.info("%s", "\n  ".join([f"Images in the sample: {counts}. In that of train:", *lines]))
        return chosen

    def _plan_steps(self, largest: int) -> None:
        """Growing batches, two of the first size, without end of the last; rates as in the real run's first steps."""
        sizes = [min(largest, max(FIRST_BATCH, 2 * ranks.world_size()))]
        while sizes[-1] < largest:
            sizes.append(min(largest, GROWTH * sizes[-1]))
        starts = [0, *range(2, len(sizes) + 1)]
        self.args.max_steps = max(starts[-1] + 3, self.planned.total_steps(self.total["train"]))
        self.args.batch_size_schedule = ",".join(f"{at}:{size}" for at, size in zip(starts, sizes, strict=True))
        self.sizes = self.args.batch_sizes

    # -- training ---------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Watch which parameters get a gradient."""
        trained = {name: value for name, value in kwargs["model"].named_parameters() if value.requires_grad}
        self.trained = set(trained)
        averaged_by_ddp = self.accelerator.distributed_type.value.startswith("MULTI_") and not args.micro_batch_size

        def note(*_: Any) -> None:
            if averaged_by_ddp and not self.with_gradient:
                _refuse_unused(sorted(name for name, value in trained.items() if value.grad is None))
            self.with_gradient |= {
                name for name, value in trained.items() if value.grad is not None and bool(_mine(value.grad).any())
            }

        if self.accelerator.state.deepspeed_plugin is None:  # which keeps gradients to itself
            kwargs["optimizer"].optimizer.register_step_pre_hook(note)
        self.began = self.last = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop, and save a checkpoint, after two steps of the largest size or when the next would take too long."""
        done = state.global_step
        self.seconds["step"] = self._lap()
        next_seconds = self.seconds["step"] * self.sizes.at(done) / self.sizes.at(done - 1)
        late = done >= 2 and self.last - self.began + next_seconds > STEP_SECONDS
        enough = late or done >= self.sizes.starts[-1] + 2
        control.should_log = True
        control.should_training_stop = control.should_save = ranks.any_rank(enough, self.accelerator.device)

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Note the figures of a step."""
        if logs is None or "loss" not in logs:
            return
        # A loss scaler begins with a scale that is too high.
        names = ["loss"] if self.accelerator.scaler is not None else ["loss", "grad_norm"]
        for name in names:
            if not math.isfinite(logs[name]):
                raise FloatingPointError(
                    f"{name} is {logs[name]} in step {state.global_step} of the dry run. Lower --learning_rate, train in "
                    "bf16 or fp32, or look at the images."
                )
        pairs, computing = self.sizes.at(state.global_step - 1), 1 - logs["data_wait"]
        self.steps.append(Step(pairs, self.seconds["step"] * computing, logs["peak_memory_gib"] * 2**30))
        self.loss = logs["loss"]
        self._lap()

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note how long it took."""
        self.seconds["evaluation"] = self._lap()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note how long it was waited for."""
        self.seconds["checkpoint"], self.checkpoint = self._lap(), kwargs["checkpoint"]

    def _lap(self) -> float:
        """Seconds since it was called last."""
        before, self.last = self.last, time.perf_counter()
        return self.last - before

    # -- what the whole run will take -------------------------------------------------------------------------------

    def forecast(self, trainer: Trainer, flops: FlopCounts) -> dict[str, float]:
        """Load what was saved, time the loader alone, say what the whole run will take, and clean up.

        Returns the figures of `mm_utils.forecast` and others, as `dry_run_*`.

        Raises:
            RunError: if what was saved is not what was trained.
        """
        self.seconds["finish"] = self._lap()
        checkpoint_bytes, all_bytes = size_of(self.checkpoint), size_of(self.folder)
        feature_bytes, cache_bytes = size_of(self.sandbox.cache / "tandem_features"), size_of(self.sandbox.cache)
        self._check_what_was_saved(trainer)
        self._evaluate_again(trainer)
        alone = self._time_loader(trainer)
        measured = Measured(
            sampled=self.sampled,
            total=self.total,
            steps=self.steps,
            processes=ranks.world_size(),
            micro_batch_size=trainer.stepper.micro_batch_size,
            images_per_second=alone.rate,
            workers=alone.workers,
            evaluation_seconds=self.seconds["evaluation"],
            checkpoint_seconds=self.seconds["checkpoint"],
            finish_seconds=self.seconds["finish"],
            checkpoint_bytes=checkpoint_bytes,
            model_bytes=all_bytes - checkpoint_bytes - cache_bytes,
            token_bytes=cache_bytes - feature_bytes,
            feature_bytes=feature_bytes,
        )
        with_gradient = set().union(*gather_object([self.with_gradient]))
        unused = sorted(self.trained - with_gradient) if with_gradient else []
        figures = {
            **forecast_time(self.planned, measured),
            **forecast_memory(self.planned, measured),
            **forecast_disk(self.planned, measured),
            **_compute(trainer, flops, alone.length),
            "free_memory_gib": self._free_memory(),
            "free_disk_gb": shutil.disk_usage(self.folder).free / 1e9,
            "loss": self.loss,
            "unused_parameters": len(unused),
            "unreadable_share": len(alone.unreadable) / max(1, alone.seen),
        }
        logger.info(
            "%s", "\n".join([*describe_forecast(figures, self.planned, measured), f"Start it: {_real_command()}"])
        )
        self._warn(figures, unused, alone)
        self.accelerator.wait_for_everyone()
        self.sandbox.remove()
        return {f"dry_run_{name}": float(value) for name, value in figures.items()}

    def _check_what_was_saved(self, trainer: Trainer) -> None:
        """The checkpoint brings back every weight bit for bit; so do, where they are whole, the model's own files."""
        before = {name: _mine(value).detach().cpu().clone() for name, value in trainer.model.state_dict().items()}
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                _mine(parameter).fill_(math.nan)
        trainer.load_checkpoint(self.checkpoint)
        after = {name: _mine(value) for name, value in trainer.model.state_dict().items()}
        problem = _difference(self.checkpoint, before, after)
        if self.accelerator.is_main_process and trainer.average is None and not _is_sharded(trainer.model):
            saved = FusionDualEncoderModel.from_pretrained(self.folder).state_dict()
            problem = problem or _difference(self.folder, before, saved)
            stock = self.folder / "dual_encoder"
            if stock.is_dir():
                towers = VisionTextDualEncoderModel.from_pretrained(stock).vision_model.state_dict()
                problem = problem or _difference(stock, before, {f"vision_model.{n}": v for n, v in towers.items()})
        problems = [problem for problem in gather_object([problem]) if problem]
        if problems:
            raise RunError(problems[0])

    def _evaluate_again(self, trainer: Trainer) -> None:
        """Time an evaluation whose workers have started, unless the first took long enough for that not to matter."""
        late = ranks.any_rank(self.seconds["evaluation"] > LOADER_SECONDS, self.accelerator.device)
        if not late and trainer.evaluate_model and trainer.eval_loader:
            self._lap()
            trainer.measure()
            self.seconds["evaluation"] = self._lap()

    def _time_loader(self, trainer: Trainer) -> LoaderPass:
        """At least `CHECKED` images and a second, unless that takes too long."""
        start, wanted = self.sizes.starts[-1], min(CHECKED, self.sampled["train"]) // ranks.world_size()
        loader = trainer.train_batches(start, start + 100_000)
        workers, images, tokens, seconds = loader.loader.num_workers, 0, 0, 0.0
        seen: set[str] = set()
        unreadable: dict[str, str] = {}  # by image: a reason may differ from one time to the next
        began = time.perf_counter()
        for number, batch in enumerate(loader, 1):
            seconds = time.perf_counter() - began
            images += len(batch["image_ids"]) + len(batch["skipped"])
            tokens += sum(batch["lengths"])
            seen.update(batch["image_ids"])
            unreadable |= {reason.partition(": ")[0]: reason for reason in batch["skipped"]}
            enough = len(seen) + len(unreadable) >= wanted and number >= 2 * workers
            if seconds > LOADER_SECONDS or (enough and seconds > LOADER_SECONDS / 4):
                break
        everyone = gather_object([(images / seconds, seen, unreadable, tokens / max(1, images))])
        rates, seen_by, unreadable_by, lengths = zip(*everyone, strict=True)
        reasons = sorted({name: reason for found in unreadable_by for name, reason in found.items()}.values())
        count = len(set().union(*seen_by)) + len(reasons)
        return LoaderPass(sum(rates), workers, count, reasons, sum(lengths) / len(lengths))

    def _free_memory(self) -> float:
        """GiB that this process could have at its peak."""
        device = self.accelerator.device
        free = free_bytes(device)
        return (free if device.type == "cuda" else free // ranks.processes_here() + peak_bytes(device)) / 2**30

    def _warn(self, figures: dict[str, float], unused: list[str], alone: LoaderPass) -> None:
        """Say what would spoil the run."""
        if not self.accelerator.is_main_process:
            return
        if unused:
            logger.warning(
                "%d trained parameters got no gradient in any step: %s; they learn nothing, and several processes would stop "
                "at the second step. Freeze them or use them.",
                len(unused), _some(unused),
            )  # fmt: skip
        if alone.unreadable:
            logger.warning(
                "%d of %d training images cannot be decoded, so perhaps %s of %s; their pairs are left out: %s",
                len(alone.unreadable), alone.seen, f"{figures['unreadable_share'] * self.total['train']:,.0f}",
                f"{self.total['train']:,}", "; ".join(alone.unreadable[:3]),
            )  # fmt: skip
        if figures["peak_memory_gib"] > figures["free_memory_gib"]:
            logger.warning(
                "The peak of memory may be %.2f GiB, and %.2f GiB are there. Set --micro_batch_size auto.",
                figures["peak_memory_gib"], figures["free_memory_gib"],
            )  # fmt: skip
        wanted = {self.folder: figures["checkpoints_gb"] + figures["model_gb"]}
        cache = nearest(self.sandbox.cache_home)
        if cache.stat().st_dev == self.folder.stat().st_dev:
            wanted[self.folder] += figures["cache_gb"]
        else:
            wanted[cache] = figures["cache_gb"]
        for place, gigabytes in wanted.items():
            free = shutil.disk_usage(place).free / 1e9
            if gigabytes > free:
                logger.warning(
                    "The disk of %s has %.3g GB left, and the run writes %.3g GB. Lower --save_total_limit or make room.",
                    place.parent if place == self.folder else place, free, gigabytes,
                )  # fmt: skip


def _refuse_unused(names: list[str]) -> None:
    if names:
        raise RunError(
            f"{len(names)} trained parameters get no gradient: {_some(names)}; processes that train together would stop at "
            "the second step. Freeze them or use them."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _ask_hub() -> None:
    """Say so if the Hub does not know the token, or does not answer: the run would go on, and push nothing."""
    answer: list[str] = []

    def ask() -> None:
        try:
            HfApi(endpoint=os.environ.get("HF_ENDPOINT", "").rstrip("/") or None).whoami()
            answer.append("")
        except PUSH_ERRORS as error:
            answer.append(one_line(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    [problem] = answer or [f"no answer in {HUB_SECONDS:g} seconds"]
    if problem:
        logger.warning("--push_to_hub is set; the Hub does not take a push now: %s. Check `hf auth whoami`.", problem)


def _mine(value: Tensor) -> Tensor:
    """This rank's share."""
    return value.to_local() if isinstance(value, DTensor) else value


def _difference(place: Path, before: dict[str, Tensor], after: dict[str, Tensor]) -> str | None:
    """What is wrong with weights that were read from `place`."""
    wrong = [name for name, value in after.items() if not torch.equal(before[name], value.detach().cpu())]
    return f"{place.name} holds other values of {', '.join(wrong[:3])} than were saved." if wrong else None


def _is_sharded(model: torch.nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _compute(trainer: Trainer, flops: FlopCounts, length: float) -> dict[str, float]:
    """Parameters, and the model FLOPs of a training step by pair, in 10^9, the fusion head's among them."""
    scored = trainer.accelerator.unwrap_model(trainer.objective).pairs_per_image
    tokens = round(length)
    towers = flops.training_step(1, [tokens])
    parameters = list(trainer.model.parameters())
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trained_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "gflops_per_pair": flops.training_step(1, [tokens], scored, tokens) / 1e9,
        "head_gflops_per_pair": (flops.training_step(1, [tokens], scored, tokens) - towers) / 1e9,
    }


def _real_command() -> str:
    """This command without the flag."""
    words = shlex.join(sys.argv)
    without = re.sub(r" --dry_run(?:[ =](?:true|yes|t|y|1))?(?= |$)", "", words, flags=re.IGNORECASE)
    return f"accelerate launch {without}" + (" --dry_run false" if without == words else "")
