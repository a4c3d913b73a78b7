"""The folder of an index: embeddings of media, and what is needed to show them.

It is one Arrow data set, which `datasets.load_from_disk` opens:

================  =====================================================================================================
column            meaning
================  =====================================================================================================
``id``            the image's path in its folder, or its split and id
``path``          absolute path of the file; "" if the bytes were stored in a data set
``captions``      known captions, perhaps none
``size``          bytes of the image
``mtime_ns``      time of the file's last change in nanoseconds; 0 for stored bytes
``content_hash``  BLAKE2b-128 of the bytes, hexadecimal
``embedding``     unit vector of the image tower, float16 `[E]`
``thumbnail``     a JPEG of the image, decoded and encoded anew; of a clip, frames of it; of a sound, its spectrogram
``states``        if asked for: what the fusion head reads of the image, all taps of the vision tower, float16
``content``       of clips and sounds alone: the stored file, AVI or WAV, which the page plays and the head reads
================  =====================================================================================================

Beside it lie `index.json` (`IndexInfo`), `skipped.jsonl` (images that could not be read, with reasons), and during a run
the folder `parts`: what has been embedded so far; and FAISS indexes of the rows, where a search has asked for one.

Nothing is ever half written: every file is written under another name and renamed, and new rows replace the old ones when
`state.json`, which names their files and has a checksum of all columns but `_UNCHECKED`, is replaced. An update writes new
and changed rows behind the files that stay as they are (`updating.KEPT_BYTES`), so rows are in the order of the listing only in small
indexes.
"""

import dataclasses
import hashlib
import json
import logging
import math
import os
import shutil
import uuid
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch

from mm_utils.data.batches.column_cache import add_weights, to_arrow
from mm_utils.data.media.medium import Medium, read_by
from mm_utils.distributed import RunError
from mm_utils.files import retry, write_atomic
from mm_utils.model.build import load_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import load_processor_of
from mm_utils.text import one_line

logger = logging.getLogger(__name__)

FORMAT = "tandem-index"
VERSION = 1
SKIPPED = "skipped.jsonl"
FAISS = "faiss-"  # begins the names of FAISS indexes of the rows
STAMPS = pa.schema(
    {
        "id": pa.string(),
        "path": pa.string(),
        "captions": pa.list_(pa.string()),
        "size": pa.int64(),
        "mtime_ns": pa.int64(),
        "content_hash": pa.string(),
    }
)
_INFO, _STATE, _PARTS = "index.json", "state.json", "parts"
_SHARD_BYTES = 500 << 20
_CHECKSUM = "tandem_crc32"  # in state.json; an index of before has none
_UNCHECKED = ("thumbnail", "states", "content")  # too large to be read at every start
_MEDIA = ("image", "clip", "sound")
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # seconds, in which an update exchanges the rows again and again
_TOWERS = ("vision_model.", "visual_projection.", "text_model.", "text_projection.")


@dataclass(frozen=True)
class IndexInfo:
    """What `index.json` says.

    Attributes:
        model: the folder of the model, or its Hub id.
        fingerprint: `model_fingerprint` of the model.
        image_size: side of the squares that were embedded.
        width: numbers of an embedding.
        images: rows of the index; 0 until the first run has ended.
        skipped: lines of `skipped.jsonl`.
        states: shapes of the taps in the column `states`; None if the index does not keep them.
        medium: `image`, `clip` or `sound`; not written for images, which all once were.
    """

    model: str
    fingerprint: str
    image_size: int
    width: int
    images: int = 0
    skipped: int = 0
    states: list[list[int]] | None = None
    medium: str = "image"

    @property
    def columns(self) -> pa.Schema:
        """The columns of the index."""
        return schema(self.width, self.states, self.medium)

    def save(self, folder: Path) -> None:
        """Write `index.json`."""
        content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        if self.medium == "image":
            del content["medium"]
        write_atomic(folder / _INFO, json.dumps(content, indent=2) + "\n")


def model_fingerprint(model: FusionDualEncoderModel, medium: Medium) -> str:
    """Return 32 hexadecimal digits of towers, projections, and how media are read."""
    side, colours, *rest = medium.key.values()
    digest = hashlib.blake2b(repr((side, *colours, *rest)).encode(), digest_size=16)
    add_weights(digest, {name: value for name, value in model.state_dict().items() if name.startswith(_TOWERS)})
    return digest.hexdigest()


def shares_images(info: IndexInfo, model: FusionDualEncoderModel, medium: Medium) -> bool:
    """Return whether an index was made with a model, still in its place, of the same image side and another text tower."""
    try:
        own, own_medium = load_model(info.model, fusion_layers=0), read_by(load_processor_of(info.model))
    except ValueError:
        return False
    if model_fingerprint(own, own_medium) != info.fingerprint or own_medium.key != medium.key:
        return False
    sides = [dict(each.vision_model.state_dict(prefix="vision_model.")) for each in (own, model)]
    for side, each in zip(sides, (own, model), strict=True):
        side.update(each.visual_projection.state_dict())
        if not len(each.visual_projection.state_dict()):  # SigLIP's tower embeds by itself
            side["weight"] = torch.eye(each.config.projection_dim)
    one, other = sides
    return one.keys() == other.keys() and all(
        torch.equal(value.cpu(), other[name].cpu()) for name, value in one.items()
    )


def read_info(folder: Path) -> IndexInfo | None:
    """Return what `index.json` says; None in a folder that is empty or does not exist.

    Raises:
        ValueError: if the folder holds something else, or an index of another version.
    """
    path = folder / _INFO
    if not path.is_file():
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--index_dir is {folder}; that is a file. Give a folder.")
        if folder.is_dir() and any(name for name in os.listdir(folder) if not name.startswith(".")):
            raise ValueError(f"--index_dir is {folder}; this folder holds something else. Give a new folder.")
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if (content.pop("format"), content.pop("version")) != (FORMAT, VERSION):
            raise ValueError("it is of another version")
        info = IndexInfo(**content)
        texts, numbers = (info.model, info.fingerprint), (info.image_size, info.width, info.images)
        if not all(isinstance(each, str) for each in texts) or not all(isinstance(each, int) for each in numbers):
            raise ValueError("a value is of another type")
        if info.medium not in _MEDIA or info.width < 1:
            raise ValueError(f"its medium is {info.medium}, and its width {info.width}")
        return info
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not an index of this version ({one_line(error)}). Delete the folder, and run scripts/embed.py again."
        ) from error


def open_index(folder: Path) -> tuple[IndexInfo, datasets.Dataset]:
    """Open an index for reading.

    Raises:
        ValueError: if there is none, its first run has not ended, or it is damaged.
    """
    info = read_info(folder)
    if info is None:
        raise ValueError(f"--index_dir is {folder}; there is no index. Make one with scripts/embed.py.")
    rows = read_rows(folder, info.columns)
    if rows is None:
        raise ValueError(
            f"--index_dir is {folder}; its images are not all embedded. Run the command of scripts/embed.py again."
        )
    return info, rows


def stamp(folder: Path) -> tuple[int, int] | None:
    """Return what changes when the rows are exchanged; None without rows."""
    try:
        status = (folder / _STATE).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_mtime_ns, status.st_ino


def read_rows(folder: Path, columns: pa.Schema) -> datasets.Dataset | None:
    """Return the rows, memory-mapped and checked; None before the first run has ended.

    Raises:
        ValueError: if they are damaged.
    """
    if not (folder / _STATE).is_file():
        return None
    # While an update ends, the files that state.json named a moment ago are gone: then there is a new one.
    try:
        return retry(
            lambda: _checked_rows(folder, columns), lambda error: isinstance(error, FileNotFoundError), _PAUSES
        )
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"--index_dir is {folder}; the index is damaged ({one_line(error)}). Delete the folder, and run "
            "scripts/embed.py again."
        ) from error


def _checked_rows(folder: Path, columns: pa.Schema) -> datasets.Dataset:
    state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    rows = datasets.load_from_disk(str(folder))
    table = rows.data.table
    if not table.schema.equals(columns):
        raise ValueError(f"its columns are {', '.join(table.column_names)}, and not those of index.json")
    if {Path(each["filename"]).name for each in rows.cache_files} != {
        each["filename"] for each in state["_data_files"]
    }:
        raise FileNotFoundError(folder / _STATE)  # exchanged between the two readings
    if state.get(_CHECKSUM, _checksum(table)) != _checksum(table):
        raise ValueError("its rows are not those that were written")
    if _CHECKSUM not in state and not all(map(_is_finite, table["embedding"].chunks)):
        raise ValueError("an embedding is not finite")
    return rows


def _checksum(table: pa.Table) -> int:
    """Return the CRC-32 of all columns but `_UNCHECKED`, as they lie in their files."""
    found = 0
    for name in table.column_names:
        for chunk in () if name in _UNCHECKED else table[name].chunks:
            for buffer in chunk.buffers():
                found = found if buffer is None else zlib.crc32(buffer, found)
    return found


def _is_finite(embeddings: pa.FixedSizeListArray) -> bool:
    return bool(np.isfinite(embeddings.flatten().to_numpy(zero_copy_only=True)).all())


def schema(width: int, states: list[list[int]] | None = None, medium: str = "image") -> pa.Schema:
    """Return an index's columns: embeddings of `width` numbers, and taps of these shapes."""
    vectors = {"embedding": width} | ({} if states is None else {"states": sum(map(math.prod, states))})
    fields = [pa.field(name, pa.list_(pa.float16(), size)) for name, size in vectors.items()]
    content = [] if medium == "image" else [pa.field("content", pa.binary())]
    return pa.schema([*STAMPS, fields[0], pa.field("thumbnail", pa.binary()), *fields[1:], *content])


def stored_files(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield the files of the rows, in order, and how many each has; none before the first run has ended."""
    state = json.loads((folder / _STATE).read_text(encoding="utf-8")) if (folder / _STATE).is_file() else {}
    for each in state.get("_data_files", ()):
        path = folder / each["filename"]
        yield path, len(pa.ipc.open_stream(pa.memory_map(str(path))).read_all())


def replace_rows(folder: Path, tables: Iterable[pa.Table], columns: pa.Schema, kept: Sequence[str] = ()) -> int:
    """Exchange the rows for those of the files `kept` and, behind them, of tables of these columns; return their number.

    A process that has the old rows open can still read them.
    """
    # Those of a killed run are among the old ones.
    old = [path for path in (*folder.glob("data-*.arrow"), *folder.glob(f"{FAISS}*")) if path.name not in kept]
    run = uuid.uuid4().hex[:8]
    features = datasets.Features.from_arrow_schema(columns)
    try:
        names = [*kept, *_write_shards(folder, run, tables, features.arrow_schema)]
        written = pa.concat_tables(
            [pa.ipc.open_stream(pa.memory_map(str(folder / name))).read_all() for name in names]
        )
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": run,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
            _CHECKSUM: _checksum(written),
        }
        description = dataclasses.asdict(datasets.DatasetInfo(features=features))
        write_atomic(folder / "dataset_info.json", json.dumps(description))
        write_atomic(folder / _STATE, json.dumps(state, indent=2))
    except BaseException:  # a full disk, which needs the room
        for path in folder.glob(f"data-{run}-*.arrow"):
            path.unlink(missing_ok=True)
        raise
    for path in old:
        path.unlink(missing_ok=True)
    return len(written)


def _write_shards(folder: Path, run: str, tables: Iterable[pa.Table], columns: pa.Schema) -> list[str]:
    """Write tables to files of about `_SHARD_BYTES`; return the names."""
    names: list[str] = []
    waiting = iter(tables)
    table = next(waiting, None)
    while table is not None:
        names.append(f"data-{run}-{len(names):05d}.arrow")
        size = 0
        with pa.OSFile(str(folder / names[-1]), "wb") as file, pa.ipc.new_stream(file, columns) as writer:
            while table is not None and size < _SHARD_BYTES:
                writer.write_table(table.cast(columns))
                size += table.nbytes
                table = next(waiting, None)
    return names


# -- parts --------------------------------------------------------------------------------------------------------------


def write_part(folder: Path, rows: list[dict[str, Any]], columns: pa.Schema) -> None:
    """Write embedded rows, so that a run that is killed later need not embed them again.

    Args:
        folder: the folder of the index.
        rows: embeddings and states as float16 tensors.
        columns: the columns of the index.
    """
    (folder / _PARTS).mkdir(exist_ok=True)
    sink = pa.BufferOutputStream()
    arrays = {
        name: to_arrow(torch.stack([row[name] for row in rows]))
        if name in ("embedding", "states")
        else pa.array([row[name] for row in rows], columns.field(name).type)
        for name in columns.names
    }
    with pa.ipc.new_stream(sink, columns) as writer:
        writer.write_table(pa.table(arrays).cast(columns))
    write_atomic(folder / _PARTS / f"{uuid.uuid4().hex}.arrow", sink.getvalue().to_pybytes())


def read_parts(folder: Path, columns: pa.Schema, without: Collection[str] = ()) -> dict[str, pa.Table]:
    """Return unended runs' parts by name, mapped, but `without`; damaged ones are left out."""
    parts = {}
    for path in sorted((folder / _PARTS).glob("*.arrow")):
        if path.name in without:
            continue
        try:
            table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
            if table.schema != columns:
                raise pa.ArrowInvalid("it has other columns")
            parts[path.name] = table
        except (pa.ArrowException, OSError) as error:
            logger.warning("%s is damaged (%s); its images are embedded again.", path, error)
    return parts


def remove_parts(folder: Path) -> None:
    """Remove all parts, and what a killed run left of writing one."""
    shutil.rmtree(folder / _PARTS, ignore_errors=True)


def write_skipped(folder: Path, lines: Iterable[dict[str, str]]) -> None:
    """Write `skipped.jsonl`, one image a line."""
    write_atomic(folder / SKIPPED, "".join(json.dumps(line) + "\n" for line in lines))


def keeps_states(folder: Path) -> bool:
    """Return whether there is an index that keeps what the fusion head reads."""
    info = read_info(folder)
    return info is not None and info.states is not None


def check_same_model(
    info: IndexInfo, loaded: FusionDualEncoderModel, medium: Medium, model: str, folder: Path
) -> None:
    """Raise RunError unless the index was made with this model, or with one of the same image side."""
    if info.fingerprint != model_fingerprint(loaded, medium) and not shares_images(info, loaded, medium):
        raise RunError(
            f"--model_name_or_path is {model}; the index {folder} was made with other weights (of {info.model}), whose "
            "embeddings do not compare. Embed into a new --index_dir, or delete this one first."
        )
