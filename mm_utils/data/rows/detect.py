"""Recognise the format of a source, and read its rows one after another."""

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from mm_utils.arguments import load_own
from mm_utils.data.faults import Fault
from mm_utils.data.paths import SQLITE_SUFFIXES
from mm_utils.data.rows.annotations import format_of, read_coco, read_flickr, read_karpathy
from mm_utils.data.rows.columns import SUFFIXES, kind_of_value, set_medium, tell_once
from mm_utils.data.rows.folders import CAPTION_SUFFIXES, MEDIA_SUFFIXES, TABLES, Unread, is_service, walk
from mm_utils.data.rows.media_folders import read_caption_files, read_classes
from mm_utils.data.rows.records import BadRow, RecordBuilder, Records
from mm_utils.data.rows.source import FORMATS, TABLE_FORMATS, TEMPLATES, Source
from mm_utils.data.rows.stored import is_saved
from mm_utils.data.rows.tables import (
    METADATA_FILES,
    read_datasets,
    read_metadata,
    read_sqlite,
    read_tables,
    readable,
    table_of,
)
from mm_utils.data.rows.tars import read_webdataset
from mm_utils.data.rows.text_files import TEXT_SUFFIXES, Rows
from mm_utils.places import missing

_OF_TABLES = (
    *("image_root", "image_column", "caption_column", "id_column"),
    *("caption_template", "group_column", "label_column"),
)
_OPTIONS: dict[str, tuple[str, ...]] = {  # that each format reads, beside name, split and medium
    **dict.fromkeys(TABLE_FORMATS, _OF_TABLES),
    **dict.fromkeys(("datasets", "sqlite"), (*_OF_TABLES, "config")),
    **dict.fromkeys(("coco", "karpathy", "flickr"), ("image_root",)),
    "imagefolder": (),
    "classes": ("classes", "templates"),
    "webdataset": ("caption_column", "label_column"),
}
_HEAD = 1 << 16  # characters of a file that are looked at
_LOOKED_AT = 1000  # media of a folder that tell its kind
_READERS: dict[str, Callable[[Source], Records]] = {
    **dict.fromkeys(TABLE_FORMATS, read_tables),
    "datasets": read_datasets,
    "imagefolder": read_caption_files,
    "classes": read_classes,
    "coco": read_coco,
    "karpathy": read_karpathy,
    "flickr": read_flickr,
    "sqlite": read_sqlite,
    "webdataset": read_webdataset,
}


def read_rows(source: Source) -> Records:
    """Read every row of `source` in order as a `Record`, or as a `BadRow` with the reason.

    Memory does not grow with the rows, except for JSON documents (COCO, Karpathy, arrays), which are parsed whole.

    Raises:
        ValueError: if the source as a whole cannot be read: it is missing, lacks a column, or has another format.
    """
    source = replace(source, format=source.format or detect(source))
    files = metadata_files(Path(source.path)) if source.format == "imagefolder" else []
    if source.labelled and source.format == "imagefolder" and not files:
        source = replace(source, format="classes")
    is_own = source.format not in FORMATS
    template = source.caption_template
    if template is not None and (not source.columns.parts or source.caption_column):
        raise ValueError(
            f"{source.title}, caption_template={template}; it takes the place of caption_column. Name columns in braces: "
            "{brand} {title}."
        )
    if not is_own:
        refuse_unread(source, _OF_TABLES if files else _OPTIONS[source.format])
    if source.format in ("imagefolder", "classes") and not files and os.path.isdir(source.path):
        source = replace(source, medium=_medium_of_folder(source))
    if (
        not is_own
        and source.format not in ("datasets", "webdataset")
        and (gone := missing(source.path, is_local=True))
    ):
        raise ValueError(f"{source.title}; {gone}")
    read = _READERS.get(source.format, _read_own)
    rows = read_metadata(source, files) if files else read(source)
    if source.file_split is not None:
        rows = _of_split(rows, source)
    only = source.only  # a bad row may be of any split
    return (row for row in rows if only in (None, row.split or (only if isinstance(row, BadRow) else "train")))


def refuse_unread(source: Source, read: tuple[str, ...] = ()) -> None:
    """Raise ValueError if an option is set, or a label asked for, that the format of a source does not read; see `_OPTIONS`."""
    read = read or _OPTIONS[source.format]
    if source.format == "datasets" and os.path.isdir(source.path):
        read = _OF_TABLES  # a folder has one configuration
    asked = {name: getattr(source, name) for name in (*_OF_TABLES, "config", "classes")}
    asked["templates"] = None if source.templates == TEMPLATES else "|".join(source.templates)
    wanted = [f"{name}={value}" for name, value in asked.items() if value is not None and name not in read]
    if source.labelled and source.format != "classes" and "label_column" not in read:
        wanted.append("a label")
    if wanted:
        options = [name for name in read if source.labelled or name != "label_column"]  # which is a flag alone
        only = f", only {', '.join(options)}" if options else ""
        raise ValueError(
            f"{source.title}, {wanted[0]}; the format {source.format} does not read that{only}. Leave it out, or write a table "
            "(JSONL, CSV or Parquet) of the files."
        )


def _of_split(rows: Records, source: Source) -> Records:
    """Yield the rows that say the split their file is given as, or none; count the others. ValueError if all say another."""
    others = Counter[str]()
    read = 0
    for row in rows:
        if row.split in (None, source.file_split):
            row.split = source.file_split
            read += 1
            yield row
        else:
            others[row.split] += 1
    if not others:
        return
    counts = ", ".join(f"{count:,} {split}" for split, count in others.items())
    if not read:
        raise ValueError(
            f"{source.title}; by their own split, its rows are {counts}. Give it as the file of that split, or remove the column split."
        )
    tell_once(
        f"{source.title}; some rows say another split themselves and are not read as {source.file_split}: {counts}"
    )


def _read_own(source: Source) -> Records:
    """Read by a user's reader, which `format` names as module.function."""

    def rows() -> Rows:
        for item in load_own(source.format, f"{source.title}, format")(source, source.paths):
            if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], (dict, Fault))):
                wrong = f"it yields {type(item).__name__}. Yield a row's place, and a dict of its columns or a Fault"
                raise ValueError(f"{source.title}, format={source.format}; {wrong}.")
            yield item

    yield from RecordBuilder(source).records(*table_of(rows(), source, source.title))


def detect(source: Source) -> str:
    """Return the format of a source by its path and content; ValueError if they do not decide it."""
    path = Path(source.path)
    if source.path.lower().endswith(".tar"):
        return "webdataset"
    if path.is_dir():
        return _of_folder(path, source)
    if path.is_file():
        return _of_file(path, source)
    # 'mnist' or 'owner/name'; one with a suffix is a file that is not there
    if re.fullmatch(r"[\w.\-]+(/[\w.\-]+)?", source.path) and not path.suffix:
        return "datasets"
    raise ValueError(f"{source.title}; {missing(source.path, is_local=True) or 'it is neither a file nor a folder.'}")


def metadata_files(folder: Path) -> list[Path]:
    """Return the metadata files of an image folder and of the folders in it, one of each."""
    inside = sorted(item for item in folder.iterdir() if item.is_dir() and not is_service(item.name))
    files = list[Path]()
    for place in (folder, *inside):
        files += [place / name for name in METADATA_FILES if os.path.isfile(place / name)][:1]
    return files


@dataclass
class _Contents:
    """What a folder holds: files by suffix, suffixes of media with a text beside them and in folders, tables, and all else."""

    counts: Counter[str] = field(default_factory=Counter)
    captioned: set[str] = field(default_factory=set)
    nested: set[str] = field(default_factory=set)
    files: dict[str, list[str]] = field(default_factory=lambda: {suffix: [] for suffix in (*TABLES, ".tar")})
    others: Unread = field(default_factory=Unread)


def _contents(folder: str) -> _Contents:
    held = _Contents()
    for place, names in walk(folder):
        split = [os.path.splitext(name) for name in names]
        texts = {stem for stem, suffix in split if suffix.lower() in CAPTION_SUFFIXES}
        for name, (stem, suffix) in zip(names, split, strict=True):
            suffix = suffix.lower()
            held.counts[suffix] += 1
            if suffix in held.files:
                held.files[suffix].append(os.path.join(place, name))
            elif suffix not in CAPTION_SUFFIXES and stem in texts:
                held.captioned.add(suffix)
            if place != folder:
                held.nested.add(suffix)
        held.others.pass_by(folder, place, names, (*MEDIA_SUFFIXES, *TABLES))
    return held


def _of_folder(path: Path, source: Source) -> str:
    """Return the format of a folder by the folders and names of files in it."""
    if is_saved(path):
        return "datasets"
    if metadata_files(path):
        return "imagefolder"
    held = _contents(str(path))
    medium = _medium_of_folder(source)
    media = sum(held.counts[suffix] for suffix in SUFFIXES[medium])
    is_captioned = not held.captioned.isdisjoint(SUFFIXES[medium])
    tables = [file for suffix in TABLES for file in held.files[suffix]]
    shards = held.files[".tar"]
    if shards and len(shards) >= media and not is_captioned:  # fewer than media are no data set, but a copy of it
        # img2dataset writes 00000.parquet beside 00000.tar
        other = next((file for file in tables if f"{os.path.splitext(file)[0]}.tar" not in shards), None)
        if other is None:
            return "webdataset"
        raise ValueError(
            f"{source.title}; this folder holds tables, such as {other}, and tar shards, such as {shards[0]}, which are not read "
            "together. Give the path of one of them, or move the others out of this folder."
        )
    in_folders = is_captioned or not held.nested.isdisjoint(SUFFIXES[medium])
    if source.labelled and media and not (readable(tables, source) if in_folders else tables):
        return "classes"
    if is_captioned and not source.labelled:
        return "imagefolder"
    if tables:
        _check_card(path, source)
        kinds = [suffix[1:] for suffix in TABLES if held.files[suffix]]
        return kinds[0] if len(kinds) == 1 else "tables"
    raise ValueError(f"{source.title}; {_without_rows(held, path, medium, media > 0)}")


def _check_card(folder: Path, source: Source) -> None:
    card = folder / "README.md"
    # the head of a card lists them: '- config_name: en'
    if card.is_file() and not card.is_symlink() and card.read_bytes()[:_HEAD].count(b"config_name:") > 1:
        raise ValueError(f"{source.title}; its card names several configurations. Give the files of one of them.")


def _without_rows(held: _Contents, path: Path, medium: str, has_media: bool) -> str:
    """Return why nothing is read in a folder, and what to do; it names what else lies there."""
    known = f"prepare_data takes format=, one of {', '.join(FORMATS)}."
    beside = "; ".join(map(held.others.says, held.others.passed))
    if beside:
        known = (
            f"{beside}. If one of these holds the captions, give that file itself by --train_file or --sources, with the folder "
            "of its images as image_root."
        )
    if has_media:
        what = f" in a form that is read in a folder; {known}" if beside else "."
        return (
            f"this folder holds {medium}s and no captions{what} Write a table of paths and captions (JSONL, CSV, Parquet) there, "
            "or NAME.txt beside every file; ,format=classes behind it in prepare_data makes captions of the names of folders."
        )
    if (kinds := kinds_of_folder(path)) and medium not in kinds:
        return f"it holds {next(iter(kinds))}s, and the model is for {medium}s. Give {medium}s."
    return f"this folder is empty, or its format is not recognised{'; ' if beside else '. '}{known}"


def _medium_of_folder(source: Source) -> str:
    """Return the kind of the files in a folder, images where there are none; ValueError if there are several without most images."""
    if source.medium != "auto":
        return source.medium
    found = kinds_of_folder(Path(source.path))
    most = max(found, key=found.__getitem__, default="image")
    if len(found) > 1 and most != "image":
        held = " and ".join(f"{count:,} {kind}s" for kind, count in found.items())
        raise ValueError(f"{source.title}; this folder holds {held}. {set_medium(found)}")
    return most


def kinds_of_folder(folder: Path) -> dict[str, int]:
    """Count the first media of a folder by the kind that their names tell; a GIF is an image here, not a clip."""
    names = (name for _, names in walk(str(folder)) for name in names if name.lower().endswith(MEDIA_SUFFIXES))
    counts = Counter(map(kind_of_value, islice(names, _LOOKED_AT)))
    return {kind: counts[kind] for kind in SUFFIXES if counts[kind]}


def _of_file(path: Path, source: Source) -> str:
    suffix = path.suffix.lower()
    if suffix in (".parquet", *SQLITE_SUFFIXES):
        return "parquet" if suffix == ".parquet" else "sqlite"
    with path.open("rb") as file:
        head = file.read(_HEAD).decode("utf-8-sig", "replace")
    if (found := format_of(path, head)) is not None:
        return found
    if suffix in (".json", ".jsonl"):
        return "json" if head.lstrip().startswith("[") else "jsonl"
    if suffix in (".csv", ".tsv"):
        return suffix[1:]
    known = ", ".join((*TEXT_SUFFIXES, ".parquet", ".tar"))
    raise ValueError(
        f"{source.title}; its format is not known by '{path.suffix}'. Known are {known} (unpack a .zip or .gz); prepare_data takes "
        f"format=, one of {', '.join(FORMATS)}."
    )
