"""Rows become examples, and examples batches: caption, crop, mirroring, padding, unreadable images, workers; pairs: tests/contracts."""

import io
import multiprocessing
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from datasets import Dataset, disable_progress_bars
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import PreTrainedTokenizerFast

from mm_utils import distributed
from mm_utils.arguments import parse_args
from mm_utils.data import media
from mm_utils.data.batches.dataset import Collator
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.batches.workers import end_workers, worker_loader
from mm_utils.data.images import encode
from tests.kit.numbered_rows import (
    FEATURES,
    SIZE,
    WORDS,
    equal,
    loaders,
    number_said,
    number_shown,
    pairs_of,
    rows_of,
    training_pairs,
)

disable_progress_bars()
pytestmark = pytest.mark.usefixtures("own_cache")


# -- examples -----------------------------------------------------------------------------------------------------------
def test_an_example_depends_on_seed_epoch_and_id_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = tokenize_captions(rows_of(), tokenizer, 16)
    pairs, again = (training_pairs(rows, min_crop_area=0.3, seed=1) for _ in range(2))
    turned = training_pairs(rows.select(range(11, -1, -1)), min_crop_area=0.3, seed=1)
    together = pairs.__getitems__([(row, 2) for row in range(12)])
    for row in range(12):
        for other in (pairs[(row, 2)], again[(row, 2)], together[row], turned[(11 - row, 2)]):
            assert equal({**other, "row": row}, together[row])


def test_captions_and_crops_change_with_epoch_and_seed(tokenizer: PreTrainedTokenizerFast) -> None:
    buffer = io.BytesIO()
    Image.merge(
        "RGB", [Image.linear_gradient("L"), Image.radial_gradient("L"), Image.linear_gradient("L").rotate(90)]
    ).save(buffer, "PNG")
    captions = [f"picture {word}" for word in WORDS[:4]]
    rows = Dataset.from_list(
        [{"id": "a", "image": {"bytes": buffer.getvalue(), "path": None}, "captions": captions}], features=FEATURES
    )
    rows = tokenize_captions(rows, tokenizer, 16)
    found = {
        seed: [training_pairs(rows, min_crop_area=0.3, seed=seed)[(0, epoch)] for epoch in range(40)]
        for seed in (0, 1)
    }
    for examples in found.values():
        said = [number_said(torch.tensor(example["input_ids"][0]), tokenizer) for example in examples]
        assert set(said) == {0, 1, 2, 3}
        assert max(map(said.count, said)) < 20  # 10 each in expectation
        assert len({example["pixel_values"].numpy().tobytes() for example in examples}) == 40
    assert any(not equal(one, other) for one, other in zip(found[0], found[1], strict=True))


# -- broken images ------------------------------------------------------------------------------------------------------
def test_a_broken_image_is_left_out_of_evaluation_and_replaced_in_training(tokenizer: PreTrainedTokenizerFast) -> None:
    """With image and caption, by another one every time."""
    rows = tokenize_captions(rows_of(12, broken=(2, 7)), tokenizer, 16)
    evaluated = list(loaders().evaluation(rows, 4))
    assert [batch["skipped_ids"] for batch in evaluated] == [["id-2"], ["id-7"], []]
    assert evaluated[0]["skipped"][0].startswith("image id-2: embedded image: ")
    assert sum(len(batch["rows"]) for batch in evaluated) == 10
    order, replacements = GlobalOrder(12, BatchSizes((0,), (4,)), seed=0), set[int]()
    for step, batch in enumerate(loaders().train(rows, order, 0, 30)):
        drawn = [row for row, _ in order.batch(step)]
        assert batch["skipped_ids"] == [f"id-{row}" for row in drawn if row in (2, 7)]
        assert len(batch["rows"]) == 4
        replacements |= {*batch["rows"].tolist()} - {*drawn}
        said = [number_said(ids, tokenizer) for ids in batch["input_ids"]]
        assert said == batch["rows"].tolist() == [number_shown(pixels) for pixels in batch["pixel_values"]]
    assert not {2, 7} & replacements
    assert len(replacements) > 5


@given(bad=st.sets(st.integers(0, 12), max_size=11), world=st.sampled_from([1, 2, 4]), start=st.integers(0, 9))
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_replacements_are_the_same_on_any_ranks_and_after_a_restart(
    bad: set[int], world: int, start: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = tokenize_captions(rows_of(13, broken=sorted(bad)), tokenizer, 16)
    order = GlobalOrder(13, BatchSizes((0,), (6,)), seed=1)
    straight = list(loaders().train(rows, order, 0, start + 2))[start:]
    shares = []
    for rank in range(world):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distributed, "rank", lambda rank=rank: rank)
            patch.setattr(distributed, "world_size", lambda: world)
            shares.append(list(loaders().train(rows, order, start, start + 2)))
    for whole, parts in zip(straight, zip(*shares, strict=True), strict=True):
        together = [pair for part in parts for pair in pairs_of(part)]
        assert sorted(together) == sorted(pairs_of(whole))
        assert sorted(name for part in parts for name in part["skipped_ids"]) == sorted(whole["skipped_ids"])
        if len(bad) < 7:  # else sixteen attempts may all fail
            assert len(together) == 6


def test_a_batch_of_broken_images_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    """Also the share of a rank without a row, if there are more ranks than rows in a batch."""
    rows = tokenize_captions(rows_of(4, broken=range(4)), tokenizer, 16)
    [batch] = loaders().train(rows, GlobalOrder(4, BatchSizes((0,), (4,)), seed=0), 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "rank", lambda: 4)
        patch.setattr(distributed, "world_size", lambda: 5)
        [nothing] = loaders().train(rows, GlobalOrder(4, BatchSizes((0,), (4,)), seed=0), 0, 1)
    assert len(batch["skipped"]) == 4
    assert nothing["skipped"] == []
    for empty in (batch, nothing):
        assert empty["pixel_values"].shape == (0, 3, SIZE, SIZE)
        assert empty["input_ids"].shape == empty["attention_mask"].shape == (0, 1)
        assert empty["ids"].shape == (0, 2)
        assert empty["rows"].shape == empty["caption_image"].shape == (0,)
        assert {empty[name].dtype for name in ("input_ids", "ids", "rows", "caption_image")} == {torch.long}


# -- collator -----------------------------------------------------------------------------------------------------------
def example(lengths: Sequence[int], row: int = 0) -> dict[str, Any]:
    return {
        "row": row,
        "image_id": f"id-{row}",
        "image_key": 100 + row,
        "pixel_values": torch.full((3, SIZE, SIZE), row, dtype=torch.uint8),
        "input_ids": [list(range(1, length + 1)) for length in lengths],
        "caption_keys": [1000 * row + length for length in lengths],
        "all_input_ids": [[row] * count for count in range(1, row + 1)],
    }


def test_collator_puts_the_longest_caption_first() -> None:
    lengths = [3, 9, 1, 9, 4]
    rows = [example([length], row) for row, length in enumerate(lengths)]
    batch = Collator(0, media.Image(SIZE), longest_first=True)([*rows, {"skipped": "why"}])
    assert batch["lengths"] == [9, 9, 4, 3, 1]
    assert batch["rows"].tolist() == batch["pixel_values"][:, 0, 0, 0].tolist() == [1, 3, 4, 0, 2]
    assert batch["ids"][:, 0].tolist() == [101, 103, 104, 100, 102]
    assert batch["attention_mask"].sum(1).tolist() == batch["lengths"]
    # Rows have as many captions as their number, of 1, 2, 3 ... tokens
    assert batch["all_input_ids"].shape == (5, 4, 4)
    for row, mask, ids in zip(
        batch["rows"].tolist(), batch["all_attention_mask"], batch["all_input_ids"], strict=True
    ):
        assert mask.sum(1).tolist() == [*range(1, row + 1), *[0] * (4 - row)]
        assert (ids[mask.bool()] == row).all()


SIDES = ["white is left", "Right-handed", "weiß ist links", "bên trái", "it says “no”", "a STOP sign", "no. 9"]


@pytest.mark.parametrize(
    "caption", ["a picture", "two dogs in the grass", "ein Rechteck", "một con chó", "A DOG", *SIDES]
)
def test_half_of_the_images_are_mirrored_where_no_caption_has_sides(
    caption: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    picture = Image.new("RGB", (20, 20))
    picture.paste("white", (0, 0, 10, 20))
    value, captions = {"bytes": encode(picture, "png"), "path": None}, ["a picture", caption]
    rows = [{"id": str(row), "image": value, "captions": captions} for row in range(40)]
    pairs = training_pairs(
        tokenize_captions(Dataset.from_list(rows, features=FEATURES), tokenizer, 16), horizontal_flip=True
    )
    mirrored = sum(bool(pairs[(row, 0)]["pixel_values"][0][:, 0].float().mean() < 100) for row in range(40))
    assert mirrored == 0 if caption in SIDES else 10 < mirrored < 30


# -- loaders ------------------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_stay_as_they_are_while_workers_go_on(workers: int, tokenizer: PreTrainedTokenizerFast) -> None:
    """Also when an iteration is broken off and another begins; with any number of workers."""
    rows = tokenize_captions(rows_of(broken=[3]), tokenizer, 16)
    order = GlobalOrder(12, BatchSizes((0,), (5,)), seed=3)
    loader = loaders(workers).train(rows, order, 0, 20)
    first = [batch for batch, _ in zip(loader, range(3), strict=False)]
    again = list(loader)
    assert len(again) == len(loader) == 20
    assert all(equal(*both) for both in zip(first, again, strict=False))
    assert all(equal(*both) for both in zip(again, loaders(0).train(rows, order, 0, 20), strict=True))


def test_workers_take_the_spare_cores_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = parse_args(LoaderArguments, argv=["--dataloader_num_workers", "5"])[LoaderArguments]
    assert parsed.num_workers == 5
    for cores, local_ranks, expected in ((8, "1", 7), (8, "2", 3), (8, "64", 0), (400, "1", 16)):
        monkeypatch.setattr("mm_utils.distributed.available_cores", lambda cores=cores: cores)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
        assert LoaderArguments().num_workers == expected


def test_workers_end_by_themselves_where_a_cycle_keeps_the_loader() -> None:
    """Torch's own end, of what is garbage, waits 5 seconds for each and then kills it. Killed workers: `tests/faults/test_data.py`."""
    before = {*multiprocessing.active_children()}
    loader = worker_loader(list(range(4)), 2)
    loader.itself = loader  # type: ignore[attr-defined]
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]
    workers = [*{*multiprocessing.active_children()} - before]
    assert len(workers) == 2
    end_workers()
    assert [worker.exitcode for worker in workers] == [0, 0]
