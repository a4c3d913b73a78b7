"""What rows are labelled with becomes numbers of classes: names, numbers, or several people's answers to one question."""

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

from mm_utils.data.labelled_sources import Labelled

logger = logging.getLogger(__name__)

_AGREEING = 3
"""An answer that so many people gave is right, of fewer each counts for its share (VQA, arXiv 1505.00468, section 4)."""


@dataclass
class Answers:
    """Labels of a split.

    Attributes:
        labels: the place of each row's most frequent answer among the classes, -1 if it is none of them.
        shares: where rows have several answers, the accuracy that each class among them earns; else None.
    """

    labels: list[int]
    shares: list[dict[int, float]] | None = None


def number_answers(
    splits: dict[str, Labelled], num_answers: int | None, title: str
) -> tuple[list[str], dict[str, Answers]]:
    """The names of the classes, those of train, and each split's answers by number.

    Classes are in the order that the source gives them, else of their numbers or names; with `num_answers` only so many, the
    most frequent ones first.

    Raises:
        ValueError: if there are fewer than 2.
    """
    given = {split: [_answers(label, rows, title) for label in rows.labels] for split, rows in splits.items()}
    first = {split: [next(iter(answers)) for answers in rows] for split, rows in given.items()}
    classes = splits["train"].names
    counts = Counter(first["train"])
    if num_answers is not None:
        classes = [name for name, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:num_answers]]
    elif classes is None:
        classes = sorted(counts, key=lambda name: (0, float(name), name) if _is_number(name) else (1, 0.0, name))
    if len(classes) < 2:
        raise ValueError(
            f"{title}; its labels are {classes[0]!r} alone, and a task has 2 classes. Set --label_column."
        )
    place = {name: number for number, name in enumerate(classes)}
    found = {}
    for split, rows in given.items():
        labels = [place.get(name, -1) for name in first[split]]
        several = any(isinstance(label, list) for label in splits[split].labels)
        shares = [_shares(answers, place) for answers in rows] if several else None
        found[split] = Answers(labels, shares)
        if split != "train" and -1 in labels:
            logger.info("%s: %s of %s rows of %s have a class that train has not, and count as wrong",
                        title, f"{labels.count(-1):,}", f"{len(labels):,}", split)  # fmt: skip
    return classes, found


def _answers(label: Any, rows: Labelled, title: str) -> Counter[str]:
    """All answers of a row, the most frequent one first, of equally frequent ones the one given first."""
    several = label if isinstance(label, list) else [label]
    names = []
    for value in several:
        value = value.get("answer") if isinstance(value, dict) else value
        if isinstance(value, (list, dict)) or value is None:
            raise ValueError(f"{title}; a label is {value!r}, and a label is a name or a number. Set --label_column.")
        names.append(rows.names[value] if rows.names is not None and isinstance(value, int) else str(value).strip())
    return Counter(dict(Counter(names).most_common()))


def _shares(answers: Counter[str], place: dict[str, int]) -> dict[int, float]:
    if answers.total() == 1:
        return {place[name]: 1.0 for name in answers if name in place}
    return {place[name]: min(1.0, count / _AGREEING) for name, count in answers.items() if name in place}


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True
