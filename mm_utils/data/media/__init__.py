"""The kinds of media: what they are called, how they are stored, and how a model's examples are read."""

from mm_utils.data.media.medium import MEDIA, Clip, Image, Medium, Sound, kind_of, medium_of

__all__ = ["COLUMNS", "FEATURES", "MEDIA", "Clip", "Image", "Medium", "Sound", "kind_of", "medium_of"]

COLUMNS = {kind: medium.column for kind, medium in MEDIA.items()}
FEATURES = {kind: medium.feature for kind, medium in MEDIA.items()}
