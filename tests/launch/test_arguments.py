"""The launcher's command line: three parts, refused mistakes, the grid of a sweep."""

from pathlib import Path

import pytest

from mm_utils.launch.arguments import (
    Command,
    LaunchArguments,
    parse_grid,
    read_command,
    split_words,
    trial_name,
)


def test_the_first_python_file_divides_the_words() -> None:
    words = ["--num_workers", "2", "scripts/pretrain.py", "--config", "a.yaml", "other.py"]
    assert split_words(words) == (words[:2], "scripts/pretrain.py", words[3:])
    assert split_words(["--help"]) == (["--help"], None, [])


def test_a_grid() -> None:
    assert parse_grid("learning_rate=1e-4, 3e-4;--global-batch-size=64") == {
        "learning_rate": ["1e-4", "3e-4"],
        "global_batch_size": ["64"],
    }
    assert parse_grid(None) == {}


def test_a_trial_has_its_values_and_a_folder() -> None:
    values = {"learning_rate": "1e-4", "dataset_name": "data/mine"}
    assert trial_name(values) == "learning_rate-1e-4_dataset_name-data-mine"
    command = Command("/s/pretrain.py", ("--output-dir=top", "--learning_rate", "1"), "/s", "")
    trial = command.with_values(values, "top/one")
    assert trial.folder_of("output_dir") == "top/one"
    assert trial.argv[:3] == command.argv
    assert trial.argv[3:] == (
        "--learning_rate",
        "1e-4",
        "--dataset_name",
        "data/mine",
        "--output_dir",
        "top/one",
    )


@pytest.mark.parametrize(
    ("folder", "script", "argv", "sweep", "named"),
    [
        (".", None, [], False, "no script is given"),
        (".", "other.py", [], False, "the script is other.py"),
        (".", "train.py", ["--seed", "1"], True, "--tune needs --output_dir"),
        ("working_dir_files/pkg", "train.py", ["--output_dir", "mine"], False, "--output_dir is mine"),
        ("working_dir_files/pkg", "train.py", [], False, "--output_dir is None"),
        ("working_dir_files/pkg", "embed.py", ["--index_dir=a"], False, "--index_dir is a"),
    ],
)
def test_a_command_that_would_lose_its_run_is_refused(
    folder: str, script: str, argv: list[str], sweep: bool, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path / folder)
    for name in ("train.py", "embed.py"):
        Path(name).touch()
    with pytest.raises(ValueError, match=named):
        read_command(LaunchArguments(tune="seed=1,2" if sweep else None, address="auto"), script, argv)
