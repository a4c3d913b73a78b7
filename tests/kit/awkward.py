"""Pictures and texts that many a reader reads otherwise: every door has to read them in one way."""

import numpy as np
from PIL import Image

from tests.kit.fault_images import save

RNG = np.random.default_rng(0)


def noise(height: int, width: int, channels: int) -> np.ndarray:
    """Smooth colours with a pattern that no turn and no crop leaves as it is."""
    coarse = Image.fromarray(RNG.integers(0, 256, (6, 5, 4), np.uint8), "RGBA")
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))[:, :, :channels].squeeze()


def photo(width: int, height: int) -> Image.Image:
    """A smooth picture whose colours say where a pixel came from: red is x, green is y."""
    y, x = np.mgrid[0:height, 0:width]
    scale = 255 / max(width - 1, height - 1, 1)
    return Image.fromarray(np.stack([x * scale, y * scale, 0 * x + 99], 2).round().astype(np.uint8))


def turn(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def awkward_pictures() -> dict[str, bytes]:
    colours = Image.fromarray(noise(50, 70, 3))
    clear, palette = Image.fromarray(noise(50, 70, 4), "RGBA"), colours.quantize(16)
    deep = Image.fromarray((noise(40, 50, 3)[..., 0].astype(np.uint16) * 257).astype(np.uint16))
    return {
        "plain": save(colours),
        "RGBA": save(clear),
        "LA": save(clear.convert("LA")),
        "P with transparency": save(palette, transparency=3),
        "I;16": save(deep),
        "CMYK": save(colours.convert("CMYK"), "JPEG"),
        "turned": save(colours, "JPEG", exif=turn(6)),
        "float TIFF": save(Image.fromarray(noise(40, 50, 3)[..., 0].astype(np.float32) / 255), "TIFF"),
        "turned TIFF": save(colours, "TIFF", tiffinfo={274: 6}),
        "turned PNG": save(colours, exif=turn(7)),
        "turned WebP": save(colours, "WEBP", exif=turn(8)),
        "1 bit": save(colours.convert("1")),
        "L with transparency": save(colours.convert("L"), transparency=100),
        "16-bit TIFF": save(deep, "TIFF"),
        "32-bit TIFF": save(Image.fromarray(noise(40, 50, 3)[..., 0].astype(np.int32) * 9999), "TIFF"),
        "APNG": save(clear, save_all=True, append_images=[Image.new("RGBA", clear.size, "red")]),
        "animated": save(colours, "GIF", save_all=True, append_images=[Image.new("RGB", colours.size, "red")]),
        "tiny": save(Image.fromarray(noise(1, 2, 3).reshape(1, 2, 3))),
        "extreme aspect": save(Image.fromarray(noise(9, 900, 3))),
        "larger than it is shown": save(Image.fromarray(noise(300, 410, 3)), "JPEG"),
    }


TEXTS = [
    *("a red [SEP] circle", "[MASK] picture", "[PAD] [CLS]", "picture one " * 400, "picture" * 900, ""),
    *("a 😀 picture 👩‍🚀", "cafe\u0301", "caf\u00e9", "图片", "qqq Жж", " PICTURE \n one\t", "a\0b", "picture seven"),
]
