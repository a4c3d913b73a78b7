"""Images first, then sounds on the same frozen text encoder: one text finds both."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from PIL import Image

from mm_utils.data.images import encode
from mm_utils.data.media.medium import read_by
from mm_utils.data.rows.source import DataArguments
from mm_utils.model.build import load_model
from mm_utils.model.processor import load_processor_of
from scripts import pretrain
from tests.kit.media_files import media_rows, tone

FLAGS = ("--fusion_layers 0 --objectives contrastive --global_batch_size 16 --max_steps 40 --learning_rate 5e-3 --min_crop_area 1 "
         "--dataloader_num_workers 0 --report_to none --save_steps 0")  # fmt: skip
THINGS = ("fox", "owl", "bear", "wolf", "lynx", "goat", "hare", "crow")
VISION = {"model_type": "convnext", "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 16}
SOUND = {**VISION, "num_channels": 1, "image_size": [40, 16]}
TEXT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip


def content_of(medium: str, number: int) -> bytes:
    """A picture of one colour, or half a second of one pitch."""
    thing, off = number % len(THINGS), number % 23
    if medium == "sound":
        return tone(150 * 1.4**thing + off / 9, rate=4000)
    return encode(Image.new("RGB", (24, 24), tuple(40 + 160 * (thing >> bit & 1) + off for bit in range(3))), "png")


def rows_of(medium: str, numbers: range) -> Dataset:
    """Eight things, each as pictures of a colour and as tones of a pitch, under the same captions."""
    contents = [content_of(medium, number) for number in numbers]
    names = [THINGS[number % len(THINGS)] for number in numbers]
    captions = [[f"a {name}", f"{medium} of a {name}"] for name in names]
    lasting = {"seconds": [0.5] * len(contents)} if medium == "sound" else {}
    return media_rows(medium, contents, captions=captions, **lasting)


def load(args: DataArguments, **_: Any) -> DatasetDict:
    medium = str(args.dataset_name).removesuffix("s")
    train = range({"image": 40, "sound": 24}[medium])
    return DatasetDict(train=rows_of(medium, train), validation=rows_of(medium, range(100, 116)))


def test_one_text_finds_images_and_sounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures and tones that are searched were not trained on."""
    for name, config in (("vision", VISION), ("sound", SOUND), ("text", TEXT)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    flags = {
        "image": ["--vision_config", f"{tmp_path}/vision.json", "--text_config", f"{tmp_path}/text.json"],
        "sound": ["--vision_config", f"{tmp_path}/sound.json", "--text_model_name_or_path", f"{tmp_path}/image", "--freeze_text"],
    }  # fmt: skip
    monkeypatch.setattr("mm_utils.data.training_data.load_pairs", load)
    texts, things = [], torch.arange(len(THINGS))
    for medium, own in flags.items():
        folder = str(tmp_path / medium)
        pretrain.main(["--dataset_name", f"{medium}s", *own, "--output_dir", folder, *FLAGS.split()])
        model, reader = load_model(folder).eval(), read_by(load_processor_of(folder))
        examples = [reader.read(row)[0] for row in rows_of(medium, range(200, 200 + len(THINGS)))["image"]]
        with torch.no_grad():
            shown = model.encode_image(reader.features(torch.stack(examples)))[0]
        texts.append(model.encode(texts=[f"a {thing}" for thing in THINGS]))
        assert ((texts[0] @ shown.T).argmax(1) == things).sum() >= len(THINGS) - 1, medium
    assert torch.equal(*texts)
