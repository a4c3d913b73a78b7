"""The main job, in process, on a tiny corpus: what its dials change, and what they do not; test_runs.py has its starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from PIL import Image
from transformers import PreTrainedTokenizerFast

from mm_utils.data.arguments import DataArguments
from mm_utils.data.images import encode
from mm_utils.data.media.medium import read_by
from mm_utils.model.build import load_model
from mm_utils.model.processor import load_processor_of
from scripts import pretrain
from tests.kit.corpora import draw, write_corpus
from tests.kit.jsonl import read_lines, write_lines
from tests.kit.media_files import media_rows, tone
from tests.kit.processes import ROUNDED, losses, rows_of, weights
from tests.kit.stock_folders import write_stock


def test_config_yaml_reruns_the_run(scratch_run, tmp_path):
    folder, metrics = scratch_run
    assert yaml.safe_load((folder / "config.yaml").read_text())["global_batch_size"] == 8
    again = pretrain.main(["--config", str(folder / "config.yaml"), "--output_dir", str(tmp_path / "again")])
    assert again == metrics


def test_early_stopping_of_transformers_ends_a_run_that_stands_still(tiny_flags, tmp_path, caplog):
    still = ["--learning_rate", "0", "--max_steps", "20", "--eval_steps", "2", "--early_stopping_patience", "1"]
    still += ["--metric_for_best_model", "eval_loss"]
    newest = ["--resume_from_checkpoint", "latest", "--output_dir", str(tmp_path)]
    pretrain.main([*tiny_flags, *still, "--load_best_model_at_end", *newest])
    assert f"No checkpoint in {tmp_path}: the run begins at step 0" in caplog.messages
    assert max(losses(tmp_path)) < 20
    starts = ("Training stopped early", "The encoders' stage stopped early")
    stops = [text for text in caplog.messages if text.startswith(starts)]
    assert all("in 1 evaluations (--early_stopping_patience), eval_" in text for text in stops)
    card = (tmp_path / "README.md").read_text()
    summary = caplog.messages[-1]
    assert stops
    assert all(text in card and text in summary for text in stops)


def test_parts_of_the_batch_learn_what_the_whole_learns(scratch_run, tiny_flags, tmp_path):
    folder, _ = scratch_run
    evaluated = ("--save_steps", "2", "--eval_steps", "2")  # the best of which is kept
    pretrain.main([*tiny_flags, "--micro_batch_size", "auto", *evaluated, "--output_dir", str(tmp_path)])
    assert losses(tmp_path) == pytest.approx(losses(folder), rel=1e-5)
    others = weights(tmp_path)
    for name, value in weights(folder).items():
        torch.testing.assert_close(others[name], value, rtol=1e-4, atol=ROUNDED)


def test_captioning_predicts_the_words_of_the_training_split(tiny_flags, tmp_path, monkeypatch):
    counted = []
    monkeypatch.setattr("mm_utils.objectives.captioning._LARGE", 1)
    monkeypatch.setattr("mm_utils.objectives.captioning.occurring_tokens", lambda *given: counted.append(given))
    pretrain.main([*tiny_flags, "--max_steps", "1", "--output_dir", str(tmp_path)])
    [(rows, vocabulary)] = counted
    assert (len(rows) > 8, vocabulary) == (True, len(weights(tmp_path)["token_head.bias"]))


def test_regions_are_trained_and_measured(tiny_flags, tmp_path):
    pairs = write_corpus(tmp_path)
    rows = read_lines(pairs)
    for row in rows:
        colour, shape, _ = Path(row["image"]).stem.split("-")
        row["regions"] = [{"box": [10, 10, 20, 20], "phrase": f"{colour} {shape}"}]
    write_lines(pairs, rows)
    flags = [*tiny_flags, "--train_file", str(pairs), "--objectives", "contrastive:1,regions:0.5"]
    metrics = pretrain.main([*flags, "--output_dir", str(tmp_path / "out")])
    assert 0 <= metrics["eval_pointing_accuracy_low"] <= metrics["eval_pointing_accuracy"] <= 1
    assert 0.1 < metrics["eval_pointing_chance"] < 0.3


# -- the two dials ------------------------------------------------------------------------------------------------------


def test_a_schedule_grows_the_batch_and_the_rate(tiny_flags, tmp_path):
    schedule = ["--batch_size_schedule", "0:4,2:8", "--lr_scheduler_type", "constant"]
    flat = ["--head_share", "0"]
    pretrain.main([*tiny_flags, *schedule, *flat, "--output_dir", str(tmp_path)])
    logged = [row for row in rows_of(tmp_path) if "loss" in row]
    assert [row["epoch"] for row in logged] == [0.25, 0.5, 1.0, 1.5]  # of 16 images
    assert [row["learning_rate"] for row in logged] == pytest.approx([1e-3, 1e-3, 2**0.5 * 1e-3, 2**0.5 * 1e-3])


# -- bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--image_size", "64"], "vision_config.image_size was 32 and is 64, image_size was 32 and is 64"),
        (["--seed", "43"], "seed was 42 and is 43"),
        (["--objectives", "sigmoid"], "logit_bias_init_value was None and is -10.0"),
        (["--learning_rate", "0.5"], "learning_rate was None and is 0.5, so it would not be"),
        (["--min_crop_area", "0.2", "--horizontal_flip"], "min_crop_area was .* and is 0.2, horizontal_flip was False"),
        (["--max_steps", "1"], "of step 2; the run has 1 steps"),
    ],
)  # fmt: skip
def test_a_run_is_not_resumed_as_another(flags, message, scratch_run, tiny_flags, tmp_path):
    """Also where all weights fit."""
    folder, _ = scratch_run
    given = [*tiny_flags, "--output_dir", str(tmp_path), "--resume_from_checkpoint", str(folder / "checkpoint-2")]
    with pytest.raises(ValueError, match=message):
        pretrain.main([*given, *flags])


def test_a_run_is_not_resumed_with_other_images_or_words(tiny_flags, tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "data")
    flags = [*tiny_flags, "--train_file", str(corpus), "--max_steps", "2", "--save_steps", "2"]
    pretrain.main([*flags, "--output_dir", str(tmp_path / "run")])
    again = [*flags, "--max_steps", "3", "--resume_from_checkpoint", str(tmp_path / "run/checkpoint-2")]
    draw("red", "square", 44).save(tmp_path / "data/images/blue-circle-0.png")
    with pytest.raises(ValueError, match=r"images was .* and is"):
        pretrain.main([*again, "--output_dir", str(tmp_path / "again")])
    write_corpus(tmp_path / "data")
    with pytest.raises(
        ValueError, match=r"validation split was .* and is"
    ):  # whose figures would be compared with others
        pretrain.main([*again, "--max_eval_samples", "2", "--output_dir", str(tmp_path / "again")])
    words = json.loads((tmp_path / "run/tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    names = sorted(name for name in vocabulary if name[0] not in "[#")
    for name, number in zip(names, [vocabulary[name] for name in [*names[1:], names[0]]], strict=True):
        vocabulary[name] = number
    (tmp_path / "run/tokenizer.json").write_text(json.dumps(words))
    other = PreTrainedTokenizerFast.from_pretrained(tmp_path / "run")
    monkeypatch.setattr("mm_utils.model.processor.cached_tokenizer", lambda *_: other)
    with pytest.raises(ValueError, match=r"tokenizer was .* and is"):
        pretrain.main([*again, "--output_dir", str(tmp_path / "b")])


def test_siglips_frozen_text_tower_which_reads_padding_runs_once_and_gives_the_same(tiny_flags, tmp_path):
    start = write_stock(tmp_path / "start", "siglip")
    own = ["--model_name_or_path", start, "--objectives", "sigmoid,matching", "--max_steps", "2", "--freeze_text"]
    flags = [*tiny_flags[:2], *tiny_flags[4:], *own]
    for name, cache in (("plain", []), ("cached", ["--cache_features"])):
        pretrain.main([*flags, *cache, "--output_dir", str(tmp_path / name)])
    assert losses(tmp_path / "cached") == pytest.approx(losses(tmp_path / "plain"), rel=2e-3)


# -- images first, then sounds on the same frozen text encoder ---------------------------------------------------------
FLAGS = ("--fusion_layers 0 --objectives contrastive --global_batch_size 16 --max_steps 40 --learning_rate 5e-3 --min_crop_area 1 "
         "--dataloader_num_workers 0 --report_to none --save_steps 0")  # fmt: skip
THINGS = ("fox", "owl", "bear", "wolf", "lynx", "goat", "hare", "crow")
VISION = {"model_type": "convnext", "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 16}
SOUND = {**VISION, "num_channels": 1, "image_size": [40, 16]}
TEXT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip


def content_of(medium: str, number: int) -> bytes:
    """A picture of one colour, or half a second of one pitch."""
    thing = number % len(THINGS)
    off = number % 23
    if medium == "sound":
        return tone(150 * 1.4**thing + off / 9, rate=4000)
    return encode(Image.new("RGB", (24, 24), tuple(40 + 160 * (thing >> bit & 1) + off for bit in range(3))), "png")


def things_of(medium: str, numbers: range) -> Dataset:
    """Eight things, each as pictures of a colour and as tones of a pitch, under the same captions."""
    contents = [content_of(medium, number) for number in numbers]
    names = [THINGS[number % len(THINGS)] for number in numbers]
    captions = [[f"a {name}", f"{medium} of a {name}"] for name in names]
    lasting = {"seconds": [0.5] * len(contents)} if medium == "sound" else {}
    return media_rows(medium, contents, captions=captions, **lasting)


def load(args: DataArguments, **_: Any) -> DatasetDict:
    medium = str(args.dataset_name).removesuffix("s")
    train = range({"image": 40, "sound": 24}[medium])
    return DatasetDict(train=things_of(medium, train), validation=things_of(medium, range(100, 116)))


def test_one_text_finds_images_and_sounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures and tones that are searched were not trained on."""
    for name, config in (("vision", VISION), ("sound", SOUND), ("text", TEXT)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    flags = {
        "image": ["--vision_config", f"{tmp_path}/vision.json", "--text_config", f"{tmp_path}/text.json"],
        "sound": ["--vision_config", f"{tmp_path}/sound.json", "--text_model_name_or_path", f"{tmp_path}/image", "--freeze_text"],
    }  # fmt: skip
    monkeypatch.setattr("mm_utils.data.training_data.load_pairs", load)
    texts = []
    things = torch.arange(len(THINGS))
    for medium, own in flags.items():
        folder = str(tmp_path / medium)
        pretrain.main(["--dataset_name", f"{medium}s", *own, "--output_dir", folder, *FLAGS.split()])
        model = load_model(folder).eval()
        reader = read_by(load_processor_of(folder))
        examples = [reader.read(row)[0] for row in things_of(medium, range(200, 200 + len(THINGS)))["image"]]
        with torch.no_grad():
            shown = model.encode_image(reader.features(torch.stack(examples)))[0]
        texts.append(model.encode(texts=[f"a {thing}" for thing in THINGS]))
        assert ((texts[0] @ shown.T).argmax(1) == things).sum() >= len(THINGS) - 1, medium
    assert torch.equal(*texts)
