"""What a preparation found: the values of `report.json`, `report.md` with its contact sheet, the data card, the printed end.

Captions, ids and file names come from strangers: all show them as text, never as Markdown, HTML or a formula.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, Features
from huggingface_hub import DatasetCardData
from matplotlib.figure import Figure
from PIL import Image, ImageOps

from mm_utils.arguments import launch_command
from mm_utils.data.arguments import LoaderArguments
from mm_utils.data.faults import NOTES, REASONS
from mm_utils.data.media import COLUMNS, FEATURES, kind_of
from mm_utils.data.media.pictures import picture
from mm_utils.data.prepare.arguments import PrepareArguments
from mm_utils.data.prepare.dedup_and_split import LEAKS, Reconciled, places_of
from mm_utils.data.prepare.ingest import Ingested
from mm_utils.data.rows.columns import NEGATIVES, count_held_out, too_few
from mm_utils.plots import MUTED, draw_text, save_figure, wrap
from mm_utils.text import byte_size, caption_key, markdown_table, markdown_text, publishable, redact, without_secrets

CARD = "README.md"
Summary = dict[str, Any]
_BESIDE = ("regions", "moments", NEGATIVES)  # columns that a set may have
_SHARED = 3
_SHOWN_PAIRS = 24
_EXAMPLES = 3  # of a reason
_TITLE = 25  # letters below a picture of the contact sheet
_FEW_GROUPS = 10  # of which a tenth is none
_FEW_TRAINING = 300
_TOO_FEW_TRAINING = 50  # README: "50 pairs are enough to begin"
_FEW_NEIGHBOURS = 5  # rows outside train that are like one of train by chance
_MANY_NEIGHBOURS = 0.1  # share of them that is worth a word
_MOST = LoaderArguments.max_seq_length  # two of them are special tokens
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+|[^\w\s]")  # what is at least one token
_NOT_LATIN = re.compile(r"[^\W\d_\u0000-\u024f\u1e00-\u1eff]")
_MANY_BAD = 0.05  # share of a source's rows from which on it is worth a warning
_TASKS = {
    "image": ["image-to-text", "text-to-image", "zero-shot-image-classification"],
    "clip": ["video-classification"],
    "sound": ["audio-classification"],
}


def summarize(
    args: PrepareArguments,
    settings: Summary,
    ingested: Ingested,
    found: Reconciled,
    pairs: DatasetDict,
    earlier: pa.Table,
) -> Summary:
    """Collect figures of sources, splits, faults, duplicates, leaks, captions and storage, as they may be published."""
    of_source = Counter(found.facts["source"].take(np.concatenate(list(found.rows.values()))).to_pylist())
    ungrouped = Counter(found.facts["source"].filter(pc.is_null(found.facts["group"])).to_pylist())
    splits, captions = measure(pairs)
    if all(source.format == "classes" for source in ingested.sources.values()):
        captions["shared"] = []  # as their templates are meant to be
    quarantined: dict[str, Summary] = {}
    for fault in ingested.faults + found.faults:
        reason = fault["reason"]
        group = quarantined.setdefault(reason, {"count": 0, "explanation": REASONS[reason], "examples": []})
        group["count"] += 1
        if group["count"] <= _EXAMPLES:
            group["examples"].append({name: fault[name] for name in ("source", "where", "detail")})
    summary = {
        "created": date.today().isoformat(),
        "settings": settings,
        "medium": found.facts["medium"][0].as_py(),
        "sources": [
            {
                "name": name,
                "path": source.path,
                "format": source.format,
                "rows": ingested.rows[name],
                "bad": ingested.bad[name],
                "kept": of_source[name],
            }
            for name, source in ingested.sources.items()
        ],
        "splits": splits,
        "own_splits": found.facts["split"].null_count == 0,
        "ungrouped": {name: ungrouped[name] for name, source in ingested.sources.items() if source.group_column},
        "quarantined": dict(sorted(quarantined.items(), key=lambda item: -item[1]["count"])),
        "notes": dict(ingested.notes.most_common()),
        "duplicates": found.duplicates,
        "leakage": found.leakage,
        "captions": captions,
        "storage": {"store": "originals" if args.keep_originals else args.store, "short_side": args.short_side},
    }
    if len(earlier):
        summary["overwritten"] = compare(pairs, earlier)
    return without_secrets(summary, publishable)


def measure(pairs: DatasetDict) -> tuple[Summary, Summary]:
    """Return the counts of every split, and the captions of all that differ and that too many images share; no image is read."""
    splits: Summary = {}
    texts: list[pa.Array] = []  # still in their files
    keys = [np.zeros(0, np.int64)]
    owners = [np.zeros(0, np.int64)]
    images = 0
    lengths = list[int]()
    foreign = 0
    for name, rows in pairs.items():
        beside = [column for column in _BESIDE if column in rows.column_names]
        split = splits[name] = {"images": len(rows), "captions": 0, "bytes": 0, **dict.fromkeys(beside, 0)}
        for batch in rows.select_columns(["image", "captions", *beside]).with_format("arrow").iter(1000):
            own = pc.list_flatten(batch["captions"])
            texts += own.chunks
            words = own.to_pylist()
            keys.append(np.array([caption_key(text) for text in words], np.int64))
            lengths += [len(_WORD.findall(text)) for text in words if len(text) > _MOST - 2]
            # more than a third of the characters
            foreign += sum(3 * len(_NOT_LATIN.findall(text)) > len(text) for text in words if not text.isascii())
            owners.append(np.repeat(images + np.arange(len(batch)), pc.list_value_length(batch["captions"])))
            images += len(batch)
            split["captions"] += len(own)
            for column in beside:
                split[column] += pc.sum(pc.list_value_length(batch[column])).as_py() or 0
            split["bytes"] += pc.sum(pc.binary_length(pc.struct_field(batch["image"], "bytes"))).as_py() or 0
    keys_M = np.concatenate(keys)
    text = pa.chunked_array(texts, pa.string())
    _, first = np.unique(keys_M, return_index=True)
    # each caption of an image once, then the images of each caption
    _, counts = np.unique(np.unique(np.stack([keys_M, np.concatenate(owners)]), axis=1)[0], return_counts=True)
    # Such a caption describes none of its images well, and in a batch these are each other's false negatives.
    many = np.flatnonzero(counts > max(10, 0.01 * images)).tolist()
    shared = sorted(many, key=lambda at: (-counts[at], first[at]))[:_SHARED]
    return splits, {
        "distinct": len(first),
        "long": sum(length > _MOST - 2 for length in lengths),
        "longest": max(lengths, default=0),
        "not_latin": foreign,
        "shared": [{"caption": text[int(first[at])].as_py(), "images": int(counts[at])} for at in shared],
    }


def compare(pairs: DatasetDict, earlier: pa.Table) -> dict[str, int]:
    """Count the rows that are new, gone and kept since the `earlier_rows`, and of these the changed ones and those in another split."""
    before = earlier["split"].to_pylist()
    contents = earlier["content_id"].to_pylist()
    kept: list[tuple[str, int]] = []
    changed = 0
    for split, rows in pairs.items():
        own = rows.select_columns(["id", "image_hash", "content_id"]).with_format("arrow")[:]
        for place, content in zip(places_of(own, earlier).tolist(), own["content_id"].to_pylist(), strict=True):
            if place >= 0:
                kept.append((split, place))
                changed += content != contents[place]
    return {
        "rows": len(earlier),
        "new": sum(map(len, pairs.values())) - len(kept),
        "gone": len(earlier) - len({place for _, place in kept}),
        "kept": len(kept),
        "changed": changed,
        "moved": sum(before[place] != split for split, place in kept),
    }


def describe(summary: Summary, folder: str) -> str:
    """Describe the findings in a few lines, with the next command."""
    splits = ", ".join(f"{name} {part['images']:,}" for name, part in summary["splits"].items())
    beside = [column for column in _BESIDE if _total(summary, column)]
    counted = ", ".join(f"{_total(summary, column):,} {column}" for column in ("captions", *beside))
    lines = [f"{summary['medium'].capitalize()}s: {splits}; {counted}"]
    if before := summary.get("overwritten"):
        lines.append(
            f"Overwritten: {before['rows']:,} rows. {before['new']:,} are new, {before['gone']:,} gone, {before['kept']:,} kept, "
            f"{before['changed']:,} of them changed and {before['moved']:,} in another split than before. Runs that have cached features cache them again."
        )
    if summary["quarantined"]:
        reasons = ", ".join(f"{reason} {part['count']:,}" for reason, part in summary["quarantined"].items())
        lines.append(f"Set aside, see {folder}/quarantine.jsonl: {reasons}")
    lines += [*_look_first(summary), f"Look at {folder}/report.md"]
    own = (f"outputs/{Path(folder).name}{'' if number == 1 else f'-{number}'}" for number in itertools.count(1))
    words = ["--dataset_name", folder, "--output_dir", next(path for path in own if not Path(path).exists())]
    lines.append(f"Train on it: {launch_command('pretrain', words)}")
    return "\n  ".join([f"{folder}:", *lines])


def write_report(folder: Path, pairs: DatasetDict, summary: Summary) -> None:
    """Write `report.md`, and `pairs.jpg`, a contact sheet of random pairs; only the images that are shown are read."""
    kind = summary["medium"]
    rng = np.random.default_rng(0)
    share = math.ceil(_SHOWN_PAIRS / max(1, len(pairs)))  # 8 of each of three splits
    chosen = {name: sorted(rng.permutation(len(rows))[:share].tolist()) for name, rows in pairs.items()}
    draw_contact_sheet(
        [_tile(pairs[name], row, name) for name in chosen for row in chosen[name]], folder / "pairs.jpg"
    )
    rows = sum(source["rows"] for source in summary["sources"])
    set_aside = sum(reason["count"] for reason in summary["quarantined"].values())
    copies, dropped = _leaks(summary["leakage"])
    opening = [
        f"**{_total(summary, 'images'):,} {kind}s with {_total(summary, 'captions'):,} captions** were kept from {rows:,} "
        f"rows of {_plural(len(summary['sources']), 'source')}.",
        f"Set aside: {set_aside:,} {'row or caption' if set_aside == 1 else 'rows or captions'}.",
        f"Merged: {_plural(summary['duplicates']['merged_rows'], 'row')} of equal {kind}s.",
        f"Copies across splits: {_plural(copies, kind)}; dropped: {_plural(dropped, 'row')}.",
    ]
    tables = {
        "What it holds": [
            _row_of_split(name, part, kind) for name, part in summary["splits"].items()
        ],
        "Sources": summary["sources"],
        "Set aside": [
            {
                "reason": name,
                "count": reason["count"],
                "what it means": reason["explanation"],
                "for example": "; ".join(map(_shown, reason["examples"])),
            }
            for name, reason in summary["quarantined"].items()
        ],
        "Converted": [
            {"note": name, "times": count, "what was done": NOTES.get(name)}
            for name, count in summary["notes"].items()
        ],
        "Pairs that look alike": [{"one": a, "other": b} for a, b in summary["duplicates"]["examples"]],
    }
    blocks = [
        "# Report of the data set",
        " ".join(opening),
        "## Look at this first",
        "\n".join(f"- {markdown_text(warning)}" for warning in _look_first(summary))
        or "Nothing stands out. Do look at the pairs below.",
        "![random pairs](pairs.jpg)",
        *(part for title, rows in tables.items() if rows for part in (f"## {title}", _table(rows))),
    ]
    (folder / "report.md").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


def _row_of_split(name: str, part: Summary, kind: str) -> Summary:
    """Return what a split holds, as a row of the report."""
    counts = {column: part[column] for column in ("captions", *_BESIDE) if column in part}
    return {"split": name, f"{kind}s": part["images"], **counts, "size": byte_size(part["bytes"])}


def _total(summary: Summary, name: str) -> int:
    return sum(part.get(name, 0) for part in summary["splits"].values())


def _leaks(leakage: Summary) -> tuple[int, int]:
    """Return the number of images found in two splits, and of the rows dropped for that."""
    return sum(leakage.get(kind, 0) for kind in LEAKS), sum(leakage["dropped"].values())


def _look_first(summary: Summary) -> list[str]:
    """Return what a person should know before training, the most serious first, in the words of the sources."""
    kind = summary["medium"]
    captions = _total(summary, "captions")
    found = []
    copies, dropped = _leaks(summary["leakage"])
    if copies and not dropped:
        found.append("The splits leak: an evaluation would measure memory. Prepare with --on_leakage drop.")
    for source in summary["sources"]:
        if source["bad"] > _MANY_BAD * source["rows"]:
            found.append(f"{source['bad'] / source['rows']:.1%} of the rows of {source['name']} were set aside.")
    found += _of_captions(summary["captions"], captions, kind)
    if (times := summary["duplicates"]["largest_group"]) > 10:
        found.append(f"One {kind} occurs {times:,} times; look for a placeholder or a logo.")
    if other_files := summary["duplicates"]["merged_files"]:
        found.append(other_files)
    found += _splits_first(summary)
    if markup := summary["notes"].get("caption_markup"):
        found.append(
            f"HTML tags or entities, such as &amp;, were kept in {_plural(markup, 'caption')}; html.unescape() mends entities."
        )
    return found


def _splits_first(summary: Summary) -> list[str]:
    """Return what a person should know of the splits."""
    kind = summary["medium"]
    splits = summary["splits"]
    has_own = summary["own_splits"]
    beside = summary["duplicates"]["neighbours"]
    found = [
        f"{count:,} rows of {name} have no value in its group_column; each is divided by itself."
        for name, count in summary["ungrouped"].items()
        if count
    ]
    if beside["count"] >= max(_FEW_NEIGHBOURS, _MANY_NEIGHBOURS * beside["outside"]):
        found.append(
            f"{beside['count']:,} {kind}s outside train look like one in train whose name differs in a number "
            f"alone, such as {beside['example']}. If they are frames of one film or pages of one book, keep these in one split: name "
            "the column that says which film it is, by group_column=."
        )
    if (images := splits.get("train", {"images": 0})["images"]) < _FEW_TRAINING:
        what = "which is a beginning"
        if images < _TOO_FEW_TRAINING:
            what = f"too few to learn from ({_TOO_FEW_TRAINING} are a beginning)"
        found.append(f"The split train has {_plural(images, kind)}, {what}: {_FEW_TRAINING} and more are better.")
    if "validation" not in splits:
        held = f"training will hold out {_plural(count_held_out(images), kind)} of train"
        found.append(f"There is no validation split, and {held}; {_missing_split('validation', summary)}.")
    for name in ("validation", "test"):
        if name in splits and (few := too_few(splits[name]["images"], kind, f"The {name} split")):
            found.append(
                f"{few} {f'Name more rows {name} in the column split.' if has_own else f'Add pairs, or set --{name}_fraction.'}"
            )
    if "test" not in splits:
        found.append(f"There is no test split; {_missing_split('test', summary)}.")
    return found


def _missing_split(split: str, summary: Summary) -> str:
    """Return what makes a split, or why its share made none."""
    by_name = f"name some rows {split}, in a column split or by their folder"
    groups = summary["duplicates"]["groups"]
    has_share = summary["settings"][f"{split}_fraction"] != 0
    if not has_share and groups >= _FEW_GROUPS:
        return f"--{split}_fraction 0.1 makes one"
    if summary["own_splits"] or not (has_share or summary["ungrouped"]):
        return by_name
    held = f"{_plural(groups, 'group')} of equal {summary['medium']}s or of group_column"
    return f"the rows are in {held}, none of which is divided: add groups, or {by_name}"


def _of_captions(captions: Summary, total: int, kind: str) -> Iterator[str]:
    """Yield what stands out in `total` captions that were measured."""
    for shared in captions["shared"]:
        text = shared["caption"][:100]
        yield f"{shared['images']:,} {kind}s share one caption, which tells none from the others: {text}"
    if 2 * captions["distinct"] < total:
        yield f"Of {total:,} captions only {captions['distinct']:,} are distinct."
    if captions["long"]:
        yield (
            f"{captions['long']:,} of {total:,} captions have more than {_MOST - 2} words and signs, at most {captions['longest']:,}; "
            f"training cuts them at --max_seq_length, {_MOST} tokens by default."
        )
    if 10 * captions["not_latin"] > total:
        yield (
            f"{captions['not_latin']:,} of {total:,} captions are not in Latin script; English text encoders lack most of their words. "
            "Train with a multilingual one (docs/job_language.md); the log of training counts unknown tokens."
        )


def _table(rows: list[Summary]) -> str:
    cells = []
    for row in rows:
        cells.append(
            [f"{value:,}" if isinstance(value, int) else markdown_text(value or "–") for value in row.values()]
        )
    return markdown_table(list(rows[0]), cells)


def _shown(example: Summary) -> str:
    return ", ".join(filter(None, example.values()))


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def draw_contact_sheet(tiles: Sequence[tuple[Image.Image, str, str]], out_path: Path) -> None:
    """Draw pictures with their titles and texts, six in a row, as a JPEG."""
    side = 1.5
    below = 0.94  # inches
    columns = min(6, len(tiles))
    rows = math.ceil(len(tiles) / columns)
    figure = Figure(figsize=(1.1 * side * columns, (side + below) * rows), dpi=120, facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False)
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0, top=0.99, wspace=0.09, hspace=0)
    for ax in axes.flat:
        ax.set_axis_off()
    for ax, (image, title, text) in zip(axes.flat, tiles, strict=False):
        field = ImageOps.pad(image.convert("RGB"), (180, 180), color="#f8fafc")
        ax.imshow(np.asarray(field), extent=(0, side, 0, side))
        ax.set(xlim=(0, side), ylim=(-below, side))
        draw_text(ax, 0, -0.05, wrap(title, _TITLE, 1), va="top", fontsize=6.5, color=MUTED, clip_on=True)
        draw_text(ax, 0, -0.19, wrap(text, 24, 5), va="top", fontsize=7.5, clip_on=True)
    # 24 photographs take 200 kB, and as a PNG five times that.
    save_figure(figure, out_path, pil_kwargs={"quality": 75, "optimize": True})


def _tile(split: Dataset, row: int, name: str) -> tuple[Image.Image, str, str]:
    """Return a row's picture, its split and id, and its first caption."""
    pair = split.with_format(None)[row]
    shown = pair["id"]
    most = _TITLE - len(f"{name}: ")
    if len(shown) > most:  # its end tells it apart
        shown = f"…{shown[1 - most :]}"
    return picture(pair["image"], kind_of(split.features)), f"{name}: {shown}", pair["captions"][0]


def write_data_card(folder: Path, name: str, pairs: DatasetDict, summary: Summary) -> None:
    """Write a prepared folder's `README.md`, named `name`: for the Hub, `load_dataset`, and with the text of its `report.md`."""
    features = next(iter(pairs.values())).features
    kind = summary["medium"]
    columns: Summary = {}
    if summary["storage"]["store"] != "raw":  # whose pixels stay bytes
        decoded = Features({COLUMNS[kind] if name == "image" else name: each for name, each in features.items()})
        decoded[COLUMNS[kind]] = type(FEATURES[kind])()
        columns = {"dataset_info": {"features": decoded._to_yaml_list()}}
    files = [{"split": split, "path": f"{split}/*.arrow"} for split in pairs]
    front = DatasetCardData(
        task_categories=_TASKS[kind],
        tags=[f"{COLUMNS[kind]}-text-pairs", f"{COLUMNS[kind]}-text-retrieval"],
        configs=[{"config_name": "default", "data_files": files}],
        **columns,
    )
    terms = f"{kind.capitalize()}s and captions belong to their authors."
    report = (folder / "report.md").read_text(encoding="utf-8").partition("\n")[2].strip()
    parts = [
        f"---\n{front.to_yaml()}\n---",
        f"# {markdown_text(redact(name))}",
        f"{kind.capitalize()}s with their captions, checked, and prepared with Tandem: `datasets.load_dataset` opens them. {terms}",
        redact(report),
    ]
    (folder / CARD).write_text("\n\n".join(parts) + "\n", encoding="utf-8")
