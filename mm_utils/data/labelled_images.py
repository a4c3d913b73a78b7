"""Load one split of labelled media, with readable class names, for zero-shot evaluation."""

import difflib
import itertools
import logging
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from mm_utils.arguments import arg
from mm_utils.data.labelled.folders import read_class_folder
from mm_utils.data.labelled.rows import LabelledRows, Wanted, read_dataset
from mm_utils.data.labelled.shards import CLASS_NAMES, read_labelled_shards, shards_by_split, templates_beside
from mm_utils.data.media import kind_of
from mm_utils.data.prepare.on_disk import is_prepared, open_prepared
from mm_utils.data.rows.columns import SPLIT_NAMES, caption_classes, listed
from mm_utils.data.rows.source import PathArguments, Source, class_names
from mm_utils.data.rows.stored import dataset_jail, load_splits
from mm_utils.data.rows.webdataset import holds_shards
from mm_utils.doors import entries, load

logger = logging.getLogger(__name__)


@dataclass
class LabelledArguments:
    """Labelled images, clips or sounds, and the names of their classes."""

    dataset_name: str | None = arg(
        None,
        "A data set on the Hub, a local folder of one (Parquet, files in a folder per class, or images in tar shards as "
        "CLIP_benchmark writes them), or a folder made by save_to_disk. Of a prepared set, equal captions are a class.",
    )
    dataset_config_name: str | None = arg(None, "Configuration of --dataset_name, if it has several.")
    split: str | None = arg(
        None, "Split; default: that of the benchmark, else the first there is of validation, test and train."
    )
    image_column: str | None = arg(None, "Column of images, clips or sounds; found by its type or its usual names.")
    label_column: str | None = arg(None, "Column of labels; found by its type (ClassLabel) or its usual names.")
    classes: str | None = arg(
        None,
        f"A benchmark, {', '.join(entries('CLASS_BENCHMARKS'))}: its classes and prompts and, without --dataset_name, its "
        "images from the Hub. Or a file: lines 'id name' for folders such as n01440764, one name a line in the order of the "
        "labels, or JSON {id: name}. Default: the names that the data has.",
    )
    max_eval_samples: int | None = arg(None, "At most N images, evenly spaced over the split.")

    def __post_init__(self) -> None:
        if self.dataset_name is None and self.benchmark is None:
            raise ValueError(
                "--dataset_name is missing; give a labelled data set, a folder of one, or the name of a benchmark as --classes."
            )
        if self.max_eval_samples is not None and self.max_eval_samples < 1:
            raise ValueError(f"--max_eval_samples is {self.max_eval_samples}; it counts from 1. Drop it for all.")

    @property
    def benchmark(self) -> Any:
        """The benchmark that `classes` names; None for a file.

        Raises:
            ValueError: if it is neither.
        """
        if self.classes is None or Path(self.classes).is_file():
            return None
        known = entries("CLASS_BENCHMARKS")
        if self.classes not in known:
            close = difflib.get_close_matches(self.classes, known, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            title = f"--classes is {self.classes}; there is no such file and no such benchmark"
            raise ValueError(f"{title}. Known are {', '.join(known)}.{hint}")
        return load(known[self.classes])(self.classes)


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
    if Path(name).is_file():
        raise ValueError(f"{title}; that is a file. Give the folder that it is in.")
    if is_prepared(name):
        return _load_prepared(args, name, title)
    usual = ["validation", "test", "train"]  # the labels of a test split are often withheld
    usual = usual if benchmark is None else [benchmark.split, *usual]
    templates: tuple[str, ...] = ()
    wanted = Wanted(args.label_column, args.image_column, medium=medium)
    folders = read_class_folder(name, wanted, title, PathArguments())
    if folders is not None:
        split, file = _choose_split(args.split, list(folders), usual), args.classes
        rows = folders[split].rows
    elif holds_shards(name):
        shards, beside = shards_by_split(name, title), Path(name, CLASS_NAMES)
        split, templates = _choose_split(args.split, list(shards), usual), templates_beside(name)
        rows = read_labelled_shards(shards[split], f"{title}, split {split}")
        file = args.classes or (str(beside) if beside.is_file() else None)
    else:
        splits = load_splits(name, args.dataset_config_name, None, title)
        split = _choose_split(args.split, list(splits), usual)
        rows, file = splits[split], args.classes
    jail = dataset_jail(name, None, allow_outside=False)
    found = folders[split] if folders else read_dataset(rows, wanted, f"{title}, split {split}", jail)
    found = _check_rows(found, rows)
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
    rows, label_M = _sample(_evaluated(found.rows), label_M, args.max_eval_samples)
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
    rows, label_M = _sample(_evaluated(splits[split]), numbers, args.max_eval_samples)
    texts = [list(each[:most]) for each in known]
    return LabelledImages(rows, label_M, [each[0] for each in known], split, texts=texts)


def _check_rows(found: LabelledRows, rows: Dataset) -> LabelledRows:
    """Return the rows without unreadable clips and sounds; raise ValueError for other bad rows."""
    if not found.has("image"):
        raise ValueError(f"{found.title}; no image column was recognised. {listed(rows.column_names)}")
    is_timed = kind_of(found.rows.features) != "image"
    for row, reason in found.faults.items():
        if is_timed and "no label" not in reason:
            continue
        advice = "Choose a --split whose labels are public, or set --label_column."
        raise ValueError(
            f"{found.title}, row {row}, {reason}. {advice if 'no label' in reason else 'Copy the image there.'}"
        )
    return found.usable()


def _evaluated(rows: Dataset) -> Dataset:
    """Return the rows in the schema that evaluations read."""
    count = len(rows)
    beside = {"id": [f"row {row}" for row in range(count)], "image_key": list(range(count))}
    empty: dict[str, list[Any]] = {"input_ids": [[]] * count, "caption_keys": [[]] * count}
    images = rows.select_columns(["image"])
    return datasets.concatenate_datasets([images, Dataset.from_dict({**beside, **empty})], axis=1)


def _sample(rows: Dataset, label_M: Tensor, most: int | None) -> tuple[Dataset, Tensor]:
    count = len(rows)
    if most is None or most >= count:
        return rows, label_M
    places = np.arange(most) * count // most
    return rows.select(places), label_M[places]


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
    are_numbers = known is not None and all(map(str.isdecimal, known))  # sorted as text: 1, 10, 100, 2
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
