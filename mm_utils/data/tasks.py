"""Load labelled splits to fine-tune on: media, texts, or pairs of both, with a class.

A row is in the schema of `mm_utils.data.pairs`, with one text as its `captions` and its class as `label`. What a task has
none of is filled in, an empty text or the smallest medium, and not read.
"""

import hashlib
import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pyarrow as pa
from datasets import Dataset, DatasetDict, Features, List, Value

from mm_utils.arguments import arg
from mm_utils.data.images import encode
from mm_utils.data.labelled.folders import read_class_folder, read_prepared
from mm_utils.data.labelled.rows import LabelledRows, Wanted, media_of, read_dataset, read_file, refuse_kind
from mm_utils.data.media import FEATURES, kind_of
from mm_utils.data.media.riff import write_avi, write_wav
from mm_utils.data.paths import Jail
from mm_utils.data.prepare.on_disk import is_prepared, open_prepared
from mm_utils.data.rows.columns import SPLIT_NAMES, SPLITS, held_out
from mm_utils.data.rows.source import PathArguments
from mm_utils.data.rows.stored import dataset_jail, load_splits
from mm_utils.data.scenes import load_scenes
from mm_utils.doors import entries, load

logger = logging.getLogger(__name__)

_AGREEING = 3  # people whose equal answer is right; fewer count for their share (VQA, arXiv 1505.00468, section 4)


@dataclass
class TaskArguments:
    """Labelled data. Without a source, a task on the embedded scenes."""

    task: str | None = arg(
        None,
        f"A task on an embedded set of the model's kind: {', '.join(entries('TASKS'))}. Default without a source: scenes:describes.",
    )
    dataset_name: str | None = arg(
        None,
        "A data set on the Hub, a local folder of one (files in a folder per class, too), or of save_to_disk; of a prepared set, "
        "equal captions are a class.",
    )
    dataset_config_name: str | None = arg(None, "Configuration of --dataset_name, if it has several.")
    train_file: str | None = arg(
        None, "Labelled rows: JSONL, JSON, CSV, TSV or Parquet; a column split may divide them."
    )
    validation_file: str | None = arg(None, "Validation rows; without any, one in twenty training images is held out.")
    test_file: str | None = arg(None, "Test rows, measured once, at the end.")
    image_column: str | None = arg(
        None, "Column of images, clips or sounds, files or paths; found by type or usual names."
    )
    text_column: str | None = arg(None, "Column of texts or questions; found by its usual names.")
    label_column: str | None = arg(None, "Column of classes or answers; found by type (ClassLabel) or usual names.")
    image_root: str | None = arg(None, "Folder that image paths are relative to; default the data file's folder.")
    allow_outside_root: bool = arg(False, "Accept image paths that leave --image_root: absolute, by '..', by a link.")
    num_answers: int | None = arg(
        None, "Only the N most frequent classes of the training data; others are not trained on, and count as wrong."
    )
    max_train_samples: int | None = arg(None, "Keep the first N training rows.")
    max_eval_samples: int | None = arg(None, "Keep the first N rows of validation and of test.")
    preprocessing_num_workers: int | None = arg(None, "Processes that read and preprocess data.")

    def __post_init__(self) -> None:
        sources = [f"--{name}" for name in ("task", "dataset_name", "train_file") if getattr(self, name)]
        if len(sources) > 1:
            raise ValueError(f"{' and '.join(sources)} are given together; labels have one source. Keep one of them.")
        if not sources:
            self.task = "scenes:describes"
        if self.task and self.task not in entries("TASKS"):
            raise ValueError(f"--task is {self.task}; choose one of {', '.join(entries('TASKS'))}.")
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
        parts[split] = part if most is None else part.take(min(most, len(part)))
    answers = {split: [Counter(given) for given in part["answers"]] for split, part in parts.items()}
    classes = _classes(first.names, [_most_frequent(given) for given in answers["train"]], args.num_answers, title)
    splits = {
        split: _build(parts[split], answers[split], classes, split, medium) for split in SPLITS if split in parts
    }
    return LabelledTask(DatasetDict(splits), classes, first.has("image"), first.has("text"), title)


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
    found, of_set, ask = {}, name.partition(":")[0], load(entries("TASKS")[name])
    splits = load_scenes() if of_set == "scenes" else load(entries("SETS")[of_set])()
    for split, rows in splits.items():
        places, texts, labels = map(list, zip(*ask(rows), strict=True))
        beside = Dataset.from_dict({"text": texts, "answers": [[label] for label in labels]})
        images = media_of(rows).select(places)
        found[split] = LabelledRows(name, datasets.concatenate_datasets([images, beside], axis=1))
    return found


def _hold_out(train: Dataset, title: str) -> dict[str, Dataset]:
    keys = _content_keys(train)
    held = held_out(list(dict.fromkeys(keys)))
    kept, out = ([row for row, key in enumerate(keys) if (key in held) is inside] for inside in (False, True))
    if not kept:
        raise ValueError(f"{title}; all rows show the same, so none can be held out. Give --validation_file.")
    logger.info("%s: no validation split; %s rows are held out for it", title, f"{len(out):,}")
    return {"train": train.select(kept), "validation": train.select(out)}


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


def _build(rows: Dataset, answers: list[Counter[str]], classes: list[str], split: str, medium: str) -> Dataset:
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
