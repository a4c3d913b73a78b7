"""The kinds of media: what they are called, and how a data set says which it holds.

Code that has nothing to ask of the kind finds the medium of a row in the column `image`, whatever it is: an image file, a sound
as a WAV file, or a clip as an AVI file of JPEG frames (`mm_utils.data.media.riff`). The column's feature tells the kind.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import datasets
from datasets import Audio, Dataset, Features, Image, Value, Video

COLUMNS = {"image": "image", "clip": "video", "sound": "audio"}
"""The kinds, and the columns that stored data sets keep them in."""

FEATURES = {"image": Image(decode=False), "clip": Video(decode=False), "sound": Audio(decode=False)}


def kind_of(features: Mapping[str, Any]) -> str:
    """Return the kind of the medium in the column `image`; unknown features count as images."""
    found = type(features.get("image"))
    return next((kind for kind, feature in FEATURES.items() if type(feature) is found), "image")


def cached_rows(rows: Callable[..., Iterator[dict[str, Any]]], features: Features, given: dict[str, Any]) -> Dataset:
    """Write the rows that a generator makes of `given` into the datasets cache, once."""
    medium = kind_of(features)
    bare = Features({**features, "image": {"bytes": Value("binary"), "path": Value("string")}})
    found = Dataset.from_generator(
        rows,
        features=features if medium == "image" else bare,  # the encoder of `Audio` asks for a codec
        cache_dir=str(datasets.config.HF_DATASETS_CACHE),
        gen_kwargs=given,
    )
    assert isinstance(found, Dataset)
    return found if medium == "image" else found.cast_column("image", features["image"])
