"""Labelled media and texts, to fine-tune on (`load_task`) and for zero-shot evaluation (`load_labelled`).

A file, a data set, a folder per class, shards as CLIP_benchmark writes them, or a prepared set becomes `LabelledRows`: the media
undecoded, the texts, and the answers of each row by name. A row that cannot be used is left out with a warning, and a source is
refused if more than half of its rows are. A row of a task is in the schema of `mm_utils.data.pairs`, with one text as its
`captions` and its class as `label`; what it has none of is filled in, an empty text or the smallest medium, and not read.
"""

import hashlib
import heapq
import itertools
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import datasets
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from accelerate import Accelerator
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, List, Value, concatenate_datasets
from datasets.exceptions import DatasetsError
from torch import Tensor
from transformers import ProcessorMixin

from mm_utils import distributed
from mm_utils.arguments import arg
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.batches.tokens import tokenize_splits
from mm_utils.data.benchmarks import CLASSIFICATION, Benchmark, find_benchmark
from mm_utils.data.faults import Fault, excerpt, is_hopeless
from mm_utils.data.images import encode
from mm_utils.data.media import FEATURES, kind_of
from mm_utils.data.media.medium import kind_of_processor
from mm_utils.data.media.riff import write_avi, write_wav
from mm_utils.data.parquet import cells_of, check_files
from mm_utils.data.paths import Jail, Limits, check_own_file
from mm_utils.data.paths import read_file as read_file_bytes
from mm_utils.data.prepare.on_disk import is_prepared, open_prepared
from mm_utils.data.rows.class_folders import class_names, read_classes
from mm_utils.data.rows.columns import (
    MEDIUM_NAMES,
    SPLIT_NAMES,
    SPLITS,
    SUFFIXES,
    USUAL_NAMES,
    Columns,
    find_column,
    hold_out,
    is_null,
    kind_of_value,
    listed,
    names_of,
    spelt_otherwise,
    split_of,
)
from mm_utils.data.rows.detect import holds_shards, kinds_of_folder
from mm_utils.data.rows.folders import split_of_path
from mm_utils.data.rows.records import Record, image_path
from mm_utils.data.rows.source import PathArguments, Source
from mm_utils.data.rows.stored import dataset_jail, load_splits
from mm_utils.data.rows.tables import dataset_rows, text_table, with_raw_images
from mm_utils.data.rows.tars import read_shard, shard_paths
from mm_utils.data.rows.text_files import TEXT_SUFFIXES, BadLine
from mm_utils.data.scenes import load_scenes
from mm_utils.data.sets import SETS
from mm_utils.data.sets.questions import TASKS
from mm_utils.data.training_data import Schedule, TrainingData, make_data
from mm_utils.finetuning.media import TIMES, media_records, store_media
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
        _leave_out(self.title, len(self.rows), [f"{places[row]}, {self.faults[row]}" for row in sorted(self.faults)])
        kept = [row for row in range(len(self.rows)) if row not in self.faults]
        return LabelledRows(self.title, self.rows.select(kept), self.names, self.numbers) if self.faults else self


def read_file(path: Path, split: str, wanted: Wanted, title: str, jail: Jail, divide: bool) -> dict[str, LabelledRows]:
    """Read a file as one split or, where `divide` and it has a column `split`, as several."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        try:
            check_files([str(path)])
            features = _features_of_file(str(path))
            rows = Dataset.from_parquet(str(path), features=features, columns=features and list(features))
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
    _leave_out(title, len(bad) + sum(map(len, parts.values())), bad)
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
    first = next(iter(_cells(rows.with_format("arrow")[:1]))) or dict.fromkeys(rows.column_names)
    columns = _find_columns(first, wanted, title, rows.features)
    feature, image = rows.features[str(columns["label"])], columns["image"]
    names = list(feature.names) if isinstance(feature, ClassLabel) else None
    read = {kind: name for kind, name in columns.items() if name and kind != "image"}
    cells = list(_cells(rows.select_columns(list(read.values())).with_format("arrow")[:]))
    values = {kind: [row and row[name] for row in cells] for kind, name in read.items()}
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
    media = [row if isinstance(row, dict) else {} for _, row in dataset_rows(rows, raw, beside, embedded)]
    values |= {name: [row.get(name) for row in media] for name in TIMES if name in rows.column_names}
    return _build(title, columns, values | {"image": [row.get(image) for row in media]}, jail, wanted, names)


def _cells(table: pa.Table) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of a table, None for one with a text that is not UTF-8."""
    for batch in table.to_batches():
        yield from (None if isinstance(row, Fault) else row for row in cells_of(batch))


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
            found[kind] = found[kind] or (spelt_otherwise(names, usual[kind]) if kind != "text" else None)
    if found["label"] is None:
        raise ValueError(f"{title}; no label column was recognised. {listed(list(first))} Set --label_column.")
    _check_kind(found["image"], first, wanted.medium, title, features or {})
    unread = [
        name
        for name in first
        if isinstance(first[name], str) and first[name].lower().endswith(SUFFIXES[wanted.medium])
    ]
    if found["image"] is None and unread:
        logger.warning(
            "%s: the column %s names files of %ss and is not read. Set --image_column %r to read them.",
            title, unread[0], wanted.medium, unread[0],
        )  # fmt: skip
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


def _leave_out(title: str, count: int, reasons: Sequence[str]) -> None:
    """Warn of bad rows; refuse a source if more than half of its rows are bad."""
    good = count - len(reasons)
    if is_hopeless(len(reasons), count) or not good:
        raise ValueError(
            f"{title}; {good:,} of {count:,} rows are usable ({reasons[0]}). Check the columns of images, texts and labels, "
            "or choose data whose labels are public."
        )
    if reasons:
        logger.warning("%s: %s of %s rows are left out (%s)", title, f"{len(reasons):,}", f"{count:,}", reasons[0])


_STORED = (".parquet", ".arrow", ".tar")  # files of data sets, which `datasets` reads


def read_class_folder(name: str, wanted: Wanted, title: str, paths: PathArguments) -> dict[str, LabelledRows] | None:
    """Read clips or sounds in a folder per class, also below splits; None if it holds others.

    Raises:
        ValueError: if it holds clips or sounds alone, and the model is for others.
    """
    folder = Path(name)
    kinds = kinds_of_folder(folder) if folder.is_dir() else {}
    holds_images = "image" in kinds and (wanted.medium == "image" or wanted.medium not in kinds)
    if not kinds or holds_images or any(next(folder.rglob(f"*{suffix}"), None) for suffix in _STORED):
        return None
    if wanted.medium not in kinds:
        refuse_kind(f"{title}; it", next(iter(kinds)), wanted.medium)
    parts: dict[str, list[Record]] = {}
    bad: list[str] = []
    for item in read_classes(Source(name, "classes", templates=("{}",), medium=wanted.medium, title=title), paths):
        if isinstance(item, Record):
            parts.setdefault(item.split or "train", []).append(item)
        else:
            bad.append(f"{item.where}: {item.fault.detail}")
    _leave_out(title, len(bad) + sum(map(len, parts.values())), bad)
    names, found = sorted({record.captions[0] for records in parts.values() for record in records}), {}
    for split, records in parts.items():
        media, faults = store_media(records, wanted.workers)
        beside = Dataset.from_dict({"answers": [record.captions for record in records]})
        rows, places = concatenate_datasets([media, beside], axis=1), [record.where for record in records]
        found[split] = LabelledRows(f"{title}, split {split}", rows, names, faults=faults, places=places)
    return found


def caption_classes(captions: Sequence[Sequence[str]], title: str) -> list[tuple[str, ...]]:
    """Return each row's captions, each once; rows of equal ones are of one class.

    Rows of a class have its captions in the order of its first row.

    Raises:
        ValueError: if no two rows have the same captions, or all have.
    """
    first: dict[frozenset[str], tuple[str, ...]] = {}
    found = [first.setdefault(frozenset(each), tuple(dict.fromkeys(each))) for each in captions]
    if not 2 <= len(set(found)) < len(found):
        raise ValueError(
            f"{title}; {len(found):,} rows have {len(set(found)):,} different captions, which do not form classes. Give a set that was "
            "prepared from a folder per class, or whose captions are those of its classes."
        )
    return found


def read_prepared(splits: DatasetDict, title: str) -> dict[str, LabelledRows]:
    """Label a prepared set's rows by their first caption, see `caption_classes`."""
    captions = caption_classes([each for rows in splits.values() for each in rows["captions"]], title)
    firsts = iter([each[0]] for each in captions)
    found = {}
    for split, rows in splits.items():
        beside = Dataset.from_dict({"answers": [next(firsts) for _ in range(len(rows))]})
        labelled = concatenate_datasets([media_of(rows), beside], axis=1)
        found[split] = LabelledRows(f"{title}, split {split}", labelled)
    return found


CLASS_NAMES = "classnames.txt"
_NUMBER = "[0-9]{1,18}"  # that int64 holds
_LONGEST_TEMPLATES, _MOST_TEMPLATES = 1 << 20, 500  # bytes; each is a text a class
_TEMPLATES = "zeroshot_classification_templates.txt"
_FEATURES = Features({"image": Image(decode=False), "label": Value("string"), "fault": Value("string")})


def shards_by_split(folder: str, title: str) -> dict[str, list[str]]:
    """Return the shards of each split; those that lie in no split's folder are of train.

    Raises:
        ValueError: begun by `title`, if one leads out of the folder.
    """
    found = defaultdict(list)
    for path in shard_paths(Source(folder, title=title)):
        check_own_file(path, folder, False, title)
        found[split_of_path(os.path.relpath(path, folder), by_words=True) or "train"].append(path)
    return found


def read_labelled_shards(paths: list[str], title: str) -> Dataset:
    """Read images and labels of shards into the cache, numbers as int64, else text. Bad samples are left out.

    Raises:
        ValueError: begun by `title`, if more than half of the samples are bad.
    """
    stamps = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths]  # part of the cache's key
    rows = Dataset.from_generator(_labelled, features=_FEATURES, gen_kwargs={"shards": stamps})
    assert isinstance(rows, Dataset)
    faults = {row: fault for row, fault in enumerate(rows["fault"][:]) if fault}
    _leave_out(title, len(rows), list(faults.values()))
    rows, good = rows.remove_columns("fault"), [row for row in range(len(rows)) if row not in faults]
    if all(re.fullmatch(_NUMBER, label) for label in rows.select(good).unique("label")):
        rows = rows.select(good).cast_column("label", Value("int64"))
    return rows.select(good) if len(rows) > len(good) else rows


def templates_beside(folder: str, title: str) -> tuple[str, ...]:
    """Return the templates in a folder of shards, with ``{}`` for the class's name.

    Raises:
        ValueError: begun by `title`, if the file is not in the folder, too long, or not text.
    """
    path = Path(folder, _TEMPLATES)
    if not path.is_file():
        return ()
    check_own_file(path, folder, False, title)
    try:
        lines = read_file_bytes(str(path), Limits(_LONGEST_TEMPLATES)).decode("utf-8-sig").splitlines()
    except ValueError as error:
        reason = error.detail if isinstance(error, Fault) else one_line(error)
        raise ValueError(f"{title}; {path} cannot be read ({reason}). Write a prompt with {{c}} a line.") from error
    found = tuple(line.strip().replace("{c}", "{}") for line in lines if "{c}" in line)
    if len(found) > _MOST_TEMPLATES:
        raise ValueError(
            f"{title}; {path} has {len(found):,} prompts; {_MOST_TEMPLATES} is the most. Keep some of them."
        )
    return found


def _labelled(shards: list[tuple[str, int, int]]) -> Iterator[dict[str, object]]:
    for path, *_ in shards:
        for sample in read_shard(path, ("image",)):
            row: dict[str, Any] = {"image": None, "label": "", "fault": None}
            member, where = sample.medium("image"), f"{path}, member {sample.key}"
            try:
                if sample.fault is not None:
                    raise sample.fault
                if member is None or "cls" not in sample.texts:
                    missing = "image" if member is None else "label (.cls)"
                    raise Fault("unmatched_image", f"it has no {missing}")
                image = {"bytes": member.read(Limits()), "path": None}
                yield {**row, "image": image, "label": sample.text("cls").strip()}
            except Fault as fault:
                yield {**row, "fault": f"{where}: {fault.detail}"}


_AGREEING = 3  # people whose equal answer is right; fewer count for their share (VQA, arXiv 1505.00468, section 4)


@dataclass
class TaskArguments:
    """Labelled data. Without a source, a task on the embedded scenes."""

    task: str | None = arg(
        None,
        f"A task on an embedded set of the model's kind: {', '.join(TASKS)}. Default without a source: scenes:describes.",
        usual=True,
    )
    dataset_name: str | None = arg(
        None,
        "A data set on the Hub, a local folder of one (files in a folder per class, too), or of save_to_disk; of a prepared set, "
        "equal captions are a class.",
        decides="place",
        usual=True,
    )
    dataset_config_name: str | None = arg(None, "Configuration of --dataset_name, if it has several.")
    train_file: str | None = arg(
        None,
        "Labelled rows: JSONL, JSON, CSV, TSV or Parquet; a column split may divide them.",
        decides="place",
        usual=True,
    )
    validation_file: str | None = arg(
        None, "Validation rows; without any, one in twenty training images is held out.", decides="place", usual=True
    )
    test_file: str | None = arg(None, "Test rows, measured once, at the end.", decides="place")
    image_column: str | None = arg(
        None, "Column of images, clips or sounds, files or paths; found by type or usual names."
    )
    text_column: str | None = arg(None, "Column of texts or questions; found by its usual names.", usual=True)
    label_column: str | None = arg(
        None, "Column of classes or answers; found by type (ClassLabel) or usual names.", usual=True
    )
    image_root: str | None = arg(
        None, "Folder that image paths are relative to; default the data file's folder.", decides="place"
    )
    allow_outside_root: bool = arg(
        False, "Accept image paths that leave --image_root: absolute, by '..', by a link.", decides="place"
    )
    num_answers: int | None = arg(
        None, "Only the N most frequent classes of the training data; others are not trained on, and count as wrong."
    )
    max_train_samples: int | None = arg(
        None, "Keep the first N training rows, of the classes in turn.", decides="place", usual=True
    )
    max_eval_samples: int | None = arg(
        None,
        "Keep the first N rows of validation and of test, of the classes in turn.",
        decides="place",
    )
    preprocessing_num_workers: int | None = arg(None, "Processes that read and preprocess data.", decides="speed")

    def __post_init__(self) -> None:
        sources = [f"--{name}" for name in ("task", "dataset_name", "train_file") if getattr(self, name)]
        if len(sources) > 1:
            raise ValueError(f"{' and '.join(sources)} are given together; labels have one source. Keep one of them.")
        if not sources:
            self.task = "scenes:describes"
        if self.task and self.task not in TASKS:
            raise ValueError(f"--task is {self.task}; choose one of {', '.join(TASKS)}.")
        for name in ("validation_file", "test_file"):
            if getattr(self, name) and not self.train_file:
                raise ValueError(f"--{name} is given without --train_file; it goes with it. Give both.")
        if self.dataset_config_name and not self.dataset_name:
            raise ValueError(
                f"--dataset_config_name is {self.dataset_config_name}; there is no --dataset_name. Give both or none."
            )
        for name in ("num_answers", "max_train_samples", "max_eval_samples", "preprocessing_num_workers"):
            value, least = getattr(self, name), 2 if name == "num_answers" else 1
            if value is not None and value < least:
                raise ValueError(f"--{name} is {value}; give at least {least}, or drop it to have no limit.")


@dataclass
class LabelledTask:
    """Labelled splits.

    Attributes:
        splits: train, validation and perhaps test. `label` is the place in `classes`, or -1, outside train, for another
            class. `answers`, where rows have several, are their classes with the accuracy that each earns.
        classes: names, in order.
        has_images, has_texts: whether the rows hold images and texts.
        title: the source, for people.
    """

    splits: DatasetDict
    classes: list[str]
    has_images: bool
    has_texts: bool
    title: str


def load_task(args: TaskArguments, medium: str = "image") -> LabelledTask:
    """Load the labelled data that `args` names, with the kind of media that the model is for.

    The most frequent of a row's answers is its class. Without a validation split, rows are held out of train by the hash
    of their image, file of a clip or sound, or text where there is none, so that none is in both.

    Raises:
        ValueError: in one line, if a file, column or split does not exist, more than half of the rows are unusable, or
            fewer than two classes are left.
    """
    read, title = _read(args, medium)
    if "train" not in read:
        raise ValueError(f"{title}; there is no train split, only {', '.join(read)}. Give rows to train on.")
    first = read["train"]
    if first.has("image") and (kind := kind_of(first.rows.features)) != medium:
        refuse_kind(f"{title}; it", kind, medium)
    for split, rows in read.items():
        for kind in ("image", "text"):
            named = medium if kind == "image" else kind
            if rows.has(kind) != first.has(kind):
                raise ValueError(
                    f"{title}; only one of train and {split} has a column of {named}s. Set --{kind}_column, or give both one."
                )
    parts = {split: rows.rows for split, rows in read.items()}
    if "validation" not in parts:
        parts |= _hold_out(first.rows, title)
    for split, part in parts.items():
        most = args.max_train_samples if split == "train" else args.max_eval_samples
        parts[split] = part.select(
            _first_of_classes([_most_frequent(Counter(each)) for each in part["answers"]], most)
        )
    answers = {split: [Counter(given) for given in part["answers"]] for split, part in parts.items()}
    classes = _classes(first.names, [_most_frequent(given) for given in answers["train"]], args.num_answers, title)
    splits = {
        split: _task_split(parts[split], answers[split], classes, split, medium) for split in SPLITS if split in parts
    }
    return LabelledTask(DatasetDict(splits), classes, first.has("image"), first.has("text"), title)


def open_task(
    accelerator: Accelerator,
    task_args: TaskArguments,
    loader_args: LoaderArguments,
    schedule: Schedule,
    processor: ProcessorMixin,
) -> tuple[LabelledTask, TrainingData]:
    """Open the labelled rows that the arguments name, with loaders; see `open_data`."""
    with distributed.first_then_others():
        task = load_task(task_args, kind_of_processor(processor))
        length, workers = loader_args.max_seq_length, task_args.preprocessing_num_workers
        task.splits = tokenize_splits(task.splits, processor.tokenizer, length, workers)
    return task, make_data(accelerator, task.splits, processor, loader_args, schedule)


def _read(args: TaskArguments, medium: str) -> tuple[dict[str, LabelledRows], str]:
    if args.task is not None:
        return _read_embedded(args.task), f"--task is {args.task}"
    workers = args.preprocessing_num_workers
    wanted = Wanted(args.label_column, args.image_column, args.text_column, medium, workers)
    found: dict[str, LabelledRows] = {}
    if args.dataset_name is not None:
        title = f"--dataset_name is {args.dataset_name}"
        outside = args.allow_outside_root
        if is_prepared(args.dataset_name) and args.label_column is None:
            pairs = open_prepared(args.dataset_name, title, args.dataset_config_name, outside)
            return read_prepared(pairs, title), title
        folders = read_class_folder(args.dataset_name, wanted, title, PathArguments(None, outside))
        if folders is not None:
            return {split: rows.usable() for split, rows in folders.items()}, title
        source = load_splits(args.dataset_name, args.dataset_config_name, workers, title, outside)
        jail = dataset_jail(args.dataset_name, args.image_root, outside)
        for given, rows in source.items():
            split = SPLIT_NAMES.get(str(given).lower())
            if split is None or split in found:
                logger.warning("%s: split %s is not used; known are train, validation and test", title, given)
            else:
                found[split] = read_dataset(rows, wanted, f"{title}, split {given}", jail).usable()
        if not found:
            raise ValueError(f"{title}; its splits are {', '.join(source)}. Name them train, validation and test.")
        return found, title
    files = {"train": args.train_file, "validation": args.validation_file, "test": args.test_file}
    paths = {split: Path(file) for split, file in files.items() if file}
    for split, path in paths.items():
        title = f"--{split}_file is {path}"
        if not path.is_file():
            raise ValueError(f"{title}; there is no such file. Check the path.")
        jail = Jail(args.image_root or str(path.parent), args.allow_outside_root)
        parts = read_file(path, split, wanted, title, jail, divide=len(paths) == 1)
        found |= {name: rows.usable() for name, rows in parts.items()}
    return found, f"--train_file is {args.train_file}"


def _read_embedded(name: str) -> dict[str, LabelledRows]:
    found, of_set, ask = {}, name.partition(":")[0], TASKS[name]
    splits = load_scenes() if of_set == "scenes" else SETS[of_set]()
    for split, rows in splits.items():
        places, texts, labels = map(list, zip(*ask(rows), strict=True))
        beside = Dataset.from_dict({"text": texts, "answers": [[label] for label in labels]})
        images = media_of(rows).select(places)
        found[split] = LabelledRows(name, datasets.concatenate_datasets([images, beside], axis=1))
    return found


def _hold_out(train: Dataset, title: str) -> dict[str, Dataset]:
    """Hold rows out by what they show, the same share of each class."""
    keys = _content_keys(train)
    answers = [_most_frequent(Counter(given)) for given in train["answers"]]
    kept, held = hold_out(train, keys, dict(zip(reversed(keys), reversed(answers), strict=True)))
    if not len(kept):
        raise ValueError(f"{title}; all rows show the same, so none can be held out. Give --validation_file.")
    logger.info("%s: no validation split; %s rows are held out for it", title, f"{len(held):,}")
    missing = sorted(set(answers) - {_most_frequent(Counter(given)) for given in held["answers"]})
    if missing:
        logger.info("%s: no row of %s of the classes is held out, such as %s", title, f"{len(missing):,}", missing[0])
    return {"train": kept, "validation": held}


def _content_keys(rows: Dataset) -> list[str]:
    """Identify clips and sounds by files, images by bytes or paths, rows without media by texts."""
    if "file_hash" in rows.column_names:
        return rows["file_hash"][:]
    if "image" not in rows.column_names:
        return rows["text"][:]
    images = (image for batch in rows.select_columns(["image"]).iter(100) for image in batch["image"])
    return [hashlib.blake2b(each["bytes"]).hexdigest() if each["bytes"] else str(each["path"]) for each in images]


def _most_frequent(answers: Counter[str]) -> str:
    """Return the most frequent answer, of equally frequent ones the one given first."""
    return answers.most_common(1)[0][0]


def _classes(known: list[str] | None, labels: list[str], most: int | None, title: str) -> list[str]:
    """Return the classes: the `most` frequent, or in the order of source, number or name."""
    counts = Counter(labels)
    if most is not None:
        known = [name for name, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]]
    elif known is None:
        known = sorted(counts, key=lambda name: (0, float(name), name) if _is_number(name) else (1, 0.0, name))
    if len(known) < 2:
        raise ValueError(f"{title}; its labels are {known[0]!r} alone, and a task has 2 classes. Set --label_column.")
    return known


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _task_split(rows: Dataset, answers: list[Counter[str]], classes: list[str], split: str, medium: str) -> Dataset:
    """Lay ids, captions and labels beside the images; train keeps only known classes."""
    place = {name: number for number, name in enumerate(classes)}
    count = len(rows)
    columns: dict[str, Any] = {
        "id": [f"{split} {row}" for row in range(count)],
        "captions": [[text] for text in (rows["text"] if "text" in rows.column_names else [""] * count)],
        "label": [place.get(_most_frequent(given), -1) for given in answers],
    }
    features = {"id": Value("string"), "captions": List(Value("string")), "label": Value("int64")}
    if any(given.total() > 1 for given in answers):
        features["answers"] = List({"label": Value("int64"), "share": Value("float64")})
        columns["answers"] = [
            [{"label": place[name], "share": _share(given, name)} for name in given if name in place]
            for given in answers
        ]
    if "image" in rows.column_names:
        images = media_of(rows)
    else:
        smallest = {"image": [_smallest(medium)] * count, **({} if medium == "image" else {"seconds": [0.0] * count})}
        kinds = Features({name: FEATURES[medium] if name == "image" else Value("float64") for name in smallest})
        images = Dataset(pa.Table.from_pydict(smallest, schema=kinds.arrow_schema))
    built = datasets.concatenate_datasets([images, Dataset.from_dict(columns, Features(features))], axis=1)
    others = columns["label"].count(-1)
    if others:
        left = "left out of train" if split == "train" else f"counted as wrong in {split}"
        logger.info("%s of %s rows have a class that is not learnt; they are %s", f"{others:,}", f"{count:,}", left)
    if split != "train":
        return built
    return built.select([row for row, label in enumerate(columns["label"]) if label >= 0])


def _smallest(medium: str) -> dict[str, Any]:
    """Return one grey pixel, a clip of one, or a sound of one sample, as they are stored."""
    if medium == "image":
        return {"bytes": b"\x80\x80\x80", "path": "raw:1x1"}
    if medium == "sound":
        return {"bytes": write_wav(np.zeros(1, np.int16), 16_000), "path": None}
    return {"bytes": write_avi([encode(PIL.Image.new("RGB", (1, 1), "grey"), "jpeg")], 1.0, (1, 1)), "path": None}


def _share(answers: Counter[str], name: str) -> float:
    return 1.0 if answers.total() == 1 else min(1.0, answers[name] / _AGREEING)


@dataclass
class LabelledArguments:
    """Labelled images, clips or sounds, and the names of their classes."""

    dataset_name: str | None = arg(
        None,
        "A data set on the Hub, a local folder of one (Parquet, files in a folder per class, or images in tar shards as "
        "CLIP_benchmark writes them), or a folder made by save_to_disk. Of a prepared set, equal captions are a class.",
        decides="place",
        usual=True,
    )
    dataset_config_name: str | None = arg(None, "Configuration of --dataset_name, if it has several.")
    split: str | None = arg(
        None, "Split; default: that of the benchmark, else the first there is of validation, test and train."
    )
    image_column: str | None = arg(None, "Column of images, clips or sounds; found by its type or its usual names.")
    label_column: str | None = arg(
        None, "Column of labels; found by its type (ClassLabel) or its usual names.", usual=True
    )
    classes: str | None = arg(
        None,
        f"A benchmark, {', '.join(CLASSIFICATION)}: its classes and prompts and, without --dataset_name, its "
        "images from the Hub. Or a file: lines 'id name' for folders such as n01440764, one name a line in the order of the "
        "labels, or JSON {id: name}. Default: the names that the data has.",
    )
    max_eval_samples: int | None = arg(None, "Keep the first N rows, of the classes in turn.", decides="place")

    def __post_init__(self) -> None:
        if self.dataset_name is None and self.benchmark is None:
            raise ValueError(
                "--dataset_name is missing; give a labelled data set, a folder of one, or the name of a benchmark as --classes."
            )
        if self.max_eval_samples is not None and self.max_eval_samples < 1:
            raise ValueError(f"--max_eval_samples is {self.max_eval_samples}; it counts from 1. Drop it for all.")

    @property
    def benchmark(self) -> Benchmark | None:
        """The benchmark that `classes` names; None for a file.

        Raises:
            ValueError: if it is neither.
        """
        if self.classes is None or Path(self.classes).is_file():
            return None
        title = f"--classes is {self.classes}; there is no such file and no such benchmark"
        return find_benchmark(CLASSIFICATION, self.classes, title)


@dataclass
class LabelledImages:
    """A labelled split.

    Attributes:
        rows: in the schema that `mm_utils.data.batches.loaders.Loaders.evaluation` reads, without captions.
        label_M: the class of each row, int64.
        classes: names of all classes, also of those without an image.
        split: its name in the source.
        templates: prompts that the benchmark, or the folder of shards, has; else none.
        texts: of a prepared set, the captions of each class, as many of each, in place of names in prompts.
    """

    rows: Dataset
    label_M: Tensor
    classes: list[str]
    split: str
    templates: tuple[str, ...] = ()
    texts: list[list[str]] | None = None


def load_labelled(args: LabelledArguments, medium: str = "image") -> LabelledImages:
    """Load the split that `args` names, of the kind of media that the model is for.

    Raises:
        ValueError: in one line, if there is no such split or column, no image, a label that is not a class, or a class
            without a name.
    """
    benchmark = args.benchmark
    if args.dataset_name is None and benchmark is not None:
        title = f"--classes is {benchmark.name}"
        name = benchmark.fetch(title)
    else:
        name, title = str(args.dataset_name), f"--dataset_name is {args.dataset_name}"
    if is_prepared(name):
        return _load_prepared(args, name, title)
    usual = ["validation", "test", "train"]  # the labels of a test split are often withheld
    usual = usual if benchmark is None else [benchmark.split, *usual]
    templates: tuple[str, ...] = ()
    wanted = Wanted(args.label_column, args.image_column, medium=medium)
    if Path(name).is_file():
        folders = read_file(Path(name), "train", wanted, title, Jail(str(Path(name).parent)), divide=True)
    else:
        folders = read_class_folder(name, wanted, title, PathArguments()) or {}
    if folders:
        split, file = _choose_split(args.split, list(folders), usual), args.classes
        rows = folders[split].rows
    elif holds_shards(name):
        shards, beside = shards_by_split(name, title), Path(name, CLASS_NAMES)
        split, templates = _choose_split(args.split, list(shards), usual), templates_beside(name, title)
        rows = read_labelled_shards(shards[split], f"{title}, split {split}")
        if beside.is_file():
            check_own_file(beside, name, False, title)
        file = args.classes or (str(beside) if beside.is_file() else None)
    else:
        splits = load_splits(name, args.dataset_config_name, None, title)
        split = _choose_split(args.split, list(splits), usual)
        rows, file = splits[split], args.classes
    jail = dataset_jail(name, None, allow_outside=False)
    found = folders[split] if folders else read_dataset(rows, wanted, f"{title}, split {split}", jail)
    if not found.has("image"):
        raise ValueError(f"{found.title}; no {medium} column was recognised. {listed(rows.column_names)}")
    found = found.usable()
    labels = [given[0] for given in found.rows["answers"]]
    known = found.names or (None if found.numbers else sorted(set(labels)))
    if benchmark is not None:
        classes, templates = list(benchmark.classes), benchmark.templates
        label_M = _numbered(labels, _of_benchmark(known, benchmark, found.title), len(classes), found.title)
    else:
        classes = _readable_names(known, file, found.title)
        place_of = None if known is None else {name: place for place, name in enumerate(known)}
        label_M = _numbered(labels, place_of, len(classes), found.title)
    if benchmark is not None and len(labels) != benchmark.images:
        logger.warning(
            "%s: %s images, and %s has %s; the figures are not those of the benchmark",
            found.title, f"{len(labels):,}", benchmark.name, f"{benchmark.images:,}",
        )  # fmt: skip
    rows, label_M = _first(_evaluated(found.rows), label_M, args.max_eval_samples)
    return LabelledImages(rows, label_M, classes, split, templates)


def _load_prepared(args: LabelledArguments, name: str, title: str) -> LabelledImages:
    """Load a split of a prepared set, in which media with equal captions are of one class."""
    splits = open_prepared(name, title)
    split = _choose_split(args.split, list(splits), ["validation", "test", "train"])
    title = f"{title}, split {split}"
    for flag in ("classes", "label_column", "image_column"):
        if getattr(args, flag) is not None:
            raise ValueError(f"{title}; it is prepared, and its captions tell the classes. Drop --{flag}.")
    captions = caption_classes(splits[split]["captions"], title)
    known = sorted(set(captions))
    place_of = {each: place for place, each in enumerate(known)}
    most = min(map(len, known))
    numbers = torch.tensor([place_of[each] for each in captions])
    rows, label_M = _first(_evaluated(splits[split]), numbers, args.max_eval_samples)
    texts = [list(each[:most]) for each in known]
    return LabelledImages(rows, label_M, [each[0] for each in known], split, texts=texts)


def _evaluated(rows: Dataset) -> Dataset:
    """Return the rows in the schema that evaluations read."""
    count = len(rows)
    beside = {"id": [f"row {row}" for row in range(count)], "image_key": list(range(count))}
    empty: dict[str, list[Any]] = {"input_ids": [[]] * count, "caption_keys": [[]] * count}
    images = rows.select_columns(["image"])
    return datasets.concatenate_datasets([images, Dataset.from_dict({**beside, **empty})], axis=1)


def _first(rows: Dataset, label_M: Tensor, most: int | None) -> tuple[Dataset, Tensor]:
    places = _first_of_classes(label_M.tolist(), most)
    return rows.select(places), label_M[places]


def _first_of_classes(labels: Sequence[str | int], most: int | None) -> Sequence[int]:
    """Return the places of the first rows of the classes in turn, as folders and tables list one class after the other."""
    if most is None:
        return range(len(labels))
    seen: Counter[str | int] = Counter()
    turns = []
    for row, label in enumerate(labels):
        turns.append((seen[label], row))
        seen[label] += 1
    return sorted(row for _, row in heapq.nsmallest(most, turns))


def _of_benchmark(known: list[str] | None, benchmark: Any, title: str) -> dict[str, int] | None:
    """Return the benchmark's class of each label that the data names."""
    places = None if known is None else benchmark.places(known)
    if known is not None and places is None:
        own = ", ".join(benchmark.names[:3])
        raise ValueError(
            f"{title}; its {len(known):,} classes ({', '.join(known[:3])}, ...) are not the {len(benchmark.classes):,} of "
            f"{benchmark.name} ({own}, ...). Give other data, or a file of names as --classes."
        )
    return None if known is None or places is None else dict(zip(known, places, strict=True))


def _choose_split(wanted: str | None, there: list[str], usual: list[str]) -> str:
    if wanted is not None and wanted not in there:
        raise ValueError(f"--split is {wanted}; the data has {', '.join(there)}. Choose one of them.")
    by_kind = {SPLIT_NAMES.get(name.lower(), name): name for name in reversed(there)}
    return wanted or next((by_kind[kind] for kind in usual if kind in by_kind), there[0])


def _readable_names(known: list[str] | None, file: str | None, title: str) -> list[str]:
    """Return class names for texts: the first synonym, unless another class shares it."""
    found = known if file is None else _names_of_file(known, file)
    coded = next((name for name in found or () if re.fullmatch(r"n\d{8}", name)), None)
    if found is None or coded:
        shown = f"its class {coded} is a WordNet id" if coded else "its labels are numbers"
        raise ValueError(f"{title}; {shown}, not a name. Set --classes to lines 'id name', or a name a line.")
    full = [" ".join(name.replace("_", " ").split()) for name in found]
    first = Counter(name.split(",")[0] for name in full)
    names = [short if first[short := name.split(",")[0]] == 1 else name for name in full]
    if "" in names or len(names) < 2:
        shown = f"class {names.index('')} has no name" if "" in names else f"it has {len(names)} of at least 2 classes"
        raise ValueError(f"{title}; {shown}. Give them in --classes, or other data.")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        logger.warning("%s: several classes are called %s and cannot be distinguished", title, ", ".join(twice))
    return names


def _names_of_file(known: list[str] | None, file: str) -> list[str]:
    """Return names by those that the data has, or else by number."""
    title = f"the names of the classes are those of {file}"
    given = class_names(Source(file, classes=file))
    if known and all(name in given for name in known):
        return [given[name] for name in known]
    by_number = [given[key] for key in itertools.takewhile(given.__contains__, map(str, itertools.count()))]
    # Sorted as text: -1, 0, 1, 10, 100, 2. A file that names some of them is one of keys, not of places.
    are_numbers = known is not None and any(name in given or re.fullmatch(r"[+-]?\d+", name) for name in known)
    if not by_number or are_numbers or (known is not None and len(known) != len(by_number)):
        missing = next((name for name in known or () if name not in given), "label 0")
        counts = f"has {len(given)} names for {len(known or ())} classes and none for {missing}"
        raise ValueError(f"{title}; it {counts}. Write lines 'id name', or a name a line for every class.")
    return by_number


def _numbered(labels: list[str], place_of: dict[str, int] | None, classes: int, title: str) -> Tensor:
    """Return labels `[M]` as numbers of classes; labels without names are these numbers."""
    number_of = {str(number): number for number in range(classes)} if place_of is None else place_of
    for row, label in enumerate(labels):
        if label not in number_of:
            raise ValueError(
                f"{title}, row {row}: the label is {label}; the {classes} classes count from 0. Name all of them in "
                "--classes."
            )
    return torch.tensor([number_of[label] for label in labels], dtype=torch.long)


def _features_of_file(path: str) -> Features | None:
    """Return the columns that `datasets` has a type for; None for all of them."""
    schema = pq.read_schema(path)
    known = []
    for column in schema:
        try:
            Features.from_arrow_schema(pa.schema([column]))
            known.append(column)
        except (ValueError, NotImplementedError):
            continue
    return None if len(known) == len(schema) else Features.from_arrow_schema(pa.schema(known, schema.metadata))
