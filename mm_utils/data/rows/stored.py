"""Open what `save_to_disk` wrote, and data sets of the Hub, with no file elsewhere.

Anyone may publish such data. Cards, JSON files and columns of images name files; those outside of the data set are refused.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from datasets import Dataset, DatasetBuilder, DatasetDict, load_dataset_builder
from datasets.exceptions import DatasetsError
from datasets.table import MemoryMappedTable, concat_tables
from huggingface_hub.constants import HF_HUB_CACHE

from mm_utils.data.faults import REASONS, Fault
from mm_utils.data.paths import Jail
from mm_utils.data.rows.records import image_path
from mm_utils.files import read_json
from mm_utils.places import missing, use_cache_without_network
from mm_utils.text import one_line


def load_splits(name: str, title: str, allow_outside: bool = False, config: str | None = None) -> DatasetDict:
    """Load all splits of a folder of `save_to_disk` or of a data set of the Hub; ValueError, begun by `title`, if it fails."""
    folder = Path(name)
    if folder.is_file():
        raise ValueError(f"{title}; that is a file. Give it as --train_file.")
    if folder.is_dir() and not is_saved(folder):
        raise ValueError(f"{title}; save_to_disk did not write this folder. Leave out format=.")
    if problem := missing(name):
        raise ValueError(f"{title}; {problem}")
    with blamed_on(title):
        if is_saved(folder):
            return _open_whole(folder, Jail(name, allow_outside))
        use_cache_without_network()
        builder = open_builder(name, config)
        builder.download_and_prepare()
        return builder.as_dataset()


@contextmanager
def blamed_on(title: str) -> Iterator[None]:
    """Turn what goes wrong with a data set into a ValueError of one line, begun by `title`."""
    try:
        yield
    except Fault as fault:
        raise ValueError(f"{title}; {fault.detail}. {REASONS[fault.reason]}") from fault
    except _DAMAGE as error:
        raise ValueError(
            f"{title}; it could not be loaded ({one_line(error.__cause__ or error)}). Check its spelling, its "
            "configuration and the connection, or give a local folder of it."
        ) from error


def open_builder(name: str, config: str | None = None) -> DatasetBuilder:
    """Return the builder of a data set of the Hub, whose data files are its own.

    Raises a `Fault` if one is not, or the errors of `datasets`.
    """
    builder = load_dataset_builder(name, config)
    for file in (str(file) for files in (builder.config.data_files or {}).values() for file in files):
        if not file.startswith("hf://datasets/"):  # hf://datasets/owner/name@revision/file
            raise Fault("outside_root", f"its data file {file} is not in the data set")
    return builder


def folders_of(name: str) -> tuple[str, str]:
    """Return the folders where the images of a data set lie: its own, or its part of the cache, and what `datasets` fetched."""
    # 'owner/name' -> 'datasets--owner--name'
    own = name if os.path.isdir(name) else os.path.join(HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}")
    return own, str(datasets.config.DOWNLOADED_DATASETS_PATH)


# What `datasets` raises of files that are damaged; RecursionError is a RuntimeError.
_DAMAGE = (
    DatasetsError, pa.ArrowException, OSError, ValueError, RuntimeError, yaml.YAMLError, LookupError, TypeError, AttributeError,
)  # fmt: skip


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` wrote this folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def check_image_files(rows: Dataset, title: str, jail: Jail) -> None:
    """Raise ValueError, begun by `title`, if an image is a file that the jail refuses."""
    contents = pc.struct_field(rows.data.column("image"), "bytes")
    paths = pc.struct_field(rows.data.column("image"), "path")
    for path in paths.filter(pc.is_null(contents)).to_pylist() if contents.null_count else ():
        try:
            image_path(path, jail)
        except Fault as fault:
            if fault.reason in ("outside_root", "url_not_allowed", "not_a_file"):
                raise ValueError(f"{title}; {fault.detail}. {REASONS[fault.reason]}") from fault


def _open_whole(folder: Path, jail: Jail) -> DatasetDict:
    """Open a folder of `save_to_disk`; once more where another took its place meanwhile, so that no split is of another preparation."""
    while True:
        opened = _identity(folder)
        try:
            splits = _open_saved(folder, jail)
        except (Fault, *_DAMAGE):
            if _identity(folder) == opened:
                raise
            continue
        if _identity(folder) == opened:
            return splits


def _identity(folder: Path) -> tuple[int, int, int]:
    """Return what tells a folder from one that took its place; the inode alone may be used again."""
    stat = folder.stat()
    return stat.st_dev, stat.st_ino, stat.st_ctime_ns


def _open_saved(folder: Path, jail: Jail) -> DatasetDict:
    """Open the files that a folder of `save_to_disk` names, memory-mapped; raises a `Fault` of one that the jail refuses."""

    def place(name: str, by: str) -> str:
        try:
            return jail.resolve(os.path.join(jail.root, name))
        except Fault as fault:
            if fault.reason == "image_missing":
                raise ValueError(f"{by} names {name}, which is not there") from None
            raise Fault(fault.reason, f"{by} names {name}: {fault.detail}") from fault

    def stated(file: str) -> dict[str, Any]:
        content: dict[str, Any] = read_json(Path(place(file, "dataset_dict.json")))
        return content

    splits = DatasetDict()
    several = os.path.lexists(folder / "dataset_dict.json")
    for split in stated("dataset_dict.json")["splits"] if several else [""]:
        file = os.path.join(split, "state.json")
        state = stated(file)
        tables = [
            MemoryMappedTable.from_file(place(os.path.join(split, data["filename"]), file))
            for data in state["_data_files"]
        ]
        splits[split or "train"] = Dataset(concat_tables(tables), fingerprint=state["_fingerprint"])
    return splits
