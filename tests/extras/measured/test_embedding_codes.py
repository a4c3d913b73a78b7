"""Small codes keep what they promise: half a step, every sign, and the order of the scores."""

import numpy as np
import pytest

from mm_utils.extras.measured.embedding_codes import hamming, quantize_int8, rotate, to_bits

RNG = np.random.default_rng(0)


def unit_rows(rows: int, width: int) -> np.ndarray:
    found = RNG.normal(size=(rows, width)) * np.linspace(3, 0.1, width)
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_int8_is_right_to_half_a_step_in_every_dimension(kind: type) -> None:
    rows = unit_rows(50, 24).astype(kind)
    rows[:, 7] = 0
    codes, scale = quantize_int8(rows)
    assert (codes.dtype, scale.dtype, codes.shape, scale.shape) == (np.int8, np.float32, (50, 24), (24,))
    assert (np.abs(codes * scale - rows) <= scale * 0.5001).all()
    assert (np.abs(codes.astype(int)).max(0) == np.where(np.arange(24) == 7, 0, 127)).all()
    assert scale[7] == 0


def test_scores_of_int8_rank_as_those_of_the_embeddings() -> None:
    rows, queries = unit_rows(200, 64), unit_rows(20, 64)
    codes, scale = quantize_int8(rows)
    scores = (queries * scale) @ codes.T
    np.testing.assert_allclose(scores, queries @ rows.T, atol=0.01)
    assert (scores.argmax(1) == (queries @ rows.T).argmax(1)).mean() > 0.9


@pytest.mark.parametrize("width", [1, 8, 13, 64, 100, 256])
def test_hamming_counts_the_signs_that_differ(width: int) -> None:
    rows, queries = unit_rows(30, width), unit_rows(4, width)
    rows[0] = 0  # no sign: as minus
    bits = to_bits(rows)
    assert (bits.dtype, bits.shape) == (np.uint8, (30, -(-width // 8)))
    expected = ((rotate(queries) > 0)[:, None] != (rotate(rows) > 0)[None]).sum(2)
    np.testing.assert_array_equal(hamming(to_bits(queries), bits), expected)


@pytest.mark.parametrize("width", [1, 13, 256])
def test_a_rotation_keeps_cosines_and_is_always_the_same(width: int) -> None:
    rows = unit_rows(20, width)
    np.testing.assert_allclose(rotate(rows) @ rotate(rows[:5]).T, rows @ rows[:5].T, atol=1e-5)
    np.testing.assert_array_equal(rotate(rows), rotate(rows.copy()))


def test_signs_of_sorted_dimensions_find_what_is_near() -> None:
    source = np.random.default_rng(1)
    rows = source.normal(size=(400, 64)) * np.geomspace(1, 0.01, 64)
    queries = rows[:50] + 0.2 * source.normal(size=(50, 64)) * np.geomspace(1, 0.01, 64)
    found = hamming(to_bits(queries), to_bits(rows)).argsort(1)[:, :5]
    assert (found == np.arange(50)[:, None]).any(1).mean() > 0.9


def test_hamming_takes_columns_of_a_larger_table_and_no_rows() -> None:
    bits = to_bits(unit_rows(10, 256))
    np.testing.assert_array_equal(
        hamming(bits[:3, :16], bits[:, :16]), hamming(bits[:3, :16].copy(), bits[:, :16].copy())
    )
    assert hamming(bits[:0], bits).shape == (0, 10)
    assert hamming(bits, bits[:0]).shape == (10, 0)
