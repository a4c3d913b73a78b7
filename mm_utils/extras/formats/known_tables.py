"""Tables of known sets, whose columns are not those of pairs: QVHighlights and ESC-50."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from mm_utils.data.rows.columns import SUFFIXES
from mm_utils.data.rows.source import Source
from mm_utils.extras.formats.classes import captions_of_class, readable

_QUERIES = {"query", "vid", "relevant_windows"}
_ESC = {"filename", "fold", "target", "category"}
_ESC_SPLITS = {"4": "validation", "5": "test"}  # sounds of one recording are in one of the five folds


def known_table(
    names: Sequence[str], source: Source, root: str
) -> tuple[list[str], Callable[[dict[str, Any]], dict[str, Any]]] | None:
    """Return a known table's usual columns, and what makes rows of such; None for others.

    A row of QVHighlights is a `query` and its `relevant_windows` of the video `vid`, a file below `root`: the query becomes
    a caption and the phrase of each window. ESC-50's rows name the `category` of a sound, and templates make captions.
    """
    if source.caption_column or source.image_column or source.medium == "image":
        return None
    if set(names) >= _QUERIES:
        return ["video", "caption", "id", "moments", "split"], lambda row: _query_row(row, root)
    if set(names) >= _ESC and not {"caption", "text"} & set(names):
        return ["audio", "caption", "split"], lambda row: _esc_row(row, source)
    return None


def _query_row(row: dict[str, Any], root: str) -> dict[str, Any]:
    name, query, windows = row.get("vid"), row.get("query"), row.get("relevant_windows")
    if isinstance(windows, list):
        windows = [{"span": window, "phrase": query} for window in windows]
    files = (f"{name}{suffix}" for suffix in SUFFIXES["clip"])
    file = next((file for file in files if os.path.isfile(os.path.join(root, file))), name and f"{name}.mp4")
    return {"video": file, "caption": query, "id": name, "moments": windows, "split": row.get("split")}


def _esc_row(row: dict[str, Any], source: Source) -> dict[str, Any]:
    captions = captions_of_class(source, readable(str(row.get("category") or "")), "sound")
    split = _ESC_SPLITS.get(str(row.get("fold")), "train")
    return {"audio": row.get("filename"), "caption": captions, "split": split}
