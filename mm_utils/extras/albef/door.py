"""What these terms add to the core, see `mm_utils.doors`."""

TERMS = {
    "matching": "mm_utils.extras.albef.matching.Matching",
    "masked_lm": "mm_utils.extras.albef.masked_language.MaskedLanguageModelling",
}
