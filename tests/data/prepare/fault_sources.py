"""Sources of every format, full of faults: what each row must become is written down as the row is written."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict
from datasets import Image as ImageFeature
from PIL import Image, ImageOps

from mm_utils.data.images import simplejpeg
from tests.data.prepare import fault_layouts
from tests.data.prepare import fault_rows as rows
from tests.data.prepare.fault_corpus import Corpus, Pair, fill, write_table
from tests.data.prepare.fault_rows import CAPTION, Row, line
from tests.kit.fault_images import BROKEN, ODD, Broken, draw, jpeg, jpeg_with_inner_damage, png, save


def build(folder: Path) -> Corpus:
    """Write all sources."""
    corpus = Corpus(folder)
    for write in (
        _images,
        _odd_images,
        _paths,
        _text_tables,
        _array,
        _parquet,
        _saved,
        fault_layouts.write_image_folder,
        fault_layouts.write_caption_files,
        fault_layouts.write_coco,
        fault_layouts.write_karpathy,
        fault_layouts.write_classes,
        fault_layouts.write_shards,
        _relatives,
    ):
        write(corpus)
    return corpus


def good_rows(folder: Path, count: int) -> Corpus:
    """A source without a fault."""
    corpus = Corpus(folder)
    path = corpus.add("good", "pairs.jsonl")
    write_table(corpus, "good", path, [Row("a plain row", line(), "", CAPTION)] * count, good=None)
    return corpus


# -- text files ---------------------------------------------------------------------------------------------------------
def _text_tables(corpus: Corpus) -> None:
    good, mark = line(), b"\xef\xbb\xbf"  # a byte order mark, as Windows writes it
    table = corpus.add("lines", "pairs.jsonl")
    write_table(corpus, "lines", table, rows.LINES, good, header=mark, last=rows.LAST_LINE)
    write_table(corpus, "captions", corpus.add("captions", "pairs.jsonl"), rows.CAPTIONS, good)
    write_table(corpus, "ids", corpus.add("ids", "pairs.jsonl"), rows.IDS, line(id="number {number}"))
    write_table(corpus, "regions", corpus.add("regions", "pairs.jsonl"), rows.REGIONS, good)
    header = b"image,caption,split"
    write_table(corpus, "csv", corpus.add("csv", "pairs.csv"), rows.TABLE, rows.TABLE_GOOD, mark + header + b"\r\n")
    tabbed = [_tabbed(row) for row in rows.TABLE if row.kind != "a cell too many"]
    tabs = rows.TABLE_GOOD.replace(",", "\t")
    write_table(corpus, "tsv", corpus.add("tsv", "pairs.tsv"), tabbed, tabs, header.replace(b",", b"\t") + b"\n")
    write_table(corpus, "flickr30k", corpus.add("flickr30k", "results.token"), rows.TOKENS, rows.TOKENS_GOOD)
    flickr = corpus.add("flickr8k", "captions.txt")
    write_table(corpus, "flickr8k", flickr, rows.COMMAS, rows.COMMAS_GOOD, b"image,caption\n")


def _tabbed(row: Row) -> Row:
    """A row of cells between commas, with tabs; commas behind a space and in quotes are text."""
    before, comma, rest = (row.text if isinstance(row.text, str) else row.text.decode("latin-1")).partition(",")
    middle, comma_2, split = rest.rpartition(",")
    text = f"{before}\t{middle}\t{split}" if comma_2 else f"{before}{comma and chr(9)}{rest}"
    return row._replace(text=text if isinstance(row.text, str) else text.encode("latin-1"))


def _paths(corpus: Corpus) -> None:
    outside = corpus.folder / "outside"
    outside.mkdir()
    draw(-1 % 2**32).save(outside / "secret.png")
    path = corpus.add("paths", "data/pairs.jsonl")
    (outside.parent / "paths" / "outside").symlink_to(outside)  # where `images/../../outside` leads
    links = path.parent / "links"
    links.mkdir()
    for name, target in {
        "dangling.png": "nowhere",
        "secret.png": str(outside / "secret.png"),
        "outside": str(outside),
        "zero.png": "/dev/zero",
        "loop.png": "loop.png",
    }.items():
        (links / name).symlink_to(target)
    os.mkfifo(links / "pipe.png")
    with (links / "large.png").open("wb") as file:
        file.truncate(65 << 20)  # sparse
    (links / "locked.png").write_bytes(png(draw(0)))
    (links / "locked.png").chmod(0)
    table = rows.PATHS if os.geteuid() == 0 else [*rows.PATHS, rows.LOCKED]  # root reads all files
    write_table(corpus, "paths", path, table, line(), outside=str(outside))


def _images(corpus: Corpus) -> None:
    path = corpus.add("images", "pairs.jsonl")
    cases = [*BROKEN]
    if simplejpeg is not None:
        cases.append(Broken("a JPEG with 100 bytes overwritten", "image_corrupt", ".jpg", jpeg_with_inner_damage))
    lines = []
    for case in cases:
        number, picture, caption = corpus.new()
        (path.parent / f"{number}{case.suffix}").write_bytes(case.make(picture))
        lines.append(line(image=f"{number}{case.suffix}", caption=caption))
        corpus.lose("images", case.kind, f"line {len(lines)}", case.reason)
    path.write_text("\n".join(lines))


def _odd_images(corpus: Corpus) -> None:
    path = corpus.add("odd", "pairs.jsonl")
    lines = []
    for case in ODD:
        number, picture, caption = corpus.new()
        name = f"Caf\u00e9 {number}, #1 of {{all}}{case.suffix}"
        (path.parent / name).write_bytes(case.make(picture))
        lines.append(line(image=name, caption=caption))
        corpus.keep("odd", case.kind, [caption], case.shows(picture), *case.notes)
    path.write_text("\n".join(lines), encoding="utf-8")


def _array(corpus: Corpus) -> None:
    path = corpus.add("array", "pairs.json")
    table = [
        Row("an item that is a list", "[1]", "not_an_object"),
        Row("an item that is null", "null", "not_an_object"),
        Row("an item with a column twice", line()[:-1] + ', "image": "b.png"}', "duplicate_key"),
        Row("an item without caption", line(caption=...), "missing_column"),
        Row("an item whose image is missing", line(image="none.png"), "image_missing"),
        Row("an item of two captions", line(caption=["{caption}", "once more"]), "", ("{caption}", "once more")),
        Row("a plain item", line(), "", CAPTION),
    ]
    items = []
    for at, row in enumerate(table):
        number, picture, caption = corpus.new()
        picture.save(path.parent / f"{number}.png")
        items.append(str(fill(row.text, caption, {"image": f"{number}.png"})))
        corpus.expect("array", row, f"row {at}", number)
    path.write_text(f"[{', '.join(items)}]")


# -- cells that hold images ---------------------------------------------------------------------------------------------
Cell = tuple[str, str, Callable[[Image.Image], bytes | None], Any]
_CAPTION = object()
CELLS: list[Cell] = [
    ("a cell without image", "image_empty", lambda _: None, [_CAPTION]),
    ("a cell of no bytes", "image_empty", lambda _: b"", [_CAPTION]),
    ("a cell with a web page", "image_unknown_format", lambda _: b"<html>404</html>", [_CAPTION]),
    ("a cell with half an image", "image_truncated", lambda picture: png(picture)[:500], [_CAPTION]),
    ("a cell without caption", "caption_null", png, None),
    ("a cell of no captions", "no_caption_left", png, []),
    ("a cell with an empty caption", "caption_empty", png, [" "]),
    ("a cell with a caption and none", "caption_null", png, [None, _CAPTION]),
    ("a plain cell", "", png, [_CAPTION]),
]


def _cells(corpus: Corpus, source: str, where: str) -> pa.Table:
    columns: dict[str, list[Any]] = {"image": [], "captions": []}
    for at, (kind, reason, make, captions) in enumerate([item for cell in CELLS for item in (cell, CELLS[-1])]):
        _, picture, caption = corpus.new()
        content = make(picture)
        columns["image"].append(None if content is None else {"bytes": content, "path": None})
        columns["captions"].append(captions and [caption if text is _CAPTION else text for text in captions])
        if reason:
            corpus.lose(source, kind, where.format(at), reason)
        if captions and _CAPTION in captions and make is png:
            corpus.keep(source, kind, [caption], picture)
            corpus.rows[source] -= bool(reason)  # one row, of which only a caption is lost
    kinds = {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "captions": pa.list_(pa.string())}
    return pa.table(columns, schema=pa.schema(kinds))


def _parquet(corpus: Corpus) -> None:
    path = corpus.add("parquet", "pairs.parquet")
    pq.write_table(_cells(corpus, "parquet", "row {}"), path, row_group_size=7)


def _saved(corpus: Corpus) -> None:
    path = corpus.add("saved", "folder")
    splits = {
        split: Dataset(_cells(corpus, "saved", f"split {split}, row {{}}")).cast_column("image", ImageFeature())
        for split in ("train", "validation")
    }
    corpus.lose("saved", "a split of another name", "split holdout", "unknown_split")
    DatasetDict({**splits, "holdout": splits["train"].select([0])}).save_to_disk(str(path))


# -- between rows -------------------------------------------------------------------------------------------------------
def _relatives(corpus: Corpus) -> None:
    """Rows that are good alone: the same picture in one split is joined, in two it leaks."""
    path = corpus.add("relatives", "pairs.jsonl")
    lines: list[str] = []

    def add(content: bytes, split: str, key: str, caption: str, kind: str = "", reason: str = "") -> None:
        name = f"{len(lines)}.image"
        (path.parent / name).write_bytes(content)
        lines.append(line(image=name, caption=caption, id=key, split=split))
        corpus.rows["relatives"] += 1
        if reason:
            corpus.lose("relatives", kind, f"line {len(lines)}", reason)
            corpus.rows["relatives"] -= 1

    def smaller(picture: Image.Image) -> bytes:
        return save(picture.resize((56, 42)), "JPEG", quality=60)

    for kind, reason, splits, copy in [
        ("the same file twice", "", ("train", "train"), png),
        ("a smaller copy", "near_duplicate", ("train", "train"), smaller),
        ("the same file in validation", "leaked", ("validation", "train"), png),
        ("a smaller copy in the test", "leaked", ("test", "train"), smaller),
        ("a file of validation in the test", "leaked", ("test", "validation"), jpeg),
    ]:
        number, picture, caption = corpus.new()
        again = f"{caption} again"
        add(png(picture), splits[0], f"{number}", caption)
        add(copy(picture), splits[1], f"{number}b", again, kind, reason)
        corpus.pairs.append(Pair(kind, "relatives", (caption,) if reason else (caption, again), picture))
    number, picture, caption = corpus.new()
    add(png(picture), "validation", f"{number}", caption)
    add(png(corpus.new()[1]), "train", f"{number}", "a dog", "the id of an image in validation", "leaked")
    corpus.pairs.append(Pair("an id in two splits", "relatives", (caption,), picture))
    number, picture, caption = corpus.new()
    add(png(picture), "train", f"{number}", caption)
    add(png(ImageOps.mirror(picture)), "validation", f"{number}b", f"{caption} mirrored")
    corpus.pairs.append(Pair("an image that is mirrored elsewhere", "relatives", (caption,), picture))
    mirrored = Pair("a mirrored image", "relatives", (f"{caption} mirrored",), ImageOps.mirror(picture))
    corpus.pairs.append(mirrored)
    path.write_text("\n".join(lines) + "\n")
