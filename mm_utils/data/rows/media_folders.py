"""Folders of media: with a caption file beside each, or a folder per class, whose captions templates make."""

import csv
import errno
import json
import logging
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator

import yaml

from mm_utils.data.faults import Fault, excerpt
from mm_utils.data.media.medium import MEDIA
from mm_utils.data.paths import Jail, read_file
from mm_utils.data.rows.columns import SUFFIXES, Columns, split_named
from mm_utils.data.rows.folders import CAPTION_SUFFIXES, Unread, is_harmless, is_service, walk
from mm_utils.data.rows.records import RecordBuilder, Records
from mm_utils.data.rows.source import TEMPLATES, Source
from mm_utils.data.rows.text_files import (
    Rows,
    Values,
    lines_of,
    made_rows,
)
from mm_utils.files import read_regular_file
from mm_utils.text import one_line

logger = logging.getLogger(__name__)

_LONGEST_CAPTION_FILE = 1 << 20  # bytes
WORDNET_ID = re.compile(r"n\d{8}")  # n01440764 is a tench
_KEYS = (
    *("id", "index", "idx", "number", "class_id", "label_id", "class_index"),
    *("wnid", "synset", "folder", "label", "class"),
)
_NAMES = ("name", "names", "class_name", "label_name", "title", "category", "class", "classes", "label", "labels")
_LISTS = ("id2label", "names", "categories", "classes", "labels")  # where files of other programs keep them
# '0: tench', 'n01440764 tench', '1) goldfish'
_NUMBERED = re.compile(r"(\d+|n\d{8})\s*([\s,;:|=.)])\s*(\S.*)")
_NAME = re.compile(r"[\w(]")
_LAST_NUMBER = re.compile(r"(\D.*?)\s*[\s,;:|]\s*(\d+)")  # 'dog,151'
_LONGEST_NAMES = 16 << 20  # bytes of a file of names


def read_caption_files(source: Source) -> Records:
    """Read media with a caption file beside each, one caption a line."""
    builder = RecordBuilder(source)
    unread = Unread()
    jail = Jail(source.path, source.paths.allow_outside_root)
    suffixes = SUFFIXES[builder.medium]

    def files() -> Iterator[tuple[str, tuple[str | None, list[str]]]]:
        """Yield each medium with its texts, and the texts of none."""
        for place, names in walk(source.path, unread):
            unread.pass_by(source.path, place, names, (*suffixes, *CAPTION_SUFFIXES))
            paths = [os.path.relpath(os.path.join(place, name), source.path) for name in names]
            texts = defaultdict[str, list[str]](list)
            for path in paths:
                if path.lower().endswith(CAPTION_SUFFIXES):
                    texts[os.path.splitext(path)[0]].append(path)
            media = [path for path in paths if path.lower().endswith(suffixes)]
            yield from ((path, (path, texts[os.path.splitext(path)[0]])) for path in media)
            lone = texts.keys() - {os.path.splitext(path)[0] for path in media}
            for text in sorted(text for stem in lone for text in texts[stem]):
                if not is_harmless(os.path.basename(text)):
                    yield text, (None, [text])

    def row(pair: tuple[str | None, list[str]]) -> Values:
        path, texts = pair
        if not texts:
            raise Fault("unmatched_image", f"there is no caption for {path}, in a .txt file beside it")
        if path is None:
            raise Fault("unmatched_caption", f"there is no {builder.medium} of the name {texts[0]}")
        return {"image": path, "captions": lines_of("\n".join(_text_of(text, jail) for text in texts))}

    columns = Columns("image", "captions", medium=builder.medium)
    yield from builder.records(columns, made_rows("file", files(), row), by_folder=True)
    yield from unread.rows(builder)


def _text_of(file: str, jail: Jail) -> str:
    """Read a caption file; raises bad_encoding or read_error."""
    try:
        return read_regular_file(jail.resolve(file), _LONGEST_CAPTION_FILE).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Fault("bad_encoding", f"{file} is not UTF-8 text ({error.reason})") from error
    except OSError as error:
        if error.errno == errno.ENODATA:
            return ""
        raise Fault("read_error", f"{file}: {error.strerror}") from error


def read_classes(source: Source) -> Records:
    """Read ``<class>/<image>`` or ``<split>/<class>/<image>``; templates make the captions."""
    builder = RecordBuilder(source)
    unread = Unread()
    label = "label" if source.labelled else None
    columns = Columns("image", "captions", medium=builder.medium, labelled=source.labelled, label=label)
    yield from builder.records(columns, _class_rows(source, builder.medium, unread))
    yield from unread.rows(builder)


def _class_rows(source: Source, medium: str, unread: Unread) -> Rows:
    names = class_names(source)
    divided = _is_divided(source.path)
    suffixes = SUFFIXES[medium]
    nested = ""
    matched = not names
    templates = MEDIA[medium].templates if source.templates == TEMPLATES else source.templates
    for place, files in walk(source.path, unread):
        parts = os.path.relpath(place, source.path).split(os.sep)
        images = [name for name in files if name.lower().endswith(suffixes)]
        unread.pass_by(source.path, place, files, suffixes)
        split = None
        if images and divided and parts[0] != ".":
            split = split_named(parts.pop(0))
            if split is None:
                unread.pass_by(source.path, place, images, ())
                continue
        if not images:
            continue
        paths = [os.path.relpath(os.path.join(place, name), source.path) for name in images]
        if not parts or parts == ["."]:
            detail = f"{len(images):,} {medium}s lie in no class's folder, such as {images[0]}"
            fault = Fault("bad_label" if source.labelled else "unmatched_image", detail)
            yield from ((f"file {path}", fault) for path in paths)
            continue
        if len(parts) > 1 and not nested:
            nested = os.path.relpath(place, source.path)
            text = "count for the outer one. If the inner ones are the classes, give the folder that holds them"
            logger.warning("%s; folders inside those of classes, such as %s, %s", source.title, nested, text)
        label = parts[0] if source.labelled else _class_name(parts[0], names, source)
        matched = matched or class_key(parts[0]) in names or label in names.values()
        if not label:
            fault = Fault("caption_empty", f"the folder {parts[0]} names no class")
            yield from ((f"file {path}", fault) for path in paths)
            continue
        captions = [] if source.labelled else [template.replace("{}", label) for template in templates]
        for path in paths:
            yield f"file {path}", {"image": path, "captions": captions, "label": [label], "split": split}
    if not matched:
        raise ValueError(
            f"{source.title}, classes={source.classes}; it names {', '.join([*names][:3])}, and no folder has such a name. Write lines of "
            "the folder's name, a tab and the name of the class."
        )


def _is_divided(folder: str) -> bool:
    """Return whether folders of splits lie above those of the classes: all are named like one, or one holds folders alone."""
    with os.scandir(folder) as entries:
        folders = [entry for entry in entries if entry.is_dir() and not is_service(entry.name)]
    splits = [entry for entry in folders if split_named(entry.name)]
    if not splits or len(splits) == len(folders):
        return bool(splits)
    for place in splits:
        if os.access(place.path, os.R_OK | os.X_OK):
            inside = [item.is_dir() for item in os.scandir(place.path) if not is_service(item.name)]
            if inside and all(inside):
                return True
    return False


def class_names(source: Source) -> dict[str, str]:
    """Read the file `classes` of a source: names by WordNet id, folder name or number.

    It has lines ``id name`` with any sign between them, ``folder<TAB>name``, or one name a line, which count from 0; or it is CSV with
    a header, JSON or YAML. The first of several names, as in WordNet, counts. ValueError if it is none of these.
    """
    if source.classes is None:
        return {}
    title = f"{source.title}, classes={source.classes}"
    try:
        text = read_file(source.classes, _LONGEST_NAMES).decode("utf-8-sig").strip()
        is_document = text.startswith(("{", "[")) or source.classes.endswith((".yaml", ".yml"))
        found = _names_of_document(text) if is_document else _names_of_lines(text)
    except (ValueError, LookupError, StopIteration, yaml.YAMLError) as error:
        reason = error.detail if isinstance(error, Fault) else one_line(error)
        raise ValueError(f"{title}; it cannot be read ({reason}). Write lines of 'id name'.") from error
    if found and all(name.isdecimal() for name in found.values()) and not all(map(str.isdecimal, found)):
        found = {name: key for key, name in found.items()}  # a name and its number
    # 'tench, Tinca tinca' -> 'tench'
    return {class_key(key): readable(name.split(",")[0]) for key, name in found.items()}


def class_key(name: str) -> str:
    """Return a folder's name or a number as `class_names` has it."""
    # '007' -> '7'
    return str(int(name)) if name.isdecimal() else unicodedata.normalize("NFC", name.strip())


def _names_of_lines(text: str) -> dict[str, str]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    head = lines[0].lower() if lines else ""
    sign = next((sign for sign in "\t;|," if sign in head), None)
    words = [word.strip('" ') for word in head.split(sign)]
    name = next((word for word in _NAMES if word in words), None)
    key = next((word for word in words if word in _KEYS and word != name), None)
    if name and sign and (key or len(words) > 2):
        rows = csv.DictReader(lines[1:], words, delimiter=sign)
        return {str(row[key] if key else at).strip(): str(row[name]) for at, row in enumerate(rows)}
    lines = lines[1:] if name and (key or len(words) == 1) else lines
    numbered = [_NUMBERED.fullmatch(line) for line in lines]
    numbers = sorted(int(line[1]) for line in numbered if line and line[1].isdecimal())
    is_numbered = len(numbers) == len(lines) == len(set(numbers))
    # numbers with gaps and a blank behind: '101 Dalmatians' may be a name
    if is_numbered and numbers[-1] - numbers[0] >= len(lines) and any(line and line[2] == " " for line in numbered):
        raise ValueError("every line begins with a number, which may be a label or part of the name")
    last = {line[1]: line[2] for line in map(_LAST_NUMBER.fullmatch, lines) if line}
    # numbers that count the lines, from 0 or from 1
    if len(last) == len(lines) and max(map(int, last.values())) <= len(lines):
        return last
    found = {}
    for at, (line, parts) in enumerate(zip(lines, numbered, strict=True)):
        if parts and (is_numbered or not parts[1].isdecimal()):
            found[parts[1]] = parts[3]
        else:
            folder, tab, known = line.partition("\t")
            found |= {folder.strip(): known} if tab else {str(at): line}
    if wrong := next((name for name in found.values() if "\t" in name or not _NAME.match(name)), None):
        raise ValueError(f"{wrong!r} is no name")
    return found


def _names_of_document(text: str) -> dict[str, str]:
    """Read names of JSON, of JSON lines, of YAML, or of what Python prints."""
    try:
        content = json.loads(text)
    except ValueError:
        lines = text.splitlines()
        is_rows = len(lines) > 1 and lines[0].startswith("{") and lines[0].rstrip().endswith("}")
        content = [json.loads(line) for line in lines if line.strip()] if is_rows else yaml.safe_load(text)
    # {"info": {...}, "categories": [{"id": 1, "name": "dog"}]}
    while isinstance(content, dict) and (
        inside := [name for name in _LISTS if isinstance(content.get(name), (list, dict))]
    ):
        content = content[inside[0]]
    found = dict[str, str]()
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        if isinstance(value, dict):
            key = next((value[name] for name in _KEYS if name in value), key)
            value = next(value[name] for name in _NAMES if name in value and value[name] != key)
        if isinstance(value, list):
            # {"0": ["n01440764", "tench"]} names by number and by WordNet id
            *ids, value = value if WORDNET_ID.fullmatch(str(value[0])) else value[:1]
            found |= {str(each): value for each in ids}
        if not isinstance(value, (str, int)) or isinstance(key, (list, dict)):
            raise ValueError(f"{excerpt(str(value))} is no name")
        found[str(key)] = str(value)
    return found


def readable(name: str) -> str:
    """Return the name of a folder or class as words, with composed letters."""
    return " ".join(unicodedata.normalize("NFC", name).replace("_", " ").split())


def _class_name(folder: str, names: dict[str, str], source: Source) -> str:
    is_number = bool(names) and folder.isdecimal()
    if class_key(folder) not in names and (is_number or WORDNET_ID.fullmatch(folder)):
        raise ValueError(
            f"{source.title}; the folder {folder} is named by a {'number' if is_number else 'WordNet id'}, which is not a caption. Set "
            "classes= to a file of lines 'id name' that has a name for it."
        )
    return names.get(class_key(folder), readable(folder))
