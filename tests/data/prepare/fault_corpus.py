"""What a corpus full of faults consists of: sources, and what each row of them must become.

Every good row has a picture of its own, drawn from a number that its caption says, so a caption that went to another
row's picture is seen. Behind every bad row comes a good one: damage must not spread.
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from tests.data.prepare.fault_rows import CAPTION, Row
from tests.kit.fault_images import draw


@dataclass(frozen=True)
class Pair:
    """What must come out: the captions and what the image shows."""

    kind: str
    source: str
    captions: tuple[str, ...]
    picture: Image.Image


@dataclass(frozen=True)
class Loss:
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

    def add(self, source: str, path: str, **keys: str) -> Path:
        """Make the folder of a source; returns its path."""
        full = self.folder / source / path
        full.parent.mkdir(parents=True, exist_ok=True)
        items = [str(full), f"name={source}", *(f"{key}={value}" for key, value in keys.items())]
        self.sources.append(",".join(items))
        return full

    def new(self) -> tuple[int, Image.Image, str]:
        """A number, its picture and its caption."""
        number = next(self.numbers)
        return number, draw(number), f"picture {number}"

    def keep(self, source: str, kind: str, captions: Sequence[str], picture: Image.Image, *notes: str) -> None:
        """A row that must come out."""
        self.rows[source] += 1
        self.notes.update(notes)
        self.pairs.append(Pair(kind, source, tuple(captions), picture.convert("RGB")))

    def lose(self, source: str, kind: str, where: str, reasons: str) -> None:
        """A row that must be set aside."""
        self.rows[source] += 1
        self.losses += [Loss(kind, source, where, reason) for reason in reasons.split()]

    def pass_by(self, source: str, kind: str, reason: str) -> None:
        """Files that no row names, which are counted in one line."""
        self.losses.append(Loss(kind, source, "folder .", reason))

    def expect(self, source: str, row: Row, where: str, number: int) -> None:
        """What must become of a row of a table."""
        self.rows[source] += 1
        self.losses += [Loss(row.kind, source, where, reason) for reason in row.reasons.split()]
        if row.kept:
            captions = tuple(str(fill(text, f"picture {number}", {"number": str(number)})) for text in row.kept)
            self.pairs.append(Pair(row.kind, source, captions, draw(number)))
            self.notes.update(row.notes)


def fill(text: str | bytes, caption: str, values: dict[str, str]) -> str | bytes:
    """A template with its places filled; nothing else in it has a meaning."""
    cut = {"words": " word" * ((2000 - len(caption)) // 5), "xs": "x" * (2000 - len(caption))}
    for name, value in {"caption": caption, **cut, **values}.items():
        if isinstance(text, bytes):
            text = text.replace(b"{%s}" % name.encode(), value.encode())
        else:
            text = text.replace(f"{{{name}}}", value)
    return text


def write_table(
    corpus: Corpus,
    source: str,
    path: Path,
    table: Sequence[Row],
    good: str | None,
    header: bytes = b"",
    last: Row | None = None,
    **places: str,
) -> None:
    """Write rows, each with a picture, and before and behind each a `good` one, in a file of lines."""
    (path.parent / "images").mkdir(exist_ok=True)
    written = bytearray(header)
    between = [] if good is None else [Row("a plain row", good, "", CAPTION)]
    every = [*between, *(item for each in table for item in (each, *between)), *([last] if last else [])]
    for row in every:
        number, picture, caption = corpus.new()
        name = f"images/{number}.png"
        picture.save(path.parent / name)
        values = {**places, "image": name, "number": str(number)}
        if "{link}" in str(row.text):
            values["link"] = f"links/{number}.png"
            os.symlink(f"../{name}", path.parent / values["link"])
        text = fill(row.text, caption, values)
        text = text if isinstance(text, bytes) else text.encode()
        begin = len(text) - len(text.lstrip(b"\n "))  # blank lines before the row itself
        at = (written + text[:begin]).count(b"\n") + 1
        written += text + (b"" if row is last else b"\n")
        corpus.expect(source, row, f"line {at}", number)
    path.write_bytes(written)
