"""A whole split, embedded once: unit embeddings on every rank, and for re-ranking the images' side of the fusion head.

Keys and values of an image take far more than its embedding: at 147 image tokens, 4 layers of width 512 and fp32, 2.4 MB
against 1 kB. A rank keeps those of its first batches, as many as `cache_bytes` holds; whoever scores pairs goes through the
other images once more, a share of that size at a time (`image_shares`). So memory is bounded whatever the split's size, a
split that fits is computed once, and the scores are the same in both cases.

Shape letters: M images and T captions of the whole split, L tokens, E embedding width.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import pad
from tqdm.auto import tqdm

from mm_utils import ranks
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel, KeysValues
from mm_utils.ranking import Keyed

LANGUAGES = 10  # languages measured on their own: two directions and three cut-offs make 60 figures of them


@dataclass
class Texts:
    """Token ids and attention mask of texts, both `[T, L]`."""

    input_ids: Tensor
    attention_mask: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)

    def take(self, places: Tensor) -> "Texts":
        """Some of them, as wide as the longest of these."""
        mask = self.attention_mask[places]
        longest = int(mask.sum(1).max())
        return Texts(self.input_ids[places, :longest], mask[:, :longest])

    def to(self, device: torch.device) -> "Texts":
        """The same on a device."""
        return Texts(self.input_ids.to(device), self.attention_mask.to(device))

    def followed_by(self, others: "Texts") -> "Texts":
        """These and then those."""
        width = max(self.input_ids.shape[1], others.input_ids.shape[1])
        pairs = ((self.input_ids, others.input_ids), (self.attention_mask, others.attention_mask))
        return Texts(*(torch.cat([_widen(rows, width) for rows in pair]) for pair in pairs))


@dataclass
class Embeddings:
    """A whole split, embedded, on every rank.

    Attributes:
        image_ME, text_TE: unit embeddings.
        image_key_M: id of each image; caption_key_T: id of the image each caption belongs to.
        rows_M: place of each image in the data set.
        keys_values: the head's image side for the first images of this rank, one tuple entry per layer.
        owned: which images of M are this rank's.
        input_ids, attention_mask: of all captions, `[T, L]`.
        skipped: images that could not be decoded, on this rank.
        languages: which of the captions are in it, bool `[T]`, of the most frequent languages, most frequent first;
            empty if there are not several.
        batches_held, batches: of how many batches of the loader there are `keys_values`, and how many there are.
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
    batches_held: int = 0
    batches: int = 0

    @property
    def images(self) -> Keyed:
        """Embeddings and ids of the images."""
        return Keyed(self.image_ME, self.image_key_M)

    @property
    def captions(self) -> Keyed:
        """Embeddings of the captions and ids of their images."""
        return Keyed(self.text_TE, self.caption_key_T)

    @property
    def texts(self) -> Texts:
        """The captions' tokens."""
        return Texts(self.input_ids, self.attention_mask)


@torch.no_grad()
def embed_split(
    model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator, cache_bytes: float = 0
) -> Embeddings:
    """Embed this rank's share of a split and share it with all ranks.

    With `cache_bytes`, keys and values of images are kept up to about that size, on the device, but of one batch at least.

    Raises:
        ValueError: if no image of the split can be decoded.
    """
    images, texts, keys, caption_keys, rows, tokens = [], [], [], [], [], []
    languages: list[str | None] = []
    skipped: list[str] = []
    held, batches = _Held(cache_bytes), 0
    progress = tqdm(loader, desc="Embedding", leave=False, disable=not accelerator.is_main_process, delay=2)
    for batch in progress:
        batches += 1
        skipped += batch["skipped"]
        if not len(batch["rows"]):
            held.add(None)
            continue
        with accelerator.autocast():
            image_bE, keys_values = model.encode_image(batch["pixel_values"], with_keys_values=held.has_room)
            text_tE, _ = model.encode_text(batch["input_ids"], batch["attention_mask"])
        held.add(keys_values)
        images.append(image_bE.float())
        texts.append(text_tE.float())
        key_t = batch["ids"][:, 0]
        caption_keys.append(key_t)
        keys.append(torch.empty_like(batch["rows"]).scatter_(0, batch["caption_image"], key_t))
        rows.append(batch["rows"])
        tokens.append((batch["input_ids"], batch["attention_mask"]))
        languages += batch.get("languages") or [""] * len(key_t)
    width, device = model.config.projection_dim, accelerator.device
    sizes = ranks.gather_sizes(sum(map(len, images)), device)
    caption_sizes = ranks.gather_sizes(sum(map(len, texts)), device)
    if not sum(sizes):
        raise ValueError(
            "no image of the evaluation split could be decoded; the first reasons are: " + "; ".join(skipped[:3])
        )
    first, batches_held = sum(sizes[: ranks.rank()]), min(ranks.gather_sizes(len(held.batches), device))
    return Embeddings(
        ranks.gather(_cat(images, (0, width), torch.float, device), sizes),
        ranks.gather(_cat(texts, (0, width), torch.float, device), caption_sizes),
        ranks.gather(_cat(keys, (0,), torch.long, device), sizes),
        ranks.gather(_cat(caption_keys, (0,), torch.long, device), caption_sizes),
        ranks.gather(_cat(rows, (0,), torch.long, device), sizes),
        held.joined(batches_held),
        range(first, first + sizes[ranks.rank()]),
        _gather_tokens([ids for ids, _ in tokens], caption_sizes, device),
        _gather_tokens([mask for _, mask in tokens], caption_sizes, device),
        skipped,
        _gather_languages(languages, caption_sizes, device),
        batches_held,
        batches,
    )


@torch.no_grad()
def image_shares(
    model: FusionDualEncoderModel, split: Embeddings, loader: Iterable, accelerator: Accelerator
) -> Iterator[tuple[range, KeysValues]]:
    """This rank's images with their keys and values, a share at a time; as many shares, some empty, on every rank.

    The first share is what `embed_split` kept, and is forgotten when the next is asked for. `loader` must give the same
    batches once more.
    """
    keys_values, split.keys_values = split.keys_values or (), None
    start = split.owned.start
    batches = islice(loader, split.batches_held, None)
    for part in range(-(-split.batches // max(1, split.batches_held))):
        if part:
            held = _Held(torch.inf)
            for batch in islice(batches, split.batches_held):
                if len(batch["rows"]):
                    with accelerator.autocast():
                        held.add(model.encode_image(batch["pixel_values"])[1])
            keys_values = held.joined(split.batches_held) or ()
        images = range(start, start + (keys_values[0].shape[1] if keys_values else 0))
        yield images, keys_values
        keys_values, start = (), images.stop


class _Held:
    """Keys and values of batches, None of one without images, while there is room."""

    def __init__(self, most_bytes: float):
        self.batches: list[KeysValues | None] = []
        self.has_room, self.room = most_bytes > 0, most_bytes

    def add(self, keys_values: KeysValues | None) -> None:
        if not self.has_room:
            return
        self.room -= size_in_bytes(keys_values or ())
        self.has_room = self.room >= 0
        if self.has_room or not any(self.batches):
            self.batches.append(keys_values)

    def joined(self, most: int) -> KeysValues | None:
        """Of the first `most` batches, layer by layer, so that no more than one layer is there twice at a time."""
        parts = [list(batch) for batch in self.batches[:most] if batch is not None]
        self.batches.clear()
        return tuple(torch.cat([part.pop(0) for part in parts], 1) for _ in range(len(parts[0]))) if parts else None


def size_in_bytes(keys_values: KeysValues) -> int:
    """What they take in memory."""
    return sum(layer.numel() * layer.element_size() for layer in keys_values)


def _gather_tokens(parts: list[Tensor], sizes: list[int], device: torch.device) -> Tensor:
    """Ids or masks of the captions of all ranks, as wide as the longest."""
    longest = max((part.shape[1] for part in parts), default=1)
    rows = _cat([_widen(part, longest) for part in parts], (0, longest), torch.long, device)
    return ranks.gather_ragged(rows, sizes)


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


def _cat(parts: list[Tensor], empty: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(empty, dtype=dtype, device=device)


def _widen(rows: Tensor, width: int) -> Tensor:
    return pad(rows, (0, width - rows.shape[1]))
