"""What a run on pairs of one's own starts from, if its command names no start."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mm_utils.arguments import parse_args, read_flat_yaml
from mm_utils.run import flags, recipes
from mm_utils.run.callbacks import flags_of_callbacks
from scripts import pretrain
from tests.kit.stock_folders import write_stock

ROOT = Path(__file__).parents[2]
IMAGES, SOUNDS, CLIPS = '{"image": "a.png"', '{"audio": "a.wav"', '{"video": "a.mp4"'


@pytest.mark.parametrize(
    ("words", "row", "recipe"),
    [
        ("", IMAGES, "photographs"),
        ("", SOUNDS, "sounds"),
        ("", CLIPS, "photographs"),
        ("--streaming --max_steps 9", IMAGES, "clip"),
        ("--vision_config small", IMAGES, None),
        ("--model_name_or_path some/clip", SOUNDS, None),
        ("--vision_model_name_or_path some/vit", IMAGES, None),
        ("", None, None),
        ("--dataset_name sounds", None, None),
    ],
)
def test_a_run_without_a_start_takes_the_recipe_of_its_data(words, row, recipe, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(recipes, "_unreachable", lambda _: "")
    if row is not None:
        for name in ("a.png", "a.wav", "a.mp4"):
            (tmp_path / name).touch()
        (tmp_path / "rows.jsonl").write_text(f'{row}, "caption": "a dog"}}\n' * 3, encoding="utf-8")
        words = f"{words} --train_file {tmp_path / 'rows.jsonl'}"
    given = parse_args(*flags_of_callbacks("pretrain"), *flags.PRETRAINING, argv=words.split())
    found = recipes.recipe_for(given)
    assert found == (recipe and str(ROOT / f"recipes/{recipe}.yaml"))


def test_what_cannot_be_had_is_one_line_that_says_what_to_do(corpus: Path) -> None:
    folders = "--vision_model_name_or_path FOLDER --text_model_name_or_path FOLDER"
    with pytest.raises(
        ValueError, match=rf"it takes google/mobilenet.*--config \S+photographs.yaml {folders}, or --vision"
    ):
        pretrain.main(["--train_file", str(corpus)])


def test_a_run_takes_its_start_from_the_hub(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    """Both encoders lie in the cache of the Hub and are frozen; the command line wins over the recipe."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    clip, recipe = Path(write_stock(tmp_path / "clip", "clip")), ROOT / "recipes/photographs.yaml"
    names = [str(entry.value) for entry in read_flat_yaml(str(recipe)).values()][:2]
    for name in names:
        cached = tmp_path / "cache" / f"models--{name.replace('/', '--')}"
        shutil.copytree(clip, cached / "snapshots" / "0")
        (cached / "refs").mkdir()
        (cached / "refs/main").write_text("0")
    words = ["--train_file", str(corpus), "--num_train_epochs", "2", "--output_dir", str(tmp_path / "out")]
    command = [sys.executable, str(ROOT / "scripts/pretrain.py"), *words, "--dataloader_num_workers", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert f"No start is named, so this run takes {recipe}: a frozen image encoder" in ended.stderr
    config = {name: entry.value for name, entry in read_flat_yaml(str(tmp_path / "out/config.yaml")).items()}
    assert [config[f"{tower}_model_name_or_path"] for tower in ("vision", "text")] == names
    assert (config["freeze_vision"], config["freeze_text"], config["num_train_epochs"]) == (True, True, 2)
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any(row["step"] == 0 and "eval_mean_recall" in row for row in rows)
