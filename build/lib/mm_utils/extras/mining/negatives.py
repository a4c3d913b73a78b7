"""Find an image's hard negatives: captions of others that the towers rank high.

Of the captions that are most similar to an image, those are left out that may be true of it:

==================  ====================================================================================================
``same_text``       it is equal to one of the image's own captions, but for case and spacing
``same_image``      its image shows the same picture (`mm_utils.data.prepare.perceptual_hash`)
``too_close``       its cosine with the image is above (1 - margin) x that of the image's best own caption, as in
                    `mine_hard_negatives` of sentence-transformers, after NV-Retriever (arXiv 2407.15831)
``fits_as_well``    where training has found that the fusion head helps: its score with this image is not below that with its own
==================  ====================================================================================================

The head compares two images for one caption, not two captions for one image, as how likely a caption is by itself would decide
between these.

Every process scores a share of the images, in tiles, so memory grows with images x candidates.

Shape letters: M images, T captions, K candidates of an image.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm

from mm_utils import distributed
from mm_utils.arguments import arg
from mm_utils.data.images import UnreadableImageError, open_image
from mm_utils.data.prepare.perceptual_hash import FINGERPRINT, fingerprint, groups, near_pairs
from mm_utils.distributed import full_tensor
from mm_utils.evaluation.embeddings import Embeddings, embed_split, top_candidates
from mm_utils.evaluation.reranking import score_pairs, stored_weights
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel

logger = logging.getLogger(__name__)

REASONS = ("same_text", "same_image", "too_close", "fits_as_well")
CACHE_BYTES = 2e9  # for the head's keys and values of images; images that do not fit are encoded twice
JUDGED = 2  # candidates that the head judges, for each negative that is wanted
EXAMPLES = 20
_SIDE = 256  # of an image whose perceptual hash is taken
_PASSED, _KEPT = -2, -1  # own captions, and what is not needed; what is taken
Judge = Callable[[Tensor, Tensor], Tensor]
"""Maps numbers of images and of captions, `[P]`, to the scores of the pairs, `[P]`."""


@dataclass
class MiningArguments:
    """Which captions are negatives of an image."""

    num_negatives: int = arg(5, "Captions for each training image, at most.")
    num_candidates: int = arg(50, "Captions of other images among which these are chosen: the most similar ones.")
    relative_margin: float = arg(
        0.05, "Leave out captions that score above (1 - this) x the image's best own caption: they may be true of it."
    )

    def __post_init__(self) -> None:
        if not 1 <= self.num_negatives <= self.num_candidates:
            raise ValueError(
                f"--num_negatives is {self.num_negatives} and --num_candidates {self.num_candidates}; give at least 1 negative, "
                "and no fewer candidates."
            )
        if not 0 <= self.relative_margin < 1:
            raise ValueError(f"--relative_margin is {self.relative_margin}; give a share from 0 to below 1.")


@dataclass
class Mined:
    """The negatives of all rows, the same on all ranks.

    Attributes:
        negatives: captions for each row, the most similar first.
        left_out: candidates that were left out, by reason.
        examples: some rows with their captions, negatives, and what was left out.
    """

    negatives: list[list[str]]
    left_out: dict[str, int]
    examples: list[dict[str, Any]] = field(default_factory=list)


def mine(
    model: FusionDualEncoderModel,
    rows: datasets.Dataset,
    loader: Iterable,
    args: MiningArguments,
    accelerator: Accelerator,
) -> Mined:
    """Find the negatives of all rows among their captions; called on all ranks.

    Args:
        model: in evaluation mode.
        rows: tokenised rows.
        loader: their batches, from `mm_utils.data.batches.loaders.Loaders.evaluation`.
        args: what to take.
        accelerator: its processes share the work.
    """
    weights = stored_weights(model) if model.config.rerank_weights and model.fusion is not None else {}
    split = embed_split(model, loader, accelerator, CACHE_BYTES if weights else 0)
    group_N = torch.from_numpy(same_pictures(rows, accelerator)).to(split.rows_M.device)
    scale = full_tensor(model.logit_scale.detach()).float().exp().item()

    def judge(image_P: Tensor, caption_P: Tensor) -> Tensor:
        pair_P, captions = image_P * len(split.text_TE) + caption_P, split.texts
        scores = score_pairs(model, split, captions, pair_P, loader, accelerator, list(weights))
        added_P = torch.tensor(list(weights.values())).to(scores.scores) @ scores(pair_P)
        return scale * (split.image_ME[image_P] * split.text_TE[caption_P]).sum(1) + added_P

    return choose(split, rows, group_N, args, judge if weights else None)


def choose(
    split: Embeddings, rows: datasets.Dataset, group_N: Tensor, args: MiningArguments, judge: Judge | None = None
) -> Mined:
    """Choose negatives among all captions of a split.

    Args:
        split: its embeddings.
        rows: its rows, tokenised.
        group_N: the group of pictures that each row's image is in.
        args: what to take.
        judge: the fusion head; None for none.
    """
    captions = Captions.of(split, rows)
    own = int(captions.owner_T.bincount().max())
    cosine_MK, caption_MK = top_candidates(*split.directions["image_to_text"], args.num_candidates + own)
    own_T = (split.image_ME[captions.owner_T] * split.text_TE).sum(1)
    best_M = own_T.new_full((len(split.image_ME),), -math.inf).scatter_reduce(0, captions.owner_T, own_T, "amax")
    owner_MK = captions.owner_T[caption_MK]
    image_M1 = torch.arange(len(caption_MK), device=caption_MK.device)[:, None]
    group_M = group_N[split.rows_M]
    texts = int(captions.text_T.max()) + 1
    # Later ones win, so that each candidate is counted once.
    fate_MK = torch.full_like(caption_MK, _KEPT)
    fate_MK[cosine_MK > (1 - args.relative_margin) * best_M[:, None]] = REASONS.index("too_close")
    fate_MK[group_M[owner_MK] == group_M[:, None]] = REASONS.index("same_image")
    own_pairs = captions.owner_T * texts + captions.text_T
    fate_MK[torch.isin(image_M1 * texts + captions.text_T[caption_MK], own_pairs)] = REASONS.index("same_text")
    fate_MK[owner_MK == image_M1] = _PASSED
    others_MK = fate_MK != _PASSED
    fate_MK[others_MK & (others_MK.cumsum(1) > args.num_candidates)] = _PASSED
    if judge is not None:
        _leave_out_fitting(fate_MK, caption_MK, captions.owner_T, args.num_negatives, judge)
    return _collect(split, rows, captions, caption_MK, fate_MK, args.num_negatives)


@dataclass
class Captions:
    """The captions of a split, in the order of its embeddings.

    Attributes:
        owner_T: the place of each one's image in the split.
        text_T: a number that equal captions share, but for case and spacing.
        place_T: the place of each one among the captions of all rows.
    """

    owner_T: Tensor
    text_T: Tensor
    place_T: Tensor

    @classmethod
    def of(cls, split: Embeddings, rows: datasets.Dataset) -> "Captions":
        """Find a split's captions in its rows, an image's side by side and in their order."""
        key_M, order_M = split.image_key_M.sort()
        owner_T = order_M[torch.searchsorted(key_M, split.caption_key_T)]
        count_M = owner_T.bincount(minlength=len(order_M))
        place_T = torch.arange(len(owner_T), device=owner_T.device) - (count_M.cumsum(0) - count_M)[owner_T]
        keys = rows.select_columns(["caption_keys"]).with_format("arrow")[:]["caption_keys"].combine_chunks()
        starts = torch.from_numpy(np.diff(keys.offsets.to_numpy()).cumsum()).roll(1).to(owner_T.device)
        starts[0] = 0
        place_T += starts[split.rows_M][owner_T]
        key_T = torch.from_numpy(keys.flatten().to_numpy().copy()).to(owner_T.device)[place_T]
        return cls(owner_T, key_T.unique(return_inverse=True)[1], place_T)


def same_pictures(rows: datasets.Dataset, accelerator: Accelerator) -> np.ndarray:
    """Return each row's group of equal pictures, named by its first; unreadable ones alone."""
    parts = [
        distributed.share(len(rows), part, accelerator.num_processes) for part in range(accelerator.num_processes)
    ]
    images, prints = rows.select_columns(["image"]), []
    for row in tqdm(
        parts[accelerator.process_index], desc="Comparing images", disable=distributed.rank() > 0, delay=2
    ):
        try:
            prints.append(fingerprint(open_image(images[row]["image"], _SIDE)))
        except UnreadableImageError:
            prints.append(bytes(FINGERPRINT.itemsize))  # as a flat image, which resembles none
    mine = torch.tensor(np.frombuffer(b"".join(prints), np.uint8)).view(-1, FINGERPRINT.itemsize)
    everyone = distributed.gather(mine.to(accelerator.device), [len(part) for part in parts])
    return groups(len(rows), near_pairs(everyone.cpu().numpy().view(FINGERPRINT)[:, 0]))


def _leave_out_fitting(fate_MK: Tensor, caption_MK: Tensor, owner_T: Tensor, num_negatives: int, judge: Judge) -> None:
    """Mark captions that fit as well as the image's own; those not judged are not taken."""
    is_kept_MK = fate_MK == _KEPT
    is_judged_MK = is_kept_MK & (is_kept_MK.cumsum(1) <= JUDGED * num_negatives)
    fate_MK[is_kept_MK & ~is_judged_MK] = _PASSED
    image_P = is_judged_MK.nonzero()[:, 0]
    caption_P, place_P = caption_MK[is_judged_MK].unique(return_inverse=True)
    score_P = judge(torch.cat([image_P, owner_T[caption_P]]), torch.cat([caption_P[place_P], caption_P]))
    other_P, own_P = score_P[: len(image_P)], score_P[len(image_P) :][place_P]
    judged = fate_MK[is_judged_MK]
    judged[~(other_P < own_P)] = REASONS.index("fits_as_well")
    fate_MK[is_judged_MK] = judged


def _collect(
    split: Embeddings,
    rows: datasets.Dataset,
    captions: Captions,
    caption_MK: Tensor,
    fate_MK: Tensor,
    num_negatives: int,
) -> Mined:
    """Take the first captions that were kept, each text once."""
    words = rows.select_columns(["captions"]).with_format("arrow")[:]["captions"].combine_chunks()
    flat, place_T, text_T = words.flatten(), captions.place_T.tolist(), captions.text_T.tolist()
    mined = Mined(
        [[] for _ in range(len(rows))], {name: int((fate_MK == at).sum()) for at, name in enumerate(REASONS)}
    )
    left_out: Counter[str] = Counter()
    order = split.rows_M.argsort().tolist()
    for image in order:
        row, shown = int(split.rows_M[image]), list[dict[str, str]]()
        taken: dict[int, int] = {}
        for caption, fate in zip(caption_MK[image].tolist(), fate_MK[image].tolist(), strict=True):
            if fate == _KEPT and len(taken) < num_negatives:
                taken.setdefault(text_T[caption], caption)
            elif fate >= 0 and left_out[REASONS[fate]] < EXAMPLES:
                left_out[REASONS[fate]] += 1
                shown.append({"reason": REASONS[fate], "caption": flat[place_T[caption]].as_py()})
        mined.negatives[row] = [flat[place_T[caption]].as_py() for caption in taken.values()]
        if shown:
            known = {"captions": words[row].as_py(), "negatives": mined.negatives[row]}
            mined.examples.append({"row": row, **known, "left_out": shown})
    return mined
