"""Captions that mirroring the image would make wrong."""

import unicodedata
from typing import Any

import pytest
from datasets import Dataset, disable_progress_bars
from PIL import Image
from transformers import PreTrainedTokenizerFast

from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.images import encode
from mm_utils.data.scenes import load_scenes
from mm_utils.extras.mirroring.words import LANGUAGES, has_direction, mentions_direction
from tests.kit.numbered_rows import FEATURES, equal, training_pairs

disable_progress_bars()
pytestmark = pytest.mark.usefixtures("own_cache")

DIRECTIONS = {
    "ar": ("كلب على اليمين", "السيارة في أقصى يسار الصورة"),
    "cs": ("pes vlevo", "muž po pravé straně"),
    "da": ("en hund til venstre", "manden på højre side"),
    "de": ("ein Hund links vom Baum", "die rechte Hand", "im Uhrzeigersinn", "Blick nach Osten"),
    "el": ("ένας σκύλος αριστερά", "στη δεξιά πλευρά"),
    "en": ("a dog on the left", "Right-handed player", "turning clockwise", "the north-east corner", "the LEFTMOST cat"),
    "es": ("un perro a la izquierda", "su mano derecha", "la casa al este", "hacia el oeste"),
    "fa": ("سگی در سمت چپ", "دست راست"),
    "fi": ("koira vasemmalla", "oikealla puolella"),
    "fr": ("un chien à gauche", "sa main droite", "la maison à l'est", "vers l’ouest"),
    "he": ("כלב בצד שמאל", "האיש מימין"),
    "hi": ("बाईं ओर एक कुत्ता", "दाहिने हाथ में"),
    "hu": ("egy kutya a bal oldalon", "jobbra néz"),
    "id": ("anjing di sebelah kiri", "tangan kanan"),
    "it": ("un cane a sinistra", "la mano destra", "la casa ad est"),
    "ja": ("左に犬がいる", "時計回りに"),
    "ko": ("왼쪽에 있는 개", "오른손", "동쪽 하늘"),
    "nl": ("een hond links", "de rechterhand"),
    "no": ("en hund til venstre", "på høyre side"),
    "pl": ("pies po lewej stronie", "w prawym rogu"),
    "pt": ("um cão à esquerda", "a mão direita"),
    "ro": ("un câine în stânga", "mâna dreaptă"),
    "ru": ("собака слева", "в правой руке", "по часовой стрелке"),
    "sv": ("en hund till vänster", "höger hand"),
    "th": ("สุนัขอยู่ทางซ้าย", "มือขวา"),
    "tr": ("solda bir köpek", "sağ elinde"),
    "uk": ("собака ліворуч", "у правій руці"),
    "vi": ("một con chó bên trái", "tay phải"),
    "zh": ("一只狗在左边", "顺时针方向"),
}  # fmt: skip
NO_DIRECTIONS = {
    "ar": ("كلب أبيض يجري", "سيارة حمراء"),
    "de": ("ein Hund läuft über die Wiese", "ein Rechteck", "linkisch"),
    "en": ("two dogs run over the grass", "a bright copyright office", "a child's ball, 3 balloons & a fox: ½ café!"),
    "es": ("un perro corre por el césped", "este perro es grande"),
    "fr": ("le chien est dans l'herbe", "c'est une fille"),
    "hi": ("एक कुत्ता घास पर दौड़ रहा है",),
    "it": ("un cane che corre", "l'uomo è alto"),
    "ja": ("犬が草の上を走っている",),
    "ko": ("개가 잔디 위를 달린다",),
    "nl": ("een hond rent over het gras", "een rechthoek"),
    "pl": ("pies biegnie po trawie",),
    "pt": ("um cão corre na relva",),
    "ru": ("собака бежит по траве",),
    "th": ("สุนัขวิ่งบนหญ้า",),
    "tr": ("bir köpek koşuyor",),
    "vi": ("một con chó đang chạy",),
    "zh": ("一只狗在草地上跑",),
}


@pytest.mark.parametrize("language", sorted(LANGUAGES))
def test_directions_are_found(language: str) -> None:
    for caption in DIRECTIONS[language]:
        for written in (caption, caption.upper(), f"({caption}).", f"a dog and {caption}, too"):
            assert mentions_direction(written), written
        assert mentions_direction(caption, language)


@pytest.mark.parametrize("language", NO_DIRECTIONS)
def test_captions_without_directions(language: str) -> None:
    for caption in NO_DIRECTIONS[language]:
        assert not mentions_direction(caption), caption
        assert not mentions_direction(caption, f"{language}-XX")


@pytest.mark.parametrize(
    "caption", ['a shop called "Pizza"', "a sign that says stop", "ein Schild „Halt“", "「止」の看板", "the word love"]
)
def test_writing_in_the_image_counts(caption: str) -> None:
    assert mentions_direction(caption)


def test_unknown_languages_count_as_directions() -> None:
    assert mentions_direction("ძაღლი ბალახზე")  # Georgian
    assert mentions_direction("a dog, that is ძაღლი")
    assert mentions_direction("mbwa anakimbia", "sw")
    assert not mentions_direction("")
    assert not mentions_direction("1 + 1 = 2 🐕")


def test_composed_and_decomposed_letters_are_found() -> None:
    for caption in ("một con chó bên trái", "en hund till vänster", "왼쪽"):
        for form in ("NFC", "NFD", "NFKC", "NFKD"):
            assert mentions_direction(unicodedata.normalize(form, caption))


@pytest.mark.parametrize(
    "caption",
    [
        *(
            "driving on the LHS",
            "the portside cabin",
            "at the ten o'clock position",
            "an L-shaped desk",
            "beiderseits der Straße",
        ),
        *("ben trai", "a STOP sign", "a bus with the number 23", "number plate ABC 123", "Schild mit der Aufschrift Halt"),
        *("panneau indiquant sortie", "platform no. 9", 'the word "exit"', "a shirt that says hello", "a van of DHL"),
    ],
)  # fmt: skip
def test_sides_without_their_usual_words_and_writing_without_quotation_marks(caption: str) -> None:
    assert mentions_direction(caption)


@pytest.mark.parametrize(
    "caption", ["A DOG RUNS", "a TV on a table", "a number of people", "an assignment", "a template"]
)
def test_capitals_and_numbers_that_are_no_writing(caption: str) -> None:
    assert not mentions_direction(caption)


# -- mirrored images ----------------------------------------------------------------------------------------------------


def half_white(captions: list[str], **more: Any) -> Dataset:
    image = Image.new("RGB", (20, 20), "black")
    image.paste("white", (0, 0, 10, 20))
    value = {"bytes": encode(image, "png"), "path": None}
    return Dataset.from_list(
        [{"id": f"{place}", "image": value, "captions": captions, **more} for place in range(40)],
        features=None if more else FEATURES,
    )


def mirrored(rows: Dataset, tokenizer: PreTrainedTokenizerFast, **options: Any) -> int:
    """Return how many of 40 rows are mirrored."""
    pairs = training_pairs(tokenize_captions(rows, tokenizer, 16), **options)
    found = [pairs[(row, 0)]["pixel_values"][0].float() for row in range(len(rows))]
    assert all(abs(image[:, 0].mean() - image[:, -1].mean()) > 200 for image in found)
    return sum(bool(image[:, 0].mean() < 100) for image in found)


@pytest.mark.parametrize("min_crop_area", [0.8, 1.0])
def test_half_of_the_images_are_mirrored_on_request(min_crop_area: float, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = half_white(["a picture", "once more"])
    assert mirrored(rows, tokenizer, min_crop_area=min_crop_area) == 0
    assert 10 < mirrored(rows, tokenizer, min_crop_area=min_crop_area, keeps_sides=has_direction) < 30


@pytest.mark.parametrize(
    "captions", [["white is left"], ["a picture", "weiß ist links"], ["a picture", "it says “no”"]]
)
def test_images_are_not_mirrored_if_any_caption_mentions_a_direction(
    captions: list[str], tokenizer: PreTrainedTokenizerFast
) -> None:
    assert mirrored(half_white(captions), tokenizer, keeps_sides=has_direction) == 0


def test_images_with_boxes_or_an_unknown_language_are_not_mirrored(tokenizer: PreTrainedTokenizerFast) -> None:
    boxes = half_white(["a picture"], regions=[{"box": [0.0, 0.0, 0.5, 1.0], "phrase": "picture"}])
    assert mirrored(boxes, tokenizer, keeps_sides=has_direction) == 0
    assert mirrored(half_white(["picha"], languages=["sw"]), tokenizer, keeps_sides=has_direction) == 0
    assert mirrored(half_white(["a picture"], languages=["en"]), tokenizer, keeps_sides=has_direction) > 10


def test_embedded_scenes_are_never_mirrored(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = load_scenes(64, 4, 40)["validation"].select(range(40))
    plain, flipping = (
        training_pairs(tokenize_captions(rows, tokenizer, 32), min_crop_area=0.8, keeps_sides=flip)
        for flip in (None, has_direction)
    )
    assert all(equal(plain[(row, 3)], flipping[(row, 3)]) for row in range(40))
