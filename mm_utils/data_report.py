"""The readable report of a prepared pair data set: what it holds, what was set aside and why, and what it looks like.

Captions, ids and file names come from strangers: in the report they are text, never Markdown, HTML or a formula.
"""

import html
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from matplotlib.ticker import EngFormatter

from mm_utils.data.raw.faults import NOTES
from mm_utils.data.statistics import PairStatistics, mean, measure_pairs, quantile
from mm_utils.data_pictures import draw_statistics, random_tiles, tiles_of_matches
from mm_utils.reporting import Tile, draw_contact_sheet

_FEW_EVALUATION = 500  # recall near 50 % is then uncertain by 2.2 points (one standard deviation, 50 / sqrt(500))
_FEW_TRAINING = 1000
_TINY_SIDE = 112  # enlarged more than twice for the usual input of 224 pixels
_LONG_CAPTION = 300  # characters: about the 77 tokens at which CLIP's text encoder cuts
_MANY, _SOME = 0.05, 0.01  # shares from which on tiny images or bad rows, and long captions, are worth a warning
_SHOWN_PAIRS, _SHOWN_OTHER_PAIRS, _SHOWN_SPLITS, _SHOWN_MATCHES = 24, 12, 4, 12


class _Markdown(str):
    """Text that is Markdown on purpose; any other string in a table is escaped."""


class _Figure(_Markdown):
    """A number with its unit."""


def write_report(
    folder: Path, pairs: DatasetDict, summary: dict[str, Any], removed: Dataset | None = None, seed: int = 0
) -> None:
    """Write `report.md` and its pictures into `folder`, which exists.

    Args:
        folder: receives `report.md`, `statistics.png`, a contact sheet `pairs_SPLIT.jpg` of each of the first four
            splits and, where `summary` gives examples, `duplicates.jpg` and `leakage.jpg`.
        pairs: prepared rows; `captions` must be there. Of the images only those shown are read.
        summary: the content of `report.json`; what it lacks, the report leaves out.
        removed: `id`, `image` and `captions` of rows that `summary` gives as examples and that are not in `pairs`.
        seed: decides which pairs are shown.
    """
    measured = {name: measure_pairs(split) for name, split in pairs.items()}
    draw_statistics(measured, folder / "statistics.png")
    sheets, damaged = _draw_sheets(folder, pairs, summary, removed, seed)
    warnings = [*_warnings_of_summary(summary), *_warnings_of_pairs(measured)]
    if damaged:
        warnings.insert(
            0, f"**{_plural(len(damaged), 'image')} of those below cannot be decoded**: {_escape(', '.join(damaged))}"
        )
    blocks = [
        "# Report of the data set",
        _opening(summary, measured),
        "## Look at this first",
        "\n".join(f"- {warning}" for warning in warnings) or "Nothing stands out. Do look at the pairs below.",
        "## What it holds",
        _statistics_table(measured, _part(summary, "splits")),
        "![Histograms of sizes, captions and languages](statistics.png)",
        *sheets,
        *_origin(summary),
        *_removed(summary),
        *_details(summary),
    ]
    (folder / "report.md").write_text("\n\n".join(block for block in blocks if block) + "\n", encoding="utf-8")


def _draw_sheets(
    folder: Path, pairs: DatasetDict, summary: dict[str, Any], removed: Dataset | None, seed: int
) -> tuple[list[str], list[str]]:
    """The Markdown of all contact sheets, and the ids of random pairs whose image is unreadable."""
    blocks: list[str] = []
    damaged: list[str] = []

    def add(title: str, file: str, tiles: list[Tile], **layout: int) -> None:
        if tiles:
            draw_contact_sheet(tiles, folder / file, **layout)
            blocks.extend([f"### {title}", f"![contact sheet]({file})"])

    for index, name in enumerate(list(pairs)[:_SHOWN_SPLITS]):
        if "image" in pairs[name].column_names:
            tiles = random_tiles(pairs[name], _SHOWN_OTHER_PAIRS if index else _SHOWN_PAIRS, seed + index)
            damaged += [tile.title for tile in tiles if tile.image is None]
            file = f"pairs_{name if re.fullmatch('[0-9A-Za-z_.-]{1,60}', name) else index}.jpg"
            add(f"Random pairs of {_escape(name)}", file, tiles)
    everything = DatasetDict({**pairs, **({} if removed is None else {"removed": removed})})
    for part, title in (("duplicates", "Images that look alike"), ("leakage", "Images found in two splits")):
        examples = [list(map(str, pair)) for pair in _part(summary, part).get("examples") or []]
        add(title, f"{part}.jpg", tiles_of_matches(everything, examples[:_SHOWN_MATCHES]), columns=4, group=2)
    return blocks, damaged


def _opening(summary: dict[str, Any], measured: dict[str, PairStatistics]) -> str:
    images = sum(split.images for split in measured.values())
    captions = sum(split.captions for split in measured.values())
    sources = summary.get("sources") or []
    parts = [f"**{images:,} images with {captions:,} captions**"]
    if sources:
        rows = _sum(sources, "rows")
        parts[0] += f" were kept from {rows:,} rows of {_plural(len(sources), 'source')}"
    parts[0] += "."
    reasons = sorted(_part(summary, "quarantined").items(), key=lambda item: -item[1]["count"])
    if reasons:
        total = sum(reason["count"] for _, reason in reasons)
        listed = [f"{reason['count']:,} for `{_code(name)}`" for name, reason in reasons[:3]]
        if reasons[3:]:
            listed.append(f"{sum(reason['count'] for _, reason in reasons[3:]):,} for other reasons")
        parts.append(f"Set aside: {total:,} rows or captions, of which {', '.join(listed)}.")
    elif "quarantined" in summary:
        parts.append("Nothing was set aside.")
    if _part(summary, "duplicates").get("merged_rows"):
        parts.append(f"Merged: {_plural(summary['duplicates']['merged_rows'], 'row')} of equal images.")
    if len(measured) > 1:
        parts.append(_leakage_sentence(summary.get("leakage")))
    if summary.get("seconds"):
        parts.append(f"Preparing took {_value(summary['seconds'])} s.")
    return " ".join(parts)


def _leakage_sentence(leakage: dict[str, Any] | None) -> str:
    if leakage is None:
        return "Whether the splits share images was not checked."
    found, dropped = _leaks(leakage), sum((leakage.get("dropped") or {}).values())
    if not found:
        return "No image of one split was found in another."
    copies = f"Copies across splits: {_plural(found, 'image')}"
    return f"{copies}; dropped: {_plural(dropped, 'row')}." if dropped else f"**{copies}, none dropped.**"


def _leaks(leakage: dict[str, Any]) -> int:
    return sum(leakage.get(kind) or 0 for kind in ("exact", "near", "by_id"))


def _warnings_of_summary(summary: dict[str, Any]) -> list[str]:
    """What a person should know before training: Markdown, the most serious first."""
    found = []
    leakage = _part(summary, "leakage")
    if _leaks(leakage) and not sum((leakage.get("dropped") or {}).values()):
        found.append("**The splits leak**: an evaluation would measure memory. Prepare with the leaks dropped.")
    for source in summary.get("sources") or []:
        rows, bad = source.get("rows") or 0, source.get("bad") or 0
        if bad > _MANY * rows:
            found.append(f"{_share(bad, rows)} of the rows of {_escape(source.get('name', '?'))} were set aside.")
    images = _sum(_part(summary, "splits").values(), "images")
    for shared in (_part(summary, "captions").get("shared") or [])[:3]:
        if shared["images"] > max(10, 0.01 * images):
            times = f"{shared['images']:,} images share one caption"
            found.append(f"{times}, which makes them wrong negatives of each other: {_escape(shared['caption'], 100)}")
    captions = _sum(_part(summary, "splits").values(), "captions")
    distinct = _part(summary, "captions").get("distinct")
    if distinct is not None and 2 * distinct < captions:
        found.append(f"Of {captions:,} captions only {distinct:,} are distinct.")
    cut = _part(summary, "notes").get("caption_cut") or 0
    if cut > _SOME * captions:
        found.append(f"Cut when they were read: {_plural(cut, 'caption')}.")
    duplicates = _part(summary, "duplicates")
    if (duplicates.get("largest_group") or 0) > 10:
        found.append(f"One image occurs {duplicates['largest_group']:,} times; look for a placeholder or a logo.")
    return found


def _warnings_of_pairs(measured: dict[str, PairStatistics]) -> list[str]:
    found = []
    for index, (name, split) in enumerate(measured.items()):
        if not split.images:
            found.append(f"The split {_escape(name)} is empty.")
        elif index and split.images < _FEW_EVALUATION:
            points = 50 / split.images**0.5
            found.append(
                f"The split {_escape(name)} has {_plural(split.images, 'image')}; "
                f"a recall near 50 % is uncertain by ±{points:.1f} points."
            )
        elif not index and split.images < _FEW_TRAINING:
            found.append(f"The split {_escape(name)} has {_plural(split.images, 'image')}, few to train on.")
    images, captions = (sum(getattr(split, name) for split in measured.values()) for name in ("images", "captions"))
    tiny = sum(n for split in measured.values() for side, n in split.short_side.items() if side < _TINY_SIDE)
    if tiny > _MANY * images:
        found.append(f"{_share(tiny, images)} of the images are shorter than {_TINY_SIDE} pixels on one side.")
    long = sum(n for split in measured.values() for size, n in split.characters.items() if size > _LONG_CAPTION)
    if long > _SOME * captions:
        found.append(
            f"{_share(long, captions)} of the captions have more than {_LONG_CAPTION} characters; "
            "a text encoder of 77 tokens cuts them."
        )
    return found


def _statistics_table(measured: dict[str, PairStatistics], splits: dict[str, Any]) -> str:
    def spread(counts: Counter[int]) -> str | None:
        if not counts:
            return None
        return _Figure(f"{quantile(counts, 0.5):,} ({quantile(counts, 0.05):,} to {quantile(counts, 0.95):,})")

    columns = ["split", "images", "captions", "captions per image", "short side", "words", "characters", "size"]
    rows = []
    for name, split in measured.items():
        spreads = [spread(counts) for counts in (split.short_side, split.words, split.characters)]
        size = _size((splits.get(name) or {}).get("bytes"))
        rows.append([name, split.images, split.captions, mean(split.captions_per_image), *spreads, size])
    note = "Short side, words and characters: the median, and in brackets the 5th and 95th percentile."
    return f"{_table(columns, rows)}\n\n{note}"


def _origin(summary: dict[str, Any]) -> list[str]:
    names = ["name", "path", "format", "rows", "kept", "bad", "weight", "share"]
    sources = [
        [source.get(name) for name in names[:-1]] + [_percent(source.get("share"))]
        for source in summary.get("sources") or []
    ]
    return [
        *_section("Sources", names, sources),
        *_section("Storage", ["storage", "value"], _storage(_part(summary, "storage"))),
    ]


def _storage(storage: dict[str, Any]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for key, value in storage.items():
        name = key.replace("_", " ").replace("psnr db", "PSNR in dB").replace("psnr", "PSNR")
        if isinstance(value, dict):
            rows += [[f"{name}, {part}", number] for part, number in value.items()]
        else:
            rows.append([name, _size(value) if key.endswith("bytes_per_pair") else value])
    return rows


def _removed(summary: dict[str, Any]) -> list[str]:
    reasons = sorted(_part(summary, "quarantined").items(), key=lambda item: -item[1]["count"])
    quarantined = [
        [_Markdown(f"`{_code(name)}`"), reason["count"], reason.get("explanation"), _examples(reason.get("examples"))]
        for name, reason in reasons
    ]
    leakage = dict(_part(summary, "leakage"))
    dropped = {f"dropped from {name}": count for name, count in (leakage.pop("dropped", None) or {}).items()}
    notes = [[name, count, NOTES.get(name)] for name, count in _part(summary, "notes").items()]
    return [
        *_section("Set aside", ["reason", "count", "what it means", "for example"], quarantined),
        *_section("Converted", ["note", "times", "what was done"], notes),
        *_section("Duplicates", ["duplicates", "count"], _plain_rows(_part(summary, "duplicates"))),
        *_section("Leakage between splits", ["leakage", "count"], _plain_rows({**leakage, **dropped})),
    ]


def _examples(examples: Sequence[dict[str, Any]] | None) -> _Markdown:
    lines = [
        ", ".join(_escape(example[key], 100) for key in ("source", "where", "detail") if example.get(key))
        for example in (examples or [])[:3]
    ]
    return _Markdown("<br>".join(lines) or "–")


def _details(summary: dict[str, Any]) -> list[str]:
    captions = _part(summary, "captions")
    shared = [[_Markdown(_escape(one["caption"], 120)), one["images"]] for one in captions.get("shared") or []]
    rows = _plain_rows(captions) + [
        [f"characters, {name}", value] for name, value in (captions.get("characters") or {}).items()
    ]
    languages = sorted((captions.get("languages") or {}).items(), key=lambda item: -item[1])
    made = {name: summary.get(name) for name in ("format", "version", "created", "fingerprint", "rows_per_second")}
    settings = {**made, **_part(summary, "settings")}
    return [
        *_section("Captions", ["captions", "value"], rows),
        *_section("Captions of several images", ["caption", "images"], shared),
        *_section("Languages", ["language", "captions"], [[name or "unknown", count] for name, count in languages]),
        *_section("How it was made", ["setting", "value"], [[k, v] for k, v in settings.items() if v is not None]),
    ]


def _part(summary: dict[str, Any], name: str) -> dict[str, Any]:
    return summary.get(name) or {}


def _plain_rows(values: dict[str, Any]) -> list[list[Any]]:
    return [[k.replace("_", " "), v] for k, v in values.items() if not isinstance(v, (list, dict))]


def _section(title: str, columns: list[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    rows = list(rows)
    return [f"## {title}", _table(columns, rows)] if rows else []


def _table(columns: list[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; a column of mostly numbers is set flush right."""
    numbers = [sum(isinstance(row[at], (int, float, _Figure)) for row in rows) for at in range(len(columns))]
    lines = [columns, ["---:" if 2 * count > len(rows) else "---" for count in numbers]]
    lines += [[_value(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _value(value: Any) -> str:
    if isinstance(value, _Markdown):
        return value
    if value is None or value == "":
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _escape(value, 160)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _escape(value: Any, length: int = 80) -> str:
    """One line of text that a Markdown or HTML reader shows as it is, cut to `length` characters."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in str(value)).split())
    text = html.escape(text if len(text) <= length else text[: length - 1] + "…", quote=False)
    text = re.sub(r"([\\`*\[\]|~#$])|(?<![^\W_])_|_(?![^\W_])", lambda found: "\\" + found[0], text)
    return re.sub(r"(?<=[a-z]):(?=//)|(?<=www)\.", lambda found: "\\" + found[0], text, flags=re.IGNORECASE)


def _code(text: str) -> str:
    """What may stand between backticks, in a table too."""
    return re.sub(r"[^\w .:,=+-]", "_", str(text))[:60]


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _sum(parts: Iterable[dict[str, Any]], name: str) -> int:
    return sum(part.get(name) or 0 for part in parts)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}".replace("%", " %") if whole else "0 %"


def _percent(share: float | None) -> str | None:
    return None if share is None else _Figure(_share(share, 1))


def _size(size: float | None) -> str | None:
    return None if size is None else _Figure(EngFormatter("B", places=1)(size))
