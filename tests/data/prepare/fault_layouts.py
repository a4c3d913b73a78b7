"""Folders, annotation files and archives full of faults; see `tests.data.prepare.fault_sources`."""

import io
import json
import os
import tarfile
from typing import Any

from tests.data.prepare.fault_corpus import Corpus, fill
from tests.data.prepare.fault_rows import CAPTION, Row, line
from tests.kit.fault_images import draw, png

_CAPTION = object()  # stands for the caption of the picture


def write_image_folder(corpus: Corpus) -> None:
    folder = corpus.add("imagefolder", "data")
    (folder / "train").mkdir(parents=True)
    table = [
        Row("metadata of a file that is missing", line(image=..., file_name="train/none.png"), "image_missing"),
        Row("metadata of another folder's file", line(image=..., file_name="../secret.png"), "outside_root"),
        Row("metadata without a file", line(image=...), "missing_column"),
        Row("plain metadata", line(image=..., file_name="train/{number}.png"), "", CAPTION),
    ]
    lines = []
    for row in table:
        number, picture, caption = corpus.new()
        picture.save(folder / f"train/{number}.png")
        lines.append(str(fill(row.text, caption, {"number": str(number)})))
        corpus.expect("imagefolder", row, f"line {len(lines)}", number)
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    corpus.pass_by("imagefolder", "pictures that no row names", "not_read")


def write_caption_files(corpus: Corpus) -> None:
    folder = corpus.add("caption_files", "data")
    folder.mkdir()
    for kind, reason, make, text in [
        ("an image without a caption file", "unmatched_image", png, None),
        ("a caption file without an image", "unmatched_caption", None, b"a dog"),
        ("a caption file in UTF-16", "bad_encoding", png, "a dog".encode("utf-16")),
        ("an empty caption file", "caption_empty", png, b""),
        ("an empty image beside a caption", "image_empty", lambda _: b"", b"a dog"),
        ("a pair of files", "", png, b"\xef\xbb\xbf{caption}\r\n\r\nonce more, {caption}\r\n"),
    ]:
        number, picture, caption = corpus.new()
        if make is not None:
            (folder / f"{number}.png").write_bytes(make(picture))
        if text is not None:
            (folder / f"{number}.txt").write_bytes(text.replace(b"{caption}", caption.encode()))
        if reason:
            corpus.lose("caption_files", kind, f"file {number}.{'png' if make else 'txt'}", reason)
        else:
            corpus.keep("caption_files", kind, [caption, f"once more, {caption}"], picture)
    number, picture, caption = corpus.new()
    stem = os.fsdecode(b"caf\xe9")  # as an old system wrote it
    (folder / f"{stem}.png").write_bytes(png(picture))
    (folder / f"{stem}.txt").write_text(caption)
    corpus.keep("caption_files", "names that are not UTF-8", [caption], picture)


def write_classes(corpus: Corpus) -> None:
    folder = corpus.add("classes", "data")
    for name in ("grey_cat", "dog"):
        (folder / name).mkdir(parents=True)
        number, picture, _ = corpus.new()
        picture.save(folder / name / f"{number}.png")
        shown = name.replace("_", " ")
        templates = ("a photo of a {}.", "a picture of a {}.", "an image of a {}.")
        corpus.keep("classes", "an image of a class", [text.format(shown) for text in templates], picture)
    (folder / "dog" / "empty.png").touch()
    corpus.lose("classes", "an empty image of a class", "file dog/empty.png", "image_empty")
    (folder / "dog" / "gone.png").symlink_to("nowhere.png")
    corpus.lose("classes", "a dangling link in a class", "file dog/gone.png", "image_missing")
    draw(next(corpus.numbers)).save(folder / "stray.png")
    corpus.lose("classes", "an image of no class", f"folder {folder}", "unmatched_image")
    for place in (".ipynb_checkpoints", "@eaDir", "dog/__MACOSX"):
        (folder / place).mkdir()
        draw(next(corpus.numbers)).save(folder / place / "copy.png")
    (folder / "dog" / "notes.md").write_text("not a picture")
    corpus.pass_by("classes", "hidden folders and those of programs", "hidden")
    corpus.pass_by("classes", "a file that is no picture", "not_read")


# -- annotations --------------------------------------------------------------------------------------------------------
def write_coco(corpus: Corpus) -> None:
    path = corpus.add("coco", "captions.json")
    images: list[Any] = []
    annotations: list[Any] = []

    def image(kind: str, reason: str, *captions: Any, **changes: Any) -> None:
        number, picture, caption = corpus.new()
        picture.save(path.parent / f"{number}.png")
        texts = [caption if text is _CAPTION else text for text in captions]
        item = {"id": number, "file_name": f"{number}.png", **changes}
        annotations.extend({"image_id": item.get("id"), "caption": text} for text in texts)
        if reason:
            corpus.lose("coco", kind, f"image {len(images)}", reason)
        else:
            corpus.keep("coco", kind, texts, picture)
        images.append({name: value for name, value in item.items() if value is not ...})

    image("an image of two annotations", "", _CAPTION, "once more")
    image("an image of no annotation", "unmatched_image")
    image("an image whose file is missing", "image_missing", "a dog", file_name="none.png")
    image("an image without a file's name", "missing_column", "a dog", file_name=...)
    image("the id of another image", "duplicate_id", id=images[0]["id"])
    image("an image without an id", "missing_column", id=...)
    image("an image of another split", "unknown_split", "a dog", split="holdout")
    image("an image annotated with null", "caption_null", None)
    images.append("a dog")
    corpus.lose("coco", "an image that is not an object", f"image {len(images) - 1}", "not_an_object")
    image("a plain annotation", "", _CAPTION)
    for kind, reason, item in [
        ("an annotation of no image", "unmatched_caption", {"image_id": "none", "caption": "a dog"}),
        ("an annotation without caption", "missing_column", {"image_id": images[0]["id"]}),
        ("an annotation without image", "missing_column", {"caption": "a dog"}),
        ("an annotation that is null", "not_an_object", None),
    ]:
        corpus.lose("coco", kind, f"annotation {len(annotations)}", reason)
        annotations.append(item)
    path.write_text(json.dumps({"images": images, "annotations": annotations}))


def write_karpathy(corpus: Corpus) -> None:
    path = corpus.add("karpathy", "dataset.json")
    images: list[Any] = []
    sentences = [{"raw": _CAPTION}]
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("sentences of restval", "", {"split": "restval"}),
        ("an image of no sentences", "unmatched_image", {"sentences": []}),
        ("a sentence without its text", "missing_column", {"sentences": [{"tokens": ["a", "dog"]}]}),
        ("a sentence that is text", "not_an_object", {"sentences": ["a dog"]}),
        ("sentences without an image", "missing_column", {"filename": ...}),
        ("sentences of no file", "image_missing", {"filename": "none.png"}),
        ("sentences of another split", "unknown_split", {"split": "holdout"}),
        ("plain sentences", "", {}),
    ]
    for kind, reason, changes in cases:
        number, picture, caption = corpus.new()
        picture.save(path.parent / f"{number}.png")
        row = {"cocoid": number, "filename": f"{number}.png", "split": "train", "sentences": sentences, **changes}
        if row["sentences"] is sentences:
            row["sentences"] = [{"raw": caption}]
        images.append({name: value for name, value in row.items() if value is not ...})
        if reason:
            corpus.lose("karpathy", kind, f"image {len(images) - 1}", reason)
        else:
            corpus.keep("karpathy", kind, [caption], picture)
    path.write_text(json.dumps({"dataset": "faults", "images": images}))


# -- archives -----------------------------------------------------------------------------------------------------------
Member = tuple[str, bytes | bytearray | None]  # a name with `{key}`, and its content; None stands for the picture
_IMAGE, _TEXT = ("{key}.png", None), ("{key}.txt", b"{caption}")
SAMPLES: list[tuple[str, str, list[Member]]] = [
    ("a sample with a pickle", "unsafe_member", [_IMAGE, _TEXT, ("{key}.pkl", b"cos\nsystem\n")]),
    ("a sample with a weights file", "unsafe_member", [_IMAGE, _TEXT, ("{key}.features.pth", b"PK\3\4")]),
    ("a sample without an image", "incomplete_sample", [_TEXT]),
    ("a sample without a caption", "incomplete_sample", [_IMAGE]),
    ("a sample whose image is there twice", "repeated_member", [_IMAGE, _IMAGE, _TEXT]),
    ("a sample whose caption is there twice", "repeated_member", [_IMAGE, _TEXT, _TEXT]),
    ("a sample of Latin-1", "bad_encoding", [_IMAGE, ("{key}.txt", b"caf\xe9")]),
    ("a sample of cut JSON", "malformed_row", [_IMAGE, ("{key}.json", b'{"caption": "a d')]),
    ("a sample of a JSON list", "not_an_object", [_IMAGE, ("{key}.json", b'["a dog"]')]),
    ("a sample of an unnamed class", "unmatched_image", [_IMAGE, ("{key}.cls", b"7")]),
    ("a sample of a caption of 2 MB", "malformed_row", [_IMAGE, ("{key}.txt", b"a" * (2 << 20))]),
    ("a sample of an empty image", "image_empty", [("{key}.jpg", b""), _TEXT]),
    ("a sample of an empty caption", "caption_empty", [_IMAGE, ("{key}.txt", b" \n")]),
    ("a sample of another split", "unknown_split", [_IMAGE, ("{key}.json", b'{"caption": "a", "split": "x"}')]),
    ("a sample with features", "", [_IMAGE, _TEXT, ("{key}.npy", b"\x93NUMPY")]),
]


def write_shards(corpus: Corpus) -> None:
    folder = corpus.add("shards", "data")
    folder.mkdir()
    with tarfile.open(folder / "000.tar", "w") as archive:
        for kind, reason, members in [item for sample in SAMPLES for item in (sample, SAMPLES[-1])]:
            number, picture, caption = corpus.new()
            for name, content in members:
                content = png(picture) if content is None else bytes(content).replace(b"{caption}", caption.encode())
                add_member(archive, name.replace("{key}", str(number)), content)
            if reason:
                corpus.lose("shards", kind, f"000.tar, member {number}", reason)
            else:
                corpus.keep("shards", kind, [caption], picture)
        _add_hostile_members(corpus, archive)
        # One key in two archives: neither half has what it needs.
        number, picture, caption = corpus.new()
        add_member(archive, f"{number}.png", png(picture))
        corpus.lose("shards", "the first half of a sample", f"000.tar, member {number}", "incomplete_sample")
    with tarfile.open(folder / "001.tar", "w") as archive:
        add_member(archive, f"{number}.txt", caption.encode())
        corpus.lose("shards", "the second half of a sample", f"001.tar, member {number}", "incomplete_sample")
        _add_sample(corpus, archive)
        _add_sample(corpus, archive, cut=True)
    whole = (folder / "001.tar").read_bytes().rstrip(b"\0")
    (folder / "001.tar").write_bytes(whole[: len(whole) - 700])
    corpus.lose("shards", "an archive cut in its last sample", "001.tar", "truncated_archive")


def add_member(archive: tarfile.TarFile, name: str, content: bytes = b"", **fields: Any) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for key, value in fields.items():
        setattr(member, key, value)
    archive.addfile(member, io.BytesIO(content))


def _add_sample(corpus: Corpus, archive: tarfile.TarFile, cut: bool = False) -> int:
    number, picture, caption = corpus.new()
    add_member(archive, f"{number}.txt", caption.encode())
    add_member(archive, f"{number}.png", png(picture))
    if not cut:
        corpus.keep("shards", "a plain sample", [caption], picture)
    return number


def _add_hostile_members(corpus: Corpus, archive: tarfile.TarFile) -> None:
    link = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("a member that leads out", "../{}.png", {}),
        ("a member with an absolute name", "/tmp/{}.png", {}),
        ("a symbolic link", "{}.png", link),
        ("a hard link", "{}.png", {**link, "type": tarfile.LNKTYPE}),
        ("a device", "{}.png", {"type": tarfile.CHRTYPE}),
        ("a pipe", "{}.png", {"type": tarfile.FIFOTYPE}),
    ]
    for kind, name, fields in cases:
        number, picture, caption = corpus.new()
        key = name.format(number).removesuffix(".png")
        add_member(archive, f"{key}.png", b"" if fields else png(picture), **fields)
        add_member(archive, f"{key}.txt", caption.encode())
        corpus.lose("shards", kind, f"000.tar, member {key}", "unsafe_member")
    number = _add_sample(corpus, archive)
    _add_sample(corpus, archive)
    _, picture, _ = corpus.new()
    add_member(archive, f"{number}.png", png(picture))
    add_member(archive, f"{number}.txt", b"a dog")
    corpus.lose("shards", "a key again, further on", f"000.tar, member {number}", "incomplete_sample")
