"""Open labelled rows: a table with columns of labels and of images or texts, in a file or a `datasets` source."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets.exceptions import DatasetsError

from mm_utils.data.labelled import LABEL_NAMES, find_column, recognise_column
from mm_utils.data.raw.columns import SPLIT_NAMES, USUAL_NAMES, is_null, split_of
from mm_utils.data.raw.faults import Fault
from mm_utils.data.raw.paths import Jail
from mm_utils.data.raw.tables import image_path, one_line, with_raw_images
from mm_utils.data.raw.text_files import TEXT_SUFFIXES, BadLine, text_records

logger = logging.getLogger(__name__)

TEXT_NAMES = ("question", "hypothesis", "query", *USUAL_NAMES["caption"])
ANSWER_NAMES = ("multiple_choice_answer", "answer", "answers", "gold_label")


@dataclass
class Labelled:
    """A split as it was read: of every row its label, and its text, its image, or both.

    Attributes:
        title: opens messages.
        labels: names, numbers, or lists of answers.
        names: of the classes, where labels are numbers that the source names; such a number below 0 is no label.
        texts: None if there are none.
        images: a column `image`, not decoded; None if there is none.
        keys: what tells the images apart, where it is known.
    """

    title: str
    labels: list[Any]
    names: list[str] | None
    texts: list[str] | None
    images: datasets.Dataset | None
    keys: list[str] | None = None

    def select(self, rows: Sequence[int]) -> "Labelled":
        """Only these rows, in this order."""

        def of(values: list[Any] | None) -> list[Any] | None:
            return None if values is None else [values[row] for row in rows]

        images = None if self.images is None else self.images.select(rows)
        labels = [self.labels[row] for row in rows]
        return Labelled(self.title, labels, self.names, of(self.texts), images, of(self.keys))


Columns = dict[str, str | None]
"""The wanted column of each kind, image, text and label; None where it is to be found."""


def open_splits(source: datasets.DatasetDict, columns: Columns, title: str) -> dict[str, Labelled]:
    """The splits of a `datasets` source that are train, validation or test by their names.

    Raises:
        ValueError: if there is none, or one lacks a column.
    """
    found: dict[str, Labelled] = {}
    for given, rows in source.items():
        split = SPLIT_NAMES.get(str(given).lower())
        if split is None or split in found:
            logger.warning("%s: split %s is not used; known are train, validation and test, each once", title, given)
            continue
        found[split] = _open_dataset(rows, columns, f"{title}, split {given}")
    if not found:
        raise ValueError(f"{title}; its splits are {', '.join(source)}. Name them train, validation and test.")
    return found


def open_files(
    files: dict[str, str], columns: Columns, image_root: str | None, allow_outside: bool
) -> dict[str, Labelled]:
    """A file a split, or one file whose column `split` divides it. Paths in it lead to files below `image_root`.

    Raises:
        ValueError: if there is no such file, a line cannot be parsed, a column is missing, or more than half of the rows
            are unusable; others are left out with a warning.
    """
    found: dict[str, Labelled] = {}
    for split, file in files.items():
        path, title = Path(file), f"--{split}_file is {file}"
        if not path.is_file():
            raise ValueError(f"{title}; there is no such file. Check the path.")
        jail = Jail(image_root or str(path.parent), allow_outside)
        if path.suffix.lower() == ".parquet":
            found[split] = _open_dataset(_read_parquet(path, title), columns, title, jail)
            continue
        if path.suffix.lower() not in TEXT_SUFFIXES:
            known = ", ".join((*TEXT_SUFFIXES, ".parquet"))
            raise ValueError(f"{title}; its format is not known by '{path.suffix}'. Known are {known}.")
        rows = _read_text(path, title)
        parts = {split: rows}
        if len(files) == 1 and "split" in rows[0]:
            parts = {}
            for row in rows:
                parts.setdefault(_split(row, title), []).append(row)
        for name, part in parts.items():
            names = list(dict.fromkeys(key for row in part for key in row))
            values = {key: [row.get(key) for row in part] for key in names}
            found[name] = _open_columns(values, columns, title, jail)
    return found


def _split(row: dict[str, Any], title: str) -> str:
    try:
        return split_of(row.get("split"))
    except Fault as fault:
        raise ValueError(f"{title}; {fault.detail}. Name the splits train, validation and test.") from fault


def _read_text(path: Path, title: str) -> list[dict[str, Any]]:
    rows = []
    for _, row in text_records(path)[1]:
        if isinstance(row, BadLine):
            raise ValueError(row.message)
        rows.append(row)
    if not rows:
        raise ValueError(f"{title}; the file holds no rows. Give a file with a label and an image or text per row.")
    return rows


def _read_parquet(path: Path, title: str) -> datasets.Dataset:
    try:
        return datasets.Dataset.from_parquet(str(path))  # type: ignore[return-value]
    except (DatasetsError, pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{title}; it cannot be read as Parquet ({one_line(error)}). Write it anew.") from error


def _open_dataset(rows: datasets.Dataset, columns: Columns, title: str, jail: Jail | None = None) -> Labelled:
    """`jail` resolves paths that are text; the images of a `datasets` source without one are in its own cache."""
    if not len(rows):
        raise ValueError(f"{title}; it has no rows. Give others.")
    features = rows.features
    typed = {
        kind: [name for name, feature in features.items() if isinstance(feature, type_)]
        for kind, type_ in (("image", datasets.Image), ("label", datasets.ClassLabel))
    }
    image, text, label = _find(list(features), columns, typed, title)
    feature = features[label]
    names = list(feature.names) if isinstance(feature, datasets.ClassLabel) else None
    others = rows.select_columns([name for name in (text, label) if name]).with_format("arrow")[:]
    labels, texts = others[label].to_pylist(), others[text].to_pylist() if text else None
    if image is None:
        return _usable(Labelled(title, labels, names, texts, None))
    stored = with_raw_images(rows.select_columns([image]), image, title)[0].rename_columns({image: "image"})
    if isinstance(stored.features["image"], datasets.Image):
        return _usable(Labelled(title, labels, names, texts, stored))
    if jail is None:
        raise ValueError(f"{title}; column {image} holds text. Give images, or the file as --train_file.")
    values = {image: stored["image"], label: labels, **({text: texts} if text else {})}
    return replace_names(_open_columns(values, {"image": image, "text": text, "label": label}, title, jail), names)


def replace_names(rows: Labelled, names: list[str] | None) -> Labelled:
    """With these names of its classes."""
    return Labelled(rows.title, rows.labels, names, rows.texts, rows.images, rows.keys)


def _open_columns(values: dict[str, list[Any]], columns: Columns, title: str, jail: Jail) -> Labelled:
    """Rows of a file, whose images are paths."""
    image, text, label = _find(list(values), columns, {}, title)
    if image is None:
        return _usable(Labelled(title, values[label], None, values[text] if text else None, None))
    paths: list[str | None] = []
    reasons: list[str] = []
    for value in values[image]:
        try:
            paths.append(image_path(value, jail))
        except Fault as fault:
            paths.append(None)
            reasons.append(fault.detail)
    plain = datasets.Dataset.from_dict({"image": paths}, datasets.Features({"image": datasets.Value("string")}))
    images = plain.cast_column("image", datasets.Image(decode=False))
    rows = Labelled(title, values[label], None, values[text] if text else None, images, [str(path) for path in paths])
    return _usable(rows, [path is not None for path in paths], reasons)


def _find(
    names: list[str], columns: Columns, typed: dict[str, list[str]], title: str
) -> tuple[str | None, str | None, str]:
    """Columns of image, text and label."""
    label_names = (*LABEL_NAMES, *ANSWER_NAMES)
    label = find_column("label", names, columns["label"], typed.get("label", []), label_names, title)
    others = [name for name in names if name != label]
    image = recognise_column("image", others, columns["image"], typed.get("image", []), USUAL_NAMES["image"], title)
    others = [name for name in others if name != image]
    text = recognise_column("text", others, columns["text"], [], TEXT_NAMES, title)
    if image is None and text is None:
        raise ValueError(
            f"{title}; no image column and no text column was recognised. The columns are: {', '.join(names)}. "
            "Set --image_column, --text_column or both."
        )
    return image, text, label


def _usable(rows: Labelled, has_image: list[bool] | None = None, reasons: Sequence[str] = ()) -> Labelled:
    """The rows that have a label, a text where there is a column of them, and an image that exists."""
    count, reasons = len(rows.labels), list(reasons)
    kept = []
    for row, label in enumerate(rows.labels):
        text = rows.texts[row] if rows.texts is not None else "none needed"
        if _is_no_label(label, rows.names):
            reasons.append("it has no label")
        elif not isinstance(text, str) or is_null(text):
            reasons.append("its text is empty or no text")
        elif has_image is None or has_image[row]:
            kept.append(row)
    if 2 * len(kept) < count or not kept:
        raise ValueError(
            f"{rows.title}; {len(kept):,} of {count:,} rows are usable ({reasons[0]}). Check the columns of images, texts "
            "and labels, or choose data whose labels are public."
        )
    if len(kept) < count:
        logger.warning(
            "%s: %s of %s rows are left out (%s)", rows.title, f"{count - len(kept):,}", f"{count:,}", reasons[0]
        )
        return rows.select(kept)
    return rows


def _is_no_label(label: Any, names: list[str] | None) -> bool:
    return is_null(label) or label == [] or (names is not None and isinstance(label, int) and label < 0)
