"""One way to read a picture, a text and a sound: training, evaluation, search and the model's own `encode`."""

import io
import itertools
import os
import struct
from fractions import Fraction
from pathlib import Path

import av
import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    CLIPImageProcessor,
    ConvNextConfig,
    ConvNextModel,
    VisionTextDualEncoderProcessor,
    Wav2Vec2FeatureExtractor,
)

from mm_utils.data.batches.dataset import Pairs, TrainingTransform
from mm_utils.data.batches.loaders import LoaderArguments, make_loaders
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.media.medium import Clip, Sound
from mm_utils.data.media.riff import store_clip, write_wav
from mm_utils.model.checks import check_positions
from mm_utils.model.join import join_backbones
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.reading import center_square, frames_of, open_picture, read_frames, read_sound, samples_of
from mm_utils.model.spectrograms import LogMel
from mm_utils.search.listing import Listing, Reader, stock_file
from mm_utils.search.searcher import read_query
from tests.kit.awkward import RNG, TEXTS, awkward_pictures
from tests.kit.fault_images import save
from tests.kit.made_media import picture as made_picture
from tests.kit.made_media import steady, video, wav
from tests.kit.numbered_rows import FEATURES, new_tokenizer, rows_of

SIDE, MOST = 32, 12


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
    built = join_backbones(vision, text, projection_dim=16, fusion_layers=0)
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
        # What pipelines and other classes are handed is resized once more by the saved processor.
        picture = model.open_image(path)
        stock = model._find_processor().image_processor(images=picture, return_tensors="pt")["pixel_values"]
        if name != "extreme aspect":
            torch.testing.assert_close(stock, expected, atol=1e-4, rtol=0, msg=name)
    for wrong in (np.zeros((9, 9, 3)), 7):
        with pytest.raises(ValueError, match=f"a picture is of type {type(wrong).__name__}. Give a path"):
            model.encode(images=[wrong])


def test_every_door_reads_the_same_text(model: FusionDualEncoderModel) -> None:
    rows = datasets.Dataset.from_list([{**rows_of(1)[0], "captions": TEXTS}], features=FEATURES)
    trained = tokenize_captions(rows, new_tokenizer(), MOST)[0]["input_ids"]
    ids, mask = model.text_inputs(TEXTS)
    assert [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)] == trained
    assert max(map(len, trained)) == MOST
    together = model.encode(texts=TEXTS)
    for place, text in enumerate(TEXTS):
        torch.testing.assert_close(model.encode(texts=text)[0], together[place], atol=1e-5, rtol=0)


def turned_video(a: int = 0, b: int = 1, c: int = -1, d: int = 0) -> bytes:
    """A video whose header turns a pixel at x, y to a x + c y, b x + d y; by default by a quarter."""
    content = bytearray(video(steady(8, 4), form="mp4", size=(48, 32)))
    at = content.index(b"tkhd") + 44
    content[at : at + 36] = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    return bytes(content)


def wide_pixels() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 48, "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(3)
        for at in range(20):
            container.mux(stream.encode(av.VideoFrame.from_image(made_picture(at % 7 == 0, at / 10).resize((32, 48)))))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def animated(form: str) -> bytes:
    """A transparent logo that moves, with frames of different lengths where the format is stored so."""
    frames = [Image.new("RGBA", (40, 40)) for _ in range(6)]
    for at, frame in enumerate(frames):
        frame.paste((255, 0, 40 * at, 255), (6 * at, 10, 6 * at + 8, 30))
    times = {"duration": [100, 400, 50, 300, 200, 5], "disposal": 2} if form == "GIF" else {"duration": 200}
    return save(frames[0], form, save_all=True, append_images=frames[1:], **times)


CLIPS = {
    "steady": lambda: video(steady(25, 3)),
    "frames of different lengths": lambda: video(steady(2, 2) + steady(20, 1, 2)),
    "begins late": lambda: video(steady(10, 2, 0.5)),
    "one frame": lambda: video([0.0]),
    "two frames": lambda: video([0.0, 1.0]),
    "turned": turned_video,
    "turned by no angle": lambda: turned_video(0, 0, 0, 0),
    "wide pixels": wide_pixels,
    "transport stream": lambda: video(steady(25, 3), form="mpegts"),
    "GIF": lambda: animated("GIF"),
    "WebP": lambda: animated("WEBP"),
    "PNG": lambda: animated("PNG"),
}


def test_the_matrix_of_a_camera_turns_and_mirrors() -> None:
    """The eight ways to hold a camera, compared with the same movement of the corners of the plain frame."""

    def shown(*matrix: int) -> np.ndarray:
        return np.asarray(next(read_frames(turned_video(*matrix), 4)).picture(), np.float32)

    plain = shown(1, 0, 0, 1)
    for a, b, c, d in ((1, 0, 0, 1), (-1, 0, 0, -1), (0, 1, -1, 0), (0, -1, 1, 0),
                       (-1, 0, 0, 1), (1, 0, 0, -1), (0, 1, 1, 0), (0, -1, -1, 0)):  # fmt: skip
        moved = plain if a or d else plain.swapaxes(0, 1)
        right = moved[:: -1 if b + d < 0 else 1, :: -1 if a + c < 0 else 1]
        assert abs(shown(a, b, c, d) - right).mean() < 4, (a, b, c, d)


def test_every_door_sees_the_same_frames(tmp_path: Path) -> None:
    """Up to what storing frames as JPEG changes, the frames of a file are those of training, embedding and search."""
    for name, make in CLIPS.items():
        path, content = tmp_path / name, make()
        path.write_bytes(content)
        row = {"bytes": store_clip(read_frames(content, 4), 4).content, "path": None}
        assert stock_file(content, Clip(SIDE)) == row["bytes"]  # what an index keeps and embeds
        for frames, seconds in ((4, None), (8, 1.0), (16, 4.0)):
            trained = Clip(SIDE, frames=frames, seconds=seconds).read(row)[0].float()
            read = [center_square(open_picture(each, SIDE), SIDE).float() for each in frames_of(path, frames, seconds)]
            apart = [float((one - other).abs().mean()) for one, other in zip(read, trained, strict=True)]
            assert max(apart) < 4, (name, frames, seconds, apart)


def test_every_door_hears_the_same_sound(tmp_path: Path) -> None:
    extractor = Wav2Vec2FeatureExtractor(sampling_rate=8000)
    for rate, seconds, channels in itertools.product((8000, 11025, 44100), (0.4, 1.0, 2.7), (1, 2)):
        samples = (RNG.normal(0, 4000, round(rate * seconds)).cumsum() % 20000 - 10000).astype(np.int16)
        content = wav(samples, rate, channels)
        (tmp_path / "a.wav").write_bytes(content)
        stored = write_wav(read_sound(content, 8000), 8000)
        for window in (0.5, 1.0, 5.0):
            extractor.window_seconds = window
            sound = Sound(LogMel.of(extractor), window)
            trained = sound.read({"bytes": stored, "path": None})[0]
            assert stock_file(content, sound) == stored
            assert torch.equal(read_query(content, sound), trained)
            read = samples_of(tmp_path / "a.wav", 8000, window)
            assert np.array_equal(sound.log_mel.window(read, len(trained)), trained)


def test_what_is_no_whole_sound_is_refused(tmp_path: Path) -> None:
    """As by preparing and by search; a stream leaves open in its header how long it is."""
    sound, extractor = wav(np.arange(900, dtype=np.int16), 8000), Wav2Vec2FeatureExtractor(sampling_rate=8000)
    path, medium = tmp_path / "a.wav", Sound(LogMel.of(extractor), 1.0)
    path.write_bytes(sound[:40] + b"\xff" * 4 + sound[44:])
    assert len(samples_of(path, 8000)) == 900
    for content in (sound[:901], sound[:900], sound[:40] + bytes(4), b"no sound"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a.wav: .*Give another file"):
            samples_of(path, 8000)
        with pytest.raises(ValueError, match=r"a.wav: (a WAV file|it is not a WAV file)"):
            read_query(str(path), medium)


def test_nothing_is_embedded_as_nothing(model: FusionDualEncoderModel) -> None:
    images, texts = model.encode(images=[], texts=["one", "two"])
    assert (images.shape, texts.shape) == ((0, 16), (2, 16))
    assert model.encode(texts=[]).shape == (0, 16)
    assert model.encode(texts=np.array(["one", "two"])).shape == (2, 16)
    assert model.rerank("one", []) == []
    for given, size in (({"images": Image.new("RGB", (9, 9))}, -1), ({"texts": ["one"]}, -1), ({"texts": "one"}, 0)):
        with pytest.raises(ValueError, match=f"batch_size is {size}; give a number from 1 on"):
            model.encode(**given, batch_size=size)
    for wrong in ([1], [None], ["one", "\udcff"], b"one"):
        with pytest.raises(ValueError, match=r"The text is .*; a text is a string of UTF-8"):
            model.encode(texts=wrong)


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
        check_positions(model, 17)
