"""Records of tar shards; members with one name up to the first dot are a sample.

An archive is untrusted input. Its members are read in memory and never extracted; links, devices, names that lead out
and Python pickles, which run code when they are read, set the whole sample aside.
"""

import os
import tarfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from mm_utils.data.faults import Fault, storable
from mm_utils.data.media.medium import MEDIA
from mm_utils.data.paths import files_of_pattern, read_file
from mm_utils.data.rows.columns import (
    LABEL_NAMES,
    SUFFIXES,
    TEXT_NAMES,
    USUAL_NAMES,
    Columns,
    set_medium,
    split_of_path,
    tell_others,
)
from mm_utils.data.rows.folders import TABLES, Unread, is_harmless, is_of_program, own_files
from mm_utils.data.rows.records import BytesImage, ImageRef, RecordBuilder, Records
from mm_utils.data.rows.source import Source
from mm_utils.data.rows.text_files import (
    Rows,
    Values,
    checked_object,
    lines_of,
    parse_json,
)
from mm_utils.model.reading import MOST_BYTES

_TEXTS = ("txt", "caption", "json", "cls")
_PICKLES = ("pyd", "pkl", "pickle", "pth", "pt", "joblib")
_LONGEST_TEXT = 1 << 20  # bytes
_LONGEST_HEADER = 8 << 10  # bytes; a path has at most 4096
_LOOKED_AT = 100  # samples that tell the kind of the media
# Columns beside those of the .json
MEDIUM = "__medium__"
KEY = "__key__"
_CAPTIONS = "__captions__"
_LABEL = "__label__"


@dataclass(frozen=True, slots=True)
class MemberImage(ImageRef):
    """`size` bytes of an uncompressed tar archive, from byte `offset`."""

    path: str
    offset: int
    size: int

    def read(self, most: int) -> bytes:
        """Read the member alone."""
        return read_file(self.path, most, self.offset, self.size)


class BoundedHeader(tarfile.TarInfo):
    """A header of a tar archive that has its name in at most `_LONGEST_HEADER` bytes.

    Python before 3.11.10 and 3.12.6 searches an extended header in quadratic time (CVE-2024-6232), and all of them read it
    whole into memory.
    """

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        kinds = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        if self.type in (*kinds, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK) and self.size > _LONGEST_HEADER:
            raise tarfile.ReadError(f"an extended header has {self.size:,} bytes; {_LONGEST_HEADER:,} is the most")
        return super()._proc_member(archive)  # type: ignore[misc,no-any-return]


@dataclass
class Sample:
    """The members of one key: a file of each medium, texts by extension, the first fault if any, and the names of the others."""

    key: str
    media: dict[str, MemberImage | BytesImage] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    fault: Fault | None = None
    names: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def lacks(self, what: str) -> Fault:
        """Return the fault of a sample without something; it names what is there."""
        return Fault("incomplete_sample", f"{self.key} has no {what} among its members ({', '.join(self.names[:6])})")

    def text(self, extension: str) -> str:
        """Decode a text; raises bad_encoding."""
        try:
            return self.texts[extension].decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise Fault("bad_encoding", f"{self.key}.{extension}: byte {error.start + 1} is not UTF-8") from error


def read_webdataset(source: Source) -> Records:
    """Read `source`'s shards, each by itself; an id is the shard's path in the folder, and the key."""
    is_folder = os.path.isdir(source.path)
    unread = Unread()
    if is_folder:
        found = own_files(source.path, (".tar",), source.paths.allow_outside_root, source.title, unread)
        paths = [os.path.join(source.path, name) for name in found]
    else:
        paths = files_of_pattern(source.path)
    missing = next((path for path in paths if not os.path.isfile(path)), None)
    if missing is not None or not paths:
        raise ValueError(f"{source.title}; there is no {missing or 'tar file'}. Check the path and the range.")
    medium = medium_of_samples(chain.from_iterable(map(read_shard, paths)), source)
    builder = RecordBuilder(source, ".")
    parents = [os.path.dirname(os.path.abspath(path)) for path in paths]
    folder = source.path if is_folder else os.path.commonpath(parents)
    for path in paths:
        name = os.path.relpath(path, folder)
        split = split_of_path(name, by_words=True) if is_folder else None
        rows = _rows(read_shard(path, MEDIA[medium].holders), source, medium, name, unread)
        yield from builder.records(sample_columns(source, medium), rows, name, split)
    yield from unread.rows(builder)


def _rows(samples: Iterable[Sample], source: Source, medium: str, name: str, unread: Unread) -> Rows:
    """Yield the row of each sample of a shard, by its key; count the members of other samples that are not read."""
    stem = os.path.splitext(name)[0]
    for sample in samples:
        for member in sample.unread:
            unread.add("not_read", f"{name}/{member}")
        place = f"member {sample.key}" if sample.key else ""
        yield place, row_of_sample(sample, source, medium, f"{stem}/{sample.key}")


def medium_of_samples(samples: Iterable[Sample], source: Source) -> str:
    """Return the medium that a source asks for, else that of its first samples, else images; ValueError if they are of several."""
    if source.medium != "auto":
        return source.medium
    first: dict[str, str] = {}
    head = list(islice(samples, _LOOKED_AT))
    table = next((name for each in head for name in each.names if name.lower().endswith(TABLES)), None)
    if table is not None and not any(each.texts for each in head):
        raise ValueError(
            f"{source.title}; it holds the table {table} and files of its rows, as a folder does. Unpack it, and give the table."
        )
    for sample in head:
        for kind, member in sample.media.items():
            if kind != "clip" or not member.name.lower().endswith(".gif"):  # which is an image, too
                first.setdefault(kind, member.name)
    if len(first) > 1:
        raise ValueError(
            f"{source.title}; its samples hold {' and '.join(f'{kind}s' for kind in first)}, such as "
            f"{' and '.join(first.values())}. {set_medium(first)}"
        )
    return next(iter(first), "image")


def read_shard(path: str, kinds: Collection[str] = tuple(SUFFIXES)) -> Iterator[Sample]:
    """Read a tar file's samples; a cut archive ends with a fault under the empty key.

    The sample that the cut goes through is left out: some of its members may be missing.
    """
    count = 0
    try:
        with tarfile.open(path, "r:", tarinfo=BoundedHeader) as archive:
            for sample in read_samples(archive, path, kinds=kinds, size=os.path.getsize(path)):
                yield sample
                count += 1
    except (tarfile.TarError, RecursionError, EOFError, ValueError, OSError) as error:
        detail = f"{path}: {str(error) or type(error).__name__}; {count:,} whole samples come before"
        yield Sample("", fault=Fault("truncated_archive", detail))


def read_samples(
    archive: tarfile.TarFile,
    path: str,
    *,
    kinds: Collection[str] = tuple(SUFFIXES),
    size: int | None = None,
    first: int | None = None,
) -> Iterator[Sample]:
    """Read the samples of an open archive.

    Args:
        size: the bytes of the file, if it is known; a member that goes beyond them is an error.
        first: the number of the first sample whose contents are read, media too; those before have none. By default
            media stay in the file and are read from `path`.

    Raises:
        tarfile.TarError: if the archive is damaged or cut.
    """
    current = None
    number = -1
    keys = set[str]()
    for member in _members(archive, size):
        key, _ = _key(member.name)
        if current is not None and key != current.key:
            yield current
            current = None
        if current is None:
            again = Fault("incomplete_sample", f"the key {key} comes in {path} again, after other samples")
            current = Sample(key, fault=again if key in keys else None)
            number = number + 1
            keys.add(key)
        if first is None or number >= first:
            _add(current, member, kinds, archive, path, in_memory=first is not None)
    if current is not None:
        yield current
    stream: Any = archive.fileobj
    while block := stream.read(tarfile.RECORDSIZE):  # zeros alone follow the end marker
        if any(block):
            raise tarfile.ReadError("something follows the end marker, such as another archive")


def _members(archive: tarfile.TarFile, size: int | None) -> Iterator[tarfile.TarInfo]:
    """Read the members except folders. Raises a TarError if the end of the archive is wrong."""
    begin = -1
    while (member := archive.next()) is not None:
        vars(archive)["members"] = []  # else it keeps the header of every member
        if member.offset <= begin or member.size < 0:
            raise tarfile.ReadError("a header has a negative size")
        begin = member.offset
        stored = member.isreg() and not member.issparse()
        *folders, name = member.name.split("/")
        is_service = name.startswith("._") or any(map(is_of_program, [*folders, name])) or is_harmless(name)
        if not member.isdir() and not is_service:
            yield member  # of the next sample, perhaps: then the one before is whole, although this one is cut
        if size is not None and stored and member.offset_data + member.size > size:
            raise tarfile.ReadError("the file ends inside a member")
    # `tarfile` takes a damaged header, and the end of the file where the end marker should be, for a regular end.
    stream: Any = archive.fileobj
    stream.seek(archive.offset)
    if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("the end marker is missing")


def _key(name: str) -> tuple[str, str]:
    folder, slash, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()  # 'a/7.seg.png' -> 'a/7', 'seg.png'


def _add(
    sample: Sample,
    member: tarfile.TarInfo,
    kinds: Collection[str],
    archive: tarfile.TarFile,
    path: str,
    in_memory: bool,
) -> None:
    name = storable(member.name)
    title = f"{path}, member {name}"
    _, extension = _key(name)
    sample.names.append(os.path.basename(name))
    # 'seg.png' is no medium: only 'png' is
    media = [kind for kind in kinds if f".{extension}" in SUFFIXES[kind]]
    new = [kind for kind in media if kind not in sample.media]
    is_text = not media and extension in _TEXTS
    most = _LONGEST_TEXT if is_text else MOST_BYTES
    leads_out = name.startswith(("/", "\\")) or ".." in name.split("/") or "\0" in name
    fault = None
    if leads_out or not member.isreg() or member.issparse() or extension.rpartition(".")[2] in _PICKLES:
        what = "is a link, a device, a sparse file or a pickle, or leads out of the archive"
        fault = Fault("unsafe_member", f"{name} {what}")
    elif extension in sample.texts or any(held.name == title for held in sample.media.values()):
        fault = Fault("repeated_member", f"{name} is there twice")
    elif not new and not is_text:
        sample.unread.append(name)
    elif new and not in_memory:
        sample.media |= dict.fromkeys(new, MemberImage(title, path, member.offset_data, member.size))
    elif member.size > most:
        reason = "malformed_row" if is_text else "too_many_bytes"
        fault = Fault(reason, f"{name} has {member.size:,} bytes; {most:,} is the most")
    else:
        file: Any = archive.extractfile(member)
        content = file.read()
        if len(content) < member.size:
            raise tarfile.ReadError("the file ends inside a member")
        if is_text:
            sample.texts[extension] = content
        sample.media |= dict.fromkeys(new, BytesImage(title, content))
    sample.fault = sample.fault or fault


def row_of_sample(sample: Sample, source: Source, medium: str, key: str = "") -> Values | Fault:
    """Return the values of a sample, in the columns of `sample_columns` and of its .json, or why it has none.

    Its unchecked captions are the lines of .txt or .caption, else those of .json.
    """
    try:
        if sample.fault is not None:
            raise sample.fault
        values = checked_object(parse_json(sample.text("json"))) if "json" in sample.texts else {}
        usual = TEXT_NAMES if source.labelled else USUAL_NAMES["caption"]
        column = source.caption_column or next((name for name in usual if name in values), None)
        plain = [name for name in ("caption", "txt") if name in sample.texts]
        captions: Any = []
        if source.labelled:
            label = source.label_column or next((name for name in LABEL_NAMES if name in values), None)
            if label not in values and "cls" not in sample.texts:
                raise sample.lacks("label")
            values[_LABEL] = values[label] if label in values else sample.text("cls")
            captions = [values[column]] if column in values else []
        elif plain and source.caption_column is None:
            captions = lines_of("\n".join(map(sample.text, plain)))
            if column in values and not {*lines_of(str(values[column]))} <= {*captions}:
                tell_others("caption", f".{plain[0]}", [column], usual)
        elif column in values:
            captions = values[column]
            if source.caption_column is None:
                tell_others("caption", column, values, usual)
        else:
            raise sample.lacks("caption")
        # A video without a file of its sound is a sound, too.
        member = next((sample.media[kind] for kind in MEDIA[medium].holders if kind in sample.media), None)
        if member is None:
            raise sample.lacks(medium)
        return values | {MEDIUM: member, _CAPTIONS: captions, KEY: key}
    except Fault as fault:
        fault.raw = sample.texts.get("txt", b"").decode("utf-8", "replace")
        return fault


def sample_columns(source: Source, medium: str) -> Columns:
    """Return the columns of the rows of samples."""
    label = _LABEL if source.labelled else None
    return Columns(MEDIUM, _CAPTIONS, KEY, medium, labelled=source.labelled, label=label)
