"""Predict the time of a step with encoders together and apart, from a few measurements.

Together, W processes take v(N/W) + t(N/W) for N pairs, where v and t are the times of an encoder's forward and backward pass,
and share the gradients of both. Apart, they take the longer of v(N/V) and t(N/T), V + T = W, each with its own gradients
shared among V or T processes: none at all where V or T is 1. The sum of the work is the same, so by compute alone apart never
wins; it does where gradients are dear.

A process also updates only the weights that it trains. Left out: the loss and the data, which are about the same.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import nn

from mm_utils import distributed
from mm_utils.gradient_average import GradientAverage
from mm_utils.objectives.joint import JointObjective, Objective, blank_pair
from mm_utils.objectives.terms import Batch
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.memory import restored_buffers
from mm_utils.training.placement.apart import embed
from mm_utils.training.placement.split import PARTS, parameters_of

REPEATS = 3  # measurements, of which the median counts
SAMPLE_BYTES = 2**26  # of gradients that are sent to measure the link, at most
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


def measure_costs(args: TrainingArguments, accelerator: Accelerator, objective: JointObjective, batch: Batch) -> Costs:
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
    device = accelerator.device
    own, tokens = distributed.max_over_ranks([len(batch["lengths"]), batch["input_ids"].shape[1]], device)
    most = 2 * max(1, own)
    with restored_buffers(model), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        lines = {
            name: _measure_encoder(accelerator, objective, name, batch, most if part is None else min(part, most))
            for name in PARTS
        }
    trained = {name: [weight for _, weight in parameters_of(model, name)] for name in PARTS}
    sizes = {name: sum(weight.nbytes for weight in weights) for name, weights in trained.items()}
    encoders = {name: Encoder(*lines[name], sizes[name], _measure_update(trained[name], device)) for name in PARTS}
    link = _measure_link(device, max(2 * _NUMBER_BYTES, min(SAMPLE_BYTES, sum(sizes.values()))))
    width = model.config.projection_dim
    return Costs(encoders["vision"], encoders["text"], link, distributed.world_size(), width, tokens, part)


def _measure_encoder(
    accelerator: Accelerator, objective: JointObjective, encoder: str, batch: Batch, many: int
) -> tuple[float, float]:
    """Return the seconds of any pass, and of every row: a line through `many` rows and half."""
    while True:
        few, times, failed = max(1, many // 2), {}, False
        try:
            for rows in (few, many):
                times[rows] = _median_seconds(
                    accelerator.device, partial(_pass, accelerator, objective, encoder, _resized(batch, rows))
                )
        except RuntimeError as error:
            if not should_reduce_batch_size(error) or many == 1:
                raise
            failed = True
        if not distributed.any_rank(failed, accelerator.device):
            break
        objective.zero_grad()
        clear_device_cache(garbage_collection=True)
        many //= 2
    slowest = _slowest([times[rows] for rows in (few, many)], accelerator.device)
    if few == many:
        return 0.0, slowest[1] / many
    per_pair = max(0.0, slowest[1] - slowest[0]) / (many - few)
    return max(0.0, slowest[1] - many * per_pair), per_pair


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


def _measure_update(weights: list[nn.Parameter], device: torch.device) -> float:
    """Return the seconds of the optimizer's step, on copies of the weights."""
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    step = torch.optim.AdamW(copies, fused=device.type == "cuda").step if copies else lambda: None
    return _slowest([_median_seconds(device, step)], device)[0]


def _slowest(seconds: list[float], device: torch.device) -> list[float]:
    """Return the longest of each time over the processes."""
    return [each / 1e9 for each in distributed.max_over_ranks([round(1e9 * each) for each in seconds], device)]


def _measure_link(device: torch.device, size: int) -> Link:
    """Add up gradients of two sizes, as a step does."""
    seconds = []
    for count in (1, size // _NUMBER_BYTES):
        gradient = nn.Parameter(torch.zeros(count, device=device))
        seconds.append(_median_seconds(device, partial(_average, gradient)))
    world, seconds = distributed.world_size(), _slowest(seconds, device)
    return Link(seconds[0], 2 * (world - 1) / world * size / max(1e-9, seconds[1] - seconds[0]))


def _average(parameter: nn.Parameter) -> None:
    GradientAverage(([parameter], None)).receive()


def _median_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return the median time of a call, after a first one that sets up libraries."""
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
