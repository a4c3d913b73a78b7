"""Read pictures, clips, sounds and texts by fixed rules: the same in training, evaluation, search and a model's `encode`.

This file is saved with every model, beside its code. It depends on numpy and Pillow alone; `center_square` needs torch, videos PyAV,
and sounds of another rate scipy.

The rules of pictures, which give the same pixels on every machine. `decode` names each that changes something in its notes:
    formats         those of `FORMATS`, by content and never by name; vector formats would start other programs
    several frames  the first one: `animated_first_frame`, `multi_page_first` (TIFF, MPO)
    orientation     EXIF rotation and mirroring are applied, `exif_rotated`; unreadable EXIF is ignored
    transparency    laid on white, as most pages show it: `alpha_on_white`
    16 bits grey    value * 255 / 65535, rounded: `sixteen_bit_scaled`; 16-bit colour comes from Pillow as its high bytes
    float, 32 bits  floats in 0..1 times 255, integers in 0..65535 as 16 bits, all else stretched from its least to its
                    greatest value: `float_scaled`; refused if a value is not finite
    CMYK            converted without a profile, stored inverted as Adobe does: `cmyk_converted`
    palette         `palette_converted`;  colour profiles and all other metadata are dropped
"""

import io
import math
import os
import struct
import urllib.request
import wave
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageSequence, UnidentifiedImageError, features

try:
    import simplejpeg
except ImportError:  # optional: it yields Pillow's pixels, and refuses inner damage that Pillow skips over
    simplejpeg = None

try:
    from pillow_heif import register_heif_opener
except ImportError:  # optional: the photographs of telephones (HEIC); Pillow reads none
    _HEIF: tuple[str, ...] = ()
else:
    register_heif_opener()
    _HEIF = ("HEIF",)

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF") + (("AVIF",) if "avif" in features.modules else ()) + _HEIF
# At the scale of decoding: 9000 x 9000 white pixels are a file of 10 kB and take 1.5 GB to decode.
MOST_PIXELS = 40_000_000
MOST_BYTES = 64 << 20  # of an image file
CLIP_FPS = 4.0  # frames a second that are kept of clips, where nothing else is asked for
_OWN_CLOCK = ("mov", "matroska", "avi", "asf", "flv")  # files whose time stamps count from their beginning
_SAME_TIME = 1e-4  # seconds
_Frame = tuple[float | None, float, Callable[[], Image.Image]]  # from when it is shown, for how long, its picture
_STREAMED = 0xFFFFFF00  # bytes, from which on a WAV file's header says that its length is not known
_STRIP = 8  # ratio of sides
_LARGE = 8_000_000  # pixels; resizing more in one step would take twelve bytes a pixel
_SECONDS = 30  # to wait for an address
CHARACTERS_PER_TOKEN = 32  # that are read of a text, so that none takes long
_Turn = Image.Transpose
_TURNS = {
    2: _Turn.FLIP_LEFT_RIGHT,
    3: _Turn.ROTATE_180,
    4: _Turn.FLIP_TOP_BOTTOM,
    5: _Turn.TRANSPOSE,
    6: _Turn.ROTATE_270,
    7: _Turn.TRANSVERSE,
    8: _Turn.ROTATE_90,
}


class UnreadableImageError(ValueError):
    """An image that cannot be decoded; the message names it and the reason."""


class TooManyPixelsError(UnreadableImageError):
    """An image whose decoding would take too much memory."""


def open_picture(source: Any, min_side: int | None = None) -> Image.Image:
    """Return a picture as upright RGB, by the rules above.

    Args:
        source: a path, an address (http), the bytes of a file, or a PIL image.
        min_side: a JPEG may be decoded at a reduced scale whose shorter side is at least this.

    Raises:
        UnreadableImageError: if it cannot be read, with its name and the reason.
    """
    if isinstance(source, Image.Image):
        return decode(source.copy(), b"")[0]
    if not isinstance(source, (bytes, str, os.PathLike)):
        kind = type(source).__name__
        raise UnreadableImageError(f"a picture is of type {kind}. Give a path, an address, bytes or a PIL image.")
    name = "the picture" if isinstance(source, bytes) else os.fspath(source)
    try:
        if isinstance(source, bytes):
            content = source
        elif name.startswith(("http://", "https://")):
            with urllib.request.urlopen(name, timeout=_SECONDS) as answer:
                content = answer.read(MOST_BYTES + 1)
        else:
            with open(name, "rb") as file:
                content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UnreadableImageError(f"it has more than {MOST_BYTES:,} bytes")
        return decode(read_header(content), content, min_side, most_pixels=MOST_PIXELS)[0]
    except Exception as error:  # a damaged file makes Pillow raise struct.error, RuntimeError and others, too
        raise UnreadableImageError(f"{name}: {' '.join(str(error).split()) or type(error).__name__}") from error


def read_header(content: bytes) -> Image.Image:
    """Read the size, mode and format of an image file without decoding, as Pillow does."""
    return Image.open(io.BytesIO(content), formats=FORMATS)


def decode(
    header: Image.Image,
    content: bytes,
    min_side: int | None = None,
    *,
    strict: bool = False,
    most_pixels: int | None = None,
) -> tuple[Image.Image, tuple[int, int], tuple[str, ...]]:
    """Decode the image whose header is `read_header(content)`, by the rules above.

    Args:
        min_side: a JPEG may be decoded at half, quarter or eighth scale whose shorter side is at least this.
        strict: refuse a JPEG with inner damage that decoders skip over. Needs simplejpeg; ignored without it.
        most_pixels: refuse more, at the scale of decoding, before any is decoded.

    Returns:
        Upright RGB without metadata, perhaps reduced; (width, height) of the whole upright image; notes.

    Raises:
        TooManyPixelsError: above `most_pixels`.
        Exception: what the decoder raises at a damaged file, among others struct.error and RuntimeError.
    """
    width, height = header.size
    if min_side is not None:
        _draft(header, min_side)
    if most_pixels is not None and header.width * header.height > most_pixels:
        raise TooManyPixelsError(
            f"it has {width:,} x {height:,} pixels, {most_pixels:,} are the most; prepare_data can shrink it once"
        )
    if header.format == "PNG":
        header.load()  # here, as reading the EXIF block of a PNG decodes it, and hides its damage
    orientation, notes = _orientation(header), []
    if getattr(header, "is_animated", False):
        notes.append("multi_page_first" if header.format in ("TIFF", "MPO") else "animated_first_frame")
    image = _decode_strictly(header, content, (width, height)) if strict else None
    if image is None:
        header.load()
        image = header
    image = _flatten(image, notes)
    if orientation in _TURNS:
        notes.append("exif_rotated")
    if header.format == "TIFF":  # Pillow has turned it already
        width, height = image.size
    elif orientation in _TURNS:
        image = image.transpose(_TURNS[orientation])
        width, height = (height, width) if orientation >= 5 else (width, height)
    image.info = {}  # else `save` writes comments and profiles out again
    return image, (width, height), tuple(notes)


def _orientation(header: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; a garbled EXIF block counts as none."""
    try:
        value = header.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # Pillow parses lazily: struct.error, KeyError, SyntaxError, TypeError, ...
        return 1
    return value if value in range(1, 9) else 1


def _draft(header: Image.Image, min_side: int) -> None:
    """Ask for a reduced decode; `draft` keeps both sides at least as large as asked."""
    shorter = min(header.size)
    if min_side < shorter:
        header.draft("RGB", (header.width * min_side // shorter, header.height * min_side // shorter))


def _decode_strictly(header: Image.Image, content: bytes, size: tuple[int, int]) -> Image.Image | None:
    """Decode a plain colour JPEG by simplejpeg at the scale of `header`, or return None."""
    if simplejpeg is None or header.format != "JPEG" or header.mode != "RGB":
        return None
    smaller = {}
    if header.size != size:
        smaller = {"min_width": header.width, "min_height": header.height, "min_factor": 2}
    array = simplejpeg.decode_jpeg(content, "RGBX", strict=True, **smaller)
    if array.shape[1::-1] != header.size:
        return None
    return Image.frombytes("RGB", header.size, array.data, "raw", "RGBX")


def _flatten(image: Image.Image, notes: list[str]) -> Image.Image:
    """Convert any mode to RGB; add the conversions to `notes`."""
    if image.mode == "F" or image.mode.startswith("I"):
        return _scale(image, notes)
    if image.mode in ("P", "PA"):
        notes.append("palette_converted")
    if image.mode == "CMYK":
        notes.append("cmyk_converted")
    if image.mode in ("RGBA", "RGBa", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() != (255, 255):
            notes.append("alpha_on_white")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _scale(image: Image.Image, notes: list[str]) -> Image.Image:
    """Scale grey values of more than 8 bits, which `convert` would clip to white."""
    values = np.asarray(image)
    low, high = float(values.min()), float(values.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UnreadableImageError("it holds values that are not finite")
    top = 1.0 if image.mode == "F" else 65535.0
    if low < 0 or high > top or image.mode == "F":
        notes.append("float_scaled")
    else:
        notes.append("sixteen_bit_scaled")
    if low >= 0 and high <= top:
        low, high = 0.0, top
    grey = (values.astype(np.float32) - np.float32(low)) * np.float32(255 / ((high - low) or 1)) + np.float32(0.5)
    return Image.fromarray(grey.astype(np.uint8)).convert("RGB")


def center_square(image: Image.Image, size: int) -> Any:
    """Return the central square, resized, as uint8 `[3, size, size]`.

    Like the saved processor, it cuts at whole pixels of the image whose shorter side is resized to `size`. Only the centre of
    a strip or of a very large image is resized, with Pillow: a whole one could fill the memory.
    """
    image, (width, height, left, top) = centered(image, size)
    whole = resized(np.array(image), width, height)
    return whole[:, top : top + size, left : left + size].contiguous()


def centered(image: Image.Image, size: int) -> tuple[Image.Image, tuple[int, int, int, int]]:
    """Return a picture, of a strip or of a very large one its resized centre alone, with its `center_of`."""
    width, height, left, top = center_of(*image.size, size)
    if max(width, height) <= _STRIP * size and image.width * image.height <= _LARGE:
        return image, (width, height, left, top)
    across, down = image.width / width, image.height / height
    box = (left * across, top * down, (left + size) * across, (top + size) * down)
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0), (size, size, 0, 0)


def resized(pixels: np.ndarray, width: int, height: int) -> Any:
    """Resize `[H, W, 3]` to a tensor `[3, height, width]`, uint8."""
    import torch  # here, as exports read pictures without it

    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    return torch.nn.functional.interpolate(image, (height, width), mode="bicubic", antialias=True)[0]


def center_of(width: int, height: int, size: int) -> tuple[int, int, int, int]:
    """Return the width and height to resize to, the shorter being `size`, and left and top of the central square."""
    shorter = min(width, height)
    width, height = (max(size, int(size * side / shorter)) for side in (width, height))
    return width, height, (width - size) // 2, (height - size) // 2


# -- clips and sounds ---------------------------------------------------------------------------------------------------


def frames_of(clip: Any, count: int, seconds: float | None = None) -> list[Any]:
    """Return `count` frames of a clip, each the one that is shown in the middle of an equal part.

    Args:
        clip: a path, of which the middle `seconds` are taken if they are given, or PIL images, each shown for as long.
    """
    if isinstance(clip, (list, tuple, range)):
        return [clip[(2 * at + 1) * len(clip) // (2 * count)] for at in range(count)]
    name = os.fspath(clip)
    stamps, last = [], 0.0
    for time, last, _ in _shown(name):  # noqa: B007
        stamps.append(time)
    stored = max(1, math.ceil((last - _SAME_TIME) * CLIP_FPS))  # as clips are stored
    length = stored / CLIP_FPS
    window = seconds or length
    begin = max(0.0, length - window) / 2
    grid = [int((begin + (at + 0.5) / count * window) * CLIP_FPS) for at in range(count)]
    places = [max(0, bisect_right(stamps, min(at, stored - 1) / CLIP_FPS + _SAME_TIME) - 1) for at in grid]
    pictures = {
        at: picture() for at, (*_, picture) in zip(range(max(places) + 1), _shown(name), strict=False) if at in places
    }
    return [pictures[at] for at in places]


def _shown(name: str) -> Iterator[tuple[float, float, Callable[[], Image.Image]]]:
    """Yield the frames of a file of a clip: from when and until when each is shown, and what returns it as upright RGB."""
    last, usual = None, 0.1
    for time, lasts, picture in _animation(name) or _video(name):
        at = (0.0 if last is None else last + usual) if time is None else time
        if last is None or at > last:  # stamps that go back show nothing new
            yield at, at + lasts, picture
            last, usual = at, lasts
    if last is None:
        raise ValueError(f"{name} holds no frame that can be shown. Pass another file, or a list of PIL images.")


def _animation(name: str) -> Iterator[_Frame] | None:
    """Return the frames of an animated GIF, WebP or PNG file, transparency on white; None of another file."""
    with open(name, "rb") as file:
        if file.read(4) not in (b"GIF8", b"RIFF", b"\x89PNG"):
            return None
    try:
        header = Image.open(name, formats=("GIF", "WEBP", "PNG"))
    except UnidentifiedImageError:  # AVI and WAV files are RIFF, too
        return None
    if not getattr(header, "is_animated", False):
        raise ValueError(f"{name} is a still picture. Pass a video, or a list of PIL images.")
    return _pages(header)


def _pages(header: Image.Image) -> Iterator[_Frame]:
    time = 0.0
    for page in ImageSequence.Iterator(header):
        page.load()
        asked = float(page.info.get("duration") or 0) / 1000
        lasts = 0.1 if asked < 0.011 else asked  # as browsers show a GIF that asks for less
        yield time, lasts, partial(_flatten, page.convert("RGBA"), [])
        time += lasts


def _video(name: str) -> Iterator[_Frame]:
    try:  # also hides it from what transformers wants installed before it loads any model with this file
        import av
    except ImportError as error:
        raise ImportError(f"{name} is read by PyAV. pip install av, or pass a list of PIL images.") from error
    opened: Any = av.open(name)
    with opened as container:
        stream = container.streams.best("video")
        if stream is None:
            raise ValueError(f"{name} holds no video. Pass a video, or a list of PIL images.")
        start = (container.start_time or 0) / 1e6
        zero = 0.0 if container.format.name.split(",")[0] in _OWN_CLOCK and start <= 1 else start
        rate = stream.average_rate or stream.guessed_rate or 25
        for frame in container.decode(stream):
            lasts = float(frame.duration * frame.time_base) if frame.duration else 1 / float(rate)
            time = None if frame.pts is None else float(frame.pts * frame.time_base) - zero
            yield time, lasts, partial(upright, frame, stream.sample_aspect_ratio)


def upright(frame: Any, shape: Any) -> Image.Image:
    """Return a frame of PyAV as RGB, turned as the camera says, with square pixels; `shape` is the width of one over its height."""
    image: Image.Image = frame.to_image()
    if shape and shape != 1 and 0.25 <= shape <= 4:
        image = image.resize((max(1, round(image.width * float(shape))), image.height), Image.Resampling.BICUBIC)
    turn = turn_of(frame)
    return image if turn is None else image.transpose(turn)


def turn_of(frame: Any) -> Image.Transpose | None:
    """Return what the display matrix of a frame of PyAV does to it: a turn, or the mirror of a front camera; None if nothing."""
    parts = [bytes(each) for each in frame.side_data if each.type.name == "DISPLAYMATRIX"]
    a, b, _, c, d, *_ = struct.unpack("=9i", parts[0][:36]) if parts else (1, 0, 0, 0, 1)
    if a * d < b * c:
        along, across = (_Turn.FLIP_LEFT_RIGHT, _Turn.FLIP_TOP_BOTTOM), (_Turn.TRANSVERSE, _Turn.TRANSPOSE)
        return along[a > 0] if abs(a) >= abs(b) else across[b > 0]
    turns = round(frame.rotation / 90) % 4 if abs(frame.rotation) <= 360 else 0  # a matrix of zeros turns by no angle
    return (_Turn.ROTATE_90, _Turn.ROTATE_180, _Turn.ROTATE_270)[turns - 1] if turns else None


def samples_of(sound: Any, extractor: Any) -> np.ndarray:
    """Return the samples `[n]` of the middle of a sound, as a feature extractor takes them; silence follows where it is short.

    Args:
        sound: (samples in [-1, 1], rate) or the path of a WAV file of 16 bits.
        extractor: its `window_seconds` say how much is taken; it repeats or pads a short sound by itself if its `padding` says so,
            or its `pads_frames`.
    """
    if isinstance(sound, tuple):
        samples, rate = np.asarray(sound[0]), sound[1]
        if samples.ndim != 1 or samples.dtype.kind != "f":  # filled up to the window, a second dimension is huge
            shape = f"{samples.dtype} {list(samples.shape)}"
            raise ValueError(
                f"a sound is (samples, rate), and its samples are {shape}. Give floats of one channel, [n]."
            )
        samples = samples.astype(np.float32)
    else:
        try:
            with wave.open(os.fspath(sound)) as file:
                channels, width, rate, count = file.getparams()[:4]
                content = file.readframes(count)
            if width != 2:
                raise wave.Error(f"{8 * width} bits a sample")
            wanted = count * channels * width
            if not content or len(content) % (channels * width) or len(content) < wanted < _STREAMED:
                raise wave.Error(f"{len(content):,} of {wanted:,} bytes of sound")
        except (wave.Error, EOFError, TypeError) as error:
            raise ValueError(
                f"{sound} is not a WAV file of 16 bits: {error}. Decode it and give (samples, rate)."
            ) from error
        samples = np.frombuffer(content, "<i2").reshape(-1, channels).astype(np.float32).mean(1) / 32768
    wanted = extractor.sampling_rate
    if rate != wanted:
        try:
            from scipy.signal import resample_poly
        except ImportError as error:
            raise ImportError(f"a sound of {rate} Hz is resampled by scipy to {wanted}. pip install scipy.") from error
        samples = resample_poly(samples, wanted, rate)
    length = len(samples) / wanted
    seconds = getattr(extractor, "window_seconds", length)
    first = int(max(0.0, length - seconds) / 2 * wanted)
    samples = samples[first : first + round(seconds * wanted)]
    samples = (samples * 32768).round().clip(-32768, 32767) / 32768  # as they are stored
    if "repeat" in getattr(extractor, "padding", "") or getattr(extractor, "pads_frames", False):
        return samples.astype(np.float32)
    return np.pad(samples, (0, max(0, round(seconds * wanted) - len(samples)))).astype(np.float32)


# -- texts --------------------------------------------------------------------------------------------------------------


def token_ids(tokenizer: Any, texts: Sequence[str], most: int) -> list[list[int]]:
    """Return the token ids of texts, at most `most` of each; special tokens that a text names are text."""

    def read(part: list[str]) -> list[tuple[list[int], list[int]]]:
        options = {"split_special_tokens": True, "return_special_tokens_mask": True}
        encoded = tokenizer(part, truncation=True, max_length=most, **options)
        return list(zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True))

    pairs = read(
        list(texts[:1])
    )  # this also sets the backend, which is faster where it need not keep places in the text
    if len(texts) > 1:
        encode = getattr(getattr(tokenizer, "backend_tokenizer", None), "encode_batch_fast", None)
        fast = [(each.ids, each.special_tokens_mask) for each in encode(list(texts))] if encode else []
        pairs = fast if fast[:1] == pairs else read(list(texts))
    # A Unigram vocabulary (T5, XLM-R, mBART, SigLIP) has special tokens as pieces, which it also finds in split text.
    others = [token for name, token in tokenizer.special_tokens_map.items() if name != "unk_token"]
    special = set(tokenizer.all_special_ids) - (
        {tokenizer.unk_token_id} if tokenizer.unk_token not in others else set()
    )
    return [
        [token for token, is_added in zip(ids, added, strict=True) if is_added or token not in special]
        for ids, added in pairs
    ]
