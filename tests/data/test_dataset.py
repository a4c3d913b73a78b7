"""Rows get tokens and keys, become examples, and examples batches: crops, mirroring, padding, unreadable images, workers; pairs: tests/contracts."""

import multiprocessing
import os
import re
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import (
    BertTokenizer,
    ByT5Tokenizer,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    T5Tokenizer,
    XLMRobertaTokenizer,
)

from mm_utils import distributed
from mm_utils.arguments import parse_args
from mm_utils.data import media
from mm_utils.data.arguments import LoaderArguments
from mm_utils.data.batches.dataset import Collator, TrainingPairs, TrainingTransform
from mm_utils.data.batches.mirroring import has_sides
from mm_utils.data.batches.order import GlobalOrder
from mm_utils.data.batches.sizes import BatchSizes
from mm_utils.data.batches.tokens import (
    Reach,
    caption_key,
    encode_captions,
    fingerprint,
    image_key,
    tokenize_captions,
    unread,
)
from mm_utils.data.batches.workers import end_workers, worker_loader
from mm_utils.data.images import encode
from tests.kit.fault_images import TEXTS as AWKWARD
from tests.kit.fault_images import save
from tests.kit.numbered_rows import (
    FEATURES,
    SIZE,
    WORDS,
    equal,
    loaders,
    new_tokenizer,
    number_said,
    number_shown,
    pairs_of,
    png,
    rows_of,
    training_pairs,
)

pytestmark = pytest.mark.usefixtures("own_cache")


# -- examples -----------------------------------------------------------------------------------------------------------


def test_rows_are_shown_by_a_transform_of_datasets_that_has_no_state(tokenizer: PreTrainedTokenizerFast) -> None:
    """Its examples follow from the columns that it is given; nothing of an earlier call is left."""
    rows = tokenize_captions(rows_of(), tokenizer, 16)
    transform = TrainingTransform(media.Image(SIZE, min_crop_area=0.3), seed=1, horizontal_flip=True)
    settings_before = repr(transform)
    views = {epoch: rows.with_transform(partial(transform.of_epoch, epoch)) for epoch in (0, 1)}
    first = {epoch: view[:]["example"] for epoch, view in views.items()}
    for epoch, row in ((1, 5), (0, 11), (1, 0), (0, 0)):
        assert equal(views[epoch][row]["example"], first[epoch][row])
        assert equal(TrainingPairs(rows, transform)[(row, epoch)], {**first[epoch][row], "row": row})
        turned = TrainingPairs(rows.select(range(11, -1, -1)), transform)[(11 - row, epoch)]
        assert equal(turned, {**first[epoch][row], "row": 11 - row})  # its id decides, not its place
    assert not equal(first[0][5], first[1][5])
    assert repr(transform) == settings_before
    with pytest.raises(FrozenInstanceError):
        transform.seed = 2  # type: ignore[misc]


def test_captions_and_crops_change_with_epoch_and_seed(tokenizer: PreTrainedTokenizerFast) -> None:
    content = save(Image.linear_gradient("L").convert("RGB"))
    captions = [f"picture {word}" for word in WORDS[:4]]
    row = {"id": "a", "image": {"bytes": content, "path": None}, "captions": captions}
    rows = tokenize_captions(Dataset.from_list([row], features=FEATURES), tokenizer, 16)
    found = []
    for seed in (0, 1):
        pairs = training_pairs(rows, min_crop_area=0.3, seed=seed)
        found.append([pairs[(0, epoch)] for epoch in range(40)])
        said = [number_said(torch.tensor(example["input_ids"][0]), tokenizer) for example in found[-1]]
        assert set(said) == {0, 1, 2, 3}
        assert max(map(said.count, said)) < 20  # 10 each in expectation
        assert len({example["pixel_values"].numpy().tobytes() for example in found[-1]}) > 30
    assert any(not equal(one, other) for one, other in zip(*found, strict=True))


# -- broken images ------------------------------------------------------------------------------------------------------
def test_a_broken_image_is_left_out_of_evaluation_and_replaced_in_training(tokenizer: PreTrainedTokenizerFast) -> None:
    """With image and caption, by another one every time."""
    rows = tokenize_captions(rows_of(12, broken=(2, 7)), tokenizer, 16)
    evaluated = list(loaders().evaluation(rows, 4))
    assert [batch["skipped_ids"] for batch in evaluated] == [["id-2"], ["id-7"], []]
    assert evaluated[0]["skipped"][0].startswith("image id-2: embedded image: ")
    assert sum(len(batch["rows"]) for batch in evaluated) == 10
    order = GlobalOrder(12, BatchSizes((0,), (4,)), seed=0)
    replacements = set()
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
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    order = GlobalOrder(4, BatchSizes((0,), (4,)), 0)
    [batch] = loaders().train(rows, order, 0, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "rank", lambda: 4)
        patch.setattr(distributed, "world_size", lambda: 5)
        [nothing] = loaders().train(rows, order, 0, 1)
    assert (len(batch["skipped"]), nothing["skipped"]) == (4, [])
    shapes = {"pixel_values": (0, 3, SIZE, SIZE), "input_ids": (0, 1), "attention_mask": (0, 1), "ids": (0, 2)}
    shapes |= {"rows": (0,), "caption_image": (0,)}
    for empty in (batch, nothing):
        assert {name: empty[name].shape for name in shapes} == shapes
        assert {empty[name].dtype for name in shapes if name != "pixel_values"} == {torch.long}


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


LANGUAGES = {  # captions of images that must not be mirrored; of the last two the script is unknown
    True: "一只狗在左边/牌子上写着字/al este/un chien à gauche/um cão à esquerda/собака слева/стрелка часов/di sebelah kiri/كلب على اليسار"
    "/اليد اليمنى/बाएँ हाथ/घड़ी/ডান দিকে/犬が右にいる/개/หมา",
    False: "一只狗在沙滩上跑/吃西瓜的孩子/en este parque/cette image montre un chat/um gato dorme/лев и тигр/seekor anjing berlari"
    "/كلب يجري في الحديقة/घास में दौड़ता कुत्ता/মাঠে কুকুর/犬が走っている",
}


@pytest.mark.parametrize("has", LANGUAGES)
def test_sides_are_known_in_the_largest_languages(has: bool) -> None:
    assert [text for text in LANGUAGES[has].split("/") if has_sides({"captions": [text]}) != has] == []


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
    value = {"bytes": encode(picture, "png"), "path": None}
    captions = ["a picture", caption]
    rows = [{"id": str(row), "image": value, "captions": captions} for row in range(40)]
    pairs = training_pairs(
        tokenize_captions(Dataset.from_list(rows, features=FEATURES), tokenizer, 16), horizontal_flip=True
    )
    mirrored = sum(bool(pairs[(row, 0)]["pixel_values"][0][:, 0].float().mean() < 100) for row in range(40))
    assert mirrored == 0 if caption in SIDES else 10 < mirrored < 30


# -- loaders ------------------------------------------------------------------------------------------------------------


def test_workers_take_the_spare_cores_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = parse_args(LoaderArguments, argv=["--dataloader_num_workers", "5"])[LoaderArguments]
    assert parsed.num_workers == 5
    for cores, local_ranks, expected in ((8, "1", 7), (8, "2", 3), (8, "64", 0), (400, "1", 16)):
        monkeypatch.setattr("mm_utils.cores.available_cores", lambda cores=cores: cores)
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


# -- tokens, keys and the fingerprint -----------------------------------------------------------------------------------
def cached(folder: Path) -> dict[str, int]:
    return {str(path): os.stat(path).st_mtime_ns for path in folder.glob("tandem_tokens/*/*.arrow")}


def test_tokens_are_made_once_and_anew_for_other_settings(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(8)
    before = tokenize_captions(rows, new_tokenizer(), 16)
    written = cached(own_cache)
    assert len(written) == 1
    with monkeypatch.context() as patch:
        patch.setattr("mm_utils.data.batches.tokens.caption_key", lambda _: pytest.fail("tokenised again"))
        fresh = new_tokenizer()
        used = new_tokenizer()
        used(["one two"], truncation=True, max_length=5, padding=True)  # a tokenizer keeps its last settings
        for tokenizer in (fresh, used, fresh):
            assert tokenize_captions(rows, tokenizer, 16).to_dict() == before.to_dict()
    assert cached(own_cache) == written
    others = [
        (rows, new_tokenizer(), 15),
        (rows, new_tokenizer(["something else"]), 16),
        (rows.select([0, 1]), new_tokenizer(), 16),
    ]
    for number, (changed, tokenizer, length) in enumerate(others):
        assert len(tokenize_captions(changed, tokenizer, length)) == len(changed)
        assert len(cached(own_cache)) == number + 2


def on_disk(rows: Dataset, folder: Path) -> Dataset:
    rows.save_to_disk(folder)
    return datasets.load_from_disk(str(folder))


def test_only_the_new_columns_are_written(tmp_path: Path, own_cache: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    big = [{**row, "image": {"bytes": os.urandom(100_000), "path": None}} for row in rows_of(12)]
    rows = on_disk(Dataset.from_list(big, features=FEATURES), tmp_path / "pairs")
    tokens = tokenize_captions(rows, tokenizer, 16)
    assert tokens.column_names == [*rows.column_names, *NEW]
    written = sum(path.stat().st_size for path in own_cache.glob("tandem_tokens/*/*"))
    assert written < 20_000
    [stored] = own_cache.glob("tandem_tokens/*/")
    assert {Path(file["filename"]).parent for file in tokens.cache_files} == {tmp_path / "pairs", stored}


NEW = ["input_ids", "image_key", "caption_keys"]
PICKED = {
    "shuffled": lambda rows: rows.shuffle(seed=1),
    "picked": lambda rows: rows.select([7, 2, 9, 2]),
    "sliced, shuffled, sliced": lambda rows: rows.select(range(2, 10)).shuffle(seed=2).select(range(1, 6)),
    "filtered": lambda rows: rows.filter(lambda row: len(row["captions"]) > 1),
    "joined": lambda rows: datasets.concatenate_datasets([rows.select([4, 1]), rows.select(range(3))]),
}


@pytest.mark.parametrize(("how", "many"), [*((how, 13) for how in PICKED), ("sliced, shuffled, sliced", 1)])
def test_picked_rows_get_their_own_tokens(
    how: str, many: int, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From `many` rows on, by several processes."""
    monkeypatch.setattr("mm_utils.data.batches.tokens._MANY", many)
    rows = PICKED[how](on_disk(rows_of(12), tmp_path / "pairs"))
    tokens = tokenize_captions(rows, tokenizer, 16)
    assert tokens.select_columns(rows.column_names).to_list() == rows.to_list()
    for row in tokens:
        assert row["input_ids"] == encode_captions(tokenizer, row["captions"], 16)
        assert row["image_key"] == image_key(row["id"])
        assert row["caption_keys"] == list(map(caption_key, row["captions"]))


def one_row(*captions: str, image_id: str = "a") -> Dataset:
    row = {"id": image_id, "image": {"bytes": png(0), "path": None}, "captions": list(captions)}
    return Dataset.from_list([row], features=FEATURES)


CUT = "a picture " * 20
UNKNOWN = r"^Texts: \d+% of the tokens are unknown .* --text_model_name_or_path"
UNREAD = {
    "whole": (["a picture", "picture one"], []),
    "one of two is cut": ([CUT, "a picture"], [r"^Of texts, the model reads 16 tokens. Longer are 1 of 2; the longest has 42, .* --max_seq_length"]),
    "a query is cut": ([CUT], ["^Of texts, the model reads 16 tokens. It has 42, and the rest is cut"]),
    "unknown words": (["a 狗", "a picture"], [UNKNOWN]),
    "few unknown words": (["a 狗", *["a picture one"] * 9], []),
    "nothing": ([""], []),
    "both": (["狗" * 20, "猫"], ["^Of texts, .* 1 of 2", UNKNOWN]),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_read_of_texts_is_said(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    texts, expected = UNREAD[name]
    said = unread(tokenizer, texts, 16, "Texts")
    assert len(said) == len(expected), said
    assert all(map(re.search, expected, said)), said


def test_captions_that_are_read_alike_are_equal_for_the_loss_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [f"{CUT} zero", f"{CUT} one", "a 狗", "a 猫", "picture one", "Picture  one"]
    rows = datasets.concatenate_datasets([one_row(text, image_id=text) for text in texts])
    tokens = tokenize_captions(rows, tokenizer, 16)
    pairs = training_pairs(tokens, reach=Reach.of(tokenizer, 16))
    trained = [pairs[row, 0]["caption_keys"][0] for row in range(6)]
    assert trained[::2] == trained[1::2]
    assert len(set(trained)) == 3
    assert [keys[0] for keys in tokens["caption_keys"]] == list(map(caption_key, texts))  # of which evaluations read


PIECES = [(piece, -1.0) for piece in ("<s>", "<pad>", "</s>", "<unk>", "▁", "a")]
LETTERS = {letter: number for number, letter in enumerate("a|<>[]/senodftx")}
FAMILIES = {
    "trained here": new_tokenizer,
    "BERT": lambda: BertTokenizer(vocab={"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 5}),
    "CLIP": lambda: CLIPTokenizer(vocab={**LETTERS, "<|startoftext|>": 98, "<|endoftext|>": 99}, merges=[]),
    "T5": lambda: T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *PIECES[4:]], extra_ids=2),
    "XLM-R": lambda: XLMRobertaTokenizer(vocab=[*PIECES, ("<mask>", 0.0)]),
    "ByT5, in Python": lambda: ByT5Tokenizer(),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_are_text_for_every_family(family: str) -> None:
    tokenizer = FAMILIES[family]()
    named = {name: token for name, token in tokenizer.special_tokens_map.items() if name != "unk_token"}
    written = sorted({*named.values(), *tokenizer.all_special_tokens} - {tokenizer.unk_token} | set(named.values()))
    special = set(map(tokenizer.convert_tokens_to_ids, written))
    frame = [token for token in tokenizer("")["input_ids"] if token in special]
    for ids in tokenize_captions(one_row(*written, f"a {written[0]} a"), tokenizer, 64)[0]["input_ids"]:
        assert [token for token in ids if token in special] == frame


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("most", [5, 64])
def test_many_captions_at_once_are_tokenised_as_one_by_one(family: str, most: int) -> None:
    tokenizer = FAMILIES[family]()
    texts = [*AWKWARD, *tokenizer.all_special_tokens, "a a " * 200, ""]
    many = encode_captions(tokenizer, texts, most)
    assert many == [ids for text in texts for ids in encode_captions(tokenizer, [text], most)]
    tokenizer("a a a", truncation=True, max_length=2)  # what a call leaves in the tokenizer changes nothing
    assert encode_captions(tokenizer, texts, most) == many


def test_equal_images_and_captions_have_equal_keys(tokenizer: PreTrainedTokenizerFast) -> None:
    found = tokenize_captions(one_row("A  red\tcar ", "a red car", "a red cat", "ÄÖ", "äö"), tokenizer, 16)[0]
    keys = found["caption_keys"]
    assert keys[0] == keys[1] != keys[2]
    assert keys[3] == keys[4]
    other = tokenize_captions(one_row("a red car", image_id="b"), tokenizer, 16)[0]
    assert other["caption_keys"] == keys[:1]
    assert other["image_key"] != found["image_key"]
    assert all(0 <= key < 2**63 for key in [*keys, found["image_key"]])


KEYS = st.lists(st.tuples(st.integers(0, 2**63 - 1), st.lists(st.integers(0, 2**63 - 1), max_size=3)), max_size=8)


def keyed(rows: Sequence[tuple[int, list[int]]]) -> Dataset:
    columns = {"image_key": pa.array([key for key, _ in rows], pa.int64())}
    columns["caption_keys"] = pa.array([keys for _, keys in rows], pa.list_(pa.int64()))
    return Dataset(pa.table(columns))


@given(KEYS, KEYS, st.randoms())
def test_fingerprint_depends_on_content_only(rows: list, other: list, random: Any) -> None:
    base = fingerprint(keyed(rows))
    assert (base == fingerprint(keyed(other))) == (rows == other)
    assert base != fingerprint(keyed([*rows, (1, [2]), (3, [4])])) != fingerprint(keyed([*rows, (1, [2, 4]), (3, [])]))
    cut = random.randint(0, len(rows))
    assert base == fingerprint(datasets.concatenate_datasets([keyed(rows[:cut]), keyed(rows[cut:])]))
    padded = keyed([*other, *rows, *other])
    assert base == fingerprint(padded.select(range(len(other), len(other) + len(rows))))
    order = list(range(len(rows)))
    random.shuffle(order)
    assert base == fingerprint(keyed([rows[place] for place in order]).select(np.argsort(order)))
