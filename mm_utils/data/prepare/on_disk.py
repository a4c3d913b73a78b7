"""Write and recognise prepared pair data sets.

====================  ================================================================================================
column                meaning
====================  ================================================================================================
``id``                the source's id of the image, or else half of ``image_hash``; with several sources, after the name
                      of the source and a slash
``image``             ``datasets.Image(decode=False)``: the stored bytes (a raw store: see `mm_utils.data.images.pixels`)
                      or, in the datasets cache, the absolute path of a file that stays where it is; clips are in
                      ``video`` and sounds in ``audio``, see `mm_utils.data.media`, and become ``image`` when opened
``width, height``     of the stored image; ``original_width, original_height`` of the source's, upright
``captions``          one or more, none empty, none twice
``regions``           boxes (x, y, width, height in stored pixels) with phrases; if any source has them
``negatives``         captions that are wrong for the image; if any source has them
``seconds``           of the stored clip or sound
``moments``           spans of seconds from its beginning, with phrases; if any source has them
``source``            name of the source
``image_hash``        SHA-256 of the original bytes, hexadecimal
``content_id``        BLAKE2b-128 over stored bytes and captions, hexadecimal: proof that they belong together
====================  ================================================================================================

It is an ordinary `datasets` folder with the splits train, validation and test, if they have rows; beside them lie
`report.json`, which names the format, and `quarantine.jsonl`.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import DatasetDict, DatasetInfo, Features
from datasets.features.features import require_decoding
from tqdm.auto import tqdm

from mm_utils.data.arguments import SPLITS
from mm_utils.data.media import COLUMNS, FEATURES, kind_of
from mm_utils.data.paths import Jail
from mm_utils.data.prepare.dedup_and_split import Reconciled
from mm_utils.data.prepare.ingest import pieces, read_part
from mm_utils.data.rows.columns import NEGATIVES
from mm_utils.data.rows.stored import check_image_files, folders_of, is_saved, load_splits
from mm_utils.files import read_json
from mm_utils.text import one_line

PREPARED_FORMAT = "tandem-pairs"  # "format" in report.json
VERSION = 2
WRITTEN = {*SPLITS, "dataset_dict.json", "report.json", "report.md", "quarantine.jsonl", "pairs.jpg", "README.md"}
# `content_id` stands for images and captions; `languages` is a column of sets that were written until November 2026.
_DECIDING = ("id", "content_id", "languages", "regions", NEGATIVES, "moments")
SHARD_BYTES = 500 << 20
_STORED = ("image", "width", "height", "original_width", "original_height")
_TEXT = ("captions", "regions", NEGATIVES, "moments")


def is_prepared(name: str) -> bool:
    """Return whether a folder is a prepared data set."""
    report = Path(name) / "report.json"
    if not report.is_file() or not is_saved(report.parent):
        return False
    try:
        content = read_json(report)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{report} is not valid JSON ({one_line(error)}). Prepare the data set anew.") from error
    return isinstance(content, dict) and content.get("format") == PREPARED_FORMAT


def is_grouped(name: str) -> bool:
    """Return whether rows of a prepared data set are of groups that no split divided."""
    settings = read_json(Path(name) / "report.json").get("settings", {})
    return any("group_column=" in source for source in settings.get("sources", ()))


def open_prepared(name: str, title: str, allow_outside: bool = False) -> DatasetDict:
    """Open a prepared data set, memory-mapped, without a look at rows that hold their image.

    With `allow_outside`, images may be files anywhere, as in the datasets cache of raw files. Otherwise a ValueError, begun by
    `title`, names them, as it does a set that cannot be loaded or is none.
    """
    pairs = with_image(load_splits(name, title, allow_outside))
    for split, rows in pairs.items():
        is_read = rows.features.get("image") in FEATURES.values() and "content_id" in rows.features
        opens = any(name != "image" and require_decoding(feature) for name, feature in rows.features.items())
        if split not in SPLITS or not is_read or opens:
            raise ValueError(
                f"{title}; its report.json says {PREPARED_FORMAT}, but split {split} is none of it. Prepare it anew."
            )
    if not allow_outside:
        jail = Jail(name, also=folders_of(name))
        for split, rows in pairs.items():
            check_image_files(rows, f"{title}, split {split}", jail)
    return pairs


def earlier_rows(folder: str) -> pa.Table:
    """Return `id`, `image_hash`, `content_id` and `split` of all rows of a prepared data set, those of the test split first; none where there is none."""
    columns = ["id", "image_hash", "content_id"]
    tables = [pa.table({name: pa.array([], pa.string()) for name in [*columns, "split"]})]
    if Path(folder).is_dir() and is_prepared(folder):
        pairs = open_prepared(folder, f"--output_dir is {folder}")
        for split in sorted(pairs, key=SPLITS.index, reverse=True):
            rows = pairs[split].select_columns(columns).with_format("arrow")[:]
            tables.append(rows.append_column("split", pa.array([split] * len(rows))))
    return pa.concat_tables(tables).combine_chunks()


def with_image(pairs: DatasetDict) -> DatasetDict:
    """Call the column of clips or sounds `image`, as everywhere in memory."""
    for split, rows in pairs.items():
        held = [
            name for kind, name in COLUMNS.items() if rows.features.get(name) == FEATURES[kind] and name != "image"
        ]
        if "image" not in rows.features and len(held) == 1:
            pairs[split] = rows.rename_column(held[0], "image")
    return pairs


def write_pairs(found: Reconciled, parts: Sequence[Path], folder: Path) -> DatasetDict:
    """Write all splits into `folder`, images straight from the `parts`; return them."""
    facts = found.facts
    medium = found.facts["medium"][0].as_py()
    stored = _STORED if medium == "image" else ("image", "seconds", *_STORED[1:3])
    optional = [name for name in _TEXT[1:] if facts[name].null_count < len(facts)]
    merged = {first: _joined(facts, rows) for first, rows in found.merged.items()}

    def tables(rows: np.ndarray) -> Iterator[pa.Table]:
        """Lay the stored columns of some rows beside the others, a batch at a time: all would be held in memory."""
        begin = 0  # of the part
        for part in parts:
            images = read_part(part, stored)
            inside = rows[slice(*np.searchsorted(rows, [begin, begin + len(images)]))]
            beside = pieces(facts.slice(begin, len(images)), inside - begin)
            places = iter(inside.tolist())
            for image, own in zip(pieces(images, inside - begin), beside, strict=True):
                texts = [merged.get(next(places), text) for text in own.select(_TEXT).to_pylist()]
                text = pa.Table.from_pylist(texts, own.select(_TEXT).schema)
                ids = map(content_id, own["stored_hash"].to_pylist(), text["captions"].to_pylist())
                yield pa.table(
                    {"id": own["name"]}
                    | {name: image[name] for name in stored}
                    | {"captions": text["captions"]}
                    | {name: pc.coalesce(text[name], pa.scalar([], text[name].type)) for name in optional}
                    | {"source": own["source"], "image_hash": own["image_hash"], "content_id": list(ids)}
                )
            begin += len(images)

    return write_splits({split: tables(rows) for split, rows in found.rows.items()}, folder, medium)


def write_splits(tables: Mapping[str, Iterator[pa.Table]], folder: Path, medium: str | None = None) -> DatasetDict:
    """Write the tables of all splits; `medium` is by default the kind of their features."""
    with tqdm(desc="Writing", unit=" rows") as bar:
        for split, of_split in tables.items():
            _write_split(of_split, split, folder / split, bar, medium)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(tables)}), encoding="utf-8")
    return with_image(DatasetDict.load_from_disk(str(folder)))


def _write_split(tables: Iterator[pa.Table], split: str, folder: Path, bar: tqdm, medium: str | None) -> None:
    """Write tables of the columns above, as shards of about `SHARD_BYTES`.

    `save_to_disk` would copy every image of a selection twice more, and cut rows with images into batches of 100, each of
    which costs 6 kB of memory in every process that opens them.
    """
    folder.mkdir(parents=True)
    first = next(tables)
    features = Features.from_arrow_schema(first.schema)
    medium = medium or kind_of(features)
    features["image"] = FEATURES[medium]
    inside = features.arrow_schema
    features = Features({COLUMNS[medium] if name == "image" else name: value for name, value in features.items()})
    schema = features.arrow_schema
    known = [name for name in _DECIDING if name in schema.names]
    digest = hashlib.blake2b(digest_size=8)
    shards: list[Path] = []
    written = SHARD_BYTES  # so that the first table opens a shard
    with ExitStack() as opened:
        for table in itertools.chain([first], tables):
            if written >= SHARD_BYTES:
                opened.close()
                shards.append(folder / f"shard-{len(shards)}")
                writer = opened.enter_context(pa.ipc.new_stream(str(shards[-1]), schema))
                written = 0
            writer.write_table(table.cast(inside).rename_columns(schema.names).cast(schema))
            bar.update(len(table))
            digest.update(repr(table.select(known).to_pylist()).encode())
            written += table.nbytes
    # 'data-00000-of-00003.arrow', ...
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for shard, name in zip(shards, names, strict=True):
        shard.rename(folder / name)
    DatasetInfo(features=features).write_to_directory(str(folder))
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names],
        "_split": split,
        "_fingerprint": digest.hexdigest(),  # part of the names of caches of these rows
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")


def write_findings(folder: Path, summary: dict[str, Any], faults: Sequence[dict[str, str]]) -> None:
    """Write `report.json` and `quarantine.jsonl`."""
    report = {"format": PREPARED_FORMAT, "version": VERSION, **summary}
    (folder / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    with (folder / "quarantine.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(fault) + "\n" for fault in faults)


def content_id(stored_hash: str, captions: Sequence[str]) -> str:
    """Return the BLAKE2b-128 over the hash of the stored bytes and the captions."""
    digest = hashlib.blake2b(stored_hash.encode(), digest_size=16)
    for caption in captions:
        digest.update(b"\0" + caption.encode())  # keeps ['ab', 'c'] and ['a', 'bc'] apart
    return digest.hexdigest()


def _joined(facts: pa.Table, rows: list[int]) -> dict[str, Any]:
    """Return the captions, regions, negatives and moments of rows of one image, each once."""
    joined = {}
    for name in _TEXT:
        values = [value for row in rows for value in facts[name][row].as_py() or []]
        # by `repr`, as lists and dicts have no hash
        joined[name] = list({repr(value): value for value in values}.values())
    return joined
