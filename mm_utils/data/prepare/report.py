"""Write the readable report of a prepared data set: content, faults and example pairs.

Captions, ids and file names come from strangers: the report shows them as text, never as Markdown, HTML or a formula.
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, Features

from mm_utils.data.faults import NOTES
from mm_utils.data.media import FEATURES, kind_of
from mm_utils.data.prepare.dedup_and_split import Reconciled
from mm_utils.data.prepare.ingest import PART_SCHEMA, read_part
from mm_utils.data.prepare.pictures import (
    PairStatistics,
    draw_contact_sheet,
    matched_tiles,
    mean,
    measure_pairs,
    quantile,
    random_tiles,
)
from mm_utils.text import markdown_table, markdown_text

_FEW_EVALUATION = 500  # the 95 % interval of a recall near 50 % is then ±4.4 points wide (1.96 x 50 / sqrt(500))
_FEW_TRAINING = 1000
_TINY_SIDE = 112  # enlarged more than twice for the usual input of 224 pixels
_LONG_CAPTION = 300  # characters: about the 77 tokens at which CLIP's text encoder cuts
_MANY, _SOME = 0.05, 0.01  # shares from which on tiny images or bad rows, and long captions, are worth a warning
_SHOWN_PAIRS, _SHOWN_SPLITS, _SHOWN_MATCHES = 24, 4, 12
_SHOWN_ELSEWHERE = ("examples", "shared")  # parts of the summary that have their own table or picture


def write_report(
    folder: Path, pairs: DatasetDict, summary: dict[str, Any], removed: Dataset | None = None, seed: int = 0
) -> None:
    """Write `report.md` and its pictures into `folder`, which exists.

    Args:
        folder: receives `report.md`, a contact sheet `pairs_SPLIT.jpg` of each of the first four
            splits and, where `summary` has examples, `duplicates.jpg` and `leakage.jpg`.
        pairs: the prepared rows. Only the images that are shown are read.
        summary: the content of `report.json`.
        removed: `id`, `image` and `captions` of rows that `summary` has as examples and that are not in `pairs`.
        seed: decides which pairs are shown.
    """
    measured = {name: measure_pairs(split) for name, split in pairs.items()}
    sheets, damaged = _draw_sheets(folder, pairs, summary, removed, seed)
    kind = _kind(measured)
    warnings = [*_warn_of_summary(summary, measured), *_warn_of_pairs(measured)]
    if damaged:
        count = _plural(len(damaged), kind)
        warnings.insert(0, f"**{count} of those below cannot be decoded**: {markdown_text(', '.join(damaged), 80)}")
    blocks = [
        "# Report of the data set",
        _opening(summary, measured),
        "## Look at this first",
        "\n".join(f"- {warning}" for warning in warnings) or "Nothing stands out. Do look at the pairs below.",
        "## What it holds",
        _statistics_table(measured, summary["splits"]),
        f"{'Short side' if kind == 'image' else 'Seconds'}, words and characters: the median, and in brackets the 5th and 95th percentile.",
        *sheets,
        *_sections(summary),
    ]
    (folder / "report.md").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


def _opening(summary: dict[str, Any], measured: dict[str, PairStatistics]) -> str:
    images, captions = _totals(measured)
    kind = _kind(measured)
    rows = sum(source["rows"] for source in summary["sources"])
    set_aside = sum(reason["count"] for reason in summary["quarantined"].values())
    copies, dropped = _leaks(summary["leakage"])
    leaks = f"Copies across splits: {_plural(copies, kind)}"
    sentences = [
        f"**{images:,} {kind}s with {captions:,} captions** were kept from {rows:,} rows of "
        f"{_plural(len(summary['sources']), 'source')}.",
        f"Set aside: {set_aside:,} rows or captions." if set_aside else "Nothing was set aside.",
        f"Merged: {_plural(summary['duplicates']['merged_rows'], 'row')} of equal {kind}s.",
        f"{leaks}; dropped: {_plural(dropped, 'row')}." if dropped or not copies else f"**{leaks}, none dropped.**",
    ]
    return " ".join(sentences)


def _leaks(leakage: dict[str, Any]) -> tuple[int, int]:
    """Return the number of images found in two splits, and of the rows dropped for that."""
    return sum(leakage.get(kind, 0) for kind in ("exact", "near", "by_id", "by_group")), sum(
        leakage["dropped"].values()
    )


def _kind(measured: dict[str, PairStatistics]) -> str:
    return next((split.kind for split in measured.values()), "image")


def _totals(measured: dict[str, PairStatistics]) -> tuple[int, int]:
    return sum(split.images for split in measured.values()), sum(split.captions for split in measured.values())


def _warn_of_summary(summary: dict[str, Any], measured: dict[str, PairStatistics]) -> list[str]:
    """Return what a person should know before training as Markdown, the most serious first."""
    found = []
    copies, dropped = _leaks(summary["leakage"])
    if copies and not dropped:
        found.append("**The splits leak**: an evaluation would measure memory. Prepare with the leaks dropped.")
    for source in summary["sources"]:
        if source["bad"] > _MANY * source["rows"]:
            name = markdown_text(source["name"], 80)
            found.append(f"{_percent(source['bad'] / source['rows'])} of the rows of {name} were set aside.")
    images, captions = _totals(measured)
    kind = _kind(measured)
    for shared in summary["captions"]["shared"][:3]:
        if shared["images"] > max(10, 0.01 * images):
            text = markdown_text(shared["caption"], 100)
            found.append(f"{shared['images']:,} {kind}s share one caption, which tells none from the others: {text}")
    distinct = summary["captions"]["distinct"]
    if 2 * distinct < captions:
        found.append(f"Of {captions:,} captions only {distinct:,} are distinct.")
    if (times := summary["duplicates"]["largest_group"]) > 10:
        found.append(f"One {kind} occurs {times:,} times; look for a placeholder or a logo.")
    return found


def _warn_of_pairs(measured: dict[str, PairStatistics]) -> list[str]:
    found = []
    for index, (name, split) in enumerate(measured.items()):
        title = f"The split {markdown_text(name, 80)} has {_plural(split.images, split.kind)}"
        if not index and split.images < _FEW_TRAINING:
            found.append(f"{title}, few to train on.")
        elif index and split.images < _FEW_EVALUATION:
            points = min(50.0, 1.96 * 50 / max(1, split.images) ** 0.5)
            found.append(f"{title}; the 95 % interval of a recall near 50 % is ±{points:.1f} points.")
    images, captions = _totals(measured)
    tiny = sum(n for split in measured.values() for side, n in split.short_side.items() if side < _TINY_SIDE)
    if tiny > _MANY * images:
        found.append(
            f"{_percent(tiny / images)} of the {_kind(measured)}s are shorter than {_TINY_SIDE} pixels on one side."
        )
    long = sum(n for split in measured.values() for size, n in split.characters.items() if size > _LONG_CAPTION)
    if long > _SOME * captions:
        found.append(
            f"{_percent(long / captions)} of the captions have more than {_LONG_CAPTION} characters; "
            "a text encoder of 77 tokens cuts them."
        )
    return found


def _statistics_table(measured: dict[str, PairStatistics], splits: dict[str, Any]) -> str:
    from matplotlib.ticker import EngFormatter

    def spread(counts: Counter[int]) -> str | None:
        median, low, high = (f"{quantile(counts, share):,}" for share in (0.5, 0.05, 0.95))
        return f"{median} ({low} to {high})" if counts else None

    def extent(split: PairStatistics) -> dict[str, str | None]:
        if split.kind == "image":
            return {"short side": spread(split.short_side)}
        median, low, high = (f"{quantile(split.seconds, share) / 10:g}" for share in (0.5, 0.05, 0.95))
        minutes = mean(split.seconds) * split.seconds.total() / 600
        return {"seconds": f"{median} ({low} to {high})", "minutes in all": f"{minutes:,.1f}"}

    return _table([
        {
            "split": name,
            f"{split.kind}s": split.images,
            "captions": split.captions,
            f"captions per {split.kind}": mean(split.captions_per_image),
            **extent(split),
            "words": spread(split.words),
            "characters": spread(split.characters),
            "size": EngFormatter("B", places=1)(splits[name]["bytes"]),
        }
        for name, split in measured.items()
    ])  # fmt: skip


def _sections(summary: dict[str, Any]) -> list[str]:
    """Return a heading and a table for each part of the summary that is not empty."""
    tables = {
        "Sources": summary["sources"],
        "Set aside": [
            {
                "reason": name,
                "count": reason["count"],
                "what it means": reason["explanation"],
                "for example": "; ".join(map(_describe, reason["examples"])),
            }
            for name, reason in summary["quarantined"].items()
        ],
        "Converted": [
            {"note": name, "times": count, "what was done": NOTES.get(name)}
            for name, count in summary["notes"].items()
        ],
        "Duplicates": _flat(summary["duplicates"]),
        "Leakage between splits": _flat(summary["leakage"]),
        "Captions": _flat(summary["captions"]),
        "Captions of several images": summary["captions"]["shared"],
        "Storage": _flat(summary["storage"]),
        "How it was made": _flat(summary["settings"]),
    }
    return [part for title, rows in tables.items() if rows for part in (f"## {title}", _table(rows))]


def _describe(example: dict[str, str]) -> str:
    return ", ".join(example[key] for key in ("source", "where", "detail") if example[key])


def _flat(values: dict[str, Any], prefix: str = "") -> list[dict[str, Any]]:
    """Return a row for each value, those of nested dictionaries included."""
    rows: list[dict[str, Any]] = []
    for name, value in values.items():
        title = prefix + name.replace("_", " ")
        if name in _SHOWN_ELSEWHERE or value is None:
            continue
        if isinstance(value, dict):
            rows += _flat(value, f"{title}, ")
        else:
            rows.append({"name": title, "value": value})
    return rows


def _table(rows: list[dict[str, Any]]) -> str:
    return markdown_table(list(rows[0]) if rows else [], [[_cell(value) for value in row.values()] for row in rows])


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return markdown_text(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _draw_sheets(
    folder: Path, pairs: DatasetDict, summary: dict[str, Any], removed: Dataset | None, seed: int
) -> tuple[list[str], list[str]]:
    """Draw all contact sheets; return their Markdown and the ids of unreadable images."""
    blocks: list[str] = []
    damaged: list[str] = []
    for index, name in enumerate(list(pairs)[:_SHOWN_SPLITS]):
        if tiles := random_tiles(pairs[name], _SHOWN_PAIRS, seed + index):
            damaged += [tile.title for tile in tiles if tile.image is None]
            file = f"pairs_{name if re.fullmatch('[0-9A-Za-z_.-]{1,60}', name) else index}.jpg"
            draw_contact_sheet(tiles, folder / file)
            blocks += [f"### Random pairs of {markdown_text(name, 80)}", f"![contact sheet]({file})"]
    everything = pairs if removed is None else DatasetDict({**pairs, "removed": removed})
    media = f"{kind_of(next(iter(pairs.values())).features).capitalize()}s"
    alike = f"{media} that {'sound' if media == 'Sounds' else 'look'} alike"
    for part, title in (("duplicates", alike), ("leakage", f"{media} found in two splits")):
        if tiles := matched_tiles(everything, summary[part]["examples"][:_SHOWN_MATCHES]):
            draw_contact_sheet(tiles, folder / f"{part}.jpg", columns=4, group=2)
            blocks += [f"### {title}", f"![contact sheet]({part}.jpg)"]
    return blocks, damaged


def removed_examples(found: Reconciled, parts: Sequence[Path]) -> Dataset:
    """Return the rows that the findings name as examples and that are not kept."""
    wanted = {name for part in (found.duplicates, found.leakage) for pair in part["examples"] for name in pair}
    kept = np.zeros(len(found.facts), dtype=bool)
    kept[np.concatenate(list(found.rows.values()))] = True
    named = pc.is_in(found.facts["name"], pa.array(sorted(wanted), pa.string())).to_numpy()
    rows = np.flatnonzero(named & ~kept)
    begins = np.cumsum([0, *(len(read_part(part, ["width"])) for part in parts)])
    images = [
        read_part(parts[part], ["image"]).slice(row - begins[part], 1)
        for row, part in zip(rows, np.searchsorted(begins, rows, side="right") - 1, strict=True)
    ]
    table = pa.concat_tables(images) if images else pa.schema([PART_SCHEMA.field("image")]).empty_table()
    own = {name: [found.facts[name][row].as_py() for row in rows.tolist()] for name in ("name", "captions")}
    captions = pa.array(own["captions"], PART_SCHEMA.field("captions").type)
    named_table = pa.table({"id": pa.array(own["name"], pa.string()), "image": table["image"], "captions": captions})
    features = Features.from_arrow_schema(named_table.schema)
    features["image"] = FEATURES[found.facts["medium"][0].as_py()]
    return Dataset(named_table.cast(features.arrow_schema))
