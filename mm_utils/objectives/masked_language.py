"""Masked language modelling: masked tokens, from the text and its image."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mm_utils import distributed
from mm_utils.model.encoding import encode_in_groups
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.row_noise import pair_keys, uniform_noise
from mm_utils.objectives.losses import GlobalBatch
from mm_utils.objectives.terms import Batch, Encoded, RowPlan, RowTerm

PROBABILITY = 0.15  # of a token to be predicted, as in ALBEF
MASKED, REPLACED = 0.8, 0.1  # shares of the target tokens; the rest stays unchanged (BERT, arXiv 1810.04805)


@dataclass
class MaskedPlan(RowPlan):
    """This rank's texts with masked tokens."""

    input_ids: Tensor  # token ids that the model sees, `[n, L]`
    is_target: Tensor  # tokens to predict, bool `[n, L]`


class MaskedLanguageModelling(RowTerm):
    """Cross-entropy of masked tokens, from fused states (ALBEF, arXiv 2107.07651).

    The masked tokens are a function of the seed, the step and the pair. The term costs a pass of the text tower and one pair
    of the fusion head for each image.
    """

    name = "masked_lm"
    heads = ("fusion.bridges", "fusion.cls_token", "token_head")
    pairs_per_image = 1

    def prepare(self, model: FusionDualEncoderModel) -> None:
        """Add a head that predicts tokens; ValueError if the tokenizer has no mask token."""
        if self.tokenizer.mask_token_id is None:
            raise ValueError(
                "--objectives asks for masked_lm; this tokenizer has no mask token. Take captioning, or another text backbone."
            )
        self.is_special = torch.zeros(len(self.tokenizer), dtype=torch.bool)
        self.is_special[list(self.tokenizer.all_special_ids)] = True
        model.add_token_head(captions=False)

    def plan(self, batch: Batch, shared: GlobalBatch, scale: Tensor, step: int) -> MaskedPlan:
        """Choose the target tokens."""
        input_ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        key = 3 * (self.seed * 1_000_003 + step)
        pair_n, place_L = pair_keys(batch["ids"]), torch.arange(input_ids.shape[1], device=input_ids.device)
        chance_nL, fate_nL, other_nL = (uniform_noise(pair_n, place_L, key + draw) for draw in range(3))
        is_target = (chance_nL < PROBABILITY) & mask & ~self.is_special.to(input_ids.device)[input_ids]
        seen = torch.where(fate_nL < MASKED, int(self.tokenizer.mask_token_id), input_ids)
        random_ids = (other_nL * len(self.is_special)).long()
        seen = torch.where(fate_nL >= 1 - REPLACED, random_ids, seen)
        total = distributed.sum_over_ranks(is_target.sum()).clamp(min=1)
        return MaskedPlan(total, torch.where(is_target, seen, input_ids), is_target)

    def part(
        self, model: FusionDualEncoderModel, encoded: Encoded, batch: Batch, plan: MaskedPlan, start: int
    ) -> tuple[Tensor, Tensor]:
        """Predict the masked tokens of this part's texts."""
        rows, length = slice(start, start + len(encoded)), batch["input_ids"].shape[1]
        seen, is_target, labels = plan.input_ids[rows, :length], plan.is_target[rows, :length], batch["input_ids"]
        mask, keys_values = batch["attention_mask"], encoded.keys_values
        if not len(encoded):  # a blank pair without targets
            seen = mask = labels = seen.new_ones(1, length)
            is_target = torch.zeros_like(seen, dtype=torch.bool)
        _, states = encode_in_groups(model, seen, mask, batch.get("lengths") if len(encoded) else None)
        assert model.fusion is not None
        assert model.token_head is not None
        fused = model.fusion(keys_values, states, mask)[:, 1:]
        words: Any = model.text_model.get_input_embeddings()
        logits = model.token_head(fused[is_target], words.weight)
        targets = labels[is_target]
        return F.cross_entropy(logits.float(), targets, reduction="sum"), (logits.argmax(-1) == targets).sum()
