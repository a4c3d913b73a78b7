"""Labelled media and texts, to fine-tune on (`load_task`) and for zero-shot evaluation (`load_labelled`).

Rows come from the reader of pairs (`mm_utils.data.rows`): a class or an answer is a column, the folder of a file, or the `.cls` of a
tar's sample. A row of a task is in the schema of `mm_utils.data.pairs`, with one text as its `captions` and its class as `label`;
what it has none of is filled in, an empty text or a grey pixel, and not read.
"""

import hashlib
import heapq
import itertools
import logging
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict, Features, List, Value, concatenate_datasets
from torch import Tensor
from transformers import ProcessorMixin

from mm_utils import distributed
from mm_utils.arguments import arg
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.batches.tokens import tokenize_splits
from mm_utils.data.benchmarks import CLASSIFICATION, Benchmark, find_benchmark
from mm_utils.data.media import FEATURES, kind_of
from mm_utils.data.media.medium import kind_of_processor
from mm_utils.data.pairs import sources_of
from mm_utils.data.prepare.cache import load_labelled_rows
from mm_utils.data.prepare.on_disk import is_prepared, open_prepared
from mm_utils.data.prepare.pipeline import rows_of
from mm_utils.data.rows.class_folders import class_names, readable
from mm_utils.data.rows.columns import SPLIT_NAMES, SPLITS, hold_out, wrong_kind
from mm_utils.data.rows.detect import detect
from mm_utils.data.rows.records import Record
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
class LabelledArguments(LabelArguments):
    """Labelled images, clips or sounds, and the names of their classes. Of a prepared set, equal captions are a class."""

    split: str | None = arg(
        None, "Split; default: that of the benchmark, else the first there is of validation, test and train."
    )
    classes: str | None = arg(
        None,
        f"A benchmark, {', '.join(CLASSIFICATION)}: its classes and prompts and, without a source, its "
        "images from the Hub. Or a file: lines 'id name' for folders such as n01440764, one name a line in the order of the "
        "labels, or JSON {id: name}. Default: the names that the data has.",
    )

    def __post_init__(self) -> None:
        if self.split is not None and self.split.lower() not in SPLIT_NAMES:
            raise ValueError(f"--split is {self.split}; a split is train, validation or test. Choose one of them.")

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


@dataclass
class LabelledImages:
    """A labelled split.

    Attributes:
        rows: in the schema that `mm_utils.data.batches.loaders.Loaders.evaluation` reads, without captions.
        label_M: the class of each row, int64.
        classes: names of all classes, also of those without an image.
        split: train, validation or test.
        templates: prompts that the benchmark has; else none.
        texts: of a prepared set, the captions of each class, as many of each, in place of names in prompts.
    """

    rows: Dataset
    label_M: Tensor
    classes: list[str]
    split: str
    templates: tuple[str, ...] = ()
    texts: list[list[str]] | None = None


def open_task(
    accelerator: Accelerator,
    data_args: DataArguments,
    task_args: TaskArguments,
    loader_args: LoaderArguments,
    schedule: Schedule,
    processor: ProcessorMixin,
) -> tuple[LabelledTask, TrainingData]:
    """Open the labelled rows that the arguments name, with loaders; see `open_data`."""
    with distributed.first_then_others():
        task = load_task(data_args, task_args, kind_of_processor(processor))
        task.splits = tokenize_splits(task.splits, processor.tokenizer, loader_args.max_seq_length)
    return task, make_data(accelerator, task.splits, processor, loader_args, schedule)


def load_task(args: DataArguments, labels: TaskArguments, medium: str = "image") -> LabelledTask:
    """Load the labelled data that the arguments name, with the kind of media that the model is for.

    The most frequent of a row's answers is its class. Without a validation split, rows are held out of train by the hash
    of their image, file of a clip or sound, or text where there is none, so that none is in both.

    Raises:
        ValueError: in one line, if a file, column or split does not exist, more than half of the rows are unusable, or
            fewer than two classes are left.
    """
    sources = _sources(args, labels, medium)
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
        parts[split] = rows.select(_first_of_classes(_labels(rows), most))
    classes = _classes(known, _labels(parts["train"]), labels.num_answers, title)
    splits = {split: _task_split(parts[split], classes, split, has_images) for split in SPLITS if split in parts}
    return LabelledTask(DatasetDict(splits), classes, has_images, has_texts, title)


def _sources(args: DataArguments, labels: LabelArguments, medium: str) -> list[Source]:
    """Return the labelled sources that the flags name."""
    if is_embedded(args.dataset_name):
        tasks = ", ".join(task for task in TASKS if task.startswith(str(args.dataset_name)))
        raise ValueError(
            f"--dataset_name is {args.dataset_name}; its rows have no labels. Give a --task on them: {tasks}."
        )
    sources = [
        replace(source, labelled=True, medium=medium, label_column=labels.label_column) for source in sources_of(args)
    ]
    return [replace(source, format="") if os.path.isdir(source.path) else source for source in sources]


def _by_split(rows: Dataset) -> dict[str, Dataset]:
    """Divide rows by their column `split`; those without one are of train."""
    places: dict[str, list[int]] = {}
    for place, split in enumerate(rows["split"]):
        places.setdefault(split or "train", []).append(place)
    return {split: rows.select(places[split]) for split in SPLITS if split in places}


def _has_media(rows: Dataset) -> bool:
    image = rows[0]["image"]
    return bool(image["bytes"] or image["path"])


def _shown(parts: dict[str, Dataset], medium: str, title: str) -> tuple[bool, bool]:
    """Return whether rows hold media, and texts; refuse splits of which only some do."""
    shows = {split: (_has_media(rows), any(rows["captions"])) for split, rows in parts.items()}
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


def _open_prepared(source: Source, args: DataArguments) -> DatasetDict:
    """Open a prepared set, whose captions tell the classes; refuse flags that name them otherwise."""
    for flag in ("classes", "label_column", "image_column", "caption_column"):
        if getattr(source, flag) is not None:
            raise ValueError(f"{source.title}; it is prepared, and its captions tell the classes. Drop --{flag}.")
    return open_prepared(source.path, source.title, source.config, args.allow_outside_root)


def _read_prepared(source: Source, args: DataArguments) -> dict[str, Dataset]:
    """Label a prepared set's rows by their first caption, see `_caption_classes`."""
    splits, found = _open_prepared(source, args), {}
    captions = iter(_caption_classes([each for rows in splits.values() for each in rows["captions"]], source.title))
    for split, rows in splits.items():
        beside = {"answers": [[next(captions)[0]] for _ in range(len(rows))], "captions": [[]] * len(rows)}
        found[str(split)] = concatenate_datasets([_media_of(rows), Dataset.from_dict(beside)], axis=1)
    return found


def _caption_classes(captions: Sequence[Sequence[str]], title: str) -> list[tuple[str, ...]]:
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
        known = sorted(counts, key=lambda name: (0, float(name), name) if _is_number(name) else (1, 0.0, name))
    if len(known) < 2:
        raise ValueError(f"{title}; its labels are {known[0]!r} alone, and a task has 2 classes. Set --label_column.")
    _warn_of_alike(known, title)
    return list(known)


def _warn_of_alike(names: Iterable[str], title: str) -> None:
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


def _is_number(name: str) -> bool:
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


# -- zero-shot --------------------------------------------------------------------------------------------------------


def load_labelled(args: DataArguments, labels: LabelledArguments, medium: str = "image") -> LabelledImages:
    """Load the split that the arguments name, of the kind of media that the model is for.

    Raises:
        ValueError: in one line, if there is no such split or column, no image, a label that is not a class, or a class
            without a name.
    """
    benchmark = labels.benchmark
    sources = _sources(args, labels, medium)
    if not sources and benchmark is not None:
        title = f"--classes is {benchmark.name}"
        sources = [Source(benchmark.fetch(title), name=benchmark.name, title=title, labelled=True, medium=medium)]
    if not sources:
        raise ValueError(
            "--dataset_name is missing; give a labelled data set, a folder of one, or the name of a benchmark as --classes."
        )
    usual = ["validation", "test", "train"]  # the labels of a test split are often withheld
    usual = usual if benchmark is None else [benchmark.split, *usual]
    title, paths = sources[0].title, PathArguments(args.image_root, args.allow_outside_root)
    if is_prepared(sources[0].path):
        splits = _open_prepared(replace(sources[0], classes=labels.classes), args)
        split = _choose_split(labels.split, set(map(str, splits)), usual)
        captions = _caption_classes(splits[split]["captions"], f"{title}, split {split}")
        known = sorted(set(captions))
        label_M = torch.tensor([known.index(each) for each in captions])
        rows, label_M = _evaluated(splits[split], label_M, args.max_eval_samples)
        texts = [list(each[: min(map(len, known))]) for each in known]
        return LabelledImages(rows, label_M, [each[0] for each in known], split, texts=texts)
    there = {row.split or "train" for source in sources for row in rows_of(source, paths) if isinstance(row, Record)}
    split = _choose_split(labels.split, there, usual)
    sources, title = [replace(source, only=split) for source in sources], f"{title}, split {split}"
    rows, known = load_labelled_rows(sources, paths)
    if not _has_media(rows):
        raise ValueError(f"{title}; no {medium} column was recognised. Set --image_column.")
    names = [answers[0] for answers in rows["answers"]]
    has_folders = os.path.isdir(sources[0].path) and detect(sources[0]) == "classes"  # whose names may be numbers
    if not known and (has_folders or not all(map(_is_number, names))):
        known = tuple(sorted(set(names)))
    if benchmark is not None and len(names) != benchmark.images:
        logger.warning(
            "%s: %s images, and %s has %s; the figures are not those of the benchmark",
            title, f"{len(names):,}", benchmark.name, f"{benchmark.images:,}",
        )  # fmt: skip
    classes = _readable_names(known, labels.classes, title) if benchmark is None else list(benchmark.classes)
    places = range(len(classes)) if benchmark is None else benchmark.places(known, title)
    number_of = dict(zip(known or map(str, range(len(classes))), places, strict=True))
    unknown = next((row for row, name in enumerate(names) if name not in number_of), None)
    if unknown is not None:
        raise ValueError(
            f"{title}, row {unknown}: the label is {names[unknown]}; the {len(classes)} classes count from 0. Name all of "
            "them in --classes."
        )
    rows, label_M = _evaluated(rows, torch.tensor([number_of[name] for name in names]), args.max_eval_samples)
    return LabelledImages(rows, label_M, classes, split, () if benchmark is None else benchmark.templates)


def _evaluated(rows: Dataset, label_M: Tensor, most: int | None) -> tuple[Dataset, Tensor]:
    """Return the first rows of the classes in turn, in the schema that evaluations read, and their classes."""
    count = len(rows)
    beside = {"id": [f"row {row}" for row in range(count)], "image_key": list(range(count))}
    empty: dict[str, list[Any]] = {"input_ids": [[]] * count, "caption_keys": [[]] * count}
    built = concatenate_datasets([rows.select_columns(["image"]), Dataset.from_dict({**beside, **empty})], axis=1)
    places = _first_of_classes(label_M.tolist(), most)
    return built.select(places), label_M[places]


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


def _choose_split(wanted: str | None, there: set[str], usual: list[str]) -> str:
    split = SPLIT_NAMES[wanted.lower()] if wanted else next((each for each in usual if each in there), "train")
    if there and split not in there:
        raise ValueError(f"--split is {wanted or split}; the data has {', '.join(sorted(there))}. Choose one of them.")
    return split


def _readable_names(known: Sequence[str], file: str | None, title: str) -> list[str]:
    """Return class names for texts: the first synonym, unless another class shares it.

    Args:
        known: the names that the data has; none where its labels are numbers.
        file: names by those, or else in their order; see `class_names`.
    """
    found = list(known)
    if file is not None:
        given = class_names(Source(file, classes=file))
        by_number = [given[key] for key in itertools.takewhile(given.__contains__, map(str, itertools.count()))]
        missing = next((name for name in known if name not in given), None if known or by_number else "label 0")
        # A file that names some of them is one of keys, not of places.
        if missing and (not known or len(known) != len(by_number) or any(name in given for name in known)):
            raise ValueError(
                f"the names of the classes are those of {file}; it has {len(given)} names for {len(known)} classes and none for "
                f"{missing}. Write lines 'id name', or a name a line for every class."
            )
        found = by_number if missing or not known else [given[name] for name in known]
    coded = next((name for name in found if re.fullmatch(r"n\d{8}", name)), None)
    if not found or coded:
        shown = f"its class {coded} is a WordNet id" if coded else "its labels are numbers"
        raise ValueError(f"{title}; {shown}, not a name. Set --classes to lines 'id name', or a name a line.")
    full = [readable(name) for name in found]
    first = Counter(name.split(",")[0] for name in full)
    names = [short if first[short := name.split(",")[0]] == 1 else name for name in full]
    if "" in names or len(names) < 2:
        shown = f"class {names.index('')} has no name" if "" in names else f"it has {len(names)} of at least 2 classes"
        raise ValueError(f"{title}; {shown}. Give them in --classes, or other data.")
    _warn_of_alike(names, title)
    return names
