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
``content``       of clips and sounds alone: the stored file, AVI or WAV, which the page plays and the head reads
================  =====================================================================================================

Beside it lie `index.json` (`IndexInfo`), `skipped.jsonl` (images that could not be read, with reasons), FAISS indexes of the
rows, where a search has asked for one, and during a run the folder `parts`: what has been embedded so far.

Every file is written under another name and renamed. New rows replace the old ones when `state.json` is replaced, which
names their files and has a checksum of all columns but `_UNCHECKED`.
"""

import dataclasses
import hashlib
import json
import logging
import os
import uuid
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import torch

from mm_utils.data.batches.column_cache import add_weights, to_arrow
from mm_utils.data.media.medium import Medium
from mm_utils.distributed import RunError
from mm_utils.files import retry, write_atomic
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.text import one_line

logger = logging.getLogger(__name__)

VERSION = 2
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
PARTS = "parts"
_INFO, _STATE = "index.json", "state.json"
_SHARD_BYTES = 500 << 20
_CHECKSUM = "tandem_crc32"  # in state.json
_UNCHECKED = ("thumbnail", "content")  # too large to be read at every start
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # seconds, in which an update exchanges the rows again and again


@dataclass(frozen=True)
class IndexInfo:
    """What `index.json` says.

    Attributes:
        model: the folder of the model, or its Hub id.
        fingerprint: `model_fingerprint` of the model.
        width: numbers of an embedding.
        medium: `image`, `clip` or `sound`.
        images: rows of the index; 0 until the first run has ended.
        skipped: lines of `skipped.jsonl`.
    """

    model: str
    fingerprint: str
    width: int
    medium: str = "image"
    images: int = 0
    skipped: int = 0

    @property
    def columns(self) -> pa.Schema:
        """The columns of the index."""
        content = [] if self.medium == "image" else [pa.field("content", pa.binary())]
        vector = pa.field("embedding", pa.list_(pa.float16(), self.width))
        return pa.schema([*STAMPS, vector, pa.field("thumbnail", pa.binary()), *content])

    def save(self, folder: Path) -> None:
        """Write `index.json`."""
        content = {"format": "tandem-index", "version": VERSION, **vars(self)}
        write_atomic(folder / _INFO, json.dumps(content, indent=2) + "\n")


def model_fingerprint(model: FusionDualEncoderModel, medium: Medium) -> str:
    """Return 32 hexadecimal digits of what embeds media: the vision tower, its projection, and how media are read."""
    digest = hashlib.blake2b(repr(list(medium.key.values())).encode(), digest_size=16)
    weights = {f"vision_model.{name}": value for name, value in model.vision_model.state_dict().items()}
    projection = model.visual_projection.state_dict()  # of SigLIP's tower, which embeds by itself, empty
    weights["visual_projection.weight"] = projection.get("weight", torch.eye(model.config.projection_dim))
    add_weights(digest, weights)
    return digest.hexdigest()


def check_same_model(
    info: IndexInfo, loaded: FusionDualEncoderModel, medium: Medium, model: str, folder: Path
) -> None:
    """Raise RunError unless the index was made with this model, or with one of the same image side."""
    if info.fingerprint != model_fingerprint(loaded, medium):
        raise RunError(
            f"--model_name_or_path is {model}; the index {folder} was made with other weights (of {info.model}), whose "
            "embeddings do not compare. Embed into a new --index_dir, or delete this one first."
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
        if (content.pop("format"), content.pop("version")) != ("tandem-index", VERSION):
            raise ValueError("it is of another version")
        info = IndexInfo(**content)
        for field in dataclasses.fields(info):
            if not isinstance(getattr(info, field.name), field.type):  # type: ignore[arg-type]
                raise ValueError(f"{field.name} is {getattr(info, field.name)}")
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
    if state[_CHECKSUM] != _checksum(table):
        raise ValueError("its rows are not those that were written")
    return rows


def _checksum(table: pa.Table) -> int:
    """Return the CRC-32 of all columns but `_UNCHECKED`, as they lie in their files."""
    found = 0
    for name in table.column_names:
        for chunk in () if name in _UNCHECKED else table[name].chunks:
            for buffer in chunk.buffers():
                found = found if buffer is None else zlib.crc32(buffer, found)
    return found


def replace_rows(folder: Path, tables: Iterable[pa.Table], columns: pa.Schema) -> None:
    """Exchange the rows for those of tables of these columns.

    A process that has the old rows open can still read them.
    """
    # Those of a killed run are among the old ones.
    old = [*folder.glob("data-*.arrow"), *folder.glob(f"{FAISS}*")]
    run, waiting = uuid.uuid4().hex[:8], iter(tables)
    names: list[str] = []
    features = datasets.Features.from_arrow_schema(columns)
    schema = features.arrow_schema
    try:
        table = next(waiting, None)
        while table is not None:
            names.append(f"data-{run}-{len(names):05d}.arrow")
            size = 0
            with pa.OSFile(str(folder / names[-1]), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
                while table is not None and size < _SHARD_BYTES:
                    writer.write_table(table.cast(schema))
                    size += table.nbytes
                    table = next(waiting, None)
        written = [pa.ipc.open_stream(pa.memory_map(str(folder / name))).read_all() for name in names]
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": run,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
            _CHECKSUM: _checksum(pa.concat_tables(written)),
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


def write_part(folder: Path, rows: list[dict[str, Any]], columns: pa.Schema) -> None:
    """Write embedded rows, with embeddings as float16 tensors, so that a run that is killed later need not embed them again."""
    (folder / PARTS).mkdir(exist_ok=True)
    sink = pa.BufferOutputStream()
    arrays = {
        name: to_arrow(torch.stack([row[name] for row in rows]))
        if name == "embedding"
        else pa.array([row[name] for row in rows], columns.field(name).type)
        for name in columns.names
    }
    with pa.ipc.new_stream(sink, columns) as writer:
        writer.write_table(pa.table(arrays).cast(columns))
    write_atomic(folder / PARTS / f"{uuid.uuid4().hex}.arrow", sink.getvalue().to_pybytes())


def read_parts(folder: Path, columns: pa.Schema, without: Collection[str] = ()) -> dict[str, pa.Table]:
    """Return unended runs' parts by name, mapped, but `without`; damaged ones are left out."""
    parts = {}
    for path in sorted((folder / PARTS).glob("*.arrow")):
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
