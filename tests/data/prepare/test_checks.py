"""Limits, damage, orientations and captions; `tests.faults.test_data` has each kind of broken and odd file."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features

from mm_utils.data import images
from mm_utils.data.faults import NOTES, Fault
from mm_utils.data.prepare import checks
from mm_utils.data.prepare.checks import CheckArguments, check_caption, check_image
from mm_utils.model import reading
from tests.kit.fault_images import ODD, draw, save

LIMITS = CheckArguments()
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")
RED = (200, 30, 60)
AVIF = "avif" in features.modules and features.check("avif")


def photo(width: int = 80, height: int = 60) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    noise = np.random.default_rng(0).integers(0, 60, (height, width, 3))
    smooth = np.stack([x * 190 / max(width - 1, 1), y * 190 / max(height - 1, 1), 0 * x + 99], 2)
    return Image.fromarray((smooth + noise).astype(np.uint8))


def oriented(orientation: int, form: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return save(corner_mark(), form, exif=exif)


def corner_mark() -> Image.Image:
    """White at the upper left on black, a grey bar along the top: no two orientations look alike."""
    image = Image.new("RGB", (96, 64), "black")
    image.paste("gray", (0, 0, 96, 16))
    image.paste("white", (0, 0, 32, 32))
    return image


JPEG, PNG, WEBP, GIF = (save(photo(), form) for form in ("JPEG", "PNG", "WEBP", "GIF"))
[MPO] = [case.make(draw(0)) for case in ODD if case.kind == "an MPO"]


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_photograph_of_a_telephone_is_read_and_its_damage_is_found(orientation: int) -> None:
    """Its turn is a property of the format, which its decoder applies; that of EXIF, which repeats it, is not applied again."""
    pytest.importorskip("pillow_heif")
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = save(corner_mark(), "HEIF", exif=exif, quality=100)
    found = check_image(content, LIMITS, "a.heic")
    assert (found.format, found.width, found.height, found.notes) == ("HEIF", 96, 64, ())
    assert images.psnr(found.image, corner_mark()) > 25
    with pytest.raises(Fault) as caught:
        check_image(content[: len(content) // 2], LIMITS)
    assert caught.value.reason in ("image_unreadable", "image_truncated")


def test_a_transparent_animation_is_laid_on_white() -> None:
    frames = [Image.new("RGBA", (32, 32), (*RED, 0)), Image.new("RGBA", (32, 32), "blue")]
    checked = check_image(save(frames[0], "PNG", save_all=True, append_images=frames[1:]), LIMITS)
    assert checked.notes == ("animated_first_frame", "alpha_on_white")
    assert checked.image.getpixel((0, 0)) == (255, 255, 255)


UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: a.transpose(1, 0, 2)[:, ::-1],
    7: lambda a: a.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda a: a.transpose(1, 0, 2)[::-1],
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("min_side", [None, 30])
def test_all_orientations_stand_upright(orientation: int, form: str, min_side: int | None) -> None:
    checked = check_image(oriented(orientation, form), LIMITS, min_side=min_side)
    expected = UPRIGHT[orientation](np.asarray(corner_mark()))
    assert (checked.height, checked.width) == expected.shape[:2]
    step = checked.width // checked.image.width
    assert step == (2 if form == "JPEG" and min_side else 1)
    difference = (
        np.asarray(checked.image)[2::8, 2::8].astype(int) - expected[2 * step :: 8 * step, 2 * step :: 8 * step]
    )
    assert np.abs(difference).max() < 60
    assert ("exif_rotated" in checked.notes) == (orientation != 1)


# -- limits -------------------------------------------------------------------------------------------------------------
def test_limits_are_inclusive() -> None:
    exact = CheckArguments(
        max_image_pixels=4800, max_image_bytes=len(JPEG), min_image_side=60, max_aspect_ratio=80 / 60
    )
    assert check_image(JPEG, exact).image.size == (80, 60)
    for name, value, reason in (
        ("max_image_pixels", 4799, "too_many_pixels"),
        ("min_image_side", 61, "too_small"),
        ("max_aspect_ratio", 1.3, "extreme_aspect"),
    ):
        with pytest.raises(Fault) as caught:
            check_image(JPEG, CheckArguments(**{name: value}))
        assert caught.value.reason == reason


def test_the_original_size_survives_a_reduced_decode() -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    checked = check_image(save(photo(800, 600), "JPEG", exif=exif), LIMITS, min_side=150)
    assert (checked.width, checked.height) == (600, 800)
    assert checked.image.size == (150, 200)


@pytest.mark.parametrize(
    ("name", "content", "noted"),
    [
        ("a.jpg", JPEG, False),
        ("a.JPEG", JPEG, False),
        ("a", JPEG, False),
        ("a.php", JPEG, False),
        ("a.jpg", GIF, True),
        ("images/a.png", JPEG, True),
        ("a.heic", JPEG, True),
        ("a.mpo", MPO, False),
        ("a.jpg", MPO, False),
    ],
)
def test_a_wrong_extension_is_noted(name: str, content: bytes, noted: bool) -> None:
    assert ("wrong_extension" in check_image(content, LIMITS, name).notes) == noted


# -- damage -------------------------------------------------------------------------------------------------------------
DAMAGED = [case.make(draw(0)) for case in ODD]


@given(st.data())
@settings(max_examples=300)
def test_damaged_bytes_are_an_image_or_a_fault(data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(DAMAGED)))
    for _ in range(data.draw(st.integers(0, 5))):
        content[data.draw(st.integers(0, min(len(content) - 1, 400)))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    try:
        checked = check_image(bytes(content), LIMITS, min_side=data.draw(st.sampled_from([None, 16])))
        assert checked.image.mode == "RGB"
        assert set(checked.notes) <= set(NOTES)
    except Fault:
        pass


@pytest.mark.parametrize("content", [JPEG, PNG, WEBP], ids=["JPEG", "PNG", "WEBP"])
@given(st.data())
@settings(max_examples=60)
def test_no_part_of_an_image_passes(content: bytes, data: st.DataObject) -> None:
    with pytest.raises(Fault) as caught:
        check_image(content[: data.draw(st.integers(12, len(content) - 1))], LIMITS)
    assert caught.value.reason == "image_truncated"


def test_a_strict_decoder_finds_inner_damage_and_changes_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    if images.simplejpeg is None:
        pytest.skip("simplejpeg is not installed")
    whole = save(photo(640, 480), "JPEG")
    damaged = whole[:20_000] + bytes(2_000) + whole[22_000:]
    with pytest.raises(Fault) as caught:
        check_image(damaged, LIMITS)
    assert caught.value.reason == "image_corrupt"
    strict = {side: np.asarray(check_image(whole, LIMITS, min_side=side).image) for side in (None, 240, 100, 60)}
    monkeypatch.setattr(reading, "simplejpeg", None)
    for side, pixels in strict.items():
        assert np.array_equal(np.asarray(check_image(whole, LIMITS, min_side=side).image), pixels)
    assert check_image(damaged, LIMITS).image.size == (640, 480), "which is why the strict decoder is there"


def test_errors_of_decoders_without_a_message_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (MemoryError(), KeyError("x"), struct.error("unpack"), RuntimeError(), RecursionError()):

        def fail(*_: Any, raised: Exception = error, **__: Any) -> None:
            raise raised

        monkeypatch.setattr(checks, "decode", fail)
        with pytest.raises(Fault, match=r"image_unreadable: .") as caught:
            check_image(JPEG, LIMITS)
        assert caught.value.__cause__ is error


# -- captions -----------------------------------------------------------------------------------------------------------
FILE_NAMES = (
    *("IMG_1234.jpg", "IMG_1234", "img-20200101-WA0001", "DSC00012", "DSCN0001 (2)", "P1010001", "photo.png"),
    *("PXL_20210101_123456789", "my photo.png", "images/cats/001.jpeg", "/home/me/my cat on the mat.jpg"),
    *("./a b c.tif", "C:\\x\\y.JPG", "C:\\My Photos\\a b c.JPG", "https://example.org/a.jpg", "www.example.org"),
    "file:///tmp/x",
)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "caption_null"),
        (float("nan"), "caption_null"),
        (np.float32("nan"), "caption_null"),
        (7, "caption_not_text"),
        (1.5, "caption_not_text"),
        (True, "caption_not_text"),
        (["a cat"], "caption_not_text"),
        ({"text": "a cat"}, "caption_not_text"),
        (b"a cat", "caption_not_text"),
        ("", "caption_empty"),
        (" \t\r\n\u00a0\u3000", "caption_empty"),
        ("\u200b\u200d\u2060\ufeff", "caption_empty"),
        ("\u2800\u3164", "caption_empty"),
        ("\x00\x1b[0m\x7f", "caption_empty"),
        ("...", "caption_empty"),
        ("\u0301" * 5, "caption_empty"),
        ("\ud800", "caption_empty"),
        *(
            (text, "caption_nan")
            for text in ("nan", "NaN", "None", " null.", "N/A", "#N/A", "<NA>", "(null)", "[object Object]")
        ),
        *((text, "caption_is_file_name") for text in FILE_NAMES),
    ],
)
def test_each_useless_caption_has_its_reason(value: Any, reason: str) -> None:
    with pytest.raises(Fault) as caught:
        check_caption(value, LIMITS)
    assert caught.value.reason == reason
    assert caught.value.detail.isprintable(), "it goes into logs"


@pytest.mark.parametrize(
    ("value", "text", "notes"),
    [
        ("  a \t cat\r\n on\u00a0a\u3000mat ", "a cat on a mat", ("caption_spaces_joined",)),
        ("\ufeffa cat", "a cat", ("caption_controls_removed",)),
        ("a\x00 c\x07at\x9f", "a cat", ("caption_controls_removed",)),
        ("\x1b[31ma red\x1b[0m cat", "a red cat", ("caption_controls_removed",)),
        ("\x1b]0;title\x07a cat \x1b] sat", "a cat ] sat", ("caption_controls_removed",)),
        ("a\x85cat", "a cat", ("caption_spaces_joined",)),
        ("me\u0323\u0302o", "m\u1ec7o", ("caption_composed",)),
        ("a \ud83d cat", "a \ufffd cat", ("caption_surrogate_replaced",)),
        ("a \ud83d\ude00 cat", "a \U0001f600 cat", ("caption_surrogate_replaced",)),
        ("a [PAD] cat </s>", "a [PAD] cat </s>", ("caption_special_token",)),
        ("<|endoftext|> a cat", "<|endoftext|> a cat", ("caption_special_token",)),
        (np.str_("a cat"), "a cat", ()),
    ],
)
def test_captions_are_cleaned_and_it_is_noted(value: str, text: str, notes: tuple[str, ...]) -> None:
    assert check_caption(value, LIMITS) == (text, notes)
    assert set(notes) <= set(NOTES)


@given(st.text(st.characters(), max_size=300), st.integers(1, 200))
@settings(max_examples=300)
def test_a_clean_caption_stays_clean(value: str, limit: int) -> None:
    limits = CheckArguments(max_caption_characters=limit)
    try:
        text, notes = check_caption(value, limits)
    except Fault:
        return
    text.encode()  # no surrogates
    assert 0 < len(text) <= limit
    assert text == " ".join(text.split())
    if "caption_cut" not in notes:
        assert check_caption(text, limits)[0] == text


def test_long_captions_are_cut_at_a_word() -> None:
    text, notes = check_caption("word " * 1000, CheckArguments(max_caption_characters=52))
    assert text == " ".join(["word"] * 10)
    assert notes == ("caption_cut",)
    assert check_caption("x" * 100, CheckArguments(max_caption_characters=52))[0] == "x" * 52
    assert check_caption("a cat", CheckArguments(max_caption_characters=5)) == ("a cat", ())
    assert check_caption("a cat" + " " * 9999, LIMITS) == ("a cat", ())


LONG = ("many words ", "x", "a\u0301\u0316", "\x1b]", "\x1b[0", "https://", "a.jpg", "\ud800x", "a" + "\u200d" * 9)
