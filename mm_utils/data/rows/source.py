"""Flags and items that name sources of image-caption pairs."""

import re
from dataclasses import dataclass, field

from mm_utils.data.arguments import SPLIT_NAMES
from mm_utils.data.arguments import DataArguments as DataArguments  # these three: code of users has them from here
from mm_utils.data.arguments import EvaluatedDataArguments as EvaluatedDataArguments
from mm_utils.data.arguments import PathArguments as PathArguments
from mm_utils.data.faults import storable
from mm_utils.data.media import medium as media
from mm_utils.data.rows.columns import Columns, close_to
from mm_utils.text import redact

TABLE_FORMATS = ("jsonl", "json", "csv", "tsv", "parquet", "tables")
FORMATS = (
    *TABLE_FORMATS,
    *("imagefolder", "datasets", "classes", "coco", "karpathy", "flickr", "sqlite", "webdataset"),
)
TEMPLATES = media.Image.templates
MEDIA = ("auto", "image", "clip", "sound")


@dataclass(frozen=True)
class Source:
    """A place of image-caption pairs, and how to read them.

    Attributes:
        format: one of `FORMATS`, or a reader of one's own as ``module.function``; "" recognises it by the path and the content.
        name: the source's name in rows, reports and warnings; by default the last part of `path`.
        image_root: folder that image paths are relative to and may not leave; by default the data file's.
        image_column, caption_column, id_column: found by their usual names where None.
        group_column: what rows have in common that must come into one split, such as a patient or a site.
        classes: a file that names the classes: ``wnid name`` lines, or names in the order of their index.
        templates: captions of classes, with the name at ``{}``.
        config: the configuration of a data set on the Hub, or the table of a database.
        medium: image, clip or sound; auto finds it by the columns, or the files of a folder.
        file_split: the split that a flag gives a file as: rows that say none are of it, and those of another one are not read.
        only: a split; the rows of others are not read.
        paths: the flags of all sources.
        title: beginning of error messages, which names the flag.
    """

    path: str
    format: str = ""
    name: str = ""
    image_root: str | None = None
    split: str | None = None
    image_column: str | None = None
    caption_column: str | None = None
    id_column: str | None = None
    classes: str | None = None
    templates: tuple[str, ...] = TEMPLATES
    config: str | None = None
    title: str = ""
    caption_template: str | None = None
    group_column: str | None = None
    medium: str = "auto"
    labelled: bool = False
    label_column: str | None = None
    file_split: str | None = None
    only: str | None = None
    paths: PathArguments = field(default_factory=PathArguments)

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError(
                "--sources has an item without a path; an item is path,key=value,... Give the path first."
            )
        title = self.title or f"--sources has {self.path}"
        object.__setattr__(self, "title", title)
        object.__setattr__(self, "name", storable(redact(self.name or re.split(r"[\\/]", self.path.rstrip("/"))[-1])))
        if self.format and self.format not in FORMATS and "." not in self.format:
            raise ValueError(
                f"{title}, format={self.format}; known are {', '.join(FORMATS)}, and a function of your own as "
                f"module.function.{close_to(self.format, FORMATS)}"
            )
        if self.medium not in MEDIA:
            known = ", ".join(MEDIA)
            raise ValueError(f"{title}, medium={self.medium}; known are {known}.{close_to(self.medium, MEDIA)}")
        if self.split is not None:
            if self.split.lower() not in SPLIT_NAMES:
                raise ValueError(
                    f"{title}, split={self.split}; a split is train, validation or test. Name one of these."
                )
            object.__setattr__(self, "split", SPLIT_NAMES[self.split.lower()])
        for template in self.templates or ("",):
            if "{}" not in template:
                raise ValueError(
                    f"{title}, templates={template}; a template says with {{}} where the name goes. Add it."
                )

    @property
    def columns(self) -> Columns:
        """Return the wanted columns."""
        names = (self.image_column, self.caption_column, self.id_column)
        labels = (self.labelled, self.label_column)
        return Columns(*names, self.medium, self.caption_template, self.group_column, *labels)
