"""Columns that follow from others: computed once, kept in the datasets cache, laid beside the rows they belong to.

Beside the files of a result lies one with their check sums. `datasets` notices no flipped bit, and of a file that was cut
it names neither path nor remedy; here both, and a result whose writer was killed, are computed anew.
"""

import json
import logging
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import numpy as np
from filelock import FileLock

logger = logging.getLogger(__name__)

Columns = dict[str, list]
_BLOCK = 1 << 24  # bytes; checking takes a third of a second per GB of token ids


def add_columns(
    rows: datasets.Dataset,
    columns: Sequence[str],
    derive: Callable[[Columns, np.ndarray | None], Columns],
    name: str,
    *,
    title: str,
    num_proc: int | None = None,
    features: datasets.Features | None = None,
) -> datasets.Dataset:
    """Lay what `derive` makes beside the other columns, which stay where they are, memory-mapped.

    Rows that were picked out of a table keep pointing into it.

    Args:
        columns: all that is read.
        derive: (columns of a batch, which of its rows are wanted, bool, or None for all) -> new columns. Nobody reads
            those of the others.
        name: of the result; it follows from all that decides it, as the result's fingerprint does.
        title: of the progress bar.
        features: of the new columns, where the first rows may not tell.
    """
    whole = table_of(rows)
    # Tables read from text files live in memory, and `map` would keep its result there too.
    cache = Path(datasets.config.HF_DATASETS_CACHE, "tandem_tokens")
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{name}.lock"):  # what another run is making is waited for, and read
        _remove_damaged(cache, name)
        added = whole.select_columns(list(columns)).map(
            _derive,
            batched=True,
            with_indices=True,
            num_proc=num_proc,
            remove_columns=list(columns),
            fn_kwargs={"derive": derive, "wanted": _wanted(rows)},
            cache_file_name=str(cache / f"{name}.arrow"),
            new_fingerprint=name,
            features=features,
            desc=title,
        )
        _seal(cache, name)
    both = datasets.concatenate_datasets([whole, added], axis=1)
    return datasets.Dataset(both.data, info=both.info, split=rows.split, indices_table=rows._indices, fingerprint=name)


def table_of(rows: datasets.Dataset) -> datasets.Dataset:
    """The whole table that `rows` were picked from, or are."""
    return datasets.Dataset(rows.data, info=rows.info.copy(), split=rows.split, fingerprint=rows._fingerprint)


def _derive(
    rows: Columns,
    places: list[int],
    derive: Callable[[Columns, np.ndarray | None], Columns],
    wanted: np.ndarray | None,
) -> Columns:
    return derive(rows, None if wanted is None else wanted[places])


def _wanted(rows: datasets.Dataset) -> np.ndarray | None:
    """Which rows of the table that `rows` were picked from are among them, bool; None: they are the table."""
    if rows._indices is None:
        return None
    wanted = np.zeros(rows.data.num_rows, bool)
    wanted[rows._indices.column(0).to_numpy()] = True
    return wanted


def _remove_damaged(cache: Path, name: str) -> None:
    """Remove a result that is not what was written. Whoever reads it now keeps what is mapped."""
    files = sorted(cache.glob(f"{name}*.arrow"))
    try:
        known = json.loads((cache / f"{name}.sums").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = None  # it was not finished
    if not files or known == _sums(files):
        return
    if known is not None:
        logger.warning("%s is damaged; it is computed anew. Check the disk.", cache / f"{name}.arrow")
    for file in (cache / f"{name}.sums", *files):
        file.unlink(missing_ok=True)


def _seal(cache: Path, name: str) -> None:
    """Write down the check sums of a new result."""
    sums = cache / f"{name}.sums"
    if sums.exists():
        return
    scratch = sums.with_suffix(".tmp")
    scratch.write_text(json.dumps(_sums(sorted(cache.glob(f"{name}*.arrow")))), encoding="utf-8")
    scratch.replace(sums)


def _sums(files: Sequence[Path]) -> dict[str, int]:
    """CRC-32 by name."""
    found = {}
    for path in files:
        found[path.name] = 0
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                found[path.name] = zlib.crc32(block, found[path.name])
    return found
