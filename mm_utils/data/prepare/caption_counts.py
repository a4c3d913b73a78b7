"""Captions that say the same, and those that too many images share."""

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mm_utils.data.prepare.perceptual_hash import hash_of_text


def caption_keys(captions: Sequence[str]) -> np.ndarray:
    """Return 64-bit keys [M], equal for captions that differ in case, signs or spacing."""
    wording = _Wording()
    plain = (unicodedata.normalize("NFKC", caption).casefold().translate(wording) for caption in captions)
    return np.frombuffer(b"".join(hash_of_text(" ".join(text.split())) for text in plain), dtype="<u8")


class SharedCaption(NamedTuple):
    """A caption of many images: the first of its rows, and how many images have it."""

    row: int
    images: int


def shared_captions(
    keys_M: np.ndarray, images_M: np.ndarray, least: int = 10, share: float = 0.01
) -> list[SharedCaption]:
    """Return captions of more than `least` images and more than `share` of all images.

    Such a caption describes none of them well, and in a batch its images are each other's false negatives.

    Args:
        keys_M: the keys of all captions (`caption_keys`).
        images_M: the image of each caption.
    """
    once = np.setdiff1d(np.arange(len(keys_M)), repeated_captions(keys_M, images_M))
    _, first, images = np.unique(keys_M[once], return_index=True, return_counts=True)
    limit = max(least, share * len(np.unique(images_M)))
    many = np.flatnonzero(images > limit)
    found = [SharedCaption(int(once[first[place]]), int(images[place])) for place in many]
    return sorted(found, key=lambda shared: (-shared.images, shared.row))


def repeated_captions(keys_M: np.ndarray, images_M: np.ndarray) -> np.ndarray:
    """Return the rows whose image has the same caption in an earlier row."""
    order = np.lexsort((np.arange(len(keys_M)), keys_M, images_M))
    same = (np.diff(keys_M[order]) == 0) & (np.diff(images_M[order]) == 0)
    return np.sort(order[1:][same])


class _Wording(dict[int, str]):
    """A table for `str.translate` that keeps letters, marks, digits and symbols (C++)."""

    def __missing__(self, code: int) -> str:
        category = unicodedata.category(chr(code))
        self[code] = "" if category == "Cf" else " " if category[0] in "PZC" else chr(code)
        return self[code]
