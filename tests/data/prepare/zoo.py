"""Sources of every format, full of faults: what each row must become is written down as the row is written.

Every good row has a picture of its own, drawn from a number that its caption says, so a caption that went to another
row's picture is seen. Behind every bad row comes a good one: damage must not spread.
"""

import itertools
import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict
from datasets import Image as ImageFeature
from PIL import Image, ImageOps

from mm_utils.data.images import simplejpeg
from tests.data.prepare import fault_rows as rows
from tests.data.prepare.fault_rows import CAPTION, Row, line
from tests.kit.fault_images import BROKEN, ODD, draw, jpeg, jpeg_with_inner_damage, png, save
from tests.kit.reading import add_member


class Pair(NamedTuple):
    """What must come out: the captions and what the image shows."""

    kind: str
    source: str
    captions: tuple[str, ...]
    picture: Image.Image


class Loss(NamedTuple):
    """What must be in the quarantine."""

    kind: str
    source: str
    where: str
    reason: str


@dataclass
class Corpus:
    """Sources below `folder`.

    Attributes:
        sources: items of --sources.
        pairs, losses: what must become of their rows.
        rows: how many each source has.
        notes: harmless conversions that must be counted.
    """

    folder: Path
    sources: list[str] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    rows: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def add(self, source: str, path: str) -> Path:
        """Make the folder of a source; returns its path."""
        full = self.folder / source / path
        full.parent.mkdir(parents=True, exist_ok=True)
        self.sources.append(f"{full},name={source}")
        return full

    def new(self) -> tuple[int, Image.Image, str]:
        """A number, its picture and its caption."""
        number = next(self.numbers)
        return number, draw(number), f"picture {number}"

    def expect(
        self,
        source: str,
        kind: str,
        where: str,
        reasons: str,
        captions: Sequence[str] = (),
        picture: Image.Image | None = None,
        notes: Sequence[str] = (),
        count: int = 1,
    ) -> None:
        """What must become of a row: the reasons for which it, or a caption of it, is set aside, and what is kept."""
        self.rows[source] += count
        self.losses += [Loss(kind, source, where, reason) for reason in reasons.split()]
        if captions and picture is not None:
            self.pairs.append(Pair(kind, source, tuple(captions), picture.convert("RGB")))
            self.notes.update(notes)


def build(folder: Path) -> Corpus:
    """Write all sources."""
    corpus = Corpus(folder)
    for name, file, table, good, header, last in TABLES:
        write_table(corpus, name, corpus.add(name, file), table, good, header, last)
    for write in (_images, _paths, _folders, _classes, _annotations, _shards, _cells, _relatives):
        write(corpus)
    return corpus


def good_rows(folder: Path, count: int) -> Corpus:
    """A source without a fault."""
    corpus = Corpus(folder)
    write_table(corpus, "good", corpus.add("good", "pairs.jsonl"), [Row("a plain row", line(), "", CAPTION)] * count)
    return corpus


# -- text files ---------------------------------------------------------------------------------------------------------
def write_table(
    corpus: Corpus,
    source: str,
    path: Path,
    table: Sequence[Row],
    good: str | None = None,
    header: bytes = b"",
    last: Row | None = None,
    pictures: str = "images",
    **places: str,
) -> None:
    """Write rows, each with a picture, and behind each a `good` one, in a file of lines; or in an array of JSON.

    A file with a header begins with a good row, the others with their first fault.
    """
    (path.parent / pictures).mkdir(parents=True, exist_ok=True)
    is_array, written = path.suffix == ".json", bytearray(header)
    between = [] if good is None else [Row("a plain row", good, "", CAPTION)]
    every = [*(between if header else ()), *(item for each in table for item in (each, *between))]
    for place, row in enumerate(every + ([last] if last else [])):
        number, picture, caption = corpus.new()
        name = f"{pictures}/{number}.png"
        picture.save(path.parent / name)
        values = {**places, "image": name, "number": str(number)}
        if "{link}" in str(row.text):
            values["link"] = f"links/{number}.png"
            os.symlink(f"../{name}", path.parent / values["link"])
        text = _fill(row.text, caption, values)
        begin = len(text) - len(text.lstrip(b"\n "))  # blank lines before the row itself
        at = (written + text[:begin]).count(b"\n") + 1
        where = f"row {place}" if is_array else f"line {at}"
        written += text + (b"" if row is last else b", " if is_array else b"\n")
        captions = [_fill(each, caption, values).decode() for each in row.kept]
        corpus.expect(source, row.kind, where, row.reasons, captions, picture, row.notes)
    path.write_bytes(b"[%s]" % written[:-2] if is_array else written)


def _fill(text: str | bytes, caption: str, values: dict[str, str]) -> bytes:
    """A template with its places filled; nothing else in it has a meaning."""
    content = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    cut = {"words": " word" * ((2000 - len(caption)) // 5), "xs": "x" * (2000 - len(caption))}
    for name, value in {"caption": caption, **cut, **values}.items():
        content = content.replace(b"{%s}" % name.encode(), value.encode())
    return content


def _tabbed(row: Row) -> Row:
    """A row of cells between commas, with tabs; commas behind a space and in quotes are text."""
    before, comma, rest = (row.text if isinstance(row.text, str) else row.text.decode("latin-1")).partition(",")
    middle, comma_2, split = rest.rpartition(",")
    text = f"{before}\t{middle}\t{split}" if comma_2 else f"{before}{comma and chr(9)}{rest}"
    return row._replace(text=text if isinstance(row.text, str) else text.encode("latin-1"))


_MARK, _HEADER = b"\xef\xbb\xbf", b"image,caption,split"  # a byte order mark, as Windows writes it
_TABBED = [_tabbed(row) for row in rows.TABLE if row.kind != "a cell too many"]
TABLES: list[tuple[str, str, list[Row], str | None, bytes, Row | None]] = [
    ("lines", "pairs.jsonl", rows.LINES, line(), _MARK, rows.LAST_LINE),
    ("captions", "pairs.jsonl", rows.CAPTIONS, line(), b"", None),
    ("ids", "pairs.jsonl", rows.IDS, line(id="number {number}"), b"", None),
    ("regions", "pairs.jsonl", rows.REGIONS, line(), b"", None),
    ("csv", "pairs.csv", rows.TABLE, rows.TABLE_GOOD, _MARK + _HEADER + b"\r\n", None),
    ("tsv", "pairs.tsv", _TABBED, rows.TABLE_GOOD.replace(",", "\t"), _HEADER.replace(b",", b"\t") + b"\n", None),
    ("flickr30k", "results.token", rows.TOKENS, rows.TOKENS_GOOD, b"", None),
    ("flickr8k", "captions.txt", rows.COMMAS, rows.COMMAS_GOOD, b"image,caption\n", None),
    ("array", "pairs.json", rows.ARRAY, None, b"", None),
]


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
    for source, cases in (("images", BROKEN), ("odd", ODD)):
        path, lines = corpus.add(source, "pairs.jsonl"), []
        for case in cases:
            number, picture, caption = corpus.new()
            name = f"Caf\u00e9 {number}, #1 of {{all}}{getattr(case, 'suffix', '.jpg')}"
            (path.parent / name).write_bytes(case.make(picture))
            lines.append(line(image=name, caption=caption))
            if source == "odd":
                corpus.expect(source, case.kind, "", "", [caption], case.shows(picture), case.notes)
            else:
                corpus.expect(source, case.kind, f"line {len(lines)}", case.reason)
        if source == "images" and simplejpeg is not None:
            number, picture, caption = corpus.new()
            (path.parent / "damaged.jpg").write_bytes(jpeg_with_inner_damage(picture))
            lines.append(line(image="damaged.jpg", caption=caption))
            corpus.expect(source, "a JPEG with 100 bytes overwritten", f"line {len(lines)}", "image_corrupt")
        path.write_text("\n".join(lines), encoding="utf-8")


# -- folders ------------------------------------------------------------------------------------------------------------
def _folders(corpus: Corpus) -> None:
    folder = corpus.add("imagefolder", "data")
    write_table(corpus, "imagefolder", folder / "metadata.jsonl", rows.METADATA, pictures="train")
    corpus.expect("imagefolder", "pictures that no row names", "folder .", "not_read", count=0)
    folder = corpus.add("caption_files", "data")
    folder.mkdir()
    for kind, reason, content, text in [
        ("an image without a caption file", "unmatched_image", png, None),
        ("a caption file without an image", "unmatched_caption", None, b"a dog"),
        ("a caption file in UTF-16", "bad_encoding", png, "a dog".encode("utf-16")),
        ("an empty caption file", "caption_empty", png, b""),
        ("an empty image beside a caption", "image_empty", lambda _: b"", b"a dog"),
        ("a pair of files", "", png, b"\xef\xbb\xbf{caption}\r\n\r\nonce more, {caption}\r\n"),
        ("names that are not UTF-8", "", png, b"{caption}"),
    ]:
        number, picture, caption = corpus.new()
        stem = os.fsdecode(b"caf\xe9") if "UTF-8" in kind else str(number)  # as an old system wrote it
        if content is not None:
            (folder / f"{stem}.png").write_bytes(content(picture))
        if text is not None:
            (folder / f"{stem}.txt").write_bytes(_fill(text, caption, {}))
        kept = [caption, f"once more, {caption}"][: (text or b"").count(b"{caption}")]
        corpus.expect("caption_files", kind, f"file {stem}.{'png' if content else 'txt'}", reason, kept, picture)


def _classes(corpus: Corpus) -> None:
    folder = corpus.add("classes", "data")
    for name in ("grey_cat", "dog"):
        (folder / name).mkdir(parents=True)
        number, picture, _ = corpus.new()
        picture.save(folder / name / f"{number}.png")
        shown = name.replace("_", " ")
        templates = ("a photo of a {}.", "a picture of a {}.", "an image of a {}.")
        corpus.expect("classes", "an image of a class", "", "", [text.format(shown) for text in templates], picture)
    (folder / "dog" / "empty.png").touch()
    (folder / "dog" / "gone.png").symlink_to("nowhere.png")
    draw(next(corpus.numbers)).save(folder / "stray.png")
    for place in (".ipynb_checkpoints", "@eaDir", "dog/__MACOSX"):
        (folder / place).mkdir()
        draw(next(corpus.numbers)).save(folder / place / "copy.png")
    (folder / "dog" / "notes.md").write_text("not a picture")
    for kind, where, reason, count in [
        ("an empty image of a class", "file dog/empty.png", "image_empty", 1),
        ("a dangling link in a class", "file dog/gone.png", "image_missing", 1),
        ("an image of no class", f"folder {folder}", "unmatched_image", 1),
        ("hidden folders and those of programs", "folder .", "hidden", 0),
        ("a file that is no picture", "folder .", "not_read", 0),
    ]:
        corpus.expect("classes", kind, where, reason, count=count)


# -- annotations --------------------------------------------------------------------------------------------------------
_CAPTION = "{caption}"
_COCO: list[tuple[str, str, list[str | None], dict[str, Any]]] = [
    ("an image of two annotations", "", [_CAPTION, "once more"], {}),
    ("an image of no annotation", "unmatched_image", [], {}),
    ("an image whose file is missing", "image_missing", ["a dog"], {"file_name": "none.png"}),
    ("an image without a file's name", "missing_column", ["a dog"], {"file_name": ...}),
    ("the id of another image", "duplicate_id", [], {"id": "first"}),
    ("an image without an id", "missing_column", [], {"id": ...}),
    ("an image of another split", "unknown_split", ["a dog"], {"split": "holdout"}),
    ("an image annotated with null", "caption_null", [None], {}),
    ("an image that is not an object", "not_an_object", [], {}),
    ("a plain annotation", "", [_CAPTION], {}),
]
_ANNOTATIONS: list[tuple[str, str, Any]] = [
    ("an annotation of no image", "unmatched_caption", {"image_id": "none", "caption": "a dog"}),
    ("an annotation without caption", "missing_column", {"image_id": "first"}),
    ("an annotation without image", "missing_column", {"caption": "a dog"}),
    ("an annotation that is null", "not_an_object", None),
]
_KARPATHY: list[tuple[str, str, dict[str, Any]]] = [
    ("sentences of restval", "", {"split": "restval"}),
    ("an image of no sentences", "unmatched_image", {"sentences": []}),
    ("a sentence without its text", "missing_column", {"sentences": [{"tokens": ["a", "dog"]}]}),
    ("a sentence that is text", "not_an_object", {"sentences": ["a dog"]}),
    ("sentences without an image", "missing_column", {"filename": ...}),
    ("sentences of no file", "image_missing", {"filename": "none.png"}),
    ("sentences of another split", "unknown_split", {"split": "holdout"}),
    ("plain sentences", "", {}),
]


def _annotations(corpus: Corpus) -> None:
    path, images, annotations = corpus.add("coco", "captions.json"), list[Any](), list[Any]()
    for kind, reason, captions, changes in _COCO:
        number, picture, caption = corpus.new()
        picture.save(path.parent / f"{number}.png")
        texts = [caption if text == _CAPTION else text for text in captions]
        item = {"id": number if images else "first", "file_name": f"{number}.png", **changes}
        annotations += [{"image_id": item["id"], "caption": text} for text in texts]
        kept = [] if reason else [str(text) for text in texts]
        corpus.expect("coco", kind, f"image {len(images)}", reason, kept, picture)
        found = {name: value for name, value in item.items() if value is not ...}
        images.append("a dog" if reason == "not_an_object" else found)
    for kind, reason, item in _ANNOTATIONS:
        corpus.expect("coco", kind, f"annotation {len(annotations)}", reason)
        annotations.append(item)
    path.write_text(json.dumps({"images": images, "annotations": annotations}))
    path, images = corpus.add("karpathy", "dataset.json"), []
    for kind, reason, changes in _KARPATHY:
        number, picture, caption = corpus.new()
        picture.save(path.parent / f"{number}.png")
        row = {"cocoid": number, "filename": f"{number}.png", "split": "train", "sentences": [{"raw": caption}]}
        corpus.expect("karpathy", kind, f"image {len(images)}", reason, [] if reason else [caption], picture)
        images.append({name: value for name, value in (row | changes).items() if value is not ...})
    path.write_text(json.dumps({"dataset": "faults", "images": images}))


# -- archives -----------------------------------------------------------------------------------------------------------
class Member(NamedTuple):
    """A member of an archive: its name with `{key}`, its content, None for the picture, and fields of its header."""

    name: str
    content: bytes | None = None
    fields: dict[str, Any] = {}  # noqa: RUF012


_IMAGE, _TEXT = Member("{key}.png"), Member("{key}.txt", b"{caption}")
_LINK = {"linkname": "/etc/passwd"}
_PLAIN: tuple[str, str, list[Member]] = ("a plain sample", "", [_TEXT, _IMAGE])
SAMPLES: list[tuple[str, str, list[Member]]] = [
    ("a sample with a pickle", "unsafe_member", [_IMAGE, _TEXT, Member("{key}.pkl", b"cos\nsystem\n")]),
    ("a sample with a weights file", "unsafe_member", [_IMAGE, _TEXT, Member("{key}.features.pth", b"PK\3\4")]),
    ("a sample without an image", "incomplete_sample", [_TEXT]),
    ("a sample without a caption", "incomplete_sample", [_IMAGE]),
    ("a sample whose image is there twice", "repeated_member", [_IMAGE, _IMAGE, _TEXT]),
    ("a sample whose caption is there twice", "repeated_member", [_IMAGE, _TEXT, _TEXT]),
    ("a sample of Latin-1", "bad_encoding", [_IMAGE, Member("{key}.txt", b"caf\xe9")]),
    ("a sample of cut JSON", "malformed_row", [_IMAGE, Member("{key}.json", b'{"caption": "a d')]),
    ("a sample of a JSON list", "not_an_object", [_IMAGE, Member("{key}.json", b'["a dog"]')]),
    ("a sample of an unnamed class", "unmatched_image", [_IMAGE, Member("{key}.cls", b"7")]),
    ("a sample of a caption of 2 MB", "malformed_row", [_IMAGE, Member("{key}.txt", b"a" * (2 << 20))]),
    ("a sample of an empty image", "image_empty", [Member("{key}.jpg", b""), _TEXT]),
    ("a sample of an empty caption", "caption_empty", [_IMAGE, Member("{key}.txt", b" \n")]),
    ("a sample of another split", "unknown_split", [_IMAGE, Member("{key}.json", b'{"caption": "a", "split": "x"}')]),
    ("a sample with features", "", [_IMAGE, _TEXT, Member("{key}.npy", b"\x93NUMPY")]),
    ("a member that leads out", "unsafe_member", [Member("../{key}.png"), Member("../{key}.txt", b"a dog")]),
    (
        "a member with an absolute name",
        "unsafe_member",
        [Member("/tmp/{key}.png"), Member("/tmp/{key}.txt", b"a dog")],
    ),
    *(
        (kind, "unsafe_member", [Member("{key}.png", b"", {"type": type_, **more}), _TEXT])
        for kind, type_, more in (
            ("a symbolic link", tarfile.SYMTYPE, _LINK),
            ("a hard link", tarfile.LNKTYPE, _LINK),
            ("a device", tarfile.CHRTYPE, {}),
            ("a pipe", tarfile.FIFOTYPE, {}),
        )
    ),
]


def _shards(corpus: Corpus) -> None:
    folder = corpus.add("shards", "data")
    folder.mkdir()

    def add(
        archive: tarfile.TarFile, name: str, kind: str, reason: str, members: list[Member], key: Any = None
    ) -> int:
        number, picture, caption = corpus.new()
        key = number if key is None else key
        for member in members:
            content = png(picture) if member.content is None else _fill(member.content, caption, {})
            add_member(archive, member.name.replace("{key}", str(key)), content, **member.fields)
        where = PurePosixPath(members[0].name.replace("{key}", str(key))).with_suffix("")
        corpus.expect("shards", kind, f"{name}, member {where}", reason, [] if reason else [caption], picture)
        return key

    with tarfile.open(folder / "000.tar", "w") as archive:
        again = [add(archive, "000.tar", *sample) for each in SAMPLES for sample in (each, _PLAIN)][-3]
        add(
            archive,
            "000.tar",
            "a key again, further on",
            "incomplete_sample",
            [_IMAGE, Member("{key}.txt", b"a dog")],
            again,
        )
        # One key in two archives: neither half has what it needs.
        half = add(archive, "000.tar", "the first half of a sample", "incomplete_sample", [_IMAGE])
    with tarfile.open(folder / "001.tar", "w") as archive:
        add(archive, "001.tar", "the second half of a sample", "incomplete_sample", [_TEXT], half)
        add(archive, "001.tar", *_PLAIN)
        number, picture, caption = corpus.new()
        add_member(archive, f"{number}.txt", caption.encode())
        add_member(archive, f"{number}.png", png(picture))
    whole = (folder / "001.tar").read_bytes().rstrip(b"\0")
    (folder / "001.tar").write_bytes(whole[: len(whole) - 700])
    corpus.expect("shards", "an archive cut in its last sample", "001.tar", "truncated_archive")


# -- cells that hold images ---------------------------------------------------------------------------------------------
_CELLS: list[tuple[str, str, Any, list[str | None] | None]] = [
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


def _table_of_cells(corpus: Corpus, source: str, where: str) -> pa.Table:
    columns: dict[str, list[Any]] = {"image": [], "captions": []}
    for at, (kind, reason, make, captions) in enumerate([item for cell in _CELLS for item in (cell, _CELLS[-1])]):
        _, picture, caption = corpus.new()
        content = make(picture)
        columns["image"].append(None if content is None else {"bytes": content, "path": None})
        columns["captions"].append(captions and [caption if text == _CAPTION else text for text in captions])
        kept = [caption] if captions and _CAPTION in captions and make is png else []
        corpus.expect(source, kind, where.format(at), reason, kept, picture)
    kinds = {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "captions": pa.list_(pa.string())}
    return pa.table(columns, schema=pa.schema(kinds))


def _cells(corpus: Corpus) -> None:
    path = corpus.add("parquet", "pairs.parquet")
    pq.write_table(_table_of_cells(corpus, "parquet", "row {}"), path, row_group_size=7)
    path = corpus.add("saved", "folder")
    splits = {
        split: Dataset(_table_of_cells(corpus, "saved", f"split {split}, row {{}}")).cast_column(
            "image", ImageFeature()
        )
        for split in ("train", "validation")
    }
    corpus.expect("saved", "a split of another name", "split holdout", "unknown_split")
    DatasetDict({**splits, "holdout": splits["train"].select([0])}).save_to_disk(str(path))


# -- between rows -------------------------------------------------------------------------------------------------------
def _smaller(picture: Image.Image) -> bytes:
    return save(picture.resize((56, 42)), "JPEG", quality=60)


def _mirrored(picture: Image.Image) -> bytes:
    return png(ImageOps.mirror(picture))


def _relatives(corpus: Corpus) -> None:
    """Rows that are good alone: the same picture in one split is joined, in two it leaks."""
    path, lines = corpus.add("relatives", "pairs.jsonl"), list[str]()
    for kind, reason, splits, copy in [
        ("the same file twice", "", ("train", "train"), png),
        ("a smaller copy", "near_duplicate", ("train", "train"), _smaller),
        ("the same file in validation", "leaked", ("validation", "train"), png),
        ("a smaller copy in the test", "leaked", ("test", "train"), _smaller),
        ("a file of validation in the test", "leaked", ("test", "validation"), jpeg),
        ("the id of an image in validation", "leaked", ("validation", "train"), lambda _: png(corpus.new()[1])),
        ("an image that is mirrored elsewhere", "", ("train", "validation"), _mirrored),
    ]:
        number, picture, caption = corpus.new()
        texts, contents = (caption, f"{caption} again"), (png(picture), copy(picture))
        for text, content, split, key in zip(texts, contents, splits, ("", "b" * ("id" not in kind)), strict=True):
            (path.parent / f"{len(lines)}.image").write_bytes(content)
            lines.append(line(image=f"{len(lines)}.image", caption=text, id=f"{number}{key}", split=split))
        corpus.expect(
            "relatives",
            kind,
            f"line {len(lines)}",
            reason,
            texts[: 2 if kind.endswith("twice") else 1],
            picture,
            count=2,
        )
        if copy is _mirrored:
            corpus.expect("relatives", kind, "", "", texts[1:], ImageOps.mirror(picture), count=0)
    path.write_text("\n".join(lines) + "\n")
