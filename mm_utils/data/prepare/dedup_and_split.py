"""All checked rows together: which images are the same, what leaks between splits, which split and id each row gets.

Only the small columns of the parts are read, some 500 bytes a row; images stay in their files. The order of decisions:

1. Rows form a group if their images are equal or nearly equal, or if they have the same id.
2. A group that the sources put into several splits leaks; `--on_leakage` says what happens.
3. Rows whose source names no split go where their group is, or else where a hash of their group says: no group is
   divided, and new data moves no old row.
4. Rows of the same image in one split become one, with the captions of all. An id that names two images is a fault of
   the later row, and so is, on request, a near-duplicate.
5. Sources with weights are thinned out, in train, to their shares.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mm_utils.arguments import arg
from mm_utils.data.prepare.duplicates import (
    FINGERPRINT,
    RADIUS,
    assign_splits,
    groups,
    leaks,
    mirror_pairs,
    near_pairs,
)
from mm_utils.data.prepare.ingest import PART_SCHEMA, read_part

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
_EXAMPLES = 20
_COUNTERS = 10  # ids that splits share, none for an image they share: from so many on they are taken for row numbers


@dataclass
class ReconcileArguments:
    """What happens to duplicates, to leaks between splits, and to rows whose source names no split."""

    validation_fraction: float = arg(0.05, "Share of the images without a split that is held out for validation.")
    test_fraction: float = arg(0.0, "Share of the images without a split that is held out for the test.")
    on_leakage: str = arg(
        "error",
        "The same image in two splits: error (stop and say which), drop (it stays in test, else in validation) or keep.",
        choices=["error", "drop", "keep"],
    )
    near_duplicates: str = arg(
        "keep", "Images of one split that look the same: keep, or drop all but the first.", choices=["keep", "drop"]
    )
    near_duplicate_distance: int = arg(
        RADIUS, "Bits of 64 in which the perceptual hashes of images that look the same may differ."
    )

    def __post_init__(self) -> None:
        for name in ("validation_fraction", "test_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; it is a share of the images. Give 0 to below 1.")
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError("--validation_fraction and --test_fraction leave nothing to train on. Lower them.")
        if not 0 <= self.near_duplicate_distance <= 16:
            raise ValueError(
                f"--near_duplicate_distance is {self.near_duplicate_distance}; unrelated images differ in 20 and more of "
                "64 bits. Give 0 to 16."
            )


@dataclass
class Reconciled:
    """What is to be written.

    Attributes:
        facts: the small columns of all parts.
        rows: for every split that is not empty the places of its rows in the parts, in order.
        merged: for a row that stands for several of the same image, all of these, itself first.
        faults: rows set aside here, see `mm_utils.data.prepare.ingest.ChunkResult`.
        duplicates, leakage: what was found, for the report.
    """

    facts: pa.Table
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    merged: dict[int, list[int]] = field(default_factory=dict)
    faults: list[dict[str, str]] = field(default_factory=list)
    duplicates: dict[str, Any] = field(default_factory=dict)
    leakage: dict[str, Any] = field(default_factory=dict)


def reconcile(
    parts: Sequence[Path], args: ReconcileArguments, weights: dict[str, float | None], leak_file: Path
) -> Reconciled:
    """Decide over the rows of all `parts`.

    Args:
        weights: the sources' shares, None where a source has none.
        leak_file: all leaks are listed here, as the lines of a quarantine, if they are refused.

    Raises:
        ValueError: if an image leaks and `on_leakage` is error, or fewer than 2 training images are left.
    """
    found = Reconciled(_read_facts(parts))
    if not len(found.facts):
        raise ValueError(
            "no row is left of any source; every one has a fault. Look at --max_bad_fraction and the sources."
        )
    state = _State.of(found.facts, args.near_duplicate_distance)
    _measure_duplicates(found, state)
    _resolve_leaks(found, state, args.on_leakage, leak_file)
    _fill_splits(state, found.facts, (args.validation_fraction, args.test_fraction))
    _refuse_shared_ids(found, state)
    members = _merge(found, state)
    if args.near_duplicates == "drop":
        _drop_near_duplicates(found, state)
    _thin_out(state, found.facts, weights)
    if np.count_nonzero(state.keep_N & (state.split_N == 0)) < 2:
        raise ValueError("fewer than 2 training images are left; contrastive training needs at least 2. Add some.")
    rows = {split: np.flatnonzero(state.keep_N & (state.split_N == number)) for number, split in enumerate(SPLITS)}
    found.rows = {split: places for split, places in rows.items() if len(places)}
    kept = state.keep_N
    found.merged = {first: [first, *others] for first, others in members.items() if kept[first]}
    return found


@dataclass
class _State:
    """Of N rows, numbered as in the parts, and U distinct images, numbered by their first row.

    `look_U` groups images that look the same, `group_U` also those of one id; `split_N` is -1 where none is known.
    """

    image_N: np.ndarray
    id_N: np.ndarray
    first_U: np.ndarray
    near_P: np.ndarray
    mirrored: int
    look_U: np.ndarray
    group_U: np.ndarray
    split_N: np.ndarray
    keep_N: np.ndarray

    @classmethod
    def of(cls, facts: pa.Table, distance: int) -> "_State":
        image_N = _codes(facts["image_hash"])
        # Files of two sources may have the same name, and rows the same number, by chance.
        id_N = _codes(pc.binary_join_element_wise(facts["source"], facts["id"], "/"))
        _, first_U = np.unique(image_N, return_index=True)
        prints_U = np.frombuffer(b"".join(facts["fingerprint"].take(first_U).to_pylist()), FINGERPRINT)
        near_P = near_pairs(prints_U, distance)
        look_U = groups(len(first_U), near_P)
        given = [SPLITS.index(name) if name in SPLITS else -1 for name in facts["split"].to_pylist()]
        return cls(
            image_N,
            id_N,
            first_U,
            near_P,
            len(mirror_pairs(prints_U, distance)),
            look_U,
            look_U,
            np.array(given, dtype=np.int8),
            np.ones(len(facts), dtype=bool),
        )


def _read_facts(parts: Sequence[Path]) -> pa.Table:
    """All columns but the images, and `name`, the id that a row is going to have: no two sources share one."""
    names = [name for name in PART_SCHEMA.names if name != "image"]
    facts = pa.concat_tables([read_part(part, names) for part in parts])
    ids = pc.coalesce(facts["id"], pc.utf8_slice_codeunits(facts["image_hash"], 0, 32))
    several = len(facts["source"].unique()) > 1
    return facts.append_column("name", pc.binary_join_element_wise(facts["source"], ids, "/") if several else ids)


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """Equal strings get equal numbers, in the order in which they first occur; null gets -1."""
    return pc.fill_null(column.combine_chunks().dictionary_encode().indices, -1).to_numpy().astype(np.int64)


def _measure_duplicates(found: Reconciled, state: _State) -> None:
    _, counts = np.unique(state.look_U, return_counts=True)
    names = _names(found.facts, state.first_U[state.near_P[:_EXAMPLES].ravel()])
    copies_N = np.flatnonzero(state.first_U[state.image_N] != np.arange(len(state.image_N)))
    # Rows of one id are captions of one image, which is no copy.
    others = (state.id_N[copies_N] < 0) | (state.id_N[copies_N] != state.id_N[state.first_U[state.image_N[copies_N]]])
    found.duplicates = {
        "exact_rows": int(np.count_nonzero(others)),
        "exact_groups": len(np.unique(state.image_N[copies_N[others]])),
        "near_pairs": len(state.near_P),
        "mirrored_pairs": state.mirrored,
        "largest_group": int(counts.max()),
        "examples": [names[at : at + 2] for at in range(0, len(names), 2)],
    }


def _resolve_leaks(found: Reconciled, state: _State, policy: str, leak_file: Path) -> None:
    """Find the groups that the sources put into several splits, and drop, keep or refuse them."""
    given = np.flatnonzero(state.split_N >= 0)
    split = state.split_N[given]

    def leaking(groups_N: np.ndarray) -> np.ndarray:
        return given[leaks(split, groups_N[given])]

    look_N = state.look_U[state.image_N]
    exact, near = leaking(state.image_N), leaking(look_N)
    by_id = leaking(np.where(state.id_N < 0, -2 - np.arange(len(state.id_N)), state.id_N))
    if len(by_id) >= _COUNTERS and not np.isin(by_id[:, 0], near[:, 0]).any():
        logger.warning(
            "%s ids are in several splits, never for the same image: they are taken for row numbers", f"{len(by_id):,}"
        )
        by_id = by_id[:0]
    else:
        state.group_U = groups(len(state.first_U), np.concatenate([state.near_P, _same_id(state)]))
    pairs = leaking(state.group_U[state.image_N]) if len(by_id) else near
    kinds = {"exact": exact[:, 0], "by_id": np.setdiff1d(by_id[:, 0], near[:, 0])}
    kinds["near"] = np.setdiff1d(pairs[:, 0], np.concatenate(list(kinds.values())))
    found.leakage = {
        "policy": policy,
        **{kind: len(rows) for kind, rows in kinds.items()},
        "dropped": {},
        "examples": [_names(found.facts, pair) for pair in pairs[:_EXAMPLES]],
    }
    leaked = [
        _fault(
            found.facts, row, "leaked", f"{_place(found.facts, winner)}, in {SPLITS[state.split_N[winner]]}, shows it"
        )
        for row, winner in pairs
    ]
    if len(pairs) and policy == "error":
        leak_file.write_text("".join(json.dumps(leak) + "\n" for leak in leaked), encoding="utf-8")
        raise ValueError(_leak_message(found, state, pairs, leak_file))
    if policy == "drop":
        state.keep_N[pairs[:, 0]] = False
        found.faults += leaked
        splits, counts = np.unique(state.split_N[pairs[:, 0]], return_counts=True)
        found.leakage["dropped"] = {SPLITS[at]: int(n) for at, n in zip(splits, counts, strict=True)}


def _leak_message(found: Reconciled, state: _State, pairs: np.ndarray, leak_file: Path) -> str:
    row, winner = pairs[0]
    counts = ", ".join(f"{found.leakage[kind]:,} {text}" for kind, text in _KINDS.items() if found.leakage[kind])
    return (
        f"{len(pairs):,} rows have an image that is in another split too ({counts}), such as "
        f"{_place(found.facts, row)} in {SPLITS[state.split_N[row]]} and {_place(found.facts, winner)} in "
        f"{SPLITS[state.split_N[winner]]}; {leak_file} lists all. Choose --on_leakage drop (the image stays in the test, else "
        "in the validation split) or keep; what has been read is not read again."
    )


_KINDS = {"exact": "the very same", "near": "nearly the same", "by_id": "of the same id"}


def _same_id(state: _State) -> np.ndarray:
    """Pairs [P, 2] of distinct images that have an id in common."""
    known = np.flatnonzero(state.id_N >= 0)
    _, first, place = np.unique(state.id_N[known], return_index=True, return_inverse=True)
    pairs = np.stack([state.image_N[known[first[place]]], state.image_N[known]], axis=1)
    return np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)


def _fill_splits(state: _State, facts: pa.Table, shares: tuple[float, float]) -> None:
    """Rows without a split go where their group is, else where the hash of their group's first image says."""
    unknown = state.split_N < 0
    if not unknown.any():
        return
    group_N = state.group_U[state.image_N]
    of_group = np.full(len(state.first_U), -1, dtype=np.int8)
    np.maximum.at(of_group, group_N, state.split_N)
    keys = facts["image_hash"].take(state.first_U).to_pylist()
    fractions = (1 - sum(shares), *shares)
    by_hash_U = assign_splits(state.group_U, keys, fractions)
    chosen_N = np.where(of_group[group_N] >= 0, of_group[group_N], by_hash_U[state.image_N])
    state.split_N = np.where(unknown, chosen_N, state.split_N).astype(np.int8)


def _refuse_shared_ids(found: Reconciled, state: _State) -> None:
    """Set aside the later of two images of one source and split that have the same id."""
    rows = np.flatnonzero(state.keep_N & (state.id_N >= 0))
    keys = np.stack([_codes(found.facts["source"])[rows], state.split_N[rows], state.id_N[rows]])
    _, first, place = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    first_of = rows[first[place.ravel()]]
    for row, earlier in np.stack([rows, first_of], axis=1)[state.image_N[rows] != state.image_N[first_of]]:
        state.keep_N[row] = False
        detail = f"{found.facts['where'][earlier]} gives id {found.facts['id'][row]} to another image"
        found.faults.append(_fault(found.facts, row, "duplicate_id", detail))


def _merge(found: Reconciled, state: _State) -> dict[int, list[int]]:
    """Keep the first row of every image in a split; the answer gives, for a first row, all rows that it stands for."""
    rows = np.flatnonzero(state.keep_N)
    keys = state.image_N[rows] * len(SPLITS) + state.split_N[rows]
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    first_of = rows[first[place]]
    members: dict[int, list[int]] = defaultdict(list)
    for row, earlier in zip(rows[first_of != rows].tolist(), first_of[first_of != rows].tolist(), strict=True):
        members[earlier].append(row)
        state.keep_N[row] = False
    found.duplicates["merged_rows"] = int(np.count_nonzero(first_of != rows))
    return members


def _drop_near_duplicates(found: Reconciled, state: _State) -> None:
    rows = np.flatnonzero(state.keep_N)
    keys = state.look_U[state.image_N[rows]] * len(SPLITS) + state.split_N[rows]
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    for row, earlier in zip(rows.tolist(), rows[first[place]].tolist(), strict=True):
        if row != earlier:
            state.keep_N[row] = False
            detail = f"it looks like {_place(found.facts, earlier)}"
            found.faults.append(_fault(found.facts, row, "near_duplicate", detail))


def _thin_out(state: _State, facts: pa.Table, weights: dict[str, float | None]) -> None:
    """Leave training rows of sources out, those with the largest hashes, until the sources have their shares."""
    given = {name: weight for name, weight in weights.items() if weight is not None}
    if not given:
        return
    without = [name for name in weights if name not in given]
    if without:
        raise ValueError(f"--sources gives weights, but none to {', '.join(without)}. Give every source a weight.")
    names = np.array(facts["source"].to_pylist())
    rows = {name: np.flatnonzero(state.keep_N & (state.split_N == 0) & (names == name)) for name in given}
    scale = min(len(rows[name]) / weight for name, weight in given.items())
    for name, weight in given.items():
        hashes = np.array(facts["image_hash"].take(rows[name]).to_pylist())
        surplus = rows[name][np.argsort(hashes)][round(scale * weight) :]
        state.keep_N[surplus] = False


def _names(facts: pa.Table, rows: np.ndarray) -> list[str]:
    return facts["name"].take(rows).to_pylist()


def _place(facts: pa.Table, row: int) -> str:
    return f"{facts['where'][row]} of {facts['source'][row]}"


def _fault(facts: pa.Table, row: int, reason: str, detail: str) -> dict[str, str]:
    place = {name: facts[name][row].as_py() for name in ("source", "where")}
    return {**place, "reason": reason, "detail": detail, "raw": facts["name"][row].as_py()}
