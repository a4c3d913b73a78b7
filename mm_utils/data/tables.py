"""Read one table of image-caption rows: a JSONL, CSV or TSV file, or a `datasets.Dataset`.

`read_table` finds the columns and gives one `Row` per usable row. A bad row never stops the reading and is never
lost in silence: it is counted by reason, and one warning per reason names the first three. Images are not opened
here: a path is only looked up, and of embedded bytes only the length is read (the bytes too where there is no id).
"""

import difflib
import hashlib
import itertools
import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Image, Value

from mm_utils.data.text_files import text_records

logger = logging.getLogger(__name__)

_IMAGE_NAMES = "image,image_path,image_file,filepath,file_path,file_name,filename,path,img,img_path,picture,photo,jpg"
_CAPTION_NAMES = "caption,captions,text,texts,sentence,sentences,sentences_raw,raw,title,alt_text,alt,txt,description"
USUAL_NAMES = {
    "image": [*_IMAGE_NAMES.split(","), "jpeg", "png", "webp"],
    "caption": _CAPTION_NAMES.split(","),
    # `id` comes last: in files made from COCO's annotations it numbers the captions, and `image_id` the images.
    "id": ["image_id", "imgid", "cocoid", "id"],
}
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training", "restval"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}

_MISSING = "image file not found"


@dataclass(frozen=True)
class Columns:
    """Names of columns; None where there is none, or (in a request) where it is to be found."""

    image: str | None = None
    caption: str | None = None
    id: str | None = None


@dataclass(slots=True)
class Row:
    """One image with its captions; later rows of the same image are merged into the first.

    `at` counts rows from 0; `line` is the number people see. `id_from_path` says that the source has no id, so that
    equal ids below different folders are different images. `path` is absolute, or None where the bytes are embedded;
    `size` is the length of those bytes. `captions` maps each caption to its language ("" where unknown).
    """

    at: int
    line: int
    id: str
    id_from_path: bool
    path: str | None
    size: int
    captions: dict[str, str]
    regions: Any
    split: str

    def merge(self, other: "Row") -> None:
        """Take over the captions and regions of another row of the same image; repeats are kept once."""
        for caption, language in other.captions.items():
            self.captions.setdefault(caption, language)
        if not self.regions:
            self.regions = other.regions
        elif isinstance(self.regions, list) and isinstance(other.regions, list):
            self.regions = self.regions + [region for region in other.regions if region not in self.regions]


class Embedded(NamedTuple):
    """An image whose bytes lie in the table: their length, and their digest where the table has no id."""

    size: int
    digest: str | None


@dataclass
class Table:
    """An opened table: its columns are known, its rows are read by `read_table`.

    `title` opens error messages ("--train_file is pairs.jsonl"); `name` opens warnings. `root` is the folder of
    relative image paths, `id_root` the folder that ids made from paths are relative to.
    """

    title: str
    name: str
    unit: str
    root: str
    id_root: str
    names: list[str]
    columns: Columns
    records: Iterator[tuple[int, dict[str, Any]]]
    dataset: Dataset | None = None
    embedded: bool = False


@dataclass
class _Tally:
    count: int = 0
    rows: int = 0
    lines: list[int] = field(default_factory=list)

    def add(self, line: int, count: int = 1) -> None:
        self.count += count
        self.rows += 1
        if len(self.lines) < 3:
            self.lines.append(line)


class _BadRow(Exception):
    """The reason why a row cannot be used."""


def open_text_table(path: Path, title: str, root: str | None, wanted: Columns, id_root: str | None = None) -> Table:
    """Open a JSONL, CSV or TSV file; its rows are read as they are asked for.

    Raises a ValueError if the file is empty, is not what its suffix says, or lacks a column.
    """
    unit, records = text_records(path)
    first = list(itertools.islice(records, 100))
    if not first:
        raise ValueError(f"{title}; the file holds no rows. Give a file with one image and its caption per row.")
    names = list(dict.fromkeys(key for _, values in first for key in values if key is not None))
    folder = os.path.abspath(root or path.parent)
    return Table(
        title=title,
        name=str(path),
        unit=unit,
        root=folder,
        id_root=os.path.abspath(id_root or folder),
        names=names,
        columns=_find_columns(names, title, wanted),
        records=itertools.chain(first, records),
    )


def open_dataset_table(
    dataset: Dataset,
    title: str,
    name: str,
    root: str,
    wanted: Columns,
    num_proc: int | None,
    id_root: str | None = None,
) -> Table:
    """Open a `Dataset` whose image column holds paths, bytes, ``{"bytes", "path"}`` or `Image`; rows count from 0.

    Raises a ValueError if it is empty, lacks a column, or holds something else in the image column.
    """
    if len(dataset) == 0:
        raise ValueError(f"{title}; it holds no rows. Give a source with one image and its caption per row.")
    names = dataset.column_names
    typed = [name for name in names if isinstance(dataset.features[name], Image)]
    columns = _find_columns(names, title, wanted, spare_image=typed[0] if len(typed) == 1 else None)
    dataset, embedded = _with_raw_images(dataset, str(columns.image), title)
    return Table(
        title=title,
        name=name,
        unit="row",
        root=os.path.abspath(root),
        id_root=os.path.abspath(id_root or root),
        names=names,
        columns=columns,
        records=_dataset_records(dataset, columns, embedded, num_proc),
        dataset=dataset,
        embedded=embedded,
    )


def read_table(table: Table, split: str, divide: bool, by_folder: bool = False) -> Iterator[Row]:
    """Give the usable rows of `table`, and log the others when the last row is read.

    With `divide` the split of a row is the value of its `split` column; otherwise, with `by_folder`, the first folder
    of its path if that is named like a split; otherwise `split`. Raises a ValueError if no row is usable, or if more
    than half are not: then a column or the image folder is wrong, not the data.
    """
    skipped: dict[str, _Tally] = {}
    dropped = _Tally()
    total, first_missing = 0, None
    for at, (line, values) in enumerate(table.records):
        total += 1
        try:
            row = _parse(table, at, line, values, dropped)
            row.split = _split_of(row, values, table, split, divide, by_folder)
        except FileNotFoundError as error:
            first_missing = first_missing or str(error)
            skipped.setdefault(_MISSING, _Tally()).add(line)
        except UnicodeEncodeError:
            skipped.setdefault("text is not valid Unicode", _Tally()).add(line)
        except _BadRow as reason:
            skipped.setdefault(str(reason), _Tally()).add(line)
        else:
            yield row
    _report(table, total, skipped, dropped, first_missing)


def _report(table: Table, total: int, skipped: dict[str, _Tally], dropped: _Tally, first_missing: str | None) -> None:
    for reason, tally in skipped.items():
        where = _where(table.unit, tally)
        logger.warning(
            "%s: %s of %s rows skipped: %s (%s)", table.name, f"{tally.count:,}", f"{total:,}", reason, where
        )
    if dropped.count:
        where = _where(table.unit, dropped)
        logger.warning("%s: %s empty captions dropped (%s)", table.name, f"{dropped.count:,}", where)
    bad = sum(tally.count for tally in skipped.values())
    if 2 * bad <= total:
        return
    left = "zero pairs are" if bad == total else f"only {total - bad:,} pairs are"
    reasons = ", ".join(f"{reason}: {tally.count:,}" for reason, tally in skipped.items())
    if max(skipped, key=lambda reason: skipped[reason].count) == _MISSING:
        advice = f"The first image was looked for at {first_missing}. Set --image_root to the folder of the images."
    else:
        advice = "Check --image_column and --caption_column, or repair the rows."
    raise ValueError(f"{table.title}; {left} left of {total:,} rows ({reasons}). {advice}")


def _where(unit: str, tally: _Tally) -> str:
    plural = "s" if tally.rows > 1 else ""
    return f"{unit}{plural} {', '.join(map(str, tally.lines))}{' ...' if tally.rows > len(tally.lines) else ''}"


def _parse(table: Table, at: int, line: int, values: dict[str, Any], dropped: _Tally) -> Row:
    if None in values:
        raise _BadRow("more cells than columns; a separator without quotes?")
    path, size, key = _image(values.get(str(table.columns.image)), table)
    captions, empty = _captions(values.get(str(table.columns.caption)), values.get("languages"))
    if table.columns.id is not None:
        given = values.get(table.columns.id)
        if _is_empty(given):
            raise _BadRow("id is empty")
        key = str(given)
    # A lone surrogate, as a broken "\ud83d" in JSON gives, is a string in Python but cannot be stored as UTF-8.
    "\n".join((key, path or "", *captions)).encode()
    if empty:
        dropped.add(line, empty)
    from_path = table.columns.id is None and path is not None
    return Row(at, line, key, from_path, path, size, captions, values.get("regions"), "")


def _image(value: Any, table: Table) -> tuple[str | None, int, str]:
    """Give the absolute path, the number of embedded bytes, and the id that follows from the image itself."""
    if isinstance(value, Embedded):
        if value.size == 0:
            raise _BadRow("image bytes are empty")
        return None, value.size, value.digest or ""
    if isinstance(value, dict):
        value = value.get("path")
    if _is_empty(value):
        raise _BadRow("image is empty")
    if not isinstance(value, str):
        raise _BadRow("image is not a path")
    if value.startswith(("http://", "https://")):
        raise _BadRow("image is a URL; download it first")
    path = os.path.normpath(os.path.join(table.root, value))
    if not os.path.isfile(path):
        raise FileNotFoundError(path)
    inside = path.startswith(table.id_root + os.sep)
    return path, 0, path[len(table.id_root) + 1 :].replace(os.sep, "/") if inside else value


def _captions(value: Any, languages: Any) -> tuple[dict[str, str], int]:
    """Give the usable captions with their languages, and how many of a list were not usable."""
    texts = value if isinstance(value, list) else [value]
    names = languages if isinstance(languages, list) else [languages] * len(texts)
    if len(names) != len(texts):
        raise _BadRow("captions and languages differ in number")
    good: dict[str, str] = {}
    empty = 0
    for text, language in zip(texts, names, strict=True):
        if _is_empty(text):
            empty += 1
        elif isinstance(text, str):
            good.setdefault(text, "" if _is_empty(language) else str(language))
        else:
            raise _BadRow("caption is not a string")
    if not good:
        raise _BadRow("caption is empty")
    return good, empty


def _is_empty(value: Any) -> bool:
    """Null as JSON, CSV and pandas write it; "nan" is what `str` makes of pandas' null."""
    if isinstance(value, str):
        return not value.strip() or value.strip() in ("nan", "NaN")
    return value is None or (isinstance(value, float) and math.isnan(value))


def _split_of(row: Row, values: dict[str, Any], table: Table, split: str, divide: bool, by_folder: bool) -> str:
    if divide and "split" in table.names:
        name = SPLIT_NAMES.get(str(values.get("split")).strip().lower())
        if name is None:
            raise _BadRow("split is not train, validation or test")
        return name
    if by_folder and row.path is not None:
        folder = os.path.relpath(row.path, table.root).split(os.sep)[0]
        return SPLIT_NAMES.get(folder.lower(), split)
    return split


def _find_columns(names: Sequence[str], title: str, wanted: Columns, spare_image: str | None = None) -> Columns:
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
        if found[kind] is None and kind != "id":
            raise ValueError(f"{title}; no {kind} column was recognised. {_listed(names)} Set --{kind}_column.")
    if found["id"] == found["image"]:
        found["id"] = None
    return Columns(**found)


def _listed(names: Sequence[str]) -> str:
    return f"The columns are: {', '.join(names)}."


def _with_raw_images(dataset: Dataset, column: str, title: str) -> tuple[Dataset, bool]:
    """Make the image column undecoded `Image` or plain paths, and say whether it holds the images' bytes."""
    feature = dataset.features[column]
    dtype = feature.dtype if isinstance(feature, Value) else ""
    if dtype in ("string", "large_string"):
        return dataset, False
    is_struct = isinstance(feature, dict) and set(feature) == {"bytes", "path"}
    if not (isinstance(feature, Image) or is_struct or dtype in ("binary", "large_binary")):
        raise ValueError(
            f"{title}; the image column {column} holds {feature}, not paths or images. Set --image_column."
        )
    dataset = dataset.cast_column(column, Image(decode=False))
    stored = pc.struct_field(dataset.data.column(column), "bytes")
    return dataset, stored.null_count < len(stored)


def _dataset_records(
    dataset: Dataset, columns: Columns, embedded: bool, num_proc: int | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    image = str(columns.image)
    needed = (columns.caption, columns.id, "split", "languages", "regions")
    others = [name for name in dataset.column_names if name in needed and name != image]
    digests = iter(_digests(dataset, image, num_proc)) if embedded and columns.id is None else itertools.repeat(None)
    at = itertools.count()
    for batch in dataset.select_columns([image, *others]).with_format("arrow").iter(batch_size=1000):
        if embedded:
            sizes = pc.binary_length(pc.struct_field(batch[image], "bytes")).to_pylist()
            images: list[Any] = [Embedded(size or 0, next(digests)) for size in sizes]
        else:
            images = batch[image].to_pylist()
        for value, record in zip(images, batch.select(others).to_pylist(), strict=True):
            yield next(at), {**record, image: value}


def _digests(dataset: Dataset, image: str, num_proc: int | None) -> list[str]:
    """Hash the images' bytes, so that equal images get equal ids on every machine; `datasets` caches the result."""
    hashed = (
        dataset.select_columns([image])
        .with_format("arrow")
        .map(
            _hash_batch,
            fn_kwargs={"image": image},
            batched=True,
            batch_size=256,
            remove_columns=[image],
            num_proc=num_proc,
            desc="Hashing images",
        )
    )
    return hashed.with_format("arrow")[:]["digest"].to_pylist()


def _hash_batch(batch: pa.Table, image: str) -> pa.Table:
    stored = pc.struct_field(batch[image], "bytes")
    digests = [hashlib.blake2b(item.as_buffer() or b"", digest_size=16).hexdigest() for item in stored]
    return pa.table({"digest": digests})
