"""What lies at a place that someone names: image folders with metadata, `datasets` folders, prepared data sets."""

import json
from pathlib import Path

import pyarrow as pa
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from mm_utils.data.raw.columns import SPLIT_NAMES
from mm_utils.data.raw.tables import one_line

METADATA_FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
PREPARED_FORMAT = "tandem-pairs"  # what "format" in report.json of a prepared data set says


def metadata_files(folder: Path) -> dict[str | None, Path]:
    """The metadata file of an image folder, below None, or else one of each folder in it that is named like a split."""
    file = _metadata_file(folder)
    if file is not None:
        return {None: file}
    inside = [item for item in sorted(folder.iterdir()) if item.is_dir() and item.name.lower() in SPLIT_NAMES]
    found = {SPLIT_NAMES[item.name.lower()]: _metadata_file(item) for item in inside}
    return {split: file for split, file in found.items() if file is not None}


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def is_prepared(name: str) -> bool:
    """Whether a folder is a data set that prepare_data wrote."""
    report = Path(name) / "report.json"
    if not report.is_file() or not is_saved(report.parent):
        return False
    try:
        content = json.loads(report.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{report} is not valid JSON ({one_line(error)}). Prepare the data set anew.") from error
    return isinstance(content, dict) and content.get("format") == PREPARED_FORMAT


def load_splits(name: str, config: str | None, num_proc: int | None, title: str) -> DatasetDict:
    """Load a folder of `save_to_disk`, or any data set on the Hub or of a local folder, with all its splits.

    Raises a ValueError, opened by `title`, where that fails.
    """
    folder = Path(name)
    if folder.is_file():
        raise ValueError(f"{title}; that is a file. Give it as --train_file.")
    try:
        if is_saved(folder):
            source = load_from_disk(name)
        else:
            source = load_dataset(name, config, num_proc=num_proc)
    except (DatasetsError, pa.ArrowException, OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{title}; it could not be loaded ({one_line(error)}). Check its spelling, its "
            "configuration and the connection, or give a local folder of it."
        ) from error
    return DatasetDict({"train": source}) if isinstance(source, Dataset) else source


def _metadata_file(folder: Path) -> Path | None:
    return next((folder / name for name in METADATA_FILES if (folder / name).is_file()), None)
