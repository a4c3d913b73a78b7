"""Rows become data sets: one row per image, held-out validation, one schema for all splits."""

import hashlib
import heapq
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, Image, Value, concatenate_datasets
from datasets import Sequence as ListOf

from mm_utils.data.raw.faults import shown
from mm_utils.data.raw.tables import Table, one_line
from mm_utils.data.rows import Row

logger = logging.getLogger(__name__)

HOLDOUT_FRACTION, HOLDOUT_MOST = 0.05, 2000
_AS_IT_IS = ("order_pair",)  # columns that are kept beside those of the schema, where images are embedded


def merge_by_image(rows: Iterable[Row], table: Table) -> dict[str, list[Row]]:
    """Give the rows of each split with one row per image: the first, with the captions of all.

    Raises a ValueError if one id names two images.
    """
    images: dict[str, list[Row]] = defaultdict(list)
    by_id: dict[str, dict[str, Row]] = defaultdict(dict)
    by_path: dict[str, dict[str, Row]] = defaultdict(dict)
    merged = 0
    for row in rows:
        first = by_id[row.split].get(row.id)
        if first is not None and (first.path, first.size) != (row.path, row.size):
            named = shown(f" ({first.path}, {row.path})" if row.path else "")
            raise ValueError(
                f"id is {shown(row.id)}; {table.unit}s {first.line} and {row.line} of {table.name} give it to different "
                f"images{named}. Give each image its own id, or name another --id_column."
            )
        if first is None and row.path is not None:
            first = by_path[row.split].setdefault(row.path, row)
        first = first or row
        by_id[row.split][row.id] = first
        if first is row:
            images[row.split].append(row)
        else:
            first.merge(row)
            merged += 1
    if merged:
        logger.info("%s: %s rows merged into an earlier row of the same image", table.name, f"{merged:,}")
    return images


def prepare_train(parts: dict[str, tuple[Table, list[Row]]], title: str) -> None:
    """Hold out a validation split where there is none, and check that enough is left to train on."""
    if "train" not in parts:
        raise ValueError(f"{title}; there is no train split, only {', '.join(parts)}. Give pairs to train on.")
    table, images = parts["train"]
    if "validation" not in parts:
        held = held_out([row.id for row in images])
        parts["validation"] = (table, [row for row in images if row.id in held])
        images = [row for row in images if row.id not in held]
        parts["train"] = (table, images)
        logger.info("%s: no validation split; %s images are held out for it", table.name, f"{len(held):,}")
    if len(images) < 2:
        count = f"{len(images)} {'pair' if len(images) == 1 else 'pairs'}"
        raise ValueError(f"{title}; train has {count}, and contrastive training needs at least 2 pairs. Add some.")


def held_out(ids: Sequence[str]) -> set[str]:
    """Choose the ids with the smallest hashes: the order of the rows does not matter, and few change with new data."""
    count = min(HOLDOUT_MOST, max(1, round(HOLDOUT_FRACTION * len(ids))))
    return set(heapq.nsmallest(count, ids, key=_hash))


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def warn_of_overlap(splits: dict[str, list[Row]]) -> None:
    """Log how many images of another split are in train too."""
    train = splits.get("train", [])
    ids, paths = {row.id for row in train}, {row.path for row in train if row.path is not None}
    for split, images in splits.items():
        if split == "train":
            continue
        both = [row.id for row in images if row.path in paths or (row.id in ids and not row.id_from_path)]
        if both:
            examples = ", ".join(map(shown, both[:3]))
            logger.warning("%s images of %s are in train too, such as %s", f"{len(both):,}", split, examples)


def extra_features(parts: dict[str, tuple[Table, list[Row]]]) -> dict[str, Any]:
    """Give the features of `languages` and `regions` if any table has them, so that all splits agree."""
    names = {name for table, _ in parts.values() for name in table.names}
    named = any(table.columns.language is not None for table, _ in parts.values())
    extras: dict[str, Any] = {"languages": ListOf(Value("string"))} if named else {}
    if "regions" in names:
        datasets = [table.dataset for table, _ in parts.values() if table.dataset is not None]
        known = [dataset.features["regions"] for dataset in datasets if "regions" in dataset.column_names]
        extras["regions"] = known[0] if known else _infer_regions(parts)
    return extras


def _infer_regions(parts: dict[str, tuple[Table, list[Row]]]) -> Any:
    try:
        column = pa.array([row.regions for _, images in parts.values() for row in images])
    except pa.ArrowException as error:
        title = next(iter(parts.values()))[0].title
        raise ValueError(f"{title}; the values of regions differ in type ({one_line(error)}). Unify them.") from error
    return Features.from_arrow_schema(pa.schema([("regions", column.type)]))["regions"]


def build(table: Table, images: list[Row], extras: dict[str, Any]) -> Dataset:
    """Make a data set of the rows; embedded images stay in the table's own, memory-mapped files."""
    columns = {"id": Value("string"), "captions": ListOf(Value("string")), **extras}
    values: dict[str, list[Any]] = {
        "id": [row.id for row in images],
        "captions": [list(row.captions) for row in images],
        "languages": [list(row.captions.values()) for row in images],
        "regions": [row.regions for row in images],
    }
    values = {name: values[name] for name in columns}
    order = ["id", "image", "captions", *extras]
    if not table.embedded or table.dataset is None:
        values["image"] = [row.path for row in images]
        plain = _from_lists(values, Features({**columns, "image": Value("string")}))
        return plain.cast_column("image", Image(decode=False)).select_columns(order)
    # The images stay where they are, memory-mapped: the new columns are laid beside all rows, then rows are selected.
    at = [row.at for row in images]
    beside = {name: [None] * len(table.dataset) for name in columns}
    for name, column in values.items():
        for index, value in zip(at, column, strict=True):
            beside[name][index] = value
    kept = [name for name in _AS_IT_IS if name in table.dataset.column_names]
    stored = table.dataset.select_columns([table.columns.image, *kept]).rename_columns({table.columns.image: "image"})
    joined = concatenate_datasets([stored, _from_lists(beside, Features(columns))], axis=1)
    return joined.select(at).select_columns([*order, *kept])


def _from_lists(values: dict[str, list[Any]], features: Features) -> Dataset:
    """Like `Dataset.from_dict`, which takes minutes for a million rows because it visits every value in Python."""
    return Dataset(pa.Table.from_pydict(values, schema=features.arrow_schema))
