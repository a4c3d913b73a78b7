"""Predict the time of a step with encoders together and apart, from a few measurements.

Together, W processes take v(N/W) + t(N/W) for N pairs, where v and t are the times of an encoder's forward and backward pass,
and share the gradients of both. Apart, they take the longer of v(N/V) and t(N/T), V + T = W, each with its own gradients
shared among V or T processes: none at all where V or T is 1. The sum of the work is the same, so by compute alone apart never
wins; it does where gradients are dear.

A process also updates only the weights that it trains. Left out: the loss and the data, which are about the same.

All that is measured is measured in turn, in several rounds; the medians give the prediction, and each round by itself one more.
How far these lie apart is the noise, below which a difference says nothing.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from statistics import median

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import nn

from mm_utils import distributed
from mm_utils.extras.placement.apart import embed
from mm_utils.extras.placement.split import PARTS, parameters_of
from mm_utils.gradient_average import GradientAverage
from mm_utils.objectives.joint import JointObjective, Objective, blank_pair
from mm_utils.objectives.terms import Batch
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.memory import restored_buffers

ROUNDS = 7  # of measurements
SAMPLE_SECONDS = 0.1  # of a measurement, at least; short calls are repeated
SAMPLE_BYTES = 2**24  # of gradients that are sent to measure the link, at most
LEAST_GAIN = 0.15  # share of a step that `auto` wants to be saved; on fast links, predictions were off by so much
BACKWARD = 2 / 3  # share of a pass
_NUMBER_BYTES, _TOKEN_BYTES = 4, 8


@dataclass(frozen=True)
class Encoder:
    """The cost of an encoder on one process.

    Attributes:
        fixed, per_pair: seconds of a forward and backward pass: of any, and for every row.
        gradient_bytes: the size of its gradients.
        update: seconds in which the optimizer moves its weights.
    """

    fixed: float
    per_pair: float
    gradient_bytes: int
    update: float = 0.0

    def seconds(self, rows: float, part: int | None) -> float:
        """Return the time of `rows`, `part` at once; all but the last part are embedded twice."""
        size = rows if part is None else min(rows, part)
        passes = -(-rows // size) if size else 0
        return passes * self.fixed + (rows + (1 - BACKWARD) * (rows - size)) * self.per_pair

    def hides(self, rows: float, part: int | None) -> float:
        """Return the time of the backward pass of the last part, behind which gradients are sent."""
        return BACKWARD * self.seconds(rows if part is None else min(rows, part), None)


@dataclass(frozen=True)
class Link:
    """The connection of the processes.

    Attributes:
        latency: seconds of an exchange of nothing.
        bandwidth: bytes a second that each process sends.
    """

    latency: float
    bandwidth: float

    def reduce(self, size: float, world: int) -> float:
        """Return the seconds in which a ring of processes adds up `size` bytes, there and back."""
        return self.latency + 2 * (world - 1) / world * size / self.bandwidth if world > 1 else 0.0

    def gather(self, size: float, world: int) -> float:
        """Return the seconds in which a ring of processes sends `size` bytes in all to each."""
        return self.latency + (world - 1) / world * size / self.bandwidth if world > 1 else 0.0


@dataclass(frozen=True)
class Costs:
    """What decides where encoders should be.

    Attributes:
        vision, text: the encoders.
        link: the connection of the processes.
        world: the number of processes.
        width: numbers of an embedding.
        tokens: tokens of the longest caption.
        part: `--micro_batch_size`; gradients are sent while the last part is computed.
    """

    vision: Encoder
    text: Encoder
    link: Link
    world: int
    width: int
    tokens: int
    part: int | None

    def together(self, pairs: int) -> float:
        """Return the seconds of a step with both encoders on each process."""
        rows = pairs / self.world
        computing = self.vision.seconds(rows, self.part) + self.text.seconds(rows, self.part)
        sending = self.link.reduce(self.vision.gradient_bytes + self.text.gradient_bytes, self.world)
        hidden = self.vision.hides(rows, self.part) + self.text.hides(rows, self.part)
        shared = self.link.gather(2 * pairs * self.width * _NUMBER_BYTES, self.world)
        return computing + max(0.0, sending - hidden) + shared + self.vision.update + self.text.update

    def apart(self, pairs: int, vision: int) -> float:
        """Return the seconds of a step with images on `vision` processes, and texts on the others."""
        text = self.world - vision
        slower = max(
            encoder.seconds(pairs / count, self.part)
            + max(0.0, self.link.reduce(encoder.gradient_bytes, count) - encoder.hides(pairs / count, self.part))
            + encoder.update
            for encoder, count in ((self.vision, vision), (self.text, text))
        )
        number = self.width * _NUMBER_BYTES
        embeds = self.world * (pairs / min(vision, text)) * number  # every process sends as many rows as the fullest
        gathered = (embeds, 2 * pairs * number, pairs * self.tokens * _TOKEN_BYTES)
        return slower + sum(self.link.gather(size, self.world) for size in gathered)

    def best_split(self, pairs: int) -> tuple[float, int]:
        """Return the seconds of the fastest split, and how many processes have the images in it."""
        return min((self.apart(pairs, vision), vision) for vision in range(1, self.world))

    def __str__(self) -> str:
        encoders = (
            f"{name} {each.per_pair * 1e3:.3g} ms a pair, {each.gradient_bytes / 1e6:.3g} MB of gradients"
            for name, each in (("images", self.vision), ("texts", self.text))
        )
        return f"{'; '.join(encoders)}; link {self.link.bandwidth / 1e6:.4g} MB/s"


@dataclass(frozen=True)
class Prediction:
    """A step with encoders together and apart.

    Attributes:
        pairs: of the step.
        costs: the medians of what was measured.
        rounds: what each round of measurements says by itself.
    """

    pairs: int
    costs: Costs
    rounds: tuple[Costs, ...]

    @property
    def images(self) -> int:
        """How many processes have the images in the fastest split."""
        return self.costs.best_split(self.pairs)[1]

    @property
    def saved(self) -> float:
        """The share of a step that this split saves; below 0 where it is slower."""
        return self._saved(self.costs)

    @property
    def noise(self) -> float:
        """How far `saved` may be off: half of the range of the rounds, without its two ends.

        Of seven rounds, this range has the true median in 7 of 8 cases.
        """
        found = sorted(map(self._saved, self.rounds))
        return (found[-2] - found[1]) / 2

    def _saved(self, costs: Costs) -> float:
        return 1 - costs.apart(self.pairs, self.images) / costs.together(self.pairs)

    @property
    def reason_for_together(self) -> str | None:
        """Why `auto` leaves both encoders on each process; None if it does not."""
        if self.saved >= max(LEAST_GAIN, self.noise):
            return None
        if abs(self.saved) < self.noise:
            return f"the two differ by less than the noise of these measurements, {self.noise:.0%} of a step"
        return "apart is slower" if self.saved < 0 else f"apart saves less than {LEAST_GAIN:.0%} of a step"

    def __str__(self) -> str:
        together, (apart, images) = self.costs.together(self.pairs), self.costs.best_split(self.pairs)
        return (
            f"a step of {self.pairs} pairs is predicted to take {together:.3g} s together, and {apart:.3g} s apart, with images "
            f"on {images} of {self.costs.world} processes; noise {self.noise:.0%} of a step ({self.costs})"
        )


def predict(args: TrainingArguments, accelerator: Accelerator, objective: JointObjective, batch: Batch) -> Prediction:
    """Measure both encoders and the link; the result is equal on all processes.

    Args:
        args: the run's arguments.
        accelerator, objective: of which nothing is prepared yet.
        batch: this process's share of any batch.

    The model is left as it was, in training mode, on the device.
    """
    model = objective.model.to(accelerator.device).train()
    batch = Objective.with_keys(objective, batch, 0)
    part = None if args.micro_batch_size is None else int(args.micro_batch_size)
    device, world = accelerator.device, distributed.world_size()
    own, tokens = distributed.max_over_ranks([len(batch["lengths"]), batch["input_ids"].shape[1]], device)
    most = 2 * max(1, own)
    trained = {name: [weight for _, weight in parameters_of(model, name)] for name in PARTS}
    sizes = {name: sum(weight.nbytes for weight in weights) for name, weights in trained.items()}
    sample = max(2, min(SAMPLE_BYTES, sum(sizes.values())) // _NUMBER_BYTES)
    works: dict[str, Callable[[], object]] = {}
    rows = {}
    with restored_buffers(model), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for name in PARTS:
            run = partial(_pass, accelerator, objective, name)
            many = _rows_that_fit(run, objective, batch, most if part is None else min(part, most), device)
            rows[name] = (max(1, many // 2), many)
            few_many = (partial(run, _resized(batch, count)) for count in rows[name])
            works[f"{name} few"], works[f"{name} many"] = few_many
        for name, count in (("nothing", 1), ("sample", sample)):
            gradient = nn.Parameter(torch.zeros(count, device=device))
            works[name] = partial(_average, gradient)
        seconds = _measure(works, device)
    for name in PARTS:  # one by one, as they hold copies and moments
        seconds |= _measure({f"{name} update": _update(trained[name], device)}, device)

    def costs_of(of: Callable[[list[float]], float]) -> Costs:
        time_of = {name: of(each) for name, each in seconds.items()}
        lines = {name: _line(rows[name], (time_of[f"{name} few"], time_of[f"{name} many"])) for name in PARTS}
        vision, text = (Encoder(*lines[name], sizes[name], time_of[f"{name} update"]) for name in ("vision", "text"))
        sending = max(1e-9, time_of["sample"] - time_of["nothing"])
        link = Link(time_of["nothing"], 2 * (world - 1) / world * sample * _NUMBER_BYTES / sending)
        return Costs(vision, text, link, world, model.config.projection_dim, tokens, part)

    each = tuple(costs_of(itemgetter(turn)) for turn in range(ROUNDS))
    return Prediction(args.batch_sizes.sizes[-1], costs_of(median), each)


def _measure(works: dict[str, Callable[[], object]], device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of a call, by name and round, on the slowest process."""

    def seconds(work: Callable[[], object], calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        [slowest] = distributed.max_over_ranks([round(1e9 * (time.perf_counter() - start))], device)
        return max(1, slowest) / 1e9 / calls

    found: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        seconds(work, 1)  # which sets up libraries
    calls = {name: math.ceil(SAMPLE_SECONDS / seconds(work, 1)) for name, work in works.items()}
    for _ in range(ROUNDS):
        for name, work in works.items():
            found[name].append(seconds(work, calls[name]))
    return found


def _rows_that_fit(
    run: Callable[[Batch], None], objective: JointObjective, batch: Batch, many: int, device: torch.device
) -> int:
    """Return `many`, halved until a pass of so many rows fits into the memory of all processes."""
    while True:
        failed = False
        try:
            run(_resized(batch, many))
        except RuntimeError as error:
            if not should_reduce_batch_size(error) or many == 1:
                raise
            failed = True
        if not distributed.any_rank(failed, device):
            return many
        objective.zero_grad()
        clear_device_cache(garbage_collection=True)
        many //= 2


def _line(rows: tuple[int, int], seconds: tuple[float, float]) -> tuple[float, float]:
    """Return the seconds of any pass, and of every row: a line through few rows and many."""
    (few, many), (short, long) = rows, seconds
    if few == many:
        return 0.0, long / many
    per_pair = max(0.0, long - short) / (many - few)
    return max(0.0, long - many * per_pair), per_pair


def _pass(accelerator: Accelerator, objective: JointObjective, encoder: str, batch: Batch) -> None:
    with accelerator.autocast():
        embed_nE = embed(objective, encoder, batch)
    if embed_nE.requires_grad:  # else nothing of the encoder is trained
        embed_nE.sum().backward()
    objective.zero_grad()


def _resized(batch: Batch, rows: int) -> Batch:
    """Return so many rows of a batch in its order, some of them repeated or left out."""
    own = len(batch["lengths"])
    if not own:
        batch, own = blank_pair(batch) | {"lengths": [1]}, 1
    places = torch.arange(rows) * own // rows
    resized = {
        name: batch[name][places.to(batch[name].device)]
        for name in ("pixel_values", "input_ids", "attention_mask", "row_keys")
    }
    return {**resized, "lengths": [batch["lengths"][place] for place in places.tolist()]}


def _update(weights: list[nn.Parameter], device: torch.device) -> Callable[[], object]:
    """Return the optimizer's step, on copies of the weights."""
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    return torch.optim.AdamW(copies, fused=device.type == "cuda").step if copies else lambda: None


def _average(parameter: nn.Parameter) -> None:
    GradientAverage(([parameter], None)).receive()
