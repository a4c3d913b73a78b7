"""Does a caption say what a mirrored picture would make wrong: left, right, east, west, a sense of rotation, writing?

The answer errs on the safe side. "That is right", the lion лев and the direction "направление" count as sides; a caption
that is taken for one costs a flip, a caption that is missed teaches the model that left is right.

Words of `LANGUAGES` are known. A caption in a script that none of them uses counts as naming a side, and so does one whose
language is given and is another. Where words are spaced, whole words count, or their beginnings in languages that inflect
them; Chinese, Japanese, Korean, Thai, Arabic, Persian and Hebrew join words, and any occurrence counts.

Not covered: a side that is named in a language of the Latin, Cyrillic or Arabic script that is not listed, where no
language is given; a side that is meant and not named ("he wears his watch as most do"); writing in the picture of which the
caption quotes nothing and, but in English, says nothing; clock times, maps and flags.
"""

import re
import unicodedata
from functools import lru_cache

_WORDS = {  # a word ending in * may go on
    "en": "left* right* clockwise anticlockwise counterclockwise east* west* northeast* northwest* southeast* southwest* "
    "port starboard text texts letter* reads reading says written writing word words inscri*",
    "de": "links* linke linken linker linkem linkes recht rechts* rechte rechten rechter rechtem rechtes uhrzeiger* "
    "ost osten östlich* west* nordost* nordwest* südost* südwest* backbord* steuerbord*",
    "fr": "gauch* droit* horaire* antihoraire* aiguilles l'est nord-est sud-est ouest oriental* occidental* bâbord tribord",
    "es": "izquierd* derech* zurd* diestr* horari* antihorari* noreste sureste sudeste oeste oriental* occidental* babor "
    "estribor",
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
    "vi": "trái phải đông tây",
    "id": "kiri kanan jarum timur barat",
    "ru": "лев* слев* влев* налев* прав* справ* вправ* направ* часов* восток* восточ* запад*",
    "uk": "лів* злів* влів* налів* прав* справ* вправ* годинник* схід* східн* захід* західн*",
    "el": "αριστερ* δεξι* δεξί* ωρολογιακ* ανατολ* δυτικ* δύση*",
    "hi": "बाए* बाएं* बाएँ* बाया* बायां* बायाँ* बाये* बायी* बाई* दाए* दाएं* दाएँ* दाया* दायां* दायाँ* दाये* दायी* दाई* दाहिन* वाम* दक्षिणावर्त* पूर्व* "
    "पश्चिम*",
}
_PARTS = {  # anywhere in a caption
    "zh": "左 右 东 東 西 顺时针 順時針 逆时针 逆時針",
    "ja": "左 右 東 西 時計回 反時計 ひだり みぎ ヒダリ ミギ ひがし にし",
    "ko": "왼 오른 좌측 우측 좌우 좌회전 우회전 시계방향 시계 동쪽 서쪽 동부 서부",
    "th": "ซ้าย ขวา ตะวันออก ตะวันตก เข็มนาฬิกา",
    "ar": "يمين يمن أيمن ايمن يسار يسر أيسر ايسر شمال شرق غرب ساعة",
    "fa": "راست چپ شرق غرب ساعت",
    "he": "ימין ימני שמאל מזרח מערב שעון",
}
LANGUAGES = frozenset(_WORDS) | frozenset(_PARTS)
"""Languages whose words for sides are known, as ISO 639-1 has them."""

_SCRIPTS = (
    *("LATIN", "CYRILLIC", "GREEK", "DEVANAGARI", "CJK", "HIRAGANA", "KATAKANA", "HANGUL", "THAI", "ARABIC", "HEBREW"),
    *("FULLWIDTH", "HALFWIDTH", "KATAKANA-HIRAGANA", "MODIFIER", "COMBINING", "FEMININE", "MASCULINE", "MICRO"),
    "IDEOGRAPHIC",
)
"""First words of the Unicode names of the letters of these languages."""


def names_a_side(caption: str, language: str = "") -> bool:
    """Whether mirroring a picture could make `caption` wrong, as far as its words and quotation marks tell.

    Args:
        caption: in any of `LANGUAGES`, or several.
        language: its ISO 639-1 code with or without a region (`pt-BR`), where it is known.
    """
    if language and re.split("[-_]", language.lower())[0] not in LANGUAGES:
        return True
    text = unicodedata.normalize("NFKC", caption).casefold().replace("’", "'")
    return any(map(_is_side, text.split())) or bool(_EAST.search(text))


@lru_cache(maxsize=2**16)
def _is_side(word: str) -> bool:
    """Of what stands between two spaces; a vocabulary's worth is remembered, 4 us a caption instead of 20."""
    return bool(_PATTERN.search(word)) or any(map(_is_foreign, word))


def _is_foreign(character: str) -> bool:
    return character.isalpha() and unicodedata.name(character, "").split(" ")[0] not in _SCRIPTS


def _compile() -> re.Pattern[str]:
    spaced, joined = (
        [re.escape(unicodedata.normalize("NFKC", word).casefold()) for word in " ".join(words.values()).split()]
        for words in (_WORDS, _PARTS)
    )
    # A beginning needs no end: only whole words are looked up to theirs.
    spaced = [word.removesuffix(r"\*") if word.endswith(r"\*") else rf"{word}(?!\w)" for word in spaced]
    quotation = '["“”„«»「」『』]'  # what stands in quotation marks is mostly written in the picture
    return re.compile(rf"(?<!\w)(?:{'|'.join(spaced)})|{'|'.join(joined)}|{quotation}")


_PATTERN = _compile()
_EAST = re.compile(r"\b(?:al|del|el|ad|dal|la|spre) este?\b")  # alone, "este" and "est" are mostly "this" and "is"
