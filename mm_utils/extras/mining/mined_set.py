"""Write a prepared data set again, with the column `negatives`, and say what was found."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetDict

from mm_utils import distributed
from mm_utils.data.prepare.on_disk import content_fingerprint, write_splits
from mm_utils.data.rows.columns import NEGATIVES
from mm_utils.extras.mining.negatives import Mined
from mm_utils.files import atomic_folder

logger = logging.getLogger(__name__)

REPORT = "negatives.json"
_ROWS = 1000


def write_mined(pairs: DatasetDict, mined: Mined, source: str, folder: Path, settings: dict[str, Any]) -> None:
    """Write all splits, `train` with its negatives, and `negatives.json`, and log it.

    Called on all ranks; the main process writes.

    Args:
        pairs: the prepared data set.
        mined: the negatives of its train split.
        source: its folder, whose report is written again.
        folder: the new folder, which appears when all is written.
        settings: the arguments, for the report.
    """
    distributed.on_first(lambda: _write(pairs, mined, source, folder, settings))


def _write(pairs: DatasetDict, mined: Mined, source: str, folder: Path, settings: dict[str, Any]) -> None:
    lists = [len(each) for each in mined.negatives]
    said = {
        "images": len(lists),
        "negatives": sum(lists),
        "images_without": lists.count(0),
        "left_out": mined.left_out,
        "settings": settings,
        "examples": mined.examples,
    }
    tables = {
        split: _with_column(rows, mined.negatives if split == "train" else [[]] * len(rows))
        for split, rows in pairs.items()
    }
    with atomic_folder(folder) as work:
        written = write_splits(tables, sum(map(len, pairs.values())), work)
        report = json.loads(Path(source, "report.json").read_text(encoding="utf-8"))
        report |= {"fingerprint": content_fingerprint(written), "mined_from": source}
        for name, content in (("report.json", report), (REPORT, said)):
            (work / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    logger.info("%s: %s", folder, describe(said))


def describe(said: dict[str, Any]) -> str:
    """Return what was found, in a few lines."""
    lines = [
        f"{said['negatives']:,} negatives for {said['images']:,} images; {said['images_without']:,} images have none",
        "Left out: " + ", ".join(f"{name} {count:,}" for name, count in said["left_out"].items()),
    ]
    for each in said["examples"][:3]:
        lines.append(f"{each['captions'][0]!r} is not: {'; '.join(map(repr, each['negatives'][:2])) or 'none found'}")
    return "\n  ".join(lines)


def _with_column(rows: Dataset, negatives: list[list[str]]) -> Iterator[pa.Table]:
    begin = 0
    for table in rows.with_format("arrow").iter(_ROWS):
        found = pa.array(negatives[begin : begin + len(table)], pa.list_(pa.string()))
        if NEGATIVES in table.column_names:
            table = table.drop([NEGATIVES])
        yield table.append_column(NEGATIVES, found)
        begin += len(table)
