"""Which column of a table holds what: the usual names, and the values of a row."""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mm_utils.data.raw.faults import Fault

_IMAGE_NAMES = "image,image_path,image_file,filepath,file_path,file_name,filename,path,img,img_path,picture,photo,jpg"
_CAPTION_NAMES = "caption,captions,text,texts,sentence,sentences,sentences_raw,raw,title,alt_text,alt,txt,description"
USUAL_NAMES = {
    "image": [*_IMAGE_NAMES.split(","), "jpeg", "png", "webp"],
    "caption": _CAPTION_NAMES.split(","),
    # `id` comes last: in files made from COCO's annotations it numbers the captions, and `image_id` the images.
    "id": ["image_id", "imgid", "cocoid", "id"],
    "language": ["languages"],
}
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training", "restval"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_NEEDED = ("image", "caption")


@dataclass(frozen=True)
class Columns:
    """Names of columns; None where there is none, or (in a request) where it is to be found."""

    image: str | None = None
    caption: str | None = None
    id: str | None = None
    language: str | None = None


def find_columns(names: Sequence[str], title: str, wanted: Columns, spare_image: str | None = None) -> Columns:
    """Find the columns of a table by `wanted` or else by their usual names, whatever their case.

    `spare_image` is the image column where no name tells. Raises a ValueError that lists the columns if one that is
    wanted, the image's or the caption's is not there.
    """
    found: dict[str, str | None] = {}
    for kind, usual in USUAL_NAMES.items():
        name = getattr(wanted, kind)
        if name is not None and name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise ValueError(f"--{kind}_column is {name}; there is no such column ({title}).{hint} {_listed(names)}")
        by_lower = {known.lower(): known for known in reversed(names)}
        found[kind] = name or next((by_lower[guess] for guess in usual if guess in by_lower), None)
        if kind == "image":
            found[kind] = found[kind] or spare_image
        if found[kind] is None and kind in _NEEDED:
            raise ValueError(f"{title}; no {kind} column was recognised. {_listed(names)} Set --{kind}_column.")
    if found["id"] == found["image"]:
        found["id"] = None
    return Columns(**found)


def is_null(value: Any) -> bool:
    """Null as JSON, CSV and pandas write it; "nan" is what `str` makes of pandas' null."""
    if isinstance(value, str):
        return not value.strip() or value.strip() in ("nan", "NaN")
    return value is None or (isinstance(value, float) and math.isnan(value))


def captions_of(values: Mapping[str, Any], columns: Columns) -> tuple[list[Any], list[str] | None]:
    """Give a row's captions as they are, and one language per caption if the row has any.

    A single language goes for all captions. Raises languages_mismatch.
    """
    value = values.get(str(columns.caption))
    texts = value if isinstance(value, list) else [value]
    given = values.get(columns.language) if columns.language is not None else None
    if given is None:
        return texts, None
    names = given if isinstance(given, list) else [given] * len(texts)
    if len(names) != len(texts):
        raise Fault("languages_mismatch", f"{len(texts)} captions have {len(names)} languages")
    return texts, ["" if is_null(name) else str(name).strip() for name in names]


def split_of(value: Any) -> str:
    """Give ``train``, ``validation`` or ``test`` for the value of a split column; raises unknown_split."""
    name = SPLIT_NAMES.get(str(value).strip().lower())
    if name is None:
        raise Fault("unknown_split", f"split is {value}, not train, validation or test")
    return name


def _listed(names: Sequence[str]) -> str:
    return f"The columns are: {', '.join(names)}."
