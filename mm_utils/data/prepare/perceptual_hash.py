"""Find images that occur twice; assign splits without duplicates.

An image's fingerprint is a perceptual hash of 64 bits, which finds candidates among millions, and a thumbnail of 8 x 8
colours, which confirms them: 200 bytes, and 0.3 ms for 256 pixels. It finds the same picture after it was compressed,
scaled, brightened, turned grey or cut by a few per cent. A mirrored one is another example, as captions say "left" and
"right". Recall: docs/data.md#duplicates-and-leaks.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import numpy as np
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from mm_utils.cores import available_cores
from mm_utils.data.prepare.arguments import RADIUS

FINGERPRINT = np.dtype([("hash", "<u8"), ("thumbnail", "u1", (8, 8, 3))])

_SIDE = 32
_GREY_WEIGHTS = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R BT.601
_FREQUENCIES = np.arange(11)
_COSINES = np.cos(np.pi * _FREQUENCIES[:, None] * (2 * np.arange(_SIDE) + 1) / (2 * _SIDE)).astype(np.float32)
# The 64 lowest frequencies (vertical, horizontal) without the mean, by their sum: the corner of a diagonal cut.
_VERTICAL, _HORIZONTAL = np.array(
    sorted(((v, h) for v in _FREQUENCIES for h in _FREQUENCIES), key=lambda pair: (sum(pair), pair))[1:65]
).T

# A confirmed pair may differ by this much in its worst cell: brightness in standard deviations, colour in levels of 255.
_BRIGHTNESS_APART = 1.0
_COLOUR_APART = 32.0
_COLOURLESS = 6.0  # the colour of a grey image after JPEG, in levels
_CHUNK = 65_536  # pairs; their thumbnails take 200 MB to compare
_FLAT = 2.0  # standard deviation in levels: below it rounding decides the bits; 0.2 % of real images are


def fingerprint(image: Image.Image) -> bytes:
    """Return 200 bytes for an RGB image; read many joined as an array of `FINGERPRINT`.

    The hash is the signs of the 64 lowest frequencies of a discrete cosine transform of 32 x 32 grey cells, after Zauner,
    "Implementation and benchmarking of perceptual image hash functions" (2010), with zero for a threshold. Proportions are not
    compared.
    """
    cells = np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BOX), dtype=np.float32)
    waves = _COSINES @ (cells @ _GREY_WEIGHTS) @ _COSINES.T
    # each of the 8 x 8 cells is the mean of 4 x 4
    thumbnail = cells.reshape(8, 4, 8, 4, 3).mean(axis=(1, 3)).round().astype(np.uint8)
    # 8 bytes of bits, 192 of colours
    return np.packbits(waves[_VERTICAL, _HORIZONTAL] > 0).tobytes() + thumbnail.tobytes()


def near_pairs(prints_N: np.ndarray, radius: int = RADIUS) -> np.ndarray:
    """Return rows [P, 2] that show the same picture, the smaller first.

    Equal fingerprints are linked to their first row only. Flat images, such as blank pages, are in no pair: their hash is noise.
    """
    rows, copies = _distinct(prints_N)
    found = pairs_within(prints_N["hash"][rows], radius, lambda pairs: _confirmed(prints_N["thumbnail"], rows[pairs]))
    found = np.concatenate([copies, found])
    return found[np.lexsort((found[:, 1], found[:, 0]))]


def pairs_within(hashes_N: np.ndarray, radius: int, sift: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return what `sift` makes of chunks of the pairs [P, 2] whose 64 bits differ in at most `radius`, in any order.

    The bits are cut into `radius` + k bands. Two such hashes agree in k bands at least, so for each choice of k bands
    only the hashes that agree there are compared (Manku et al., "Detecting near-duplicates for web crawling", 2007).
    The least work decides k: comparisons of all choices, and sorting a hash, which costs about five.
    """
    size = len(hashes_N)
    count = min(
        range(1, 65 - radius),
        key=lambda k: math.comb(radius + k, k) * size * (5 + size / 2 ** (64 * k / (radius + k) + 1)),
    )
    bits = np.uint64(1) << np.arange(64, dtype=np.uint64)
    # masks; with a radius of 8 and k = 3, nine bands of 6 bits and two of 5
    bands = [np.bitwise_or.reduce(part) for part in np.array_split(bits, radius + count)]

    def search(chosen: tuple[int, ...]) -> list[np.ndarray]:
        agree = np.bitwise_or.reduce([bands[at] for at in chosen])
        # A pair that agrees in more than k bands belongs to the first choice of them.
        differ = [bands[at] for at in range(chosen[-1]) if at not in chosen]
        return [sift(pairs) for pairs in _pairs_that_agree(hashes_N, radius, agree, differ)]

    with ThreadPoolExecutor(available_cores()) as pool:  # NumPy sorts and compares outside of the interpreter's lock
        found = [pairs for one in pool.map(search, combinations(range(len(bands)), count)) for pairs in one]
    return np.concatenate([np.empty((0, 2), dtype=np.int64), *found])


def _pairs_that_agree(
    hashes_N: np.ndarray, radius: int, agree: np.uint64, differ: Sequence[np.uint64]
) -> Iterator[np.ndarray]:
    """Yield the pairs of rows [P, 2] that agree in bits, and in none of some bands as a whole, in chunks."""
    keys = hashes_N & agree
    order = np.argsort(keys)
    keys = keys[order]
    hashes = hashes_N[order]
    left = np.arange(len(keys))
    # neighbours in the order of the keys, then the next but one, until no two keys are equal
    for gap in range(1, len(keys)):
        left = left[: np.searchsorted(left, len(keys) - gap)]
        left = left[keys[left] == keys[left + gap]]
        if not len(left):
            break
        differing = hashes[left] ^ hashes[left + gap]
        near = np.flatnonzero(np.bitwise_count(differing) <= radius)
        for band in differ:
            near = near[differing[near] & band != 0]  # & binds closer than !=, unlike in C
        for start in range(0, len(near), _CHUNK):
            rows = left[near[start : start + _CHUNK]]
            yield np.sort(np.stack([order[rows], order[rows + gap]], axis=1), axis=1)


def groups(num_rows: int, pairs: np.ndarray) -> np.ndarray:
    """Return each row's group, named by its smallest row; pairs [P, 2] connect rows.

    Pictures that change little by little, such as the frames of a film, form one long group whose ends differ. That is
    meant for splits, which none of these pairs may cross.
    """
    links = coo_array((np.ones(len(pairs), dtype=bool), pairs.T), (num_rows, num_rows))
    _, label = connected_components(links, directed=False)
    _, first = np.unique(label, return_index=True)
    return first[label]


def leaks(splits_N: np.ndarray, groups_N: np.ndarray) -> np.ndarray:
    """Return rows [L, 2] to drop, each with the row of its group in another split that stays.

    Of a group the rows of the highest split stay, in the order train, validation, test.
    """
    # by group, in it the test split first, in that by row: the last key counts first
    order = np.lexsort((np.arange(len(splits_N)), -splits_N.astype(np.int64), groups_N))
    _, first, place = np.unique(groups_N[order], return_index=True, return_inverse=True)
    winner = np.empty(len(splits_N), dtype=np.int64)
    winner[order] = order[first][place]
    dropped = np.flatnonzero(splits_N != splits_N[winner])
    return np.stack([dropped, winner[dropped]], axis=1)


def assign_splits(groups_N: np.ndarray, keys: Iterable[str], fractions: Sequence[float], least: int = 0) -> np.ndarray:
    """Return each row's split, from 0, by a hash of the key of the first row of its group.

    Rows added behind these leave them where they are, except where a new one connects two groups.

    Args:
        keys: permanent names of the rows, such as the digests of their images.
        least: rows that the second of three splits has at least: the first gives it the groups of the next hashes, unless
            one of them is so large that there would be more than twice as many.
    """
    first, place = np.unique(groups_N, return_inverse=True)
    digests = (hashlib.blake2b(f"\0{key}".encode("utf-8", "surrogatepass"), digest_size=8) for key in keys)
    digests_N = np.fromiter((int.from_bytes(each.digest(), "little") for each in digests), "<u8", len(groups_N))
    positions = digests_N[first] / 2.0**64  # in [0, 1]
    bounds = np.cumsum(fractions)[:-1]  # 0.8, 0.1, 0.1 -> 0.8, 0.9
    if least:
        order = np.argsort(-positions)[np.count_nonzero(positions >= bounds[1]) :]  # the third split's come first
        rows = np.bincount(place)[order].cumsum()
        last = int(np.searchsorted(rows, least))
        last -= last == len(rows) or rows[last] > 2 * least
        if last >= 0:
            bounds[0] = min(bounds[0], positions[order[last]])
    return np.searchsorted(bounds, positions, side="right").astype(np.int8)[place]


def _distinct(prints_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return first rows of distinct fingerprints that are not flat, and pairs of copies."""
    # As fp32 all take four times the memory
    parts = np.split(prints_N["thumbnail"], range(_CHUNK, len(prints_N), _CHUNK))
    spread = np.concatenate([(part.reshape(len(part), 64, 3) @ _GREY_WEIGHTS).std(axis=1) for part in parts])
    rows = np.flatnonzero(spread >= _FLAT)
    # 200 bytes as one value, so that rows are compared as a whole
    whole = np.ascontiguousarray(prints_N[rows]).view(f"V{FINGERPRINT.itemsize}")
    _, first, place = np.unique(whole, return_index=True, return_inverse=True)
    first_rows = rows[first[place]]
    is_copy = first_rows != rows
    return rows[~is_copy], np.stack([first_rows, rows], axis=1)[is_copy]


def _confirmed(thumbnails: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Keep pairs whose thumbnails agree in every cell, in brightness and in colour.

    One object more or less changes a cell or two, which the lowest frequencies hardly show: of 5,000 drawn scenes of a
    few objects on a plain ground, 9,656 pairs are within 8 bits, and 7 are confirmed. A copy in grey needs no colour.
    """
    brightness_a, colour_a = _split_colour(thumbnails[pairs[:, 0]])
    brightness_b, colour_b = _split_colour(thumbnails[pairs[:, 1]])
    alike = abs(brightness_a - brightness_b).max(axis=1) <= _BRIGHTNESS_APART
    colourless = np.minimum(abs(colour_a).max(axis=(1, 2)), abs(colour_b).max(axis=(1, 2))) <= _COLOURLESS
    return pairs[alike & (colourless | (abs(colour_a - colour_b).max(axis=(1, 2)) <= _COLOUR_APART))]


def _split_colour(thumbnails_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cells = thumbnails_P.reshape(len(thumbnails_P), 64, 3).astype(np.float32)
    grey = cells @ _GREY_WEIGHTS
    brightness = (grey - grey.mean(axis=1, keepdims=True)) / grey.std(axis=1, keepdims=True)
    return brightness, cells - grey[..., None]
