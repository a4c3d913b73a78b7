"""A labelled task for models of the tiny corpus."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mm_utils.finetuning.labels import LabelledTask
    from mm_utils.finetuning.zero_shot import LabelledImages

from tests.kit.corpora import COLOURS, SHAPES, draw


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
        (root / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture(scope="session")
def finetuning_flags(pretrained: str, questions: Path) -> list[str]:
    data = ["--train_file", str(questions / "train.jsonl"), "--validation_file", str(questions / "test.jsonl")]
    short = ["--global_batch_size", "8", "--max_steps", "4", "--logging_steps", "1", "--dataloader_num_workers", "0"]
    return ["--model_name_or_path", pretrained, *data, *short]


def task_of(medium: str = "image", **flags: Any) -> "LabelledTask":
    """Load the task that the flags of scripts/finetune.py name."""
    from mm_utils.data.rows.source import EvaluatedDataArguments
    from mm_utils.finetuning.labels import LabelArguments, load_task

    own = {name: flags.pop(name) for name in ("label_column",) if name in flags}
    return load_task(EvaluatedDataArguments(**flags), LabelArguments(**own), medium)


def labelled_of(medium: str = "image", **flags: Any) -> "LabelledImages":
    """Load the labelled split that the flags of scripts/eval_zero_shot.py name."""
    from mm_utils.data.rows.source import DataArguments
    from mm_utils.finetuning.zero_shot import ZeroShotArguments, load_labelled

    own = {name: flags.pop(name) for name in ("split", "label_column", "classes") if name in flags}
    return load_labelled(DataArguments(**flags), ZeroShotArguments(**own), medium)
