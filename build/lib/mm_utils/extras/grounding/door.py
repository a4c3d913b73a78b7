"""What grounding adds to the core, see `mm_utils.doors`."""

TERMS = {
    "regions": "mm_utils.extras.grounding.terms.RegionPointing",
    "moments": "mm_utils.extras.grounding.terms.MomentCovering",
}
SPLIT_EVALUATORS = {"moments": "mm_utils.extras.grounding.moments.of_split"}
UNREAD = {"moments": "add moments:0.5 to --objectives to learn when something is."}
"""What to say of a column that no term reads."""
STORED = {
    "regions": "mm_utils.extras.grounding.stored.stored_regions",
    "moments": "mm_utils.extras.grounding.stored.stored_moments",
}
"""By the field of a record, what moves it onto what is stored of the medium."""
