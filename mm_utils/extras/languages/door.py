"""What languages add to the core, see `mm_utils.doors`."""

_HERE = "mm_utils.extras.languages.codes"
LANGUAGES = {
    "codes": f"{_HERE}.own_codes",
    "encode": f"{_HERE}.encode_language",
    "of_card": f"{_HERE}.iso_languages",
}
"""What returns a tokenizer's codes of languages, token ids of texts of one, and the codes of a card."""
