"""How often a true caption scores above a false one: the order of words.

A model that reads captions as bags of words is right for half of the images of a probe of word order (Winoground, arXiv
2204.03162). Scenes have one for every image (the column `order_pair`); mirror twins swap its two captions, so that a
model which reads the caption alone is right for half of them, too. `order_accuracy` is the share of the probes whose true caption scores
higher, with its 95 % interval; by chance it is 0.5. `rerank_order_accuracy` is the same by the score of re-ranking. Ties and NaN count
against the model.

Shape letters: M images and T captions of the split, P probes, L tokens, E embedding width.
"""

from dataclasses import dataclass

import datasets
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mm_utils import distributed
from mm_utils.data.batches.tokens import encode_captions, pad_captions
from mm_utils.data.rows.columns import HOLDOUT_LEAST
from mm_utils.evaluation.embeddings import Embeddings, take_texts
from mm_utils.evaluation.metrics import share_with_interval
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel

BATCH = 128  # probes encoded at a time


@dataclass
class Probes:
    """Tokenised probes; texts 2p and 2p + 1 are the true and the false caption of probe p."""

    text_T2L: Tensor  # token ids and attention mask
    image_P: Tensor  # the row of each probe's image in the data set; of those of a split, the image's place among its images

    @classmethod
    def none(cls) -> "Probes":
        """Return no probes."""
        return cls(torch.empty(0, 2, 1, dtype=torch.long), torch.empty(0, dtype=torch.long))

    def of(self, split: Embeddings) -> "Probes":
        """Return the probes of images that were embedded, on their device."""
        row_M, order_M = split.rows_M.sort()
        row_P = self.image_P.to(row_M.device)
        place_P = torch.searchsorted(row_M, row_P).clamp(max=len(row_M) - 1)
        known_P = row_M[place_P] == row_P
        return Probes(self.text_T2L.to(row_M.device)[known_P.repeat_interleave(2)], order_M[place_P[known_P]])

    def pairs(self, split: Embeddings) -> Tensor:
        """Return the pair numbers of each probe's true and false caption, `[P, 2]`, as `PairScores` counts.

        The texts are first the captions of the split, then those of the probes.
        """
        first = len(split.text_TE)
        text_P2 = first + torch.arange(len(self.text_T2L), device=self.image_P.device).view(-1, 2)
        return self.image_P[:, None] * (first + len(self.text_T2L)) + text_P2

    def share(self, score_P2: Tensor, name: str) -> dict[str, float]:
        """Return the share of higher true captions, with interval."""
        if not len(score_P2):
            return {}
        return share_with_interval(name, (score_P2[:, 0] > score_P2[:, 1]).double().mean().item(), len(score_P2))


def caption_probes(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> Probes:
    """Return the probes of word order that scenes have, tokenised; none of fewer than 30, or of other rows.

    Those whose two captions become the same tokens are left out.
    """
    has_pairs = isinstance(rows.features.get("order_pair"), dict) and len(rows) >= HOLDOUT_LEAST
    pairs = rows["order_pair"][:] if has_pairs else []
    captions = [pair[side] for pair in pairs for side in ("true", "false")]
    ids = encode_captions(tokenizer, captions, max_seq_length)
    kept = [place for place in range(len(pairs)) if ids[2 * place] != ids[2 * place + 1]]
    padded = pad_captions([ids[2 * place + side] for place in kept for side in (0, 1)], tokenizer.pad_token_id)
    return Probes(torch.stack(list(padded), 1), torch.tensor(kept, dtype=torch.long))


@torch.no_grad()
def probe_cosines(
    model: FusionDualEncoderModel, split: Embeddings, probes: Probes, accelerator: Accelerator
) -> Tensor:
    """Return cosines of true and false captions, `[P, 2]`."""
    total, device = len(probes.image_P), probes.image_P.device
    shares = [distributed.share(total, part, distributed.world_size()) for part in range(distributed.world_size())]
    mine, found = shares[distributed.rank()], [split.image_ME.new_empty(0, 2)]
    for low in range(0, max(map(len, shares)), BATCH):  # FSDP needs the same number of forwards on every rank
        place = torch.arange(mine.start + low, mine.start + low + BATCH, device=device).clamp(max=total - 1)
        both = take_texts(probes.text_T2L, torch.stack([2 * place, 2 * place + 1], 1).flatten())
        with accelerator.autocast():
            text_P2E = model.encode_text(*both)[0].float().unflatten(0, (-1, 2))
        found.append(torch.einsum("pte,pe->pt", text_P2E, split.image_ME[probes.image_P[place]]))
    return distributed.gather(torch.cat(found)[: len(mine)], list(map(len, shares)))
