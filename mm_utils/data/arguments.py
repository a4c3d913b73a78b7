"""The flags of data: sources, batches, streams, negatives."""

from dataclasses import dataclass
from typing import Any

from mm_utils import cores
from mm_utils.arguments import arg

SPLITS = ("train", "validation", "test")
SPLIT_NAMES = {
    # restval: the rest of COCO's validation images, which Karpathy's split trains on
    **dict.fromkeys(("train", "training", "restval"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation", "holdout", "heldout"), "test"),
}
_MAX_WORKERS = 16  # of auto
_MOST_WORKERS = 1024
_MOST_FRAMES = 512  # of an example


@dataclass
class DataArguments:
    """Image-caption pairs. Without a source, the embedded scenes.

    Raw files are checked at the first start, every image decoded, and kept in the datasets cache; later starts are fast.
    """

    dataset_name: str | None = arg(
        None,
        "A data set on the Hub; a folder of one, of tar shards, of images with captions, or made by save_to_disk or prepare_data.",
        decides="place",
        usual=True,
    )
    train_file: str | None = arg(
        None,
        "Training pairs: JSONL, JSON, CSV, TSV or Parquet, one image and its caption a row, or COCO, Flickr or tar shards. "
        "The first start checks all images; later ones read the datasets cache.",
        decides="place",
        usual=True,
    )
    validation_file: str | None = arg(
        None, "Validation pairs; without any, some training images are held out.", decides="place", usual=True
    )
    image_column: str | None = arg(
        None, "Column of the images, clips or sounds, paths or files; found by its usual names."
    )
    caption_column: str | None = arg(None, "Column of a caption or a list of captions; found by its usual names.")
    image_root: str | None = arg(
        None,
        "Folder that image paths are relative to; default the data file's folder.",
        decides="place",
        per_machine=True,
    )
    allow_outside_root: bool = arg(
        False, "Accept image paths that leave --image_root: absolute, by '..', by a link.", decides="place"
    )
    max_train_samples: int | None = arg(
        None, "Keep the first N training images.", decides="place", usual=True, least=1
    )
    max_eval_samples: int | None = arg(
        None, "Keep the first N images of validation and of test.", decides="place", least=1
    )

    def __post_init__(self) -> None:
        for split, file in self.files.items():
            if self.dataset_name and file:
                raise ValueError(
                    f"--dataset_name and --{split}_file are given together; pairs have one source. Keep one of them."
                )

    @property
    def files(self) -> dict[str, str | None]:
        """Return the file of each split."""
        return {"train": self.train_file, "validation": self.validation_file}

    @property
    def columns(self) -> dict[str, Any]:
        """Return the flags of columns, as `Source` takes them."""
        return {"image_column": self.image_column, "caption_column": self.caption_column}


@dataclass
class EvaluatedDataArguments(DataArguments):
    """Image-caption pairs, and a file of those to test on."""

    test_file: str | None = arg(None, "Test pairs.", decides="place")

    @property
    def files(self) -> dict[str, str | None]:
        """Return the file of each split."""
        return {**super().files, "test": self.test_file}


@dataclass
class PathArguments:
    """Files that the paths in a data file may reach."""

    image_root: str | None = arg(None, "Folder that image paths are relative to; default the data file's folder.")
    allow_outside_root: bool = arg(False, "Accept image paths that leave --image_root: absolute, by '..', by a link.")


@dataclass
class ReadingArguments:
    """Settings of captions, windows and workers."""

    max_seq_length: int = arg(64, "Captions are cut to this many tokens; two of them are special.", least=3)
    dataloader_num_workers: str = arg(
        "auto",
        f"Processes that decode images, per rank, 0 for none; auto = one per spare core, at most {_MAX_WORKERS}.",
        decides="speed",
        usual=True,
        per_machine=True,
    )
    clip_frames: int | None = arg(
        None,
        "Frames of a clip that a new model is shown, at equal distances; default 16, or what the video backbone was trained on.",
        least=1,
        most=_MOST_FRAMES,
    )
    # No flags where nothing is trained:
    min_crop_area = 0.8
    horizontal_flip = False

    def __post_init__(self) -> None:
        workers = str(self.dataloader_num_workers)
        if workers != "auto" and not (workers.isdecimal() and int(workers) <= _MOST_WORKERS):
            raise ValueError(
                f"--dataloader_num_workers is {workers}; give a number of processes from 0 to {_MOST_WORKERS}, or auto."
            )

    @property
    def num_workers(self) -> int:
        """Workers of this rank; with `auto`, each training process keeps a core."""
        if self.dataloader_num_workers != "auto":
            return int(self.dataloader_num_workers)
        return max(0, min(_MAX_WORKERS, cores.cores_per_process() - 1))


@dataclass
class LoaderArguments(ReadingArguments):
    """Settings of captions, windows, augmentation and workers."""

    min_crop_area: float = arg(
        0.8, "Training crops cover at least this share of the image or sound; 1 = no cropping.", least=0.01, most=1
    )
    horizontal_flip: bool = arg(
        False,
        "Mirror half of the training images, except those with boxes or with a caption that mentions a direction or "
        "writing.",
    )


@dataclass
class StreamingArguments:
    """Reading of a source larger than the disk."""

    streaming: bool = arg(
        False,
        "Read shards of images while training instead of loading the data set first; sounds and clips come from prepared sets.",
    )
