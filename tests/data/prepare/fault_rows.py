"""Rows of text files with one thing wrong with each, and odd ones that are fine, as templates.

`{image}` stands for the path of a fresh picture, `{number}` for its number, `{caption}` for the caption that says it.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

CAPTION = ("{caption}",)


class Row(NamedTuple):
    """One row: the reasons for which it, or a caption of it, is set aside, and the captions that are kept."""

    kind: str
    text: str | bytes
    reasons: str = ""
    kept: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def line(**fields: Any) -> str:
    """A line of JSON; a field that is `...` is left out."""
    row = {"image": "{image}", "caption": "{caption}", **fields}
    return json.dumps({name: value for name, value in row.items() if value is not ...})


def _caption(kind: str, value: Any, reasons: str = "", *kept: str, notes: Sequence[str] = ()) -> Row:
    return Row(f"a caption {kind}", line(caption=value), reasons, kept, tuple(notes))


def _path(kind: str, value: Any, reason: str) -> Row:
    return Row(f"a path {kind}", line(image=value), reason)


LINES = [
    Row("a line of an array", '["{image}", "{caption}"]', "not_an_object"),
    Row("a line of a string", '"{caption}"', "not_an_object"),
    Row("a line of a number", "7", "not_an_object"),
    Row("a line of null", "null", "not_an_object"),
    Row("a line cut in the middle", '{"image": "{image}", "capt', "malformed_row"),
    Row("two objects in a line", line() + line(), "malformed_row"),
    Row("a line in single quotes", "{'image': '{image}', 'caption': '{caption}'}", "malformed_row"),
    Row("a comma too many", '{"image": "{image}", "caption": "{caption}",}', "malformed_row"),
    Row("a number of 5,000 digits", line()[:-1] + ', "size": ' + "9" * 5000 + "}", "malformed_row"),
    Row("a line of NUL characters", b"\0" * 50, "malformed_row"),
    Row("a value nested 100,000 deep", line()[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "too_nested"),
    Row("a column twice", line()[:-1] + ', "caption": "another"}', "duplicate_key"),
    Row("a line in Latin-1", b'{"image": "{image}", "caption": "{caption} in a caf\xe9"}', "bad_encoding"),
    Row("a character cut in two", b'{"image": "{image}", "caption": "{caption} \xe2\x82"}', "bad_encoding"),
    Row("an overlong encoding", b'{"image": "{image}", "caption": "{caption} \xc0\xaf"}', "bad_encoding"),
    Row("a surrogate as three bytes", b'{"image": "{image}", "caption": "{caption} \xed\xa0\x80"}', "bad_encoding"),
    Row("a row without a caption", line(caption=...), "missing_column"),
    Row("a row without an image", line(image=...), "missing_column"),
    Row("a split that is none", line(split="holdout"), "unknown_split"),
    Row("a split that is a number", line(split=0), "unknown_split"),
    Row("a line that ends as on Windows", line() + "\r", "", CAPTION),
    Row("a blank line before a row", "\n \n" + line(), "", CAPTION),
    Row("a key that nobody knows", line(extra={"deep": [1, float("inf")]}), "", CAPTION),
    Row("a split in capitals", line(split="VAL"), "", CAPTION),
    Row("an empty split", line(split=""), "", CAPTION),
]
LAST_LINE = Row("a last line that is still being written", '{"image": "{image}", "caption": "{capti', "malformed_row")

IDS = [
    Row("an id of null", line(id=None), "missing_column"),
    Row("an empty id", line(id=" "), "missing_column"),
    Row("the first row of an id", line(id="twice", split="train"), "", CAPTION),
    Row("another image of that id", line(id="twice", split="train"), "duplicate_id"),
    Row("an id beyond 64 bits", line(id=2**70), "", CAPTION),
    Row("an id that looks like a path", line(id="../../etc/passwd"), "", CAPTION),
]

_BOX = [4, 4, 20, 20]
REGIONS = [
    Row("regions that are text", line(regions="a dog"), "bad_regions"),
    Row("regions that are numbers", line(regions=[1, 2, 3, 4]), "bad_regions"),
    Row("a region without its phrase", line(regions=[{"box": _BOX}]), "bad_regions"),
    Row("a region without its box", line(regions=[{"phrase": "a dog"}]), "bad_regions"),
    Row("a box of three numbers", line(regions=[{"box": [1, 2, 3], "phrase": "a dog"}]), "bad_regions"),
    Row("a box of words", line(regions=[{"box": ["a", "b", "c", "d"], "phrase": "a dog"}]), "bad_regions"),
    *(
        Row(f"a box {kind}", line(regions=[{"box": box, "phrase": "a dog"}]), "bad_regions")
        for kind, box in {
            "of no number": [float("nan"), 2, 3, 4],
            "beyond the image": [900, 900, 20, 20],
            "without width": [4, 4, 0, 20],
            "of negative width": [40, 4, -9, 20],
        }.items()
    ),
    Row("a phrase of null", line(regions=[{"box": _BOX, "phrase": None}]), "caption_null"),
    Row("no regions", line(regions=[]), "", CAPTION),
    Row("a region", line(regions=[{"box": _BOX, "phrase": "a dog"}]), "", CAPTION),
]

_USELESS: dict[str, dict[str, Any]] = {
    "caption_null": {"of null": None, "of NaN": float("nan")},
    "caption_empty": {
        "without a character": "",
        "of white space": " \t\r\n\u3000\u00a0",
        "of zero width": "\u200b\u200d\ufeff\u2060",
        "of control characters": "\x00\x01\x1b[0m\x7f",
        "of punctuation": "... -- !",
        "of accents without letters": "\u0301" * 5,
        "of blank Braille and Hangul fillers": "\u2800\u3164",
        "of what replaces broken text": "\ufffd\ufffd",
        "of half a character": "\ud800",
    },
    "caption_not_text": {
        "that is a number": 7,
        "that is true": True,
        "that is an object": {"en": "a dog"},
        "that is a list in a list": [["a dog"]],
    },
    "no_caption_left": {"that is a list of nothing": []},
    "caption_nan": {
        f"that reads {word}": word
        for word in ("nan", "None", " NULL.", "N/A", "#N/A", "<NA>", "(null)", "undefined", "[object Object]")
    },
    "caption_is_file_name": {
        f"that reads {name}": name
        for name in (
            *("IMG_20190812_101112.jpg", "IMG_1234", "img-20200101-WA0001", "DSC00012", "DSCN0001 (2)", "P1010001"),
            *("PXL_20210101_123456789", "my photo.png", "images/cats/001.jpeg", "/home/me/my cat on the mat.jpg"),
            *(
                "./a b c.tif",
                "C:\\x\\y.JPG",
                "C:\\My Photos\\a b c.JPG",
                "https://example.org/a?b=c",
                "www.example.org",
            ),
            "file:///tmp/x",
        )
    },
}
_CLEANED = [  # what it has, the text, what is kept, the notes
    ("entities of HTML", "{caption} &amp; more", "{caption} &amp; more", "caption_markup"),
    ("tags", "<p>{caption}</p>", "<p>{caption}</p>", "caption_markup"),
    ("markup", "{caption} <b>&amp;</b> | [x](javascript:1)", "", "caption_markup"),
    ("letters decoded twice", "{caption} caf\u00c3\u00a9", "", "caption_mojibake"),
    ("control characters", "{caption}\x00 \x1b[31mred\x1b[0m", "{caption} red", "caption_controls_removed"),
    ("a terminal's title", "\x1b]0;title\x07{caption} \x1b] sat", "{caption} ] sat", "caption_controls_removed"),
    ("half a character", "{caption} \ud83d", "{caption} \ufffd", "caption_surrogate_replaced"),
    (
        "line breaks and tabs",
        "\ufeff{caption}\r\n\tnow",
        "{caption} now",
        "caption_controls_removed caption_spaces_joined",
    ),
    ("a line break of mainframes", "{caption}\x85now", "{caption} now", "caption_spaces_joined"),
    ("spaces around it", "  {caption} ", "{caption}", ""),
    ("a special token", "{caption} [PAD] </s>", "", "caption_special_token"),
    ("another model's token", "{caption} <|endoftext|>", "", "caption_special_token"),
    ("a template's marks", "{caption} {} %s ${x}", "", ""),
    ("a formula", "=cmd|' /C calc'!A0 {caption}", "", ""),
    ("decomposed letters", "{caption} cafe\u0301 me\u0323\u0302o", "{caption} caf\u00e9 m\u1ec7o", "caption_composed"),
    ("letters from right to left", "{caption} \u202e\u05d0\u05d1\u202c", "", ""),
    ("a family", "{caption} \U0001f468\u200d\U0001f469\u200d\U0001f467", "", ""),
    ("12 MB", "{caption}" + " word" * 2_400_000, "{caption}{words}", "caption_cut"),
    ("one word of 5 MB", "{caption}" + "x" * 5_000_000, "{caption}{xs}", "caption_cut"),
]
CAPTIONS = [
    *(_caption(kind, value, reason) for reason, cases in _USELESS.items() for kind, value in cases.items()),
    *(_caption(f"with {kind}", text, "", kept or text, notes=notes.split()) for kind, text, kept, notes in _CLEANED),
    _caption("that is a list in Python's form", "['{caption}', 'IMG_1234.jpg']", "caption_is_file_name", "{caption}"),
    _caption("that is a list in NumPy's form", "['{caption}'\n 'IMG_1234.jpg']", "caption_is_file_name", "{caption}"),
    _caption("that is a list in JSON's form", '["{caption}", null]', "caption_null", "{caption}"),
    _caption("that is half a list", "['{caption}', 'a]", "caption_list"),
    _caption("that is a list of objects", "[{'raw': '{caption}'}]", "caption_list"),
    _caption("list of which none is left", [None, ""], "caption_null caption_empty"),
    _caption("list of which some are left", ["{caption}", None, 7], "caption_null caption_not_text", "{caption}"),
    _caption("list with a file name", ["a.jpg", "{caption}"], "caption_is_file_name", "{caption}"),
    _caption("given twice", ["{caption}", " {caption}"], "", "{caption}", notes=["caption_repeated"]),
    _caption("in two languages, which are not read", ["{caption}", "ein Hund"], "", "{caption}", "ein Hund"),
]

OUTSIDE = "{outside}/secret.png"  # a whole picture that no row may reach
PATHS = [
    _path("to nothing", "images/none.png", "image_missing"),
    _path("in other letters", "IMAGES/{number}.PNG", "image_missing"),
    _path("through a file", "{image}/inner.png", "image_missing"),
    _path("to a dangling link", "links/dangling.png", "image_missing"),
    _path("to a home folder", "~/picture.png", "image_missing"),
    _path("to a folder", "images", "not_a_file"),
    _path("to the folder itself", ".", "not_a_file"),
    _path("to a pipe", "links/pipe.png", "not_a_file"),
    _path("that is absolute", OUTSIDE, "outside_root"),
    _path("that climbs out", "images/../../outside/secret.png", "outside_root"),
    _path("to a link out", "links/secret.png", "outside_root"),
    _path("through a folder's link out", "links/outside/secret.png", "outside_root"),
    _path("to a device", "/dev/zero", "outside_root"),
    _path("to a link to a device", "links/zero.png", "outside_root"),
    _path("to a loop of links", "links/loop.png", "bad_path"),
    _path("with a NUL", "images/\x00.png", "bad_path"),
    _path("with half a character", "images/\ud800.png", "bad_path"),
    _path("that is a number", 7, "bad_path"),
    _path("that is a list", ["{image}"], "bad_path"),
    _path("that is true", True, "bad_path"),
    _path("that is an object", {"file": "{image}"}, "object_cell"),
    _path("that is a picture as base64", "/9j/4AAQSkZJRgABAQAAAQABAAD" + "2wBD" * 10, "encoded_picture"),
    _path("with a name of 300 letters", "a" * 300 + ".png", "path_too_long"),
    _path("of 5,000 letters", "a/" * 2500 + "b.png", "path_too_long"),
    _path("that is null", None, "image_empty"),
    _path("that is empty", "", "image_empty"),
    _path("that is an object without one", {"bytes": None}, "image_empty"),
    _path("to a file of 65 MB", "links/large.png", "too_many_bytes"),
    *(
        _path(f"with the scheme {scheme}", f"{scheme}//{OUTSIDE}", "url_not_allowed")
        for scheme in ("file:", "zip:", "s3:", "ftp:", "hf:", "memory:")
    ),
    _path("that starts a program", "pipe:cat secret.png", "url_not_allowed"),
    _path("that holds the data", "data:image/png;base64,AAAA", "encoded_picture"),
    *(
        _path(f"to {host}", f"http://{host}/a.png", "private_address")
        for host in (
            "127.0.0.1:1",
            "localhost",
            "[::1]",
            "10.0.0.1",
            "169.254.169.254",
            "2130706433",
            "[::ffff:7f00:1]",
        )
    ),
    _path("to a host that is none", "http://", "url_not_allowed"),
    _path("to a port that is none", "http://127.0.0.1:99999/a.png", "download_failed"),
    Row("a path with steps back that stays inside", line(image="links/../{image}"), "", CAPTION),
    Row("a path to a link that stays inside", line(image="{link}"), "", CAPTION),
    Row("a path in an object", line(image={"path": "{image}", "bytes": None}), "", CAPTION),
]

LOCKED = _path("to a file that may not be read", "links/locked.png", "permission_denied")

TABLE_GOOD = "{image},{caption},train"
TABLE = [
    Row("a cell too many", "{image},{caption}, and more,train", "malformed_row"),
    Row("a quote that is not closed", '{image},"{caption},train', "malformed_row"),
    Row("text behind a quote", '{image},"{caption}" x,train', "malformed_row"),
    Row("an empty caption", "{image},,train", "caption_empty"),
    Row("a cell of 200,000 characters", "{image},{caption}" + "x" * 200_000 + ",train", "malformed_row"),
    Row("a caption that pandas left out", "{image},nan,train", "caption_nan"),
    Row("cells too few", "{image}", "caption_null"),
    Row("no image", ",{caption},train", "image_empty"),
    Row("a split of another name", "{image},{caption},fold1", "unknown_split"),
    Row("a cell in Latin-1", b"{image},{caption} caf\xe9,train", "bad_encoding"),
    Row("a cell in quotes", '{image},"{caption}, ""quoted"", twice",train', "", ('{caption}, "quoted", twice',)),
    Row(
        "a line break in quotes",
        '{image},"{caption}\nbelow",train',
        "",
        ("{caption} below",),
        ("caption_spaces_joined",),
    ),
    Row("cells that end as on Windows", "{image},{caption},train\r", "", CAPTION),
    Row("a cell like a formula", "{image},=1+1 {caption},train", "", ("=1+1 {caption}",)),
]

ARRAY = [
    Row("an item that is a list", "[1]", "not_an_object"),
    Row("an item that is null", "null", "not_an_object"),
    Row("an item with a column twice", line()[:-1] + ', "image": "b.png"}', "duplicate_key"),
    Row("an item without caption", line(caption=...), "missing_column"),
    Row("an item whose image is missing", line(image="none.png"), "image_missing"),
    Row("an item of two captions", line(caption=["{caption}", "once more"]), "", ("{caption}", "once more")),
    Row("a plain item", line(), "", CAPTION),
]

METADATA = [
    Row("metadata of a file that is missing", line(image=..., file_name="train/none.png"), "image_missing"),
    Row("metadata of another folder's file", line(image=..., file_name="../secret.png"), "outside_root"),
    Row("metadata without a file", line(image=...), "missing_column"),
    Row("plain metadata", line(image=..., file_name="{image}"), "", CAPTION),
]

TOKENS_GOOD = "{image}#0\t{caption}"
TOKENS = [
    Row("a line without number", "{image}\t{caption}", "malformed_row"),
    Row("a line without tab", "{image}#0 {caption}", "malformed_row"),
    Row("a line without image", "none.jpg#0\t{caption}", "image_missing"),
    Row("a line of Latin-1", b"{image}#0\t{caption} caf\xe9", "bad_encoding"),
]

COMMAS_GOOD = "{image},{caption}"
COMMAS = [
    Row("a line without comma", "{image} {caption}", "malformed_row"),
    Row("a line whose image is missing", "none.jpg,{caption}", "image_missing"),
    Row("a line that names only an image", "{image},", "caption_empty"),
    Row("a caption with commas", "{image},{caption}, again, and again", "", ("{caption}, again, and again",)),
]
