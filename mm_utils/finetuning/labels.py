"""Labelled media, with or without texts, to fine-tune on.

Rows come from the reader of pairs (`mm_utils.data.rows`): a class or an answer is a column, the folder of a file, or the `.cls` of a
tar's sample. A row of a task is in the schema of `mm_utils.data.pairs`, with one text as its `captions` and its class as `label`;
a row without text has an empty one, which is not read.
"""

import hashlib
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas
from accelerate import Accelerator
from datasets import Dataset, DatasetDict, Features, List, Value, concatenate_datasets
from transformers import ProcessorMixin

from mm_utils import distributed
from mm_utils.data.arguments import SPLITS, DataArguments, LoaderArguments
from mm_utils.data.batches.tokens import tokenize_splits
from mm_utils.data.faults import is_hopeless
from mm_utils.data.media import kind_of
from mm_utils.data.media.medium import kind_of_processor
from mm_utils.data.pairs import refuse_columns, sources_of
from mm_utils.data.prepare.cache import load_labelled_rows
from mm_utils.data.prepare.on_disk import is_prepared
from mm_utils.data.rows.columns import hold_out
from mm_utils.data.rows.media_folders import readable
from mm_utils.data.rows.source import Source
from mm_utils.data.scenes import colour_questions, load_scenes
from mm_utils.data.training_data import TrainingData, make_data
from mm_utils.finetuning.arguments import LabelArguments
from mm_utils.text import shortened

logger = logging.getLogger(__name__)


@dataclass
class LabelledTask:
    """Labelled splits."""

    splits: DatasetDict  # train, validation, perhaps test; `label` is the place in `classes`, or, outside train, -1 for another
    classes: list[str]
    has_texts: bool
    total_rows: dict[str, int]  # of every split, before --max_train_samples and --max_eval_samples


def open_task(
    accelerator: Accelerator,
    data_args: DataArguments,
    label_args: LabelArguments,
    loader_args: LoaderArguments,
    schedule: Any,
    processor: ProcessorMixin,
    fits_batch: bool = True,
) -> tuple[LabelledTask, TrainingData]:
    """Open the labelled rows that the arguments name, with loaders; see `open_data`."""
    with distributed.first_then_others():
        task = load_task(data_args, label_args, kind_of_processor(processor))
        task.splits = tokenize_splits(task.splits, processor.tokenizer, loader_args.max_seq_length)
    total = task.total_rows
    return task, make_data(accelerator, task.splits, processor, loader_args, schedule, (), total, fits_batch)


def load_task(args: DataArguments, labels: LabelArguments, medium: str = "image") -> LabelledTask:
    """Load the labelled data that the arguments name, with the kind of media that the model is for.

    The most frequent of a row's answers is its class. Without a validation split, rows are held out of train by the hash
    of their image, or file of a clip or sound, so that none is in both.

    Raises:
        ValueError: in one line, if a file, column or split does not exist, more than half of the rows are unusable, or
            fewer than two classes are left.
    """
    sources = labelled_sources(args, labels, medium)
    title = sources[0].title if sources else "the embedded scenes"
    known: Sequence[str] = ()
    if not sources:
        refuse_columns(args, "the data are the embedded scenes", labels.label_column)
        parts = {split: _asked(rows) for split, rows in load_scenes().items()}
    else:
        rows, known = load_labelled_rows(sources)
        check_single(rows["answers"], title)
        places: dict[str, list[int]] = {split: [] for split in SPLITS}
        for place, split in enumerate(rows["split"]):
            places[split or "train"].append(place)  # a row that says no split is trained on
        places["train"] = _unseen(places, rows, title)
        parts = {split: rows.select(places[split]) for split in SPLITS if places[split]}
    if "train" not in parts:
        raise ValueError(f"{title}; there is no train split, only {', '.join(parts)}. Give rows to train on.")
    if (kind := kind_of(parts["train"].features)) != medium:
        raise ValueError(
            f"{title}; it holds {kind}s, and the model is for {medium}s. Give {medium}s, or a model for {kind}s."
        )
    has_texts = any(parts["train"]["captions"])
    if {has_texts} != {any(rows["captions"]) for rows in parts.values()}:
        raise ValueError(f"{title}; only some of {', '.join(parts)} hold texts. Give all some, and name their column.")
    if args.caption_column and not has_texts:
        raise ValueError(f"--caption_column is {args.caption_column}; it holds lists. Give one text a row.")
    if "validation" not in parts:
        parts |= hold_labelled_out(parts["train"], title)
    total_rows = {split: len(rows) for split, rows in parts.items()}
    for split, rows in parts.items():
        most = args.max_train_samples if split == "train" else args.max_eval_samples
        parts[split] = rows.select(first_of_classes(_labels(rows), most))
    classes = _classes(known, _labels(parts["train"]), title)
    splits = {split: _task_split(parts[split], classes, split) for split in SPLITS if split in parts}
    return LabelledTask(DatasetDict(splits), classes, has_texts, total_rows)


def _unseen(places: Mapping[str, list[int]], rows: Dataset, title: str) -> list[int]:
    """Return the places of the rows of train whose image, with the same texts, is in no other split."""
    shown = [(of_image, *texts) for of_image, texts in zip(rows["content_id"], rows["captions"], strict=True)]
    evaluated = {shown[at] for split, others in places.items() if split != "train" for at in others}
    unseen = [at for at in places["train"] if shown[at] not in evaluated]
    if count := len(places["train"]) - len(unseen):
        logger.warning("%s; %s rows of train are in another split too, and are left out", title, f"{count:,}")
    return unseen


def labelled_sources(args: DataArguments, labels: LabelArguments, medium: str) -> list[Source]:
    """Return the labelled sources that the flags name."""
    if args.dataset_name is not None and is_prepared(args.dataset_name):
        raise ValueError(
            f"--dataset_name is {args.dataset_name}; it is prepared, and has captions and no labels. Give what it was prepared from, "
            "and name the column of classes as --label_column."
        )
    return sources_of(args, labelled=True, medium=medium, label_column=labels.label_column)


def _beside_media(rows: Dataset, columns: dict[str, Any], features: Features | None = None) -> Dataset:
    """Lay columns beside those of the media alone: the file, its hash, and how long a clip or a sound lasts."""
    media = rows.select_columns([name for name in ("image", "content_id", "seconds") if name in rows.column_names])
    return concatenate_datasets([media, Dataset.from_dict(columns, features)], axis=1)


def _asked(scenes: Dataset) -> Dataset:
    places, texts, colours = map(list, zip(*colour_questions(scenes), strict=True))
    columns = {"captions": [[text] for text in texts], "answers": [[colour] for colour in colours]}
    return _beside_media(scenes.select(places), columns)


def hold_labelled_out(train: Dataset, title: str) -> dict[str, Dataset]:
    """Hold rows out by what they show, the same share of each class: by files of clips and sounds, bytes or paths of images."""
    if "file_hash" in train.column_names:
        keys = train["file_hash"][:]
    else:
        images = (image for batch in train.select_columns(["image"]).iter(100) for image in batch["image"])
        keys = [hashlib.blake2b(each["bytes"]).hexdigest() if each["bytes"] else str(each["path"]) for each in images]
    # reversed: what several rows show has the label of the first
    kept, held = hold_out(train, keys, dict(zip(reversed(keys), reversed(_labels(train)), strict=True)))
    if not len(kept):
        raise ValueError(f"{title}; all rows show the same, so none can be held out. Give --validation_file.")
    logger.info("%s: no validation split; %s rows are held out for it", title, f"{len(held):,}")
    return {"train": kept, "validation": held}


def _labels(rows: Dataset) -> list[str]:
    return [label_of(answers) for answers in rows["answers"]]


def label_of(answers: Iterable[str]) -> str:
    """Return the most frequent answer, of equally frequent ones the one given first."""
    return Counter(answers).most_common(1)[0][0]


def check_single(answers: Sequence[Sequence[str]], title: str) -> None:
    """Name the rows that have several labels, equally often; ValueError if most have, as no label is the class of such a row."""

    def is_tied(row: Sequence[str]) -> bool:
        counts = [count for _, count in Counter(row).most_common(2)]
        return len(counts) == 2 and counts[0] == counts[1]

    tied = list(filter(is_tied, answers))
    if not tied:
        return
    said = f"{title}; {len(tied):,} of {len(answers):,} rows have several labels, such as {', '.join(tied[0][:3])}"
    if is_hopeless(len(tied), len(answers)):
        raise ValueError(f"{said}, and a row has one class. Name a column of one label a row by --label_column.")
    logger.warning("%s; the first of them is the class of such a row", said)


def _classes(known: Sequence[str], labels: list[str], title: str) -> list[str]:
    """Return the classes in the order of source, number or name."""
    if not set(labels) <= set(known):
        # numbers by their value, 2 before 10, then names
        known = sorted(
            {*known, *labels}, key=lambda name: (0, float(name), name) if is_number(name) else (1, 0.0, name)
        )
    if len(known) < 2:
        raise ValueError(
            f"{title}; its labels are {known[0]!r} alone, and a task needs two or more. Add others, or set --label_column."
        )
    warn_of_alike(known, title)
    return list(known)


def warn_of_alike(names: Iterable[str], title: str) -> None:
    """Name the classes that differ in case, spaces and the form of accents alone."""
    alike = defaultdict(list)
    for name in names:
        alike[readable(name).casefold()].append(name)
    for group in alike.values():
        if len(group) > 1:
            shown = ", ".join(map(repr, group))
            logger.warning(
                "%s: the classes %s are nearly equal, and are several. Write one name for each.", title, shown
            )


def is_number(name: str) -> bool:
    """Return whether a label is a number; 'nan' and 'inf' are names."""
    try:
        return math.isfinite(float(name))
    except ValueError:
        return False


def _task_split(rows: Dataset, classes: list[str], split: str) -> Dataset:
    """Lay ids, captions and labels beside the media."""
    place = {name: number for number, name in enumerate(classes)}
    count = len(rows)
    columns: dict[str, Any] = {
        "id": [f"{split} {row}" for row in range(count)],
        "captions": [texts or [""] for texts in rows["captions"]],
        "label": [place.get(label, -1) for label in _labels(rows)],
    }
    features = {"id": Value("string"), "captions": List(Value("string")), "label": Value("int64")}
    if others := columns["label"].count(-1):
        logger.info(
            "%s of %s rows of %s have a class that train lacks; they count as wrong",
            f"{others:,}",
            f"{count:,}",
            split,
        )
    present = {*columns["label"]}
    if lacking := [name for name in classes if place[name] not in present]:
        logger.warning("%s has no row of %d classes: %s", split, len(lacking), shortened(", ".join(lacking), 200))
    return _beside_media(rows, columns, Features(features))


def first_of_classes(labels: Sequence[str | int], most: int | None) -> Sequence[int]:
    """Return the places of the first rows of the classes in turn, as folders and tables list one class after the other."""
    if most is None:
        return range(len(labels))
    # of a, a, b, a, c, b the turns are 0, 1, 0, 2, 0, 1: lower ones are taken first
    turns = pandas.Series(range(len(labels))).groupby(list(labels)).cumcount()
    return sorted(turns.sort_values(kind="stable").index[:most])
