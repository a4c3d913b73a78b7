"""A tiny corpus on disk, coloured shapes and their captions; a run on it, and a labelled task for such models."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image, ImageDraw

from tests.kit.jsonl import write_lines

if TYPE_CHECKING:
    from mm_utils.finetuning.labels import LabelledTask
    from mm_utils.finetuning.zero_shot import LabelledImages


COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (40, 70, 220), "yellow": (235, 205, 40)}
SHAPES = ("circle", "square")


def draw(colour: str, shape: str, size: int = 48) -> Image.Image:
    """A coloured shape on grey."""
    image = Image.new("RGB", (size, size), (120, 120, 120))
    box = [size // 4, size // 4, 3 * size // 4, 3 * size // 4]
    getattr(ImageDraw.Draw(image), "ellipse" if shape == "circle" else "rectangle")(box, fill=COLOURS[colour])
    return image


def write_corpus(folder: Path, copies: int = 3) -> Path:
    """`pairs.jsonl` and its images: 8 kinds of picture, three or more of each, two captions an image, the last of each validation."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for copy in range(copies):
        for colour in COLOURS:
            for shape in SHAPES:
                name = f"images/{colour}-{shape}-{copy}.png"
                draw(colour, shape, 40 + 4 * copy).save(folder / name)
                captions = [f"a {colour} {shape}, number {copy}", f"number {copy}: one {shape} in {colour}"]
                split = "validation" if copy == copies - 1 else "train"
                rows.append({"image": name, "captions": captions, "split": split})
    path = folder / "pairs.jsonl"
    write_lines(path, rows)
    return path


@pytest.fixture(scope="session")
def scratch_run(tiny_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """The folder and the metrics of a run from scratch, with a checkpoint half-way, that all tests share: it is not changed."""
    from scripts import pretrain

    folder = tmp_path_factory.mktemp("run") / "out"
    return folder, pretrain.main([*tiny_flags, "--save_steps", "2", "--eval_steps", "2", "--output_dir", str(folder)])


@pytest.fixture(scope="session")
def pretrained(scratch_run: tuple[Path, dict[str, float]]) -> str:
    return str(scratch_run[0])


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`train.jsonl` and `test.jsonl`: is the named thing what the picture shows?"""
    root = tmp_path_factory.mktemp("questions")
    kinds = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    for split, sizes in (("train", (40, 44, 48)), ("test", (46,))):
        rows = []
        for place, (colour, shape) in enumerate(kinds):
            for size in sizes:
                name = f"{colour}-{shape}-{size}.png"
                draw(colour, shape, size).save(root / name)
                for asked, answer in ((kinds[place], "yes"), (kinds[place - 1], "no")):
                    rows.append({"image": name, "question": f"a {asked[0]} {asked[1]}", "answer": answer})
        write_lines(root / f"{split}.jsonl", rows)
    return root


@pytest.fixture(scope="session")
def finetuning_flags(pretrained: str, questions: Path) -> list[str]:
    data = ["--train_file", str(questions / "train.jsonl"), "--validation_file", str(questions / "test.jsonl")]
    short = ["--global_batch_size", "8", "--max_steps", "4", "--logging_steps", "1", "--dataloader_num_workers", "0"]
    return ["--model_name_or_path", pretrained, *data, *short]


def task_of(medium: str = "image", **flags: Any) -> "LabelledTask":
    """Load the task that the flags of scripts/finetune.py name."""
    from mm_utils.data.arguments import EvaluatedDataArguments
    from mm_utils.finetuning.arguments import LabelArguments
    from mm_utils.finetuning.labels import load_task

    own = {name: flags.pop(name) for name in ("label_column",) if name in flags}
    return load_task(EvaluatedDataArguments(**flags), LabelArguments(**own), medium)


def labelled_of(medium: str = "image", **flags: Any) -> "LabelledImages":
    """Load the labelled split that the flags of scripts/eval_zero_shot.py name."""
    from mm_utils.data.arguments import DataArguments
    from mm_utils.finetuning.arguments import ZeroShotArguments
    from mm_utils.finetuning.zero_shot import load_labelled

    own = {name: flags.pop(name) for name in ("split", "label_column", "classes") if name in flags}
    return load_labelled(DataArguments(**flags), ZeroShotArguments(**own), medium)
