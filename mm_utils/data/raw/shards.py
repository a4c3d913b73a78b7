"""Records of tar shards in the layout of WebDataset: the members of a sample share their name up to the first dot.

An archive is input from outside. Its members are read in memory and never extracted; links, devices, names that lead
out and Python pickles, which run code when they are read, set the whole sample aside.
"""

import glob
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mm_utils.data.raw.columns import USUAL_NAMES, Columns, captions_of, split_of
from mm_utils.data.raw.faults import Fault
from mm_utils.data.raw.folders import IMAGE_SUFFIXES, class_names
from mm_utils.data.raw.paths import PathArguments, is_url
from mm_utils.data.raw.records import BadRow, ImageRef, MemberImage, Record
from mm_utils.data.raw.specs import Maker, Source, storable
from mm_utils.data.raw.text_files import checked_object, parse_json

_TEXTS = ("txt", "caption", "json", "cls")
_PICKLES = ("pyd", "pkl", "pickle", "pth", "pt", "joblib")
_LONGEST_TEXT = 1 << 20  # bytes
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_BLOCK = 512


@dataclass
class Sample:
    """The members of one key: the image, the small texts by extension, and what forbids to use them, if anything."""

    key: str
    image: MemberImage | None = None
    texts: dict[str, bytes] = field(default_factory=dict)
    fault: Fault | None = None


def read_webdataset(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read the shards of `source`, each by itself; an id is the shard's name and the key."""
    maker = Maker(source, safety, ".")
    names = class_names(source)
    for path in shard_paths(source):
        shard = os.path.splitext(os.path.basename(path))[0]
        for sample in read_shard(path):
            where = f"{os.path.basename(path)}, member {sample.key}" if sample.key else os.path.basename(path)
            try:
                yield _record(maker, sample, where, f"{shard}/{sample.key}", names)
            except Fault as fault:
                yield maker.bad(where, fault, sample.texts.get("txt", b"").decode("utf-8", "replace"))


def shard_paths(source: Source) -> list[str]:
    """The shards of a folder, a file, a pattern with ``*``, or one with ranges such as ``{000..099}``, in order."""
    if os.path.isdir(source.path):
        paths = sorted(glob.glob(os.path.join(glob.escape(source.path), "**", "*.tar"), recursive=True))
    else:
        paths = [
            path for item in _expand(source.path) for path in (sorted(glob.glob(item)) if "*" in item else [item])
        ]
    missing = next((path for path in paths if not os.path.isfile(path)), None)
    if missing is not None or not paths:
        raise ValueError(f"{source.title}; there is no {missing or 'tar file'}. Check the path and the range.")
    return paths


def read_shard(path: str) -> Iterator[Sample]:
    """Give the samples of one tar file in their order; at its end, one of the empty key if the archive is cut.

    The sample that the cut goes through is not given: some of its members may be missing.
    """
    count, current, keys = 0, None, set[str]()
    size = os.path.getsize(path)
    try:
        with tarfile.open(path, "r:") as archive:
            for member in _members(archive, size):
                key, extension = _key(member.name)
                if current is None or key != current.key:
                    if current is not None:
                        yield current
                        count += 1
                    current = Sample(key)
                    if key in keys:
                        current.fault = Fault("duplicate_id", f"the key {storable(key)} is in {path} twice")
                    keys.add(key)
                _add(current, member, extension, archive, path)
    except (tarfile.TarError, RecursionError, EOFError, ValueError, OSError) as error:
        detail = f"{path}: {str(error) or type(error).__name__}; {count:,} whole samples come before"
        yield Sample("", fault=Fault("truncated_archive", detail))
        return
    if current is not None:
        yield current


def _members(archive: tarfile.TarFile, size: int) -> Iterator[tarfile.TarInfo]:
    """The members but for folders; raises a TarError where the archive does not end as one should."""
    begin = -1
    while (member := archive.next()) is not None:
        vars(archive)["members"] = []  # else it keeps the header of every member
        if member.offset <= begin or member.size < 0:
            raise tarfile.ReadError("a header gives a negative size")
        begin = member.offset
        if member.isreg() and not member.issparse() and member.offset_data + member.size > size:
            raise tarfile.ReadError("the file ends inside a member")
        if not member.isdir() and not os.path.basename(member.name).startswith("._"):  # macOS puts these beside files
            yield member
    # `tarfile` takes a damaged header, and the end of the file where the end marker should be, for a regular end.
    stream: Any = archive.fileobj
    stream.seek(archive.offset)
    if stream.read(_BLOCK) != bytes(_BLOCK):
        raise tarfile.ReadError("the end marker is missing")


def _key(name: str) -> tuple[str, str]:
    folder, base = os.path.split(name)
    stem, _, extension = base.partition(".")
    return os.path.join(folder, stem), extension.lower()


def _add(sample: Sample, member: tarfile.TarInfo, extension: str, archive: tarfile.TarFile, path: str) -> None:
    reason = _unsafe(member, extension)
    if reason is not None:
        sample.fault = sample.fault or Fault("unsafe_member", f"{storable(member.name)} {reason}")
    elif f".{extension}" in IMAGE_SUFFIXES:
        if sample.image is None:
            sample.image = MemberImage(path, storable(member.name), member.offset_data, member.size)
        elif sample.image.member == storable(member.name):
            sample.fault = sample.fault or Fault("duplicate_id", f"{storable(member.name)} is there twice")
    elif extension in _TEXTS:
        if extension in sample.texts:
            sample.fault = sample.fault or Fault("duplicate_id", f"{storable(member.name)} is there twice")
        elif member.size > _LONGEST_TEXT:
            sample.fault = sample.fault or Fault("malformed_row", f"{storable(member.name)} has {member.size:,} bytes")
        else:
            content = archive.extractfile(member)
            sample.texts[extension] = b"" if content is None else content.read()


def _unsafe(member: tarfile.TarInfo, extension: str) -> str | None:
    name = member.name
    if name.startswith(("/", "\\")) or ".." in name.split("/") or "\0" in name:
        return "leads out of the archive"
    if not member.isreg() or member.issparse():
        return "is a link, a device or a sparse file"
    if extension.rpartition(".")[2] in _PICKLES:
        return "is a pickle, which runs code when it is read"
    return None


def _record(maker: Maker, sample: Sample, where: str, key: str, names: dict[str, str]) -> Record:
    if sample.fault is not None:
        raise sample.fault
    values = checked_object(parse_json(_text(sample, "json"))) if "json" in sample.texts else {}
    captions, languages = _captions(maker.source, sample, values, names)
    image: ImageRef
    if sample.image is not None:
        image = sample.image
    elif maker.safety.allow_download and is_url(str(values.get("url"))):
        image, _ = maker.image(values["url"])
    else:
        raise Fault("image_missing", f"{storable(sample.key)} has no image among its members")
    split = None if values.get("split") is None or maker.source.split else split_of(values["split"])
    return maker.record(
        where, (image, storable(key)), captions, languages=languages, regions=values.get("regions"), split=split
    )


def _captions(
    source: Source, sample: Sample, values: dict[str, Any], names: dict[str, str]
) -> tuple[list[Any], list[str] | None]:
    """The captions of .txt or .caption, else those of .json, else of the class in .cls."""
    column = source.caption_column or next((name for name in USUAL_NAMES["caption"] if name in values), None)
    columns = Columns(caption="caption", language=source.language_column or "languages")
    language = values.get(str(columns.language))
    plain = next((name for name in ("txt", "caption") if name in sample.texts), None)
    if plain is not None and source.caption_column is None:
        values = {"caption": _text(sample, plain)}
        language = None if isinstance(language, list) else language  # a list is that of the captions in .json
    elif column in values:
        values = {"caption": values[column]}
    elif "cls" in sample.texts:
        label = _text(sample, "cls").strip()
        if label.isdigit() and label not in names:
            raise Fault("unmatched_image", f"class {label} has no name; set classes= to a file of names")
        values = {"caption": [each.replace("{}", names.get(label, label)) for each in source.templates]}
    else:
        raise Fault("unmatched_image", f"{storable(sample.key)} has no caption among its members")
    return captions_of({**values, str(columns.language): language}, columns)


def _text(sample: Sample, extension: str) -> str:
    try:
        return sample.texts[extension].decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Fault(
            "bad_encoding", f"{storable(sample.key)}.{extension}: byte {error.start + 1} is not UTF-8"
        ) from error


def _expand(pattern: str) -> list[str]:
    found = _RANGE.search(pattern)
    if found is None:
        return [pattern]
    first, last = int(found[1]), int(found[2])
    numbers = [str(number).zfill(len(found[1])) for number in range(first, last + 1)]
    return [rest for number in numbers for rest in _expand(pattern[: found.start()] + number + pattern[found.end() :])]
