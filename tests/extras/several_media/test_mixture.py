"""Batches of several media: in turn, the same after a new start, each medium read as in a run of its own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from mm_utils.arguments import parse_args
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.batches.order import BatchSizes
from mm_utils.data.rows.source import DataArguments
from mm_utils.data.training_data import TrainingData
from mm_utils.extras.several_media.callbacks import SeveralMedia
from mm_utils.extras.several_media.flags import MediaArguments
from mm_utils.extras.several_media.mixture import Mixture, open_media
from mm_utils.model.build import ModelArguments
from mm_utils.model.processor import load_processor
from mm_utils.run import flags
from mm_utils.run.doors import Doors
from tests.kit.small_media import small_media

LOADING: dict[str, Any] = {"dataloader_num_workers": "0"}


def open_small(names: str = "images,sounds", share: str | None = "2,1", **loading: Any) -> TrainingData:
    schedule: Any = SimpleNamespace(seed=7, per_device_eval_batch_size=8, batch_sizes=BatchSizes((0, 5), (4, 8)))
    model_args = ModelArguments(image_size=16)
    with small_media():
        return open_media(
            Accelerator(cpu=True),
            DataArguments(dataset_name=names),
            MediaArguments(share),
            LoaderArguments(**LOADING, **loading),
            schedule,
            lambda captions, **of_medium: load_processor(model_args, captions, **of_medium),
        )


@pytest.fixture(scope="module")
def data() -> TrainingData:
    return open_small(medium_seconds=1.0, horizontal_flip=True)


def test_each_step_has_one_medium_and_its_size(data: TrainingData) -> None:
    assert isinstance(data, Mixture)
    batches = list(data.train_batches(0, 9))
    assert [batch["medium"] for batch in batches] == [data.turns.medium(step) for step in range(9)]
    assert [len(batch["ids"]) for batch in batches] == [4] * 5 + [8] * 4
    for batch in batches:
        assert all(image_id.startswith(batch["medium"]) for image_id in batch["image_ids"])
        assert batch["pixel_values"].shape[1] == {"image": 3, "sound": 1}[batch["medium"]]
    shown = [image_id for batch in batches for image_id in batch["image_ids"] if batch["medium"] == "sound"]
    assert len(set(shown)) == len(shown) == 4 + 4 + 8  # steps 1, 4 and 7


def test_a_new_start_goes_on_with_the_same_batches(data: TrainingData) -> None:
    straight = list(data.train_batches(0, 9))
    for start in (1, 2, 5):
        for one, other in zip(straight[start:], data.train_batches(start, 9), strict=True):
            assert one["medium"] == other["medium"]
            assert one["image_ids"] == other["image_ids"]
            assert torch.equal(one["pixel_values"], other["pixel_values"])
            assert torch.equal(one["input_ids"], other["input_ids"])


def test_one_tokenizer_knows_the_words_of_all(data: TrainingData) -> None:
    tokenizers = [part.processor.tokenizer for part in data.media.values()]
    words = ["image", "sound", "fox"]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert tokenizers[0].unk_token_id not in tokenizers[0].convert_tokens_to_ids(words)


def test_what_it_says_of_itself(data: TrainingData) -> None:
    assert list(data.media) == ["image", "sound"]
    assert data.medium == "image"
    assert data.num_rows == data.total_rows["train"] == 64
    assert [part.name for part in data.media.values()] == ["images", "sounds"]
    assert "40 images" in str(data)
    assert "24 sounds" in str(data)
    assert data.identity["media"] == "2 image, 1 sound"
    assert data.media["sound"].fingerprint in data.fingerprint
    other = open_small(share="3,1").identity
    changed = {name for name, value in data.identity.items() if other.get(name) != value}
    assert "media" in changed
    assert changed <= {"media", "medium of sounds"}  # the window is another one, too


def test_shares_follow_the_rows_by_default() -> None:
    found: Any = open_small(share=None)
    assert found.turns.shares == {"image": 31, "sound": 19}  # of 40 and 24 rows, in percent, halved


@pytest.mark.parametrize(("names", "several"), [("sounds", False), ("images,sounds", True)])
def test_one_data_set_is_a_run_on_one_medium(names: str, several: bool) -> None:
    words = ["--dataset_name", names, "--fusion_layers", "0", "--objectives", "contrastive"]
    given = parse_args(*flags.PRETRAINING, *Doors("pretrain").arguments, argv=words)
    assert (SeveralMedia.attach(given) is not None) is several


@pytest.mark.parametrize(
    ("names", "share", "message"),
    [
        ("images,sounds", "1,2,3", "--media_share is 1,2,3, and --dataset_name is images,sounds; each name has one"),
        ("images", "1", "--media_share is 1, and --dataset_name is images; each name has one"),
        ("images,sounds", "2,0.5", "--media_share is 2,0.5; give whole numbers"),
        ("images,sounds", "2,0", "--media_share is 2,0; give whole numbers"),
        ("images,images", None, "more than one of them are images. Join those with"),
    ],
)
def test_names_and_shares_that_do_not_fit(names: str, share: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_small(names, share)


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("streaming", True, "--streaming is True. A stream"),
        ("cache_features", True, "--cache_features is True"),
        ("fusion_layers", 2, "--fusion_layers is 2. The fusion head reads the tower of one medium"),
        ("model_name_or_path", "outputs/mine", "--model_name_or_path is outputs/mine"),
        ("objectives", "contrastive:1,captioning:1", "--objectives has captioning, which reads more"),
        ("objectives", "contrastive,regions:0.5", "--objectives has regions"),
    ],
)
def test_what_is_for_one_medium_is_refused_by_name(flag: str, value: Any, message: str) -> None:
    flags = ("streaming", "dataset_config_name", "cache_features", "wise_ft", "model_name_or_path",
             "teacher_name_or_path", "lora_rank", "fusion_layers")  # fmt: skip
    settings = {**dict.fromkeys(flags), "objectives": "contrastive", "dataset_name": "images,sounds"}
    MediaArguments().check(settings)
    MediaArguments().check({**settings, flag: value, "dataset_name": "images"})
    with pytest.raises(ValueError, match=message):
        MediaArguments().check({**settings, flag: value})
