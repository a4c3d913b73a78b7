"""Duplicates: planted copies are found, different pictures are not, and every index structure equals a plain reference."""

import io
import logging
import re
from collections import defaultdict
from collections.abc import Callable
from itertools import combinations
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageEnhance

from mm_utils.data.prepare import perceptual_hash
from mm_utils.data.prepare.perceptual_hash import (
    FINGERPRINT,
    RADIUS,
    assign_splits,
    choices,
    fingerprint,
    groups,
    leaks,
    near_pairs,
    on_all_cores,
    pairs_of_choice,
)


def photo(seed: int, width: int = 240, height: int = 180) -> Image.Image:
    """Noise whose amplitude falls with the frequency, as in photographs, and three shapes."""
    rng = np.random.default_rng(seed)
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)
    amplitude = 1 / np.maximum(np.hypot(rows, columns), 1 / width)
    noise = rng.standard_normal((3, *amplitude.shape)) + 1j * rng.standard_normal((3, *amplitude.shape))
    noise[1:] = 0.8 * noise[0] + 0.3 * noise[1:]  # channels of photographs go together
    waves = np.fft.irfft2(noise * amplitude, (height, width))
    pixels = 128 + 50 * waves / waves.std(axis=(1, 2), keepdims=True)
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8).transpose(1, 2, 0).copy())
    draw = ImageDraw.Draw(image)
    for _ in range(3):
        left, top = rng.integers(0, width - 60), rng.integers(0, height - 60)
        box = [int(value) for value in (left, top, left + rng.integers(20, 60), top + rng.integers(20, 60))]
        draw.ellipse(box, fill=tuple(map(int, rng.integers(0, 256, 3))))
    return image


def cut(image: Image.Image, share: float) -> Image.Image:
    """Without `share` of both sides, half of it at each end."""
    left, top = image.width * share / 2, image.height * share / 2
    return image.crop((round(left), round(top), round(image.width - left), round(image.height - top)))


def compressed(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer).convert("RGB")


def prints_of(images: list[Image.Image]) -> np.ndarray:
    return np.frombuffer(b"".join(map(fingerprint, images)), FINGERPRINT)


def hash_pairs(hashes: np.ndarray, radius: int) -> list[np.ndarray]:
    found = [pairs for choice in choices(len(hashes), radius) for pairs in pairs_of_choice(hashes, radius, choice)]
    at_once = on_all_cores(hashes, radius, lambda pairs: pairs)
    assert as_set(np.concatenate([np.empty((0, 2), int), *at_once])) == as_set(
        np.concatenate([np.empty((0, 2), int), *found])
    )
    return found


def as_set(pairs: np.ndarray) -> set[tuple[int, int]]:
    listed = [(int(first), int(second)) for first, second in pairs]
    assert len(listed) == len(set(listed))
    return set(listed)


PHOTOS = [photo(seed) for seed in range(40)]
COPIES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "compressed": lambda image: compressed(image, 60),
    "half the size": lambda image: image.resize((image.width // 2, image.height // 2), Image.Resampling.BICUBIC),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.15),
    "cut by 2 %": lambda image: cut(image, 0.02),
    "grey": lambda image: image.convert("L").convert("RGB"),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_found_and_nothing_else(name: str) -> None:
    prints = prints_of([*PHOTOS, *map(COPIES[name], PHOTOS)])
    wanted = {(row, row + len(PHOTOS)) for row in range(len(PHOTOS))}
    found = as_set(near_pairs(prints))
    assert found <= wanted
    assert len(found) >= 0.95 * len(wanted)


def test_blank_images_are_not_duplicates() -> None:
    plain = [Image.new("RGB", (64, 48), colour) for colour in ("white", "white", "black", "red", "green", "#fafafa")]
    speck = Image.new("RGB", (64, 48), "white")
    speck.putpixel((10, 10), (0, 0, 0))
    rng = np.random.default_rng(0)
    noisy = [Image.fromarray(rng.integers(118, 122, (48, 64, 3)).astype(np.uint8)) for _ in range(20)]
    prints = prints_of([*plain, speck, speck, *noisy])
    assert not len(near_pairs(prints))


def test_another_colour_is_another_picture() -> None:
    images = []
    for colour in ((200, 40, 40), (20, 130, 20)):  # of nearly one brightness
        image = Image.new("RGB", (64, 64), (120, 120, 160))
        ImageDraw.Draw(image).rectangle((8, 20, 40, 50), fill=colour)
        images.append(image)
    prints = prints_of(images)
    assert sum(map(len, hash_pairs(prints["hash"], RADIUS))) == 1
    assert not len(near_pairs(prints))


def test_a_long_search_states_its_time_and_names_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """The figures come before the search, and what does not fit here names what does it."""
    hashes = np.random.default_rng(0).integers(0, 2**64, 400_000, dtype=np.uint64)
    with caplog.at_level(logging.INFO), patch.object(perceptual_hash.psutil, "virtual_memory") as memory:
        memory.return_value.available = 1 << 20
        on_all_cores(hashes, 2, lambda pairs: pairs)
    assert re.search(
        r"400,000 images: \d+ searches on 1 cores take about [\d.]+ (s|min) and 0.0 GiB .* 0.0 GiB free", caplog.text
    )
    assert "scripts/launch_ray.py" in caplog.text


@st.composite
def clustered_hashes(draw: st.DrawFn) -> np.ndarray:
    """A few hashes, and others that differ from one of them in up to 15 bits."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    centres = rng.integers(0, 2**64, draw(st.integers(1, 4)), dtype=np.uint64)
    hashes = rng.choice(centres, draw(st.integers(0, 60)))
    for row in range(len(hashes)):
        for bit in rng.permutation(64)[: rng.integers(0, 16)]:
            hashes[row] ^= np.uint64(1) << np.uint64(bit)
    return hashes


@given(clustered_hashes(), st.integers(0, 14))
@settings(max_examples=80)
def test_hash_pairs_are_those_of_brute_force(hashes: np.ndarray, radius: int) -> None:
    values = [int(value) for value in hashes]
    wanted = {
        (i, j) for i, j in combinations(range(len(values)), 2) if bin(values[i] ^ values[j]).count("1") <= radius
    }
    chunks = hash_pairs(hashes, radius)
    assert as_set(np.concatenate([np.empty((0, 2), int), *chunks])) == wanted


edges = st.integers(1, 40).flatmap(
    lambda count: st.tuples(
        st.just(count), st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=60)
    )
)


def connected(count: int, pairs: list[tuple[int, int]]) -> list[int]:
    """The smallest row that each row reaches, by walking."""
    near = defaultdict(set)
    for first, second in pairs:
        near[first].add(second)
        near[second].add(first)
    smallest = [-1] * count
    for start in range(count):
        waiting = [start] if smallest[start] < 0 else []
        while waiting:
            row = waiting.pop()
            if smallest[row] < 0:
                smallest[row] = start
                waiting += near[row]
    return smallest


@given(edges)
def test_groups_are_the_connected_rows(graph: tuple[int, list[tuple[int, int]]]) -> None:
    count, pairs = graph
    assert groups(count, np.array(pairs, int).reshape(-1, 2)).tolist() == connected(count, pairs)


@given(edges, st.integers(0, 2**32))
def test_no_group_crosses_splits_once_leaks_are_dropped(graph: tuple[int, list[tuple[int, int]]], seed: int) -> None:
    count, pairs = graph
    group = groups(count, np.array(pairs, int).reshape(-1, 2))
    splits = np.random.default_rng(seed).integers(0, 3, count).astype(np.int8)
    found = leaks(splits, group)
    assert as_set(found) == {
        (row, next(other for other in range(count) if group[other] == group[row] and splits[other] == best))
        for row in range(count)
        if splits[row] < (best := max(splits[group == group[row]]))
    }
    kept = np.setdiff1d(np.arange(count), found[:, 0])
    assert set(np.flatnonzero(splits == 2)) <= set(kept)
    assert all(len(set(splits[kept][group[kept] == name])) == 1 for name in set(group))


KEYS = [f"image-{row}" for row in range(5000)]
SHARES = (0.8, 0.1, 0.1)


def test_splits_have_their_shares_and_no_group_crosses_them() -> None:
    group = groups(5000, np.random.default_rng(0).integers(0, 5000, (1500, 2)))
    splits = assign_splits(group, KEYS, SHARES)
    assert splits.dtype == np.int8
    assert (splits == splits[group]).all()
    alone = np.bincount(assign_splits(np.arange(5000), KEYS, SHARES), minlength=3) / 5000
    assert alone == pytest.approx(SHARES, abs=0.02)
    assert not (assign_splits(group, KEYS, (0, 1, 0)) != 1).any()


@pytest.mark.parametrize("fractions", [(0.8, 0.1), (1.2, -0.2), (80, 10, 10)])
def test_fractions_are_shares_of_a_whole(fractions: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="Give shares of 1"):
        assign_splits(np.arange(3), KEYS[:3], fractions)
