"""Records of a folder per class, whose captions templates make of the names of the classes."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from mm_utils.data.faults import Fault
from mm_utils.data.media.medium import MEDIA
from mm_utils.data.paths import Limits, read_file, walk
from mm_utils.data.rows.columns import SPLIT_NAMES, SUFFIXES
from mm_utils.data.rows.folders import raw_photographs, unread_rows
from mm_utils.data.rows.records import BadRow, Record, RecordBuilder
from mm_utils.data.rows.source import TEMPLATES, PathArguments, Source
from mm_utils.text import one_line

WORDNET_ID = re.compile(r"n\d{8}")
_LONGEST_NAMES = 16 << 20  # bytes of a file of names


def read_classes(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read ``<class>/<image>`` or ``<split>/<class>/<image>``; templates make the captions."""
    builder = RecordBuilder(source, safety, source.path)
    names = class_names(source)
    with os.scandir(source.path) as entries:
        folders = [entry.name for entry in entries if entry.is_dir()]
    divided = bool(folders) and all(name.lower() in SPLIT_NAMES for name in folders)
    unread: list[Fault] = []
    for place, files in walk(source.path, unread):
        yield from raw_photographs(builder, place, files)
        parts = os.path.relpath(place, source.path).split(os.sep)
        split = SPLIT_NAMES[parts.pop(0).lower()] if divided and parts[0] != "." else None
        images = [name for name in files if name.lower().endswith(SUFFIXES[builder.medium])]
        if not images:
            continue
        if not parts or parts == ["."]:
            detail = f"{len(images):,} {builder.medium}s lie in no class's folder, such as {images[0]}"
            fault = Fault("unmatched_image", detail)
            yield builder.bad(f"folder {place}", fault)
            continue
        name = _class_name(parts[0], names, source)
        if not name:
            yield builder.bad(f"folder {place}", Fault("caption_empty", f"the folder {parts[0]} names no class"))
            continue
        captions = captions_of_class(source, name, builder.medium)
        for name in images:
            path = os.path.relpath(os.path.join(place, name), source.path)
            try:
                yield builder.record(f"file {path}", builder.image(path), list(captions), split=split)
            except Fault as fault:
                yield builder.bad(f"file {path}", fault, path)
    yield from unread_rows(builder, unread)


def captions_of_class(source: Source, name: str, medium: str) -> list[str]:
    """Return the captions that the templates make of the name of a class."""
    usual = MEDIA[medium].templates
    return [each.replace("{}", name) for each in (usual if source.templates == TEMPLATES else source.templates)]


def class_names(source: Source) -> dict[str, str]:
    """Read the file `classes` of a source: names by WordNet id, folder name or index.

    It is a JSON object ``{id: name}`` or ``{index: [id, name]}``, lines ``id name`` or ``id<TAB>name``, or one name a
    line. The first of several names, as in WordNet, counts.
    """
    if source.classes is None:
        return {}
    path = Path(source.classes)
    title = f"{source.title}, classes={path}"
    if not path.is_file():
        raise ValueError(f"{title}; there is no such file. Check the path.")
    found: dict[str, str] = {}
    try:
        text = read_file(str(path), Limits(_LONGEST_NAMES)).decode("utf-8-sig")
        if text.lstrip().startswith("{"):
            for key, value in json.loads(text).items():
                *keys, name = [key, *(value if isinstance(value, list) else [value])]
                found |= dict.fromkeys(map(str, keys), str(name))
        else:
            for index, line in enumerate(line.strip() for line in text.splitlines() if line.strip()):
                key, _, name = line.partition("\t") if "\t" in line else line.partition(" ")
                if "\t" in line or WORDNET_ID.fullmatch(key):
                    found[key] = name
                else:
                    found[str(index)] = line
    except (ValueError, AttributeError) as error:
        reason = error.detail if isinstance(error, Fault) else one_line(error)
        raise ValueError(f"{title}; it cannot be read ({reason}). Write lines of 'id name', or JSON.") from error
    return {key: readable(name.split(",")[0]) for key, name in found.items()}


def readable(name: str) -> str:
    """Return the name of a folder or class as words."""
    return " ".join(name.replace("_", " ").split())


def _class_name(folder: str, names: dict[str, str], source: Source) -> str:
    if folder in names:
        return names[folder]
    if WORDNET_ID.fullmatch(folder):
        raise ValueError(
            f"{source.title}; the folder {folder} is named by a WordNet id, which is not a caption. Set classes= to a "
            "file of lines 'id name'."
        )
    return readable(folder)
