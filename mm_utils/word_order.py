"""Word order: how often a true caption scores above the same words in the order that makes them false.

A model that reads captions as bags of words finds half of them (Winoground, arXiv 2204.03162). Scenes have such a pair for
every image (`mm_utils.data.scenes.order_pairs`); mirror twins swap its two sides, so that a model which reads the caption
alone finds half of them too. Ties, and scores that are no number, count against the model.

Shape letters: M images, R rows, E embedding width.
"""

import datasets
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mm_utils import ranks
from mm_utils.data.scenes import order_pairs
from mm_utils.data.tokens import encode_captions, pad_captions
from mm_utils.intervals import wilson_interval
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.reranking import MatchScores
from mm_utils.split_embeddings import Embeddings, Texts

IMAGES = 128  # whose two texts are encoded at a time


def order_texts(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> Texts | None:
    """The true and the false caption of row r, as texts 2r and 2r + 1; None for rows without such captions."""
    if not isinstance(rows.features.get("order_pair"), dict):
        return None
    captions = [caption for _, *pair in order_pairs(rows) for caption in pair]
    ids = encode_captions(tokenizer, captions, ["en"] * len(captions), max_seq_length)
    return Texts(*pad_captions(ids, tokenizer.pad_token_id))


def order_accuracy(right_M: Tensor, prefix: str = "") -> dict[str, float]:
    """The share of right ones with its 95 % interval."""
    low, high = wilson_interval(int(right_M.sum()), len(right_M))
    share = right_M.double().mean().item()
    names = (f"{prefix}order_accuracy", f"{prefix}order_accuracy_low", f"{prefix}order_accuracy_high")
    return dict(zip(names, (share, low, high), strict=True))


@torch.no_grad()
def order_by_cosine(
    model: FusionDualEncoderModel, split: Embeddings, texts: Texts, accelerator: Accelerator
) -> Tensor:
    """Whether the true caption is the closer one to its image, bool `[M]`, the same on all ranks."""
    images, device = len(split.rows_M), split.rows_M.device
    shares = [ranks.share(images, part, ranks.world_size()) for part in range(ranks.world_size())]
    mine, found = shares[ranks.rank()], []
    for low in range(0, max(map(len, shares)), IMAGES):  # as many blocks on every rank, for FSDP
        place = torch.arange(mine.start + low, mine.start + low + IMAGES, device=device).clamp(max=images - 1)
        row = split.rows_M[place]
        both = texts.take(torch.stack([2 * row, 2 * row + 1], 1).flatten())
        with accelerator.autocast():
            embeds = model.encode_text(both.input_ids, both.attention_mask)[0].float()
        cosine = torch.einsum("mpe,me->mp", embeds.unflatten(0, (-1, 2)), split.image_ME[place])
        found.append(cosine[:, 0] > cosine[:, 1])
    right = torch.cat(found)[: len(mine)].to(torch.uint8)
    return ranks.gather(right, list(map(len, shares))).bool()


def order_numbers(split: Embeddings, texts: int) -> Tensor:
    """The pairs of each image with its true and its false caption, `[M, 2]`, where order texts follow the captions.

    They are numbered as `MatchScores` wants it, among `texts` texts in all.
    """
    image = torch.arange(len(split.rows_M), device=split.rows_M.device)
    true_M = image * texts + len(split.text_TE) + 2 * split.rows_M
    return torch.stack([true_M, true_M + 1], 1)


def order_by_match(match: MatchScores, numbers_M2: Tensor) -> Tensor:
    """Whether the head scores the true caption higher, bool `[M]`."""
    score_M2 = match(numbers_M2)
    return score_M2[:, 0] > score_M2[:, 1]
