"""What a preparation found: the values of `report.json`, `report.md` with its pictures, the data card, the printed end.

Captions, ids and file names come from strangers: all show them as text, never as Markdown, HTML or a formula.
"""

import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, Features
from datasets import Image as ImageFeature
from huggingface_hub import DatasetCardData
from matplotlib.figure import Figure
from PIL import Image, ImageOps

from mm_utils.arguments import launch_command
from mm_utils.command import scripts_folder
from mm_utils.data.faults import NOTES, REASONS
from mm_utils.data.images import UnreadableImageError
from mm_utils.data.media import COLUMNS, FEATURES, kind_of
from mm_utils.data.media.pictures import picture
from mm_utils.data.prepare.arguments import PrepareArguments
from mm_utils.data.prepare.dedup_and_split import Reconciled
from mm_utils.data.prepare.ingest import PART_SCHEMA, read_part
from mm_utils.data.prepare.on_disk import content_fingerprint
from mm_utils.data.prepare.perceptual_hash import hash_of_text
from mm_utils.data.prepare.pipeline import Ingested
from mm_utils.data.rows.columns import too_few
from mm_utils.plots import LIGHT, MUTED, draw_text, save_figure, wrap
from mm_utils.text import byte_size, markdown_table, markdown_text, publishable, redact, without_secrets

CARD = "README.md"
MANY_PAIRS = 100_000  # from which on training all weights is worth more than joining frozen encoders
_EXAMPLES, _SHARED, _SHOWN_PAIRS, _SHOWN_MATCHES = 3, 20, 24, 12
_FEW_EVALUATION = 500  # the 95 % interval of a recall near 50 % is then ±4.4 points wide (1.96 x 50 / sqrt(500))
_FEW_TRAINING = 1000
_TINY_SIDE = 112  # enlarged more than twice for the usual input of 224 pixels
_LONG_CAPTION = 300  # characters: about the 77 tokens at which CLIP's text encoder cuts
_MANY, _SOME = 0.05, 0.01  # shares from which on tiny images or bad rows, and long captions, are worth a warning
_SPREADS = ("short_side", "seconds", "words", "characters")
_WORD = r"[^\s\x0b\x1c-\x1f\x{85}\p{Z}]+"  # the gaps of `str.split()`; RE2's own \s knows ASCII only
_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M")
_TASKS = {
    "image": ["image-to-text", "text-to-image", "zero-shot-image-classification"],
    "clip": ["video-classification"],
    "sound": ["audio-classification"],
}


# -- values -------------------------------------------------------------------------------------------------------------


def summarize(
    args: PrepareArguments, settings: dict[str, Any], ingested: Ingested, found: Reconciled, pairs: DatasetDict
) -> dict[str, Any]:
    """Collect figures of sources, splits, faults, duplicates, leaks, captions and storage, as they may be published."""
    templated = all(tally.source.format == "classes" for tally in ingested.sources.values())
    medium = found.facts["medium"][0].as_py()
    kept = found.facts.take(np.concatenate(list(found.rows.values())))
    of_source = Counter(kept["source"].to_pylist())
    splits, captions = measure(pairs)
    summary = {
        "created": date.today().isoformat(),
        "fingerprint": content_fingerprint(pairs),
        "settings": settings,
        "sources": [
            {
                "name": name,
                "path": tally.source.path,
                "format": tally.source.format,
                "rows": tally.rows,
                "bad": tally.bad,
                "kept": of_source[name],
                "weight": tally.source.weight,
                "share": of_source[name] / max(1, of_source.total()),
            }
            for name, tally in ingested.sources.items()
        ],
        **dict[str, Any]({} if medium == "image" else {"timed": _timed(medium, settings, kept)}),
        "splits": splits,
        "quarantined": _quarantined(ingested.faults + found.faults),
        "notes": dict(ingested.notes.most_common()),
        "duplicates": found.duplicates,
        "leakage": found.leakage,
        "captions": {**captions, "shared": [] if templated else captions["shared"]},
        "storage": _storage(args, kept),
    }
    return without_secrets(summary, publishable)


def measure(pairs: DatasetDict) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return counts and spreads of every split, and the captions of all that differ and that too many images share.

    No image is read. Sizes are those of the original images where they are known.
    """
    splits: dict[str, Any] = {}
    texts: list[pa.Array] = []  # still in their files
    keys, owners, images = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)], 0
    for name, rows in pairs.items():
        original = {"original_width", "original_height"} <= set(rows.column_names)
        sides = ("original_width", "original_height") if original else ("width", "height")
        columns = [column for column in ("image", "captions", "seconds", *sides) if column in rows.column_names]
        values: dict[str, list[Any]] = {column: [np.zeros(0)] for column in _SPREADS}
        first, size = images, 0
        for batch in rows.select_columns(columns).with_format("arrow").iter(1000):
            own = pc.list_flatten(batch["captions"])
            texts += own.chunks
            keys.append(caption_keys(own.to_pylist()))
            owners.append(np.repeat(images + np.arange(len(batch)), pc.list_value_length(batch["captions"])))
            images += len(batch)
            size += pc.sum(pc.binary_length(pc.struct_field(batch["image"], "bytes"))).as_py() or 0
            values["words"].append(pc.count_substring_regex(own, pattern=_WORD).to_numpy())
            values["characters"].append(pc.utf8_length(own).to_numpy())
            if "seconds" in columns:
                values["seconds"].append(batch["seconds"].to_numpy().astype(float))
            if set(sides) <= set(columns):
                side = np.minimum(*(batch[each].to_numpy().astype(float) for each in sides))
                values["short_side"].append(side[side > 0])  # not those that are missing
        joined = {column: np.concatenate(parts) for column, parts in values.items()}
        splits[name] = {
            "images": images - first,
            "captions": len(joined["words"]),
            "bytes": size,
            **{column: _spread(found) for column, found in joined.items() if len(found)},
            "tiny": int((joined["short_side"] < _TINY_SIDE).sum()),
            "long": int((joined["characters"] > _LONG_CAPTION).sum()),
            **({"minutes": float(joined["seconds"].sum() / 60)} if len(joined["seconds"]) else {}),
        }
    keys_M = np.concatenate(keys)
    text = pa.chunked_array(texts, pa.string())
    shared = shared_captions(keys_M, np.concatenate(owners))[:_SHARED]
    return splits, {
        "distinct": len(np.unique(keys_M)),
        "shared": [{"caption": text[row].as_py(), "images": count} for row, count in shared],
    }


def _spread(values: np.ndarray) -> list[float]:
    """Return the median and the 5th and 95th percentile."""
    return [round(float(value), 1) for value in np.quantile(values, (0.5, 0.05, 0.95), method="inverted_cdf")]


def caption_keys(captions: Sequence[str]) -> np.ndarray:
    """Return 64-bit keys [M], equal for captions that differ in case, signs or spacing."""
    wording = _Wording()
    plain = (unicodedata.normalize("NFKC", caption).casefold().translate(wording) for caption in captions)
    return np.frombuffer(b"".join(hash_of_text(" ".join(text.split())) for text in plain), dtype="<u8")


class _Wording(dict[int, str]):
    """A table for `str.translate` that keeps letters, marks, digits and symbols (C++)."""

    def __missing__(self, code: int) -> str:
        category = unicodedata.category(chr(code))
        self[code] = "" if category == "Cf" else " " if category[0] in "PZC" else chr(code)
        return self[code]


def shared_captions(
    keys_M: np.ndarray, images_M: np.ndarray, least: int = 10, share: float = 0.01
) -> list[tuple[int, int]]:
    """Return the first row and the number of images of captions of more than `least` images and `share` of all images.

    Such a caption describes none of them well, and in a batch its images are each other's false negatives.
    """
    order = np.lexsort((images_M, keys_M))
    keys, images = keys_M[order], images_M[order]
    new = np.ones(len(keys), dtype=bool)
    new[1:] = (keys[1:] != keys[:-1]) | (images[1:] != images[:-1])
    _, counts = np.unique(keys[new], return_counts=True)
    _, first = np.unique(keys_M, return_index=True)
    many = np.flatnonzero(counts > max(least, share * len(np.unique(images_M))))
    rows = zip(first[many].tolist(), counts[many].tolist(), strict=True)
    return sorted(rows, key=lambda found: (-found[1], found[0]))


def _timed(medium: str, settings: dict[str, Any], kept: pa.Table) -> dict[str, Any]:
    """Return seconds and rates (before, after) of clips or sounds."""
    rates = Counter(round(rate, 2) for rate in kept["rate"].to_pylist())
    return {
        "medium": medium,
        "seconds": pc.sum(kept["seconds"]).as_py(),
        "longest": pc.max(kept["seconds"]).as_py(),
        "moments": pc.sum(pc.list_value_length(kept["moments"])).as_py() or 0,
        "rate": settings["sound_rate" if medium == "sound" else "clip_fps"],
        "rates": {str(rate): count for rate, count in rates.most_common(_SHARED)},
    }


def _quarantined(faults: list[dict[str, str]]) -> dict[str, Any]:
    """Group the faults by reason, the most frequent first."""
    by_reason: dict[str, list[dict[str, str]]] = defaultdict(list)
    for fault in faults:
        by_reason[fault["reason"]].append(fault)
    return {
        reason: {
            "count": len(those),
            "explanation": REASONS[reason],
            "examples": [{name: fault[name] for name in ("source", "where", "detail")} for fault in those[:_EXAMPLES]],
        }
        for reason, those in sorted(by_reason.items(), key=lambda item: -len(item[1]))
    }


def _storage(args: PrepareArguments, kept: pa.Table) -> dict[str, Any]:
    """Return bytes per pair before and after storing, and the measured loss of quality."""
    losses = kept["psnr"].drop_null().to_numpy()
    return {
        "store": "originals" if args.keep_originals else args.store,
        "short_side": None if args.keep_originals else args.short_side,
        "original_bytes_per_pair": pc.mean(kept["original_bytes"]).as_py(),
        "stored_bytes_per_pair": pc.mean(kept["stored_bytes"]).as_py(),
        "psnr_sample": len(losses),
        **({"psnr_db": {"mean": float(losses.mean()), "p5": float(np.quantile(losses, 0.05))}} if len(losses) else {}),
    }


# -- the printed end ----------------------------------------------------------------------------------------------------


def describe(summary: dict[str, Any], folder: str) -> str:
    """Describe the findings in a few lines, with the next command."""
    medium = _kind(summary)
    images, captions = (_total(summary, name) for name in ("images", "captions"))
    splits = ", ".join(f"{name} {part['images']:,}" for name, part in summary["splits"].items())
    lines = [f"{medium.capitalize()}s: {splits}; {captions:,} captions"]
    if timed := summary.get("timed"):
        rates = ", ".join(f"{float(rate):,g}" for rate in list(timed["rates"])[:_EXAMPLES])
        lines.append(
            f"Seconds: {timed['seconds']:,.0f} in all, at most {timed['longest']:.1f}; kept at {timed['rate']:,g} "
            f"{'samples' if medium == 'sound' else 'frames'} a second, given at {rates}"
            f"{' and others' if len(timed['rates']) > _EXAMPLES else ''}; {timed['moments']:,} moments"
        )
    if summary["quarantined"]:
        reasons = ", ".join(f"{reason} {part['count']:,}" for reason, part in summary["quarantined"].items())
        lines.append(f"Set aside, see {folder}/quarantine.jsonl: {reasons}")
    if summary["notes"]:
        notes = ", ".join(f"{note} {times:,}" for note, times in summary["notes"].items())
        lines.append(f"Repaired or converted: {notes}")
    found = summary["duplicates"]
    merged = f", {count:,} merged" if (count := found["merged_rows"]) else ""
    lines.append(f"Rows of equal {medium}s: {found['exact_rows']:,}{merged}; {found['near_pairs']:,} pairs look alike")
    lines += [
        f"One caption for {one['images']:,} {medium}s, so it describes none of them well: {one['caption'][:80]!r}"
        for one in summary["captions"]["shared"][:_EXAMPLES]
    ]
    storage = summary["storage"]
    before, after = (storage[f"{when}_bytes_per_pair"] / 1e3 for when in ("original", "stored"))
    loss = f", at {storage['psnr_db']['mean']:.1f} dB" if "psnr_db" in storage else ""
    if abs(after - before) > 0.05 * before:
        article = "an" if medium == "image" else "a"
        lines.append(f"Stored: {after:,.1f} kB {article} {medium} instead of {before:,.1f}{loss}")
    if few := too_few(summary["splits"].get("validation", {"images": 0})["images"], medium):
        lines.append(f"{few} Add pairs, or set --validation_fraction.")
    lines += [f"Look at {folder}/report.md", *_next_commands(folder, medium, images)]
    return "\n  ".join([f"{folder}:", *lines])


def _next_commands(folder: str, medium: str, images: int) -> list[str]:
    """Return how to train on so much: by the recipe that pretrain takes by itself, or a CLIP's, or from scratch."""
    words = ["--dataset_name", folder, "--output_dir", f"outputs/{Path(folder).name}"]
    if medium != "image" or images <= MANY_PAIRS:
        return [f"Train on it: {launch_command('pretrain', words)}"]
    recipe = scripts_folder().parent / "recipes/clip.yaml"
    recipe = recipe.relative_to(Path.cwd()) if recipe.is_relative_to(Path.cwd()) else recipe
    scratch = ["--vision_config", "base", "--text_config", "base"]
    starts = {"Train on it": ["--config", str(recipe)], "Or from scratch": scratch}
    return [
        f"{title}: {launch_command('pretrain', [*start, *words], 'accelerate launch')}"
        for title, start in starts.items()
    ]


# -- report.md ----------------------------------------------------------------------------------------------------------


def write_report(
    folder: Path, pairs: DatasetDict, summary: dict[str, Any], removed: Dataset | None = None, seed: int = 0
) -> None:
    """Write `report.md` into `folder`, which exists, and its pictures: random pairs, and media that look alike.

    Args:
        pairs: the prepared rows. Only the images that are shown are read.
        summary: the content of `report.json`.
        removed: `id`, `image` and `captions` of rows that `summary` has as examples and that are not in `pairs`.
        seed: decides which pairs are shown.
    """
    kind = _kind(summary)
    rng = np.random.default_rng(seed)
    share = math.ceil(_SHOWN_PAIRS / max(1, len(pairs)))
    chosen = {name: sorted(rng.permutation(len(rows))[:share].tolist()) for name, rows in pairs.items()}
    shown = [_tile(pairs[name], row, name) for name, rows in chosen.items() for row in rows]
    everything = pairs if removed is None else DatasetDict({**pairs, "removed": removed})
    examples = [pair for part in ("leakage", "duplicates") for pair in summary[part]["examples"][:_SHOWN_MATCHES]]
    sheets = []
    for file, title, tiles in (
        ("pairs.jpg", "Random pairs", shown),
        ("alike.jpg", f"{kind.capitalize()}s that are alike", _matched_tiles(everything, examples)),
    ):
        if tiles:
            draw_contact_sheet(tiles, folder / file)
            sheets += [f"### {title}", f"![contact sheet]({file})"]
    warnings = _look_first(summary)
    if damaged := [title for image, title, _ in shown if image is None]:
        names = markdown_text(", ".join(damaged), 80)
        warnings.insert(0, f"**{_plural(len(damaged), kind)} of those below cannot be decoded**: {names}")
    blocks = [
        "# Report of the data set",
        _opening(summary),
        "## Look at this first",
        "\n".join(f"- {warning}" for warning in warnings) or "Nothing stands out. Do look at the pairs below.",
        "## What it holds",
        _table([_split_row(name, part, kind) for name, part in summary["splits"].items()]),
        "Sides, seconds, words and characters: the median, and in brackets the 5th and 95th percentile.",
        *sheets,
        *_sections(summary),
    ]
    (folder / "report.md").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


def _kind(summary: dict[str, Any]) -> str:
    return summary.get("timed", {}).get("medium", "image")


def _total(summary: dict[str, Any], name: str) -> int:
    return sum(part[name] for part in summary["splits"].values())


def _opening(summary: dict[str, Any]) -> str:
    kind = _kind(summary)
    rows = sum(source["rows"] for source in summary["sources"])
    set_aside = sum(reason["count"] for reason in summary["quarantined"].values())
    copies, dropped = _leaks(summary["leakage"])
    leaks = f"Copies across splits: {_plural(copies, kind)}"
    return " ".join([
        f"**{_total(summary, 'images'):,} {kind}s with {_total(summary, 'captions'):,} captions** were kept from {rows:,} "
        f"rows of {_plural(len(summary['sources']), 'source')}.",
        f"Set aside: {set_aside:,} rows or captions." if set_aside else "Nothing was set aside.",
        f"Merged: {_plural(summary['duplicates']['merged_rows'], 'row')} of equal {kind}s.",
        f"{leaks}; dropped: {_plural(dropped, 'row')}." if dropped or not copies else f"**{leaks}, none dropped.**",
    ])  # fmt: skip


def _leaks(leakage: dict[str, Any]) -> tuple[int, int]:
    """Return the number of images found in two splits, and of the rows dropped for that."""
    copies = sum(leakage.get(kind, 0) for kind in ("exact", "near", "by_id", "by_group"))
    return copies, sum(leakage["dropped"].values())


def _look_first(summary: dict[str, Any]) -> list[str]:
    """Return what a person should know before training as Markdown, the most serious first."""
    kind, images, captions = _kind(summary), _total(summary, "images"), _total(summary, "captions")
    found = []
    copies, dropped = _leaks(summary["leakage"])
    if copies and not dropped:
        found.append("**The splits leak**: an evaluation would measure memory. Prepare with the leaks dropped.")
    for source in summary["sources"]:
        if source["bad"] > _MANY * source["rows"]:
            name = markdown_text(source["name"], 80)
            found.append(f"{source['bad'] / source['rows']:.1%} of the rows of {name} were set aside.")
    for shared in summary["captions"]["shared"][:_EXAMPLES]:
        text = markdown_text(shared["caption"], 100)
        found.append(f"{shared['images']:,} {kind}s share one caption, which tells none from the others: {text}")
    if 2 * (distinct := summary["captions"]["distinct"]) < captions:
        found.append(f"Of {captions:,} captions only {distinct:,} are distinct.")
    if (times := summary["duplicates"]["largest_group"]) > 10:
        found.append(f"One {kind} occurs {times:,} times; look for a placeholder or a logo.")
    found += _small_splits(summary, kind)
    if (tiny := _total(summary, "tiny")) > _MANY * images:
        found.append(f"{tiny / images:.1%} of the {kind}s are shorter than {_TINY_SIDE} pixels on one side.")
    if (long := _total(summary, "long")) > _SOME * captions:
        found.append(
            f"{long / captions:.1%} of the captions have more than {_LONG_CAPTION} characters; a text encoder of 77 tokens "
            "cuts them."
        )
    return found


def _small_splits(summary: dict[str, Any], kind: str) -> Iterable[str]:
    for index, (name, split) in enumerate(summary["splits"].items()):
        title = f"The split {markdown_text(name, 80)} has {_plural(split['images'], kind)}"
        if not index and split["images"] < _FEW_TRAINING:
            yield f"{title}, few to train on."
        elif index and split["images"] < _FEW_EVALUATION:
            points = min(50.0, 1.96 * 50 / max(1, split["images"]) ** 0.5)
            yield f"{title}; the 95 % interval of a recall near 50 % is ±{points:.1f} points."


def _split_row(name: str, split: dict[str, Any], kind: str) -> dict[str, Any]:
    spreads = {
        column.replace("_", " "): "{:,g} ({:,g} to {:,g})".format(*split[column])
        for column in _SPREADS
        if column in split
    }
    minutes = {"minutes in all": round(split["minutes"], 1)} if "minutes" in split else {}
    counts = {"split": name, f"{kind}s": split["images"], "captions": split["captions"]}
    return {**counts, **spreads, **minutes, "size": byte_size(split["bytes"])}


def _sections(summary: dict[str, Any]) -> list[str]:
    """Return a heading and a table for each part of the summary that is not empty; `report.json` has all of it."""
    leaks = {name: count for name, count in summary["leakage"].items() if isinstance(count, int)}
    tables = {
        "Sources": summary["sources"],
        "Set aside": [
            {
                "reason": name,
                "count": reason["count"],
                "what it means": reason["explanation"],
                "for example": "; ".join(", ".join(filter(None, one.values())) for one in reason["examples"]),
            }
            for name, reason in summary["quarantined"].items()
        ],
        "Converted": [
            {"note": name, "times": count, "what was done": NOTES.get(name)}
            for name, count in summary["notes"].items()
        ],
        "Duplicates": [{key: count for key, count in summary["duplicates"].items() if isinstance(count, int)}],
        "Leakage between splits": [leaks] if leaks else [],
        "Captions of several images": summary["captions"]["shared"],
        "How it was made": [{"flag": name, "value": value} for name, value in summary["settings"].items()],
    }
    return [part for title, rows in tables.items() if rows for part in (f"## {title}", _table(rows))]


def _table(rows: list[dict[str, Any]]) -> str:
    return markdown_table(list(rows[0]) if rows else [], [[_cell(value) for value in row.values()] for row in rows])


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "–" if value in (None, "") else markdown_text(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


# -- pictures -----------------------------------------------------------------------------------------------------------

Tile = tuple[Image.Image | None, str, str]
"""A picture of a contact sheet, None for a grey field, its title and its text."""


def draw_contact_sheet(tiles: Sequence[Tile], out_path: Path) -> None:
    """Draw tiles, six in a row, as a JPEG."""
    side, below, gap = 1.5, 0.94, 0.14  # inches
    columns = min(6, len(tiles))
    width, height = gap + columns * (side + gap), gap + math.ceil(len(tiles) / columns) * (side + below)
    figure = Figure(figsize=(width, height), dpi=120, facecolor="white")
    for index, (image, title, text) in enumerate(tiles):
        row, column = divmod(index, columns)
        left, bottom = gap + column * (side + gap), height - gap - (row + 1) * (side + below)
        ax = figure.add_axes((left / width, bottom / height, side / width, (side + below) / height))
        ax.set_axis_off()
        field = Image.new("RGB", (180, 180), LIGHT)
        if image is not None:
            field = ImageOps.pad(image.convert("RGB"), field.size, color="#f8fafc")
        ax.imshow(np.asarray(field), extent=(0, side, 0, side))
        ax.set(xlim=(0, side), ylim=(-below, side))
        if len(title) > 28:  # one line, with its end
            title = f"{title[:9]}…{title[-18:]}"
        draw_text(ax, 0, -0.05, wrap(title, 28, 1), va="top", fontsize=6.5, color=MUTED, clip_on=True)
        draw_text(ax, 0, -0.19, wrap(text, 24, 5), va="top", fontsize=7.5, clip_on=True)
    # 24 photographs take 200 kB, and as a PNG five times that.
    save_figure(figure, out_path, pil_kwargs={"quality": 75, "optimize": True})


def _matched_tiles(pairs: DatasetDict, matches: Iterable[Sequence[str]]) -> list[Tile]:
    """Return two tiles for each pair of ids in `matches`; an id twice means two rows of that id."""
    places: dict[str, list[tuple[str, int]]] = {key: [] for match in matches for key in match}
    for name, split in pairs.items() if places else ():
        ids = (key for batch in split.select_columns(["id"]).iter(10_000) for key in batch["id"])
        for row, key in enumerate(ids):
            if key in places:
                places[key].append((name, row))
    both = ([*places[one][:1], *places[two][one == two :][:1]] for one, two in matches)
    return [_tile(pairs[name], row, name) for found in both if len(found) == 2 for name, row in found]


def _tile(split: Dataset, row: int, name: str) -> Tile:
    """Return the tile of a row with its first caption, titled by its split and id."""
    kind, split = kind_of(split.features), split.with_format(None).select([row])
    pair = (split.cast_column("image", ImageFeature(decode=False)) if kind == "image" else split)[0]
    try:
        image = picture(pair["image"] or {}, kind)
    except UnreadableImageError:
        image = None
    return image, f"{name}: {pair['id']}", next(filter(None, pair["captions"]), "")


def removed_examples(found: Reconciled, parts: Sequence[Path]) -> Dataset:
    """Return the rows that the findings name as examples and that are not kept."""
    wanted = {name for part in (found.duplicates, found.leakage) for pair in part["examples"] for name in pair}
    gone = np.ones(len(found.facts), dtype=bool)
    gone[np.concatenate(list(found.rows.values()))] = False
    named = pc.is_in(found.facts["name"], pa.array(sorted(wanted), pa.string())).to_numpy()
    rows = np.flatnonzero(named & gone)
    begins = np.cumsum([0, *(len(read_part(part, ["width"])) for part in parts)])
    images = [
        read_part(parts[part], ["image"]).slice(row - begins[part], 1)
        for row, part in zip(rows, np.searchsorted(begins, rows, side="right") - 1, strict=True)
    ]
    image = pa.concat_tables([pa.schema([PART_SCHEMA.field("image")]).empty_table(), *images])["image"]
    facts = found.facts.select(["name", "captions"]).take(rows)
    table = pa.table({"id": facts["name"].cast(pa.string()), "image": image, "captions": facts["captions"]})
    features = Features.from_arrow_schema(table.schema)
    features["image"] = FEATURES[found.facts["medium"][0].as_py()]
    return Dataset(table.cast(features.arrow_schema))


# -- the card -----------------------------------------------------------------------------------------------------------


def write_data_card(
    folder: Path, name: str, pairs: DatasetDict, summary: dict[str, Any], license: str | None = None
) -> None:
    """Write a prepared folder's `README.md`: for the Hub, `load_dataset`, and with the text of its `report.md`.

    Args:
        name: the title.
        summary: the content of `report.json`.
        license: an identifier of the Hub; None if it is not known.
    """
    images, features = sum(map(len, pairs.values())), next(iter(pairs.values())).features
    kind = kind_of(features)
    columns: dict[str, Any] = {}
    if summary["storage"]["store"] != "raw":  # whose pixels stay bytes
        decoded = Features({COLUMNS[kind] if name == "image" else name: each for name, each in features.items()})
        decoded[COLUMNS[kind]] = type(FEATURES[kind])()
        columns = {"dataset_info": {"features": decoded._to_yaml_list()}}
    front = DatasetCardData(
        license=license,
        size_categories=next((size for power, size in enumerate(_SIZES, 3) if images < 10**power), "n>100M"),
        task_categories=_TASKS[kind],
        tags=[f"{COLUMNS[kind]}-text-pairs", f"{COLUMNS[kind]}-text-retrieval"],
        configs=[
            {
                "config_name": "default",
                "data_files": [{"split": split, "path": f"{split}/*.arrow"} for split in pairs],
            }
        ],
        **columns,
    )
    terms = f"Licence: {license}." if license else "Licence: not stated. Images and captions belong to their authors."
    report = (folder / "report.md").read_text(encoding="utf-8").partition("\n")[2].strip()
    parts = [
        f"---\n{front.to_yaml()}\n---",
        f"# {markdown_text(redact(name))}",
        f"{kind.capitalize()}s with their captions, checked, and prepared with Tandem: `datasets.load_dataset` opens them. {terms}",
        redact(report),
    ]
    (folder / CARD).write_text("\n\n".join(parts) + "\n", encoding="utf-8")
