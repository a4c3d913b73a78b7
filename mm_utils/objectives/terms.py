"""What a term of the loss is, and what it is given.

A term is one of two kinds. An `EmbeddingTerm` is a loss of the embeddings of the global batch; its gradient is taken at the
embeddings, and pushed through the towers by `mm_utils.objectives.joint`. A `RowTerm` is a mean over rows of some sort (pairs
that the fusion head scores, masked tokens), each of which is computed where its image is. Either may be computed for any
division of the batch among processes and parts, and is then the same.

Shape letters: n this rank's pairs (or those of a part of the batch), N the global batch, L tokens, E embedding width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mm_utils import ranks
from mm_utils.losses import GlobalBatch
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel, KeysValues

Batch = dict[str, Any]
Report = dict[str, Tensor]


@dataclass
class Encoded:
    """A batch, or a part of it, of n pairs after both towers.

    Attributes:
        embeds: unit embeddings `[n, E]`, `image` and `text`, and what terms add (`Term.embed`).
        scale: scalar inverse temperature.
        bias: scalar added to the logits, of a model that has one.
        text_states: `[n, L, C]` of the text tower, what the fusion head reads of it.
        keys_values: the image side of the fusion head; empty where it was not asked for.
        taps: what the head reads of the vision tower, pooled; empty where nobody asked.

    A rank without a readable pair has n = 0 embeddings, and the states of one blank pair.
    """

    embeds: dict[str, Tensor]
    scale: Tensor
    bias: Tensor | None
    text_states: Tensor
    keys_values: KeysValues
    taps: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.embeds["image"])


@dataclass
class Leaves:
    """What the gradient of an `EmbeddingTerm` is taken at: detached, in at least fp32.

    Attributes:
        embeds: as `Encoded.embeds`, of all of this rank's rows.
        scale, bias: as there.
    """

    embeds: dict[str, Tensor]
    scale: Tensor
    bias: Tensor | None


@dataclass
class RowPlan:
    """What a `RowTerm` decided once for a step.

    Attributes:
        total: rows of all ranks, at least 1.
    """

    total: Tensor


@dataclass
class Plan:
    """What is decided once a step, from the embeddings of the whole batch and without gradient.

    Attributes:
        gradients: of the weighted embedding losses, by this rank's embeddings; none for what they do not depend on.
        scalar_gradients: and by the inverse temperature, and by the bias of a model that has one.
        shared: what all ranks know of the batch.
        figures: global values to log.
        rows: by name, what each row term decided.
    """

    gradients: dict[str, Tensor | None]
    scalar_gradients: list[Tensor | None]
    shared: GlobalBatch
    figures: Report = field(default_factory=dict)
    rows: dict[str, RowPlan] = field(default_factory=dict)


class Term:
    """One term of the loss. It holds no parameters: those belong to the model, which is what is saved.

    Attributes:
        name: in `--objectives` and in the log.
        heads: parts of the model that only some terms train, of those that this one does.
        pairs_per_image: how many pairs the fusion head takes for it.
        reads_taps: whether `embed` reads `Encoded.taps`.
        needs_teacher: whether it learns from the average of the weights, whose embeddings are then among `Encoded.embeds`
            as `teacher_image` and `teacher_text`.
        seed: of the run.
    """

    name: ClassVar[str] = ""
    heads: ClassVar[tuple[str, ...]] = ()
    pairs_per_image: ClassVar[int] = 0
    reads_taps: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False

    def __init__(self, seed: int = 0):
        self.seed = seed

    def prepare(self, model: FusionDualEncoderModel) -> None:
        """Give a model what the term needs of it, once, before training.

        Raises:
            ValueError: if it cannot have it, with what to do.
        """

    def embed(self, model: FusionDualEncoderModel, encoded: Encoded, batch: Batch) -> Mapping[str, Tensor]:
        """More unit embeddings that the loss needs, by name, as many rows as there are. Called with and without gradient,
        on any part of a batch; and on the blank pair of a rank without any, whose rows are dropped."""
        return {}


class EmbeddingTerm(Term):
    """A loss of the embeddings of the global batch.

    Write `of_batch` as if there were one process with the whole batch, as below, or `loss` where every rank can do with
    less than all rows.
    """

    def of_batch(self, image_NE: Tensor, text_NE: Tensor, scale: Tensor, batch: GlobalBatch) -> Tensor:
        """The loss, a scalar, of all embeddings of all processes; every process computes it."""
        raise NotImplementedError

    def loss(self, own: Leaves, batch: GlobalBatch) -> Tensor:
        """The value on all ranks. Its gradient by this rank's rows, and its share of the scalars', are multiplied by the
        number of ranks, because gradients are averaged over them."""
        if not len(batch.image_NE):  # no readable pair on any rank
            return 0 * own.scale
        world = ranks.world_size()
        rows = slice(batch.offset, batch.offset + len(own.embeds["image"]))

        def with_own(everyone: Tensor, mine: Tensor) -> Tensor:
            return torch.cat([everyone[: rows.start], mine, everyone[rows.stop :]])

        image_NE = with_own(batch.image_NE, own.embeds["image"])
        text_NE = with_own(batch.text_NE, own.embeds["text"])
        scale = own.scale.detach() + (own.scale - own.scale.detach()) / world  # every rank has all of its gradient
        value = self.of_batch(image_NE, text_NE, scale, batch)
        return value.detach() + world * (value - value.detach())

    def figures(self, value: Tensor, own: Leaves) -> Report:
        """What is logged."""
        return {f"{self.name}_loss": value}


class RowTerm(Term):
    """A mean of losses over rows, each computed on the rank and in the part of the batch that holds its image."""

    def plan(
        self, model: FusionDualEncoderModel, batch: Batch, shared: GlobalBatch, scale: Tensor, step: int
    ) -> RowPlan:
        """Decide what `part` needs, from this rank's whole batch. `scale` is the inverse temperature."""
        raise NotImplementedError

    def part(
        self, model: FusionDualEncoderModel, encoded: Encoded, batch: Batch, plan: Any, shared: GlobalBatch, low: int
    ) -> tuple[Tensor, Tensor]:
        """The sum of the losses of a part of the batch, with gradient, and how many of its rows were told right.

        Args:
            encoded, batch: the part, which begins at row `low` of this rank's rows.
            plan: from `plan`.
            shared: what all ranks know of the batch.
        """
        raise NotImplementedError

    def figures(self, loss: Tensor, accuracy: Tensor) -> Report:
        """What is logged, from the means over all ranks."""
        return {f"{self.name}_loss": loss, f"{self.name}_accuracy": accuracy}
