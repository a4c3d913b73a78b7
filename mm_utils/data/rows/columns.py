"""Columns and splits: their usual names, and the values of a row."""

import ast
import difflib
import hashlib
import heapq
import json
import logging
import math
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from datasets import Dataset

from mm_utils.data.arguments import SPLIT_NAMES, SPLITS
from mm_utils.data.faults import Fault, excerpt, first_repeated, storable
from mm_utils.data.media.medium import MEDIA, Image
from mm_utils.text import printable, shortened

logger = logging.getLogger(__name__)

SUFFIXES = {kind: medium.suffixes for kind, medium in MEDIA.items()}
_CAPTION_NAMES = "caption,captions,text,texts,sentence,sentences,sentences_raw,raw,title,alt_text,alt,txt,description"
USUAL_NAMES = {
    "image": Image.names,
    "caption": _CAPTION_NAMES.split(","),
    # `id` comes last: in files made from COCO's annotations it numbers the captions, and `image_id` the images.
    "id": ["image_id", "imgid", "cocoid", "id"],
}
LABEL_NAMES = [
    *("label", "labels", "class", "class_name", "category", "target", "fine_label"),
    *("multiple_choice_answer", "answer", "answers", "gold_label"),
]
TEXT_NAMES = ["question", "hypothesis", "query", *USUAL_NAMES["caption"]]  # of the text of a labelled row
MEDIUM_NAMES = {kind: medium.names for kind, medium in MEDIA.items()}
_ANY_FILE = ("filepath", "file_path", "file_name", "filename", "path", "file")  # columns of files of any kind
_IMAGE_NAMES = [name for name in Image.names if name not in _ANY_FILE]
NEGATIVES = "negatives"
BESIDE = ("regions", NEGATIVES)  # columns that a row may have under these names alone
BESIDE_TIME = ("start", "end", "moments")  # and those of clips and sounds
_OF_SETS = {"set", "split", "data", "dataset", "image", "images", "img", "imgs", "photos", "pictures", "files"}
HOLDOUT_FRACTION = 0.05
HOLDOUT_LEAST = 30
HOLDOUT_MOST = 2000
_LISTED = 40  # columns that a message names
JOIN_FRAMES = "Join the frames of each row into a video, as docs/media.md#frames shows, and name that file."


@dataclass(frozen=True)
class Columns:
    """Names of columns; None where there is none or, in a request, for the usual names.

    `image` is the column of the medium, whatever its kind is: `medium`, in a request also auto. `template` makes the caption of
    several columns: "{brand} {title}". Rows of one `group` come into one split. A `labelled` row has a label, and perhaps one text
    as its caption; `classes` are the names of labels that are numbers.
    """

    image: str | None = None
    caption: str | None = None
    id: str | None = None
    medium: str = "image"
    template: str | None = None
    group: str | None = None
    labelled: bool = False
    label: str | None = None
    classes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def parts(self) -> list[str]:
        """Return the columns that the template names."""
        return re.findall(r"{([^{}]*)}", self.template or "")


def find_columns(
    names: Sequence[str],
    title: str,
    wanted: Columns,
    spare_image: str | None = None,
    typed: Mapping[str, str] = MappingProxyType({}),
    first: Mapping[str, Any] = MappingProxyType({}),
    labels: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Columns:
    """Find the columns of a table, by `wanted` or else by their usual names in any case; `title` begins error messages.

    Args:
        spare_image: the image column if no usual name is found.
        typed: the kinds of columns whose type says it.
        first: values of the first rows, which tell the kind of files in columns such as `path`.
        labels: the names of the classes of columns whose type has them.

    Raises:
        ValueError: if a wanted or needed column is missing, two share a name, or columns are for media of several kinds.
    """
    if (twice := first_repeated(names)) is not None:
        raise ValueError(f"{title} has two columns {shortened(twice)}; only one can be read. Rename one.")
    for part in wanted.parts:
        find_column("caption_template", names, title, part, ())
    group = find_column("group_column", names, title, wanted.group, ())
    medium = wanted.medium if wanted.medium != "auto" else _find_medium(names, title, wanted, typed, first)
    label = wanted.label
    others = list(names)
    if wanted.labelled:
        if label is None and len(labels) == 1:
            [label] = labels
        label = find_column("label_column", list(labels) or names, title, label, LABEL_NAMES)
        others = [name for name in names if name != label]
    media = USUAL_NAMES["image"] if medium == "image" else [*MEDIUM_NAMES[medium], *_ANY_FILE]
    image = find_column("image_column", others, title, wanted.image, media) or spare_image
    tell_others("image", None if wanted.image or medium != "image" else image, others, _IMAGE_NAMES)
    others = [name for name in others if name != image] if wanted.labelled else others
    template = wanted.parts[0] if wanted.parts else wanted.caption
    usual = TEXT_NAMES if wanted.labelled else USUAL_NAMES["caption"]
    caption = find_column("caption_column", others, title, template, usual)
    if template is None:
        tell_others("caption", caption, others, usual)
    if wanted.labelled and wanted.label is None:
        tell_others("label", label, names, LABEL_NAMES)
    needed = {"label": label, "image": image} if wanted.labelled else {"image": image, "caption": caption}
    if missing := next((kind for kind, column in needed.items() if column is None), None):
        raise ValueError(_unrecognised(missing, medium if missing == "image" else missing, names, title))
    if (kind := typed.get(str(image), medium)) != medium:
        raise ValueError(
            f"{title}; the medium is {medium}, and the column {image} is of the kind {kind}. Name another."
        )
    tell_times(names, medium, title)
    tell_splits([name for name in names if name not in (image, caption, label, group, *wanted.parts)], first, title)
    key = find_column("id_column", names, title, wanted.id, USUAL_NAMES["id"])
    key = None if wanted.labelled or key == image else key
    classes = tuple(labels.get(str(label), ()))
    tell_read({medium: image, "caption": wanted.template or caption, "label": label if wanted.labelled else None, "id": key}, title)
    return Columns(image, caption, key, medium, wanted.template, group, wanted.labelled, label, classes)


def _unrecognised(kind: str, shown: str, names: Sequence[str], title: str) -> str:
    """Return the message on a column of a kind that is not there, and how to name it where the command says it."""
    advice = f"Set --{kind}_column."
    if title.startswith("--sources"):
        advice = f"Write it behind the path: ,{kind}_column=NAME."
    if kind == "image" and "frames" in map(_plain, names):
        advice = f"A list of frames is not read. {JOIN_FRAMES}"
    if {"annotations", "data"} <= {*names}:
        advice = "That is Label Studio's full export: export JSON-MIN or CSV, which have a column for each field."
    return f"{title}; no {shown} column was recognised. {listed(names)} {advice}"


def set_medium(found: Iterable[str]) -> str:
    """Return what to do where a source holds media of several kinds."""
    return f"Set ,medium={' or '.join(found)} behind its path among --sources of prepare_data."


def kind_of_value(value: Any) -> str | None:
    """Return the kind of the file that a cell names, by its suffix."""
    name = str(value.get("path") if isinstance(value, Mapping) else value).lower()
    return next((kind for kind, suffixes in SUFFIXES.items() if name.endswith(suffixes)), None)


def _find_medium(
    names: Sequence[str], title: str, wanted: Columns, typed: Mapping[str, str], first: Mapping[str, Any]
) -> str:
    """Return the kind of the medium that a table holds; images where nothing tells it."""
    own = {_plain(name): kind for kind, usual in MEDIUM_NAMES.items() for name in usual if name not in _ANY_FILE}
    if wanted.image is not None:
        kind = typed.get(wanted.image) or own.get(_plain(wanted.image))
        return kind or kind_of_value(first.get(wanted.image)) or "image"
    found = {kind: name for name, kind in typed.items()}
    # of two columns of a kind, the first
    found |= {own[_plain(name)]: name for name in reversed(names) if _plain(name) in own}
    if len(found) > 1:
        columns = " and ".join(found.values())
        raise ValueError(
            f"{title}; the columns {columns} may all be the medium. Name one by --image_column. {set_medium(found)}"
        )
    files = next((name for name in names if name.lower() in _ANY_FILE), None)
    return next(iter(found), None) or kind_of_value(first.get(str(files))) or "image"


def find_column(option: str, names: Sequence[str], title: str, wanted: str | None, usual: Sequence[str]) -> str | None:
    """Return the wanted column, else the first of a usual name; exact names go before cases, and these before blanks and hyphens.

    A wanted column that is missing is a ValueError, which names the flag `option`.
    """
    if wanted is not None and wanted not in names:
        hint = close_to(wanted, [name for name in names[:_LISTED] if len(name) < 80])
        raise ValueError(f"{option} is {wanted}; there is no such column ({title}).{hint} {listed(names)}")
    if wanted is not None:
        return wanted
    for spelt in (str, str.lower, _plain):
        for guess in usual:
            if found := next((name for name in names if spelt(name) == spelt(guess)), None):
                return found
    return None


@lru_cache(1000)  # rows are read more than once
def tell_once(message: str, level: int = logging.WARNING) -> None:
    """Log a warning, or at another level, the first time."""
    logger.log(level, "%s", message)


def tell_read(columns: Mapping[str, str | None], title: str) -> None:
    """Log, once, which columns are read, and that there is no id."""
    read = ", ".join(f"{kind} {column}" for kind, column in columns.items() if column is not None)
    without = "" if columns["id"] else "; there is no id (id_column= names one), so paths are the ids"
    tell_once(printable(f"{title}; read are the columns of {read}{without}"), logging.INFO)


def tell_others(kind: str, read: str | None, names: Iterable[str], usual: Sequence[str]) -> None:
    """Log, once, that of several columns of usual names one alone is read; the files of a folder have the same ones."""
    known = set(map(_plain, usual))
    # caption1 and caption2 could be the caption, too
    others = [name for name in names if name != read and _plain(name).rstrip("0123456789") in known]
    if read is not None and others:
        tell_once(
            f"the {kind} is the column {shortened(read)}; {', '.join(map(shortened, others))} could be it, too, and is not read. "
            f"--{kind}_column, or {kind}_column= behind the path, names another",
            logging.INFO,
        )


def tell_splits(names: Sequence[str], first: Mapping[str, Any], title: str) -> None:
    """Log, once, that a column names splits, is not called so, and is not read."""
    says = [name for name in names if str(first.get(name)).lower() in SPLIT_NAMES]
    if says and not any(map(is_split, names)):
        tell_once(
            f"{title}; the column {shortened(says[0])} has {first[says[0]]} and is not read. If it names splits, call it split, or "
            "all its rows are trained on."
        )


def tell_times(names: Sequence[str], medium: str, title: str) -> None:
    """Log, once, that columns look like the times of clips or sounds, are not called start and end, and are not read."""
    times = [name for name in names if re.fullmatch("(start|end)(time|s|sec|seconds)", _plain(name))]
    if medium != "image" and times and not {"start", "end"} & {*names}:
        tell_once(
            f"{title}; {', '.join(times)} are not read, and files are taken whole. If they are seconds of the file, call them start and end."
        )


def _plain(name: str) -> str:
    """Return a name such as "Image path" as it is compared."""
    return re.sub(r"[\s_-]", "", name.lower())  # 'Image path', 'image_path' -> 'imagepath'


def close_to(word: str, known: Any) -> str:
    """Return a question whether a known word was meant, "" if none is close."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def listed(names: Sequence[str]) -> str:
    """Return a sentence that lists the columns, the first ones where there are many."""
    more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    return f"The columns are: {', '.join(map(shortened, names[:_LISTED]))}{more}."


def is_null(value: Any) -> bool:
    """Return whether a value is null as JSON, CSV or pandas write it."""
    if isinstance(value, str):
        return not value.strip() or value.strip() in ("nan", "NaN")
    return value is None or (isinstance(value, float) and math.isnan(value))


# ['a', 'b'], ["a"], ('a', 'b'), array(['a', 'b'])
_LIST = re.compile(r"""(?:array\()?[\[(]\s*['"{\[]""")  # how a list of texts begins that a program wrote
_LONGEST_LIST = 100_000  # characters


def texts_of(value: Any) -> list[Any]:
    """Return the texts of a cell: a list, a text, or a list that JSON or Python wrote as text.

    Raises caption_list of a text that looks like such a list and is none, such as NumPy's ['a' 'b'].
    """
    if isinstance(value, list):
        return [text for each in value for text in (texts_of(each) if isinstance(each, str) else [each])]
    text = value.strip() if isinstance(value, str) else ""
    if not _LIST.match(text) or len(text) > _LONGEST_LIST:
        return [value]
    # ["a", "b"] is JSON, ['a', 'b'] is Python
    for parse in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            items = parse(text)
            # NumPy's ['a' 'b'] is one text to Python, 'ab'
            if all(item is None or isinstance(item, str) for item in items) and not re.search(
                r"""['"]\s+['"]""", text
            ):
                return list(items) if isinstance(items, (list, tuple)) else [value]
    # a text in brackets, such as ('Untitled', by a friend)
    if text.startswith("("):
        return [value]
    raise Fault("caption_list", f"{text[:80]!r} looks like a list of texts, and does not parse as one")


def answers_of(value: Any, classes: Sequence[str] = ()) -> list[str]:
    """Return the names of the labels in a cell, several where several people answered, none where there is no label.

    A list may be written as JSON; an item may be an object with a key `answer`, or the number of one of the `classes`. Raises
    bad_label.
    """
    if isinstance(value, str) and value.strip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Fault("bad_label", f"{value.strip()[:80]!r} looks like a list, and is not JSON") from error
    found = []
    for item in value if isinstance(value, list) else [value]:
        answer = item.get("answer", item) if isinstance(item, dict) else item
        if isinstance(answer, (list, dict)):
            raise Fault("bad_label", f"a label is {excerpt(str(answer))[:40]}, not a name or a number")
        if classes and isinstance(answer, int):
            # -1 is no label, as `datasets` marks the rows of a hidden test split
            found += [classes[answer]] if 0 <= answer < len(classes) else []
        elif not is_null(answer):
            # Pandas writes a class 3 beside an empty cell as 3.0
            found.append(re.sub(r"^(-?\d+)\.0+$", r"\1", unicodedata.normalize("NFC", str(answer).strip())))
    return found


def captions_of(values: Mapping[str, Any], columns: Columns) -> list[Any]:
    """Return a row's unchecked captions."""
    if columns.labelled and columns.caption is None:
        return []
    value = values.get(str(columns.caption))
    if columns.template:
        cells = (_cell_of_template(part, values.get(part)) for part in columns.parts)
        value = " ".join(re.sub(r"{[^{}]*}", lambda _: next(cells), columns.template).split())
    return value if isinstance(value, list) else [value]


def _cell_of_template(column: str, cell: Any) -> str:
    if is_null(cell):
        raise Fault("caption_empty", f"the column {column} of the template is empty")
    if isinstance(cell, (list, dict)) or texts_of(cell) != [cell]:
        raise Fault(
            "caption_not_text", f"the column {column} of the template is a list or an object: {str(cell)[:80]}"
        )
    return str(cell)


def id_of(values: Mapping[str, Any], columns: Columns) -> str | None:
    """Return a row's id, None without such a column; raise missing_column if it is empty."""
    if columns.id is None:
        return None
    if is_null(values.get(columns.id)):
        raise Fault("missing_column", f"{columns.id}, the id, is empty")
    return storable(str(values[columns.id]))


def split_named(folder: str) -> str | None:
    """Return the split that the name of a folder says: `TEST`, `val2017`, `valid_set`, `01_train`, `Training images`."""
    words = set(re.split(r"[\W\d_]+", folder.lower())) - _OF_SETS - {""}
    return SPLIT_NAMES.get(words.pop()) if len(words) == 1 else None


def split_of_path(path: str, by_words: bool = False) -> str | None:
    """Return the split that the folders of a relative path name; test goes before validation, and that before train.

    With `by_words` the file's name tells it, too, and a word is enough, as `datasets` has it: `Test/0.parquet`, `my-test_1.parquet`.
    """
    folders, name = os.path.split(path)
    names = re.split(r"[\\/]", folders)
    words = re.split(r"[\\/\-._ 0-9]+", f"{folders}/{name}") if by_words else []
    found = {*map(split_named, names), *(SPLIT_NAMES.get(word.lower()) for word in words)}
    return next((split for split in reversed(SPLITS) if split in found), None)


def split_cell(values: Mapping[str, Any]) -> Any:
    """Return what a row says of its split, in a column `split` in any case; None where it says nothing."""
    cell = values.get("split") or next((values[name] for name in values if is_split(name)), None)
    return None if is_null(cell) else cell


@lru_cache(1000)
def is_split(column: str) -> bool:
    """Return whether a column is that of the split."""
    return _plain(str(column)) == "split"


def split_of(value: Any) -> str:
    """Return train, validation or test for the value of a split column; raises unknown_split."""
    name = split_named(str(value).strip())
    if name is None:
        raise Fault("unknown_split", f"split is {value}, not train, validation or test")
    return name


def least_held_out(images: int) -> int:
    """Return how many images a validation split has at least, if nobody says it: 30, or a fifth of fewer than 150."""
    return min(HOLDOUT_LEAST, images // 5)


def count_held_out(images: int, most: int = HOLDOUT_MOST) -> int:
    """Return how many images training holds out of so many, if there is no validation split."""
    # of 100 images 20, of 1,000 images 50, of 100,000 images 2,000
    return min(most, max(1, least_held_out(images), round(HOLDOUT_FRACTION * images)))


def too_few(rows: int, kind: str, split: str = "The validation split", figure: str = "recall") -> str:
    """Return a sentence about a split whose figure says little; "" if there are enough rows, which are of a kind."""
    if rows >= HOLDOUT_LEAST:
        return ""
    if rows == 0:
        return f"{split} has no {kind}s."
    counted = f"1 {kind}" if rows == 1 else f"{rows} {kind}s"
    return f"{split} has {counted}; {figure} on fewer than {HOLDOUT_LEAST} says little."


def held_out(ids: Sequence[str], classes: Mapping[str, str] | None = None) -> set[str]:
    """Choose the ids of a validation split: those of the smallest hashes, 5 %, at least `least_held_out` and at most 2,000.

    The order of the rows does not matter, and new rows change few choices.

    Of every class the same share is held out, if `classes` names that of each id; one of a smaller class that has two or more, of
    the largest first, until twice the share is held out in all.
    """
    count = count_held_out(len(ids))
    of_class: dict[str, list[str]] = {}
    for each in ids:
        of_class.setdefault(classes[each] if classes else "", []).append(each)
    sizes = {name: count * len(each) // len(ids) if classes else count for name, each in of_class.items()}
    for name in sorted(of_class, key=lambda name: (-len(of_class[name]), name)):
        if not sizes[name] and len(of_class[name]) > 1 and sum(sizes.values()) < 2 * count:
            sizes[name] = 1
    missing = max(0, count - sum(sizes.values()))  # by rounding down
    # the largest remainders first
    for name in sorted(of_class, key=lambda name: (-(count * len(of_class[name]) % len(ids)), name))[:missing]:
        sizes[name] += len(of_class[name]) > sizes[name] + 1  # one of each class is left to train on
    if not any(sizes.values()):  # every class has one
        return set(heapq.nsmallest(count, ids, key=_hash))
    return {each for name, inside in of_class.items() for each in heapq.nsmallest(sizes[name], inside, key=_hash)}


def hold_out(rows: Dataset, keys: Sequence[str], classes: Mapping[str, str] | None = None) -> tuple[Dataset, Dataset]:
    """Divide rows into those to train on and those that are held out, by the key of each row; see `held_out`."""
    held = held_out(list(dict.fromkeys(keys)), classes)
    kept = [row for row, key in enumerate(keys) if key not in held]
    out = [row for row, key in enumerate(keys) if key in held]
    return rows.select(kept), rows.select(out)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
