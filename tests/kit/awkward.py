"""Pictures and texts that many a reader reads otherwise: every door has to read them in one way."""

import io
from typing import Any

import numpy as np
from PIL import Image

RNG = np.random.default_rng(0)


def noise(height: int, width: int, channels: int) -> np.ndarray:
    """Smooth colours with a pattern that no turn and no crop leaves as it is."""
    coarse = Image.fromarray(RNG.integers(0, 256, (6, 5, 4), np.uint8), "RGBA")
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))[:, :, :channels].squeeze()


def file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def turn(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def awkward_pictures() -> dict[str, bytes]:
    colours = Image.fromarray(noise(50, 70, 3))
    clear, palette = Image.fromarray(noise(50, 70, 4), "RGBA"), colours.quantize(16)
    deep = Image.fromarray((noise(40, 50, 3)[..., 0].astype(np.uint16) * 257).astype(np.uint16))
    return {
        "plain": file(colours),
        "RGBA": file(clear),
        "LA": file(clear.convert("LA")),
        "P with transparency": file(palette, transparency=3),
        "I;16": file(deep),
        "CMYK": file(colours.convert("CMYK"), "JPEG"),
        "turned": file(colours, "JPEG", exif=turn(6)),
        "float TIFF": file(Image.fromarray(noise(40, 50, 3)[..., 0].astype(np.float32) / 255), "TIFF"),
        "turned TIFF": file(colours, "TIFF", tiffinfo={274: 6}),
        "turned PNG": file(colours, exif=turn(7)),
        "turned WebP": file(colours, "WEBP", exif=turn(8)),
        "1 bit": file(colours.convert("1")),
        "L with transparency": file(colours.convert("L"), transparency=100),
        "16-bit TIFF": file(deep, "TIFF"),
        "32-bit TIFF": file(Image.fromarray(noise(40, 50, 3)[..., 0].astype(np.int32) * 9999), "TIFF"),
        "APNG": file(clear, save_all=True, append_images=[Image.new("RGBA", clear.size, "red")]),
        "animated": file(colours, "GIF", save_all=True, append_images=[Image.new("RGB", colours.size, "red")]),
        "tiny": file(Image.fromarray(noise(1, 2, 3).reshape(1, 2, 3))),
        "extreme aspect": file(Image.fromarray(noise(9, 900, 3))),
        "larger than it is shown": file(Image.fromarray(noise(300, 410, 3)), "JPEG"),
    }


TEXTS = [
    *("a red [SEP] circle", "[MASK] picture", "[PAD] [CLS]", "picture one " * 400, "picture" * 900, ""),
    *("a 😀 picture 👩‍🚀", "cafe\u0301", "caf\u00e9", "图片", "qqq Жж", " PICTURE \n one\t", "a\0b", "picture seven"),
]
