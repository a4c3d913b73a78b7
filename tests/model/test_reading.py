"""One way to read a picture, a text and a sound: training, evaluation, search and the model's own `encode`."""

import io
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    ASTFeatureExtractor,
    AutoModel,
    BertConfig,
    BertModel,
    CLIPImageProcessor,
    ConvNextConfig,
    ConvNextModel,
    VisionTextDualEncoderProcessor,
)

from mm_utils.data.batches.dataset import Pairs, TrainingTransform
from mm_utils.data.batches.loaders import LoaderArguments, make_loaders
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.media.log_mel import LogMel
from mm_utils.data.media.medium import Sound
from mm_utils.data.media.riff import write_wav
from mm_utils.extras.search.listing import Listing, Reader
from mm_utils.extras.search.searcher import read_query
from mm_utils.model.flops import measure_flops
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from tests.kit.numbered_rows import FEATURES, new_tokenizer, rows_of

SIDE, MOST = 32, 12
RNG = np.random.default_rng(0)


def noise(height: int, width: int, channels: int) -> np.ndarray:
    """Smooth colours with a pattern that no turn and no crop leaves as it is."""
    coarse = Image.fromarray(RNG.integers(0, 256, (6, 5, 4), np.uint8), "RGBA")
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))[:, :, :channels].squeeze()


def file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return file(Image.fromarray(noise(40, 60, 3)), "JPEG", exif=exif)


def awkward_pictures() -> dict[str, bytes]:
    colours = Image.fromarray(noise(50, 70, 3))
    palette = colours.quantize(16)
    deep = Image.fromarray((noise(40, 50, 3)[..., 0].astype(np.uint16) * 257).astype(np.uint16))
    return {
        "plain": file(colours),
        "RGBA": file(Image.fromarray(noise(50, 70, 4), "RGBA")),
        "LA": file(Image.fromarray(noise(50, 70, 4), "RGBA").convert("LA")),
        "P with transparency": file(palette, transparency=3),
        "I;16": file(deep),
        "CMYK": file(colours.convert("CMYK"), "JPEG"),
        "turned": turned(),
        "float TIFF": file(Image.fromarray(noise(40, 50, 3)[..., 0].astype(np.float32) / 255), "TIFF"),
        "turned TIFF": file(colours, "TIFF", tiffinfo={274: 6}),
        "animated": file(colours, "GIF", save_all=True, append_images=[Image.new("RGB", colours.size, "red")]),
        "tiny": file(Image.fromarray(noise(1, 2, 3).reshape(1, 2, 3))),
        "extreme aspect": file(Image.fromarray(noise(9, 900, 3))),
        "larger than it is shown": file(Image.fromarray(noise(300, 410, 3)), "JPEG"),
    }


TEXTS = [
    "a red [SEP] circle",
    "[MASK] picture",
    "[PAD]",
    "picture one " * 400,
    "",
    "a 😀 picture 👩‍🚀",
    "picture seven",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> FusionDualEncoderModel:
    """Saved and loaded, as others load it."""
    tokenizer = new_tokenizer()
    tokenizer.model_max_length = MOST
    squares = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    images = CLIPImageProcessor(**squares, image_mean=[0.4] * 3, image_std=[0.3] * 3)
    torch.manual_seed(0)
    vision = ConvNextModel(ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=SIDE))
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    text = BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=16, **shape))
    built = FusionDualEncoderModel.from_backbones(vision, text, projection_dim=16, fusion_layers=0)
    built.processor = VisionTextDualEncoderProcessor(images, tokenizer)
    folder = str(tmp_path_factory.mktemp("model"))
    built.save_pretrained(folder)
    return AutoModel.from_pretrained(folder, trust_remote_code=True).eval()


def test_every_door_sees_the_same_picture(model: FusionDualEncoderModel, tmp_path: Path) -> None:
    arguments = LoaderArguments(MOST, min_crop_area=1.0, dataloader_num_workers="0")
    loaders = make_loaders(arguments, torch.device("cpu"), model._find_processor())
    for name, content in awkward_pictures().items():
        path = tmp_path / f"{name}.img"
        path.write_bytes(content)
        row = {**rows_of(1)[0], "image": {"bytes": content, "path": None}}
        rows = datasets.Dataset.from_list([row], features=FEATURES)
        shown = loaders.medium.read(row["image"])[0]
        trained = Pairs(tokenize_captions(rows, new_tokenizer(), MOST), TrainingTransform(loaders.medium))[0, 0]
        squares = {
            "training": trained["pixel_values"],
            "search": read_query(str(path), loaders.medium),
            "page": read_query(content, loaders.medium),
        }
        embedded = Reader(Listing([name], rows), [0], loaders.medium)[0]
        if "reason" not in embedded or name not in ("tiny", "extreme aspect"):  # which preparing sets aside
            squares["embedding"] = embedded["square"]
        for door, square in squares.items():
            assert torch.equal(square, shown), (name, door)
        expected = loaders.medium.features(shown[None])
        opened = Image.open(io.BytesIO(content))
        for given in (str(path), path, content, *([] if name == "larger than it is shown" else [opened])):
            [found] = model._inputs(given, "image", 8)
            assert torch.equal(found, expected), (name, type(given))
        # What pipelines and other classes are handed is resized once more by the saved processor, from all pixels.
        picture = model.open_image(path)
        stock = model._find_processor().image_processor(images=picture, return_tensors="pt")["pixel_values"]
        if name not in ("extreme aspect", "larger than it is shown"):
            torch.testing.assert_close(stock, expected, atol=1e-4, rtol=0, msg=name)


def test_every_door_reads_the_same_text(model: FusionDualEncoderModel) -> None:
    rows = datasets.Dataset.from_list([{**rows_of(1)[0], "captions": TEXTS}], features=FEATURES)
    trained = tokenize_captions(rows, new_tokenizer(), MOST)[0]["input_ids"]
    ids, mask = model._tokens(TEXTS)
    assert [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)] == trained
    assert max(map(len, trained)) == MOST
    together = model.encode(texts=TEXTS)
    for place, text in enumerate(TEXTS):
        torch.testing.assert_close(model.encode(texts=text)[0], together[place], atol=1e-5, rtol=0)


def test_nothing_is_embedded_as_nothing(model: FusionDualEncoderModel) -> None:
    images, texts = model.encode(images=[], texts=["one", "two"])
    assert (images.shape, texts.shape) == ((0, 16), (2, 16))
    assert model.encode(texts=[]).shape == (0, 16)
    assert model.encode(texts=np.array(["one", "two"])).shape == (2, 16)
    assert model.rerank("one", []) == []
    with pytest.raises(ValueError, match="batch_size is -1"):
        model.encode(images=Image.new("RGB", (9, 9)), batch_size=-1)


def test_the_folder_is_found_from_anywhere_and_saved_again(
    model: FusionDualEncoderModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.encode(texts="one")
    model.save_pretrained(tmp_path / "again")
    monkeypatch.chdir(tmp_path)
    again = AutoModel.from_pretrained("again", trust_remote_code=True)
    os.chdir("/")
    torch.testing.assert_close(again.encode(texts="one"), model.encode(texts="one"), atol=1e-6, rtol=0)


def test_captions_longer_than_the_text_tower_reads_are_refused(model: FusionDualEncoderModel) -> None:
    with pytest.raises(ValueError, match="--max_seq_length is 17; the text backbone has positions for 16 tokens"):
        measure_flops(model, SIDE, 17)


def test_a_short_sound_is_what_the_extractor_of_ast_makes_of_it() -> None:
    """And a model that was saved before this was so reads as it was trained."""
    count, rate = 24_000, 16_000
    samples = (8000 * np.sin(np.arange(count) * 0.07) + RNG.normal(0, 900, count)).round().astype(np.int16)
    samples[-6000:] = 0  # silence is sound
    extractor = ASTFeatureExtractor(max_length=300)
    sound = Sound(LogMel.of(extractor), 3.0)
    shown = sound.read({"bytes": write_wav(samples, rate), "path": None})[0]
    expected = extractor(samples.astype(np.float32) / 32768, sampling_rate=rate, return_tensors="pt")["input_values"]
    torch.testing.assert_close(sound.features(shown[None]), expected, atol=2e-3, rtol=0)
    extractor.window_seconds = 3.0
    before = Sound(LogMel.of(extractor), 3.0)
    assert before.key != sound.key
    shown = before.read({"bytes": write_wav(samples, rate), "path": None})[0]
    assert (before.features(shown[None]) - expected).abs().max() > 1
