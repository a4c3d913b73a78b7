"""A caption's language is matched with the tokenizer's own code for it, or with none."""

import logging

import pytest
from transformers import ByT5Tokenizer, MBartTokenizer, NllbTokenizer, PreTrainedTokenizerBase

from mm_utils.data.batches.tokens import encode_captions, own_codes
from mm_utils.extras.languages import codes
from mm_utils.extras.languages.codes import iso_languages, language_tokens
from mm_utils.model.processor import train_tokenizer

LETTERS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "▁": 4, "a": 5, "b": 6}


@pytest.fixture(autouse=True)
def no_warning_yet() -> None:
    codes._warn.cache_clear()


def with_tokens(*tokens: str) -> PreTrainedTokenizerBase:
    """A WordPiece tokenizer with these special tokens added."""
    tokenizer = train_tokenizer(["a red car", "ein rotes auto"], 100)
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    return tokenizer


@pytest.mark.parametrize(
    ("language", "nllb", "mbart"),
    [
        ("de", "deu_Latn", "de_DE"),
        ("de-DE", "deu_Latn", "de_DE"),
        ("DE_at", "deu_Latn", "de_DE"),
        ("deu", "deu_Latn", "de_DE"),
        ("ger", "deu_Latn", "de_DE"),
        ("deu_Latn", "deu_Latn", "de_DE"),
        ("en", "eng_Latn", "en_XX"),
        ("zh", "zho_Hans", "zh_CN"),
        ("zh-TW", "zho_Hant", "zh_CN"),
        ("cmn", "zho_Hans", "zh_CN"),
        ("yue", "yue_Hant", None),
        ("ar", "arb_Arab", "ar_AR"),
        ("arz", "arz_Arab", None),
        ("no", "nob_Latn", None),
        ("nb-NO", "nob_Latn", None),
        ("nn", "nno_Latn", None),
        ("fa", "pes_Arab", None),
        ("pt-BR", "por_Latn", None),
        ("xx", None, None),
        ("und", None, None),
        ("mul", None, None),
        ("German", None, None),
        ("../de", None, None),
        ("d" * 100_000, None, None),
    ],
)
def test_codes_of_translation_models(language: str, nllb: str | None, mbart: str | None) -> None:
    assert own_codes(NllbTokenizer(vocab=LETTERS), [language]).get(language) == nllb
    assert own_codes(MBartTokenizer(), [language]).get(language) == mbart


@pytest.mark.parametrize("form", ["<{}>", "[{}]", "<2{}>", "__{}__", "<|{}|>"])
def test_bracketed_special_tokens_are_languages(form: str) -> None:
    tokenizer = with_tokens(*map(form.format, ("de", "pt", "transcribe")), "fr", "<object>")
    assert language_tokens(tokenizer) == {form.format("de"): "de", form.format("pt"): "pt"}
    found = own_codes(tokenizer, ["de-DE", "por", "pt-BR", "fr", ""])
    assert found == {"de-DE": form.format("de"), "por": form.format("pt"), "pt-BR": form.format("pt")}


def test_script_and_then_territory_decide_between_tokens_of_a_language() -> None:
    tokenizer = with_tokens("<sr-Cyrl>", "<sr-Latn>", "<en-GB>", "<en-US>", "<es-ES>", "<es-AR>")
    wanted = {"sr": "<sr-Cyrl>", "sr-Latn": "<sr-Latn>", "en": "<en-US>", "en_gb": "<en-GB>", "es": "<es-ES>"}
    assert own_codes(tokenizer, [*wanted, "es-MX", "en-AU"]) == wanted


def test_unknown_languages_are_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = with_tokens("<de>")
    tokenizer.name_or_path = "some/model"
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert own_codes(tokenizer, ["fr", "de", "", "it", "fr"]) == {"de": "<de>"}
        own_codes(with_tokens(), ["fr"])  # knows no languages: nothing is missing
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("some/model has no token, or more than one, for 'fr', 'it';")


def test_a_warning_is_short_with_any_column(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        own_codes(with_tokens("<de>"), [f"{number}" * 1000 for number in range(50)])
    assert len(caplog.messages[0]) < 700


def test_source_language_is_set_and_put_back() -> None:
    for tokenizer, de, en in (
        (NllbTokenizer(vocab=LETTERS), "deu_Latn", "eng_Latn"),
        (MBartTokenizer(), "de_DE", "en_XX"),
    ):
        before = tokenizer.backend_tokenizer.to_str()
        plain = tokenizer("a b")["input_ids"]
        ids = encode_captions(tokenizer, ["a b", "a b", "a b", "a b " * 20], ["de-DE", "", "en", "de"], 6)
        german, english = map(tokenizer.convert_tokens_to_ids, (de, en))
        assert ids[1] == ids[2] == plain
        assert ids[0] == [german if token == english else token for token in plain] != plain
        assert len(ids[3]) == 6
        assert german in ids[3]
        tokenizer.backend_tokenizer.no_truncation()
        assert tokenizer.backend_tokenizer.to_str() == before


def test_a_language_token_follows_the_first_token() -> None:
    tokenizer = with_tokens("<de>", "<en>")
    captions = ["a red car", "a red car", "[CLS] <en> red", "a red car " * 50, ""]
    ids = encode_captions(tokenizer, captions, ["de", "fr", "de", "deu", "de"], 8)
    begin, end, german = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.convert_tokens_to_ids("<de>")
    assert ids[1] == tokenizer("a red car")["input_ids"]
    assert ids[0] == [begin, german, *ids[1][1:]]
    assert [caption[:2] for caption in (ids[2], ids[3], ids[4])] == [[begin, german]] * 3
    assert list(map(len, ids[3:])) == [8, 3]
    assert all(caption[-1] == end for caption in ids)
    special = {begin, tokenizer.convert_tokens_to_ids("<en>")}
    assert not special & set(ids[2][2:])


def test_without_a_first_token_the_language_comes_first() -> None:
    tokenizer = ByT5Tokenizer(extra_special_tokens=["<de>"])
    assert not tokenizer.is_fast
    german, end = map(tokenizer.convert_tokens_to_ids, ("<de>", "</s>"))
    [ids] = encode_captions(tokenizer, ["a</s>"], ["de"], 20)
    assert ids == [german, *(byte + 3 for byte in b"a</s>"), end]


def test_the_codes_of_a_card_are_short_and_known_languages() -> None:
    assert iso_languages(["deu_Latn", "en", "en-GB", "zh-TW", "cmn", "", "no language"]) == ["de", "en", "zh"]
