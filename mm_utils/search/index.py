"""The folder of an index: embeddings of media, and what is needed to show them.

It is one Arrow file, `rows-*.arrow`, with the columns of `IndexInfo.columns`, which `datasets.Dataset.from_file` opens. Beside it lie
`index.json` (`IndexInfo`), which names that file and has its checksum, `skipped.jsonl` (images that could not be read, with reasons), and
during a run a folder `parts-*`: what has been embedded so far with this model. An update writes a new Arrow file, and its end is that
`index.json` is replaced.
"""

import hashlib
import json
import logging
import shutil
import uuid
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import torch

from mm_utils.data.batches.column_cache import add_weights
from mm_utils.data.batches.tokens import tokenizer_digest
from mm_utils.data.media.medium import Medium
from mm_utils.distributed import RunError
from mm_utils.files import read_json, retry, write_atomic
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.places import missing
from mm_utils.text import one_line

logger = logging.getLogger(__name__)

VERSION = 6
SKIPPED = "skipped.jsonl"
PARTS = "parts-"
KEY = ["id", "mtime_ns", "stamp", "captions"]  # a row is kept where these are equal
_INFO = "index.json"
_UNCHECKED = ("thumbnail", "content")  # too large to be read at every start
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # seconds, in which an update exchanges the rows again and again


@dataclass(frozen=True)
class IndexInfo:
    """What `index.json` says.

    Attributes:
        model: the folder of the model, or its Hub id.
        fingerprint, texts: `fingerprints` of the model.
        width: numbers of an embedding.
        medium: `image`, `clip` or `sound`.
        rows: name of the Arrow file.
        crc32: of all its columns but `_UNCHECKED`.
        level: a score that 99 of 100 texts of random letters do not reach (`Searcher.level`); None of a few images.
    """

    model: str
    fingerprint: str
    texts: str
    width: int
    medium: str = "image"
    rows: str = ""
    crc32: int = 0
    level: float | None = None

    @property
    def columns(self) -> pa.Schema:
        """The columns of the index."""
        vector = pa.list_(pa.float16(), self.width)
        columns = {
            "id": pa.string(),  # the image's path in its folder, or its id in a set of pairs
            "split": pa.string(),  # "" of a folder
            "path": pa.string(),  # absolute path of the file; "" if the bytes were stored in a data set
            "stamp": pa.string(),  # bytes of the file; for stored bytes their BLAKE2b-128, hexadecimal
            "captions": pa.list_(pa.string()),
            "mtime_ns": pa.int64(),  # the file's last change; 0 for stored bytes
            "day": pa.string(),  # 2024-05-31, when a photograph was taken, by its EXIF, or a sound's file changed; else ""
            "embedding": vector,  # unit vector of the image tower
            "caption_embedding": vector,  # unit vector of the mean of the captions' embeddings; null without captions
            "print": pa.binary(),  # 200 bytes by which near copies are found: `mm_utils.data.prepare.perceptual_hash`
            "thumbnail": pa.binary(),  # a JPEG of the image, of a clip's frames, or of a sound's spectrogram
        }
        if self.medium != "image":
            columns["content"] = pa.binary()  # the stored file, AVI or WAV, which the page plays and the head reads
        return pa.schema(columns)


def fingerprints(model: FusionDualEncoderModel, medium: Medium) -> tuple[str, str]:
    """Return 32 hexadecimal digits of what embeds media, and of what embeds texts.

    These are a tower, its pooling and projection, and how media are read, or the tokenizer.
    """
    read = [*medium.key.values(), model.config.vision_pooling]
    images = hashlib.blake2b(repr(read).encode(), digest_size=16)
    weights = {f"vision_model.{name}": value for name, value in model.vision_model.state_dict().items()}
    projection = model.visual_projection.state_dict()  # of SigLIP's tower, which embeds by itself, empty
    weights["visual_projection.weight"] = projection.get("weight", torch.eye(model.config.projection_dim))
    add_weights(images, weights)
    tokenizer = model.processor.tokenizer
    read = [tokenizer_digest(tokenizer), model.most_tokens(tokenizer), model.config.text_pooling]
    texts = hashlib.blake2b(repr(read).encode(), digest_size=16)
    for part in (model.text_model, model.text_projection):
        add_weights(texts, part.state_dict())
    return images.hexdigest(), texts.hexdigest()


def check_same_model(info: IndexInfo, fingerprint: str, model: str, folder: Path) -> None:
    """Raise RunError unless the index was made with a model of the same image side."""
    if info.fingerprint != fingerprint:
        raise RunError(
            f"--model_name_or_path is {model}; the index {folder} was made with another image side (of {info.model}), "
            "whose embeddings do not compare. Embed into a new --index_dir, or delete this one first."
        )


def check_folder(folder: Path) -> None:
    """Raise ValueError if the folder holds something else than an index."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--index_dir is {folder}; that is a file. Give a folder.")
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    is_foreign = any(not name.startswith((".", PARTS, "rows-", SKIPPED)) for name in names)
    if has_index(folder):
        is_foreign = b'"tandem-index"' not in (folder / _INFO).read_bytes()
    if is_foreign:
        raise ValueError(
            f"--index_dir is {folder}; this folder holds something else. Give one that scripts/embed.py wrote, or to embed into, a new one."
        )


def open_index(folder: Path) -> tuple[IndexInfo, datasets.Dataset]:
    """Return what `index.json` says, and the rows, memory-mapped and checked.

    Raises:
        ValueError: if they are damaged, of another version, or not there, or the folder holds something else.
    """
    check_folder(folder)
    if is_older(folder):
        raise ValueError(
            f"--index_dir is {folder}; an earlier version wrote this index. Run scripts/embed.py again, which makes it anew."
        )
    if not has_index(folder):
        fault = missing(str(folder), is_local=True) or "there is no index, or not all of it."
        raise ValueError(f"--index_dir is {folder}; {fault} Run scripts/embed.py to its end.")
    try:  # where an update ends meanwhile, the file that index.json named a moment ago is gone, and there is a new one
        return retry(lambda: _read(folder), lambda error: isinstance(error, FileNotFoundError), _PAUSES)
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"--index_dir is {folder}; the index is damaged, or of another version ({one_line(error)}). Delete the folder, and run "
            "scripts/embed.py again."
        ) from error


def has_index(folder: Path) -> bool:
    """Return whether a first run has ended."""
    return (folder / _INFO).is_file()


def is_older(folder: Path) -> bool:
    """Return whether there is an index that an earlier version wrote, whose rows lack what the present ones have."""
    try:
        return bool(read_json(folder / _INFO)["version"] < VERSION)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _read(folder: Path) -> tuple[IndexInfo, datasets.Dataset]:
    content = read_json(folder / _INFO)
    if content.pop("format") != "tandem-index" or content.pop("version") != VERSION:
        raise ValueError("it is of another version")
    info = IndexInfo(**content)
    # a name alone, which leads nowhere else
    rows = datasets.Dataset.from_file(str(folder / Path(info.rows).name))
    table = rows.data.table
    if not table.schema.equals(info.columns) or _checksum(table) != info.crc32 or not isinstance(info.model, str):
        raise ValueError("its rows are not those that were written")
    return info, rows


def _checksum(table: pa.Table) -> int:
    """Return the CRC-32 of all columns but `_UNCHECKED`, as they lie in their files."""
    found = len(table)  # the number of rows, which no buffer holds
    for name in table.column_names:
        for chunk in () if name in _UNCHECKED else table[name].chunks:
            for buffer in chunk.buffers():
                found = found if buffer is None else zlib.crc32(buffer, found)
    return found


def write_index(folder: Path, info: IndexInfo, tables: Iterable[pa.Table] | None, skipped: list[dict]) -> None:
    """Exchange the rows for those of tables, or let them be; write `skipped.jsonl`, and `index.json` last.

    A process that has the old rows open can still read them.
    """
    # 'rows-3f2a9c01.arrow', never the name of rows that a process has open
    new = folder / f"rows-{uuid.uuid4().hex[:8]}.arrow"
    try:
        if tables is not None:
            with pa.ipc.new_stream(str(new), info.columns) as writer:
                for table in tables:
                    table = table.select(info.columns.names).cast(info.columns)
                    writer.write_table(table.combine_chunks())  # chosen rows are chunks of one row each
            written = pa.ipc.open_stream(pa.memory_map(str(new))).read_all()
            info = replace(info, rows=new.name, crc32=_checksum(written), level=None)
        write_atomic(folder / SKIPPED, "".join(json.dumps(line) + "\n" for line in skipped))
        write_info(folder, info)
    except BaseException:  # a full disk, which needs the room
        new.unlink(missing_ok=True)
        raise
    for path in folder.glob("rows-*.arrow"):
        if path.name != info.rows:
            path.unlink(missing_ok=True)
    for parts in folder.glob(f"{PARTS}*"):
        shutil.rmtree(parts, ignore_errors=True)


def write_info(folder: Path, info: IndexInfo) -> None:
    """Write `index.json`."""
    content = {"format": "tandem-index", "version": VERSION, **vars(info)}
    write_atomic(folder / _INFO, json.dumps(content, indent=2) + "\n")


def write_part(folder: Path, rows: list[dict[str, Any]], info: IndexInfo) -> None:
    """Write embedded rows, so that a run that is killed later need not embed them again."""
    place = folder / f"{PARTS}{info.fingerprint}-{info.texts}"
    place.mkdir(exist_ok=True)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, info.columns) as writer:
        writer.write_table(pa.Table.from_pylist(rows, info.columns))
    write_atomic(place / f"{uuid.uuid4().hex}.arrow", sink.getvalue().to_pybytes())


def read_parts(folder: Path, info: IndexInfo) -> dict[str, pa.Table]:
    """Return what unended runs with this model have embedded, by file and mapped; damaged files are left out."""
    parts = {}
    for path in sorted((folder / f"{PARTS}{info.fingerprint}-{info.texts}").glob("*.arrow")):
        try:
            table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
            if table.schema != info.columns:
                raise pa.ArrowInvalid("it has other columns")
            parts[path.name] = table
        except (pa.ArrowException, OSError) as error:
            logger.warning("%s is damaged (%s); its images are embedded again.", path, error)
    return parts
