"""Altered captions of a batch as a term: every image chooses its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus
from transformers import PreTrainedTokenizerBase

from mm_utils import distributed
from mm_utils.copies import HostCopy, to_device
from mm_utils.data.batches.tokens import pad_captions
from mm_utils.extras.altered.captions import AlteredTokens
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel, rows_of
from mm_utils.objectives.encoding import encode_in_groups
from mm_utils.objectives.losses import GlobalBatch
from mm_utils.objectives.terms import Batch, EncodedBatch, RowPlan, RowTerm


@dataclass
class AlteredPlan(RowPlan):
    """The altered captions of each of this rank's rows, as tokens."""

    captions: list[list[list[int]]]


class Altered(RowTerm):
    """Each image chooses its caption among altered ones: a softmax at the towers' temperature.

    Altered captions are NegCLIP's hard negatives (arXiv 2210.01936). There they join the negatives of the whole batch; here
    every image is compared with its own, which are the hard ones, so nothing is exchanged between ranks. The temperature
    is left to the contrastive loss. A caption that has nothing to alter counts as no row.

    Args:
        alter: returns the altered captions of a caption, all as tokens.
    """

    name = "altered"
    refuses: ClassVar[Mapping[str, str]] = {"projection mlp": "draws its dropout by pair, for one text a pair"}

    def __init__(self, alter: Callable[[tuple[int, ...]], list[list[int]]], seed: int = 0):
        super().__init__(seed)
        self.alter = alter

    @classmethod
    def build(cls, args: Any, seed: int, tokenizer: PreTrainedTokenizerBase | None) -> "Altered":
        """Return the term, which alters captions of this tokenizer."""
        assert tokenizer is not None
        return cls(AlteredTokens(tokenizer).of, seed)

    def ask(self, batch: Batch) -> dict[str, HostCopy]:
        """Ask for the tokens."""
        return {"tokens": HostCopy(batch["input_ids"])}

    def plan(
        self, model: FusionDualEncoderModel, batch: Batch, shared: GlobalBatch, scale: Tensor, step: int
    ) -> AlteredPlan:
        """Alter this rank's captions; count those of all ranks that can be."""
        captions = zip(batch["tokens"].tolist(), batch["lengths"], strict=True)
        found = [self.alter(tuple(ids[:length])) for ids, length in captions]
        rows = to_device(np.array(sum(map(bool, found))), scale.device)
        return AlteredPlan(distributed.sum_over_ranks(rows).clamp(min=1), found)

    def part(
        self,
        model: FusionDualEncoderModel,
        encoded: EncodedBatch,
        batch: Batch,
        plan: AlteredPlan,
        shared: GlobalBatch,
        start_row: int,
    ) -> tuple[Tensor, Tensor]:
        """Compare this part's images with their captions and the altered ones."""
        altered = plan.captions[start_row : start_row + len(encoded)]
        rows = [row for row, captions in enumerate(altered) if captions]
        texts = [(ids, place, k) for place, row in enumerate(rows) for k, ids in enumerate(altered[row])]
        # Every rank encodes at least one text, because FSDP's ranks must run the same modules.
        tokens, *places = zip(*sorted(texts, key=lambda text: -len(text[0])) or [([0], 0, 0)], strict=True)
        device = encoded.scale.device
        input_ids, mask = (to_device(each.numpy(), device) for each in pad_captions(tokens, 0))
        lengths = list(map(len, tokens)) if batch["lengths"] else None
        altered_AE, _ = encode_in_groups(model, input_ids, mask, lengths, with_states=False)
        if not texts:
            return 0 * altered_AE.sum(), altered_AE.new_zeros(())
        row_R, place_A, k_A = (to_device(np.array(each), device) for each in (rows, *places))
        image_AE, text_AE = (rows_of(rows_of(encoded.embeds[side], row_R), place_A) for side in ("image", "text"))
        wide = torch.promote_types(altered_AE.dtype, torch.float32)
        margin_A = encoded.scale.detach() * (image_AE * (altered_AE - text_AE)).sum(1, dtype=wide)
        margin_RK = margin_A.new_full((len(rows), max(places[1]) + 1), -torch.inf)
        margin_RK = margin_RK.index_put((place_A, k_A), margin_A)
        losses_R = softplus(margin_RK.logsumexp(1), threshold=40)  # log(1 + sum_k exp margin_k)
        return losses_R.sum(), (margin_RK < 0).all(1).sum()
