"""Losses on words: masked ones from both sides and the image, or the next one from those before it and the image."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from mm_utils import ranks
from mm_utils.losses import GlobalBatch
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel, told_tokens
from mm_utils.noise import pair_keys, uniform_noise
from mm_utils.objectives.terms import Batch, Encoded, RowPlan, RowTerm
from mm_utils.padding import encode_in_groups

MASKED, REPLACED = 0.8, 0.1  # of the tokens to be told; the rest stays as it is (BERT, arXiv 1810.04805)


@dataclass
class MaskedPlan(RowPlan):
    """This rank's texts as the model is to see them.

    Attributes:
        input_ids: `[n, L]`, some of them masked.
        is_asked: bool `[n, L]`, which are to be told.
    """

    input_ids: Tensor
    is_asked: Tensor


class MaskedLanguageModelling(RowTerm):
    """Cross-entropy of masked tokens, told from the fused states of the text and its own image (ALBEF, arXiv 2107.07651).

    Which tokens are masked is a function of the seed, the step and the pair. It costs a pass of the text tower and one pair
    of the fusion head for each image.

    Args:
        tokenizer: of the texts, with a mask token.
        seed: of the draws.
        probability: share of the tokens to be told; ALBEF takes 0.15.
        whole_words: mask all pieces of a word or none.
    """

    name = "masked_lm"
    heads = ("fusion.bridges", "fusion.cls_token", "token_head")
    pairs_per_image = 1

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, seed: int = 0, probability: float = 0.15, whole_words: bool = False
    ):
        super().__init__(seed)
        if tokenizer.mask_token_id is None:
            raise ValueError(
                "--objectives asks for masked_lm; this tokenizer has no mask token. Take captioning, or another text backbone."
            )
        self.mask_token_id, self.probability = int(tokenizer.mask_token_id), probability
        self.vocab_size = len(tokenizer)
        self.is_special = torch.zeros(self.vocab_size, dtype=torch.bool)
        self.is_special[tokenizer.all_special_ids] = True
        self.continues = continuations(tokenizer) if whole_words else None

    def prepare(self, model: FusionDualEncoderModel) -> None:
        """Give the model a head that tells tokens."""
        model.add_token_head()

    def plan(
        self, model: FusionDualEncoderModel, batch: Batch, shared: GlobalBatch, scale: Tensor, step: int
    ) -> MaskedPlan:
        """Choose the tokens."""
        input_ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        key = 3 * (self.seed * 1_000_003 + step)
        pair_n, place_L = pair_keys(batch["ids"]), torch.arange(input_ids.shape[1], device=input_ids.device)
        chance_nL, fate_nL, other_nL = (uniform_noise(pair_n, place_L, key + draw) for draw in range(3))
        if self.continues is not None:  # pieces of a word share its first piece's luck
            word_nL = (~self.continues.to(input_ids.device)[input_ids]).cumsum(1)
            chance_nL = chance_nL.gather(1, word_nL.clamp(max=len(place_L) - 1))
        is_asked = (chance_nL < self.probability) & mask & ~self.is_special.to(input_ids.device)[input_ids]
        seen = torch.where(fate_nL < MASKED, self.mask_token_id, input_ids)
        random_ids = (other_nL * self.vocab_size).long()
        seen = torch.where(fate_nL >= 1 - REPLACED, random_ids, seen)
        total = ranks.sum_over_ranks(is_asked.sum()).clamp(min=1)
        return MaskedPlan(total, torch.where(is_asked, seen, input_ids), is_asked)

    def part(
        self,
        model: FusionDualEncoderModel,
        encoded: Encoded,
        batch: Batch,
        plan: MaskedPlan,
        shared: GlobalBatch,
        low: int,
    ) -> tuple[Tensor, Tensor]:
        """The masked tokens of this part's texts."""
        rows, length = slice(low, low + len(encoded)), batch["input_ids"].shape[1]
        seen, is_asked, right = plan.input_ids[rows, :length], plan.is_asked[rows, :length], batch["input_ids"]
        mask, keys_values = batch["attention_mask"], encoded.keys_values
        if not len(encoded):  # a blank pair, none of whose tokens is asked for
            seen = mask = right = seen.new_ones(1, length)
            is_asked = torch.zeros_like(seen, dtype=torch.bool)
        _, states = encode_in_groups(model.encode_text, seen, mask, batch.get("lengths") if len(encoded) else None)
        logits = model.token_logits(keys_values, states, mask, is_asked)
        return _told(logits, right[is_asked])


class Captioning(RowTerm):
    """Cross-entropy of every next token, told from those before it and the image (CoCa, arXiv 2205.01917).

    The blocks of the fusion head run over word embeddings under a causal mask; the text tower, which reads both ways, is
    left out. It costs one pair of the fusion head for each image. `FusionDualEncoderModel.caption` writes captions then.
    """

    name = "captioning"
    heads = ("token_head", "caption_adapter")
    pairs_per_image = 1

    def prepare(self, model: FusionDualEncoderModel) -> None:
        """Give the model a head that tells tokens, and an entrance for word embeddings."""
        model.add_token_head(captions=True)

    def plan(
        self, model: FusionDualEncoderModel, batch: Batch, shared: GlobalBatch, scale: Tensor, step: int
    ) -> RowPlan:
        """Count the tokens."""
        told = batch["attention_mask"][:, 1:].sum()
        return RowPlan(ranks.sum_over_ranks(told).clamp(min=1))

    def part(
        self,
        model: FusionDualEncoderModel,
        encoded: Encoded,
        batch: Batch,
        plan: RowPlan,
        shared: GlobalBatch,
        low: int,
    ) -> tuple[Tensor, Tensor]:
        """All tokens but the first of this part's texts."""
        input_ids, mask = batch["input_ids"], batch["attention_mask"]
        if not len(encoded):
            input_ids, mask = input_ids.new_ones(1, 1), mask.new_zeros(1, 1)
        is_told, before = told_tokens(mask)
        logits = model.caption_logits(encoded.keys_values, input_ids, mask, before)
        return _told(logits, input_ids[is_told])


def continuations(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Which tokens go on with a word, bool `[V]`: those with WordPiece's ##, or without the mark of a word's beginning that
    others have (byte-level BPE, SentencePiece). Special tokens begin a word."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = set(tokenizer.all_special_tokens)
    if any(token.startswith("##") for token in tokens):
        found = [token.startswith("##") for token in tokens]
    else:
        marks = ("\u0120", "\u2581")
        marked = any(token.startswith(marks) for token in tokens)
        found = [marked and not token.startswith(marks) and token not in special for token in tokens]
    return torch.tensor(found)


def _told(logits: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies, and how many are told right."""
    return F.cross_entropy(logits.float(), right, reduction="sum"), (logits.argmax(-1) == right).sum()
