"""Images first, then sounds on the same frozen text encoder: one text finds both."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from mm_utils.data.media.medium import read_by
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model, load_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import load_processor_of
from scripts import pretrain
from tests.kit.small_media import SOUND, TEXT, THINGS, VISION, small_media, split_of

FLAGS = ("--fusion_layers 0 --objectives contrastive --global_batch_size 16 --max_steps 40 --learning_rate 5e-3 --min_crop_area 1 "
         "--dataloader_num_workers 0 --report_to none --save_steps 0")  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a run on images, and of one on sounds with its text encoder."""
    root = tmp_path_factory.mktemp("runs")
    for name, config in (("vision", VISION), ("sound", SOUND), ("text", TEXT)):
        (root / f"{name}.json").write_text(json.dumps(config))
    images, sounds = root / "images", root / "sounds"
    of_images = ["--vision_config", f"{root}/vision.json", "--text_config", f"{root}/text.json"]
    of_sounds = ["--vision_config", f"{root}/sound.json", "--text_model_name_or_path", str(images), "--freeze_text"]
    with small_media():
        pretrain.main(["--dataset_name", "images", *of_images, "--output_dir", str(images), *FLAGS.split()])
        pretrain.main(["--dataset_name", "sounds", *of_sounds, "--output_dir", str(sounds), *FLAGS.split()])
    return images, sounds


def media_of(model: FusionDualEncoderModel, folder: Path, medium: str) -> torch.Tensor:
    """Embeddings of a picture or a tone of each thing, none of which was trained on."""
    reader = read_by(load_processor_of(str(folder)))
    rows = split_of(medium, range(200, 200 + len(THINGS)))
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


def test_other_texts_than_the_runs_own_are_refused(runs: tuple[Path, Path]) -> None:
    given = {"text_model_name_or_path": str(runs[0]), "vision_config": str(runs[0].parent / "sound.json")}
    tokenizer = load_processor_of(str(runs[0])).tokenizer  # type: ignore[attr-defined]
    model = build_model(ModelArguments(**given), tokenizer, medium="sound")  # to be trained on
    assert model.text_projection.weight.requires_grad
    for flag, value, remedy in (
        ("projection_dim", 8, "that model has 24. Drop the flag"),
        ("projection", "mlp", "that model was trained with linear. Give the same"),
    ):
        with pytest.raises(ValueError, match=f"--{flag} is {value}; .*{remedy}"):
            build_model(ModelArguments(**given, **{flag: value}), tokenizer, medium="sound")
