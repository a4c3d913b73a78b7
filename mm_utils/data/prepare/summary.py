"""Summarise a preparation as the plain values of `report.json`."""

from collections import Counter, defaultdict
from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import DatasetDict

from mm_utils.arguments import launch_command
from mm_utils.data.faults import REASONS
from mm_utils.data.prepare.arguments import PrepareArguments
from mm_utils.data.prepare.caption_counts import caption_keys, shared_captions
from mm_utils.data.prepare.dedup_and_split import Reconciled
from mm_utils.data.prepare.on_disk import content_fingerprint
from mm_utils.data.prepare.pipeline import Ingested
from mm_utils.data.rows.columns import too_few
from mm_utils.text import publishable, without_secrets

_EXAMPLES = 3
_SHARED = 20


def summarize(
    args: PrepareArguments, settings: dict[str, Any], ingested: Ingested, found: Reconciled, pairs: DatasetDict
) -> dict[str, Any]:
    """Collect figures of sources, splits, faults, duplicates, leaks, captions and storage, as they may be published."""
    timed = _timed(settings, found)
    summary = {
        "created": date.today().isoformat(),
        "fingerprint": content_fingerprint(pairs),
        "settings": settings,
        "sources": _sources(ingested, pairs),
        **({"timed": timed} if timed else {}),
        "splits": {split: _split(rows) for split, rows in pairs.items()},
        "quarantined": _quarantined(ingested.faults + found.faults),
        "notes": dict(ingested.notes.most_common()),
        "duplicates": found.duplicates,
        "leakage": found.leakage,
        "captions": caption_figures(
            pairs, all(tally.source.format == "classes" for tally in ingested.sources.values())
        ),
        "storage": _storage(args, found),
    }
    return without_secrets(summary, publishable)


def describe(summary: dict[str, Any], folder: str) -> str:
    """Describe the findings in a few lines, with the next command."""
    splits = ", ".join(f"{name} {part['images']:,}" for name, part in summary["splits"].items())
    captions = sum(part["captions"] for part in summary["splits"].values())
    medium = summary.get("timed", {}).get("medium", "image")
    lines = [f"{medium.capitalize()}s: {splits}; {captions:,} captions"]
    if "timed" in summary:
        lines.append(_describe_time(summary["timed"]))
    if summary["quarantined"]:
        reasons = ", ".join(f"{reason} {part['count']:,}" for reason, part in summary["quarantined"].items())
        lines.append(f"Set aside, see {folder}/quarantine.jsonl: {reasons}")
    if summary["notes"]:
        lines.append(
            f"Repaired or converted: {', '.join(f'{note} {times:,}' for note, times in summary['notes'].items())}"
        )
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
        lines.append(
            f"Stored: {after:,.1f} kB {'an' if medium == 'image' else 'a'} {medium} instead of {before:,.1f}{loss}"
        )
    if few := too_few(summary["splits"].get("validation", {"images": 0})["images"], medium):
        lines.append(f"{few} Add pairs, or set --validation_fraction.")
    return "\n  ".join(
        [
            f"{folder}:",
            *lines,
            f"Look at {folder}/report.md",
            f"Train on it: {launch_command('pretrain', ['--dataset_name', folder])}",
        ]
    )


def _timed(settings: dict[str, Any], found: Reconciled) -> dict[str, Any] | None:
    """Return kind, seconds and rates (before, after) of clips or sounds; None for images."""
    medium = found.facts["medium"][0].as_py()
    if medium == "image":
        return None
    kept = found.facts.select(["seconds", "rate", "moments"]).take(np.concatenate(list(found.rows.values())))
    seconds = kept["seconds"].to_numpy()
    rates = Counter(round(rate, 2) for rate in kept["rate"].to_pylist())
    moments = pc.sum(pc.list_value_length(kept["moments"])).as_py()
    return {
        "medium": medium,
        "seconds": float(seconds.sum()),
        "longest": float(seconds.max()),
        "moments": moments or 0,
        "rate": settings["sound_rate" if medium == "sound" else "clip_fps"],
        "rates": {str(rate): count for rate, count in rates.most_common(_SHARED)},
    }


def _describe_time(timed: dict[str, Any]) -> str:
    unit = "samples" if timed["medium"] == "sound" else "frames"
    rates = ", ".join(f"{float(rate):,g}" for rate in list(timed["rates"])[:_EXAMPLES])
    more = " and others" if len(timed["rates"]) > _EXAMPLES else ""
    return (
        f"Seconds: {timed['seconds']:,.0f} in all, at most {timed['longest']:.1f}; kept at {timed['rate']:,g} {unit} a "
        f"second, given at {rates}{more}; {timed['moments']:,} moments"
    )


def _sources(ingested: Ingested, pairs: DatasetDict) -> list[dict[str, Any]]:
    kept: Counter[str] = Counter()
    for rows in pairs.values():
        for entry in pc.value_counts(rows.data.column("source")).to_pylist():
            kept[entry["values"]] += entry["counts"]
    return [
        {
            "name": name,
            "path": tally.source.path,
            "format": tally.source.format,
            "rows": tally.rows,
            "bad": tally.bad,
            "kept": kept[name],
            "weight": tally.source.weight,
            "share": kept[name] / max(1, kept.total()),
        }
        for name, tally in ingested.sources.items()
    ]


def _split(rows: Any) -> dict[str, int]:
    columns = rows.select_columns(["image", "captions"]).with_format("arrow")
    images = captions = size = 0
    for batch in columns.iter(1000):
        images += len(batch)
        captions += pc.sum(pc.list_value_length(batch["captions"])).as_py()
        size += pc.sum(pc.binary_length(pc.struct_field(batch["image"], "bytes"))).as_py()
    return {"images": images, "captions": captions, "bytes": size}


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


def caption_figures(pairs: DatasetDict, templated: bool) -> dict[str, Any]:
    """Count distinct captions and lengths; list captions of too many images, unless templates made them."""
    texts: list[pa.Array] = []  # still in their files
    keys: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    owners: list[np.ndarray] = []
    images = 0
    for rows in pairs.values():
        for batch in rows.select_columns(["captions"]).with_format("arrow").iter(10_000):
            flat = pc.list_flatten(batch["captions"])
            texts += flat.chunks
            own = flat.to_pylist()
            keys.append(caption_keys(own))
            lengths.append(np.fromiter(map(len, own), np.int64, len(own)))
            owners.append(
                np.repeat(images + np.arange(len(batch)), pc.list_value_length(batch["captions"]).to_numpy())
            )
            images += len(batch)
    key_M, length_M, text_M = np.concatenate(keys), np.concatenate(lengths), pa.chunked_array(texts)
    return {
        "distinct": len(np.unique(key_M)),
        "shared": [
            {"caption": text_M[one.row].as_py(), "images": one.images}
            for one in shared_captions(key_M, np.concatenate(owners))[: 0 if templated else _SHARED]
        ],
        "characters": {
            "mean": float(length_M.mean()),
            "p50": float(np.quantile(length_M, 0.5)),
            "p95": float(np.quantile(length_M, 0.95)),
            "max": int(length_M.max()),
        },
    }


def _storage(args: PrepareArguments, found: Reconciled) -> dict[str, Any]:
    """Return bytes per pair before and after storing, and the measured loss of quality."""
    rows = np.concatenate(list(found.rows.values()))
    kept = found.facts.select(["psnr", "original_bytes", "stored_bytes"]).take(rows)
    losses = kept["psnr"].drop_null().to_numpy()
    return {
        "store": "originals" if args.keep_originals else args.store,
        "short_side": None if args.keep_originals else args.short_side,
        "original_bytes_per_pair": pc.mean(kept["original_bytes"]).as_py(),
        "stored_bytes_per_pair": pc.mean(kept["stored_bytes"]).as_py(),
        "psnr_sample": len(losses),
        **({"psnr_db": {"mean": float(losses.mean()), "p5": float(np.quantile(losses, 0.05))}} if len(losses) else {}),
    }
