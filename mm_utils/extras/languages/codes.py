"""Match a caption's language with the tokenizer's own code for it.

Data sets write `de`, `de-DE`, `deu` or `deu_Latn`; tokenizers have tokens such as `de_DE` (mBART), `deu_Latn` (NLLB), `__de__`
(M2M100), `<|de|>`, `<2de>`, `<de>` or `[de]`. The rule, in this order:

1. the same code, except for case and `_` instead of `-`;
2. of the tokens of the same language, the only one; else the only one of the same script; else of the same territory.
   A script or territory that a code leaves out is the likely one by CLDR: `zh` is `zho_Hans`, `zh-TW` is `zho_Hant`. A
   language stands for its macrolanguage if that usually means it: `arb` is `ar`, `cmn` is `zh`.

If this finds no token, or several, the caption is tokenised by the tokenizer's default.
"""

import logging
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from langcodes import Language
from langcodes.tag_parser import LanguageTagError
from transformers import PreTrainedTokenizerBase

from mm_utils.model.reading import token_ids

logger = logging.getLogger(__name__)

_WRAPPED = re.compile(r"<\|(.+)\|>|<2(.+)>|<(.+)>|\[(.+)\]|__(.+)__")
_LONGEST = 35  # letters of the longest code that the language-tag standard expects (RFC 5646, 4.4.1)
_SHOWN = 10  # languages in a warning
_Place = tuple[str, str | None, str | None]  # language, script, territory


def encode_language(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], max_seq_length: int, code: str
) -> list[list[int]]:
    """Return the token ids of texts of one language; `code` is the tokenizer's own for it."""
    if hasattr(tokenizer, "src_lang"):
        names = {token: name for name, token in getattr(tokenizer, "lang_code_to_token", {}).items()}  # M2M100
        default, tokenizer.src_lang = tokenizer.src_lang, names.get(code, code)
        try:
            return token_ids(tokenizer, texts, max_seq_length)
        finally:
            tokenizer.src_lang = default
    token = int(tokenizer.convert_tokens_to_ids(code))  # type: ignore[arg-type]
    begin = {tokenizer.bos_token_id, tokenizer.cls_token_id}
    # A special token at the beginning was put there by the tokenizer: one that is written in the caption is text.
    firsts = ((ids, int(ids[:1] != [] and ids[0] in begin)) for ids in token_ids(tokenizer, texts, max_seq_length - 1))
    return [[*ids[:first], token, *ids[first:]] for ids, first in firsts]


def own_codes(tokenizer: PreTrainedTokenizerBase, languages: Sequence[str]) -> dict[str, str]:
    """Return the tokenizer's token for each language that has one; one warning names the others.

    If the vocabulary has no language tokens, the result is empty, without a warning.
    """
    tokens = language_tokens(tokenizer)
    if not tokens:
        return {}
    places = {token: place for token, code in tokens.items() if (place := _place(code))}
    exact = {_folded(code): token for token, code in tokens.items()}
    found = {language: exact.get(_folded(language)) or _match(language, places) for language in languages}
    missing = [language[:_LONGEST] for language, token in found.items() if token is None]
    if missing:
        shown = ", ".join(map(repr, missing[:_SHOWN])) + " ..." * (len(missing) > _SHOWN)
        _warn(tokenizer.name_or_path or "the tokenizer", shown)
    return {language: token for language, token in found.items() if token is not None}


def iso_languages(codes: Iterable[str]) -> list[str]:
    """Return the shortest ISO 639 codes of languages, sorted; codes of none are left out."""
    places = (_place(code) for code in set(codes) - {""})
    return sorted({place[0] for place in places if place is not None})


def language_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the tokenizer's language tokens, each with the code inside: `{"__de__": "de"}`.

    A token without brackets counts if the tokenizer has a source language (`src_lang`).
    """
    named = {token for token in tokenizer.special_tokens_map.values() if isinstance(token, str)}
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    found = {}
    for token in sorted((special | set(tokenizer.all_special_tokens)) - named):
        wrapped = _WRAPPED.fullmatch(token)
        code = next(filter(None, wrapped.groups())) if wrapped else token
        if (wrapped or hasattr(tokenizer, "src_lang")) and _place(code):
            found[token] = code
    return found


@lru_cache(maxsize=64)  # so that each set of languages is logged once, and not for every batch
def _warn(tokenizer: str, languages: str) -> None:
    text = "%s has no token, or more than one, for %s; such captions are tokenised as by default"
    logger.warning(text, tokenizer, languages)


def _match(language: str, places: dict[str, _Place]) -> str | None:
    wanted = _place(language)
    if wanted is None:
        return None
    left = [token for token, place in places.items() if place[0] == wanted[0]]
    for part in (1, 2):
        if len(left) > 1:
            left = [token for token in left if places[token][part] == wanted[part]]
    return left[0] if len(left) == 1 else None


@lru_cache(maxsize=4096)
def _place(code: str) -> _Place | None:
    """Return language, script and territory of a code; None if it is not the code of a language."""
    try:
        language = Language.get(code) if len(code) <= _LONGEST else None
    except LanguageTagError:
        return None
    if language is None or language.language is None or not language.is_valid():
        return None
    likely = language.prefer_macrolanguage().maximize()
    name = (
        "nb" if likely.language == "no" else str(likely.language)
    )  # tokenizers have Bokmål and Nynorsk for Norwegian
    return name, likely.script, likely.territory


def _folded(code: str) -> str:
    return code.lower().replace("_", "-")
