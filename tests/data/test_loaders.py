"""From rows to batches: which caption and crop, what is padded, what is skipped, what is computed only once."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Value, disable_progress_bars
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from mm_utils import ranks
from mm_utils.data.augment import center_square
from mm_utils.data.batches import Collator, Pairs
from mm_utils.data.loaders import DeviceLoader, LoaderArguments, Loaders
from mm_utils.data.order import BatchSizes, GlobalOrder, RankBatches
from mm_utils.data.tokens import global_order, tokenize_captions
from mm_utils.wordpiece import train_tokenizer

CPU = torch.device("cpu")
FEATURES = Features(
    {"id": Value("string"), "image": datasets.Image(decode=False), "captions": datasets.Sequence(Value("string"))}
)
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
SIZE = 16
disable_progress_bars()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return new_tokenizer()


def new_tokenizer(extra: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    return train_tokenizer([f"picture {word} says it once more" for word in WORDS] + list(extra), 300)


def colour(index: int) -> tuple[int, int, int]:
    """Each image has its own colour, which survives any crop."""
    return (20 * index, 255 - 20 * index, 7 * index)


def png(index: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (20 + index, 30), colour(index)).save(buffer, "PNG")
    return buffer.getvalue()


def rows_of(count: int = 12, broken: Sequence[int] = ()) -> Dataset:
    """Image i has i % 4 + 1 captions, all of which say its number."""
    rows = [
        {
            "id": f"id-{index}",
            "image": {"bytes": png(index)[: 50 if index in broken else None], "path": None},
            "captions": [f"picture {WORDS[index]}" + " once more" * extra for extra in range(index % 4 + 1)],
        }
        for index in range(count)
    ]
    return Dataset.from_list(rows, features=FEATURES)


def loaders(num_workers: int = 0, min_crop_area: float = 0.5, max_seq_length: int = 16) -> Loaders:
    arguments = LoaderArguments(max_seq_length, 1, min_crop_area, num_workers)
    return Loaders(arguments, CPU, 0, SIZE, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def number_said(ids: Tensor, tokenizer: PreTrainedTokenizerFast) -> int:
    return next(WORDS.index(word) for word in tokenizer.decode(ids).split() if word in WORDS)


def number_shown(pixels: Tensor) -> int:
    red = pixels[0].mean() * 0.2 + 0.5
    return round(float(red * 255 / 20))


def equal(batch: dict[str, Any], other: dict[str, Any]) -> bool:
    return batch.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        for name, value in batch.items()
    )


# -- examples -----------------------------------------------------------------------------------------------------------


def test_an_example_depends_on_seed_epoch_and_id_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = tokenize_captions(rows_of(), tokenizer, 16)
    pairs, again = (Pairs(rows, SIZE, train=True, min_crop_area=0.3, seed=1) for _ in range(2))
    turned = Pairs(rows.select(range(11, -1, -1)), SIZE, train=True, min_crop_area=0.3, seed=1)
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
        seed: [Pairs(rows, SIZE, train=True, min_crop_area=0.3, seed=seed)[(0, epoch)] for epoch in range(40)]
        for seed in (0, 1)
    }
    for examples in found.values():
        said = [number_said(torch.tensor(example["input_ids"][0]), tokenizer) for example in examples]
        assert set(said) == {0, 1, 2, 3}
        assert max(map(said.count, said)) < 20  # 10 each in expectation
        assert len({example["pixel_values"].numpy().tobytes() for example in examples}) == 40
    assert any(not equal(one, other) for one, other in zip(found[0], found[1], strict=True))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("train", [True, False])
def test_workers_change_nothing(train: bool, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = tokenize_captions(rows_of(12, broken=[3]), tokenizer, 16)

    def batches(num_workers: int) -> list[dict[str, Any]]:
        make = loaders(num_workers)
        if train:
            return list(make.train(rows, GlobalOrder(12, BatchSizes((0,), (5,)), seed=3), 2, 9))
        return list(make.evaluation(rows, 5))

    alone, with_workers = batches(0), batches(2)
    assert len(alone) == len(with_workers) == (7 if train else 3)
    assert all(equal(one, other) for one, other in zip(alone, with_workers, strict=True))


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


def test_evaluation_gives_every_caption_once(tokenizer: PreTrainedTokenizerFast) -> None:
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


def test_evaluation_images_are_the_whole_centre(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = tokenize_captions(rows_of(), tokenizer, 16)
    for index in range(12):
        image = Image.open(io.BytesIO(png(index)))
        assert torch.equal(Pairs(rows, SIZE, train=False)[(index, 0)]["pixel_values"], center_square(image, SIZE))


# -- broken images ------------------------------------------------------------------------------------------------------


def test_a_broken_image_is_skipped_and_named(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = tokenize_captions(rows_of(12, broken=[2, 7]), tokenizer, 16)
    skipped: list[str] = []
    shown: list[int] = []
    for batch in loaders().train(rows, GlobalOrder(12, BatchSizes((0,), (4,)), seed=0), 0, 3):
        assert len(batch["rows"]) + len(batch["skipped"]) == 4
        skipped += batch["skipped"]
        shown += batch["rows"].tolist()
        assert [number_said(ids, tokenizer) for ids in batch["input_ids"]] == batch["rows"].tolist()
    assert sorted(shown) == [index for index in range(12) if index not in (2, 7)]
    assert sorted(reason[: len("image id-2: embedded image: ")] for reason in skipped) == [
        "image id-2: embedded image: ",
        "image id-7: embedded image: ",
    ]
    found = list(loaders().evaluation(rows, 4))
    assert [len(batch["skipped"]) for batch in found] == [1, 1, 0]
    assert sum(len(batch["rows"]) for batch in found) == 10


def test_broken_files_of_every_kind(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "page.jpg").write_text("<html>not found</html>")
    values = [
        *({"bytes": None, "path": str(tmp_path / name)} for name in ("empty.png", "page.jpg", "gone.png")),
        *({"bytes": content, "path": None} for content in (b"", png(0)[:40])),
    ]
    rows = [{"id": str(place), "image": value, "captions": ["zero"]} for place, value in enumerate(values)]
    tokens = tokenize_captions(Dataset.from_list(rows, features=FEATURES), tokenizer, 16)
    [batch] = loaders().evaluation(tokens, 10)
    assert [reason.split(":")[0] for reason in batch["skipped"]] == [f"image {place}" for place in range(5)]
    assert all(name in batch["skipped"][place] for place, name in enumerate(("empty.png", "page.jpg", "gone.png")))


def test_a_batch_of_broken_images_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    """Also the share of a rank that has no row, where there are more ranks than rows in a batch."""
    rows = tokenize_captions(rows_of(4, broken=range(4)), tokenizer, 16)
    [batch] = loaders().train(rows, GlobalOrder(4, BatchSizes((0,), (4,)), seed=0), 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "rank", lambda: 4)
        patch.setattr(ranks, "world_size", lambda: 5)
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
    }


@pytest.mark.parametrize("longest", [1, 8, 9, 64])
def test_collator_pads_to_the_longest(longest: int) -> None:
    batch = Collator(pad_token_id=77, image_size=SIZE)([example([1, longest], 4), {"skipped": "why"}, example([1], 9)])
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
    batch = Collator(pad_token_id=0, image_size=SIZE, longest_first=True)([*rows, {"skipped": "why"}])
    assert batch["lengths"] == [9, 9, 4, 3, 1]
    assert batch["rows"].tolist() == batch["pixel_values"][:, 0, 0, 0].tolist() == [1, 3, 4, 0, 2]
    assert batch["ids"][:, 0].tolist() == [101, 103, 104, 100, 102]
    assert batch["attention_mask"].sum(1).tolist() == batch["lengths"]


# -- length buckets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rearranged", [False, True])
def test_buckets_know_the_captions_that_are_shown(rearranged: bool, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = tokenize_captions(rows_of(12), tokenizer, 16)
    if rearranged:
        rows = rows.select([7, 2, 11, 3, 5, 6, 10, 0])
    order = global_order(rows, BatchSizes((0,), (4,)), 3, 2)
    assert order.caption_lengths is not None
    pairs = Pairs(rows, SIZE, train=True, seed=3)
    draws = [(row, epoch) for row in range(len(rows)) for epoch in range(5)]
    shown = [len(pairs[draw]["input_ids"][0]) for draw in draws]
    assert order.caption_lengths(*map(np.array, zip(*draws, strict=True))).tolist() == shown
    assert len(set(shown)) > 2
    assert global_order(rows, BatchSizes((0,), (4,)), 3).caption_lengths is None


# -- device -------------------------------------------------------------------------------------------------------------


def test_images_are_normalised_on_the_device() -> None:
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    loader = DeviceLoader(DataLoader([{"pixel_values": pixels, "skipped": []}], batch_size=None), CPU, mean, std)
    [batch] = loader
    expected = (pixels / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(batch["pixel_values"], expected, rtol=1e-5, atol=1e-5)
    assert batch["pixel_values"].dtype == torch.float32
    assert batch["skipped"] == []
    assert len(loader) == 1
    assert loader.wait >= 0


def test_ranks_share_the_batches(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = tokenize_captions(rows_of(), tokenizer, 16)
    order = GlobalOrder(12, BatchSizes((0,), (7,)), seed=0)
    whole = list(loaders().train(rows, order, 0, 4))
    shares = []
    for rank in range(3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranks, "rank", lambda rank=rank: rank)
            patch.setattr(ranks, "world_size", lambda: 3)
            assert len(RankBatches(order, 0, 4)) == 4
            shares.append(list(loaders().train(rows, order, 0, 4)))
    for batch, parts in zip(whole, zip(*shares, strict=True), strict=True):
        rows = torch.cat([part["rows"] for part in parts])
        by_row, whole_by_row = rows.argsort(), batch["rows"].argsort()
        for name in ("pixel_values", "rows", "ids"):
            assert torch.equal(torch.cat([part[name] for part in parts])[by_row], batch[name][whole_by_row])


# -- arguments ----------------------------------------------------------------------------------------------------------


def test_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mm_utils.ranks.available_cores", lambda: 8)
    assert LoaderArguments(dataloader_num_workers=3).num_workers == 3
    for local_ranks, expected in (("1", 7), ("2", 3), ("8", 0), ("64", 0)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
        assert LoaderArguments().num_workers == expected
    monkeypatch.setattr("mm_utils.ranks.available_cores", lambda: 400)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert LoaderArguments().num_workers == 16


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_seq_length": 2}, "--max_seq_length is 2"),
        ({"min_crop_area": 0.0}, "--min_crop_area is 0.0"),
        ({"min_crop_area": 1.5}, "--min_crop_area is 1.5"),
    ],
)
def test_errors_name_the_flag(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoaderArguments(**values)
