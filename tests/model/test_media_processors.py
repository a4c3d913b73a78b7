"""Models and processors of clips and sounds by flags, and `encode` of files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModel,
    AutoProcessor,
    ClapFeatureExtractor,
    ClapProcessor,
    CLIPImageProcessor,
    VideoMAEImageProcessor,
    VJEPA2VideoProcessor,
    WhisperFeatureExtractor,
)

from mm_utils.data.media.medium import read_by, settle_window
from mm_utils.data.media.riff import write_wav
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model
from mm_utils.model.modeling_fusion_dual_encoder import FramesTower, FusionDualEncoderModel, vision_tower
from mm_utils.model.processor import load_processor, load_processor_of
from tests.kit.made_media import animation
from tests.kit.models import TOWERS

CAPTIONS = ["a dog barks", "a glass breaks", "rain falls"] * 5


def built(medium: str, seconds: float | None = None, **fields: Any) -> tuple[FusionDualEncoderModel, Any]:
    args = ModelArguments(fusion_layers=1, **fields)
    processor = load_processor(args, CAPTIONS, medium, seconds)
    settle_window(processor, medium, seconds, None)
    model = build_model(args, processor.tokenizer, medium=medium).eval()
    model.processor = processor
    return model, processor


def config_file(folder: Path, kind: str) -> str:
    path = folder / f"{kind}.json"
    path.write_text(json.dumps({"model_type": kind, **TOWERS[kind]}))
    return str(path)


def sound(seconds: float, rate: int = 16000, seed: int = 0) -> bytes:
    time = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(seed).normal(size=len(time))
    samples = 6000 * np.sin(2 * np.pi * (300 + 200 * time) * time) + 500 * noise
    return write_wav(samples.astype(np.int16), rate)


@pytest.fixture(scope="module")
def tiny() -> tuple[FusionDualEncoderModel, Any]:
    torch.manual_seed(0)
    return built("sound", 2.3)


@pytest.mark.parametrize(("seconds", "rate"), [(1.2, 16000), (4.0, 16000), (3.0, 22050)])
def test_encode_gives_what_evaluation_gives(tiny: Any, tmp_path: Path, seconds: float, rate: int) -> None:
    model, processor = tiny
    content = sound(seconds, rate)
    (tmp_path / "a.wav").write_bytes(content)
    timed: Any = read_by(processor, 1.0)
    example = timed.read({"bytes": content, "path": None}, None)[0]
    expected = model.encode_image(timed.features(example[None]), with_keys_values=False)[0]
    found = model.encode(sounds=str(tmp_path / "a.wav"))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
    samples = np.frombuffer(content[44:], np.int16) / 32768
    torch.testing.assert_close(model.encode(sounds=[(samples, rate)]), found, atol=1e-5, rtol=0)
    assert sorted(place for place, _ in model.rerank("a dog", [(samples, rate), str(tmp_path / "a.wav")])) == [0, 1]


def test_sound_tiny_is_saved_whole(tiny: Any, tmp_path: Path) -> None:
    model, processor = tiny
    extractor = processor.feature_extractor
    assert (extractor.max_length_s, extractor.window_seconds, extractor.sampling_rate) == (3, 3.0, 16000)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    stock = AutoProcessor.from_pretrained(tmp_path)
    assert isinstance(stock, ClapProcessor)
    loaded = FusionDualEncoderModel.from_pretrained(tmp_path)
    given = (np.sin(np.arange(30000) / 9), 16000)
    torch.testing.assert_close(loaded.encode(sounds=given), model.encode(sounds=given))
    assert load_processor_of(str(tmp_path)).feature_extractor.window_seconds == 3.0
    again, _ = built("sound", 9.0, model_name_or_path=str(tmp_path))
    torch.testing.assert_close(again.encode(sounds=given), model.encode(sounds=given))
    with pytest.raises(ValueError, match="it reads sounds, and the data are images"):
        build_model(ModelArguments(model_name_or_path=str(tmp_path)), processor.tokenizer)


@pytest.mark.parametrize("kind", ["audio-spectrogram-transformer", "whisper", "wav2vec2", "clap_audio_model"])
def test_sound_towers_have_their_own_extractor(kind: str, tmp_path: Path) -> None:
    model, processor = built("sound", 0.9, vision_config=config_file(tmp_path, kind))
    processor.save_pretrained(tmp_path)
    extractor = AutoProcessor.from_pretrained(tmp_path).feature_extractor
    assert type(extractor) is type(processor.feature_extractor)
    window = {"audio-spectrogram-transformer": 0.96, "wav2vec2": 0.9}.get(kind, 1.0)
    assert extractor.window_seconds == pytest.approx(window)
    assert model.encode(sounds=[(np.random.default_rng(0).normal(size=9000) / 9, 16000)]).shape[0] == 1


@pytest.mark.parametrize("kind", ["whisper", "clap"])
def test_the_sound_tower_is_taken_from_a_whole_model(kind: str, tmp_path: Path) -> None:
    if kind == "clap":
        text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        text |= {"vocab_size": 30}
        config = AutoConfig.for_model(
            "clap", audio_config=TOWERS["clap_audio_model"], text_config=text, projection_dim=8
        )
        extractor: Any = ClapFeatureExtractor(feature_size=8, max_length_s=1, truncation="rand_trunc")
    else:
        config, extractor = (
            AutoConfig.for_model("whisper", **TOWERS["whisper"]),
            WhisperFeatureExtractor(16, chunk_length=1),
        )
    whole = AutoModel.from_config(config)
    whole.save_pretrained(tmp_path)
    extractor.save_pretrained(tmp_path)
    model, _ = built("sound", vision_model_name_or_path=str(tmp_path))
    part = whole.audio_model if kind == "clap" else whole.encoder
    for name, value in part.state_dict().items():
        torch.testing.assert_close(model.vision_model.state_dict()[name], value)


def test_clip_tiny_encodes_frames(tmp_path: Path) -> None:
    model, processor = built("clip", image_size=32)
    assert isinstance(model.vision_model, FramesTower)
    frames = [Image.new("RGB", (48, 32), (10 * at, 0, 255 - 10 * at)) for at in range(20)]
    found = model.encode(clips=[frames, frames[::-1]])
    read = [0, 1, 3, 4, 5, 6, 8, 9, 10, 11, 13, 14, 15, 16, 18, 19]  # of 20, the middles of 16 parts
    pixels = processor.image_processor(images=[frames[at] for at in read], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(found[:1], model.encode_image(pixels[None], with_keys_values=False)[0])
    (tmp_path / "a.gif").write_bytes(animation(8))
    assert model.encode(clips=tmp_path / "a.gif").shape == found[:1].shape
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    again = load_processor_of(str(tmp_path)).image_processor
    assert (again.clip_frames, again.window_seconds) == (16, None)
    with pytest.raises(ValueError, match="reads clips, and it was given images"):
        model.encode(images=frames[0])


@pytest.mark.parametrize(("kind", "own"), [("videomae", VideoMAEImageProcessor), ("vjepa2", VJEPA2VideoProcessor)])
def test_video_towers_have_their_own_colours(kind: str, own: Any, tmp_path: Path) -> None:
    vision_tower(AutoConfig.for_model(kind, **TOWERS[kind])).save_pretrained(tmp_path)
    size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    own(image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4], **size).save_pretrained(tmp_path)
    model, processor = built("clip", vision_model_name_or_path=str(tmp_path))
    images = processor.image_processor
    assert isinstance(images, CLIPImageProcessor)
    assert images.clip_frames == 8
    assert (tuple(images.image_mean), images.crop_size["height"]) == ((0.4, 0.5, 0.6), 16)
    assert model.encode(clips=[[Image.new("RGB", (20, 16))] * 9]).shape[0] == 1
