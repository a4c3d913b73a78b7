"""Rows become examples, and examples batches: caption, crop, mirroring, padding, unreadable images."""

import io
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from datasets import Dataset, disable_progress_bars
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import PreTrainedTokenizerFast

from mm_utils import distributed
from mm_utils.data import media
from mm_utils.data.batches.column_cache import SKIPPED
from mm_utils.data.batches.dataset import MOST_CAPTIONS, Collator, TrainingTransform
from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.images import encode
from tests.kit.numbered_rows import (
    FEATURES,
    SIZE,
    WORDS,
    equal,
    evaluation_pairs,
    loaders,
    number_said,
    number_shown,
    pairs_of,
    png,
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


@pytest.mark.parametrize("mixed", [False, True])
def test_raw_pixels_make_the_same_examples(mixed: bool, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = rows_of()

    def to_raw(row: dict[str, Any], place: int) -> dict[str, Any]:
        image = Image.open(io.BytesIO(png(place)))
        raw = {"bytes": encode(image, "raw"), "path": f"raw:{image.width}x{image.height}"}
        return {"image": row["image"] if mixed and place % 2 else raw}

    raw = rows.map(to_raw, with_indices=True, features=FEATURES)
    rows, raw = (tokenize_captions(either, tokenizer, 16) for either in (rows, raw))
    for make in (partial(training_pairs, min_crop_area=0.4), training_pairs, evaluation_pairs):
        for row in range(12):
            assert equal(make(raw)[(row, 1)], make(rows)[(row, 1)])


# -- pairing ------------------------------------------------------------------------------------------------------------
def test_an_image_keeps_its_captions_in_training(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = tokenize_captions(rows_of().shuffle(seed=4), tokenizer, 16)
    order = GlobalOrder(12, BatchSizes((0,), (5,)), seed=3)
    for step, batch in enumerate(loaders().train(rows, order, 0, 24)):
        said = [number_said(ids, tokenizer) for ids in batch["input_ids"]]
        assert [number_shown(pixels) for pixels in batch["pixel_values"]] == said
        drawn = rows.select(batch["rows"].tolist())
        assert list(drawn["id"]) == [f"id-{number}" for number in said]
        assert sorted(batch["rows"].tolist()) == sorted(row for row, _ in order.batch(step))
        assert batch["caption_image"].tolist() == list(range(5))
        assert batch["ids"][:, 0].tolist() == list(drawn["image_key"])
        assert all(key in keys for key, keys in zip(batch["ids"][:, 1].tolist(), drawn["caption_keys"], strict=True))


def test_evaluation_has_every_caption_once(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = tokenize_captions(rows_of(), tokenizer, 16)
    seen: list[str] = []
    images: list[int] = []
    for batch in loaders().evaluation(rows, 5):
        assert len(batch["pixel_values"]) == len(batch["rows"])
        assert len(batch["ids"]) == len(batch["input_ids"]) == len(batch["caption_image"])
        images += batch["rows"].tolist()
        for ids, image in zip(batch["input_ids"], batch["caption_image"], strict=True):
            assert number_said(ids, tokenizer) == number_shown(batch["pixel_values"][image]) == batch["rows"][image]
            seen.append(tokenizer.decode(ids, skip_special_tokens=True))
    assert images == list(range(12))
    assert seen == [caption for captions in rows["captions"] for caption in captions]


# -- broken images ------------------------------------------------------------------------------------------------------
def test_a_broken_image_is_named_and_left_out_of_evaluation(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = tokenize_captions(rows_of(12, broken=[2, 7]), tokenizer, 16)
    found = list(loaders().evaluation(rows, 4))
    assert [batch["skipped_ids"] for batch in found] == [["id-2"], ["id-7"], []]
    assert [batch["skipped"][0].startswith("image id-2: embedded image: ") for batch in found[:1]] == [True]
    assert sum(len(batch["rows"]) for batch in found) == 10


def test_another_row_replaces_a_broken_image_in_training(tokenizer: PreTrainedTokenizerFast) -> None:
    """With image and caption; all other rows are the same as without a broken one."""
    whole, broken = (tokenize_captions(rows_of(12, broken=bad), tokenizer, 16) for bad in ((), (2, 7)))
    order = GlobalOrder(12, BatchSizes((0,), (4,)), seed=0)
    replacements = []
    for step, batches in enumerate(
        zip(*(loaders().train(rows, order, 0, 30) for rows in (whole, broken)), strict=True)
    ):
        expected, batch = map(pairs_of, batches)
        drawn = [row for row, _ in order.batch(step)]
        bad = [row for row in drawn if row in (2, 7)]
        assert len(batch) == 4
        assert batches[1]["skipped_ids"] == [f"id-{row}" for row in bad]
        assert [reason.split(": ")[0] for reason in batches[1]["skipped"]] == [f"image id-{row}" for row in bad]
        for pair in expected:
            if pair[0] not in bad:
                batch.remove(pair)
        assert len(batch) == len(bad)
        replacements += [row for row, *_ in batch]
        said = [number_said(ids, tokenizer) for ids in batches[1]["input_ids"]]
        assert said == batches[1]["rows"].tolist() == [number_shown(pixels) for pixels in batches[1]["pixel_values"]]
    assert len(replacements) == 20  # ten epochs
    assert not {2, 7} & set(replacements)
    assert len(set(replacements)) > 5  # another one every time


@given(bad=st.sets(st.integers(0, 12), max_size=11), world=st.sampled_from([1, 2, 4]), start=st.integers(0, 9))
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_collator_pads_to_the_longest() -> None:
    longest = 9
    batch = Collator(77, media.Image(SIZE))([example([1, longest], 4), {"skipped": "why"}, example([1], 9)])
    assert batch["input_ids"].shape == (3, longest)
    assert batch["input_ids"][1].tolist() == list(range(1, longest + 1))
    assert batch["input_ids"][0].tolist() == [1] + [77] * (longest - 1)
    assert batch["attention_mask"].sum(1).tolist() == batch["lengths"] == [1, longest, 1]
    assert batch["attention_mask"][0].tolist() == [1] + [0] * (longest - 1)
    assert batch["ids"].tolist() == [[104, 4001], [104, 4000 + longest], [109, 9001]]
    assert batch["caption_image"].tolist() == [0, 0, 1]
    assert batch["rows"].tolist() == [4, 9]
    assert batch["image_ids"] == ["id-4", "id-9"]
    assert batch["skipped"] == ["why"]
    assert batch["pixel_values"].dtype == torch.uint8
    assert batch["pixel_values"][:, 0, 0, 0].tolist() == [4, 9]


def test_collator_puts_the_longest_caption_first() -> None:
    lengths = [3, 9, 1, 9, 4]
    rows = [example([length], row) for row, length in enumerate(lengths)]
    batch = Collator(0, media.Image(SIZE), longest_first=True)([*rows, {"skipped": "why"}])
    assert batch["lengths"] == [9, 9, 4, 3, 1]
    assert batch["rows"].tolist() == batch["pixel_values"][:, 0, 0, 0].tolist() == [1, 3, 4, 0, 2]
    assert batch["ids"][:, 0].tolist() == [101, 103, 104, 100, 102]
    assert batch["attention_mask"].sum(1).tolist() == batch["lengths"]
    assert batch["all_input_ids"].shape == (
        5,
        4,
        4,
    )  # rows have as many captions as their number, of 1, 2, 3 ... tokens
    for row, mask, ids in zip(
        batch["rows"].tolist(), batch["all_attention_mask"], batch["all_input_ids"], strict=True
    ):
        assert mask.sum(1).tolist() == [*range(1, row + 1), *[0] * (4 - row)]
        assert (ids[mask.bool()] == row).all()


@pytest.mark.parametrize(("captions", "shown"), [(3, 2), (7, 5), (1, 0)])
def test_training_shows_all_captions_beginning_with_the_one_of_the_pair(captions: int, shown: int) -> None:
    ids = [[1, number] for number in range(captions)]
    row = {"input_ids": ids, "caption_keys": ids, "caption": shown, SKIPPED: None}
    found = TrainingTransform(media.Image(SIZE))._show(row)
    expected = [(shown + more) % captions for more in range(min(captions, MOST_CAPTIONS))]
    assert found["all_input_ids"] == [ids[number] for number in expected]
    assert found["input_ids"] == [ids[shown]]


SIDES = [
    "white is left",
    "Right-handed",
    "weiß ist links",
    "im Uhrzeigersinn",
    "bên trái",
    "it says “no”",
    "a STOP sign",
    "no. 9",
]


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
