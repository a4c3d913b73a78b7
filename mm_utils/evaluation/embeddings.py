"""Embed a whole split once, and rank its items by cosine similarity.

For re-ranking, each rank keeps the fusion head's keys and values of its first images, as many as fit into `cache_bytes`: at 147
image tokens, 4 layers of width 512 and fp32, an image takes 2.4 MB, against 1 kB for its embedding. `image_shares` yields
these, then encodes the other images again, in shares of the same size: memory is bounded, and scores do not depend on it.

The rank of a query is 1 + the number of wrong items that score at least as high as its best right item. Ties and NaN
count against the model. Right are an image's own captions and those that are equal to one of them but for case and spacing, as
in the losses: no model can tell such captions apart, and they are true of both images. So a perfect model's recall@1 is 1.0.

Shape letters: M images and T captions of the split, Q queries, N items, K candidates, L tokens, E embedding width.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import pad

from mm_utils import distributed
from mm_utils.distributed import RunError
from mm_utils.model.encoding import embed_texts, stored_text, vision_features
from mm_utils.model.fusion import KeysValues
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel

BLOCK = 2048  # queries of a block, at most
TILE = 1 << 26  # their cosines with all items, at most: 256 MB


def take_texts(text_T2L: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask of the texts at `places`, padded to the longest of them."""
    taken = text_T2L[places]
    # [t, 2, L]: ids, and the mask that adds up to the lengths
    input_ids, attention_mask = taken[..., : int(taken[:, 1].sum(1).max())].unbind(1)
    return input_ids, attention_mask


def cat_texts(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate texts `[T, 2, L]`, padded to the longest of all."""
    width = max(part.shape[2] for part in parts)
    return torch.cat([pad(part, (0, width - part.shape[2])) for part in parts])


class Keyed(NamedTuple):
    """Unit embeddings `[N, E]`, image ids `[N]`, keys of captions `[N, C]`, -1 where fewer.

    Captions are None where none is equal to one of another image. `group` is a number that is shared by images with an equal
    caption, and by those that such images connect: only groups are independent. Without equal captions it is the image's id.
    """

    embeds: Tensor
    key: Tensor
    group: Tensor
    captions: Tensor | None = None

    def take(self, part: slice | Tensor) -> "Keyed":
        """Return some of the rows."""
        captions = None if self.captions is None else self.captions[part]
        return Keyed(self.embeds[part], self.key[part], self.group[part], captions)


def right_items(queries: Keyed, items: Keyed, item_QK: Tensor | None = None) -> Tensor:
    """Return which items are right for each query, bool `[Q, N]`; of candidates, `[Q, K]`."""

    def among(value_N: Tensor) -> Tensor:
        return value_N if item_QK is None else value_N[item_QK]

    right = queries.key[:, None] == among(items.key)
    if queries.captions is not None and items.captions is not None:
        for own_Q in queries.captions.unbind(1):  # on one of the two sides there is but one
            for key_N in items.captions.unbind(1):
                right |= own_Q[:, None] == among(key_N)
    return right


def count_right(queries: Keyed, items: Keyed) -> Tensor:
    """Return the number of right items of each query, `[Q]`."""
    parts = _blocks(range(len(queries.key)), items)
    return torch.cat([right_items(queries.take(part), items).sum(1) for part in parts])


@dataclass
class Embeddings:
    """Unit embeddings of a split, on all ranks."""

    image_ME: Tensor
    text_TE: Tensor
    image_key_M: Tensor  # id of each image
    caption_key_T: Tensor  # id of each caption's image
    rows_M: Tensor  # row of each image in the data set
    text_T2L: Tensor  # token ids and attention mask of each caption
    owned: range = range(0)  # the images that this rank encoded
    skipped: list[str] = field(default_factory=list)  # errors of images that this rank could not decode
    keys_values: KeysValues | None = None  # of this rank's first images, one tensor per layer of the fusion head
    batches_held: int = 0  # number of batches whose images are in `keys_values`, the same on all ranks
    batches: int = 0  # number of batches of the loader
    # The same number for equal captions; None if none is equal to one of another image, or if such ones count as wrong.
    text_key_T: Tensor | None = None

    @property
    def directions(self) -> dict[str, tuple[Keyed, Keyed]]:
        """Queries and items of each direction of retrieval."""
        if self.text_key_T is None:
            images = Keyed(self.image_ME, self.image_key_M, self.image_key_M)
            captions = Keyed(self.text_TE, self.caption_key_T, self.caption_key_T)
        else:
            group_M = self.group_M
            images = Keyed(self.image_ME, self.image_key_M, group_M, self._captions_of_images(self.text_key_T))
            captions = Keyed(self.text_TE, self.caption_key_T, group_M[self.owner_T], self.text_key_T[:, None])
        return {"text_to_image": (captions, images), "image_to_text": (images, captions)}

    @property
    def group_M(self) -> Tensor:
        """The group of each image, see `Keyed`: the least id of an image in it."""
        if self.text_key_T is None:
            return self.image_key_M
        _, place_T = self.text_key_T.unique(return_inverse=True)
        group_M = self.image_key_M
        before_M = torch.full_like(self.image_key_M, -1)
        # The least id passes from images to their captions and back; a chain of n images takes at most n rounds.
        while not torch.equal(group_M, before_M):
            before_M = group_M
            largest_T = torch.full_like(place_T, torch.iinfo(torch.long).max)
            least_T = largest_T.scatter_reduce(0, place_T, group_M[self.owner_T], "amin")[place_T]
            group_M = group_M.scatter_reduce(0, self.owner_T, least_T, "amin")
        return group_M

    @property
    def owner_T(self) -> Tensor:
        """The place of each caption's image."""
        sorted_M, order_M = self.image_key_M.sort()
        return order_M[torch.searchsorted(sorted_M, self.caption_key_T)]

    def _captions_of_images(self, text_key_T: Tensor) -> Tensor:
        """Return the keys of each image's captions, `[M, C]`, -1 where it has fewer."""
        owner_T, order_T = self.owner_T.sort(stable=True)
        count_M = owner_T.bincount(minlength=len(self.image_key_M))
        # Sorted by image, a caption's place among those of its image is its own less the captions of all images before.
        place_T = torch.arange(len(owner_T), device=owner_T.device) - (count_M.cumsum(0) - count_M)[owner_T]
        keys_MC = text_key_T.new_full((len(count_M), int(count_M.max())), -1)
        keys_MC[owner_T, place_T] = text_key_T[order_T]
        return keys_MC


# -- embedding a split ------------------------------------------------------------------------------------------------


@torch.no_grad()
def embed_split(
    model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator, cache_bytes: float = 0
) -> Embeddings:
    """Embed this rank's share of a split, and gather the embeddings of all ranks.

    Args:
        loader: batches of this rank's share, from `mm_utils.data.batches.loaders.Loaders.evaluation`.
        cache_bytes: device memory for keys and values of images; if it is above 0, those of one batch are always kept.

    Raises:
        ValueError: if no image of the split can be decoded.
        RunError: if an embedding is not finite, or zero.
    """
    width = model.config.projection_dim
    device = accelerator.device
    images = [torch.empty(0, width, device=device)]
    texts = [torch.empty(0, width, device=device)]
    no_ids = torch.empty(0, dtype=torch.long, device=device)
    keys = [no_ids]
    caption_keys = [no_ids]
    text_keys = [no_ids]
    rows = [no_ids]
    tokens = [torch.empty(0, 2, 1, dtype=torch.long, device=device)]
    skipped: list[str] = []
    cache = _KeysValuesCache(cache_bytes)
    batches = 0
    for batch in distributed.progress(loader, "Embedding"):
        batches += 1
        skipped += batch["skipped"]
        if not len(batch["rows"]):
            # counted: `batches_held` is a number of batches, on ranks with and without images in them
            cache.add(None)
            continue
        with accelerator.autocast():
            # without room in the cache, keys and values would be computed for nothing
            image_bE, keys_values = model.project_image(*vision_features(model, batch, cache.has_room))
            if (stored := stored_text(model, batch, with_states=False)) is not None:
                text_tE, _ = stored
            else:
                text_tE = embed_texts(model, batch["input_ids"], batch["attention_mask"])
        cache.add(keys_values)
        images.append(image_bE.float())
        texts.append(text_tE.float())
        key_t = batch["ids"][:, 0]
        caption_keys.append(key_t)
        text_keys.append(batch["ids"][:, 1])
        # all captions of an image write the same id
        keys.append(torch.empty_like(batch["rows"]).scatter_(0, batch["caption_image"], key_t))
        rows.append(batch["rows"])
        tokens.append(torch.stack([batch["input_ids"], batch["attention_mask"]], 1))
    sizes = distributed.gather_sizes(sum(map(len, images)), device)
    caption_sizes = distributed.gather_sizes(sum(map(len, texts)), device)
    if not sum(sizes):
        reasons = "; ".join(skipped[:3])
        raise ValueError(f"no image of the evaluation split could be decoded; the first reasons are: {reasons}")
    first = sum(sizes[: distributed.rank()])
    batches_held = min(distributed.gather_sizes(len(cache.batches), device))
    key_T = distributed.gather(torch.cat(caption_keys), caption_sizes)
    text_key_T = distributed.gather(torch.cat(text_keys), caption_sizes)
    pairs_2P = torch.stack([text_key_T, key_T]).unique(dim=1)  # fewer texts than these: one belongs to two images
    image_ME = distributed.gather(torch.cat(images), sizes)
    text_TE = distributed.gather(torch.cat(texts), caption_sizes)
    check_embeddings("images", image_ME)
    check_embeddings("texts", text_TE)
    return Embeddings(
        image_ME=image_ME,
        text_TE=text_TE,
        image_key_M=distributed.gather(torch.cat(keys), sizes),
        caption_key_T=key_T,
        rows_M=distributed.gather(torch.cat(rows), sizes),
        text_T2L=distributed.gather_ragged(cat_texts(tokens), caption_sizes),
        owned=range(first, first + sizes[distributed.rank()]),
        skipped=skipped,
        keys_values=cache.joined(batches_held),
        batches_held=batches_held,
        batches=batches,
        text_key_T=text_key_T if len(pairs_2P[0].unique()) < pairs_2P.shape[1] else None,
    )


def check_embeddings(what: str, unit_nE: Tensor) -> None:
    """Raise RunError if vectors that should have length 1 are not finite, or zero."""
    if not (unit_nE.norm(dim=-1) > 0.5).all():  # false of NaN
        raise RunError(
            f"The model's embeddings of {what} are not finite, or zero; no figure can come of them. Try another checkpoint, or "
            "leave --mixed_precision out."
        )


@torch.no_grad()
def image_shares(
    model: FusionDualEncoderModel, split: Embeddings, loader: Iterable, accelerator: Accelerator
) -> Iterator[tuple[range, KeysValues]]:
    """Yield this rank's images with their keys and values, one share at a time.

    Every rank yields the same number of shares; some may be empty. The first share is what `embed_split` kept; it is
    removed from `split`, and freed when the next one is requested. `loader` must yield the same batches again.
    """
    keys_values = split.keys_values or ()
    split.keys_values = None
    start = split.owned.start
    batches = islice(loader, split.batches_held, None)
    for part in range(-(-split.batches // max(1, split.batches_held))):  # rounded up
        if part:
            cache = _KeysValuesCache(torch.inf)
            for batch in islice(batches, split.batches_held):
                if len(batch["rows"]):
                    with accelerator.autocast():
                        cache.add(model.project_image(*vision_features(model, batch, with_taps=True))[1])
            keys_values = cache.joined(split.batches_held) or ()
        images = range(start, start + (keys_values[0].shape[1] if keys_values else 0))
        yield images, keys_values
        keys_values = ()
        start = images.stop


class _KeysValuesCache:
    """Keys and values of batches while there is room; None stands for a batch without images."""

    def __init__(self, max_bytes: float):
        self.batches: list[KeysValues | None] = []
        self.has_room = max_bytes > 0
        self.room = max_bytes

    def add(self, keys_values: KeysValues | None) -> None:
        self.room -= sum(layer.numel() * layer.element_size() for layer in keys_values or ())
        if self.has_room and (self.room >= 0 or not any(self.batches)):
            self.batches.append(keys_values)
        self.has_room &= self.room >= 0

    def joined(self, count: int) -> KeysValues | None:
        """Concatenate the first `count` batches; only one layer is in memory twice at a time."""
        parts = [list(batch) for batch in self.batches[:count] if batch is not None]
        self.batches.clear()
        layers = []
        while any(parts):
            layers.append(torch.cat([part.pop(0) for part in parts], 1))
        return tuple(layers) or None


# -- ranking by cosine ------------------------------------------------------------------------------------------------


def cosine_ranks(queries: Keyed, items: Keyed) -> Tensor:
    """Return where each query's best right item stands in its list, from 1, the same on all ranks."""

    def block_ranks(part: slice) -> tuple[Tensor]:
        score_QN = queries.embeds[part] @ items.embeds.T
        return (best_rank(score_QN, right_items(queries.take(part), items)),)

    return _by_block(queries, items, block_ranks)[0]


def top_candidates(queries: Keyed, items: Keyed, top_k: int) -> tuple[Tensor, ...]:
    """Return cosines and indices `[Q, K]` of each query's first `top_k` items, best first."""
    top_k = min(top_k, len(items.embeds))
    return _by_block(queries, items, lambda part: (queries.embeds[part] @ items.embeds.T).topk(top_k, 1))


def best_rank(score_QN: Tensor, right_QN: Tensor) -> Tensor:
    """Return the rank `[Q]`, from 1, of the best right item among N scores."""
    best_Q1 = score_QN.masked_fill(~right_QN, -torch.inf).amax(1, keepdim=True)
    return 1 + (~(score_QN < best_Q1) & ~right_QN).sum(1)  # ~(a < b) counts NaN, a >= b would not


def _by_block(queries: Keyed, items: Keyed, function: Callable[[slice], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Apply `function` to this rank's queries in blocks; gather the columns of all ranks."""
    rank = distributed.rank()
    world = distributed.world_size()
    shares = [distributed.share(len(queries.key), part, world) for part in range(world)]
    blocks = distributed.progress(_blocks(shares[rank], items), "Ranking")
    columns = zip(*map(function, blocks), strict=True)
    return tuple(distributed.gather(torch.cat(column), list(map(len, shares))) for column in columns)


def _blocks(queries: range, items: Keyed) -> list[slice]:
    """Cut queries so that a block's cosines fit into memory; none are one empty block."""
    size = max(1, min(BLOCK, TILE // max(1, len(items.key))))
    return [slice(low, min(low + size, queries.stop)) for low in queries[::size] or (queries.start,)]
