"""Records of annotation files: COCO captions, Karpathy's splits, Flickr8k and Flickr30k."""

import json
import mmap
import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from mm_utils.data.faults import REASONS, Fault
from mm_utils.data.rows.columns import Columns
from mm_utils.data.rows.records import RecordBuilder, Records
from mm_utils.data.rows.source import Source
from mm_utils.data.rows.text_files import (
    LONGEST_LINE,
    Values,
    check_line,
    checked_object,
    made_rows,
    parse_json,
    read_document,
    read_lines,
)
from mm_utils.text import shortened

# '1000268201_693b08cb0e.jpg#0<TAB>A child in a pink dress', as Flickr8k has it
_TOKEN = re.compile(r"(?P<name>[^\t]+)#\d+\t(?P<caption>.*)")
# '1000092795.jpg| 0| Two young guys', as Flickr30k's table has it
_PIPES = re.compile(r"(?P<name>[^|]+)\|\s*\d+\s*\|(?P<caption>.*)")
_HEADER = re.compile(r"\w+\s*[,|]\s*\w+(\s*[,|]\s*\w+)*$")
_COMMA = re.compile(r"(?P<name>[^,]+),(?P<caption>.*)")
_TOKEN_LINE = re.compile(r"^[^\t\n]+#\d+\t", re.MULTILINE)
_FLICKR_HEADER = re.compile(r"image(_name)?\s*(,\s*caption|\|\s*comment)")
# '"images": [{' or '"annotations": []', behind `info` and `licenses` of any length
_COCO_LIST = re.compile(rb'"(images|annotations)"\s*:\s*\[\s*[{\]]')
_NEXT = 1 << 16  # bytes after the beginning of a list that tell Karpathy's splits


def format_of(path: Path, head: str) -> str | None:
    """Return `coco`, `karpathy`, `flickr`, or `csv` for a list with more columns, by a text file and its beginning; None for others."""
    suffix = path.suffix.lower()
    first = head.split("\n", 1)[0].strip()
    if suffix in (".json", ".jsonl"):
        return _format_of_document(path) if suffix == ".json" and head.lstrip().startswith("{") else None
    is_table = suffix in (".csv", ".tsv")
    has_header = _FLICKR_HEADER.match(head) is not None
    if has_header and not is_table and "|" not in first and first.count(",") > 1:
        return "csv"
    if _TOKEN_LINE.match(head) or (not is_table and (has_header or _TOKEN_LINE.search(head))):
        return "flickr"
    return "flickr" if suffix == ".csv" and first.count("|") >= 2 and has_header else None


def _format_of_document(path: Path) -> str | None:
    """Return the format of a file that begins with an object; None if its first line is one, and others follow."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        first = file.readline(LONGEST_LINE)
        more = file.read(4096).strip()
        with suppress(ValueError, RecursionError):
            if more and first.endswith(b"\n") and isinstance(json.loads(first), dict):
                return None
        if (found := _COCO_LIST.search(text)) is None:
            return None
        return "karpathy" if b'"sentences"' in text[found.start() : found.start() + _NEXT] else "coco"


def read_coco(source: Source) -> Records:
    """Join ``images`` and ``annotations`` by ``image_id``: one record an image; ValueError if no annotation has a caption."""
    # {"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [{"image_id": 1, "caption": "a dog"}]}
    document, builder = _open_document(source, "images", "annotations")
    annotations: defaultdict[str, list[tuple[str, Any]]] = defaultdict(list)
    texts = partial(_with, keys=("caption", "image_id"))
    for place, annotation in made_rows("annotation", enumerate(document["annotations"]), texts):
        if isinstance(annotation, Fault):
            yield builder.bad(place, annotation, annotation.raw)
        else:
            annotations[str(annotation["image_id"])].append((place, annotation["caption"]))
    if document["annotations"] and not annotations:
        raise ValueError(f"{source.title}; no annotation has image_id and caption. Give COCO's captions file.")
    seen = set[str]()

    def image(item: Any) -> Values:
        key = str(_with(item, ("id",))["id"])
        if key in seen:
            raise Fault("duplicate_id", f"an image before has the id {key}, too")
        seen.add(key)
        if key not in annotations:
            raise Fault("unmatched_image", f"no annotation has the image_id {key}")
        return {**item, "id": key, "captions": [caption for _, caption in annotations[key]]}

    columns = Columns("file_name", "captions", "id")
    yield from builder.records(columns, made_rows("image", enumerate(document["images"]), image))
    for key, left in annotations.items():
        for place, caption in left if key not in seen else ():
            yield builder.bad(place, Fault("unmatched_caption", f"no image has the id {key}"), str(caption))


def read_karpathy(source: Source) -> Records:
    """Read ``images[].sentences[].raw`` with their splits; restval counts as train."""
    # {"images": [{"filename": "a.jpg", "split": "val", "cocoid": 1, "sentences": [{"raw": "a dog"}]}]}
    document, builder = _open_document(source, "images")

    def image(item: Any) -> Values:
        row = checked_object(item)
        if not isinstance(sentences := row.get("sentences"), list) or not sentences:
            raise Fault("unmatched_image", "it has no sentences")
        captions = [_with(sentence, ("raw",))["raw"] for sentence in sentences]
        path = "/".join(filter(None, (row.get("filepath"), str(_with(row, ("filename",))["filename"]))))
        # COCO's number, else Karpathy's own, else the path
        key = next((row[name] for name in ("cocoid", "imgid") if row.get(name) is not None), path)
        return {"image": path, "captions": captions, "id": key, "split": row.get("split")}

    columns = Columns("image", "captions", "id")
    yield from builder.records(columns, made_rows("image", enumerate(document["images"]), image))


def read_flickr(source: Source) -> Records:
    """Read one caption a line: ``name.jpg#0<TAB>caption``, or below a header of columns.

    Everything after the first comma is the caption: Flickr8k's captions hold commas and are not always quoted.
    """
    builder = _builder(source)
    lines = enumerate(read_lines(Path(source.path)), start=1)
    first = next(read_lines(Path(source.path)), "").strip()
    pattern = _TOKEN
    has_header = _HEADER.match(first) is not None
    if has_header and "|" not in first and first.count(",") > 1:
        raise ValueError(
            f"{source.title}, format=flickr; its header has {first.count(',') + 1} columns ({shortened(first)}), and such a list "
            "has two. Set format=csv, and caption_column= where its name is not a usual one."
        )
    if has_header:
        pattern = _PIPES if "|" in first else _COMMA

    def row(line: str) -> Values:
        check_line(line)
        if (found := pattern.fullmatch(line.strip())) is None:
            raise Fault("malformed_row", "it is not an image's name and its caption")
        caption = found["caption"].strip()
        if len(caption) > 1 and caption[0] == caption[-1] == '"':
            caption = caption[1:-1].replace('""', '"')  # '"a dog ""Rex"" runs"' -> 'a dog "Rex" runs'
        return {"image": found["name"].strip(), "caption": caption}

    below = ((number, line) for number, line in lines if line.strip() and not (has_header and number == 1))
    yield from builder.records(Columns("image", "caption"), made_rows("line", below, row))


def _open_document(source: Source, *keys: str) -> tuple[Values, RecordBuilder]:
    """Parse a JSON document whose `keys` are lists; return it with the builder of its records."""
    path = Path(source.path)
    builder = _builder(source)
    try:
        document = parse_json(read_document(path))
    except Fault as fault:
        what_to_do = REASONS[fault.reason] if fault.reason == "bad_encoding" else "Copy or repair the file."
        raise ValueError(f"{source.title}; it is {fault.detail}. {what_to_do}") from fault
    for key in keys:
        if not isinstance(document, dict) or not isinstance(document.get(key), list):
            held = ", ".join(map(shortened, [*document][:10])) if isinstance(document, dict) else "a list"
            raise ValueError(
                f"{source.title}, format={source.format}; it has no list '{key}' in its outer object, but {held}. Write rows "
                "instead: one object of an image and its caption a line."
            )
    return document, builder


def _builder(source: Source) -> RecordBuilder:
    if source.medium not in ("auto", "image"):
        raise ValueError(
            f"{source.title}; {source.format} is read for images alone, and the medium is {source.medium}. Write the rows "
            "as JSONL, with the columns of paths and captions."
        )
    return RecordBuilder(source)


def _with(item: Any, keys: Iterable[str]) -> Values:
    """Return an object that has the keys, and a value for those that name something; raises the fault of another."""
    row = checked_object(item)
    for key in keys:
        # a caption may be null, which is a fault of its own; what joins the rows may not
        if row.get(key) is None and (key not in row or key.endswith("id")):
            raise Fault("missing_column", f"there is no {key}")
    return row
