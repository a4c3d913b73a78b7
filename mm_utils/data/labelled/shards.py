"""Folders of tar shards, with what CLIP_benchmark writes beside them.

Shards lie in a folder per split, ``test/0.tar``; a member ``.cls`` is the number of a class, and ``.txt`` has a caption a line.
Beside the splits are ``classnames.txt``, ``zeroshot_classification_templates.txt`` with the class at ``{c}``, and
``dataset_type.txt``, which says "retrieval" where there are captions.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset, Features, Image, Value
from datasets.exceptions import DatasetsError

from mm_utils.data.paths import Limits, check_own_file
from mm_utils.data.rows.source import Source
from mm_utils.data.rows.webdataset import read_shard, shard_paths, split_of_folder
from mm_utils.text import one_line

CLASS_NAMES = "classnames.txt"
_TEMPLATES = "zeroshot_classification_templates.txt"
_FEATURES = Features({"image": Image(decode=False), "label": Value("string")})


def shards_by_split(folder: str, title: str) -> dict[str, list[str]]:
    """Return the shards of each split; those that lie in no split's folder are of train.

    Raises:
        ValueError: begun by `title`, if one leads out of the folder.
    """
    found = defaultdict(list)
    for path in shard_paths(Source(folder, title=title)):
        check_own_file(path, folder, False, title)
        found[split_of_folder(path, folder) or "train"].append(path)
    return found


def read_labelled_shards(paths: list[str], title: str) -> Dataset:
    """Read images and labels of shards into the cache; numbers as int64, else text.

    Raises:
        ValueError: begun by `title`, if a shard is damaged, or a sample has no image or no label.
    """
    stamps = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths]  # part of the cache's key
    try:
        rows = Dataset.from_generator(_labelled, features=_FEATURES, gen_kwargs={"shards": stamps})
    except (DatasetsError, ValueError) as error:
        raise ValueError(f"{title}; {one_line(error.__cause__ or error)}") from error
    assert isinstance(rows, Dataset)
    if all(label.isdecimal() for label in rows.unique("label")):
        rows = rows.cast_column("label", Value("int64"))
    return rows


def templates_beside(folder: str) -> tuple[str, ...]:
    """Return the templates in a folder of shards, with ``{}`` for the class's name."""
    path = Path(folder, _TEMPLATES)
    lines = path.read_text(encoding="utf-8-sig").splitlines() if path.is_file() else []
    return tuple(line.strip().replace("{c}", "{}") for line in lines if "{c}" in line)


def _labelled(shards: list[tuple[str, int, int]]) -> Iterator[dict[str, object]]:
    for path, *_ in shards:
        for sample in read_shard(path, ("image",)):
            if sample.fault is not None:
                raise sample.fault
            member = sample.medium("image")
            if member is None or "cls" not in sample.texts:
                missing = "image" if member is None else "label (.cls)"
                raise ValueError(f"{path}, member {sample.key}, has no {missing}. Write it, or leave the sample out.")
            image = {"bytes": member.read(Limits()), "path": None}
            yield {"image": image, "label": sample.text("cls").strip()}
