"""Records of annotation files: COCO captions, Karpathy's splits, the caption files of Flickr8k and Flickr30k."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mm_utils.data.raw.columns import split_of
from mm_utils.data.raw.faults import Fault
from mm_utils.data.raw.paths import PathArguments
from mm_utils.data.raw.records import BadRow, Record
from mm_utils.data.raw.specs import Maker, Source
from mm_utils.data.raw.text_files import check_line, checked_object, is_utf16, open_lines, parse_json

_TOKEN = re.compile(r"(?P<name>[^\t]+)#(?P<number>\d+)\t(?P<caption>.*)")
_PIPES = re.compile(r"(?P<name>[^|]+)\|\s*(?P<number>\d+)\s*\|(?P<caption>.*)")
_HEADER = re.compile(r"\w+\s*[,|]\s*\w+(\s*[,|]\s*\w+)*$")
_COMMA = re.compile(r"(?P<name>[^,]+),(?P<caption>.*)")


def read_coco(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Join ``images`` and ``annotations`` by ``image_id``: one record an image, with the captions of all its annotations.

    Raises a ValueError if the file does not parse, or holds no annotation with a caption.
    """
    path = Path(source.path)
    document = _document(path, source, ("images", "annotations"))
    maker = Maker(source, safety, path.parent)
    annotations: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
    for at, item in enumerate(document["annotations"]):
        try:
            row = checked_object(item)
            caption = _present(row, "caption")
            annotations[_needed(row, "image_id")].append((at, caption))
        except Fault as fault:
            yield maker.bad(f"annotation {at}", fault, str(item))
    if document["annotations"] and not annotations:
        raise ValueError(f"{source.title}; no annotation has image_id and caption. Give COCO's captions file.")
    seen: dict[str, int] = {}
    for at, item in enumerate(document["images"]):
        try:
            row = checked_object(item)
            key = _needed(row, "id")
            if key in seen:
                raise Fault("duplicate_id", f"image {seen[key]} has the id {key}, too")
            seen[key] = at
            if key not in annotations:
                raise Fault("unmatched_image", f"no annotation has the image_id {key}")
            image, _ = maker.image(_present(row, "file_name"))
            split = None if row.get("split") is None or source.split else split_of(row["split"])
            captions = [caption for _, caption in annotations[key]]
            yield maker.record(f"image {at}", (image, key), captions, split=split)
        except Fault as fault:
            yield maker.bad(f"image {at}", fault, str(item))
    for key, left in annotations.items():
        for at, caption in left if key not in seen else ():
            yield maker.bad(f"annotation {at}", Fault("unmatched_caption", f"no image has the id {key}"), str(caption))


def read_karpathy(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read ``images[].sentences[].raw`` with their splits; restval counts as train.

    Raises a ValueError if the file does not parse.
    """
    path = Path(source.path)
    document = _document(path, source, ("images",))
    maker = Maker(source, safety, path.parent)
    for at, item in enumerate(document["images"]):
        try:
            row = checked_object(item)
            sentences = row.get("sentences")
            if not isinstance(sentences, list) or not sentences:
                raise Fault("unmatched_image", "it has no sentences")
            captions = [_present(checked_object(sentence), "raw") for sentence in sentences]
            named = str(_present(row, "filename"))
            image, by_path = maker.image(f"{row['filepath']}/{named}" if row.get("filepath") else named)
            key = next((str(row[name]) for name in ("cocoid", "imgid") if row.get(name) is not None), by_path)
            split = source.split or (split_of(row["split"]) if row.get("split") is not None else None)
            yield maker.record(f"image {at}", (image, key), captions, split=split)
        except Fault as fault:
            yield maker.bad(f"image {at}", fault, str(item))


def read_flickr(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read one caption a line: ``name.jpg#0<TAB>caption``, or after a header ``name,caption`` or ``name| 0| caption``.

    All after the first comma is the caption: Flickr8k's captions hold commas and are not always quoted. A record has
    one caption; the rows of an image follow each other and share its path as their id.
    """
    path = Path(source.path)
    maker = Maker(source, safety, path.parent)
    pattern = _TOKEN
    with open_lines(path) as file:
        for number, line in enumerate(file, start=1):
            text = line.strip()
            if number == 1 and _HEADER.match(text):
                pattern = _PIPES if "|" in text else _COMMA
                continue
            if not text:
                continue
            try:
                check_line(line)
                found = pattern.fullmatch(text)
                if found is None:
                    raise Fault("malformed_row", "it is not an image's name and its caption")
                yield maker.record(f"line {number}", maker.image(found["name"].strip()), [_unquoted(found["caption"])])
            except Fault as fault:
                yield maker.bad(f"line {number}", fault, line)


def _unquoted(text: str) -> str:
    text = text.strip()
    quoted = len(text) > 1 and text[0] == text[-1] == '"'
    return text[1:-1].replace('""', '"') if quoted else text


def _document(path: Path, source: Source, keys: tuple[str, ...]) -> dict[str, Any]:
    """Parse a JSON document whose `keys` are lists."""
    with path.open("rb") as head:
        if is_utf16(head.read(4096)):
            raise ValueError(f"{source.title}; the file is UTF-16 text. Save it as UTF-8.")
    with open_lines(path) as file:
        text = file.read()
    try:
        check_line(text)
        document = parse_json(text)
    except Fault as fault:
        raise ValueError(f"{source.title}; it is {fault.detail}. Copy or repair the file.") from fault
    missing = [key for key in keys if not isinstance(document, dict) or not isinstance(document.get(key), list)]
    if missing:
        raise ValueError(
            f"{source.title}, format={source.format}; it has no list '{missing[0]}'. Set another format=."
        )
    return document


def _present(row: dict[str, Any], key: str) -> Any:
    if key not in row:
        raise Fault("missing_column", f"there is no {key}")
    return row[key]


def _needed(row: dict[str, Any], key: str) -> str:
    if _present(row, key) is None:
        raise Fault("missing_column", f"{key} is null")
    return str(row[key])
