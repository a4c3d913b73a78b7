"""Labelled images: any `datasets` source with a column of labels, and what its classes are called in a text."""

import itertools
import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from mm_utils.arguments import arg
from mm_utils.data.raw.columns import SPLIT_NAMES, USUAL_NAMES
from mm_utils.data.raw.folders import class_names
from mm_utils.data.raw.specs import Source
from mm_utils.data.raw.stores import load_splits
from mm_utils.data.raw.tables import with_raw_images

logger = logging.getLogger(__name__)

LABEL_NAMES = ("label", "labels", "class", "class_name", "category", "target", "fine_label")
_SPLITS = ("validation", "test", "train")  # the labels of a test split are often withheld


@dataclass
class LabelledArguments:
    """Which labelled images, and what their classes are called."""

    dataset_name: str | None = arg(
        None,
        "A data set on the Hub, a local folder of one (Parquet, or images in a folder per class), or a folder made by "
        "save_to_disk.",
    )
    dataset_config_name: str | None = arg(None, "Configuration of --dataset_name, if it has several.")
    split: str | None = arg(None, "Which split; default: the first there is of validation, test and train.")
    image_column: str | None = arg(None, "Column of images; found by its type or its usual names.")
    label_column: str | None = arg(None, "Column of labels; found by its type (ClassLabel) or its usual names.")
    classes_file: str | None = arg(
        None,
        "What the classes are called: lines 'id name' for folders such as n01440764, one name a line in the order of "
        "the labels, or JSON {id: name}. Default: the names that the data has.",
    )
    max_eval_samples: int | None = arg(None, "Only so many images, evenly spaced over the split.")

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, with a ValueError of one line."""
        if self.dataset_name is None:
            raise ValueError("--dataset_name is missing; give a labelled data set or a folder of one.")
        if self.max_eval_samples is not None and self.max_eval_samples < 1:
            raise ValueError(f"--max_eval_samples is {self.max_eval_samples}; it counts from 1. Drop it for all.")


@dataclass
class LabelledImages:
    """A labelled split.

    Attributes:
        rows: in the schema that `mm_utils.data.loaders.Loaders.evaluation` reads, without captions.
        label_M: the class of each row, int64.
        classes: names of all classes, also of those without an image.
        split: its name in the source.
    """

    rows: datasets.Dataset
    label_M: Tensor
    classes: list[str]
    split: str


def load_labelled(args: LabelledArguments) -> LabelledImages:
    """Load the split that `args` names.

    Raises:
        ValueError: of one line, if there is no such split or column, no image, a label that is no class, or a class
            without a name.
    """
    title = f"--dataset_name is {args.dataset_name}"
    if Path(str(args.dataset_name)).is_file():
        raise ValueError(f"{title}; that is a file. Give the folder that it is in.")
    splits = load_splits(str(args.dataset_name), args.dataset_config_name, None, title)
    split = _choose_split(args.split, list(splits), title)
    source, title = splits[split], f"{title}, split {split}"
    if not len(source):
        raise ValueError(f"{title}; it has no images. Choose another split or source.")
    features = source.features
    typed = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    image = find_column("image", features, args.image_column, typed, USUAL_NAMES["image"], title)
    typed = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    label = find_column("label", features, args.label_column, typed, LABEL_NAMES, title)
    stored = with_raw_images(source.select_columns([image]), image, title)[0].rename_columns({image: "image"})
    if not isinstance(stored.features["image"], datasets.Image):
        raise ValueError(f"{title}; column {image} holds text. Give images, or a folder of images per class.")
    values = source.select_columns([label]).with_format("arrow")[:][label].to_pylist()
    place = f"{title}, column {label}"
    known = _known_names(features[label], values, place)
    classes = _readable_names(known, args, place)
    label_M = _numbered(values, known, len(classes), place)
    beside = datasets.Dataset.from_dict(
        {
            "id": [f"row {row}" for row in range(len(source))],
            "image_key": list(range(len(source))),
            "input_ids": [[]] * len(source),
            "caption_keys": [[]] * len(source),
        }
    )
    rows = datasets.concatenate_datasets([stored, beside], axis=1)
    if args.max_eval_samples is not None and args.max_eval_samples < len(rows):
        places = np.arange(args.max_eval_samples) * len(rows) // args.max_eval_samples
        rows, label_M = rows.select(places), label_M[places]
    return LabelledImages(rows, label_M, classes, split)


def _choose_split(wanted: str | None, there: list[str], title: str) -> str:
    if wanted is not None and wanted not in there:
        raise ValueError(f"--split is {wanted}; the data has {', '.join(there)}. Choose one of them.")
    by_kind = {SPLIT_NAMES.get(name.lower(), name): name for name in reversed(there)}
    return wanted or next((by_kind[kind] for kind in _SPLITS if kind in by_kind), there[0])


def find_column(
    kind: str, names: Iterable[str], wanted: str | None, typed: list[str], usual: Sequence[str], title: str
) -> str:
    """The column that holds the `kind`: the wanted one, the only one of its type, or one of a usual name.

    Raises:
        ValueError: if there is none, opened by `title`.
    """
    names = list(names)
    found = recognise_column(kind, names, wanted, typed, usual, title)
    if found is None:
        listed = f"The columns are: {', '.join(names)}."
        raise ValueError(f"{title}; no {kind} column was recognised. {listed} Set --{kind}_column.")
    return found


def recognise_column(
    kind: str, names: Sequence[str], wanted: str | None, typed: list[str], usual: Sequence[str], title: str
) -> str | None:
    """As `find_column`; None if there is none and none was wanted."""
    if wanted is not None and wanted not in names:
        listed = f"The columns are: {', '.join(names)}."
        raise ValueError(f"--{kind}_column is {wanted}; there is no such column ({title}). {listed}")
    among = {name.lower(): name for name in typed or names}
    found = typed[0] if len(typed) == 1 else next((among[name] for name in usual if name in among), None)
    return wanted or found


def _known_names(feature: Any, values: list[Any], title: str) -> list[str] | None:
    """The classes as the data itself calls them, in the order of their numbers; None if it has numbers alone."""
    if isinstance(feature, datasets.ClassLabel):
        return list(feature.names)
    kinds = {type(value) for value in values}
    if kinds == {str}:
        return sorted(set(values))
    if kinds <= {int, bool, type(None)}:
        return None
    shown = " and ".join(sorted(kind.__name__ for kind in kinds))
    raise ValueError(f"{title} holds {shown}; a label is a name or a number. Set --label_column.")


def _readable_names(known: list[str] | None, args: LabelledArguments, title: str) -> list[str]:
    """What each class is called in a text: of several synonyms the first, unless another class shares it."""
    found = known if args.classes_file is None else _names_of_file(known, args.classes_file)
    coded = next((name for name in found or () if re.fullmatch(r"n\d{8}", name)), None)
    if found is None or coded:
        shown = f"its class {coded} is a WordNet id" if coded else "its labels are numbers"
        raise ValueError(f"{title}; {shown}, not a name. Set --classes_file to lines 'id name', or a name a line.")
    full = [" ".join(name.replace("_", " ").split()) for name in found]
    first = Counter(name.split(",")[0] for name in full)
    names = [short if first[short := name.split(",")[0]] == 1 else name for name in full]
    if "" in names or len(names) < 2:
        shown = f"class {names.index('')} has no name" if "" in names else f"it has {len(names)} of at least 2 classes"
        raise ValueError(f"{title}; {shown}. Give them in --classes_file, or other data.")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        logger.warning("%s: several classes are called %s; nothing tells them apart", title, ", ".join(twice))
    return names


def _names_of_file(known: list[str] | None, file: str) -> list[str]:
    """By the names that the data has, or else by number."""
    title = f"--classes_file is {file}"
    if not Path(file).is_file():
        raise ValueError(f"{title}; there is no such file. Check the path.")
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


def _numbered(values: list[Any], known: list[str] | None, classes: int, title: str) -> Tensor:
    """Labels `[M]` as numbers of classes."""
    if known is not None and values and isinstance(values[0], str):
        number_of = {name: number for number, name in enumerate(known)}
        values = [number_of[name] for name in values]
    for row, value in enumerate(values):
        if value is None or not 0 <= value < classes:
            raise ValueError(
                f"{title} is {value} in row {row}; the {classes} classes count from 0. Name all of them in "
                "--classes_file, or choose a --split whose labels are public."
            )
    return torch.tensor(values, dtype=torch.long)
