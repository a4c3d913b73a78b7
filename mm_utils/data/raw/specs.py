"""One item of ``--sources``, and what turns the rows of such a source into records."""

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mm_utils.data.raw.columns import SPLIT_NAMES, Columns
from mm_utils.data.raw.faults import Fault
from mm_utils.data.raw.paths import Jail, PathArguments
from mm_utils.data.raw.records import BadRow, FileImage, ImageRef, Record, UrlImage
from mm_utils.data.raw.tables import image_path, path_id
from mm_utils.data.raw.text_files import excerpt

FORMATS = {
    "jsonl": "one JSON object a line",
    "json": "an array of JSON objects",
    "csv": "a table with a header, commas between cells",
    "tsv": "a table with a header, tabs between cells",
    "parquet": "a Parquet file or a folder of them",
    "imagefolder": "images with metadata.jsonl, .csv or .parquet, or each with a caption file of the same name (.txt)",
    "classes": "a folder of images per class, below split folders or not; captions are made from templates",
    "parallel": "a list or folder of images and one of captions, joined by key",
    "coco": "a COCO captions file: images and annotations",
    "karpathy": "a Karpathy split file: images with sentences",
    "flickr": "a Flickr8k or Flickr30k caption file",
    "webdataset": "tar shards: a file, a folder or a pattern such as shard-{000..099}.tar",
    "datasets": "a data set on the Hub, a folder of one, or a folder of save_to_disk",
}
TEMPLATES = ("a photo of a {}.", "a picture of a {}.", "an image of a {}.")


@dataclass(frozen=True)
class Source:
    """One item of ``--sources``: where the pairs are and how to read them.

    Attributes:
        path: a file, a folder, a pattern of shards, or a repository on the Hub.
        format: a key of `FORMATS`; "" recognises it from the look of `path`.
        name: what rows, reports and warnings call the source; by default the last part of `path`.
        image_root: folder that image paths are relative to and may not leave; by default the data file's.
        split: the split of all rows, whatever they say themselves.
        weight: its share of the training images, relative to other sources; None takes all.
        image_column, caption_column, id_column, language_column: found by their usual names where not given.
        language: the code of all captions of the source, where its rows give none.
        captions: the list or folder of captions of the format ``parallel``.
        classes: a file that names the classes: ``wnid name`` lines, names in the order of their index, or JSON.
        templates: what makes captions of class names, at ``{}``.
        config: the configuration of a data set on the Hub.
    """

    path: str
    format: str = ""
    name: str = ""
    image_root: str | None = None
    split: str | None = None
    weight: float | None = None
    image_column: str | None = None
    caption_column: str | None = None
    id_column: str | None = None
    language_column: str | None = None
    language: str | None = None
    captions: str | None = None
    classes: str | None = None
    templates: tuple[str, ...] = TEMPLATES
    config: str | None = None

    def __post_init__(self) -> None:
        """Give the source its name, and refuse values that cannot be meant, with a ValueError of one line."""
        if not self.path:
            raise ValueError(
                "--sources has an item without a path; an item is path,key=value,... Give the path first."
            )
        title = f"--sources has {self.path}"
        if not self.name:
            object.__setattr__(self, "name", re.split(r"[\\/]", self.path.rstrip("/"))[-1])
        if self.format and self.format not in FORMATS:
            raise ValueError(f"{title}, format={self.format}; known are {', '.join(FORMATS)}.{_close(self.format)}")
        if self.split is not None:
            if self.split.lower() not in SPLIT_NAMES:
                raise ValueError(
                    f"{title}, split={self.split}; a split is train, validation or test. Name one of them."
                )
            object.__setattr__(self, "split", SPLIT_NAMES[self.split.lower()])
        if self.weight is not None and not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"{title}, weight={self.weight}; a weight is above 0. Drop the source to leave it out.")
        without = [template for template in self.templates if "{}" not in template]
        if without or not self.templates:
            shown = without[0] if without else ""
            raise ValueError(f"{title}, templates={shown}; a template says with {{}} where the name goes. Add it.")

    @classmethod
    def parse(cls, item: "str | Mapping[str, Any]") -> "Source":
        r"""Read ``path,key=value,...``, or a mapping of the same keys with ``path`` as a YAML file gives it.

        A comma inside a value is written ``\,``; templates are separated by ``|``, or are a list in a mapping. Raises
        a ValueError of one line for an unknown key or a value that cannot be meant.
        """
        if isinstance(item, str):
            path, *rest = [part.replace("\\,", ",") for part in re.split(r"(?<!\\),", item)]
            pairs = [part.partition("=") for part in rest]
            odd = next((key for key, equals, _ in pairs if not equals), None)
            if odd is not None:
                raise ValueError(rf"--sources has {item}; '{odd}' is no key=value. Write a comma in a path as '\,'.")
            names = ["path", *(key.strip() for key, _, _ in pairs)]
            twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
            if twice is not None:
                raise ValueError(f"--sources has {item}; {twice} is given twice. Keep one of them.")
            item = dict(zip(names, [path.strip(), *(value.strip() for _, _, value in pairs)], strict=True))
        known = [field.name for field in dataclasses.fields(cls)]
        values = {key: value for key, value in item.items() if value is not None}
        for key in values:
            if key not in known:
                raise ValueError(
                    f"--sources has the key {key}; known are {', '.join(known)}.{_close(str(key), known)}"
                )
        return cls(**{key: _typed(key, value) for key, value in {"path": "", **values}.items()})

    @property
    def columns(self) -> Columns:
        """The columns that are asked for."""
        return Columns(self.image_column, self.caption_column, self.id_column, self.language_column)

    @property
    def title(self) -> str:
        """What opens an error message."""
        return f"--sources has {self.path}"


class Maker:
    """Makes the records of one source: resolves images, and fills in what the source says of all its rows."""

    def __init__(self, source: Source, safety: PathArguments, default_root: str | os.PathLike[str]) -> None:
        self.source, self.safety = source, safety
        root = source.image_root or safety.image_root or os.fspath(default_root)
        if not os.path.isdir(root):
            raise ValueError(f"{source.title}; its image_root {root} is no folder. Give the folder of the images.")
        self.jail = Jail(root, safety.allow_outside_root)

    def image(self, value: Any, jail: Jail | None = None) -> tuple[ImageRef, str | None]:
        """Give the image that a cell names, and the id that follows from its path or address; raises a `Fault`."""
        if isinstance(value, ImageRef):
            return value, None
        written = value.get("path") if isinstance(value, dict) else value
        if (
            self.safety.allow_download
            and isinstance(written, str)
            and written.lower().startswith(("http://", "https://"))
        ):
            return UrlImage(written), storable(written)
        jail = jail or self.jail
        path = image_path(written, jail)
        return FileImage(path), path_id(path, jail.root, written)

    def record(
        self,
        where: str,
        image: tuple[ImageRef, str | None],
        captions: list[Any],
        *,
        languages: list[str] | None = None,
        regions: Any = None,
        split: str | None = None,
    ) -> Record:
        """Give the record of an image with its id."""
        if languages is None and self.source.language is not None:
            languages = [self.source.language] * len(captions)
        ref, key = image
        split = self.source.split or split
        return Record(self.source.name, storable(where), key, ref, captions, languages, regions, split)

    def bad(self, where: str, fault: Fault, raw: str = "") -> BadRow:
        """Give the bad row of a fault."""
        return BadRow(self.source.name, storable(where), fault, excerpt(raw))


def storable(text: str) -> str:
    """The text with what is no Unicode, such as parts of old file names, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _typed(key: str, value: Any) -> Any:
    if key == "weight":
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(
                f"--sources has weight={value}; a weight is a number. Write for example weight=2."
            ) from None
    if key == "templates":
        return tuple(value.split("|") if isinstance(value, str) else map(str, value))
    return str(value)


def _close(word: str, known: Any = FORMATS) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""
