"""Measure retrieval: text to image and image to text, with several captions per image counted right.

A query's rank is one plus the number of wrong items that score at least as high as its best right item: ties, and
scores that are no number, count against the model, and with five captions per image a perfect model scores 1.0 in both
directions. Similarities are computed in blocks, each rank ranks its own queries, and no M x T matrix is ever held.

Captions in several languages are also measured one language at a time, `text_to_image_recall_de@1` and so on, the ten most
frequent ones. Text to image: only its captions ask, among all images. Image to text: only its captions are there to be
found, and an image without one does not ask.

Shape letters: M images and T captions of the whole split, Q queries of a block, K candidates, E embedding width.
"""

import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm

from mm_utils import ranks
from mm_utils.arguments import arg
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel, KeysValues
from mm_utils.sharding import whole

logger = logging.getLogger(__name__)

Evaluate = Callable[[FusionDualEncoderModel, Iterable, Accelerator], dict[str, float]]
BLOCK = 2048  # queries per block: 2048 x 100,000 similarities are 0.8 GB
PAIRS = 256  # pairs scored by the head at a time
LANGUAGES = 10  # languages measured on their own: two directions and three cut-offs make 60 figures of them
CUTOFFS = (1, 5, 10)


@dataclass
class Embeddings:
    """A whole split, embedded, on every rank.

    Attributes:
        image_ME, text_TE: unit embeddings.
        image_key_M: id of each image; caption_key_T: id of the image each caption belongs to.
        rows_M: place of each image in the data set.
        keys_values: the head's image side for the images of this rank, on the CPU, one tuple entry per layer.
        owned: which images of M those are.
        input_ids, attention_mask: of all captions, `[T, L]`.
        skipped: images that could not be decoded, on this rank.
        languages: which of the captions are in it, bool `[T]`, of the most frequent languages, most frequent first;
            empty if there are not several.
    """

    image_ME: Tensor
    text_TE: Tensor
    image_key_M: Tensor
    caption_key_T: Tensor
    rows_M: Tensor
    keys_values: KeysValues | None
    owned: range
    input_ids: Tensor
    attention_mask: Tensor
    skipped: list[str] = field(default_factory=list)
    languages: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class EvaluationArguments:
    """What is measured."""

    rerank_top_k: int = arg(
        10, "Also measure with the fusion head ordering the first K of every query anew; 0 = do not."
    )


class RetrievalEvaluator:
    """Recall at 1, 5, 10, mean and median rank in both directions; all ranks get the same figures.

    With `rerank_top_k`, and a model with a fusion head, also `rerank_*`: the first k of each query are ordered anew by
    match logit plus scaled cosine. `split` keeps the embeddings of the last evaluation.
    """

    def __init__(self, rerank_top_k: int = 0):
        self.rerank_top_k = rerank_top_k
        self.split: Embeddings | None = None

    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Evaluate `model` on what `loader` yields (see `mm_utils.data.loaders.Loaders.evaluation`)."""
        rerank = self.rerank_top_k > 0 and model.fusion is not None
        self.split = embed_split(model, loader, accelerator, with_keys_values=rerank)
        if self.split.skipped:
            logger.warning(
                "%d images were left out of the evaluation: %s", len(self.split.skipped), self.split.skipped[:3]
            )
        metrics = retrieval_metrics(self.split)
        if rerank:
            metrics |= rerank_metrics(model, self.split, self.rerank_top_k, accelerator)
        return metrics


@torch.no_grad()
def embed_split(
    model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator, with_keys_values: bool = False
) -> Embeddings:
    """Embed this rank's share of a split and share it with all ranks.

    Raises:
        ValueError: if no image of the split can be decoded.
    """
    images, texts, keys, caption_keys, rows, kept, tokens = [], [], [], [], [], [], []
    languages: list[str | None] = []
    skipped: list[str] = []
    progress = tqdm(loader, desc="Embedding", leave=False, disable=not accelerator.is_main_process, delay=2)
    for batch in progress:
        skipped += batch["skipped"]
        if not len(batch["rows"]):
            continue
        with accelerator.autocast():
            image_bE, keys_values = model.encode_image(batch["pixel_values"], with_keys_values=with_keys_values)
            text_tE, _ = model.encode_text(batch["input_ids"], batch["attention_mask"])
        images.append(image_bE.float())
        texts.append(text_tE.float())
        key_t = batch["ids"][:, 0]
        caption_keys.append(key_t)
        keys.append(torch.empty_like(batch["rows"]).scatter_(0, batch["caption_image"], key_t))
        rows.append(batch["rows"])
        tokens.append((batch["input_ids"], batch["attention_mask"]))
        languages += batch.get("languages") or [""] * len(key_t)
        kept.append(tuple(layer.cpu() for layer in keys_values) if keys_values is not None else None)
    width, device = model.config.projection_dim, accelerator.device
    sizes = ranks.gather_sizes(sum(map(len, images)), device)
    caption_sizes = ranks.gather_sizes(sum(map(len, texts)), device)
    if not sum(sizes):
        raise ValueError(
            "no image of the evaluation split could be decoded; the first reasons are: " + "; ".join(skipped[:3])
        )
    longest = max((ids.shape[1] for ids, _ in tokens), default=8)
    first = sum(sizes[: ranks.rank()])

    def shared_tokens(part: int) -> Tensor:
        rows = _cat([_widen(pair[part], longest) for pair in tokens], (0, longest), torch.long, device)
        return ranks.gather_ragged(rows, caption_sizes)

    return Embeddings(
        ranks.gather(_cat(images, (0, width), torch.float, device), sizes),
        ranks.gather(_cat(texts, (0, width), torch.float, device), caption_sizes),
        ranks.gather(_cat(keys, (0,), torch.long, device), sizes),
        ranks.gather(_cat(caption_keys, (0,), torch.long, device), caption_sizes),
        ranks.gather(_cat(rows, (0,), torch.long, device), sizes),
        tuple(torch.cat(layer, 1) for layer in zip(*kept, strict=True)) if with_keys_values and kept else None,
        range(first, first + sizes[ranks.rank()]),
        shared_tokens(0),
        shared_tokens(1),
        skipped,
        _gather_languages(languages, caption_sizes, device),
    )


def retrieval_metrics(split: Embeddings) -> dict[str, float]:
    """Recalls and ranks of the cosine similarity alone; recalls also of each language, if there are several."""
    text_to_image = _cosine_ranks(split.text_TE, split.caption_key_T, split.image_ME, split.image_key_M)
    image_to_text = _cosine_ranks(split.image_ME, split.image_key_M, split.text_TE, split.caption_key_T)
    return {
        **summarise_ranks(text_to_image, "text_to_image_"),
        **summarise_ranks(image_to_text, "image_to_text_"),
        "text_to_image_chance@1": 1 / len(split.image_ME),
        **_by_language(split, text_to_image, "text_to_image_"),
        **_images_by_language(split),
    }


def summarise_ranks(rank_Q: Tensor, prefix: str = "") -> dict[str, float]:
    """Recall at 1, 5 and 10, mean and median of ranks that start at 1."""
    rank_Q = rank_Q.double()
    mean, median = rank_Q.mean().item(), rank_Q.quantile(0.5).item()
    return {**_recalls(rank_Q, f"{prefix}recall"), f"{prefix}mean_rank": mean, f"{prefix}median_rank": median}


def _recalls(rank_Q: Tensor, name: str) -> dict[str, float]:
    return {f"{name}@{k}": (rank_Q <= k).double().mean().item() for k in CUTOFFS}


def _by_language(split: Embeddings, rank_T: Tensor, prefix: str) -> dict[str, float]:
    """Recalls of the captions of each language, whose ranks are among `rank_T`."""
    parts = (_recalls(rank_T[is_in_T], f"{prefix}recall_{name}") for name, is_in_T in split.languages.items())
    return {name: value for part in parts for name, value in part.items()}


def _images_by_language(split: Embeddings) -> dict[str, float]:
    """Recalls of images among the captions of each language alone; T times M similarities, once more, for all of them."""
    found: dict[str, float] = {}
    for name, is_in_T in split.languages.items():
        text_key_T = split.caption_key_T[is_in_T]
        asks_M = torch.isin(split.image_key_M, text_key_T)
        rank_Q = _cosine_ranks(split.image_ME[asks_M], split.image_key_M[asks_M], split.text_TE[is_in_T], text_key_T)
        found |= _recalls(rank_Q, f"image_to_text_recall_{name}")
    return found


def rerank_metrics(
    model: FusionDualEncoderModel, split: Embeddings, top_k: int, accelerator: Accelerator
) -> dict[str, float]:
    """Recalls after the head has ordered the first `top_k` of every query anew; a right item below them stays there.

    Of each language only text to image: its captions alone as candidates would be other pairs to score.
    """
    scale, captions = whole(model.logit_scale.detach()).float().exp().squeeze(), len(split.text_TE)
    images_TK = top_candidates(split.text_TE, split.image_ME, top_k)
    texts_MK = top_candidates(split.image_ME, split.text_TE, top_k)
    text_pairs_TK = images_TK * captions + _column(captions, images_TK.device)
    image_pairs_MK = _column(len(split.image_ME), texts_MK.device) * captions + texts_MK
    match = match_logits(model, split, torch.cat([text_pairs_TK.flatten(), image_pairs_MK.flatten()]), accelerator)
    texts = (split.text_TE, split.caption_key_T)
    images = (split.image_ME, split.image_key_M)
    text_to_image = _reranked(texts, images, images_TK, match(text_pairs_TK), scale)
    image_to_text = _reranked(images, texts, texts_MK, match(image_pairs_MK), scale)
    return {
        **summarise_ranks(text_to_image, "rerank_text_to_image_"),
        **summarise_ranks(image_to_text, "rerank_image_to_text_"),
        **_by_language(split, text_to_image, "rerank_text_to_image_"),
    }


def top_candidates(query_QE: Tensor, item_NE: Tensor, top_k: int) -> Tensor:
    """Indices of the `top_k` items of highest cosine for every query, `[Q, K]`, best first."""
    top_k = min(top_k, len(item_NE))
    return _by_block(len(query_QE), lambda part: (query_QE[part] @ item_NE.T).topk(top_k, 1).indices)


@torch.no_grad()
def match_logits(
    model: FusionDualEncoderModel, split: Embeddings, pairs: Tensor, accelerator: Accelerator
) -> Callable[[Tensor], Tensor]:
    """Match logits of pairs given as image * T + text, each scored once, as a look-up by that number.

    Every rank scores the pairs of its own images, whose keys and values it holds; pairs are sorted by text, so that a
    text is encoded once for all its candidates.
    """
    pairs, captions = pairs.unique(), len(split.text_TE)
    image = pairs // captions
    mine = pairs[(image >= split.owned.start) & (image < split.owned.stop)]
    mine = mine[(mine % captions).argsort(stable=True)]
    sizes = ranks.gather_sizes(len(mine), mine.device)
    steps = range(0, max(sizes), PAIRS)  # the same number on every rank, as FSDP needs
    progress = tqdm(steps, desc="Re-ranking", leave=False, disable=not accelerator.is_main_process, delay=2)
    logits = []
    for low in progress:
        block = mine[low : low + PAIRS] if low < len(mine) else mine[:1]
        with accelerator.autocast():
            logits.append(_score_block(model, split, block, mine.device))
    all_pairs = ranks.gather(mine, sizes)
    all_logits = ranks.gather(torch.cat(logits)[: len(mine)], sizes)
    order = all_pairs.argsort()
    all_pairs, all_logits = all_pairs[order], all_logits[order]
    return lambda wanted: all_logits[torch.searchsorted(all_pairs, wanted)]


def _score_block(model: FusionDualEncoderModel, split: Embeddings, block: Tensor, device: torch.device) -> Tensor:
    if not len(block):  # a rank without images
        return torch.empty(0, device=device)
    text, place = (block % len(split.text_TE)).unique(return_inverse=True)
    length = int(split.attention_mask[text].sum(1).max())
    mask = split.attention_mask[text, :length]
    _, states = model.encode_text(split.input_ids[text, :length], mask)
    local = (block // len(split.text_TE) - split.owned.start).cpu()
    keys_values = tuple(layer[:, local].to(device) for layer in split.keys_values or ())
    return model.match_pairs(keys_values, states[place], mask[place]).float()


def _reranked(
    queries: tuple[Tensor, Tensor],
    items: tuple[Tensor, Tensor],
    candidates_QK: Tensor,
    match_QK: Tensor,
    scale: Tensor,
) -> Tensor:
    """Ranks `[Q]` by match logit plus scaled cosine among the candidates, by cosine for what is not among them."""
    (query_QE, query_key_Q), (item_NE, item_key_N) = queries, items
    cosine_QK = _by_block(
        len(query_QE), lambda part: torch.einsum("qe,qke->qk", query_QE[part], item_NE[candidates_QK[part]])
    )
    score_QK = match_QK + scale * cosine_QK
    right_QK = item_key_N[candidates_QK] == query_key_Q[:, None]
    best_Q1 = score_QK.masked_fill(~right_QK, -torch.inf).amax(1, keepdim=True)
    reranked_Q = 1 + (~(score_QK < best_Q1) & ~right_QK).sum(1)
    return torch.where(right_QK.any(1), reranked_Q, _cosine_ranks(*queries, *items))


def _cosine_ranks(query_QE: Tensor, query_key_Q: Tensor, item_NE: Tensor, item_key_N: Tensor) -> Tensor:
    """Rank `[Q]` of the best right item of every query."""

    def block_ranks(part: slice) -> Tensor:
        score_QN = query_QE[part] @ item_NE.T
        right_QN = query_key_Q[part, None] == item_key_N
        best_Q1 = score_QN.masked_fill(~right_QN, -torch.inf).amax(1, keepdim=True)
        return 1 + (~(score_QN < best_Q1) & ~right_QN).sum(1)

    return _by_block(len(query_QE), block_ranks)


def _by_block(queries: int, function: Callable[[slice], Tensor]) -> Tensor:
    """Apply `function` to this rank's queries a block at a time, and gather the rows of all ranks."""
    shares = [ranks.share(queries, part, ranks.world_size()) for part in range(ranks.world_size())]
    mine = shares[ranks.rank()]
    starts = range(mine.start, mine.stop, BLOCK) or (mine.start,)
    rows = torch.cat([function(slice(low, min(low + BLOCK, mine.stop))) for low in starts])
    return ranks.gather(rows, [len(share) for share in shares])


def _gather_languages(codes: list[str | None], sizes: list[int], device: torch.device) -> dict[str, Tensor]:
    """Of the codes on each rank, one per caption: `Embeddings.languages`, the same on all ranks.

    Names hold letters, digits, `_` and `-`, which every tracker takes, and at most 35 of them; "" is none.
    """
    names = [re.sub(r"[^\w-]", "-", (code or "")[:35], flags=re.ASCII).encode() for code in codes]
    width = max(map(len, names), default=0) or 1
    letters = torch.tensor([list(name.ljust(width, b"\0")) for name in names], dtype=torch.uint8, device=device)
    rows = ranks.gather_ragged(letters.view(-1, width), sizes)
    found, which_T, counts = rows.unique(dim=0, return_inverse=True, return_counts=True)
    decoded = [bytes(letters).rstrip(b"\0").decode() for letters in found.tolist()]
    places = sorted((place for place, name in enumerate(decoded) if name), key=lambda place: -int(counts[place]))
    return {decoded[place]: which_T == place for place in places[:LANGUAGES]} if len(places) > 1 else {}


def _column(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device)[:, None]


def _cat(parts: list[Tensor], empty: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(empty, dtype=dtype, device=device)


def _widen(rows: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))
