"""The parts of a loss: terms, and the data that a term is given.

There are two kinds of terms. An `EmbeddingTerm` is a loss of the embeddings of the global batch; `mm_utils.objectives.objective`
takes its gradient at the embeddings and pushes it through the towers. A `TermOnRows` is a mean over rows of some sort (pairs
that the fusion head scores, words, regions); every row is computed on the rank that holds its image. Either yields the same
result for any division of the batch among processes and micro-batches.

Shape letters: n this rank's pairs (or those of a part of the batch), N the global batch, L tokens, E embedding width.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import datasets
import torch
from accelerate import Accelerator
from torch import Tensor

from mm_utils import distributed
from mm_utils.data.batches.column_reader import ColumnReader
from mm_utils.model.fusion import KeysValues
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.losses import GlobalBatch
from mm_utils.text import own_name

Batch = dict[str, Any]
Report = dict[str, Tensor]


@dataclass
class Encoded:
    """A batch, or a part of it, of n pairs after both towers.

    A rank without a readable pair has n = 0 embeddings, and the states of one blank pair.
    """

    embeds: dict[str, Tensor]  # unit embeddings `[n, E]`: `image`, `text`, and those that terms add (`Term.embed`)
    scale: Tensor = field(default_factory=lambda: torch.ones(()))  # the inverse temperature
    bias: Tensor | None = None  # the scalar added to the logits, for a model that has one
    text_states: Tensor = field(default_factory=lambda: torch.zeros(0))  # that the fusion head reads, `[n, L, C]`
    keys_values: KeysValues = ()  # the image side of the fusion head; empty if no term needs it
    taps: tuple[Tensor, ...] = ()  # pooled levels of the vision tower; empty if no term needs them
    groups_texts: bool = True  # or end to end; else all are padded to the longest

    def __len__(self) -> int:
        return len(self.embeds["image"])

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Everything that an `EmbeddingTerm` may read, by name."""
        scalars = {"scale": self.scale} | ({} if self.bias is None else {"bias": self.bias})
        return {**self.embeds, **scalars}


class Evaluator:
    """Measures a model on batches of evaluation; all ranks get the same metrics."""

    readers: Sequence[ColumnReader] = ()  # of what it reads of rows besides media and captions

    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Return the metrics by name."""
        raise NotImplementedError


class Term:
    """One term of the loss. It holds no parameters: those belong to the model, which is saved."""

    name: ClassVar[str] = ""  # in `--objectives` and in the log
    heads: ClassVar[tuple[str, ...]] = ()  # the optional parts of the model that the term trains
    pairs_per_image: ClassVar[int] = 0  # how many pairs the fusion head scores for each image
    reads_taps: ClassVar[bool] = False  # whether it reads `Encoded.taps`
    readers: ClassVar[Sequence[ColumnReader]] = ()  # of what it reads of rows besides media and captions
    refuses: ClassVar[Mapping[str, str]] = {}  # flags, or a flag and a value, with the rest of a sentence about it
    has_bias: ClassVar[bool] = False  # whether it reads the bias of the logits, which the model then has

    def __init__(self, seed: int = 0):
        self.seed = seed

    def evaluator(self, medium: str) -> Evaluator | None:
        """Return what measures on images, clips or sounds what the term teaches; terms share one of a class."""
        return None

    def prepare(self, model: FusionDualEncoderModel) -> None:
        """Add to the model the parts that the term needs, once, before training; raise ValueError if it cannot have them."""

    def read_captions(self, model: FusionDualEncoderModel, rows: datasets.Dataset) -> None:
        """Fit the parts that `prepare` added to the tokenised training rows; not called for a stream."""

    def embed(self, model: FusionDualEncoderModel, encoded: Encoded, batch: Batch) -> Mapping[str, Tensor]:
        """Return further unit embeddings that the loss needs, one per pair, by name.

        It is called with and without gradient, on any part of a batch, and on the blank pair of a rank without any, whose
        rows are dropped.
        """
        return {}


class EmbeddingTerm(Term):
    """A loss of the embeddings of the global batch.

    Write `of_batch` as if there were one process with the whole batch, as below, or `loss` where every rank can do with
    less than all rows.
    """

    def of_batch(self, image_NE: Tensor, text_NE: Tensor, scale: Tensor, batch: GlobalBatch) -> Tensor:
        """Return the loss, a scalar, of all embeddings of all processes; every process computes it."""
        raise NotImplementedError(f"{own_name(self)} has no method of_batch. Write one that returns the loss.")

    def loss(self, own: Encoded, batch: GlobalBatch) -> Tensor:
        """Return the global loss, the same value on all ranks.

        Its gradient by this rank's rows, and its share of the scalars', are multiplied by the number of ranks, because
        gradients are averaged over them. `own` has embeddings, scale and bias of this rank's rows, in at least fp32.
        """
        if not len(batch.image_NE):  # no readable pair on any rank
            return 0 * own.scale
        world = distributed.world_size()
        before = slice(batch.offset)
        after = slice(batch.offset + len(own), None)
        image_NE = torch.cat([batch.image_NE[before], own.embeds["image"], batch.image_NE[after]])
        text_NE = torch.cat([batch.text_NE[before], own.embeds["text"], batch.text_NE[after]])
        scale = own.scale.detach() + (own.scale - own.scale.detach()) / world  # every rank has all of its gradient
        value = self.of_batch(image_NE, text_NE, scale, batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shown = f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(
                f"of_batch of {own_name(self)} returns {shown}; a loss is a tensor of one number. Return a mean."
            )
        if not value.requires_grad and image_NE.requires_grad:
            raise ValueError(
                f"of_batch of {own_name(self)} returns a loss without a gradient, which would teach nothing. Compute it from "
                "image_NE and text_NE, and detach neither."
            )
        # the value, with `world` times its gradient
        return value.detach() + world * (value - value.detach())

    def metrics(self, value: Tensor, own: Encoded) -> Report:
        """Return the values to log."""
        return {f"{self.name}_loss": value}


@dataclass
class RowPlan:
    """The decisions of a `TermOnRows` for one step.

    Attributes:
        total: the number of rows on all ranks, at least 1; the losses of all ranks are divided by it.
    """

    total: Tensor


@dataclass
class RowSums:
    """Sums over the rows of a part of a batch.

    Attributes:
        loss: the sum of the losses, with gradient.
        right: how many rows are right.
    """

    loss: Tensor
    right: Tensor


class TermOnRows(Term):
    """A mean of losses over rows, such as pairs that the fusion head scores, each computed on the rank and part that hold its image.

    Write `rows`. A row is a pair of the batch unless `plan` counts other ones, and `heads` names the parts of the model that only
    such terms train.
    """

    pairs_per_image = 1

    def plan(self, batch: Batch, shared: GlobalBatch, scale: Tensor, step: int) -> RowPlan:
        """Decide once a step what `rows` needs, from this rank's batch, what all ranks share, and the inverse temperature."""
        return RowPlan(torch.tensor(max(1, len(shared.image_NE))))

    def rows(self, model: FusionDualEncoderModel, encoded: Encoded, batch: Batch, plan: Any) -> RowSums:
        """Compute the rows of a part of the batch; `plan` is what `plan` returned.

        A rank without a readable pair is given a blank one, whose rows do not count. `batch["places"]` says which of this rank's
        rows the part has.
        """
        raise NotImplementedError(f"{own_name(self)} has no method rows. Write one that returns RowSums.")

    def metrics(self, loss: Tensor, accuracy: Tensor) -> Report:
        """Return the values to log, from the means over all ranks."""
        return {f"{self.name}_loss": loss, f"{self.name}_accuracy": accuracy}
