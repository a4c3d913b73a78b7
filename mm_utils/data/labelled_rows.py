"""Read labelled rows of a file or a `datasets` source: labels with images, texts or both."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, Features, Image, List, Value, concatenate_datasets
from datasets.exceptions import DatasetsError

from mm_utils.data.faults import Fault, excerpt
from mm_utils.data.parquet import check_files
from mm_utils.data.paths import Jail
from mm_utils.data.sources.columns import USUAL_NAMES, find_column, is_null, listed, split_of
from mm_utils.data.sources.records import image_path
from mm_utils.data.sources.tables import text_table, with_raw_images
from mm_utils.data.sources.text_files import TEXT_SUFFIXES, BadLine
from mm_utils.text import one_line

logger = logging.getLogger(__name__)

_LABELS = "label,labels,class,class_name,category,target,fine_label,multiple_choice_answer,answer,answers,gold_label"
_USUAL = {
    "label": _LABELS.split(","),
    "image": USUAL_NAMES["image"],
    "text": ("question", "hypothesis", "query", *USUAL_NAMES["caption"]),
}
_TYPES = {"label": ClassLabel, "image": Image, "text": ()}
Wanted = dict[str, str | None]
"""The column of each kind, label, image and text; None where it is found by type or name."""


@dataclass
class LabelledRows:
    """A split as it was read.

    Attributes:
        title: begins messages.
        rows: `answers`, the labels of each row by name; and, where the source has them, `text` and `image`, undecoded.
        names: the source's own names of the classes in order, if it has any.
        numbers: the labels are numbers that the source does not name.
        faults: by row, the reason why it cannot be used.
    """

    title: str
    rows: Dataset
    names: list[str] | None = None
    numbers: bool = False
    faults: dict[int, str] = field(default_factory=dict)

    def has(self, kind: str) -> bool:
        """Return whether the rows have an `image` or a `text`."""
        return kind in self.rows.column_names

    def usable(self) -> "LabelledRows":
        """Return the rows without a fault; warn of the others, refuse more than half of them."""
        count_bad(self.title, len(self.rows), list(self.faults.values()))
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
    parts: dict[str, list[dict[str, Any]]] = {}
    bad: list[str] = []
    for number, row in lines:
        if isinstance(row, BadLine):
            bad.append(row.describe(path, f"{unit} {number}"))
            continue
        try:
            parts.setdefault(split_of(row.get("split")) if divide and "split" in names else split, []).append(row)
        except Fault as fault:
            raise ValueError(f"{title}; {fault.detail}. Name the splits train, validation and test.") from fault
    count_bad(title, len(bad) + sum(map(len, parts.values())), bad)
    found = {}
    for name, rows in parts.items():
        values = {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}
        columns = _find_columns(list(values), wanted, title)
        found[name] = _build(title, {kind: values[column] for kind, column in columns.items() if column}, jail)
    return found


def read_dataset(rows: Dataset, wanted: Wanted, title: str, jail: Jail, *, text_is_path: bool = False) -> LabelledRows:
    """Read a `datasets` split; `jail` resolves image paths, texts too if `text_is_path`."""
    if not len(rows):
        raise ValueError(f"{title}; it has no rows. Choose another split or source.")
    columns = _find_columns(rows.column_names, wanted, title, rows.features)
    feature, image = rows.features[str(columns["label"])], columns["image"]
    names = list(feature.names) if isinstance(feature, ClassLabel) else None
    raw = None if image is None else with_raw_images(rows.select_columns([image]), image, title)[0]
    embedded = raw is not None and isinstance(raw.features[image], Image)
    if image is not None and not embedded and not text_is_path:
        raise ValueError(
            f"{title}; column {image} holds text. Give images, or a folder of images per class, or a file of paths as "
            "--train_file."
        )
    read = {kind: column for kind, column in columns.items() if column and not (kind == "image" and embedded)}
    table = rows.select_columns(list(read.values())).with_format("arrow")[:]
    values = {kind: table[column].to_pylist() for kind, column in read.items()}
    if not (raw and embedded):
        return _build(title, values, jail, names)
    faults: dict[int, str] = {}
    images = _with_checked_paths(raw.rename_columns({image: "image"}), jail, faults)
    return _build(title, values, jail, names, images, faults)


def _with_checked_paths(images: Dataset, jail: Jail, faults: dict[int, str]) -> Dataset:
    """Resolve the paths of images; those that the jail refuses become null, with a fault."""
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


def _find_columns(names: list[str], wanted: Wanted, title: str, features: Features | None = None) -> Wanted:
    """Find the columns of label, image and text by wanted name, by type, or by usual names."""
    found: Wanted = {}
    for kind, usual in _USUAL.items():
        left, given = [name for name in names if name not in found.values()], wanted.get(kind)
        typed = [name for name in left if features and isinstance(features[name], _TYPES[kind])]
        if given is None and len(typed) == 1:
            found[kind] = typed[0]
        else:
            found[kind] = find_column(f"--{kind}_column", names if given else typed or left, title, given, usual)
    if found["label"] is None:
        raise ValueError(f"{title}; no label column was recognised. {listed(names)} Set --label_column.")
    if found["image"] is None and found["text"] is None:
        raise ValueError(
            f"{title}; no image column and no text column was recognised. {listed(names)} Set --image_column, "
            "--text_column or both."
        )
    return found


def _build(
    title: str,
    values: dict[str, list[Any]],
    jail: Jail,
    names: list[str] | None = None,
    images: Dataset | None = None,
    faults: dict[int, str] | None = None,
) -> LabelledRows:
    """Check labels and texts, and lay them beside the images or the paths that `values` names."""
    faults = {} if faults is None else faults
    if "image" in values:
        paths = [_path(value, jail, row, faults) for row, value in enumerate(values["image"])]
        images = Dataset.from_dict({"image": paths}, Features({"image": Value("string")}))
        images = images.cast_column("image", Image(decode=False))
    answers = [_answers(label, names, title) for label in values["label"]]
    faults |= {row: "it has no label" for row, given in enumerate(answers) if not given and row not in faults}
    beside: dict[str, list[Any]] = {"answers": answers}
    features: dict[str, Any] = {"answers": List(Value("string"))}
    if "text" in values:
        bad = [row for row, text in enumerate(values["text"]) if not isinstance(text, str) or is_null(text)]
        faults |= {row: "its text is empty or no text" for row in bad if row not in faults}
        beside["text"] = [text if isinstance(text, str) else "" for text in values["text"]]
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
