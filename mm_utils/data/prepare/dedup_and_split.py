"""Compare all checked rows: merge equal images, find leaks, give each row split and id.

Only the small columns of the parts are read, and they stay in their files, as images do. The order of decisions:

1. Rows form a group if their images are equal or nearly equal, or if they have the same id, or the same value of
   `group_column`: a patient, a site.
2. A group that the sources put into several splits leaks; `--on_leakage` decides what happens.
3. Rows whose source names no split go where their group is, or was in the data set that is overwritten, or else where a hash of
   their group decides: no group is divided, and new data moves no old row.
4. Rows of the same image in one split become one, with the captions of all. An id that names two images is a fault of
   the later row.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.compute as pc

from mm_utils.data.arguments import SPLITS
from mm_utils.data.faults import escaped
from mm_utils.data.prepare.arguments import ReconcileArguments
from mm_utils.data.prepare.ingest import Ingested, pieces, read_facts, refuse_hopeless
from mm_utils.data.prepare.perceptual_hash import FINGERPRINT, assign_splits, groups, leaks, near_pairs
from mm_utils.data.rows.columns import HOLDOUT_FRACTION, least_held_out

logger = logging.getLogger(__name__)

_EXAMPLES = 20
_BESIDE = 3  # between the numbers of neighbours, at most
_LIKE = 16  # bits of 64 in which pictures that are alike differ, at most
# From this many ids that splits share without any shared image on, ids are taken for row numbers.
_COUNTERS = 10
SAME_FROM_TRAIN = "drop the very same from train"  # what a run on raw files does: what is evaluated stays whole
LEAKS = {
    "exact": "the very same",
    "near": "nearly the same",
    "by_id": "of the same id",
    "by_group": "of the same group",
}


@dataclass
class Reconciled:
    """The rows that are to be written.

    Attributes:
        facts: the small columns of all parts, and `name`, the id that a row gets.
        rows: for every split that is not empty, the places of its rows in the parts, in order.
        merged: for a row that stands for several of the same image, all of these, itself first.
        faults: rows set aside here, see `mm_utils.data.prepare.ingest.ChunkResult`.
        leaks: a sentence on the leaks, "" without any.
    """

    facts: pa.Table
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    merged: dict[int, list[int]] = field(default_factory=dict)
    faults: list[dict[str, str]] = field(default_factory=list)
    duplicates: dict[str, Any] = field(default_factory=dict)
    leakage: dict[str, Any] = field(default_factory=dict)
    leaks: str = ""


def reconcile(
    parts: Sequence[Path],
    args: ReconcileArguments,
    leak_file: Path,
    own_ids: bool = False,
    earlier: pa.Table | None = None,
) -> Reconciled:
    """Decide about the rows of all `parts`; ValueError if an image leaks and `on_leakage` is error.

    Refused leaks are listed in `leak_file`. With `own_ids`, ids stay as the sources give them. `earlier` is `earlier_rows` of the data
    set that is overwritten.
    """
    facts = read_facts(parts, own_ids)
    found = Reconciled(facts)
    image_N = _codes(facts["image_hash"])
    # With the source: files of two sources may have the same name, and rows the same number, by chance.
    id_N = _codes(pc.binary_join_element_wise(facts["source"], facts["id"], "/"))
    site_N = _codes(facts["group"])  # of all sources: a site is the same one everywhere
    split_N = _places_of_splits(facts["split"])
    _, first_U = np.unique(image_N, return_index=True)
    prints = b"".join(
        print_
        for piece in pieces(facts.select(["fingerprint"]), first_U)
        for print_ in piece["fingerprint"].to_pylist()
    )
    near_P = near_pairs(np.frombuffer(prints, FINGERPRINT), args.near_duplicate_distance)
    look_U = groups(len(first_U), near_P)
    found.duplicates = {
        "near_pairs": len(near_P),
        "largest_group": int(np.bincount(look_U).max()),
        "examples": [_names(facts, first_U[pair]) for pair in near_P[: _EXAMPLES // 2]],
    }

    codes = [image_N, look_U[image_N], id_N, site_N]  # in the order of `LEAKS`
    group_U, pairs, kind_P = _leaks(codes, split_N, near_P)
    keep_N = np.ones(len(facts), dtype=bool)
    keep_N[_judged(found, pairs, kind_P, split_N, args.on_leakage, leak_file)] = False
    split_N, found.duplicates["groups"] = _filled(split_N, image_N, group_U, facts, args, earlier)

    rows = np.flatnonzero(keep_N & (id_N >= 0))
    # id and split as one number: the same id in another split is a leak, and is judged above
    first = _first_of(id_N * len(SPLITS) + split_N, rows)
    for row, other in np.stack([rows, first], axis=1)[image_N[rows] != image_N[first]]:
        keep_N[row] = False
        why = f"{_place(facts, other)} assigns id {facts['id'][row]} to another image"
        found.faults.append(row_fault(facts, row, "duplicate_id", why))
    rows = np.flatnonzero(keep_N)
    first = _first_of(image_N * len(SPLITS) + split_N, rows)
    others: list[list[int]] = []
    for row, other in np.stack([rows, first], axis=1)[first != rows].tolist():
        found.merged.setdefault(other, [other]).append(row)
        keep_N[row] = False
        if id_N[row] != id_N[other] and facts["captions"][row] != facts["captions"][other]:
            others.append([row, other])
    found.duplicates["merged_rows"] = int(np.count_nonzero(first != rows))
    found.duplicates["merged_files"] = ""
    if others:
        found.duplicates["merged_files"] = (
            f"{len(others):,} row{'s were' if len(others) > 1 else ' was'} merged into an earlier one whose file is the very same, though names and captions differ, such as "
            f"{' and '.join(_names(facts, others[0]))}; look for a placeholder."
        )
    places = {split: np.flatnonzero(keep_N & (split_N == number)) for number, split in enumerate(SPLITS)}
    found.rows = {split: rows for split, rows in places.items() if len(rows)}
    found.duplicates["neighbours"] = {} if own_ids else _neighbours(found.rows, facts)
    return found


def check_kept(ingested: Ingested, found: Reconciled, most: float) -> None:
    """Raise ValueError if more than `most` of a source's rows are set aside, equal ids counted, or fewer than 2 are left for train."""
    lost = [fault for fault in found.faults if fault["reason"] == "duplicate_id"]
    ingested.bad.update(fault["source"] for fault in lost)
    for name in ingested.sources:
        refuse_hopeless(replace(ingested, faults=ingested.faults + lost), name, most)
    left = len(found.rows.get("train", ()))
    if left > 1:
        return
    advice = "Add some."
    others = [
        f"{len(rows):,} in {split}, such as {_place(found.facts, rows[0])}"
        for split, rows in found.rows.items()
        if split != "train"
    ]
    if others:
        advice += " Where a column split or the name of a file or folder misleads, write ,split=train behind the source's path."
    if merged := found.duplicates["merged_rows"]:
        others.append(f"{merged:,} of the image of another row")
    if aside := ingested.bad.total() + sum(found.leakage["dropped"].values()):
        others.append(f"{aside:,} set aside")
    where = f"; the others are {'; '.join(others)}" if others else ""
    raise ValueError(
        f"the split train has {left} of {ingested.rows.total():,} rows, and contrastive training needs at least 2{where}. {advice}"
    )


def _places_of_splits(column: pa.ChunkedArray) -> np.ndarray:
    """Return the place in `SPLITS` of each name, -1 of null."""
    return pc.fill_null(pc.index_in(column, pa.array(SPLITS)), -1).to_numpy().astype(np.int8)


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """Number equal strings equally, in the order of their first occurrence; null is -1."""
    found = [pc.fill_null(chunk.indices, -1) for chunk in column.dictionary_encode().chunks]
    return pa.chunked_array(found, pa.int32()).to_numpy().astype(np.int64)


def _first_of(codes_N: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return for each of `rows` the first one with an equal code."""
    _, first, place = np.unique(codes_N[rows], return_index=True, return_inverse=True)
    return rows[first[place]]


def _leaks(
    codes: list[np.ndarray], split_N: np.ndarray, near_P: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the group of each of U images; the rows [P, 2] that leak, with one of their group in another split; their places in `LEAKS`."""
    image_N, look_N, id_N, site_N = codes

    def leaking(codes_N: np.ndarray) -> np.ndarray:
        known = np.flatnonzero((split_N >= 0) & (codes_N >= 0))
        return known[leaks(split_N[known], codes_N[known])]

    links = [near_P, _linked(image_N, site_N)]
    by_id = leaking(id_N)
    if len(by_id) >= _COUNTERS and not np.isin(by_id[:, 0], leaking(look_N)[:, 0]).any():
        logger.warning(
            "%s ids are in several splits, never for the same image: they are taken for row numbers", f"{len(by_id):,}"
        )
    else:
        links.append(_linked(image_N, id_N))
    group_U = groups(int(image_N.max()) + 1, np.concatenate(links))
    pairs = leaking(group_U[image_N])
    row_P, other_P = pairs.T
    # -1 is no id, or no group, and equals nothing
    same = [(each[row_P] == each[other_P]) & (each[row_P] >= 0) for each in codes]
    return group_U, pairs, np.select(same, [0, 1, 2, 3], 1)  # 1: linked by a chain of others


def _linked(image_N: np.ndarray, codes_N: np.ndarray) -> np.ndarray:
    """Return pairs [P, 2] of distinct images that have an id, or a group, in common."""
    known = np.flatnonzero(codes_N >= 0)
    pairs = np.stack([image_N[_first_of(codes_N, known)], image_N[known]], axis=1)
    return np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)


def _judged(
    found: Reconciled, pairs: np.ndarray, kind_P: np.ndarray, split_N: np.ndarray, policy: str, leak_file: Path
) -> np.ndarray:
    """Note the leaks in `found`; return the rows that are dropped, or raise ValueError, as the policy says."""
    facts = found.facts
    kinds = dict(zip(LEAKS, np.bincount(kind_P, minlength=len(LEAKS)).tolist(), strict=True))
    examples = [_names(facts, pair) for pair in pairs[:_EXAMPLES]]
    found.leakage = {"policy": policy, **kinds, "dropped": {}, "examples": examples}
    if not len(pairs):
        return pairs[:, 0]

    def in_split(row: int) -> str:
        return f"{_place(facts, row)} in {SPLITS[split_N[row]]}"

    counts = ", ".join(f"{count:,} {LEAKS[kind]}" for kind, count in kinds.items() if count)
    found.leaks = (
        f"{len(pairs):,} rows have an image or group that is in another split too ({counts}), such as "
        f"{in_split(pairs[0, 0])} and {in_split(pairs[0, 1])}"
    )
    leaked = []
    for (row, other), kind in zip(pairs, kind_P, strict=True):
        how = f"has the same group {facts['group'][row]}" if kind == 3 else "shows it"
        leaked.append(row_fault(facts, row, "leaked", f"{in_split(other)} {how}"))
    if policy == "error":
        leak_file.write_text("".join(json.dumps(leak) + "\n" for leak in leaked), encoding="utf-8")
        raise ValueError(
            f"{found.leaks}; {leak_file} lists all. Add --on_leakage drop to the command (the image stays in the test, "
            "else in the validation split), or --on_leakage keep; what has been read is not read again."
        )
    dropped = np.full(len(pairs), policy != "keep")
    if policy == SAME_FROM_TRAIN:
        dropped = (split_N[pairs[:, 0]] == SPLITS.index("train")) & (kind_P == 0)
    found.faults += [fault for fault, is_dropped in zip(leaked, dropped, strict=True) if is_dropped]
    rows = pairs[dropped, 0]
    found.leakage["dropped"] = dict(Counter(SPLITS[at] for at in split_N[rows]))
    return rows


def places_of(rows: pa.Table, earlier: pa.Table) -> np.ndarray:
    """Return the place among the `earlier` rows of the image of each row, or else of its id; -1 where there is neither."""
    found = [pc.index_in(rows[name], earlier[name].combine_chunks()) for name in ("image_hash", "id")]
    return pc.fill_null(pc.coalesce(*found), -1).to_numpy()


def _filled(
    split_N: np.ndarray,
    image_N: np.ndarray,
    group_U: np.ndarray,
    facts: pa.Table,
    args: ReconcileArguments,
    earlier: pa.Table | None,
) -> tuple[np.ndarray, int]:
    """Return the splits of all rows, and the number of groups without one: theirs is that which they had `earlier`, or one by a hash."""
    validation = args.validation_fraction
    unknown = split_N < 0
    name = "validation" if validation else "test"
    share = validation or args.test_fraction
    if share and not unknown.any():
        raise ValueError(
            f"--{name}_fraction is {share}; every row says its split, in a column or by the name of its file or folder, and only rows that "
            "say none are divided. Leave it out, or remove the column split."
        )
    if not unknown.any():
        return split_N, 0
    if share and not unknown.all():
        few = f"{np.count_nonzero(unknown):,} of {len(unknown):,}"
        logger.warning("--%s_fraction is %s; it divides the rows that do not say their split, %s", name, share, few)
    _, first_U = np.unique(image_N, return_index=True)
    files_U = _codes(facts["file_hash"])[first_U]
    parts = np.flatnonzero(files_U >= 0)  # clips or sounds that may be parts of one file
    links_U2 = np.stack([group_U, np.arange(len(group_U))], axis=1)  # to the first image of the group
    group_U = groups(len(group_U), np.concatenate([links_U2, np.stack([_first_of(files_U, parts), parts], axis=1)]))
    group_N = group_U[image_N]
    of_group = np.full(len(group_U), -1, dtype=np.int8)
    np.maximum.at(of_group, group_N, split_N)  # -1 is none, and the test split wins over all
    if earlier is not None:
        place_N = places_of(pa.table({"id": facts["name"], "image_hash": facts["image_hash"]}), earlier)
        splits = np.append(_places_of_splits(earlier["split"]), np.int8(-1))
        before = np.full_like(of_group, -1)
        np.maximum.at(before, group_N, splits[place_N])  # the place -1 is the last
        of_group = np.where(of_group >= 0, of_group, before)
    least = 0
    if validation is None:
        validation = HOLDOUT_FRACTION
        if not (split_N == SPLITS.index("validation")).any():
            least = least_held_out(len(np.unique(image_N[unknown])))
    hashes = pieces(facts.select(["image_hash"]), first_U)
    keys = (key for piece in hashes for key in piece["image_hash"].to_pylist())
    shares = (max(0.0, 1 - validation - args.test_fraction), validation, args.test_fraction)
    by_hash_N = assign_splits(group_U, keys, shares, least=least)[image_N]
    chosen_N = np.where(of_group[group_N] >= 0, of_group[group_N], by_hash_N)
    return np.where(unknown, chosen_N, split_N).astype(np.int8), len(np.unique(group_N[unknown]))


def _neighbours(rows: dict[str, np.ndarray], facts: pa.Table) -> dict[str, Any]:
    """Count the rows `outside` train, and those that nearly show the picture of a row of train whose id differs in a number alone.

    Frames of a film do. Pictures that are far apart hardly ever agree in so many bits by chance.
    """
    table = pandas.DataFrame({name: facts[name].to_pandas() for name in ("id", "source", "group")})
    # 'film_0012.jpg' -> 'film_', '0012', ''; eighteen digits fit into int64
    names = table["id"].astype(str).str.extract(r"(?s)^(.*?)(\d{1,18})(\D*?)(?:\.\w+)?$")
    table["key"] = table["source"] + "/" + names[0] + "#" + names[2]
    table = table[table["id"].notna() & table["group"].isna() & names[1].notna()]
    table["number"] = names[1][table.index].astype(np.int64)
    table = table.rename_axis("row").reset_index()[["key", "number", "row"]].sort_values("number", kind="stable")
    others = [places for split, places in rows.items() if split != "train"]
    outside = table[table["row"].isin(np.concatenate([*others, np.zeros(0, np.int64)]))]
    train = table[table["row"].isin(rows.get("train", []))]
    pairs = pandas.merge_asof(outside, train, "number", by="key", direction="nearest", tolerance=_BESIDE).dropna()
    found: dict[str, Any] = {"outside": len(outside), "count": 0, "example": ""}
    for pair in pairs[["row_x", "row_y"]].astype(np.int64).to_numpy():
        # as `FINGERPRINT` begins; clips and sounds have zeros
        hashes = [int.from_bytes((facts["fingerprint"][at].as_py() or b"")[:8], "little") for at in pair.tolist()]
        if all(hashes) and (hashes[0] ^ hashes[1]).bit_count() <= _LIKE:
            found["count"] += 1
            found["example"] = found["example"] or " beside ".join(_names(facts, pair))
    return found


def _names(facts: pa.Table, rows: Iterable[int]) -> list[str]:
    return [facts["name"][int(row)].as_py() for row in rows]


def _place(facts: pa.Table, row: int) -> str:
    return escaped(f"{facts['where'][row]} of {facts['source'][row]}")


def row_fault(facts: pa.Table, row: int, reason: str, detail: str) -> dict[str, str]:
    """Return why a row is set aside, with its place, see `mm_utils.data.prepare.ingest.ChunkResult`."""
    place = {name: facts[name][row].as_py() for name in ("source", "where")}
    return {**place, "reason": reason, "detail": escaped(detail), "raw": facts["name"][row].as_py()}
