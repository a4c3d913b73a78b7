"""Negatives of the data: their tokens, and which one is drawn."""

import itertools
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, List, Value
from transformers import PreTrainedTokenizerFast

from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.data.batches.tokens import encode_captions, tokenize_captions, tokenize_splits
from mm_utils.objectives.negatives import NEGATIVE_IDS, Negatives
from tests.kit.numbered_rows import WORDS, equal, loaders, number_said, rows_of, training_pairs

pytestmark = pytest.mark.usefixtures("own_cache")
TEXTS = List(Value("string"))
READERS = (Negatives(),)


def with_negatives(
    tokenizer: PreTrainedTokenizerFast, rows: Dataset, negatives: list[Any], kind: Any = TEXTS
) -> Dataset:
    rows = rows.add_column("negatives", negatives, feature=kind)
    return tokenize_splits(DatasetDict(train=rows), tokenizer, 16, readers=READERS)["train"]


def test_negatives_are_tokenised_like_captions_and_are_none_of_the_image(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = rows_of(4)
    plain = tokenize_captions(rows, tokenizer, 16)
    given = [["Picture  ZERO", "picture two"], [], None, ["picture one"]]
    found = with_negatives(tokenizer, rows, given)
    expected = encode_captions(tokenizer, ["picture two", "picture one"], 16)
    assert list(found[NEGATIVE_IDS]) == [[expected[0]], [], [], [expected[1]]]
    for name in ("input_ids", "image_key", "caption_keys"):
        assert list(found[name]) == list(plain[name])
    assert NEGATIVE_IDS not in plain.column_names
    none = with_negatives(tokenizer, rows, [[]] * 4)
    assert list(none[NEGATIVE_IDS]) == [[]] * 4


def test_one_negative_a_row_is_drawn_by_seed_epoch_and_id(tokenizer: PreTrainedTokenizerFast) -> None:
    negatives = [[f"picture {WORDS[other]}" for other in range(index % 5)] for index in range(6)]
    plain = tokenize_captions(rows_of(6, broken=[5]), tokenizer, 16)
    rows = with_negatives(tokenizer, rows_of(6, broken=[5]), negatives)
    drawn = {}
    for seed, epoch in itertools.product((0, 1), range(24)):
        found = training_pairs(rows, seed=seed, readers=READERS).__getitems__([(row, epoch) for row in range(5)])
        turned = training_pairs(rows.select([4, 3, 2, 1, 0]), seed=seed, readers=READERS).__getitems__(
            [(4, epoch), (0, epoch)]
        )
        assert [turned[0]["negative"], turned[1]["negative"]] == [found[0]["negative"], found[4]["negative"]]
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
    of_run.readers = READERS
    order = GlobalOrder(6, BatchSizes((0,), (6,)), seed=0)
    [batch] = of_run.train(rows, order, 0, 1)
    said = [
        number_said(ids, tokenizer) if mask.any() else None
        for ids, mask in zip(batch["negative_input_ids"], batch["negative_attention_mask"], strict=True)
    ]
    assert said == [drawn[0, row][0] for row in batch["rows"].tolist()]
    for others in (of_run.train(plain, order, 0, 1), of_run.evaluation(rows, 6), loaders().train(rows, order, 0, 1)):
        assert not any(name.startswith("negative") for name in next(iter(others)))
