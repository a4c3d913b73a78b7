"""Captions become token ids once; keys say what is equal."""

import io
import os
import time
from collections.abc import Sequence
from pathlib import Path

import datasets
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Value, disable_progress_bars
from PIL import Image
from transformers import PreTrainedTokenizerFast

from mm_utils.data.loaders import LoaderArguments, Loaders
from mm_utils.data.tokens import fingerprint, tokenize_captions, tokenize_splits
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


def one_row(*captions: str, image_id: str = "a") -> Dataset:
    row = {"id": image_id, "image": {"bytes": png(0), "path": None}, "captions": list(captions)}
    return Dataset.from_list([row], features=FEATURES)


def test_special_tokens_in_captions_are_text(tokenizer: PreTrainedTokenizerFast) -> None:
    captions = ["one [SEP] two", "[CLS] one", "[PAD] [PAD]", "[MASK]"]
    for ids in tokenize_captions(one_row(*captions), tokenizer, 16)[0]["input_ids"]:
        assert ids[0] == tokenizer.cls_token_id
        assert ids[-1] == tokenizer.sep_token_id
        special = {tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id}
        assert not special & set(ids[1:-1])


def test_captions_are_cut(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenize_captions(one_row("one " * 100, "two"), tokenizer, 10)[0]["input_ids"]
    assert list(map(len, tokens)) == [10, 3]
    assert tokens[0][-1] == tokenizer.sep_token_id


def test_a_caption_of_a_megabyte(tokenizer: PreTrainedTokenizerFast) -> None:
    for caption in ("one two " * 125_000, "x" * 1_000_000):
        start = time.perf_counter()
        tokens = tokenize_captions(one_row(caption), tokenizer, 16)[0]["input_ids"]
        assert time.perf_counter() - start < 1
        assert len(tokens[0]) <= 16
    assert (
        tokenize_captions(one_row("one two " * 125_000), tokenizer, 16)[0]["input_ids"]
        == (tokenize_captions(one_row("one two " * 100), tokenizer, 16)[0]["input_ids"])
    )


def test_keys_say_what_is_equal(tokenizer: PreTrainedTokenizerFast) -> None:
    found = tokenize_captions(one_row("A  red\tcar ", "a red car", "a red cat", "ÄÖ", "äö"), tokenizer, 16)[0]
    keys = found["caption_keys"]
    assert keys[0] == keys[1] != keys[2]
    assert keys[3] == keys[4]
    other = tokenize_captions(one_row("a red car", image_id="b"), tokenizer, 16)[0]
    assert other["caption_keys"] == keys[:1]
    assert other["image_key"] != found["image_key"]
    assert all(0 <= key < 2**63 for key in [*keys, found["image_key"]])


def cached(folder: Path) -> dict[str, int]:
    return {path.name: os.stat(path).st_mtime_ns for path in (folder / "tandem_tokens").glob("*.arrow")}


def test_tokens_are_made_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = DatasetDict({"train": rows_of(8), "validation": rows_of(3)})
    before = tokenize_splits(splits, new_tokenizer(), 16)
    written = cached(own_cache)
    assert len(written) == 2
    with monkeypatch.context() as patch:
        patch.setattr("mm_utils.data.tokens._key", lambda _: pytest.fail("tokenised again"))
        fresh, used = new_tokenizer(), new_tokenizer()
        used(["one two"], truncation=True, max_length=5, padding=True)  # a tokenizer keeps its last settings
        for tokenizer in (fresh, used, fresh):
            again = tokenize_splits(splits, tokenizer, 16)
            assert again["train"].to_dict() == before["train"].to_dict()
    assert cached(own_cache) == written


def test_tokens_are_made_anew_for_other_settings(own_cache: Path) -> None:
    rows = rows_of(4)
    tokenize_captions(rows, new_tokenizer(), 16)
    for number, (changed, tokenizer, length) in enumerate(
        [
            (rows, new_tokenizer(), 15),
            (rows, new_tokenizer(["something else"]), 16),
            (rows.select([0, 1]), new_tokenizer(), 16),
        ]
    ):
        tokens = tokenize_captions(changed, tokenizer, length)
        assert len(cached(own_cache)) == number + 2
        assert len(tokens) == len(changed)


def test_fingerprint_follows_images_and_captions(tokenizer: PreTrainedTokenizerFast) -> None:
    def print_of(rows: Dataset, length: int = 16) -> str:
        return fingerprint(tokenize_captions(rows, tokenizer, length))

    base = print_of(rows_of(6))
    assert len(base) == 16
    int(base, 16)
    assert base == print_of(rows_of(6))
    assert base == print_of(rows_of(6), length=5)
    assert base == print_of(rows_of(8).select(range(6)))
    assert base == print_of(rows_of(6).add_column("split", ["x"] * 6))
    assert base == print_of(rows_of(6, broken=[1]))  # the same image id, whatever its bytes
    different = {
        "order": rows_of(6).select([1, 0, 2, 3, 4, 5]),
        "rows": rows_of(5),
        "caption": rows_of(6).map(lambda row: {"captions": [*row["captions"], "more"]}),
        "images": rows_of(6).map(lambda row: {"id": row["id"] + "x"}),
    }
    prints = {print_of(rows) for rows in different.values()}
    assert len(prints) == len(different)
    assert base not in prints
