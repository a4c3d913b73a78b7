"""Every command and every line of code that a run prints or writes runs as pasted; its figures and pictures are those measured."""

import importlib
import json
import logging
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import datasets
import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from datasets import Dataset, Features, Value
from PIL import Image

from mm_utils.arguments import LAUNCH_VARIABLE, launcher
from mm_utils.evaluation.arguments import EvaluationArguments
from mm_utils.evaluation.recall_table import independent_queries
from mm_utils.evaluation.retrieval import RetrievalEvaluator
from mm_utils.reports.model_card import quoted
from mm_utils.run import finish
from mm_utils.run.finish import evaluation_command
from scripts import pretrain
from tests.kit.corpora import COLOURS, draw
from tests.kit.fault_images import save
from tests.kit.truthful_model import ACCELERATOR, TruthfulModel

SHORT = ["--max_steps", "2", "--global_batch_size", "8", "--dataloader_num_workers", "0", "--logging_steps", "1"]


class Finished(NamedTuple):
    """A run: the folder of the model, what it logged, and its metrics."""

    folder: Path
    log: str
    metrics: dict[str, float]


def write_pictures(place: Path) -> None:
    """Write pictures with a table whose columns have unusual names."""
    (place / "my photos").mkdir()
    noise = random.Random(0)
    rows = ["Bild,Text"]
    for number in range(60):
        colour = list(COLOURS)[number % 4]
        shape = ("circle", "square")[number // 4 % 2]
        image = draw(colour, shape)
        image.paste(Image.effect_noise((16, 16), 60).convert("RGB"), (noise.randrange(30), noise.randrange(30)))
        image.save(place / f"my photos/{number}.png")
        rows.append(f'{number}.png,"a {colour} {shape}, number {number}"')
    (place / "odd pairs.csv").write_text("\n".join(rows) + "\n")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder, with pictures, in a process that was not started by a script, such as a notebook."""
    folder = tmp_path_factory.mktemp("a") / "my work"
    folder.mkdir()
    write_pictures(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["/usr/lib/ipykernel_launcher.py", "-f", "kernel.json"])
        yield folder


@pytest.fixture(scope="module")
def trained(place: Path) -> Finished:
    columns = ["--image_column", "Bild", "--caption_column", "Text", "--image_root", "my photos"]
    model = ["--vision_config", "tiny", "--text_config", "tiny", "--image_size", "32", "--fusion_layers", "1"]
    flags = ["--train_file", "odd pairs.csv", *columns, *model, "--rerank_top_k", "2", *SHORT]
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mm_utils").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:  # too few pairs to fit weights on
        patch.setattr("mm_utils.evaluation.retrieval.fit_weights", lambda directions: [0.5])
        patch.setattr("mm_utils.evaluation.retrieval.helps", lambda ranks: True)
        metrics = pretrain.main([*flags, "--output_dir", "out/my model"])
    logging.getLogger("mm_utils").removeHandler(handler)
    return Finished(Path("out/my model"), "\n".join(lines), metrics)


def next_commands(found: Finished) -> list[str]:
    return found.log.partition("Next:\n")[2].strip().splitlines()


def parsed(command: str) -> tuple[str, list[str]]:
    """The script of a command, which exists, and its arguments."""
    words = shlex.split(command)
    if words[0] == "python":
        words = ["accelerate", "launch", *words[1:]]
    assert words[:2] == ["accelerate", "launch"]
    given = launch_command_parser().parse_args(words[2:])
    assert Path(given.training_script).is_file()
    return Path(given.training_script).stem, given.training_script_args


def paste(command: str, *more: str) -> dict[str, float]:
    script, argv = parsed(command)
    found = importlib.import_module(f"scripts.{script}").main([*argv, *more])
    return found


def test_the_evaluation_measures_the_rows_that_training_held_out(trained: Finished) -> None:
    settings = yaml.safe_load((trained.folder / "config.yaml").read_text())
    command = evaluation_command(trained.folder, settings, "validation")
    again = paste(command, "--rerank_top_k", "2")
    held_out = {name: value for name, value in trained.metrics.items() if name != "eval_loss"}
    shared = {f"eval_{name}": value for name, value in again.items() if f"eval_{name}" in held_out}
    assert shared == pytest.approx(held_out, rel=1e-4)
    assert "--max_seq_length 32 " in evaluation_command(trained.folder, {**settings, "max_seq_length": 32}, "train")
    kept = paste(evaluation_command(trained.folder, settings, "train"), "--rerank_top_k", "0")
    assert (held_out["eval_text_to_image_chance@1"], kept["text_to_image_chance@1"]) == (1 / 12, 1 / 48)


def test_the_images_of_the_run_are_embedded_and_searched(
    trained: Finished, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    embed, search = next_commands(trained)[-2:]
    with caplog.at_level("INFO"):
        assert paste(embed)["images"] == 60
    [serve] = re.findall(r"Search it: (.*)", caplog.text)
    assert parsed(serve) == ("search", [*parsed(search)[1][:2], "--serve"])
    capsys.readouterr()
    assert search.strip().startswith("python ")
    paste(search, "--top_k", "60")
    table = capsys.readouterr().out
    assert len(table.splitlines()) > 50  # copies are folded
    assert " ".join(parsed(search)[1][-1].split()) in table


def test_the_command_of_a_card_took_the_first_step(tmp_path: Path) -> None:
    """Neither one that failed before, nor one that resumed the run."""
    started = [("has a typo", None), ("ended", 0), ("overwrites", 0), ("resumes", 5), ("this one", 9)]
    starts = [
        {"command": f"pretrain.py {what}"} | ({} if step is None else {"resumed_from": step}) for what, step in started
    ]
    (tmp_path / "environment.json").write_text(json.dumps(starts))
    run: Any = SimpleNamespace(output_dir=tmp_path, name="pretrain")
    assert finish._first_command(run, []).endswith(" pretrain.py overwrites")


def test_the_code_of_the_card_names_no_folder_of_the_machine_and_runs_with_its_path(
    trained: Finished, tmp_path: Path
) -> None:
    """`tests/scripts/test_finetune.py` runs that of a classifier's card."""
    card = (trained.folder / "README.md").read_text()
    [search] = re.findall(r"```python\n(.*?)\n```", card, re.DOTALL)
    assert "| `vision_config` | `tiny` |" in card
    assert f"texts=[{quoted(parsed(next_commands(trained)[-1])[1][-1])}]" in search
    search = search.replace('folder = "out/my model"', f'folder = "{trained.folder.resolve()}"')
    (tmp_path / "my_pictures").mkdir()
    for colour in ("red", "green", "blue"):
        Image.new("RGB", (60, 60), colour).save(tmp_path / f"my_pictures/{colour}.jpg")
    elsewhere = """
import sys

class NoProject:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "mm_utils":
            raise ImportError("mm_utils is not here")

sys.meta_path.insert(0, NoProject())
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([elsewhere, search])],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^-?\d\.\d{3}  my_pictures/(?:red|green|blue)\.jpg$", done.stdout, re.MULTILINE)
    assert re.search(r"^re-ranked: \[('\w+\.jpg'(, )?){3}\]$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("environment", "is_on_path", "started"),
    [
        ({}, True, "python"),
        ({}, False, "BIN/python"),
        ({"ACCELERATE_DYNAMO_BACKEND": "NO"}, True, "accelerate launch"),
        ({"WORLD_SIZE": "2"}, True, "accelerate launch"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, True, "accelerate launch"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, True, "accelerate launch --num_processes 2"),
        (
            {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "True"},
            True,
            "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2",
        ),
        ({"WORLD_SIZE": "2"}, False, "BIN/python -m accelerate.commands.launch"),
        ({LAUNCH_VARIABLE: "python scripts/launch_ray.py"}, True, "python scripts/launch_ray.py"),
    ],
)
def test_a_command_works_in_the_shell_that_started_the_run(
    environment: dict[str, str], is_on_path: bool, started: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin" if is_on_path else "/usr/bin")
    for name in ("ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launcher() == started.replace("BIN", str(tmp_path))


# -- what the figures of a finished run rest on ------------------------------------------------------------------------
draw_examples = finish.draw_examples  # a fixture leaves the drawing out


def evaluated(top_k: int) -> RetrievalEvaluator:
    model = TruthfulModel.with_noise(0)
    evaluator = RetrievalEvaluator(EvaluationArguments(rerank_top_k=top_k))
    evaluator(model, model.batches(5), ACCELERATOR)
    return evaluator


@pytest.mark.parametrize("top_k", [6, 0])
def test_examples_are_in_the_order_that_was_measured(
    top_k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = evaluated(top_k)
    split = evaluator.split
    ranks = evaluator.directions["text_to_image"]
    captions = [int((split.caption_key_T == key).sum()) for key in split.image_key_M]
    images = [{"bytes": save(Image.new("RGB", (8, 8))), "path": None}] * len(captions)
    features = Features({"image": datasets.Image(decode=False), "captions": datasets.List(Value("string"))})
    rows = Dataset.from_dict({"image": images, "captions": [["a"] * count for count in captions]}, features)
    drawn = []
    monkeypatch.setattr(finish, "draw_retrieval", lambda examples, path, about: drawn.extend(examples))
    draw_examples(rows, evaluator, 2.0, tmp_path / "retrieval.png", reranks=bool(top_k))
    rank_Q = ranks.reranked_Q if top_k else ranks.cosine_Q
    queries = [len(split.text_TE) * place // 6 for place in range(6)]
    assert len(drawn) == 6
    for query, example in zip(queries, drawn, strict=True):
        rank = int(rank_Q[query])
        assert example.correct == [place == rank for place in range(1, 6)]
        assert (example.own is None) == (rank <= 5)
        if top_k and ranks.reranked_scores is not None:
            assert example.scores[0] == pytest.approx(ranks.reranked_scores[query].max().item() / 2)
        assert example.scores == sorted(example.scores, reverse=True)
        assert f"right image: place {rank}" in example.note
        assert example.note.endswith(f"{int(ranks.cosine_Q[query])} of {len(images)}")


@pytest.mark.parametrize(("groups", "counted"), [(30, 30), (20, 20), (19, 0)])
def test_intervals_count_groups_of_equal_captions(groups: int, counted: int) -> None:
    split = SimpleNamespace(group_M=torch.arange(60) % groups)
    said, queries = independent_queries(split, "sound")
    assert queries == counted
    assert ("group of sounds with equal captions" in said) if counted else f"{groups} independent groups" in said
