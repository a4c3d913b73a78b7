"""Find captions that mention a direction and become wrong if their image is mirrored.

Directions are left, right, east, west and a sense of rotation; writing counts, too. In doubt, a word counts: "that is right",
the lion лев and the Russian word for direction do. A word that counts wrongly costs a flip, a word that is missed teaches
the model that left is right.

Words of `LANGUAGES` are known. A caption in a script that none of them uses counts, and so does one whose given language is
another. Languages that separate words are searched for whole words, or for beginnings of words where words are inflected;
Chinese, Japanese, Korean, Thai, Arabic, Persian and Hebrew for any occurrence.

Not covered: directions in another language of the Latin, Cyrillic or Arabic script, if no language is given; directions
that are implied ("he wears his watch as most do"); writing that a caption neither quotes, mentions, nor writes in capitals or
as a number after "number", "no." or "#"; maps and flags.
"""

import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_WORDS = {  # * at the end: any word that begins so
    "en": "left* right* clockwise anticlockwise counterclockwise east* west* northeast* northwest* southeast* southwest* "
    "port portside starboard lhs rhs o'clock text texts letter* reads reading says written writing word words inscri* sign signs "
    "signpost* signboard* billboard* plate plates label* logo* lettering banner banners graffiti l-shaped",
    "de": "links* linke linken linker linkem linkes recht rechts* rechte rechten rechter rechtem rechtes uhrzeiger* "
    "ost osten östlich* west* nordost* nordwest* südost* südwest* backbord* steuerbord* beiderseits schild schilder aufschrift* "
    "beschriftung* kennzeichen",
    "fr": "gauch* droit* horaire* antihoraire* aiguilles l'est nord-est sud-est ouest oriental* occidental* bâbord tribord "
    "panneau panneaux inscription*",
    "es": "izquierd* derech* zurd* diestr* horari* antihorari* noreste sureste sudeste oeste oriental* occidental* babor "
    "estribor letrero* rótulo* matrícula*",
    "it": "sinistr* destra destro destre destri mancin* orario antiorario lancette l'est dell'est nordest sudest ovest "
    "oriental* occidental* babordo tribordo",
    "pt": "esquerd* direit* canhot* destro destra horári* leste sudeste nordeste oeste ocidental* bombordo estibordo",
    "nl": "links* linker* linkse recht rechts* rechter* rechtse klok* oost* west* bakboord stuurboord",
    "pl": "lewa lewe lewego lewej lewo lewy lewym lewą praw* zegar* wschod* wschód zachod* zachód",
    "cs": "levá levé levého levém levou levý vlevo doleva zleva nalevo prav* vprav* doprava zprava napravo hodin* východ* "
    "západ*",
    "sv": "vänst* höger* högra medurs moturs öst* väst* babord styrbord",
    "da": "venst* højr* uret øst* vest vestlig* vestre bagbord styrbord",
    "no": "venst* høyr* høgr* klokk* urvis* øst* aust vest vestlig* vestre babord styrbord",
    "fi": "vasen vasem* vasur* oike* myötäpäivä* vastapäivä* itä* länt* länn*",
    "hu": "bal balra balról balon baloldal* jobb* óramutató* kelet* nyugat*",
    "ro": "stâng* stang* dreapt* drept* acelor orar vest răsărit* apus*",
    "tr": "sol sola solak solda soldaki soldan solun* sağ* saat* doğu* batı*",
    "vi": "trái phải đông tây trai phai",
    "id": "kiri kanan jarum timur barat",
    "ru": "лев* слев* влев* налев* прав* справ* вправ* направ* часов* восток* восточ* запад*",
    "uk": "лів* злів* влів* налів* прав* справ* вправ* годинник* схід* східн* захід* західн*",
    "el": "αριστερ* δεξι* δεξί* ωρολογιακ* ανατολ* δυτικ* δύση*",
    "hi": "बाए* बाएं* बाएँ* बाया* बायां* बायाँ* बाये* बायी* बाई* दाए* दाएं* दाएँ* दाया* दायां* दायाँ* दाये* दायी* दाई* दाहिन* वाम* दक्षिणावर्त* पूर्व* "
    "पश्चिम*",
}
_PARTS = {  # searched anywhere in a caption
    "zh": "左 右 东 東 西 顺时针 順時針 逆时针 逆時針",
    "ja": "左 右 東 西 時計回 反時計 ひだり みぎ ヒダリ ミギ ひがし にし",
    "ko": "왼 오른 좌측 우측 좌우 좌회전 우회전 시계방향 시계 동쪽 서쪽 동부 서부",
    "th": "ซ้าย ขวา ตะวันออก ตะวันตก เข็มนาฬิกา",
    "ar": "يمين يمن أيمن ايمن يسار يسر أيسر ايسر شمال شرق غرب ساعة",
    "fa": "راست چپ شرق غرب ساعت",
    "he": "ימין ימני שמאל מזרח מערב שעון",
}
LANGUAGES = frozenset(_WORDS) | frozenset(_PARTS)
"""Languages whose directional words are known, by ISO 639-1 code."""

_SCRIPTS = (
    *("LATIN", "CYRILLIC", "GREEK", "DEVANAGARI", "CJK", "HIRAGANA", "KATAKANA", "HANGUL", "THAI", "ARABIC", "HEBREW"),
    *("FULLWIDTH", "HALFWIDTH", "KATAKANA-HIRAGANA", "MODIFIER", "COMBINING", "FEMININE", "MASCULINE", "MICRO"),
    "IDEOGRAPHIC",
)
"""First words of the Unicode names of these languages' letters."""


def has_direction(row: Mapping[str, Any]) -> bool:
    """Return whether a row has boxes or any caption, shown or not, mentions a direction."""
    languages = row.get("languages") or [""] * len(row["captions"])
    return bool(row.get("regions")) or any(map(mentions_direction, row["captions"], languages))


def mentions_direction(caption: str, language: str = "") -> bool:
    """Return whether mirroring the image could make `caption` wrong, judged by its words.

    Args:
        caption: a text in any of `LANGUAGES`, or in several.
        language: its ISO 639-1 code, with or without a region (`pt-BR`); "" if unknown.
    """
    if language and re.split("[-_]", language.lower())[0] not in LANGUAGES:
        return True
    text = unicodedata.normalize("NFKC", caption).casefold().replace("’", "'")
    if any(map(_is_directional, text.split())) or _EAST.search(text) or _NUMBER.search(text):
        return True
    return not caption.isupper() and bool(_CAPITALS.search(caption))


@lru_cache(maxsize=2**16)
def _is_directional(word: str) -> bool:
    """Judge the text between two spaces; the cache saves 16 of 20 us a caption."""
    return bool(_PATTERN.search(word)) or any(map(_is_foreign, word))


def _is_foreign(character: str) -> bool:
    return character.isalpha() and unicodedata.name(character, "").split(" ")[0] not in _SCRIPTS


def _compile() -> re.Pattern[str]:
    spaced, joined = (
        [re.escape(unicodedata.normalize("NFKC", word).casefold()) for word in " ".join(words.values()).split()]
        for words in (_WORDS, _PARTS)
    )
    spaced = [word.removesuffix(r"\*") if word.endswith(r"\*") else rf"{word}(?!\w)" for word in spaced]
    quotation = '["“”„«»「」『』]'  # a quotation is mostly text in the image
    return re.compile(rf"(?<!\w)(?:{'|'.join(spaced)})|{'|'.join(joined)}|{quotation}")


_PATTERN = _compile()
_NUMBER = re.compile(r"(?:\b(?:number|no\.|nr\.?)|#) ?\d")  # painted on something, mostly
_CAPITALS = re.compile(r"\b[A-Z]{3,}\b")  # mostly writing, or a name that is written somewhere
_EAST = re.compile(r"\b(?:al|del|el|ad|dal|la|spre) este?\b")  # alone, "este" and "est" are mostly "this" and "is"
