"""Columns that follow from others: computed once, kept in the datasets cache, laid beside the rows they belong to."""

from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import numpy as np

Columns = dict[str, list]


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
