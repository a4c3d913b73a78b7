"""Labelled data for fine-tuning: images, texts or pairs of both, each with a class, in splits that a `Trainer` takes.

A row is one example in the schema of `mm_utils.data.sources`, with one text as its `captions` and its class as `label`. What
a task has none of is filled in by what costs nothing, an empty text or an image of one pixel, and is not read.
"""

import hashlib
import logging
from dataclasses import dataclass
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from mm_utils.arguments import arg
from mm_utils.data.answers import Answers, number_answers
from mm_utils.data.assembly import held_out
from mm_utils.data.labelled_sources import Labelled, open_files, open_splits
from mm_utils.data.raw.stores import load_splits
from mm_utils.data.scene_tasks import scene_examples
from mm_utils.data.scenes import load_scenes

logger = logging.getLogger(__name__)

_SPLITS = ("train", "validation", "test")
_ONE_PIXEL = {"bytes": b"\x80\x80\x80", "path": "raw:1x1"}
_SCENES = "scenes:"


@dataclass
class TaskArguments:
    """Which labelled data. Without a source, a task on the embedded scenes."""

    task: str | None = arg(
        None,
        "A task on the embedded scenes: scenes:describes (the default without a source), scenes:count, scenes:colour.",
    )
    dataset_name: str | None = arg(
        None, "A data set on the Hub, a local folder of one (images in a folder per class, too), or of save_to_disk."
    )
    dataset_config_name: str | None = arg(None, "Configuration of --dataset_name, if it has several.")
    train_file: str | None = arg(
        None, "Labelled rows: JSONL, JSON, CSV, TSV or Parquet; a column split may divide them."
    )
    validation_file: str | None = arg(None, "Validation rows; without any, one in twenty training images is held out.")
    test_file: str | None = arg(None, "Test rows, measured once, at the end.")
    image_column: str | None = arg(None, "Column of image paths or images; found by type or usual names.")
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
        """Refuse contradictions, with a ValueError of one line."""
        sources = [f"--{name}" for name in ("task", "dataset_name", "train_file") if getattr(self, name)]
        if len(sources) > 1:
            raise ValueError(f"{' and '.join(sources)} are given together; labels have one source. Keep one of them.")
        if not sources:
            self.task = f"{_SCENES}describes"
        if self.task and not self.task.startswith(_SCENES):
            raise ValueError(f"--task is {self.task}; choose scenes:describes, scenes:count or scenes:colour.")
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
    """What `load_task` found.

    Attributes:
        splits: train, validation and perhaps test. `label` is the place in `classes`, -1 for a class that is none of them,
            which train has not. `answers`, where rows have several, are their classes with the accuracy that each earns.
        classes: names, in order.
        has_images, has_texts: what the rows hold besides.
        title: of the source, for people.
    """

    splits: datasets.DatasetDict
    classes: list[str]
    has_images: bool
    has_texts: bool
    title: str


def load_task(args: TaskArguments) -> LabelledTask:
    """Load the labelled data that `args` names.

    Where a row has several answers, the most frequent one is its class. Without a validation split, rows are held out of
    train by the hash of their image, or text where there is none, so that none is in both.

    Raises:
        ValueError: of one line, if a file, column or split does not exist, more than half of the rows are unusable, or
            fewer than two classes are left.
    """
    read, title = _open(args)
    if "train" not in read:
        raise ValueError(f"{title}; there is no train split, only {', '.join(read)}. Give rows to train on.")
    _same_kinds(read, title)
    if "validation" not in read:
        read |= _hold_out(read["train"], title)
    for split, rows in read.items():
        most = args.max_train_samples if split == "train" else args.max_eval_samples
        read[split] = rows if most is None else rows.select(range(min(most, len(rows.labels))))
    classes, numbered = number_answers(read, args.num_answers, title)
    splits = datasets.DatasetDict()
    for split in (name for name in _SPLITS if name in read):
        kept = [row for row, label in enumerate(numbered[split].labels) if label >= 0 or split != "train"]
        splits[split] = _build(read[split], numbered[split], split).select(kept)
        left_out = len(numbered[split].labels) - len(kept)
        if left_out:
            logger.info("%s: %s rows of other classes are left out of train", title, f"{left_out:,}")
    first = read["train"]
    return LabelledTask(splits, classes, first.images is not None, first.texts is not None, title)


def _open(args: TaskArguments) -> tuple[dict[str, Labelled], str]:
    if args.task is not None:
        scenes = load_scenes()
        name = args.task.removeprefix(_SCENES)
        return {split: _open_scenes(name, rows) for split, rows in scenes.items()}, f"--task is {args.task}"
    columns = {"image": args.image_column, "text": args.text_column, "label": args.label_column}
    if args.dataset_name is not None:
        title = f"--dataset_name is {args.dataset_name}"
        source = load_splits(args.dataset_name, args.dataset_config_name, args.preprocessing_num_workers, title)
        return open_splits(source, columns, title), title
    files = {"train": args.train_file, "validation": args.validation_file, "test": args.test_file}
    given = {split: file for split, file in files.items() if file}
    return open_files(given, columns, args.image_root, args.allow_outside_root), f"--train_file is {args.train_file}"


def _open_scenes(task: str, scenes: datasets.Dataset) -> Labelled:
    rows, texts, labels = map(list, zip(*scene_examples(task, scenes), strict=True))
    table = scenes.select_columns(["image"]).with_format("arrow")[rows]
    features = datasets.Features({"image": datasets.Image(decode=False)})
    images = datasets.Dataset(pa.Table.from_batches(table.to_batches(), schema=features.arrow_schema))
    ids = scenes["id"][:]  # a column reads itself anew for every cell
    return Labelled(f"scenes:{task}", labels, None, texts, images, [ids[row] for row in rows])


def _same_kinds(read: dict[str, Labelled], title: str) -> None:
    """All splits must have what train has."""
    for split, rows in read.items():
        for kind, here, there in (
            ("image", rows.images, read["train"].images),
            ("text", rows.texts, read["train"].texts),
        ):
            if (here is None) != (there is None):
                raise ValueError(
                    f"{title}; only one of train and {split} has a column of {kind}s. Set --{kind}_column, or give both one."
                )


def _hold_out(train: Labelled, title: str) -> dict[str, Labelled]:
    keys = train.keys or _content_keys(train)
    held = held_out(list(dict.fromkeys(keys)))
    sides = [[row for row, key in enumerate(keys) if (key in held) is inside] for inside in (False, True)]
    if not sides[0]:
        raise ValueError(f"{title}; all rows show the same, so none can be held out. Give --validation_file.")
    logger.info("%s: no validation split; %s rows are held out for it", title, f"{len(sides[1]):,}")
    return {"train": train.select(sides[0]), "validation": train.select(sides[1])}


def _content_keys(rows: Labelled) -> list[str]:
    """What tells images apart: their bytes or, where they lie in files, their paths; texts where there is no image."""
    if rows.images is None:
        return list(rows.texts or ())
    keys: list[str] = []
    for table in rows.images.with_format("arrow").iter(1000):
        stored = table["image"]
        paths = pc.struct_field(stored, "path").to_pylist()
        for content, path in zip(pc.struct_field(stored, "bytes").combine_chunks(), paths, strict=True):
            keys.append(hashlib.blake2b(content.as_buffer()).hexdigest() if content.is_valid else str(path))
    return keys


def _build(rows: Labelled, answers: Answers, split: str) -> datasets.Dataset:
    count = len(rows.labels)
    columns: dict[str, Any] = {
        "id": [f"{split} {row}" for row in range(count)],
        "captions": [[text] for text in rows.texts or [""] * count],
        "label": answers.labels,
    }
    features = {
        "id": datasets.Value("string"),
        "captions": datasets.List(datasets.Value("string")),
        "label": datasets.Value("int64"),
    }
    if answers.shares is not None:
        columns["answers"] = [
            [{"label": label, "share": share} for label, share in row.items()] for row in answers.shares
        ]
        features["answers"] = datasets.List({"label": datasets.Value("int64"), "share": datasets.Value("float64")})
    images = rows.images
    if images is None:
        one = datasets.Features({"image": datasets.Image(decode=False)})
        images = datasets.Dataset(pa.Table.from_pydict({"image": [_ONE_PIXEL] * count}, schema=one.arrow_schema))
    beside = datasets.Dataset.from_dict(columns, datasets.Features(features))
    return datasets.concatenate_datasets([images, beside], axis=1)
