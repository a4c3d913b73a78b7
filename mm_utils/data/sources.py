"""The data door: every source of image-caption pairs becomes one `datasets.DatasetDict` with one schema.

==============  =====================================  ====================================================
column          type                                   meaning
==============  =====================================  ====================================================
``id``          string                                 the image's id, unique within a split
``image``       ``datasets.Image(decode=False)``       ``{"bytes", "path"}``; files stay files, by absolute path
``captions``    list of string                         one or more captions, none empty, none twice
``languages``   list of string, if the source has it   one per caption, "" where unknown
``regions``     as in the source, if it has it         what is where in the image
==============  =====================================  ====================================================

The splits are ``train``, ``validation`` and, if the source has one, ``test``.
"""

import hashlib
import heapq
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    Image,
    Sequence,
    Value,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)
from datasets.exceptions import DatasetsError

from mm_utils.arguments import arg
from mm_utils.data.scenes import load_scenes
from mm_utils.data.tables import (
    SPLIT_NAMES,
    Columns,
    Row,
    Table,
    open_dataset_table,
    open_text_table,
    read_table,
)
from mm_utils.data.text_files import TEXT_SUFFIXES

logger = logging.getLogger(__name__)

HOLDOUT_FRACTION, HOLDOUT_MOST = 0.05, 2000
METADATA_FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")


@dataclass
class DataArguments:
    """Which pairs to load. Without a source, the embedded scenes."""

    dataset_name: str | None = arg(
        None, "A data set on the Hub, a local folder of one, or a folder made by save_to_disk or prepare_data."
    )
    dataset_config_name: str | None = arg(None, "Configuration of --dataset_name, if it has several.")
    train_file: str | None = arg(None, "Training pairs: JSONL, CSV, TSV or Parquet, one image and its caption a row.")
    validation_file: str | None = arg(None, "Validation pairs; without any, some training images are held out.")
    test_file: str | None = arg(None, "Test pairs.")
    dataset_dir: str | None = arg(None, "A folder of images with metadata.jsonl or .csv, in it or per split.")
    image_column: str | None = arg(None, "Column of image paths or images; found by its usual names.")
    caption_column: str | None = arg(None, "Column of a caption or a list of captions; found by its usual names.")
    id_column: str | None = arg(None, "Column that identifies the image; default image_id or id, else the path.")
    image_root: str | None = arg(None, "Folder that image paths are relative to; default the data file's folder.")
    max_train_samples: int | None = arg(None, "Keep the first N training images.")
    max_eval_samples: int | None = arg(None, "Keep the first N images of validation and of test.")
    preprocessing_num_workers: int | None = arg(None, "Processes that read and preprocess data.")

    def __post_init__(self) -> None:
        """Refuse contradictions, with a ValueError of one line."""
        sources = [f"--{name}" for name in ("dataset_name", "train_file", "dataset_dir") if getattr(self, name)]
        if len(sources) > 1:
            raise ValueError(f"{' and '.join(sources)} are given together; pairs have one source. Keep one of them.")
        for name in ("validation_file", "test_file"):
            if getattr(self, name) and sources and not self.train_file:
                raise ValueError(f"--{name} is given with {sources[0]}; it goes with --train_file. Drop one of them.")
        if self.dataset_config_name and not self.dataset_name:
            raise ValueError(
                f"--dataset_config_name is {self.dataset_config_name}; there is no --dataset_name. Give both or none."
            )
        for name in ("max_train_samples", "max_eval_samples", "preprocessing_num_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} is {value}; it counts from 1. Drop it to have no limit.")


def load_pairs(args: DataArguments, *, need_train: bool = True) -> DatasetDict:
    """Load the source that `args` names, in the schema above, one row per image.

    Rows of the same image are merged. Unusable rows are skipped with a warning that names them. Where the source has
    no validation split, images are held out of train by the hash of their id. With ``need_train=False``, for
    evaluation alone, nothing is held out and there may be no train split.

    Raises a ValueError, always of one line, if a file or column does not exist, a line cannot be parsed, an id names
    two images, more than half of a table's rows are unusable, or train has fewer than 2 pairs.
    """
    tables = _open_tables(args)
    alone = len(tables) == 1 and not (args.validation_file or args.test_file)
    parts: dict[str, tuple[Table, list[Row]]] = {}
    for name, table in tables.items():
        rows = read_table(table, name, divide=alone, by_folder=alone and args.dataset_dir is not None)
        for split, images in _merge_by_image(rows, table).items():
            parts[split] = (table, images)
    if need_train:
        _prepare_train(parts, ", ".join(dict.fromkeys(table.title for table in tables.values())))
    _warn_of_overlap({split: images for split, (_, images) in parts.items()})
    extras = _extra_features(parts)
    result = DatasetDict()
    for split in sorted(parts, key=["train", "validation", "test"].index):
        table, images = parts[split]
        most = args.max_train_samples if split == "train" else args.max_eval_samples
        result[split] = _build(table, images[:most], extras)
    if need_train and len(result["train"]) < 2:
        raise ValueError("--max_train_samples is 1; contrastive training needs at least 2 pairs. Raise it.")
    return result


def iterate_captions(rows: Dataset) -> Iterator[str]:
    """All captions of a split, in order."""
    for batch in rows.select_columns("captions").iter(1000):
        for captions in batch["captions"]:
            yield from captions


def _open_tables(args: DataArguments) -> dict[str, Table]:
    wanted = Columns(args.image_column, args.caption_column, args.id_column)
    root, num_proc = args.image_root, args.preprocessing_num_workers
    if root is not None and not Path(root).is_dir():
        raise ValueError(f"--image_root is {root}; there is no such folder. Give the folder of the images.")
    if args.dataset_name:
        source = _load_dataset(args.dataset_name, args.dataset_config_name, num_proc)
        title = f"--dataset_name is {args.dataset_name}"
        folder = root or (args.dataset_name if Path(args.dataset_name).is_dir() else ".")
        return _open_splits(source, title, args.dataset_name, folder, wanted, num_proc)
    if args.dataset_dir:
        return _open_image_folder(Path(args.dataset_dir), root, wanted, num_proc)
    files = {"train": args.train_file, "validation": args.validation_file, "test": args.test_file}
    if any(files.values()):
        return {
            split: _open_file(Path(file), f"--{split}_file is {file}", root, wanted, num_proc)
            for split, file in files.items()
            if file
        }
    return _open_splits(load_scenes(), "no source is given", "embedded scenes", ".", wanted, num_proc)


def _open_file(
    path: Path, title: str, root: str | None, wanted: Columns, num_proc: int | None, id_root: str | None = None
) -> Table:
    if not path.is_file():
        raise ValueError(f"{title}; there is no such file. Check the path.")
    suffix = path.suffix.lower()
    if suffix in TEXT_SUFFIXES:
        return open_text_table(path, title, root, wanted, id_root)
    if suffix != ".parquet":
        known = ", ".join((*TEXT_SUFFIXES, ".parquet"))
        raise ValueError(f"{title}; its format is not known by '{path.suffix}'. Known are {known}.")
    try:
        if pq.read_metadata(path).num_rows == 0:
            raise ValueError("it holds no rows")
        dataset = Dataset.from_parquet(str(path))
    except (DatasetsError, pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{title}; it cannot be read as Parquet ({_one_line(error)}). Write it anew.") from error
    return open_dataset_table(dataset, title, str(path), root or str(path.parent), wanted, num_proc, id_root)


def _open_image_folder(folder: Path, root: str | None, wanted: Columns, num_proc: int | None) -> dict[str, Table]:
    """Open the metadata file of `folder`, or else one of each folder in it that is named like a split."""
    if not folder.is_dir():
        raise ValueError(f"--dataset_dir is {folder}; there is no such folder. Check the path.")
    places = {"train": folder}
    if _metadata_file(folder) is None:
        inside = [item for item in sorted(folder.iterdir()) if item.is_dir() and item.name.lower() in SPLIT_NAMES]
        places = {SPLIT_NAMES[item.name.lower()]: item for item in inside if _metadata_file(item) is not None}
    if not places:
        raise ValueError(
            f"--dataset_dir is {folder}; neither it nor a train, validation or test folder in it has one of "
            f"{', '.join(METADATA_FILES)}. Write one, with the columns file_name and caption."
        )
    tables = {}
    for split, place in places.items():
        file = _metadata_file(place) or place
        tables[split] = _open_file(file, f"--dataset_dir has {file}", root, wanted, num_proc, str(root or folder))
    return tables


def _metadata_file(folder: Path) -> Path | None:
    return next((folder / name for name in METADATA_FILES if (folder / name).is_file()), None)


def _load_dataset(name: str, config: str | None, num_proc: int | None) -> Any:
    folder = Path(name)
    if folder.is_file():
        raise ValueError(f"--dataset_name is {name}; that is a file. Give it as --train_file.")
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            return load_from_disk(name)
        return load_dataset(name, config, num_proc=num_proc)
    except (DatasetsError, pa.ArrowException, OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"--dataset_name is {name}; it could not be loaded ({_one_line(error)}). Check its spelling, its "
            "configuration and the connection, or give a local folder of it."
        ) from error


def _one_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0] if lines else 'no message'}"


def _open_splits(
    source: Any, title: str, name: str, root: str, wanted: Columns, num_proc: int | None
) -> dict[str, Table]:
    if isinstance(source, Dataset):
        source = {"train": source}
    tables: dict[str, Table] = {}
    for given, dataset in source.items():
        split = SPLIT_NAMES.get(given.lower())
        if split is None or split in tables:
            logger.warning("%s: split %s is not used; known are train, validation and test, each once", name, given)
            continue
        label = f"{title}, split {given}"
        tables[split] = open_dataset_table(dataset, label, f"{name}, split {given}", root, wanted, num_proc)
    if not tables:
        raise ValueError(f"{title}; its splits are {', '.join(source)}. Name them train, validation and test.")
    return tables


def _merge_by_image(rows: Iterable[Row], table: Table) -> dict[str, list[Row]]:
    """Give the rows of each split with one row per image: the first, with the captions of all."""
    images: dict[str, list[Row]] = defaultdict(list)
    by_id: dict[str, dict[str, Row]] = defaultdict(dict)
    by_path: dict[str, dict[str, Row]] = defaultdict(dict)
    merged = 0
    for row in rows:
        first = by_id[row.split].get(row.id)
        if first is not None and (first.path, first.size) != (row.path, row.size):
            named = f" ({first.path}, {row.path})" if row.path else ""
            raise ValueError(
                f"id is {row.id}; {table.unit}s {first.line} and {row.line} of {table.name} give it to different "
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


def _prepare_train(parts: dict[str, tuple[Table, list[Row]]], title: str) -> None:
    """Hold out a validation split where there is none, and check that enough is left to train on."""
    if "train" not in parts:
        raise ValueError(f"{title}; there is no train split, only {', '.join(parts)}. Give pairs to train on.")
    table, images = parts["train"]
    if "validation" not in parts:
        held = _holdout(images)
        parts["validation"] = (table, [row for row in images if row.id in held])
        images = [row for row in images if row.id not in held]
        parts["train"] = (table, images)
        logger.info("%s: no validation split; %s images are held out for it", table.name, f"{len(held):,}")
    if len(images) < 2:
        count = f"{len(images)} {'pair' if len(images) == 1 else 'pairs'}"
        raise ValueError(f"{title}; train has {count}, and contrastive training needs at least 2 pairs. Add some.")


def _holdout(images: list[Row]) -> set[str]:
    """Choose the ids with the smallest hashes: the order of the rows does not matter, and few change with new data."""
    count = min(HOLDOUT_MOST, max(1, round(HOLDOUT_FRACTION * len(images))))
    return set(heapq.nsmallest(count, (row.id for row in images), key=_hash))


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _warn_of_overlap(splits: dict[str, list[Row]]) -> None:
    train = splits.get("train", [])
    ids, paths = {row.id for row in train}, {row.path for row in train if row.path is not None}
    for split, images in splits.items():
        if split == "train":
            continue
        both = [row.id for row in images if row.path in paths or (row.id in ids and not row.id_from_path)]
        if both:
            examples = ", ".join(both[:3])
            logger.warning("%s images of %s are in train too, such as %s", f"{len(both):,}", split, examples)


def _extra_features(parts: dict[str, tuple[Table, list[Row]]]) -> dict[str, Any]:
    """Give the features of `languages` and `regions` if any table has them, so that all splits agree."""
    names = {name for table, _ in parts.values() for name in table.names}
    extras: dict[str, Any] = {"languages": Sequence(Value("string"))} if "languages" in names else {}
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
        raise ValueError(f"{title}; the values of regions differ in type ({_one_line(error)}). Unify them.") from error
    return Features.from_arrow_schema(pa.schema([("regions", column.type)]))["regions"]


def _build(table: Table, images: list[Row], extras: dict[str, Any]) -> Dataset:
    columns = {"id": Value("string"), "captions": Sequence(Value("string")), **extras}
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
    stored = table.dataset.select_columns([table.columns.image]).rename_columns({table.columns.image: "image"})
    joined = concatenate_datasets([stored, _from_lists(beside, Features(columns))], axis=1)
    return joined.select(at).select_columns(order)


def _from_lists(values: dict[str, list[Any]], features: Features) -> Dataset:
    """Like `Dataset.from_dict`, which takes minutes for a million rows because it visits every value in Python."""
    return Dataset(pa.Table.from_pydict(values, schema=features.arrow_schema))
