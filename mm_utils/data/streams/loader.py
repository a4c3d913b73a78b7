"""Load this rank's batches of a stream: each worker yields a part of every step."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from mm_utils import distributed
from mm_utils.data.batches.dataset import Batch, Collator, TrainingTransform
from mm_utils.data.batches.loaders import DeviceLoader, Loaders
from mm_utils.data.batches.order import choose_captions, replacement_rows
from mm_utils.data.batches.tokens import caption_key, encode_captions, image_key
from mm_utils.data.batches.workers import WorkerLoader, worker_options
from mm_utils.data.streams.order import Reader, Slot
from mm_utils.data.streams.rows import FEATURES, Row
from mm_utils.data.streams.shards import ShardReader
from mm_utils.data.streams.stream import Stream

_SHOWN = 4  # files of a step that a message names


def train_stream(
    loaders: Loaders, stream: Stream, tokenizer: PreTrainedTokenizerBase, start: int, stop: int
) -> DeviceLoader:
    """Return this rank's share of the global batches of steps `start` to `stop` of a stream."""
    transform = loaders.training_transform(stream.order.seed)
    collate = Collator(loaders.pad_token_id, loaders.medium, longest_first=True)
    steps = StreamSteps(stream, tokenizer, loaders.arguments.max_seq_length, transform, collate)
    pin_memory = loaders.device.type == "cuda"
    batches = StreamBatches(steps, start, stop, loaders.arguments.num_workers, pin_memory)
    return loaders.on_device(batches)


@dataclass
class StreamSteps:
    """Turns steps of a stream into collated batches.

    An example is a pure function of (seed, epoch, image id); its `row` is the row's position in the stream.

    Attributes:
        stream: where rows are read.
        tokenizer, max_seq_length: how captions become tokens, by the rules of `mm_utils.data.batches.tokens`.
        transform: makes training examples of rows.
        collate: stacks them.
    """

    stream: Stream
    tokenizer: PreTrainedTokenizerBase
    max_seq_length: int
    transform: TrainingTransform
    collate: Collator

    def batches(self, start: int, stop: int, reader: Reader) -> Iterator[Batch]:
        """Yield the part of steps `start` to `stop` that `reader` reads.

        An unusable row is named in `skipped`, and another one of its block takes its place, if any of those that
        `replacement_rows` names can be used.
        """
        groups: dict[tuple[int, int], _Group] = {}
        for step in range(start, stop):
            slots = self.stream.order.batch(step, reader)
            groups = {key: group for key, group in groups.items() if not slots or key[0] >= slots[0].epoch}
            for slot in slots:
                if (slot.epoch, slot.group) not in groups:
                    groups[slot.epoch, slot.group] = _Group(self.stream)
            drawn = [groups[slot.epoch, slot.group].row(slot) for slot in slots]
            examples = self._attempt(slots, [slot.row for slot in slots], drawn)
            for place, slot in enumerate(slots):
                if "skipped" in examples[place]:
                    examples[place] = self._substitute(groups[slot.epoch, slot.group], slot, examples[place])
            yield self.collate(examples)

    def _substitute(self, group: "_Group", slot: Slot, failed: dict[str, Any]) -> dict[str, Any]:
        rows = group.block(slot)
        first = min(rows)
        for place in replacement_rows(self.stream.order.seed, slot.epoch, slot.position, len(rows)):
            [example] = self._attempt([slot], [first + place], [rows[first + place]])
            if "skipped" not in example:
                return {**failed, **example}
        return failed

    def _attempt(self, slots: list[Slot], numbers: list[int], read: list[Row]) -> list[dict[str, Any]]:
        """Return each slot's example from its row of the shard, or why there is none."""
        checked = [
            (slot, self.stream.check(row, slot.shard, number))
            for slot, number, row in zip(slots, numbers, read, strict=True)
        ]
        good = [(slot, row) for slot, row in checked if not isinstance(row, str)]
        examples = iter(self._examples([row for _, row in good], [slot for slot, _ in good]) if good else [])
        return [
            {"skipped": row, "skipped_id": self.stream.place_of(slot.shard, number)}
            if isinstance(row, str)
            else next(examples)
            for (slot, row), number in zip(checked, numbers, strict=True)
        ]

    def _examples(self, rows: list[dict[str, Any]], slots: list[Slot]) -> list[dict[str, Any]]:
        keys, epochs = [image_key(row["id"]) for row in rows], [slot.epoch for slot in slots]
        batch: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in FEATURES}
        batch |= {"epoch": epochs, "image_key": keys, "input_ids": self._tokens(rows, keys, epochs)}
        batch["caption_keys"] = [[caption_key(caption) for caption in row["captions"]] for row in rows]
        examples = self.transform.examples(batch)
        return [
            example if "skipped" in example else {**example, "row": slot.position}
            for example, slot in zip(examples, slots, strict=True)
        ]

    def _tokens(self, rows: list[dict[str, Any]], keys: list[int], epochs: list[int]) -> list[list[list[int]]]:
        """Return a list per caption; only that of the shown caption is filled, at 45 us each."""
        counts = np.array([len(row["captions"]) for row in rows])
        shown = choose_captions(self.stream.order.seed, np.array(epochs), np.array(keys), counts).tolist()
        captions = [row["captions"][place] for row, place in zip(rows, shown, strict=True)]
        tokens = encode_captions(self.tokenizer, captions, self.max_seq_length)
        return [
            [ids if other == place else [] for other in range(len(row["captions"]))]
            for row, place, ids in zip(rows, shown, tokens, strict=True)
        ]


class _Group:
    """One shard group in one epoch: its open shard, and the block that is being given out."""

    def __init__(self, stream: Stream):
        self.stream, self.reader = stream, stream.reader()
        self.at: tuple[int, int] | None = None
        self.rows: dict[int, Row] = {}
        self.before: tuple[tuple[int, int], dict[int, Row]] | None = None

    def row(self, slot: Slot) -> Row:
        """Return the row of a slot; slots are asked for in the order of the stream."""
        self.before = None
        if self.at != (slot.shard, slot.block):
            self.rows.clear()  # before the next block is read
            self.rows.update(self._read(self.reader, slot))
            self.at = slot.shard, slot.block
        return self.rows[slot.row]

    def block(self, slot: Slot) -> dict[int, Row]:
        """Return number -> row of the block of `slot`, read once more where the group is beyond it."""
        key = slot.shard, slot.block
        if self.at == key:
            return self.rows
        if self.before is None or self.before[0] != key:
            self.before = key, self._read(self.stream.reader(), slot)
        return self.before[1]

    def _read(self, reader: ShardReader, slot: Slot) -> dict[int, Row]:
        size = self.stream.order.block_size
        start = slot.block * size
        stop = min(start + size, self.stream.shards[slot.shard].rows)
        return dict(enumerate(reader.read(slot.shard, start, stop), start))


class StreamBatches:
    """This rank's share of the global batches of steps `start` to `stop`.

    Batches do not depend on the number of workers: each worker collates the rows of its shard groups, and `merge_parts`
    puts the parts of a step together as one process would have.

    Args:
        steps: reads and collates.
        workers: processes that read and decode; no more than this rank has shard groups are started.
        pin_memory: whether batches go to a GPU.
    """

    def __init__(self, steps: StreamSteps, start: int, stop: int, workers: int, pin_memory: bool = False):
        self.steps, self.start, self.stop, self.pin_memory = steps, start, stop, pin_memory
        self.num_workers = min(workers, steps.stream.order.groups // distributed.world_size())

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[Batch]:
        return iter(WorkerLoader(self._batches(), len(self), self._name, self.num_workers))

    def _batches(self) -> Iterator[Batch]:
        place = distributed.rank(), distributed.world_size()
        parts = iter(
            DataLoader(
                _Parts(self.steps, self.start, self.stop, *place),
                batch_size=None,
                **worker_options(self.num_workers),
            )
        )
        # The loader takes from its workers in turn, and each yields one part per step.
        while of_step := list(islice(parts, max(1, self.num_workers))):
            yield merge_parts(of_step, self.steps.collate.pad_token_id, self.pin_memory)

    def _name(self, number: int) -> str:
        """Name a step, and the files that its rows are in."""
        stream, step = self.steps.stream, self.start + number
        slots = stream.order.batch(step, Reader(distributed.rank(), distributed.world_size()))
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


_PER_CAPTION = ("image_ids", "lengths")


def merge_parts(parts: list[Batch], pad_token_id: int, pin_memory: bool = False) -> Batch:
    """Merge parts as `Collator` would: longest caption first, then the stream's order."""
    lengths = [length for part in parts for length in part["lengths"]]
    positions = [position for part in parts for position in part["rows"].tolist()]
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], positions[place]))
    place_of = torch.empty(len(order), dtype=torch.long)
    place_of[torch.tensor(order, dtype=torch.long)] = torch.arange(len(order))
    merged: Batch = {}
    for name, value in parts[0].items():
        if isinstance(value, Tensor):
            blank = pad_token_id if name.endswith("input_ids") else 0
            merged[name] = _scatter([part[name] for part in parts], place_of, blank, pin_memory)
        else:
            items = [item for part in parts for item in part[name]]
            merged[name] = [items[place] for place in order] if name in _PER_CAPTION and items else items
    merged["caption_image"] = torch.arange(len(order))
    return merged


def _scatter(parts: list[Tensor], place_of: Tensor, blank: int, pin_memory: bool) -> Tensor:
    """Lay the rows of all parts at their places, padded with `blank`, each copied once."""
    inner = tuple(map(max, zip(*(part.shape[1:] for part in parts), strict=True)))
    ragged = any(part.shape[1:] != inner for part in parts)
    whole = torch.empty((len(place_of), *inner), dtype=parts[0].dtype, pin_memory=pin_memory)
    if ragged:
        whole.fill_(blank)
    for part, places in zip(parts, place_of.split([len(part) for part in parts]), strict=True):
        if ragged:
            whole[(places, *map(slice, part.shape[1:]))] = part
        else:
            whole[places] = part
    return whole
