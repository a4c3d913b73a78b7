"""The flags of `scripts/prepare_data.py`."""

from dataclasses import dataclass, field

from mm_utils.arguments import arg
from mm_utils.data.paths import is_url
from mm_utils.model.reading import CLIP_FPS, LEAST_RATE, MOST_BYTES, MOST_RATE
from mm_utils.text import redact

PILLOW_PIXELS = 178_956_970  # Pillow takes larger images for an attack
# Bits that may differ. Of 22 million pairs of real images 18 are within 7 bits, all of them copies or neighbouring shots;
# of 50 more within 12 some 40 are neither. Copies cut by 5 % need about 6.
RADIUS = 8
OVERSIZE = 1.15  # stored short side over the model's image size: room for crops without enlarging them


@dataclass
class PrepareArguments:
    """Sources, the output folder, and the form in which images are kept."""

    sources: list[str] = field(
        default_factory=list,
        metadata={
            "help": "One or more of PATH[,key=value...]: a file, folder, shard pattern or Hub repository, with format, "
            "name, split, medium, image_root, image_column, caption_column, caption_template ({brand} {title}), id_column, "
            "templates, classes or config where they are not found by themselves."
        },
    )
    output_dir: str = arg(
        "", "The prepared data set goes to this folder; --dataset_name of a training script reads it."
    )
    overwrite: bool = arg(
        False, "Replace the prepared data set in --output_dir; images that it knows stay in their splits."
    )
    image_size: int = arg(
        224, "The vision tower's input in pixels; images are kept 1.15 times as large.", least=16, most=2**14
    )
    store: str = arg(
        "jpeg",
        "jpeg: quality 92; png: without loss; raw: pixels that need no decoding, for a data set that fits into memory.",
        choices=["jpeg", "png", "raw"],
    )
    keep_originals: bool = arg(False, "Keep the original bytes instead, whatever --image_size and --store say.")
    max_bad_fraction: float = arg(0.05, "Stop if more than this share of a source's rows is bad.", most=1)
    max_rows: int | None = arg(None, "Read only the first N rows of every source, to try.", least=1)
    num_proc: int | None = arg(None, "Processes; default one per core.", least=1, most=1024)

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("--sources is empty; there is nothing to prepare. Give files, folders or repositories.")
        if not self.output_dir:
            raise ValueError("--output_dir is empty; the prepared data set needs a place. Give a folder.")
        if is_url(self.output_dir):
            raise ValueError(
                f"--output_dir is {redact(self.output_dir)}; a folder of this machine is written. Give one, and copy it afterwards, "
                "for example with aws s3 sync."
            )

    @property
    def short_side(self) -> int | None:
        """Return the shorter side of stored images, in pixels; None keeps all as they are."""
        return None if self.keep_originals else round(OVERSIZE * self.image_size)


@dataclass
class CheckArguments:
    """Limits of images and captions."""

    max_image_pixels: int = arg(
        40_000_000, "Set larger images aside, before they are decoded.", least=1, most=PILLOW_PIXELS
    )
    max_image_bytes: int = arg(
        MOST_BYTES, "Set larger image files aside, before they are decoded.", least=1, most=2**40
    )
    min_image_side: int = arg(
        16, "Set images with a shorter side below this aside: spacers and tracking pixels.", least=1
    )
    max_aspect_ratio: float = arg(
        8.0, "Set images longer than this times their shorter side aside: rules and banners.", least=1
    )
    max_caption_characters: int = arg(2000, "Cut longer captions at a word border.", least=1)


@dataclass
class TimedArguments:
    """How clips and sounds are kept: frames as JPEG at a constant rate, samples of 16 bits."""

    clip_fps: float = arg(CLIP_FPS, "Frames a second that are kept of clips.", least=0.01, most=60)
    sound_rate: int = arg(
        16_000,
        "Samples a second that are kept of sounds: what the sound tower takes.",
        least=LEAST_RATE,
        most=MOST_RATE,
    )
    max_seconds: float = arg(
        60.0, "Set longer clips and sounds aside, or longer parts of them by start and end.", least=0.01, most=3600
    )


@dataclass
class ReconcileArguments:
    """Handling of duplicates, of leaks between splits, and of rows whose source names no split."""

    validation_fraction: float | None = arg(
        None,
        "Share of the rows without a split that is held out for validation. (default: 0.05, but at least 30 images, or a fifth "
        "of fewer than 150)",
        most=0.999,
    )
    test_fraction: float = arg(0.0, "Share of the rows without a split that is held out for the test.", most=0.999)
    on_leakage: str = arg(
        "error",
        "The same image in two splits: error (stop and say which), drop (it stays in test, else in validation) or keep.",
        choices=["error", "drop", "keep"],
    )
    near_duplicate_distance: int = arg(
        RADIUS,
        "Bits of 64 in which the perceptual hashes of images that look the same may differ; others differ in 20.",
        most=16,
    )

    def __post_init__(self) -> None:
        if (self.validation_fraction or 0) + self.test_fraction >= 1:
            raise ValueError("--validation_fraction and --test_fraction leave nothing to train on. Lower them.")
