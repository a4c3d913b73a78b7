"""Sources of every format, full of faults: what each row must become is written down as the row is written.

Every good row has a picture of its own, drawn from a number that its caption says, so a caption that went to another
row's picture is seen. Behind every bad row comes a good one: damage must not spread. In the templates of rows, `{image}`
stands for the path of a fresh picture, `{number}` for its number, `{caption}` for the caption that says it.
"""

import itertools
import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict
from datasets import Image as ImageFeature
from PIL import Image

from mm_utils.model.reading import simplejpeg
from tests.kit.fault_images import BROKEN, ODD, draw, jpeg_with_inner_damage, png
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


class Row(NamedTuple):
    """A row as a template: the reasons for which it, or a caption of it, is set aside, and the captions that are kept."""

    text: str | bytes
    reasons: str = ""
    kept: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


# -- rows of text files -------------------------------------------------------------------------------------------------
_CAPTION = "{caption}"


def line(**fields: Any) -> str:
    """A line of JSON; a field that is `...` is left out."""
    row = {"image": "{image}", "caption": "{caption}", **fields}
    return json.dumps({name: value for name, value in row.items() if value is not ...})


def _bad(texts: Mapping[str, Sequence[str | bytes]]) -> list[Row]:
    return [Row(text, reason) for reason, those in texts.items() for text in those]


def _good(*texts: str, kept: Sequence[str] = (_CAPTION,)) -> list[Row]:
    return [Row(text, "", tuple(kept)) for text in texts]


def _values(name: str, values: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Rows of which one field is bad."""
    return _bad({reason: [line(**{name: value}) for value in those] for reason, those in values.items()})


_LATIN = b"caf\xe9"
_CUT = b"\xe2\x82"
_OVERLONG = b"\xc0\xaf"
_SURROGATE = b"\xed\xa0\x80"  # none is UTF-8
_LINES = [
    *_bad({
        "not_an_object": ['["{image}", "{caption}"]', "null"],
        "malformed_row": [
            *('{"image": "{image}", "capt', line() + line(), "{'image': '{image}', 'caption': '{caption}'}"),
            *(line()[:-1] + ",}", line()[:-1] + ', "size": ' + "9" * 5000 + "}", b"\0" * 50),
        ],
        "too_nested": [line()[:-1] + ', "x": ' + "[" * deep + "]" * deep + "}" for deep in (40, 900, 100_000)],
        "duplicate_key": [line()[:-1] + ', "caption": "another"}'],
        "bad_encoding": [line().encode()[:-2] + wrong + b'"}' for wrong in (_LATIN, _CUT, _OVERLONG, _SURROGATE)],
        "missing_column": [line(caption=...), line(image=...)],
        "unknown_split": [line(split="gallery"), line(split=0)],
    }),
    *_good(line() + "\r", "\n \n" + line(), line(extra={"deep": [1, float("inf")]}), line(split="VAL"), line(split="")),
]  # fmt: skip
_IDS = [
    *_values("id", {"missing_column": [None, " "]}),
    *_good(line(id="twice", split="train")),
    *_bad({"duplicate_id": [line(id="twice", split="train")]}),
    *_good(line(id=2**70), line(id="../../etc/passwd")),
]
_BOX = [4, 4, 20, 20]
_NO_BOXES = ([1, 2, 3], ["a", "b", "c", "d"], [float("nan"), 2, 3, 4])
_WRONG_BOXES = [*_NO_BOXES, [900, 900, 20, 20], [4, 4, 0, 20], [40, 4, -9, 20], [0.1, 0.2, 0.5, 0.5]]
_REGIONS = [
    *(Row(line(regions=value), "bad_regions", (_CAPTION,)) for value in [
        *("a dog", {"box": _BOX}, [7], [{"box": _BOX}], [{"phrase": "a dog"}], [{"box": _BOX, "phrase": None}]),
        *([{"box": _BOX, "phrase": "a dog"}, {"box": box, "phrase": "a dog"}] for box in _WRONG_BOXES),
    ]),
    *_good(line(regions=[]), line(regions=[{"box": _BOX, "phrase": "a dog"}]), line(regions='[{"box": [1, 2, 3, 4], "phrase": "a"}]')),
]  # fmt: skip
_CLEANED = [  # a caption, what is kept of it, the notes
    ("<p>{caption}</p> &amp; [x](javascript:1)", "", "caption_markup"),
    ("{caption} caf\u00c3\u00a9", "", "caption_mojibake"),
    ("{caption}\x00 \x1b[31mred\x1b[0m", "{caption} red", "caption_controls_removed"),
    ("\x1b]0;title\x07{caption} \x1b] sat", "{caption} ] sat", "caption_controls_removed"),
    ("{caption} \ud83d", "{caption} \ufffd", "caption_surrogate_replaced"),
    ("\ufeff{caption}\r\n\tnow", "{caption} now", "caption_controls_removed caption_spaces_joined"),
    ("[a dog] {caption}", "", ""),
    ("=cmd|' /C calc'!A0 {caption} {} %s ${x}", "", ""),
    ("{caption} cafe\u0301 me\u0323\u0302o", "{caption} caf\u00e9 m\u1ec7o", "caption_composed"),
    ("{caption} \u202e\u05d0\u05d1\u202c \U0001f468\u200d\U0001f469\u200d\U0001f467", "", ""),
    ("{caption}" + " word" * 200_000, "{caption}{words}", "caption_cut"),
]
_PLACEHOLDERS = (
    "nan",
    "None",
    " NULL.",
    "N/A",
    "#N/A",
    "<NA>",
    "(null)",
    "undefined",
    "[object Object]",
    "#REF!",
    "#DIV/0!",
)
_CAPTIONS = [
    *_values("caption", {
        "caption_null": [None, float("nan")],
        "caption_empty": [
            *("", " \t\r\n\u3000\u00a0", "\u200b\u200d\ufeff\u2060", "\x00\x01\x1b[0m\x7f", "... -- !", "\ud800"),
        ],
        "caption_not_text": [7, True, {"en": "a dog"}, [["a dog"]], "0 0.51 0.5 0.2 0.3"],
        "no_caption_left": [[]],
        "caption_nan": _PLACEHOLDERS,
        "caption_is_file_name": [
            *("IMG_1234", "img-20200101-WA0001", "DSCN0001 (2)", "P1010001", "PXL_20210101_123456789", "my photo.png"),
            *("/home/me/my cat on the mat.jpg", "C:\\My Photos\\a b c.JPG", "https://example.org/a?b=c", "www.example.org"),
        ],
        "caption_list": [
            *("['{caption}', 'a]", "[{'raw': '{caption}'}]", "['{caption}'\n 'IMG_1234.jpg']"),
            "array(['{caption}', 'IMG_1234.jpg'], dtype=object)",
        ],
        "caption_null caption_empty": [[None, ""]],
    }),
    *(Row(line(caption=text), "", (kept or text,), tuple(notes.split())) for text, kept, notes in _CLEANED),
    *(Row(line(caption=value), reasons, (_CAPTION,)) for value, reasons in [
        ("['{caption}', 'IMG_1234.jpg']", "caption_is_file_name"),  # a list as Python and JSON write it
        ("('{caption}', 'IMG_1234.jpg')", "caption_is_file_name"),
        ('["{caption}", null]', "caption_null"),
        (["{caption}", None, 7], "caption_null caption_not_text"),
        (["a.jpg", "{caption}"], "caption_is_file_name"),
    ]),
    Row(line(caption=["{caption}", " {caption}"]), "", (_CAPTION,), ("caption_repeated",)),
    *_good(line(caption='("{caption}", she said)'), kept=('("{caption}", she said)',)),
    *_good(line(caption=["{caption}", "ein Hund"]), kept=("{caption}", "ein Hund")),
]  # fmt: skip
_OUTSIDE = "{outside}/secret.png"  # a whole picture that no row may reach
_PATHS = [
    *_values("image", {
        "image_missing": [
            *("images/none.png", "{image}/inner.png", "links/dangling.png", "~/picture.png"),
        ],
        "not_a_file": ["images", ".", "links/pipe.png"],
        "outside_root": [
            *(_OUTSIDE, f"file://{_OUTSIDE}", "images/../../outside/secret.png", "links/secret.png", "links/outside/secret.png"),
            *("/dev/zero", "links/zero.png"),
        ],
        "bad_path": ["data:image/png;base64,AAAA", "links/loop.png", "images/\x00.png", "images/\ud800.png", 7, True, {"file": "{image}"}],
        "list_of_frames": [["{image}"]],
        "path_too_long": ["a/" * 2500 + "b.png", "/9j/4AAQSkZJRgABAQAAAQABAAD" + "2wBD/" * 250],
        "image_empty": [None, "", {"bytes": None}],
        "too_many_bytes": ["links/large.png"],
        "url_not_allowed": [
            *(f"{scheme}://{_OUTSIDE}" for scheme in ("s3", "memory")),
            *("pipe:cat secret.png", "http://", "http://127.0.0.1:1/a.png"),
        ],
        "permission_denied": [] if os.geteuid() == 0 else ["links/locked.png"],  # root reads all files
    }),
    *_good(line(image="links/../{image}"), line(image="{link}"), line(image={"path": "{image}", "bytes": None})),
]  # fmt: skip
_CELLS_OF_TEXT = [
    *_bad({
        "malformed_row": [
            *("{image},{caption}, and more,train", '{image},"{caption},train', '{image},"{caption}" x,train'),
        ],
        "caption_empty": ["{image},,train"],
        "caption_nan": ["{image},nan,train"],
        "caption_null": ["{image}"],
        "image_empty": [",{caption},train"],
        "unknown_split": ["{image},{caption},fold1"],
        "bad_encoding": [b"{image},{caption} caf\xe9,train"],
    }),
    *_good('{image},"{caption}, ""quoted"", twice",train', kept=('{caption}, "quoted", twice',)),
    Row('{image},"{caption}\nbelow",train', "", ("{caption} below",), ("caption_spaces_joined",)),
    Row('{image},"{caption}' + " word" * 40_000 + '",train', "", ("{caption}{words}",), ("caption_cut",)),
    *_good("{image},{caption},train\r"),
    *_good("{image},=1+1 {caption},train", kept=("=1+1 {caption}",)),
]  # fmt: skip
_ARRAY = [
    *_bad({
        "not_an_object": ["[1]"],
        "too_nested": [line()[:-1] + ', "x": ' + "[" * 40 + "]" * 40 + "}"],
        "duplicate_key": [line()[:-1] + ', "image": "b.png"}'],
    }),
    *_good(line(caption=["{caption}", "once more"]), kept=("{caption}", "once more")),
    *_good(line()),
]  # fmt: skip
_TOKENS = _bad({
    "malformed_row": ["{image}\t{caption}", "{image}#0 {caption}"],
    "image_missing": ["none.jpg#0\t{caption}"],
    "bad_encoding": [b"{image}#0\t{caption} caf\xe9"],
})  # fmt: skip
_OPEN = Row('{image},"{caption},train', "malformed_row")
_MARK = b"\xef\xbb\xbf"
_HEADER = b"image,caption,split"  # a byte order mark, as Windows writes it
# Name, file, rows, the good row behind each, the file's first bytes, and a last line that is still being written.
TABLES = [
    ("lines", "pairs.jsonl", _LINES, line(), _MARK, Row('{"image": "{image}", "caption": "{capti', "malformed_row")),
    ("captions", "pairs.jsonl", _CAPTIONS, line(), b"", None),
    ("ids", "pairs.jsonl", _IDS, line(id="number {number}"), b"", None),
    ("regions", "pairs.jsonl", _REGIONS, line(), b"", None),
    ("csv", "pairs.csv", _CELLS_OF_TEXT, "{image},{caption},train", _MARK + _HEADER + b"\r\n", _OPEN),
    ("flickr30k", "results.token", _TOKENS, "{image}#0\t{caption}", b"", None),
    ("array", "pairs.json", _ARRAY, None, b"", None),
]


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
    for write in (_images, _paths, _folders, _classes, _annotations, _shards, _cells):
        write(corpus)
    return corpus


def good_rows(folder: Path, count: int) -> Corpus:
    """A source without a fault."""
    corpus = Corpus(folder)
    write_table(corpus, "good", corpus.add("good", "pairs.jsonl"), _good(line()) * count)
    return corpus


def write_table(
    corpus: Corpus,
    source: str,
    path: Path,
    table: Sequence[Row],
    good: str | None = None,
    header: bytes = b"",
    last: Row | None = None,
    **places: str,
) -> None:
    """Write rows, each with a picture, and behind each a `good` one, in a file of lines; or in an array of JSON.

    A file with a header begins with a good row, the others with their first fault.
    """
    (path.parent / "images").mkdir(parents=True, exist_ok=True)
    is_array = path.suffix == ".json"
    written = bytearray(header)
    between = [] if good is None else _good(good)
    every = [*(between if header else ()), *(item for each in table for item in (each, *between))]
    for place, row in enumerate(every + ([last] if last else [])):
        number, picture, caption = corpus.new()
        name = f"images/{number}.png"
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
        corpus.expect(source, ascii(row.text)[:80], where, row.reasons, captions, picture, row.notes)
    path.write_bytes(b"[%s]" % written[:-2] if is_array else written)


def _fill(text: str | bytes, caption: str, values: dict[str, str]) -> bytes:
    """A template with its places filled; nothing else in it has a meaning."""
    content = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    words = " word" * ((2000 - len(caption)) // 5)
    for name, value in {"caption": caption, "words": words, **values}.items():
        content = content.replace(b"{%s}" % name.encode(), value.encode())
    return content


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
    write_table(corpus, "paths", path, _PATHS, line(), outside=str(outside))


def _images(corpus: Corpus) -> None:
    for source, cases in (("images", BROKEN), ("odd", ODD)):
        path = corpus.add(source, "pairs.jsonl")
        lines = []
        for case in cases:
            number, picture, caption = corpus.new()
            name = f"Caf\u00e9 {number}, #1 of {{all}}.jpg"
            (path.parent / name).write_bytes(case.make(picture))
            lines.append(line(image=name, caption=caption))
            if source == "odd":
                corpus.expect(source, case.kind, "", "", [caption], case.shows(picture), case.notes)
            else:
                corpus.expect(source, case.kind, f"line {len(lines)}", case.reason)
        if source == "images" and simplejpeg is not None:
            (path.parent / "damaged.jpg").write_bytes(jpeg_with_inner_damage(corpus.new()[1]))
            lines.append(line(image="damaged.jpg", caption="a dog"))
            corpus.expect(source, "a JPEG with 100 bytes overwritten", f"line {len(lines)}", "image_corrupt")
        path.write_text("\n".join(lines), encoding="utf-8")


def _folders(corpus: Corpus) -> None:
    folder = corpus.add("caption_files", "data")
    folder.mkdir()
    for reason, content, text, stem in [  # of the picture and the caption beside it
        ("unmatched_image", png, None, ""),
        ("unmatched_caption", None, b"a dog", ""),
        ("bad_encoding", png, "a dog".encode("utf-16"), ""),
        ("caption_empty", png, b"", ""),
        ("image_empty", lambda _: b"", b"a dog", ""),
        ("", png, b"\xef\xbb\xbf{caption}\r\n\r\nonce more, {caption}\r\n", ""),
        ("", png, b"{caption}", os.fsdecode(b"caf\xe9")),  # as an old system wrote it
    ]:
        number, picture, caption = corpus.new()
        stem = stem or str(number)
        if content is not None:
            (folder / f"{stem}.png").write_bytes(content(picture))
        if text is not None:
            (folder / f"{stem}.txt").write_bytes(_fill(text, caption, {}))
        kept = [caption, f"once more, {caption}"][: (text or b"").count(b"{caption}")]
        where = f"file {stem}.{'png' if content else 'txt'}"
        corpus.expect("caption_files", f"{stem}: {reason}", where, reason, kept, picture)


def _classes(corpus: Corpus) -> None:
    folder = corpus.add("classes", "data")
    corpus.sources[-1] += ",format=classes"
    for name in ("grey_cat", "dog"):
        (folder / name).mkdir(parents=True)
        number, picture, _ = corpus.new()
        picture.save(folder / name / f"{number}.png")
        templates = ("a photo of a {}.", "a picture of a {}.", "an image of a {}.")
        texts = [text.format(name.replace("_", " ")) for text in templates]
        corpus.expect("classes", f"an image of {name}", "", "", texts, picture)
    (folder / "dog" / "empty.png").touch()
    (folder / "dog" / "gone.png").symlink_to("nowhere.png")
    draw(next(corpus.numbers)).save(folder / "stray.png")
    for place in (".ipynb_checkpoints", "@eaDir", "dog/__MACOSX"):
        (folder / place).mkdir()
        draw(next(corpus.numbers)).save(folder / place / "copy.png")
    (folder / "dog" / "notes.md").write_text("not a picture")
    for where, reason, count in [
        ("file dog/empty.png", "image_empty", 1),
        ("file dog/gone.png", "image_missing", 1),
        ("file stray.png", "unmatched_image", 1),
        ("folder .", "hidden", 0),
        ("folder .", "not_read", 0),
    ]:
        corpus.expect("classes", where, where, reason, count=count)


# -- annotations --------------------------------------------------------------------------------------------------------
_COCO = [  # reason, captions, what is changed
    ("", [_CAPTION, "once more"], {}),
    ("unmatched_image", [], {}),
    ("image_missing", ["a dog"], {"file_name": "none.png"}),
    ("missing_column", ["a dog"], {"file_name": ...}),
    ("duplicate_id", [], {"id": "first"}),
    ("missing_column", [], {"id": ...}),
    ("unknown_split", ["a dog"], {"split": "gallery"}),
    ("caption_null", [None], {}),
    ("not_an_object", [], {}),
    ("", [_CAPTION], {}),
]
_ANNOTATIONS = [
    ("unmatched_caption", {"image_id": "none", "caption": "a dog"}),
    ("missing_column", {"image_id": "first"}),
    ("missing_column", {"caption": "a dog"}),
    ("not_an_object", None),
]
_KARPATHY = [
    ("", {"split": "restval"}),
    ("unmatched_image", {"sentences": []}),
    ("missing_column", {"sentences": [{"tokens": ["a", "dog"]}]}),
    ("not_an_object", {"sentences": ["a dog"]}),
    ("missing_column", {"filename": ...}),
    ("image_missing", {"filename": "none.png"}),
    ("unknown_split", {"split": "gallery"}),
    ("", {}),
]


def _annotations(corpus: Corpus) -> None:
    path = corpus.add("coco", "captions.json")
    images = []
    annotations = []
    for reason, captions, changes in _COCO:
        number, picture, caption = corpus.new()
        picture.save(path.parent / f"{number}.png")
        texts = [caption if text == _CAPTION else text for text in captions]
        item = {"id": number if images else "first", "file_name": f"{number}.png", **changes}
        annotations += [{"image_id": item["id"], "caption": text} for text in texts]
        kept = [] if reason else [str(text) for text in texts]
        corpus.expect("coco", f"{reason} {changes}", f"image {len(images)}", reason, kept, picture)
        found = {name: value for name, value in item.items() if value is not ...}
        images.append("a dog" if reason == "not_an_object" else found)
    for reason, item in _ANNOTATIONS:
        corpus.expect("coco", str(item), f"annotation {len(annotations)}", reason)
        annotations.append(item)
    path.write_text(json.dumps({"images": images, "annotations": annotations}))
    path = corpus.add("karpathy", "dataset.json")
    images = []
    for reason, changes in _KARPATHY:
        number, picture, caption = corpus.new()
        picture.save(path.parent / f"{number}.png")
        row = {"cocoid": number, "filename": f"{number}.png", "split": "train", "sentences": [{"raw": caption}]}
        kept = [] if reason else [caption]
        corpus.expect("karpathy", str(changes), f"image {len(images)}", reason, kept, picture)
        images.append({name: value for name, value in (row | changes).items() if value is not ...})
    path.write_text(json.dumps({"dataset": "faults", "images": images}))


# -- archives -----------------------------------------------------------------------------------------------------------
class _Member(NamedTuple):
    """A member of an archive: its name with `{key}`, its content, None for the picture, and fields of its header."""

    name: str
    content: bytes | None = None
    fields: dict[str, Any] = {}  # noqa: RUF012


_IMAGE = _Member("{key}.png")
_TEXT = _Member("{key}.txt", b"{caption}")
_LINK = {"linkname": "/etc/passwd"}
_HEADERS = [(tarfile.SYMTYPE, _LINK), (tarfile.LNKTYPE, _LINK), (tarfile.CHRTYPE, {}), (tarfile.FIFOTYPE, {})]
_PLAIN = ("", [_TEXT, _IMAGE])
_SAMPLES = [
    ("incomplete_sample", [_TEXT]),
    ("incomplete_sample", [_IMAGE]),
    ("repeated_member", [_IMAGE, _IMAGE, _TEXT]),
    ("repeated_member", [_IMAGE, _TEXT, _TEXT]),
    ("bad_encoding", [_IMAGE, _Member("{key}.txt", b"caf\xe9")]),
    ("malformed_row", [_IMAGE, _Member("{key}.json", b'{"caption": "a d')]),
    ("not_an_object", [_IMAGE, _Member("{key}.json", b'["a dog"]')]),
    ("incomplete_sample", [_IMAGE, _Member("{key}.cls", b"7")]),
    ("malformed_row", [_IMAGE, _Member("{key}.txt", b"a" * (2 << 20))]),
    ("image_empty", [_Member("{key}.jpg", b""), _TEXT]),
    ("caption_empty", [_IMAGE, _Member("{key}.txt", b" \n")]),
    ("unknown_split", [_IMAGE, _Member("{key}.json", b'{"caption": "a", "split": "x"}')]),
    ("", [_IMAGE, _TEXT, _Member("{key}.npy", b"\x93NUMPY")]),
    ("unsafe_member", [_Member("../{key}.png"), _Member("../{key}.txt", b"a dog")]),
    ("unsafe_member", [_Member("/tmp/{key}.png"), _Member("/tmp/{key}.txt", b"a dog")]),
    *(("unsafe_member", [_Member("{key}.png", b"", {"type": kind, **more}), _TEXT]) for kind, more in _HEADERS),
]


def _shards(corpus: Corpus) -> None:
    folder = corpus.add("shards", "data")
    folder.mkdir()

    def add(archive, reason, members, key=None):
        number, picture, caption = corpus.new()
        key = number if key is None else key
        for member in members:
            content = png(picture) if member.content is None else _fill(member.content, caption, {})
            add_member(archive, member.name.replace("{key}", str(key)), content, **member.fields)
        where = PurePosixPath(members[0].name.replace("{key}", str(key))).with_suffix("")
        kept = [] if reason else [caption]
        place = f"{Path(str(archive.name)).name}, member {where}"
        corpus.expect("shards", members[0].name, place, reason, kept, picture)
        return key

    with tarfile.open(folder / "000.tar", "w") as archive:
        again = [add(archive, *sample) for each in _SAMPLES for sample in (each, _PLAIN)][-3]
        add(archive, "incomplete_sample", [_IMAGE, _Member("{key}.txt", b"a dog")], again)  # a key further on
        half = add(archive, "incomplete_sample", [_IMAGE])  # one key in two archives: neither has what it needs
    with tarfile.open(folder / "001.tar", "w") as archive:
        add(archive, "incomplete_sample", [_TEXT], half)
        add(archive, *_PLAIN)
        number, picture, caption = corpus.new()
        add_member(archive, f"{number}.txt", caption.encode())
        add_member(archive, f"{number}.png", png(picture))
    whole = (folder / "001.tar").read_bytes().rstrip(b"\0")
    (folder / "001.tar").write_bytes(whole[: len(whole) - 700])
    corpus.expect("shards", "an archive cut in its last sample", "001.tar", "truncated_archive")
    corpus.expect("shards", "a member of another kind", "folder .", "not_read", count=0)


# -- cells that hold images ---------------------------------------------------------------------------------------------
_CELLS = [
    ("image_empty", lambda _: None, [_CAPTION]),
    ("no_image", lambda _: b"<html>404</html>", [_CAPTION]),
    ("image_truncated", lambda picture: png(picture)[:500], [_CAPTION]),
    ("caption_null", png, None),
    ("no_caption_left", png, []),
    ("caption_null", png, [None, _CAPTION]),
    ("", png, [_CAPTION]),
]


def _table_of_cells(corpus: Corpus, source: str, where: str) -> pa.Table:
    columns = {"image": [], "captions": []}
    for at, (reason, make, captions) in enumerate([item for cell in _CELLS for item in (cell, _CELLS[-1])]):
        _, picture, caption = corpus.new()
        content = make(picture)
        columns["image"].append(None if content is None else {"bytes": content, "path": None})
        columns["captions"].append(captions and [caption if text == _CAPTION else text for text in captions])
        kept = [caption] if captions and _CAPTION in captions and make is png else []
        corpus.expect(source, f"a cell: {reason}", where.format(at), reason, kept, picture)
    kinds = {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "captions": pa.list_(pa.string())}
    return pa.table(columns, schema=pa.schema(kinds))


def _cells(corpus: Corpus) -> None:
    path = corpus.add("parquet", "pairs.parquet")
    pq.write_table(_table_of_cells(corpus, "parquet", "row {}"), path, row_group_size=7)
    path = corpus.add("saved", "folder")
    splits = {}
    for split in ("train", "validation"):
        rows = Dataset(_table_of_cells(corpus, "saved", f"split {split}, row {{}}"))
        splits[split] = rows.cast_column("image", ImageFeature())
    corpus.expect("saved", "a split of another name", "split gallery, row 0", "unknown_split")
    DatasetDict({**splits, "gallery": splits["train"].select([0])}).save_to_disk(str(path))
