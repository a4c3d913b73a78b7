"""Labelled media and texts, to fine-tune on.

Rows come from the reader of pairs (`mm_utils.data.rows`): a class or an answer is a column, the folder of a file, or the `.cls` of a
tar's sample. A row of a task is in the schema of `mm_utils.data.pairs`, with one text as its `captions` and its class as `label`;
what it has none of is filled in, an empty text or a grey pixel, and not read.
"""

import hashlib
import heapq
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from datasets import Dataset, DatasetDict, Features, List, Value, concatenate_datasets
from transformers import ProcessorMixin

from mm_utils import distributed
from mm_utils.arguments import arg
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.batches.tokens import tokenize_splits
from mm_utils.data.media import FEATURES, kind_of
from mm_utils.data.media.medium import kind_of_processor
from mm_utils.data.pairs import sources_of
from mm_utils.data.prepare.cache import load_labelled_rows
from mm_utils.data.prepare.on_disk import is_prepared, open_prepared
from mm_utils.data.rows.class_folders import readable
from mm_utils.data.rows.columns import SPLITS, hold_out, wrong_kind
from mm_utils.data.rows.source import DataArguments, PathArguments, Source, is_embedded
from mm_utils.data.scenes import load_scenes
from mm_utils.data.sets import SETS
from mm_utils.data.sets.questions import TASKS
from mm_utils.data.training_data import Schedule, TrainingData, make_data

logger = logging.getLogger(__name__)

_AGREEING = 3  # people whose equal answer is right; fewer count for their share (VQA, arXiv 1505.00468, section 4)


@dataclass
class LabelArguments:
    """The column of labels."""

    label_column: str | None = arg(
        None, "Column of classes or answers; found by type (ClassLabel) or usual names.", usual=True
    )


@dataclass
class TaskArguments(LabelArguments):
    """Labels to learn. A row has a label and a medium, a text (--caption_column), or both; of a prepared set, equal captions are a class."""

    task: str | None = arg(
        None,
        f"A task on an embedded set of the model's kind: {', '.join(TASKS)}. Default without a source: scenes:describes.",
        usual=True,
    )
    num_answers: int | None = arg(
        None, "Only the N most frequent classes of the training data; others are not trained on, and count as wrong."
    )

    def __post_init__(self) -> None:
        if self.task and self.task not in TASKS:
            raise ValueError(f"--task is {self.task}; choose one of {', '.join(TASKS)}.")
        if self.num_answers is not None and self.num_answers < 2:
            raise ValueError(f"--num_answers is {self.num_answers}; give at least 2, or drop it to have no limit.")


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


def open_task(
    accelerator: Accelerator,
    data_args: DataArguments,
    task_args: TaskArguments,
    loader_args: LoaderArguments,
    schedule: Schedule,
    processor: ProcessorMixin,
    fits_batch: bool = True,
) -> tuple[LabelledTask, TrainingData]:
    """Open the labelled rows that the arguments name, with loaders; see `open_data`."""
    with distributed.first_then_others():
        task = load_task(data_args, task_args, kind_of_processor(processor))
        task.splits = tokenize_splits(task.splits, processor.tokenizer, loader_args.max_seq_length)
    return task, make_data(accelerator, task.splits, processor, loader_args, schedule, fits_batch=fits_batch)


def load_task(args: DataArguments, labels: TaskArguments, medium: str = "image") -> LabelledTask:
    """Load the labelled data that the arguments name, with the kind of media that the model is for.

    The most frequent of a row's answers is its class. Without a validation split, rows are held out of train by the hash
    of their image, file of a clip or sound, or text where there is none, so that none is in both.

    Raises:
        ValueError: in one line, if a file, column or split does not exist, more than half of the rows are unusable, or
            fewer than two classes are left.
    """
    sources = labelled_sources(args, labels, medium)
    if sources and labels.task:
        raise ValueError(
            f"--task is {labels.task}; {sources[0].title}, too, and labels have one source. Keep one of them."
        )
    task = labels.task or "scenes:describes"
    title = sources[0].title if sources else f"--task is {task}"
    known: Sequence[str] = ()
    if not sources:
        parts = _read_embedded(task)
    elif is_prepared(sources[0].path):
        parts = _read_prepared(sources[0], args)
    else:
        rows, known = load_labelled_rows(sources, PathArguments(args.image_root, args.allow_outside_root))
        parts = _by_split(rows)
    if "train" not in parts:
        raise ValueError(f"{title}; there is no train split, only {', '.join(parts)}. Give rows to train on.")
    if (kind := kind_of(parts["train"].features)) != medium:
        raise wrong_kind(f"{title}; it", kind, medium)
    has_images, has_texts = _shown(parts, medium, title)
    if not has_images and medium != "image":
        raise ValueError(
            f"{title}; its rows are texts alone, and the model is for {medium}s. Take a model of images, or add {medium}s."
        )
    if args.caption_column and not has_texts:
        raise ValueError(f"--caption_column is {args.caption_column}; it holds lists. Give one text a row.")
    if "validation" not in parts:
        parts |= _hold_out(parts["train"], has_images, title)
    for split, rows in parts.items():
        most = args.max_train_samples if split == "train" else args.max_eval_samples
        parts[split] = rows.select(first_of_classes(_labels(rows), most))
    classes = _classes(known, _labels(parts["train"]), labels.num_answers, title)
    splits = {split: _task_split(parts[split], classes, split, has_images) for split in SPLITS if split in parts}
    return LabelledTask(DatasetDict(splits), classes, has_images, has_texts, title)


def labelled_sources(args: DataArguments, labels: LabelArguments, medium: str) -> list[Source]:
    """Return the labelled sources that the flags name."""
    if is_embedded(args.dataset_name):
        tasks = ", ".join(task for task in TASKS if task.startswith(str(args.dataset_name)))
        raise ValueError(
            f"--dataset_name is {args.dataset_name}; its rows have no labels. Give a --task on them: {tasks}."
        )
    return sources_of(args, labelled=True, medium=medium, label_column=labels.label_column)


def _by_split(rows: Dataset) -> dict[str, Dataset]:
    """Divide rows by their column `split`; those without one are of train."""
    places: dict[str, list[int]] = {}
    for place, split in enumerate(rows["split"]):
        places.setdefault(split or "train", []).append(place)
    return {split: rows.select(places[split]) for split in SPLITS if split in places}


def has_media(rows: Dataset) -> bool:
    """Return whether labelled rows hold media."""
    image = rows[0]["image"]
    return bool(image["bytes"] or image["path"])


def _shown(parts: dict[str, Dataset], medium: str, title: str) -> tuple[bool, bool]:
    """Return whether rows hold media, and texts; refuse splits of which only some do."""
    shows = {split: (has_media(rows), any(rows["captions"])) for split, rows in parts.items()}
    for split, shown in shows.items():
        if shown != shows["train"]:
            what = f"{medium}s" if shown[0] != shows["train"][0] else "texts"
            raise ValueError(
                f"{title}; only one of train and {split} has {what}. Give both some, and name their columns."
            )
    return shows["train"]


def _media_of(rows: Dataset) -> Dataset:
    """Return the columns of the media alone: the file, and how long a clip or a sound lasts."""
    return rows.select_columns([name for name in ("image", "seconds") if name in rows.column_names])


def _read_embedded(name: str) -> dict[str, Dataset]:
    found, of_set, ask = {}, name.partition(":")[0], TASKS[name]
    splits = load_scenes() if of_set == "scenes" else SETS[of_set]()
    for split, rows in splits.items():
        places, texts, labels = map(list, zip(*ask(rows), strict=True))
        beside = {"captions": [[text] for text in texts], "answers": [[label] for label in labels]}
        found[str(split)] = concatenate_datasets([_media_of(rows).select(places), Dataset.from_dict(beside)], axis=1)
    return found


def open_captioned(source: Source, args: DataArguments) -> DatasetDict:
    """Open a prepared set, whose captions tell the classes; refuse flags that name them otherwise."""
    for flag in ("classes", "label_column", "image_column", "caption_column"):
        if getattr(source, flag) is not None:
            raise ValueError(f"{source.title}; it is prepared, and its captions tell the classes. Drop --{flag}.")
    return open_prepared(source.path, source.title, source.config, args.allow_outside_root)


def _read_prepared(source: Source, args: DataArguments) -> dict[str, Dataset]:
    """Label a prepared set's rows by their first caption, see `caption_classes`."""
    splits, found = open_captioned(source, args), {}
    captions = iter(caption_classes([each for rows in splits.values() for each in rows["captions"]], source.title))
    for split, rows in splits.items():
        beside = {"answers": [[next(captions)[0]] for _ in range(len(rows))], "captions": [[]] * len(rows)}
        found[str(split)] = concatenate_datasets([_media_of(rows), Dataset.from_dict(beside)], axis=1)
    return found


def caption_classes(captions: Sequence[Sequence[str]], title: str) -> list[tuple[str, ...]]:
    """Return each row's captions, each once; rows of equal ones are of one class, in the order of its first row.

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


def _hold_out(train: Dataset, has_images: bool, title: str) -> dict[str, Dataset]:
    """Hold rows out by what they show, the same share of each class: by files of clips and sounds, bytes or paths of images, or texts."""
    if not has_images:
        keys = [text for [text] in train["captions"]]
    elif "file_hash" in train.column_names:
        keys = train["file_hash"][:]
    else:
        images = (image for batch in train.select_columns(["image"]).iter(100) for image in batch["image"])
        keys = [hashlib.blake2b(each["bytes"]).hexdigest() if each["bytes"] else str(each["path"]) for each in images]
    answers = _labels(train)
    kept, held = hold_out(train, keys, dict(zip(reversed(keys), reversed(answers), strict=True)))
    if not len(kept):
        raise ValueError(f"{title}; all rows show the same, so none can be held out. Give --validation_file.")
    logger.info("%s: no validation split; %s rows are held out for it", title, f"{len(held):,}")
    missing = sorted(set(answers) - set(_labels(held)))
    if missing:
        logger.info("%s: no row of %s of the classes is held out, such as %s", title, f"{len(missing):,}", missing[0])
    return {"train": kept, "validation": held}


def _labels(rows: Dataset) -> list[str]:
    """Return each row's most frequent answer, of equally frequent ones the one given first."""
    return [Counter(answers).most_common(1)[0][0] for answers in rows["answers"]]


def _classes(known: Sequence[str], labels: list[str], most: int | None, title: str) -> list[str]:
    """Return the classes: the `most` frequent, or in the order of source, number or name."""
    counts = Counter(labels)
    if most is not None:
        known = [name for name, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]]
    elif not known:
        known = sorted(counts, key=lambda name: (0, float(name), name) if is_number(name) else (1, 0.0, name))
    if len(known) < 2:
        raise ValueError(
            f"{title}; its labels are {known[0]!r} alone, and a task has 2 classes. Add others, or set --label_column."
        )
    warn_of_alike(known, title)
    return list(known)


def warn_of_alike(names: Iterable[str], title: str) -> None:
    """Name the classes that differ in case and spaces alone."""
    alike = defaultdict(list)
    for name in names:
        alike[readable(name).casefold()].append(name)
    for group in alike.values():
        if len(group) > 1:
            logger.warning(
                "%s: the classes %s are nearly equal, and are several. Write one name for each class.",
                title,
                ", ".join(map(repr, group)),
            )


def is_number(name: str) -> bool:
    """Return whether a label is a number."""
    try:
        float(name)
    except ValueError:
        return False
    return True


def _task_split(rows: Dataset, classes: list[str], split: str, has_images: bool) -> Dataset:
    """Lay ids, captions and labels beside the media, or beside grey pixels; train keeps only known classes."""
    place, count = {name: number for number, name in enumerate(classes)}, len(rows)
    columns: dict[str, Any] = {
        "id": [f"{split} {row}" for row in range(count)],
        "captions": [texts or [""] for texts in rows["captions"]],
        "label": [place.get(label, -1) for label in _labels(rows)],
    }
    features = {"id": Value("string"), "captions": List(Value("string")), "label": Value("int64")}
    if any(len(given) > 1 for given in rows["answers"]):
        features["answers"] = List({"label": Value("int64"), "share": Value("float64")})
        columns["answers"] = [
            [
                {"label": place[name], "share": 1.0 if len(given) == 1 else min(1.0, times / _AGREEING)}
                for name, times in Counter(given).items()
                if name in place
            ]
            for given in rows["answers"]
        ]
    media = _media_of(rows)
    if not has_images:
        pixel = {"bytes": b"\x80\x80\x80", "path": "raw:1x1"}
        media = Dataset.from_dict({"image": [pixel] * count}, Features({"image": FEATURES["image"]}))
    built = concatenate_datasets([media, Dataset.from_dict(columns, Features(features))], axis=1)
    others = columns["label"].count(-1)
    if others:
        left = "left out of train" if split == "train" else f"counted as wrong in {split}"
        logger.info("%s of %s rows have a class that is not learnt; they are %s", f"{others:,}", f"{count:,}", left)
    if split != "train":
        return built
    return built.select([row for row, label in enumerate(columns["label"]) if label >= 0])


def first_of_classes(labels: Sequence[str | int], most: int | None) -> Sequence[int]:
    """Return the places of the first rows of the classes in turn, as folders and tables list one class after the other."""
    if most is None:
        return range(len(labels))
    seen: Counter[str | int] = Counter()
    turns = []
    for row, label in enumerate(labels):
        turns.append((seen[label], row))
        seen[label] += 1
    return sorted(row for _, row in heapq.nsmallest(most, turns))
