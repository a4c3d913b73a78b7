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

The splits are ``train``, ``validation`` and, if the source has one, ``test``. A data set that prepare_data wrote has
further columns and is given as it is, memory-mapped, without a look at its rows.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict
from datasets.exceptions import DatasetsError

from mm_utils.arguments import arg
from mm_utils.data.assembly import build, extra_features, held_out, merge_by_image, prepare_train, warn_of_overlap
from mm_utils.data.raw.columns import SPLIT_NAMES, Columns
from mm_utils.data.raw.paths import Jail
from mm_utils.data.raw.stores import (
    METADATA_FILES,
    PREPARED_FORMAT,
    is_prepared,
    load_splits,
    metadata_files,
)
from mm_utils.data.raw.tables import Table, one_line, open_dataset_table, open_text_table
from mm_utils.data.raw.text_files import TEXT_SUFFIXES
from mm_utils.data.rows import Row, read_table
from mm_utils.data.scenes import load_scenes

logger = logging.getLogger(__name__)

_SPLITS = ["train", "validation", "test"]


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
    language_column: str | None = arg(None, "Column of language codes, one a row or one a caption; default languages.")
    image_root: str | None = arg(None, "Folder that image paths are relative to; default the data file's folder.")
    allow_outside_root: bool = arg(False, "Accept image paths that leave --image_root: absolute, by '..', by a link.")
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

    An image path in a data file leads to a file below --image_root, or its row is unusable; nothing is downloaded.

    Raises a ValueError, always of one line, if a file or column does not exist, a line cannot be parsed, an id names
    two images, more than half of a table's rows are unusable, or train has fewer than 2 pairs.
    """
    prepared = _open_prepared(args)
    if prepared is not None:
        return _limit_prepared(prepared, args, need_train)
    tables = _open_tables(args)
    alone = len(tables) == 1 and not (args.validation_file or args.test_file)
    parts: dict[str, tuple[Table, list[Row]]] = {}
    for name, table in tables.items():
        rows = read_table(table, name, divide=alone, by_folder=alone and args.dataset_dir is not None)
        for split, images in merge_by_image(rows, table).items():
            parts[split] = (table, images)
    if need_train:
        prepare_train(parts, ", ".join(dict.fromkeys(table.title for table in tables.values())))
    warn_of_overlap({split: images for split, (_, images) in parts.items()})
    extras = extra_features(parts)
    result = DatasetDict()
    for split in sorted(parts, key=_SPLITS.index):
        table, images = parts[split]
        result[split] = build(table, images[: _most(args, split)], extras)
    if need_train and len(result["train"]) < 2:
        raise ValueError("--max_train_samples is 1; contrastive training needs at least 2 pairs. Raise it.")
    return result


def iterate_captions(rows: Dataset) -> Iterator[str]:
    """All captions of a split, in order."""
    for batch in rows.select_columns("captions").iter(1000):
        for captions in batch["captions"]:
            yield from captions


def _most(args: DataArguments, split: str) -> int | None:
    return args.max_train_samples if split == "train" else args.max_eval_samples


def _open_prepared(args: DataArguments) -> DatasetDict | None:
    """Open --dataset_name if it is a data set that prepare_data wrote: its rows were checked then, none is visited."""
    if not args.dataset_name or not is_prepared(args.dataset_name):
        return None
    title = f"--dataset_name is {args.dataset_name}"
    source = load_splits(args.dataset_name, args.dataset_config_name, args.preprocessing_num_workers, title)
    unknown = [split for split in source if split not in _SPLITS]
    lacking = [split for split, rows in source.items() if "content_id" not in rows.features]
    if unknown or lacking:
        raise ValueError(
            f"{title}; its report.json says {PREPARED_FORMAT}, but split {(unknown + lacking)[0]} is none of it. "
            "Prepare it anew."
        )
    return source


def _limit_prepared(source: DatasetDict, args: DataArguments, need_train: bool) -> DatasetDict:
    """Hold validation out of train if there is none, and apply the limits; no image is touched."""
    if need_train and "train" not in source:
        raise ValueError(
            f"--dataset_name is {args.dataset_name}; there is no train split, only {', '.join(source)}. "
            "Give pairs to train on."
        )
    parts = dict(source)
    if need_train and "validation" not in parts:
        ids = parts["train"].with_format("arrow")[:]["id"].to_pylist()
        held = held_out(ids)
        sides = [[at for at, name in enumerate(ids) if (name in held) is inside] for inside in (False, True)]
        parts["train"], parts["validation"] = (source["train"].select(side) for side in sides)
        logger.info("%s: no validation split; %s images are held out for it", args.dataset_name, f"{len(held):,}")
    result = DatasetDict()
    for split in sorted(parts, key=_SPLITS.index):
        most = _most(args, split)
        result[split] = parts[split] if most is None else parts[split].take(min(most, len(parts[split])))
    if need_train and len(result["train"]) < 2:
        raise ValueError(
            f"--dataset_name is {args.dataset_name}; train has {len(result['train'])} of the 2 pairs that contrastive "
            "training needs at least. Add some, or raise --max_train_samples."
        )
    return result


@dataclass(frozen=True)
class _How:
    """What all openers need to know beside the place."""

    wanted: Columns
    root: str | None
    allow_outside: bool
    num_proc: int | None

    def jail(self, default: str) -> Jail:
        return Jail(self.root or default, self.allow_outside)


def _open_tables(args: DataArguments) -> dict[str, Table]:
    wanted = Columns(args.image_column, args.caption_column, args.id_column, args.language_column)
    how = _How(wanted, args.image_root, args.allow_outside_root, args.preprocessing_num_workers)
    if args.image_root is not None and not Path(args.image_root).is_dir():
        raise ValueError(f"--image_root is {args.image_root}; there is no such folder. Give the folder of the images.")
    if args.dataset_name:
        title = f"--dataset_name is {args.dataset_name}"
        source = load_splits(args.dataset_name, args.dataset_config_name, how.num_proc, title)
        folder = args.dataset_name if Path(args.dataset_name).is_dir() else "."
        return _open_splits(source, title, args.dataset_name, folder, how)
    if args.dataset_dir:
        return _open_image_folder(Path(args.dataset_dir), how)
    files = {"train": args.train_file, "validation": args.validation_file, "test": args.test_file}
    if any(files.values()):
        return {
            split: _open_file(Path(file), f"--{split}_file is {file}", how) for split, file in files.items() if file
        }
    return _open_splits(load_scenes(), "no source is given", "embedded scenes", ".", how)


def _open_file(path: Path, title: str, how: _How, id_root: str | None = None) -> Table:
    if not path.is_file():
        raise ValueError(f"{title}; there is no such file. Check the path.")
    suffix = path.suffix.lower()
    jail = how.jail(str(path.parent))
    if suffix in TEXT_SUFFIXES:
        return open_text_table(path, title, jail, how.wanted, id_root)
    if suffix != ".parquet":
        known = ", ".join((*TEXT_SUFFIXES, ".parquet"))
        raise ValueError(f"{title}; its format is not known by '{path.suffix}'. Known are {known}.")
    try:
        if pq.read_metadata(path).num_rows == 0:
            raise ValueError("it holds no rows")
        dataset = Dataset.from_parquet(str(path))
    except (DatasetsError, pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{title}; it cannot be read as Parquet ({one_line(error)}). Write it anew.") from error
    return open_dataset_table(dataset, title, str(path), jail, how.wanted, how.num_proc, id_root)


def _open_image_folder(folder: Path, how: _How) -> dict[str, Table]:
    """Open the metadata file of `folder`, or else one of each folder in it that is named like a split."""
    if not folder.is_dir():
        raise ValueError(f"--dataset_dir is {folder}; there is no such folder. Check the path.")
    files = metadata_files(folder)
    if not files:
        raise ValueError(
            f"--dataset_dir is {folder}; neither it nor a train, validation or test folder in it has one of "
            f"{', '.join(METADATA_FILES)}. Write one, with the columns file_name and caption."
        )
    id_root = str(how.root or folder)
    return {
        split or "train": _open_file(file, f"--dataset_dir has {file}", how, id_root) for split, file in files.items()
    }


def _open_splits(source: DatasetDict, title: str, name: str, root: str, how: _How) -> dict[str, Table]:
    tables: dict[str, Table] = {}
    for given, dataset in source.items():
        split = SPLIT_NAMES.get(given.lower())
        if split is None or split in tables:
            logger.warning("%s: split %s is not used; known are train, validation and test, each once", name, given)
            continue
        jail = how.jail(root)
        label, known_as = f"{title}, split {given}", f"{name}, split {given}"
        tables[split] = open_dataset_table(
            dataset, label, known_as, jail, how.wanted, how.num_proc, trust_image_type=True
        )
    if not tables:
        raise ValueError(f"{title}; its splits are {', '.join(source)}. Name them train, validation and test.")
    return tables
