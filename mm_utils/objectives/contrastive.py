"""Contrastive losses of all pairs of the global batch, at one width of the embeddings or several."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedTokenizerBase

from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.losses import GlobalBatch, info_nce
from mm_utils.objectives.terms import EmbeddingTerm, Encoded, Report


class Contrastive(EmbeddingTerm):
    """The loss of all pairs, averaged over widths (Matryoshka, arXiv 2205.13147).

    The first d numbers of an embedding, at unit length again, are an embedding of width d. All widths share the temperature
    and weigh the same.

    Attributes:
        widths: widths besides the full one; with none, the loss is that of the full width.
    """

    def __init__(self, seed: int = 0, widths: Sequence[int] = ()):
        super().__init__(seed)
        self.widths = widths

    @classmethod
    def build(cls, args: Any, seed: int, tokenizer: PreTrainedTokenizerBase | None) -> "Contrastive":
        """Return the term of the widths of `--matryoshka_dims`."""
        return cls(seed, args.widths)

    def prepare(self, model: FusionDualEncoderModel) -> None:
        """Raise ValueError if a width is not below the model's."""
        full = model.config.projection_dim
        if wrong := [width for width in self.widths if width >= full]:
            raise ValueError(
                f"--matryoshka_dims has {wrong[0]}; the embeddings have {full} numbers, and that width is always trained. Give "
                "smaller ones, or raise --projection_dim."
            )

    def loss(self, own: Encoded, batch: GlobalBatch) -> Tensor:
        """Compute the loss in tiles; each rank computes its own rows."""
        losses = [self.of_width(own, batch), *(self.of_width(*first_numbers(own, batch, d)) for d in self.widths)]
        return torch.stack(losses).mean()

    def of_width(self, own: Encoded, batch: GlobalBatch) -> Tensor:
        """Return the loss of embeddings of one width."""
        raise NotImplementedError


def first_numbers(own: Encoded, batch: GlobalBatch, width: int) -> tuple[Encoded, GlobalBatch]:
    """Return a loss's inputs, each embedding cut to `width` numbers, at unit length."""

    def cut(embeds: Tensor) -> Tensor:
        return normalize(embeds[:, :width], dim=1)

    shorter = replace(own, embeds={side: cut(own.embeds[side]) for side in ("image", "text")})
    return shorter, replace(batch, image_NE=cut(batch.image_NE), text_NE=cut(batch.text_NE))


class InfoNCE(Contrastive):
    """A softmax over the batch, both ways (CLIP, arXiv 2103.00020); see `losses.info_nce`."""

    name = "contrastive"

    def of_width(self, own: Encoded, batch: GlobalBatch) -> Tensor:
        """Return the loss of embeddings of one width."""
        return info_nce(own.embeds["image"], own.embeds["text"], own.scale, batch)

    def metrics(self, value: Tensor, own: Encoded) -> Report:
        """Log the loss and the temperature."""
        return {"contrastive_loss": value, "temperature": 1 / own.scale.detach()}
