"""Read labelled rows of a file or a `datasets` source: with media, texts, or both."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, Features, Image, List, Value, concatenate_datasets
from datasets.exceptions import DatasetsError

from mm_utils.data.faults import Fault, excerpt
from mm_utils.data.media import FEATURES
from mm_utils.data.parquet import check_files
from mm_utils.data.paths import Jail
from mm_utils.data.prepare.cache import TIMES, media_records, store_media
from mm_utils.data.rows.columns import (
    MEDIUM_NAMES,
    SUFFIXES,
    USUAL_NAMES,
    Columns,
    find_column,
    is_null,
    kind_of_value,
    listed,
    names_of,
    split_of,
)
from mm_utils.data.rows.records import image_path
from mm_utils.data.rows.tables import dataset_rows, text_table, with_raw_images
from mm_utils.data.rows.text_files import TEXT_SUFFIXES, BadLine
from mm_utils.text import one_line

logger = logging.getLogger(__name__)

_LABELS = "label,labels,class,class_name,category,target,fine_label,multiple_choice_answer,answer,answers,gold_label"
_TEXTS = ("question", "hypothesis", "query", *USUAL_NAMES["caption"])


@dataclass(frozen=True)
class Wanted:
    """What to look for.

    Attributes:
        label, image, text: names of columns; None where they are found by type or usual names. `image` is that of the media.
        medium: the kind of media that the model is for: image, clip or sound.
        workers: processes that decode clips and sounds; None takes all cores.
    """

    label: str | None = None
    image: str | None = None
    text: str | None = None
    medium: str = "image"
    workers: int | None = None


@dataclass
class LabelledRows:
    """A split as it was read.

    Attributes:
        title: begins messages.
        rows: `answers`, the labels of each row by name; and, where the source has them, `text` and `image`, undecoded. Clips
            and sounds are as prepared sets store them, with `seconds`, and the `file_hash` that parts of a file have in common.
        names: the source's own names of the classes in order, if it has any.
        numbers: the labels are numbers that the source does not name.
        faults: by row, the column, and the reason why it cannot be used.
        places: where each row stands in the source; None for the number of the row.
    """

    title: str
    rows: Dataset
    names: list[str] | None = None
    numbers: bool = False
    faults: dict[int, str] = field(default_factory=dict)
    places: list[str] | None = None

    def has(self, kind: str) -> bool:
        """Return whether the rows have an `image` or a `text`."""
        return kind in self.rows.column_names

    def usable(self) -> "LabelledRows":
        """Return the rows without a fault; warn of others, refuse a source if they are most."""
        places = self.places or [f"row {row}" for row in range(len(self.rows))]
        count_bad(self.title, len(self.rows), [f"{places[row]}, {self.faults[row]}" for row in sorted(self.faults)])
        kept = [row for row in range(len(self.rows)) if row not in self.faults]
        return LabelledRows(self.title, self.rows.select(kept), self.names, self.numbers) if self.faults else self


def read_file(path: Path, split: str, wanted: Wanted, title: str, jail: Jail, divide: bool) -> dict[str, LabelledRows]:
    """Read a file as one split or, where `divide` and it has a column `split`, as several."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        try:
            check_files([str(path)])
            rows = Dataset.from_parquet(str(path))
            return {split: read_dataset(rows, wanted, title, jail, text_is_path=True)}  # type: ignore[arg-type]
        except (DatasetsError, pa.ArrowException, OSError) as error:
            reason = one_line(error.__cause__ or error)
            raise ValueError(f"{title}; it cannot be read as Parquet ({reason}). Write it anew.") from error
    if suffix not in TEXT_SUFFIXES:
        known = ", ".join((*TEXT_SUFFIXES, ".parquet"))
        raise ValueError(f"{title}; its format is not known by '{path.suffix}'. Known are {known}.")
    unit, names, lines = text_table(path, title)
    parts: dict[str, dict[str, dict[str, Any]]] = {}  # of each split, by place
    bad: list[str] = []
    for number, row in lines:
        if isinstance(row, BadLine):
            bad.append(row.describe(path, f"{unit} {number}"))
            continue
        try:
            of_split = parts.setdefault(split_of(row.get("split")) if divide and "split" in names else split, {})
            of_split[f"{unit} {number}"] = row
        except Fault as fault:
            raise ValueError(f"{title}; {fault.detail}. Name the splits train, validation and test.") from fault
    count_bad(title, len(bad) + sum(map(len, parts.values())), bad)
    found = {}
    for name, rows in parts.items():
        keys = dict.fromkeys(key for row in rows.values() for key in row)
        values = {key: [row.get(key) for row in rows.values()] for key in keys}
        first = {key: next((each for each in held if not is_null(each)), None) for key, held in values.items()}
        columns = _find_columns(first, wanted, title)
        read = {kind: values[column] for kind, column in columns.items() if column}
        read |= {key: values[key] for key in TIMES if key in values}
        found[name] = _build(title, columns, read, jail, wanted)
        found[name].places = list(rows)
    return found


def read_dataset(rows: Dataset, wanted: Wanted, title: str, jail: Jail, *, text_is_path: bool = False) -> LabelledRows:
    """Read a `datasets` split; `jail` resolves media's paths, as texts too if `text_is_path`."""
    if not len(rows):
        raise ValueError(f"{title}; it has no rows. Choose another split or source.")
    [first] = rows.with_format("arrow")[:1].to_pylist()
    columns = _find_columns(first, wanted, title, rows.features)
    feature, image = rows.features[str(columns["label"])], columns["image"]
    names = list(feature.names) if isinstance(feature, ClassLabel) else None
    read = {kind: name for kind, name in columns.items() if name and kind != "image"}
    table = rows.select_columns(list(read.values())).with_format("arrow")[:]
    values = {kind: table[name].to_pylist() for kind, name in read.items()}
    if image is None:
        return _build(title, columns, values, jail, wanted, names)
    own = rows.select_columns([image]) if wanted.medium == "image" else rows
    raw, embedded = with_raw_images(own, image, title, wanted.medium)
    is_media = isinstance(raw.features[image], type(FEATURES[wanted.medium]))
    if not is_media and not text_is_path:
        raise ValueError(
            f"{title}; column {image} holds text. Give {wanted.medium}s, or a folder of {wanted.medium}s per class, or a file "
            "of paths as --train_file."
        )
    if wanted.medium == "image" and is_media:
        faults: dict[int, str] = {}
        images = _with_checked_paths(raw.rename_columns({image: "image"}), jail, faults)
        faults = {row: f"column {image}: {fault}" for row, fault in faults.items()}
        return _build(title, columns, values, jail, wanted, names, images, faults)
    beside = Columns(image, columns["label"], medium=wanted.medium)
    media = [row for _, row in dataset_rows(rows, raw, beside, embedded) if isinstance(row, dict)]
    values |= {name: [row[name] for row in media] for name in TIMES if name in media[0]}
    return _build(title, columns, values | {"image": [row[image] for row in media]}, jail, wanted, names)


def media_of(rows: Dataset) -> Dataset:
    """Return the columns of the media alone: the file, and how long a clip or a sound lasts."""
    return rows.select_columns([name for name in ("image", "seconds") if name in rows.column_names])


def _with_checked_paths(images: Dataset, jail: Jail, faults: dict[int, str]) -> Dataset:
    """Resolve paths of images without bytes; refused ones become null, with a fault each."""
    column = images.with_format("arrow")[:]["image"]
    if not pc.struct_field(column, "bytes").null_count:
        return images
    chunks, row = [], 0
    for chunk in column.chunks:
        contents, paths = pc.struct_field(chunk, "bytes"), pc.struct_field(chunk, "path").to_pylist()
        for at, content in enumerate(contents):
            if not content.is_valid:
                paths[at] = _path(paths[at], jail, row + at, faults)
        chunks.append(pa.StructArray.from_arrays([contents, pa.array(paths, pa.string())], ["bytes", "path"]))
        row += len(chunk)
    return Dataset(pa.table({"image": pa.chunked_array(chunks)})).cast_column("image", Image(decode=False))


def _find_columns(
    first: Mapping[str, Any], wanted: Wanted, title: str, features: Features | None = None
) -> dict[str, str | None]:
    """Find the columns of label, image and text by wanted name, by type, or by usual names.

    Args:
        first: the columns, each with its first value.
        features: their types, if the source has any.
    """
    found: dict[str, str | None] = {}
    types = {"label": ClassLabel, "image": type(FEATURES[wanted.medium]), "text": ()}
    usual = {"label": _LABELS.split(","), "image": names_of(wanted.medium), "text": _TEXTS}
    for kind in usual:
        left, given = [name for name in first if name not in found.values()], getattr(wanted, kind)
        typed = [name for name in left if features and isinstance(features[name], types[kind])]
        if given is None and len(typed) == 1:
            found[kind] = typed[0]
        else:
            names = list(first) if given else typed or left
            found[kind] = find_column(f"--{kind}_column", names, title, given, usual[kind])
    if found["label"] is None:
        raise ValueError(f"{title}; no label column was recognised. {listed(list(first))} Set --label_column.")
    _check_kind(found["image"], first, wanted.medium, title, features or {})
    if found["image"] is None and found["text"] is None:
        raise ValueError(
            f"{title}; no {wanted.medium} column and no text column was recognised. {listed(list(first))} Set --image_column, "
            "--text_column or both."
        )
    return found


def _check_kind(
    column: str | None, first: Mapping[str, Any], medium: str, title: str, features: Mapping[str, Any]
) -> None:
    """Raise ValueError if the media's column, or one of a usual name, holds another kind."""
    for name in first if column is None else [column]:
        value = first[name]
        typed = next((kind for kind, each in FEATURES.items() if isinstance(features.get(name), type(each))), None)
        kind = typed or kind_of_value(value) or medium
        is_media = bool(typed or column) or name.lower() in MEDIUM_NAMES[kind]
        may_be = str(value).lower().endswith(SUFFIXES[medium]) or (medium == "sound" and kind == "clip")
        if kind != medium and is_media and not (column and may_be):
            refuse_kind(f"{title}; the column {name}", kind, medium)


def refuse_kind(what: str, kind: str, medium: str) -> NoReturn:
    """Raise the ValueError that `what` holds media of another kind than the model's."""
    raise ValueError(
        f"{what} holds {kind}s, and the model is for {medium}s. Give {medium}s, or --model_name_or_path of a model for "
        f"{kind}s."
    )


def _build(
    title: str,
    columns: Mapping[str, str | None],
    values: dict[str, list[Any]],
    jail: Jail,
    wanted: Wanted,
    names: list[str] | None = None,
    images: Dataset | None = None,
    faults: dict[int, str] | None = None,
) -> LabelledRows:
    """Check labels and texts, and lay them beside the images or the paths that `values` names."""
    faults = {} if faults is None else faults

    def add(kind: str, found: Mapping[int, str]) -> None:
        for row, fault in found.items():
            faults.setdefault(row, f"column {columns[kind]}: {fault}")

    has_media, bad = images is not None or "image" in values, dict[int, str]()
    if "image" in values and wanted.medium != "image":
        records = media_records(values, wanted.medium, jail, bad)
        images, unread = store_media(records, wanted.workers)
        bad = unread | bad
    elif "image" in values:
        paths = [_path(value, jail, row, bad) for row, value in enumerate(values["image"])]
        images = Dataset.from_dict({"image": paths}, Features({"image": Value("string")}))
        images = images.cast_column("image", Image(decode=False))
    add("image", bad)
    answers = [_answers(label, names, title) for label in values["label"]]
    add("label", {row: "it has no label" for row, given in enumerate(answers) if not given})
    beside: dict[str, list[Any]] = {"answers": answers}
    features: dict[str, Any] = {"answers": List(Value("string"))}
    texts = values.get("text")
    if texts and has_media and wanted.text is None and all(isinstance(text, list) for text in texts):
        logger.info("%s: the lists of captions in %s are not read", title, columns["text"])
        texts = None
    if texts is not None:
        wrong = (row for row, text in enumerate(texts) if not isinstance(text, str) or is_null(text))
        add("text", dict.fromkeys(wrong, "its text is empty or no text"))
        beside["text"] = [text if isinstance(text, str) else "" for text in texts]
        features["text"] = Value("string")
    rows = Dataset.from_dict(beside, Features(features))
    if images is not None:
        rows = concatenate_datasets([images, rows], axis=1)
    numbers = names is None and not any(isinstance(label, (str, list)) for label in values["label"])
    return LabelledRows(title, rows, names, numbers, faults)


def _path(value: Any, jail: Jail, row: int, faults: dict[int, str]) -> str | None:
    try:
        return image_path(value.get("path") if isinstance(value, dict) else value, jail)
    except Fault as fault:
        faults[row] = fault.detail
        return None


def _answers(label: Any, names: list[str] | None, title: str) -> list[str]:
    """Return the names of a row's labels: several people may have answered one question."""
    found = []
    for value in label if isinstance(label, list) else [label]:
        value = value.get("answer", value) if isinstance(value, dict) else value
        if isinstance(value, (list, dict)):
            shown = excerpt(str(value))[:40]
            raise ValueError(f"{title}; a label is {shown}, not a name or a number. Set --label_column.")
        if names is not None and isinstance(value, int):
            found += [names[value]] if value >= 0 else []
        elif not is_null(value):
            found.append(str(value).strip())
    return found


def count_bad(title: str, count: int, reasons: Sequence[str]) -> None:
    """Warn of bad rows; refuse a source if more than half of its rows are bad."""
    good = count - len(reasons)
    if 2 * good < count or not good:
        raise ValueError(
            f"{title}; {good:,} of {count:,} rows are usable ({reasons[0]}). Check the columns of images, texts and labels, "
            "or choose data whose labels are public."
        )
    if reasons:
        logger.warning("%s: %s of %s rows are left out (%s)", title, f"{len(reasons):,}", f"{count:,}", reasons[0])
