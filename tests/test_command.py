"""The command `tandem`: every script has a name, and starts as its README says."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mm_utils import command
from tests.kit.commands import ROOT


def test_every_script_has_a_command() -> None:
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert {script for script, _ in command.COMMANDS.values()} == scripts
    assert set(command.LAUNCHED) <= command.COMMANDS.keys()


@pytest.mark.parametrize(
    ("words", "started"),
    [
        (["pretrain", "--max_steps", "2"], ["-m", "accelerate.commands.launch", "pretrain.py", "--max_steps", "2"]),
        (["pretrain", "--max_steps", "2"], ["pretrain.py", "--max_steps", "2"]),
        (["pretrain", "--help"], ["pretrain.py", "--help"]),
        (["search", "a fox"], ["search.py", "a fox"]),
    ],
)
def test_a_command_starts_its_script(
    words: list[str], started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    if "-m" in started:
        (tmp_path / "accelerate").mkdir()
        (tmp_path / "accelerate/default_config.yaml").touch()
    monkeypatch.setattr(os, "execv", lambda _, words: calls.append([Path(word).name for word in words]))
    command.main(words)
    assert calls == [[Path(sys.executable).name, *started]]


def test_an_unknown_command_is_named() -> None:
    with pytest.raises(SystemExit, match=r"there is no command pretrian\. Did you mean pretrain\? Run tandem --help"):
        command.main(["pretrian"])


def test_the_list_of_commands_needs_no_library() -> None:
    code = "import sys; from mm_utils.command import main; main([]); sys.exit('torch' in sys.modules or 'yaml' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert all(name in found.stdout for name in command.COMMANDS)


@pytest.mark.slow
def test_a_wheel_has_the_scripts_and_the_types(tmp_path: Path) -> None:
    build = ["pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)]
    subprocess.run([sys.executable, "-m", *build], check=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
        files.extractall(tmp_path / "site")
    scripts = {f"mm_utils/scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py")}
    assert scripts | {"mm_utils/py.typed"} <= names
    code = "from mm_utils.command import scripts_folder as f; print(f())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path / "site", check=True,
                           env={**os.environ, "PYTHONPATH": str(tmp_path / "site")})  # fmt: skip
    assert Path(found.stdout.strip()) == tmp_path / "site/mm_utils/scripts"
