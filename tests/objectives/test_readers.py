"""What terms read of rows: boxes and moments follow their medium into the square, negatives are drawn; all become tokens once."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, List, Value
from PIL import ExifTags, Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mm_utils.data import media
from mm_utils.data.batches.dataset import EvaluationTransform, Pairs, TrainingTransform
from mm_utils.data.batches.order import GlobalOrder, choose_captions
from mm_utils.data.batches.sizes import BatchSizes
from mm_utils.data.batches.tokens import encode_captions, tokenize_captions, tokenize_splits
from mm_utils.data.images import encode
from mm_utils.data.media.medium import Window
from mm_utils.data.scenes import load_scenes
from mm_utils.objectives.grounding.regions import MAX_REGIONS, RegionReader, visible_regions
from mm_utils.objectives.negatives import NEGATIVE_IDS, Negatives
from mm_utils.text import caption_key
from tests.kit.fault_images import save
from tests.kit.media_files import media_rows
from tests.kit.numbered_rows import (
    FEATURES,
    SIZE,
    WORDS,
    equal,
    loaders,
    number_said,
    rows_of,
    training_pairs,
)

pytestmark = pytest.mark.usefixtures("own_cache")


REGIONS = Features({**FEATURES, "regions": [{"box": [Value("float32")], "phrase": Value("string")}]})
READERS = (RegionReader(),)
FIELDS = {"region_boxes", "region_input_ids", "region_attention_mask", "region_keys"}


def a_region(x: float, y: float, width: float, height: float, phrase: str = "picture one") -> dict[str, Any]:
    return {"box": [x, y, width, height], "phrase": phrase}


def rows_with(regions: list[Any], images: list[bytes] | None = None) -> Dataset:
    """A row for each list of regions."""
    images = images or [encode(Image.new("RGB", (40, 30)), "png")] * len(regions)
    rows = [
        {"id": f"{place}", "image": {"bytes": content, "path": None}, "captions": ["picture"], "regions": listed}
        for place, (listed, content) in enumerate(zip(regions, images, strict=True))
    ]
    return Dataset.from_list(rows, features=REGIONS)


def tokenized(rows: Dataset, tokenizer: PreTrainedTokenizerFast) -> Dataset:
    return tokenize_splits(DatasetDict(train=rows), tokenizer, 16, readers=READERS)["train"]


def white_box(kind: str, width: int, height: int, box: tuple[int, int, int, int]) -> bytes:
    image = Image.new("RGB", (width, height), "black")
    image.paste("white", (box[0], box[1], box[0] + box[2], box[1] + box[3]))
    if kind != "rotated":
        return encode(image, kind)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # stored lying down, to be turned clockwise
    return save(image.transpose(Image.Transpose.ROTATE_90), "JPEG", quality=95, exif=exif)


def whites(pixels: Tensor) -> list[float]:
    """Return left, top, right and bottom of the white area, in shares of the square."""
    size = pixels.shape[-1]
    light = pixels.float().mean(0) / 255
    edges = []
    for along in (1, 0):
        line = light.amax(along)
        white = (line > 0.5).nonzero()[:, 0]
        edges.append((white.min().item() / size, (white.max().item() + 1) / size))
    return [edges[1][0], edges[0][0], edges[1][1], edges[0][1]]


@pytest.mark.parametrize(("kind", "width", "height"), [("png", 60, 90), ("jpeg", 700, 480), ("rotated", 700, 480)])
@pytest.mark.parametrize(
    "transform",
    [
        TrainingTransform(media.Image(48, min_crop_area=0.3), READERS),
        TrainingTransform(media.Image(48), READERS),
        EvaluationTransform(media.Image(48), READERS),
    ],
    ids=["random", "whole", "evaluation"],
)
def test_boxes_are_where_the_pixels_are(
    kind: str, width: int, height: int, transform: EvaluationTransform, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Also if a JPEG is decoded at a reduced scale, or rotated."""
    rng = random.Random(0)
    boxes = []
    for _ in range(12):
        across = width * rng.uniform(0.2, 0.4) // 1
        down = height * rng.uniform(0.2, 0.4) // 1
        boxes.append((rng.randint(0, int(width - across)), rng.randint(0, int(height - down)), int(across), int(down)))
    images = [white_box(kind, width, height, box) for box in boxes]
    rows = tokenized(rows_with([[a_region(*box)] for box in boxes], images), tokenizer)
    pairs = Pairs(rows, transform)
    seen = 0
    for row in range(len(boxes)):
        example = pairs[(row, 0)]
        assert len(example["region_boxes"]) == len(example["region_keys"]) == len(example["region_input_ids"]) <= 1
        for box in example["region_boxes"]:
            assert box.tolist() == pytest.approx(whites(example["pixel_values"]), abs=1.5 / 48)
            seen += 1
    assert seen >= 5


def test_training_draws_some_of_many_regions(tokenizer: PreTrainedTokenizerFast) -> None:
    listed = [a_region(2 * place, 1, 3, 5, f"picture {word}") for place, word in enumerate(WORDS)]
    rows = tokenized(rows_with([listed]), tokenizer)
    pairs = training_pairs(rows, readers=READERS, min_crop_area=0.99, seed=1)
    again = training_pairs(rows, readers=READERS, min_crop_area=0.99, seed=1)
    everything = [caption_key(region["phrase"]) for region in listed]
    chosen = [pairs[(0, epoch)]["region_keys"] for epoch in range(20)]
    assert chosen == [again[(0, epoch)]["region_keys"] for epoch in range(20)]
    assert len(set(map(tuple, chosen))) > 10
    for keys in chosen:
        assert len(keys) == len(set(keys)) <= MAX_REGIONS
        assert keys == [key for key in everything if key in keys]
    evaluated = Pairs(rows, EvaluationTransform(media.Image(SIZE), readers=READERS))[(0, 0)]
    assert len(evaluated["region_keys"]) > MAX_REGIONS


def test_phrases_become_tokens_once(tokenizer: PreTrainedTokenizerFast) -> None:
    listed = [
        [a_region(1, 2, 3, 4, "picture two"), a_region(5, 6, 7, 8, "Picture  TWO")],
        [],
        None,
        [a_region(0, 0, 1, 1)],
    ]
    rows = rows_with(listed).select([3, 0, 2, 1])
    found = tokenized(rows, tokenizer)
    assert found["id"] == ["3", "0", "2", "1"]
    assert list(map(len, found["region_keys"])) == [1, 2, 0, 0]
    assert found["region_boxes"][1] == [1, 2, 3, 4, 5, 6, 7, 8]
    phrases = [region["phrase"] for region in listed[0] or []]
    assert found["region_input_ids"][1] == encode_captions(tokenizer, phrases, 16)
    assert found["region_keys"][1] == [caption_key("picture two")] * 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mm_utils.objectives.grounding.regions.encode_lists", lambda *_: pytest.fail("tokenised again"))
        assert tokenized(rows, tokenizer)._fingerprint == found._fingerprint


def a_moment(start: float, end: float, phrase: str = "picture one") -> dict[str, Any]:
    return {"span": [start, end], "phrase": phrase}


def test_moments_are_regions_on_the_time_axis(tokenizer: PreTrainedTokenizerFast) -> None:
    listed = [[a_moment(1.5, 2), a_moment(3, 8.05, "picture two")], None, []]
    columns = {"captions": [["picture"]] * 3, "seconds": [8.0] * 3, "moments": listed}
    found = tokenized(media_rows("sound", [b""] * 3, **columns), tokenizer)
    assert found["region_boxes"][0] == [1.5, 0, 0.5, 1, 3, 0, 5, 1]  # the second ends with the sound
    assert found["region_input_ids"][0] == encode_captions(tokenizer, ["picture one", "picture two"], 16)
    assert list(map(len, found["region_keys"])) == [2, 0, 0]
    shown = visible_regions(found[0], (8.0, 1.0), Window(0.2, 0.0, 0.7, 1.0))  # seconds 1.6 to 5.6
    assert shown["region_boxes"].tolist() == [pytest.approx([0, 0, 0.1, 1], abs=1e-6), pytest.approx([0.35, 0, 1, 1])]


def test_regions_of_a_batch_belong_to_their_images(tokenizer: PreTrainedTokenizerFast) -> None:
    scenes = load_scenes(12, 1)["train"]
    rows = tokenized(scenes, tokenizer)
    of_run = loaders(min_crop_area=0.8)
    of_run.readers = READERS
    [batch] = of_run.train(rows, GlobalOrder(12, BatchSizes((0,), (12,)), seed=0), 0, 1)
    assert {name: batch[name].shape[:2] for name in FIELDS} == dict.fromkeys(FIELDS, (12, 3))
    for place, row in enumerate(batch["rows"].tolist()):
        phrases = [region["phrase"] for region in scenes[row]["regions"]]  # crops of 0.8 cut no object in half
        spans = batch["region_attention_mask"][place].sum(1).tolist()
        assert [span > 0 for span in spans] == [True] * len(phrases) + [False] * (3 - len(phrases))
        found = [ids[:span].tolist() for ids, span in zip(batch["region_input_ids"][place], spans, strict=True)]
        assert found[: len(phrases)] == encode_captions(tokenizer, phrases, 16)
        keys = batch["region_keys"][place, : len(phrases)]
        assert keys.tolist() == [caption_key(phrase) for phrase in phrases]


# -- negatives -------------------------------------------------------------------------------------------------------------
NEGATIVES = (Negatives(),)


def with_negatives(tokenizer: PreTrainedTokenizerFast, rows: Dataset, negatives: list[Any]) -> Dataset:
    rows = rows.add_column("negatives", negatives, feature=List(Value("string")))
    return tokenize_splits(DatasetDict(train=rows), tokenizer, 16, readers=NEGATIVES)["train"]


def test_negatives_are_tokenised_like_captions_and_are_none_of_the_image(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = rows_of(4)
    given = [["Picture  ZERO", "picture two"], [], None, ["picture one"]]
    found = with_negatives(tokenizer, rows, given)
    expected = encode_captions(tokenizer, ["picture two", "picture one"], 16)
    assert list(found[NEGATIVE_IDS]) == [[expected[0]], [], [], [expected[1]]]
    cut = {**found[0], "input_ids": [expected[0]], "epoch": 0}  # equal as far as both are read
    assert Negatives().example(cut, None, seed=0) == {"negative": []}


def test_one_negative_a_row_is_drawn_by_seed_epoch_and_id(tokenizer: PreTrainedTokenizerFast) -> None:
    others = [f"picture {word}" for word in WORDS]
    negatives = [others[: index % 5] for index in range(6)]
    plain = tokenize_captions(rows_of(6, broken=[5]), tokenizer, 16)
    rows = with_negatives(tokenizer, rows_of(6, broken=[5]), negatives)
    drawn = {}
    for seed, epoch in itertools.product((0, 1), range(24)):
        found = training_pairs(rows, seed=seed, readers=NEGATIVES).__getitems__([(row, epoch) for row in range(5)])
        alone = training_pairs(plain, seed=seed).__getitems__([(row, epoch) for row in range(5)])
        for one, other in zip(found, alone, strict=True):
            negative = one.pop("negative")
            assert equal(one, other)  # caption and crop are drawn as before
            drawn.setdefault((seed, one["row"]), []).append(
                number_said(torch.tensor(negative), tokenizer) if negative else None
            )
    assert set(drawn[0, 0]) == {None}
    assert set(drawn[0, 4]) == set(range(4))
    assert drawn[0, 4] != drawn[1, 4]
    of_run = loaders()
    of_run.readers = NEGATIVES
    order = GlobalOrder(6, BatchSizes((0,), (6,)), seed=0)
    [batch] = of_run.train(rows, order, 0, 1)
    said = [
        number_said(ids, tokenizer) if mask.any() else None
        for ids, mask in zip(batch["negative_input_ids"], batch["negative_attention_mask"], strict=True)
    ]
    assert said == [drawn[0, row][0] for row in batch["rows"].tolist()]
    assert not any(name.startswith("negative") for name in next(iter(of_run.evaluation(rows, 6))))


def test_negatives_are_drawn_apart_from_captions() -> None:
    keys = np.arange(1, 400) * 7919
    captions = choose_captions(3, np.ones(len(keys), np.int64), keys, np.full(len(keys), 2))
    rows = [{NEGATIVE_IDS: [[0], [1]], "input_ids": [[2]], "image_key": int(key), "epoch": 1} for key in keys]
    negatives = [Negatives().example(row, None, 3)["negative"][0] for row in rows]
    assert 0.3 < (captions == negatives).mean() < 0.7
