"""From the rows of a stream to this rank's batches: every worker reads its lanes and gives a part of every step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from mm_utils import ranks
from mm_utils.data.batches import Batch, Collator, Pairs
from mm_utils.data.order import choose_captions
from mm_utils.data.restarts import RestartingLoader
from mm_utils.data.stream.files import ShardReader
from mm_utils.data.stream.formats import Record
from mm_utils.data.stream.lanes import Reader, Slot
from mm_utils.data.stream.stream import Stream
from mm_utils.data.substitutes import substitutes
from mm_utils.data.tokens import caption_key, encode_captions, image_key

_SHOWN = 4  # of the files of a step, in a message


@dataclass
class StreamSteps:
    """Turns steps of a stream into collated batches.

    An example is what `Pairs` makes of the row, a pure function of (seed, epoch, image id); its `row` is the row's position in
    the stream.

    Attributes:
        stream: where rows are read.
        tokenizer, max_seq_length: how captions become tokens, by the rules of `mm_utils.data.tokens`.
        pairs: makes training examples of rows.
        collate: stacks them.
    """

    stream: Stream
    tokenizer: PreTrainedTokenizerBase
    max_seq_length: int
    pairs: Callable[[datasets.Dataset], Pairs]
    collate: Collator

    def batches(self, start: int, stop: int, reader: Reader) -> Iterator[Batch]:
        """Of steps `start` to `stop`, what `reader` reads.

        An unusable row is named in `skipped`, and another one of its block takes its place, if any of those that
        `mm_utils.data.substitutes` names can be used.
        """
        lanes: dict[tuple[int, int], _Lane] = {}
        for step in range(start, stop):
            slots = self.stream.order.batch(step, reader)
            lanes = {key: lane for key, lane in lanes.items() if not slots or key[0] >= slots[0].epoch}
            for slot in slots:
                if (slot.epoch, slot.lane) not in lanes:
                    lanes[slot.epoch, slot.lane] = _Lane(self.stream)
            drawn = [lanes[slot.epoch, slot.lane].record(slot) for slot in slots]
            examples = self._attempt(slots, [slot.row for slot in slots], drawn)
            for place, slot in enumerate(slots):
                if "skipped" in examples[place]:
                    examples[place] = self._substitute(lanes[slot.epoch, slot.lane], slot, examples[place])
            yield self.collate(examples)

    def _substitute(self, lane: "_Lane", slot: Slot, failed: dict[str, Any]) -> dict[str, Any]:
        records = lane.block(slot)
        first = min(records)
        for place in substitutes(self.stream.order.seed, slot.epoch, slot.position, len(records)):
            [example] = self._attempt([slot], [first + place], [records[first + place]])
            if "skipped" not in example:
                return {**example, **failed}
        return failed

    def _attempt(self, slots: list[Slot], numbers: list[int], records: list[Record]) -> list[dict[str, Any]]:
        """What each slot shows with the record of that number in its shard, or why it shows nothing."""
        made = [
            self.stream.row(record, slot.shard, number)
            for slot, number, record in zip(slots, numbers, records, strict=True)
        ]
        rows = [row for row in made if not isinstance(row, str)]
        drawn = [slot for slot, row in zip(slots, made, strict=True) if not isinstance(row, str)]
        examples = iter(self._examples(rows, drawn) if rows else [])
        return [
            {"skipped": row, "skipped_id": self.stream.place_of(slot.shard, number)}
            if isinstance(row, str)
            else next(examples)
            for slot, number, row in zip(slots, numbers, made, strict=True)
        ]

    def _examples(self, rows: list[dict[str, Any]], slots: list[Slot]) -> list[dict[str, Any]]:
        keys = [image_key(row["id"]) for row in rows]
        columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in self.stream.features}
        columns["input_ids"] = self._tokens(rows, keys, [slot.epoch for slot in slots])
        columns["image_key"] = keys
        columns["caption_keys"] = [[caption_key(caption) for caption in row["captions"]] for row in rows]
        table = pa.Table.from_pydict(columns, schema=_with_tokens(self.stream.features))
        made = self.pairs(datasets.Dataset(table, fingerprint="stream"))  # or all bytes are hashed to find one
        examples = made.attempt([(place, slot.epoch) for place, slot in enumerate(slots)])
        for example, slot in zip(examples, slots, strict=True):
            if "row" in example:
                example["row"] = slot.position
        return examples

    def _tokens(self, rows: list[dict[str, Any]], keys: list[int], epochs: list[int]) -> list[list[list[int]]]:
        """A list per caption; only that of the caption which is shown is filled, at 45 us each."""
        counts = np.array([len(row["captions"]) for row in rows])
        shown = choose_captions(self.stream.order.seed, np.array(epochs), np.array(keys), counts).tolist()
        captions = [row["captions"][place] for row, place in zip(rows, shown, strict=True)]
        languages = None
        if "languages" in self.stream.features:
            languages = [row["languages"][place] for row, place in zip(rows, shown, strict=True)]
        tokens = encode_captions(self.tokenizer, captions, languages, self.max_seq_length)
        return [
            [ids if other == place else [] for other in range(len(row["captions"]))]
            for row, place, ids in zip(rows, shown, tokens, strict=True)
        ]


class _Lane:
    """One lane in one epoch: its open shard, and the block that is being given out."""

    def __init__(self, stream: Stream):
        self.stream, self.reader = stream, stream.reader()
        self.at: tuple[int, int] | None = None
        self.records: dict[int, Record] = {}
        self.before: tuple[tuple[int, int], dict[int, Record]] | None = None

    def record(self, slot: Slot) -> Record:
        """The record of a slot; slots are asked for in the order of the stream."""
        self.before = None
        if self.at != (slot.shard, slot.block):
            self.records.clear()  # before the next block is read
            self.records.update(self._read(self.reader, slot))
            self.at = slot.shard, slot.block
        return self.records[slot.row]

    def block(self, slot: Slot) -> dict[int, Record]:
        """Row -> record of the block of `slot`, read once more where the lane is beyond it."""
        key = slot.shard, slot.block
        if self.at == key:
            return self.records
        if self.before is None or self.before[0] != key:
            self.before = key, self._read(self.stream.reader(), slot)
        return self.before[1]

    def _read(self, reader: ShardReader, slot: Slot) -> dict[int, Record]:
        size = self.stream.order.block_size
        start = slot.block * size
        stop = min(start + size, self.stream.shards[slot.shard].rows)
        return dict(enumerate(reader.read(slot.shard, start, stop), start))


class StreamBatches:
    """This rank's share of the global batches of steps `start` to `stop`.

    Batches do not depend on the number of workers: each worker collates the rows of its lanes, and `merge_parts` puts the parts
    of a step together as one process would have.

    Args:
        steps: reads and collates.
        start, stop: steps.
        workers: processes that read and decode; no more than this rank has lanes are started.
        pin_memory: whether batches go to a GPU.
    """

    def __init__(self, steps: StreamSteps, start: int, stop: int, workers: int, pin_memory: bool = False):
        self.steps, self.start, self.stop, self.pin_memory = steps, start, stop, pin_memory
        self.num_workers = min(workers, steps.stream.order.lanes // ranks.world_size())

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[Batch]:
        # The loader takes from its workers in turn, and each gives one part per step.
        parts = max(1, self.num_workers)
        return iter(RestartingLoader(self._loader, len(self), self._name, parts, self._merge))

    def _loader(self, number: int) -> DataLoader:
        return DataLoader(
            _Parts(self.steps, self.start + number, self.stop, ranks.rank(), ranks.world_size()),
            batch_size=None,
            num_workers=self.num_workers,
            prefetch_factor=4 if self.num_workers else None,
            worker_init_fn=_one_thread,
        )

    def _merge(self, parts: list[Batch]) -> Batch:
        return merge_parts(parts, self.steps.collate.pad_token_id, self.pin_memory)

    def _name(self, number: int) -> str:
        """The step, and the files that its rows are in."""
        stream, step = self.steps.stream, self.start + number
        slots = stream.order.batch(step, Reader(ranks.rank(), ranks.world_size()))
        urls = sorted({stream.shards[slot.shard].url for slot in slots})
        return (
            f"step {step + 1} ({len(urls)} shards: {', '.join(urls[:_SHOWN])}{', ...' if len(urls) > _SHOWN else ''})"
        )


class _Parts(IterableDataset):
    def __init__(self, steps: StreamSteps, start: int, stop: int, rank: int, world_size: int):
        self.steps, self.start, self.stop, self.rank, self.world_size = steps, start, stop, rank, world_size

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        place = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return self.steps.batches(self.start, self.stop, Reader(self.rank, self.world_size, *place))


_PER_CAPTION = ("image_ids", "lengths", "languages")


def merge_parts(parts: list[Batch], pad_token_id: int, pin_memory: bool = False) -> Batch:
    """One training batch of several, as if `Collator` had made it: longest caption first, then as the stream has them."""
    lengths = [length for part in parts for length in part["lengths"]]
    positions = [position for part in parts for position in part["rows"].tolist()]
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], positions[place]))
    place_of = torch.empty(len(order), dtype=torch.long)
    place_of[torch.tensor(order, dtype=torch.long)] = torch.arange(len(order))
    merged: Batch = {}
    for name, value in parts[0].items():
        if isinstance(value, Tensor):
            blank = pad_token_id if name == "input_ids" else 0
            merged[name] = _scatter([part[name] for part in parts], place_of, blank, pin_memory)
        else:
            items = [item for part in parts for item in part[name]]
            merged[name] = [items[place] for place in order] if name in _PER_CAPTION and items else items
    merged["caption_image"] = torch.arange(len(order))
    return merged


def _scatter(parts: list[Tensor], place_of: Tensor, blank: int, pin_memory: bool) -> Tensor:
    """Lay the rows of all parts at their places, padded to the longest with `blank`. Every row is copied once."""
    width = max(part.shape[1] for part in parts if part.ndim > 1) if parts[0].ndim > 1 else None
    shape = (len(place_of), *parts[0].shape[1:]) if width is None else (len(place_of), width, *parts[0].shape[2:])
    ragged = width is not None and any(part.shape[1] != width for part in parts)
    whole = torch.empty(shape, dtype=parts[0].dtype, pin_memory=pin_memory)
    if ragged:
        whole.fill_(blank)
    for part, places in zip(parts, place_of.split([len(part) for part in parts]), strict=True):
        if ragged:
            whole[places, : part.shape[1]] = part
        else:
            whole[places] = part
    return whole


def _with_tokens(features: datasets.Features) -> pa.Schema:
    tokens = {
        "input_ids": datasets.Sequence(datasets.Sequence(datasets.Value("int32"))),
        "image_key": datasets.Value("int64"),
        "caption_keys": datasets.Sequence(datasets.Value("int64")),
    }
    return datasets.Features({**features, **tokens}).arrow_schema


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)
