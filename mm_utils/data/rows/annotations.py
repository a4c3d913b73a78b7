"""Records of annotation files: COCO captions, Karpathy's splits, Flickr8k and Flickr30k."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mm_utils.data.faults import Fault
from mm_utils.data.rows.columns import split_of
from mm_utils.data.rows.records import BadRow, Record, RecordBuilder
from mm_utils.data.rows.source import PathArguments, Source
from mm_utils.data.rows.text_files import (
    check_line,
    checked_object,
    is_wide,
    parse_json,
    read_document,
    read_lines,
)

_TOKEN = re.compile(r"(?P<name>[^\t]+)#\d+\t(?P<caption>.*)")
_PIPES = re.compile(r"(?P<name>[^|]+)\|\s*\d+\s*\|(?P<caption>.*)")
_HEADER = re.compile(r"\w+\s*[,|]\s*\w+(\s*[,|]\s*\w+)*$")
_COMMA = re.compile(r"(?P<name>[^,]+),(?P<caption>.*)")
_TOKEN_LINE = re.compile(r"^[^\t\n]+#\d+\t", re.MULTILINE)
_FLICKR_HEADER = re.compile(r"image(_name)?\s*(,\s*caption|\|\s*comment)")
_COCO_LIST = re.compile(r'"(images|annotations)"\s*:\s*\[\s*[{\]]')


def format_of(suffix: str, head: str) -> str | None:
    """Return `coco`, `karpathy` or `flickr` by the suffix and the beginning of a text file; None for others."""
    first = head.split("\n", 1)[0].strip()
    if suffix in (".json", ".jsonl"):
        is_document = suffix == ".json" and _COCO_LIST.search(head) is not None
        return None if not is_document else "karpathy" if '"sentences"' in head else "coco"
    is_table, has_header = suffix in (".csv", ".tsv"), _FLICKR_HEADER.match(head) is not None
    if _TOKEN_LINE.match(head) or (not is_table and (has_header or _TOKEN_LINE.search(head))):
        return "flickr"
    return "flickr" if suffix == ".csv" and first.count("|") >= 2 and has_header else None


def read_coco(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Join ``images`` and ``annotations`` by ``image_id``: one record an image; ValueError if no annotation has a caption."""
    document, builder = _open_document(source, safety, "images", "annotations")
    annotations: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
    for at, item in enumerate(document["annotations"]):
        try:
            row = checked_object(item)
            caption = _present(row, "caption")
            annotations[str(_present(row, "image_id"))].append((at, caption))
        except Fault as fault:
            yield builder.bad(f"annotation {at}", fault, str(item))
    if document["annotations"] and not annotations:
        raise ValueError(f"{source.title}; no annotation has image_id and caption. Give COCO's captions file.")
    seen: dict[str, int] = {}
    for at, item in enumerate(document["images"]):
        try:
            row = checked_object(item)
            key = str(_present(row, "id"))
            if key in seen:
                raise Fault("duplicate_id", f"image {seen[key]} has the id {key}, too")
            seen[key] = at
            if key not in annotations:
                raise Fault("unmatched_image", f"no annotation has the image_id {key}")
            image, _ = builder.image(_present(row, "file_name"))
            captions = [caption for _, caption in annotations[key]]
            yield builder.record(f"image {at}", (image, key), captions, split=_split_of_row(row, source))
        except Fault as fault:
            yield builder.bad(f"image {at}", fault, str(item))
    for key, left in annotations.items():
        for at, caption in left if key not in seen else ():
            yield builder.bad(
                f"annotation {at}", Fault("unmatched_caption", f"no image has the id {key}"), str(caption)
            )


def read_karpathy(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read ``images[].sentences[].raw`` with their splits; restval counts as train."""
    document, builder = _open_document(source, safety, "images")
    for at, item in enumerate(document["images"]):
        try:
            row = checked_object(item)
            sentences = row.get("sentences")
            if not isinstance(sentences, list) or not sentences:
                raise Fault("unmatched_image", "it has no sentences")
            captions = [_present(checked_object(sentence), "raw") for sentence in sentences]
            named = str(_present(row, "filename"))
            image, by_path = builder.image(f"{row['filepath']}/{named}" if row.get("filepath") else named)
            key = next((str(row[name]) for name in ("cocoid", "imgid") if row.get(name) is not None), by_path)
            yield builder.record(f"image {at}", (image, key), captions, split=_split_of_row(row, source))
        except Fault as fault:
            yield builder.bad(f"image {at}", fault, str(item))


def read_flickr(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read one caption a line: ``name.jpg#0<TAB>caption``, or below a header of columns.

    Everything after the first comma is the caption: Flickr8k's captions hold commas and are not always quoted.
    """
    builder, pattern = _builder(source, safety), _TOKEN
    for number, line in enumerate(read_lines(Path(source.path)), start=1):
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
            caption = found["caption"].strip()
            if len(caption) > 1 and caption[0] == caption[-1] == '"':
                caption = caption[1:-1].replace('""', '"')
            yield builder.record(f"line {number}", builder.image(found["name"].strip()), [caption])
        except Fault as fault:
            yield builder.bad(f"line {number}", fault, line)


def _open_document(source: Source, safety: PathArguments, *keys: str) -> tuple[dict[str, Any], RecordBuilder]:
    """Parse a JSON document whose `keys` are lists; return it with the builder of its records."""
    path, builder = Path(source.path), _builder(source, safety)
    with path.open("rb") as head:
        if is_wide(head.read(4096)):
            raise ValueError(f"{source.title}; the file is UTF-16 or UTF-32 text. Save it as UTF-8.")
    try:
        document = parse_json(read_document(path))
    except Fault as fault:
        raise ValueError(f"{source.title}; it is {fault.detail}. Copy or repair the file.") from fault
    for key in keys:
        if not isinstance(document, dict) or not isinstance(document.get(key), list):
            raise ValueError(f"{source.title}, format={source.format}; it has no list '{key}'. Set another format=.")
    return document, builder


def _builder(source: Source, safety: PathArguments) -> RecordBuilder:
    if source.medium not in ("auto", "image"):
        raise ValueError(
            f"{source.title}; {source.format} is read for images alone, and the medium is {source.medium}. Write the rows "
            "as JSONL, with the columns of paths and captions."
        )
    return RecordBuilder(source, safety)


def _split_of_row(row: dict[str, Any], source: Source) -> str | None:
    return None if source.split or row.get("split") is None else split_of(row["split"])


def _present(row: dict[str, Any], key: str) -> Any:
    if row.get(key) is None and (key not in row or key.endswith("id")):
        raise Fault("missing_column", f"there is no {key}")
    return row[key]
