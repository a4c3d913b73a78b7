"""The WordPiece tokenizer (determinism, size, cache, languages, special tokens), and colours as backbones want them."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessor,
    EfficientNetImageProcessor,
    LevitImageProcessor,
    MobileViTImageProcessor,
    PreTrainedTokenizerFast,
    ViTImageProcessor,
)

from mm_utils.model import processor as tokenizers
from mm_utils.model.processor import SPECIAL_TOKENS, cached_tokenizer, train_tokenizer
from tests.kit.models import CAPTIONS


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(CAPTIONS, 200)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "tandem_tokenizers"


@pytest.mark.parametrize("vocab_size", [30, 90, 1000])
def test_training_is_deterministic(vocab_size):
    """The trainer numbers letters in the order of a hash map that differs each time, and breaks ties by number."""
    others = ["Ça, c'est 一只红色的猫!", "Синий круг-над «квадратом» №7", "नीला घेरा", "e\u0301te\u0301 \U0001f600x"]
    captions = [*CAPTIONS, *others]
    assert len({train_tokenizer(iter(captions), vocab_size).backend_tokenizer.to_str() for _ in range(5)}) == 1
    tokenizer = train_tokenizer(captions, vocab_size)
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert set(tokenizer.get_added_vocab()) == set(SPECIAL_TOKENS.values())
    assert tokenizer.convert_ids_to_tokens(range(5)) == list(SPECIAL_TOKENS.values())


def test_vocabulary_and_alphabet_are_limited(monkeypatch):
    assert len(train_tokenizer(CAPTIONS, 90)) == 90
    monkeypatch.setattr(tokenizers, "ALPHABET", 10)
    vocabulary = set(train_tokenizer(CAPTIONS, 30).get_vocab()) - {*SPECIAL_TOKENS.values()}
    assert len({token.removeprefix("##") for token in vocabulary if len(token.removeprefix("##")) == 1}) == 10


def test_a_tokenizer_is_trained_once_per_captions_and_size(cache, monkeypatch):
    sizes = []

    def count(captions: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
        sizes.append(vocab_size)
        return train_tokenizer(captions, vocab_size)

    monkeypatch.setattr(tokenizers, "train_tokenizer", count)
    first, second = (cached_tokenizer(iter(CAPTIONS), 150) for _ in range(2))
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    cached_tokenizer(CAPTIONS[1:], 150)
    cached_tokenizer(CAPTIONS, 120)
    assert sizes == [150, 150, 120]
    assert len(list(cache.rglob("tokenizer.json"))) == 3


def test_many_captions_are_sampled_evenly(cache, monkeypatch):
    many = [f"{caption} {number}" for number in range(4) for caption in CAPTIONS]
    monkeypatch.setattr(tokenizers, "SAMPLE", len(CAPTIONS))
    found = cached_tokenizer(many, 150).backend_tokenizer.to_str()
    assert found == train_tokenizer(many[::4], 150).backend_tokenizer.to_str()


# Images
MEAN, STD = [0.1, 0.2, 0.3], [0.9, 0.8, 0.7]
PROCESSORS = {
    "given": CLIPImageProcessor(image_mean=MEAN, image_std=STD),
    "without normalisation": ViTImageProcessor(do_normalize=False),
    "without rescaling": ViTImageProcessor(do_rescale=False, image_mean=[100.0] * 3, image_std=[50.0] * 3),
    "to 127.5": ViTImageProcessor(rescale_factor=1 / 127.5, image_mean=[1.0] * 3, image_std=[1.0] * 3),
    "normalised twice": EfficientNetImageProcessor(image_mean=MEAN, image_std=STD),
    "with an offset": EfficientNetImageProcessor(rescale_factor=1 / 127.5, rescale_offset=True, include_top=False),
    "in order": MobileViTImageProcessor(do_flip_channel_order=False),
    "larger than its square": LevitImageProcessor(),
}


@pytest.mark.parametrize("own", PROCESSORS.values(), ids=PROCESSORS)
def test_colours_get_the_values_that_the_backbone_wants(own: Any) -> None:
    ours = tokenizers._center_square_processor(own)
    for colour in ((200, 100, 50), (0, 255, 7)):
        image = Image.new("RGB", (300, 300), colour)
        expected, found = (
            processor(image, return_tensors="pt")["pixel_values"][0, :, 100, 100].float() for processor in (own, ours)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_crop_decides_the_size_where_there_is_one() -> None:
    sizes = {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}
    for crops, side in ((True, 32), (False, 40)):
        own = CLIPImageProcessor(**sizes, do_center_crop=crops)
        assert tokenizers._center_square_processor(own).crop_size["height"] == side
    assert tokenizers._center_square_processor(CLIPImageProcessor(**sizes), 24).crop_size["height"] == 24
