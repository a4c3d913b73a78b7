"""One way to read a picture, a clip, a sound and a text: training, evaluation, search, the page and the model's own `encode`.

Files of odd kinds and broken ones: tests/data/test_timed.py, tests/contracts/test_bad_rows.py.
"""

import contextlib
import io
import itertools
import math
import os
import random
import struct
import wave
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import (
    ASTFeatureExtractor,
    AutoModel,
    BertConfig,
    BertModel,
    ClapFeatureExtractor,
    CLIPImageProcessor,
    ConvNextConfig,
    ConvNextModel,
    VisionTextDualEncoderProcessor,
    Wav2Vec2FeatureExtractor,
    WhisperFeatureExtractor,
)

from mm_utils.data.arguments import LoaderArguments
from mm_utils.data.batches.dataset import EvaluationTransform, Pairs, TrainingPairs, TrainingTransform
from mm_utils.data.batches.loaders import make_loaders
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.images import open_image, read_pixels, shrink
from mm_utils.data.media.medium import (
    Clip,
    Sound,
    _random_box,
    default_seconds,
    kind_of_processor,
    squares,
    vary_loudness,
)
from mm_utils.data.media.pictures import picture
from mm_utils.data.media.riff import read_avi, read_wav, store_clip, write_avi, write_wav
from mm_utils.model import reading
from mm_utils.model.join import join_backbones
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.reading import (
    MOST_RATE,
    UnreadableError,
    center_square,
    frames_of,
    open_picture,
    read_frames,
    read_sound,
    resized,
    samples_of,
    sound_input,
)
from mm_utils.search.listing import Listing, Reader, stock_file
from mm_utils.search.searcher import read_query
from tests.kit.fault_images import TEXTS, awkward_pictures, draw, save, turn
from tests.kit.media_files import clip, jpeg, media_rows, steady, tone, video, wav
from tests.kit.media_files import picture as made_picture
from tests.kit.numbered_rows import FEATURES, new_tokenizer, rows_of

SIDE = 32
MOST = 12
RATE = 1000
CPU = torch.device("cpu")
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> FusionDualEncoderModel:
    """Saved and loaded, as others load it."""
    tokenizer = new_tokenizer()
    tokenizer.model_max_length = MOST
    size = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    torch.manual_seed(0)
    vision = ConvNextModel(ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=SIDE))
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    text = BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=16, **shape))
    built = join_backbones(vision, text, projection_dim=16, fusion_layers=0)
    own = CLIPImageProcessor(**size, image_mean=[0.4] * 3, image_std=[0.3] * 3)
    built.processor = VisionTextDualEncoderProcessor(own, tokenizer)
    folder = str(tmp_path_factory.mktemp("model"))
    built.save_pretrained(folder)
    return AutoModel.from_pretrained(folder, trust_remote_code=True).eval()


# -- pictures -----------------------------------------------------------------------------------------------------------
def test_every_door_sees_the_same_picture(model: FusionDualEncoderModel, tmp_path: Path) -> None:
    arguments = LoaderArguments(MOST, min_crop_area=1.0, dataloader_num_workers="0")
    loaders = make_loaders(arguments, CPU, model._find_processor())
    for name, content in awkward_pictures().items():
        path = tmp_path / f"{name}.img"
        path.write_bytes(content)
        row = {**rows_of(1)[0], "image": {"bytes": content, "path": None}}
        rows = datasets.Dataset.from_list([row], features=FEATURES)
        shown = loaders.medium.read(row["image"])[0]
        trained = Pairs(tokenize_captions(rows, new_tokenizer(), MOST), TrainingTransform(loaders.medium))[0, 0]
        doors = {
            "training": trained["pixel_values"],
            "search": read_query(str(path), loaders.medium),
            "page": read_query(content, loaders.medium),
        }
        embedded = Reader(Listing([name], rows), [0], loaders.medium)[0]
        if "reason" not in embedded or name not in ("tiny", "extreme aspect"):  # which preparing sets aside
            doors["embedding"] = embedded["square"]
        for door, square in doors.items():
            assert torch.equal(square, shown), (name, door)
        expected = loaders.medium.features(shown[None])
        opened = Image.open(io.BytesIO(content))
        for medium in (str(path), path, content, *([] if max(opened.size) > 200 else [opened])):
            [found] = model._inputs(medium, "image", 8)
            assert torch.equal(found, expected), (name, type(medium))
        # What pipelines and other classes are handed is resized once more by the saved processor.
        stock = model._find_processor().image_processor(images=model.open_image(path), return_tensors="pt")
        if name != "extreme aspect":
            torch.testing.assert_close(stock["pixel_values"], expected, atol=1e-4, rtol=0, msg=name)
    for wrong in (np.zeros((9, 9, 3)), 7):
        with pytest.raises(ValueError, match=f"a picture is of type {type(wrong).__name__}. Give a path"):
            model.encode(images=[wrong])


def stored(image: Image.Image, form: str = "PNG", **options: Any) -> dict[str, Any]:
    return {"bytes": save(image, form, **options), "path": None}


def test_unreadable_images_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.jpg")
    cases = [(content, None) for content in (b"", b"<html>404</html>", None)]
    cases += [(None, name) for name in ("gone.png", "folder", "pipe.jpg", "/dev/zero")]
    cases += [(bytes(24), path) for path in ("raw:4x3", "raw:0x0", "raw:-4x-2", "raw.jpg")]
    for (content, path), read in itertools.product(cases, (open_image, read_pixels)):
        with pytest.raises(UnreadableError, match=f"{path or 'embedded image'}: ."):
            read({"bytes": content, "path": path})


@given(st.integers(1, 700), st.integers(1, 700), st.integers(1, 300))
def test_a_reduced_decode_and_shrinking_keep_the_shape(width: int, height: int, side: int) -> None:
    image = Image.new("RGB", (width, height), (200, 30, 60))
    opened = open_image(stored(image, "JPEG"), side)
    assert min(opened.size) >= min(side, width, height)
    assert opened.size in [(math.ceil(width / scale), math.ceil(height / scale)) for scale in (1, 2, 4, 8)]
    small = shrink(image, side)
    if min(width, height) <= side:
        assert small is image
        return
    scale = side / min(width, height)
    assert min(small.size) == side
    assert max(abs(small.width - width * scale), abs(small.height - height * scale)) <= 0.5


def test_pixels_equal_those_of_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    small = draw(180, (100, 80))
    values = [stored(draw(w + h, (w, h)), "JPEG", quality=92) for w, h in ((344, 258), (640, 481), (1, 1), (17, 900))]
    values += [
        stored(small, "JPEG", **how) for how in ({"subsampling": "4:4:4"}, {"progressive": True}, {"exif": turn(6)})
    ]
    values += [stored(small.convert(mode), "JPEG") for mode in ("L", "CMYK")]
    values += [stored(small), stored(small.convert("RGBA"))]
    for value, side in itertools.product(values, (None, 5, 20, 100, 251)):
        array, size = read_pixels(value, side)
        with monkeypatch.context() as patched:
            patched.setattr(reading, "simplejpeg", None)
            assert np.array_equal(array, np.asarray(open_image(value, side)))
            assert size == open_image(value).size  # of the whole image, however much smaller it was decoded


@given(st.integers(1, 2000), st.integers(1, 2000), st.floats(0.01, 0.999), st.integers(0, 2**32))
def test_crops_stay_inside_and_keep_their_area(width: int, height: int, min_area: float, seed: int) -> None:
    largest = min(width, height) ** 2
    left, top, right, bottom = _random_box(width, height, min_area, random.Random(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    across = right - left
    down = bottom - top  # each rounded by half a pixel at most
    assert (across - 0.5) * (down - 0.5) <= largest * (1 + 1e-9)
    assert (across + 0.5) * (down + 0.5) >= largest * min_area * (1 - 1e-9)
    assert (across - 0.5) / (down + 0.5) <= 4 / 3 + 1e-9
    assert (across + 0.5) / max(0.1, down - 0.5) >= 3 / 4 - 1e-9


@pytest.mark.parametrize("size", [16, 97, 224])
def test_training_resizes_a_crop_as_a_saved_model_would(size: int) -> None:
    """Training by torchvision, a saved model without it: to the last level, enlarged, reduced and as it is."""
    for seed, (width, height) in enumerate([(16, 16), (97, 97), (224, 300), (7, 40), (640, 480), (333, 127)] * 4):
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
        shown, window = squares([pixels, pixels[::-1]], size, 0.3, random.Random(seed))
        across = slice(round(window.left * width), round(window.right * width))
        down = slice(round(window.top * height), round(window.bottom * height))
        for frame, of_training in zip([pixels, pixels[::-1]], shown, strict=True):
            assert torch.equal(of_training, resized(frame[down, across].copy(), size, size))


# -- clips --------------------------------------------------------------------------------------------------------------
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
        stream.width = 32
        stream.height = 48
        stream.pix_fmt = "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(3)
        for at in range(20):
            container.mux(stream.encode(av.VideoFrame.from_image(made_picture(at % 7 == 0, at / 10).resize((32, 48)))))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def animated(form: str) -> bytes:
    """A transparent logo that moves, with frames of different lengths."""
    frames = [Image.new("RGBA", (40, 40)) for _ in range(6)]
    for at, frame in enumerate(frames):
        frame.paste((255, 0, 40 * at, 255), (6 * at, 10, 6 * at + 8, 30))
    times = {"duration": [100, 400, 50, 300, 200, 5], "disposal": 2 if form == "GIF" else 1}
    return save(frames[0], form, save_all=True, append_images=frames[1:], **times)


CLIPS = {
    "frames of different lengths": lambda: video(steady(2, 2) + steady(20, 1, 2)),
    "begins late": lambda: video(steady(10, 2, 0.5)),
    "one frame": lambda: video([0.0]),
    "turned": turned_video,
    "turned by no angle": lambda: turned_video(0, 0, 0, 0),
    "wide pixels": wide_pixels,
    "transport stream": lambda: video(steady(25, 3), form="mpegts"),
    **{form: lambda form=form: animated(form) for form in ("GIF", "PNG")},
}


def test_the_matrix_of_a_camera_turns() -> None:
    """Compared with the same movement of the corners of the plain frame."""

    def shown(*matrix):
        return np.asarray(next(read_frames(turned_video(*matrix), 4)).picture(), np.float32)

    plain = shown(1, 0, 0, 1)
    for a, b, c, d in ((-1, 0, 0, -1), (0, 1, -1, 0), (0, -1, 1, 0)):
        moved = plain if a or d else plain.swapaxes(0, 1)
        right = moved[:: -1 if b + d < 0 else 1, :: -1 if a + c < 0 else 1]
        assert abs(shown(a, b, c, d) - right).mean() < 4, (a, b, c, d)


def test_every_door_sees_the_same_frames(tmp_path: Path) -> None:
    """Up to what storing frames as JPEG changes, the frames of a file are those of training, embedding and search."""
    for name, make in CLIPS.items():
        path = tmp_path / name
        content = make()
        path.write_bytes(content)
        row = {"bytes": store_clip(read_frames(content, 4), 4)[0], "path": None}
        assert stock_file(content, Clip(SIDE)) == row["bytes"]  # what an index keeps and embeds
        for frames in (4, 16):
            trained = Clip(SIDE, frames=frames).read(row)[0].float()
            read = [center_square(open_picture(each, SIDE), SIDE).float() for each in frames_of(path, frames)]
            apart = [float((one - other).abs().mean()) for one, other in zip(read, trained, strict=True)]
            assert max(apart) < 4, (name, frames, apart)


def brightening(count: int, fps: float = 4.0) -> dict[str, Any]:
    """A clip whose frame `i` is 10 i bright."""
    return {"bytes": write_avi([jpeg(10 * number) for number in range(count)], fps, (48, 32)), "path": None}


@given(st.integers(1, 24), st.integers(1, 12), st.integers(0, 99))
def test_frames_lie_on_the_clips_clock(count: int, frames: int, seed: int) -> None:
    for rng in (None, random.Random(seed)):
        shown, (size, _) = Clip(16, frames=frames).read(brightening(count), rng)
        assert (shown.shape, shown.dtype, size) == ((frames, 3, 16, 16), torch.uint8, (count / 4, 1.0))
        numbers = (shown.float().mean((1, 2, 3)) / 10).round().tolist()
        assert numbers == sorted(numbers)
        if rng is None:
            assert numbers == [(2 * at + 1) * count // (2 * frames) for at in range(frames)]


# -- sounds -------------------------------------------------------------------------------------------------------------
def extractor(rate: int = RATE) -> ClapFeatureExtractor:
    return ClapFeatureExtractor(
        feature_size=16, sampling_rate=rate, hop_length=50, fft_window_size=128, max_length_s=3, frequency_min=20,
        frequency_max=rate // 2, truncation="rand_trunc", padding="pad",
    )  # fmt: skip


def sounds(seconds: float, rate: int = RATE, min_share: float = 1.0, jitter: float = 0.0) -> Sound:
    """Of a tower that reads samples."""
    return Sound(Wav2Vec2FeatureExtractor(1, rate, do_normalize=False), seconds, min_share, jitter)


def test_a_tower_gets_what_its_extractor_makes_and_a_short_sound_is_filled_up_as_there() -> None:
    ast = ASTFeatureExtractor(num_mel_bins=16, max_length=98)
    ast.pads_frames = True
    old_ast = ASTFeatureExtractor(num_mel_bins=16, max_length=98)
    old_ast.window_seconds = 1.0
    whisper = WhisperFeatureExtractor(8, chunk_length=1)
    raw = Wav2Vec2FeatureExtractor()
    clap = {"max_length_s": 1, "frequency_max": 8000, "padding": "repeat"}
    loops = ClapFeatureExtractor(16, 16000, truncation="rand_trunc", **clap)
    fused = ClapFeatureExtractor(16, 16000, truncation="fusion", **clap)
    samples = RNG.normal(0, 4000, 7000).astype(np.int16)
    silent = np.pad(samples, (0, 9000))
    twice = np.tile(samples, 3)[:16000]
    for owner, filled, shape in (
        (ast, samples, (98, 16)),
        (old_ast, silent, (98, 16)),
        (whisper, silent, (8, 100)),
        (raw, silent, (16000,)),
        (loops, twice, (1, 34, 16)),
        (fused, twice, (1, 34, 16)),
    ):
        found = sound_input(owner, samples, 16000)
        assert (found.shape, found.dtype) == (shape, np.float32)
        expected = owner(filled.astype(np.float32) / 32768, sampling_rate=16000, return_tensors="np")
        assert np.array_equal(found, next(iter(expected.values()))[0][: shape[0]])
        assert np.isfinite(sound_input(owner, samples[:9], 16000)).all()


def counting(count: int, rate: int = RATE) -> dict[str, Any]:
    """A sound whose sample says its own number."""
    return {"bytes": write_wav(np.arange(count, dtype=np.int16), rate), "path": None}


def test_every_door_hears_the_same_sound(tmp_path: Path) -> None:
    for rate, seconds, channels in itertools.product((8000, 11025, 44100), (0.4, 2.7), (1, 2)):
        samples = (RNG.normal(0, 4000, round(rate * seconds)).cumsum() % 20000 - 10000).astype(np.int16)
        content = wav(samples, rate, channels)
        (tmp_path / "a.wav").write_bytes(content)
        kept = write_wav(read_sound(content, 8000), 8000)
        for window in (0.5, 1.0, 5.0):
            sound = sounds(window, 8000)
            trained = sound.read({"bytes": kept, "path": None})[0]
            assert stock_file(content, sound) == kept
            assert torch.equal(read_query(content, sound), trained)
            read = samples_of(tmp_path / "a.wav", 8000, window)
            assert np.array_equal(sound_input(sound.extractor, read, len(trained)), trained)


@given(st.integers(20, 6000), st.integers(0, 99), st.sampled_from([1.0, 0.7, 0.1]))
def test_a_sound_begins_where_its_window_says(count: int, seed: int, share: float) -> None:
    """In training it may leave the sound by a share of it, and silence is there."""
    for rng in (None, random.Random(seed)):
        shown, (size, window) = sounds(2.0, min_share=share).read(counting(count), rng)
        assert (shown.dtype, size) == (torch.float32, (count / RATE, 1.0))
        assert window.right - window.left == pytest.approx(2000 / count)
        first = round(window.left * count)
        within = np.arange(first, first + 2000) if rng is not None or first > 0 else np.arange(2000)
        is_sound = (within >= 0) & (within < count)
        assert np.array_equal(shown.numpy() * 32768, np.where(is_sound, within, 0))
        if rng is None:
            assert first == pytest.approx(max(0, count - 2000) / 2, abs=1)
        else:
            assert is_sound.sum() >= min(count, share * 2000) - 2  # what is much shorter than the window is never cut


def test_sounds_are_resampled_onto_the_towers_clock() -> None:
    high = (8000 * np.sin(2 * np.pi * 50 * np.arange(6000) / 2000)).astype(np.int16)
    shown, (size, window) = sounds(2.0).read({"bytes": write_wav(high, 2000), "path": None}, None)
    assert (size, shown.shape) == ((3.0, 1.0), (2000,))
    expected = 8000 * np.sin(2 * np.pi * 50 * (round(window.left * 3 * RATE) + np.arange(2000)) / RATE)
    assert np.abs(shown.numpy()[50:-50] * 32768 - expected[50:-50]).max() < 200


@given(st.integers(0, 999), st.sampled_from([0.0, 3.0, 12.0]), st.sampled_from([1000, 16000]))
def test_bands_are_louder_or_softer_and_nothing_moves(seed: int, decibels: float, loud: int) -> None:
    """Of two tones, which are bins of the spectrum; what would be too loud is softer as a whole, and nothing is cut off."""
    time = np.arange(4000) / 8000
    bins = [250, 1500]
    before = (loud * (np.sin(2 * np.pi * 500 * time) + np.sin(2 * np.pi * 3000 * time))).astype(np.int16)
    after = vary_loudness(before, 8000, decibels, random.Random(seed))
    assert np.array_equal(after, vary_loudness(before, 8000, decibels, random.Random(seed)))
    was = abs(np.fft.rfft(before))
    found = abs(np.fft.rfft(after))
    assert np.delete(found, bins).max() < 0.02 * found.max() + 2 * len(before) ** 0.5  # no other tone; rounding
    if loud == 1000:
        assert (abs(20 * np.log10(found[bins] / was[bins])) <= 2 * decibels + 0.1).all()
    if not decibels:
        assert np.array_equal(after, before)
    elif loud == 1000:
        assert not np.array_equal(after, vary_loudness(before, 8000, decibels, random.Random(seed + 1)))


# -- stored files -------------------------------------------------------------------------------------------------------
JPEGS = [jpeg(0), jpeg(90), b"", jpeg(200), b""]


def test_samples_and_frames_survive_and_stock_players_read_them() -> None:
    samples = np.random.default_rng(0).integers(-32768, 32768, 999).astype(np.int16)
    content = write_wav(samples, 22_050)
    note = b"LIST\x03\0\0\0abc\0"  # of an odd size, before and behind the samples, as writers put them
    longer = content[:36] + note + content[36:] + note
    for file in (content, longer[:4] + (len(longer) - 8).to_bytes(4, "little") + longer[8:]):
        assert [read_wav(file)[0].tolist(), read_wav(file)[1]] == [samples.tolist(), 22_050]
    with wave.open(io.BytesIO(content)) as stock:
        assert stock.readframes(1000) == samples.tobytes()
    for fps in (1.0, 4.0, 29.97, 30000 / 1001, 0.1):
        frames, found = read_avi(write_avi(JPEGS, fps, (48, 32)))
        assert [bytes(frame) for frame in frames] == [JPEGS[at] for at in (0, 1, 1, 3, 3)]
        assert found == pytest.approx(fps, rel=1e-9)
    with av.open(io.BytesIO(write_avi(JPEGS, 29.97, (48, 32)))) as container:
        shown = [(frame.time, frame.to_ndarray(format="rgb24").mean()) for frame in container.decode(video=0)]
    times, greys = zip(*shown, strict=True)
    assert times == pytest.approx([0, 1 / 29.97, 3 / 29.97], abs=1e-6)
    assert greys == pytest.approx([0, 90, 200], abs=2)


@pytest.mark.parametrize("content", [write_wav(np.arange(9, dtype=np.int16), 8000), write_avi(JPEGS, 4, (48, 32))])
def test_stored_files_that_are_cut_or_damaged(content: bytes) -> None:
    """Cut anywhere, or of another kind: never anything but the one error, and never part of a medium."""
    read = read_wav if content[8:12] == b"WAVE" else read_avi
    for end in [*range(min(64, len(content) - 1)), *range(64, len(content), 97)]:
        with pytest.raises(UnreadableError):
            read(content[:end])
    rng = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(content)
        broken[rng.integers(len(broken))] = rng.integers(256)
        with contextlib.suppress(UnreadableError):
            read(bytes(broken))


def test_what_would_fill_the_memory_is_refused() -> None:
    fast = bytearray(write_wav(np.arange(5, dtype=np.int16), 8000))
    # Resampled by a filter of twenty numbers for every sample of a second
    fast[24:28] = (MOST_RATE + 1).to_bytes(4, "little")
    # Is decoded whole, whatever is asked for: 512 of 40 million pixels would be 60 GB
    png = save(Image.new("RGB", (48, 32)), "PNG")
    for read, content, message in (
        (read_wav, bytes(fast), "samples a second"),
        (read_wav, wav(channels=2), "it is no WAV file of one channel"),
        (read_avi, write_avi([JPEGS[0], *[b""] * 300_000], 4, (48, 32)), "more than 250,000"),
        (read_avi, write_avi([JPEGS[0], png], 4, (48, 32)), "not JPEG"),
    ):
        with pytest.raises(UnreadableError, match=message):
            read(content)


# -- examples -----------------------------------------------------------------------------------------------------------
def examples_of(kind: str, media: list[dict[str, Any]], seconds: list[float]) -> datasets.Dataset:
    numbers = range(len(media))
    ids = {
        "image_key": numbers,
        "input_ids": [[[1, 5 + n, 2]] for n in numbers],
        "caption_keys": [[n] for n in numbers],
    }
    return media_rows(kind, [value["bytes"] for value in media], seconds=seconds, **ids)


def test_rows_with_the_same_captions_are_no_negatives_in_training() -> None:
    rows = examples_of("sound", [counting(2000)] * 4, [2.0] * 4).remove_columns(["input_ids", "caption_keys"])
    captions = {
        "input_ids": [[[1, 5, 2], [1, 6, 2]]] * 3 + [[[1, 5, 2]]],
        "caption_keys": [[7, 8], [8, 7], [7, 9], [7]],
    }
    rows = datasets.concatenate_datasets([rows, datasets.Dataset.from_dict(captions)], axis=1)
    of_training = TrainingPairs(rows, TrainingTransform(sounds(2.0)))
    keys = [of_training[row, 0]["image_key"] for row in range(4)]
    assert keys[0] == keys[1]
    assert len(set(keys[1:])) == 3
    in_evaluation = Pairs(rows, EvaluationTransform(sounds(2.0)))
    assert [in_evaluation[row, 0]["image_key"] for row in range(4)] == [0, 1, 2, 3]


def processor(kind: str, seconds: float = 0.0, frames: int | None = None) -> Any:
    """What a processor says of its media."""
    tokenizer = new_tokenizer()
    if kind == "sound":
        own = extractor()
        own.window_seconds = seconds
        return SimpleNamespace(feature_extractor=own, tokenizer=tokenizer)
    own = SimpleNamespace(crop_size={"height": 16}, image_mean=[0.5] * 3, image_std=[0.25] * 3, clip_frames=frames)
    return SimpleNamespace(image_processor=own, tokenizer=tokenizer)


def loaders_of(owner: Any, **flags: Any) -> Any:
    return make_loaders(LoaderArguments(dataloader_num_workers="0", **flags), CPU, owner)


def test_the_processor_knows_the_window() -> None:
    rows = examples_of("sound", [counting(2500)] * 2, [2.5, 2.5])
    owners = {
        "image": processor("image"),
        "clip": processor("clip", frames=5),
        "sound": processor("sound", seconds=default_seconds(rows)),
    }
    for kind, shape in (("image", (3, 16, 16)), ("clip", (5, 3, 16, 16)), ("sound", (1, 61, 16))):
        assert loaders_of(owners[kind]).medium.shape == shape
        assert kind_of_processor(owners[kind]) == kind
    for kind, flags, message in (
        ("image", {"clip_frames": 2}, "--clip_frames is 2; these are images"),
        ("clip", {"clip_frames": 4}, "--clip_frames is 4; the model takes 5"),
        ("sound", {"horizontal_flip": True}, "--horizontal_flip is .*; these are sounds"),
    ):
        with pytest.raises(ValueError, match=message):
            loaders_of(owners[kind], **flags)


def test_batches_on_the_device_are_what_the_tower_takes() -> None:
    sound = processor("sound", seconds=2.0)
    moving = processor("clip", frames=2)
    rows = examples_of("sound", [counting(3000), counting(400)], [3.0, 0.4])
    loaders = loaders_of(sound)
    [batch] = loaders.evaluation(rows, 2)
    heard = [np.arange(begin, begin + count, dtype=np.float32) / 32768 for begin, count in ((500, 2000), (0, 400))]
    expected = sound.feature_extractor(heard, sampling_rate=RATE, return_tensors="pt")["input_features"]
    torch.testing.assert_close(batch["pixel_values"], expected.float(), atol=1e-3, rtol=0)
    assert loaders.blank(3).shape[1:] == expected.shape[1:]
    clips = examples_of("clip", [brightening(8)], [2.0])
    loaders = loaders_of(moving)
    [batch] = loaders.evaluation(clips, 2)
    whole = Pairs(clips, EvaluationTransform(loaders.medium))[0, 0]["pixel_values"]
    torch.testing.assert_close(batch["pixel_values"][0], (whole / 255 - 0.5) / 0.25, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="the data are sounds, and the model is for clips"):
        loaders.evaluation(rows, 2)
    loaders.check_medium(rows.remove_columns("image"))  # cached features stand for it


# -- for people: pictures of media, texts, nothing ----------------------------------------------------------------------
def test_a_sound_shows_when_and_how_high_it_is() -> None:
    for rate in (8000, 44100):
        found = np.asarray(picture({"bytes": tone(1000, 3000, rate=rate)}, "sound").convert("L"))
        for hertz, columns in ((1000, slice(8, 120)), (3000, slice(136, 248))):
            assert 1 - found[:, columns].argmax(0) / 175 == pytest.approx(hertz / (rate / 2), abs=0.02)
    silent = np.asarray(picture({"bytes": tone(0)}, "sound"))
    assert (silent == silent[0, 0]).all()
    assert silent.mean() < 60
    assert picture({"bytes": write_wav(np.full(3, 9000, np.int16), 16000)}, "sound").width == 256


def test_a_clip_shows_four_frames_in_reading_order() -> None:
    found = picture({"bytes": clip([each for each in ("red", "lime", "blue", "white") for _ in range(5)])}, "clip")
    spots = [found.getpixel(spot) for spot in ((10, 10), (50, 10), (10, 40), (50, 40))]
    wanted = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)]
    assert np.abs(np.array(spots) - np.array(wanted)).max() < 8
    for kind, content in itertools.product(("clip", "sound"), (None, b"", b"RIFF", b"no medium at all")):
        with pytest.raises(UnreadableError):
            picture({"bytes": content, "path": None}, kind)


def test_every_door_reads_the_same_text(model: FusionDualEncoderModel) -> None:
    rows = datasets.Dataset.from_list([{**rows_of(1)[0], "captions": TEXTS}], features=FEATURES)
    trained = tokenize_captions(rows, new_tokenizer(), MOST)[0]["input_ids"]
    ids, mask = model.text_inputs(TEXTS)
    assert [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)] == trained
    assert max(map(len, trained)) == MOST
    together = model.encode(texts=TEXTS)
    for place, text in enumerate(TEXTS):
        torch.testing.assert_close(model.encode(texts=text)[0], together[place], atol=1e-5, rtol=0)


def test_nothing_is_embedded_as_nothing(model: FusionDualEncoderModel) -> None:
    embedded = model.encode(images=[], texts=["one", "two"])
    assert [each.shape for each in embedded] == [(0, 16), (2, 16)]
    assert model.encode(texts=[]).shape == (0, 16)
    assert model.rerank("one", []) == []
    for wrong, message in (
        ({"texts": "one", "batch_size": 0}, "batch_size is 0; give a number from 1 on"),
        *(
            ({"texts": texts}, "The text is .*; a text is a string of UTF-8")
            for texts in ([1], ["one", "\udcff"], b"one")
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model.encode(**wrong)


@pytest.mark.parametrize("mode", ["P", "L"])
def test_one_transparent_colour_of_a_palette_or_of_grey_is_white(mode: str) -> None:
    image = Image.new(mode, (20, 20), 0)
    if mode == "P":
        image.putpalette([0, 0, 0, 200, 0, 0] + [0] * 762)
    image.paste(1 if mode == "P" else 120, (0, 0, 10, 20))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", transparency=0)
    shown = np.asarray(open_picture(buffer.getvalue()))
    assert (shown[:, 12:] == 255).all()
    assert (shown[:, :8] == ([200, 0, 0] if mode == "P" else 120)).all()


def test_sixteen_bits_are_rounded_to_the_nearest_of_eight() -> None:
    values = np.arange(0, 65536, 111, dtype=np.uint16)[None]
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    expected = np.floor(values[0].astype(float) * 255 / 65535 + 0.5)
    assert np.array_equal(np.asarray(open_picture(buffer.getvalue()))[0, :, 0], expected)
