"""A model trained on the tiny corpus names what it sees; and what the script says to bad input."""

import json
from pathlib import Path

import pytest

from scripts import eval_zero_shot
from tests.kit.corpora import COLOURS, SHAPES, draw
from tests.kit.reading import write_tar


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder a kind of picture, 3 images of sizes that the corpus does not have."""
    root = tmp_path_factory.mktemp("classes")
    for colour in COLOURS:
        for shape in SHAPES:
            (root / f"{colour}_{shape}").mkdir()
            for size in (42, 46, 50):
                draw(colour, shape, size).save(root / f"{colour}_{shape}/{size}.png")
    return str(root)


@pytest.fixture
def flags(pretrained: str, folders: str) -> list[str]:
    templates = ["--templates", "a {}, number 0", "number 1: one {}"]
    others = ["--dataset_name", folders, "--dataloader_num_workers", "0"]
    return ["--model_name_or_path", pretrained, *others, *templates]


def test_figures_and_table_are_left(flags: list[str], tmp_path: Path) -> None:
    found = eval_zero_shot.main([*flags, "--output_dir", str(tmp_path / "out")])
    assert found["chance@1"] == found["majority@1"] == 1 / 8
    assert found["accuracy@1_low"] <= found["accuracy@1"] <= found["accuracy@1_high"]
    assert found["accuracy@1"] == pytest.approx(found["macro_accuracy@1"])
    assert found["accuracy@5"] >= found["accuracy@1"]
    assert json.loads((tmp_path / "out/metrics.json").read_text()) == found
    assert len((tmp_path / "out/classes.csv").read_text().splitlines()) == 9


def test_a_folder_of_clip_benchmark_gives_the_same_figures(flags: list[str], folders: str, tmp_path: Path) -> None:
    """The same images in tar shards, with the files of names and templates beside them."""
    names = sorted(path.name for path in Path(folders).iterdir())
    members = []
    for label, name in enumerate(names):
        for image in sorted(Path(folders, name).iterdir()):
            key = f"s{len(members) // 2:07d}"
            members += [(f"{key}.png", image.read_bytes()), (f"{key}.cls", str(label).encode())]
    (tmp_path / "test").mkdir()
    write_tar(tmp_path / "test/0.tar", members)
    (tmp_path / "classnames.txt").write_text("".join(f"{name}\n" for name in names))
    (tmp_path / "zeroshot_classification_templates.txt").write_text("a {c}, number 0\nnumber 1: one {c}\n")
    beside = ["--classes", f"{tmp_path}/classnames.txt"]
    beside += ["--templates", f"{tmp_path}/zeroshot_classification_templates.txt"]
    found = eval_zero_shot.main([*flags[: flags.index("--templates")], "--dataset_name", str(tmp_path), *beside])
    assert found == pytest.approx(eval_zero_shot.main(flags))
