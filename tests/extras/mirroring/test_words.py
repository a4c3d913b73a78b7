"""Captions that mirroring the image would make wrong."""

import unicodedata

import pytest

from mm_utils.extras.mirroring.words import LANGUAGES, mentions_direction

DIRECTIONS = {
    "ar": ("كلب على اليمين", "السيارة في أقصى يسار الصورة"),
    "cs": ("pes vlevo", "muž po pravé straně"),
    "da": ("en hund til venstre", "manden på højre side"),
    "de": ("ein Hund links vom Baum", "die rechte Hand", "im Uhrzeigersinn", "Blick nach Osten"),
    "el": ("ένας σκύλος αριστερά", "στη δεξιά πλευρά"),
    "en": (
        "a dog on the left",
        "Right-handed player",
        "turning clockwise",
        "the north-east corner",
        "the LEFTMOST cat",
    ),
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
}
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
        *(
            "ben trai",
            "a STOP sign",
            "a bus with the number 23",
            "number plate ABC 123",
            "Schild mit der Aufschrift Halt",
        ),
        *("panneau indiquant sortie", "platform no. 9", 'the word "exit"', "a shirt that says hello", "a van of DHL"),
    ],
)
def test_sides_without_their_usual_words_and_writing_without_quotation_marks(caption: str) -> None:
    assert mentions_direction(caption)


@pytest.mark.parametrize(
    "caption", ["A DOG RUNS", "a TV on a table", "a number of people", "an assignment", "a template"]
)
def test_capitals_and_numbers_that_are_no_writing(caption: str) -> None:
    assert not mentions_direction(caption)
