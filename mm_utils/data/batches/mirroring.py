"""Which images must not be mirrored: those with boxes, and those whose captions name a side or speak of writing."""

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

# In doubt a word counts: a miss teaches that left is right. Words for left and right, east and west, clocks, then writing.
_WORDS = {
    "English": r"""\b(?:left|right|lhs\b|rhs\b|(?:anti|counter)?clockwise|o'clock|(?:north|south)?(?:east|west)|port\b|starboard
    |texts?\b|words?\b|letter|read(?:s|ing)\b|say(?:s|ing)\b|writ(?:ing|ten)\b|inscri|signs?\b|signpost|billboard|plates?\b
    |label|logo|banner|graffiti|(?:number|no\.|nr\.)\ ?\d)|\#\ ?\d|["“”„«»「」『』]""",
    "German": r"""\b(?:link(?:s|e[nmrs]?\b)|recht(?:s|e[nmrs]?\b|\b)|uhrzeiger|(?:nord|süd)?(?:ost(?:en)?\b|östlich|west)|backbord
    |steuerbord|schild(?:er)?\b|aufschrift|beschrift)""",
    "Vietnamese": r"\b(?:trái\b|phải\b|đông\b|tây\b|chữ\b)",
    "Chinese, Japanese": "左|右|ひだり|みぎ|[东東西][边邊侧側面方部南北]|针|針|钟|鐘|時計|字|写|寫|書|书|文本|标|標|牌|看板|横幅|ロゴ|ラベル",
    "Spanish, Portuguese, Italian": r"""\b(?:sinistr[aoei]\b|destr[aoei]\b|ovest\b|izquierd|derech|esquerd|direit|(?:nor|su|sud)?oeste\b|al\ este\b|leste\b|reloj|relógio|horári[oa]
    |textos?\b|palabra|palavra|letr[ae]|escrit|cartel|placas?\b|rótulo|n[úu]mero\ \d)""",
    "French": r"""\b(?:gauche|droite?s?\b|à\ l[’']est\b|ouest\b|horloge|horaire|aiguilles|bâbord|tribord|textes?\b|mots?\b|lettres?\b
    |écri(?:t|ture)|panneau|enseigne|pancarte|affiche|numéro\ \d)""",
    "Russian": r"""\b(?:с?лев[аоы]|влево|налево|с?прав[аоы]|вправо|направо|лів[аоиу]|восто[кч]|запад|час(?:ы|ов|ах)|текст|слов[оа]|букв|надпис
    |написан|знак|вывеск|табличк|плакат|номер\ \d)""",
    "Indonesian": r"\b(?:kiri|kanan|timur|barat|jarum\ jam|(?:ber|ter|di)?tulis|teks|huruf|papan\ (?:nama|tanda))",
    "Arabic, Urdu, Persian": "يسار|يسرى|يمين|يمنى|[أا]يسر|[أا]يمن|شرق|غرب|ساعة|كتاب|كتب|مكتوب|كلم|حرف|حروف|لافت|بائیں|دائیں|چپ|راست|نوشت|لکھ",
    "Hindi, Marathi": "बाए|बाएँ|बाय|बाई|दाए|दाय|दाई|दाहिन|डाव|उजव|पूर्व|पश्चिम|घड़ी|लिख|शब्द|अक्षर|संकेत|बोर्ड",
    "Bengali": "বাম|বাঁ|ডান|পূর্ব|পশ্চিম|ঘড়ি|লেখ|শব্দ|অক্ষর|সাইন|বোর্ড",
}
_SIDES = re.compile(unicodedata.normalize("NFKC", "|".join(_WORDS.values())), re.VERBOSE)
# A letter beyond Latin, Cyrillic, Arabic, Devanagari, Bengali, kana and Chinese characters, whose words nobody knows here.
_OTHER = re.compile(
    r"[^\W\d_\u0000-\u02af\u1e00-\u1eff\u0400-\u052f\u0600-\u077f\u0900-\u09ff\u3005-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]"
)


def has_sides(row: Mapping[str, Any]) -> bool:
    """Return whether mirroring a row's image would make a box or one of its captions wrong, or its captions cannot be judged."""
    text = unicodedata.normalize("NFKC", "\n".join(row["captions"]))
    capitals = re.search(r"^(?=.*[a-z]).*\b[A-Z]{3,}\b", text, re.MULTILINE)  # mostly writing: "a STOP sign"
    return bool(row.get("regions") or capitals or _SIDES.search(text.casefold()) or _OTHER.search(text))
