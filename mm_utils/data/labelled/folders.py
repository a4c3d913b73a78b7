"""Labelled rows of folders: clips or sounds in a folder per class, and prepared sets."""

from pathlib import Path

from datasets import Dataset, DatasetDict, concatenate_datasets

from mm_utils.data.labelled.rows import LabelledRows, Wanted, count_bad, media_of, refuse_kind
from mm_utils.data.prepare.cache import store_media
from mm_utils.data.rows.columns import caption_classes
from mm_utils.data.rows.detect import kinds_of_folder
from mm_utils.data.rows.folders import read_classes
from mm_utils.data.rows.records import Record
from mm_utils.data.rows.source import PathArguments, Source

_STORED = (".parquet", ".arrow", ".tar")  # files of data sets, which `datasets` reads


def read_class_folder(name: str, wanted: Wanted, title: str, paths: PathArguments) -> dict[str, LabelledRows] | None:
    """Read clips or sounds in a folder per class, also below splits; None if it holds others.

    Raises:
        ValueError: if it holds clips or sounds alone, and the model is for others.
    """
    folder = Path(name)
    kinds = kinds_of_folder(folder) if folder.is_dir() else {}
    holds_images = "image" in kinds and (wanted.medium == "image" or wanted.medium not in kinds)
    if not kinds or holds_images or any(next(folder.rglob(f"*{suffix}"), None) for suffix in _STORED):
        return None
    if wanted.medium not in kinds:
        refuse_kind(f"{title}; it", next(iter(kinds)), wanted.medium)
    parts: dict[str, list[Record]] = {}
    bad: list[str] = []
    for item in read_classes(Source(name, "classes", templates=("{}",), medium=wanted.medium, title=title), paths):
        if isinstance(item, Record):
            parts.setdefault(item.split or "train", []).append(item)
        else:
            bad.append(f"{item.where}: {item.fault.detail}")
    count_bad(title, len(bad) + sum(map(len, parts.values())), bad)
    names, found = sorted({record.captions[0] for records in parts.values() for record in records}), {}
    for split, records in parts.items():
        media, faults = store_media(records, wanted.workers)
        beside = Dataset.from_dict({"answers": [record.captions for record in records]})
        rows, places = concatenate_datasets([media, beside], axis=1), [record.where for record in records]
        found[split] = LabelledRows(f"{title}, split {split}", rows, names, faults=faults, places=places)
    return found


def read_prepared(splits: DatasetDict, title: str) -> dict[str, LabelledRows]:
    """Label a prepared set's rows by their first caption, see `caption_classes`."""
    captions = caption_classes([each for rows in splits.values() for each in rows["captions"]], title)
    firsts = iter([each[0]] for each in captions)
    found = {}
    for split, rows in splits.items():
        beside = Dataset.from_dict({"answers": [next(firsts) for _ in range(len(rows))]})
        labelled = concatenate_datasets([media_of(rows), beside], axis=1)
        found[split] = LabelledRows(f"{title}, split {split}", labelled)
    return found
