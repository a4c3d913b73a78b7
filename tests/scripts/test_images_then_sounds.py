"""Images first, then sounds on the same frozen text encoder: one text finds both."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from PIL import Image
from transformers import AutoModel

from mm_utils.data.images import encode
from mm_utils.data.media.medium import read_by
from mm_utils.data.media.riff import write_wav
from mm_utils.data.rows.source import DataArguments
from mm_utils.model.build import load_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import load_processor_of
from scripts import pretrain
from tests.kit.media_files import media_rows

FLAGS = ("--fusion_layers 0 --objectives contrastive --global_batch_size 16 --max_steps 40 --learning_rate 5e-3 --min_crop_area 1 "
         "--dataloader_num_workers 0 --report_to none --save_steps 0")  # fmt: skip
THINGS = ("fox", "owl", "bear", "wolf", "lynx", "goat", "hare", "crow")
VISION = {"model_type": "convnext", "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 16}
SOUND = {**VISION, "num_channels": 1, "image_size": [40, 16]}
TEXT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip


def picture(thing: int, noise: np.random.Generator) -> bytes:
    """One colour, with some noise."""
    colour = np.array([thing & 1, thing >> 1 & 1, thing >> 2 & 1]) * 160 + 40
    pixels = (colour + noise.integers(-30, 30, (24, 24, 3))).clip(0, 255).astype(np.uint8)
    return encode(Image.fromarray(pixels), "jpeg", 75)


def tone(thing: int, noise: np.random.Generator) -> bytes:
    """Half a second of one pitch, with some noise."""
    sine = np.sin(2 * np.pi * 150 * 1.4**thing * np.arange(2000) / 4000)
    return write_wav(((0.5 * sine + noise.normal(0, 0.02, 2000)) * 20_000).astype(np.int16), 4000)


def rows_of(medium: str, numbers: range) -> Dataset:
    """Eight things, each as pictures of a colour and as tones of a pitch, under the same captions."""
    make = {"image": picture, "sound": tone}[medium]
    contents = [make(number % len(THINGS), np.random.default_rng(number)) for number in numbers]
    names = [THINGS[number % len(THINGS)] for number in numbers]
    captions = [[f"a {name}", f"{medium} of a {name}"] for name in names]
    lasting = {"seconds": [0.5] * len(contents)} if medium == "sound" else {}
    return media_rows(medium, contents, captions=captions, **lasting)


def load(args: DataArguments, **_: Any) -> DatasetDict:
    medium = str(args.dataset_name).removesuffix("s")
    train = range({"image": 40, "sound": 24}[medium])
    return DatasetDict(train=rows_of(medium, train), validation=rows_of(medium, range(100, 116)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a run on images, and of one on sounds with its text encoder."""
    root = tmp_path_factory.mktemp("runs")
    for name, config in (("vision", VISION), ("sound", SOUND), ("text", TEXT)):
        (root / f"{name}.json").write_text(json.dumps(config))
    images, sounds = root / "images", root / "sounds"
    of_images = ["--vision_config", f"{root}/vision.json", "--text_config", f"{root}/text.json"]
    of_sounds = ["--vision_config", f"{root}/sound.json", "--text_model_name_or_path", str(images), "--freeze_text"]
    with mock.patch("mm_utils.data.training_data.load_pairs", load):
        pretrain.main(["--dataset_name", "images", *of_images, "--output_dir", str(images), *FLAGS.split()])
        pretrain.main(["--dataset_name", "sounds", *of_sounds, "--output_dir", str(sounds), *FLAGS.split()])
    return images, sounds


def media_of(model: FusionDualEncoderModel, folder: Path, medium: str) -> torch.Tensor:
    """Embeddings of a picture or a tone of each thing, none of which was trained on."""
    reader = read_by(load_processor_of(str(folder)))
    rows = rows_of(medium, range(200, 200 + len(THINGS)))
    examples = torch.stack([reader.read(row)[0] for row in rows["image"]])
    with torch.no_grad():
        return model.encode_image(reader.features(examples))[0]


def test_one_text_finds_images_and_sounds(runs: tuple[Path, Path]) -> None:
    models = [load_model(str(folder)).eval() for folder in runs]
    texts = [f"a {thing}" for thing in THINGS]
    of_images, of_sounds = (model.encode(texts=texts) for model in models)
    assert torch.equal(of_images, of_sounds)
    for model, folder, medium in zip(models, runs, ("image", "sound"), strict=True):
        found = (of_images @ media_of(model, folder, medium).T).argmax(1)
        assert (found == torch.arange(len(THINGS))).sum() >= len(THINGS) - 1, medium


def test_the_model_of_sounds_is_whole(runs: tuple[Path, Path]) -> None:
    """It opens by AutoModel, without the run that its text encoder came from."""
    alone = AutoModel.from_pretrained(runs[1], trust_remote_code=True).eval()
    assert torch.equal(alone.encode(texts="a fox"), load_model(str(runs[1])).encode(texts="a fox"))
    assert json.loads((runs[1] / "config.json").read_text())["medium"] == "sound"
