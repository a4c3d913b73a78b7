"""How a script is started: by `tandem`, by accelerate's files, and not at all where a path leads nowhere."""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.utils import write_basic_config

import mm_utils
from mm_utils import command
from mm_utils.places import missing, use_cache_without_network
from mm_utils.run.launched import refuse_settings
from scripts import embed
from tests.kit.processes import ROOT


def test_every_script_has_a_command() -> None:
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert {script for script, _ in command.COMMANDS.values()} == scripts


def test_a_command_starts_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(os, "execv", lambda _, words: calls.append([Path(word).name for word in words]))
    command.main(["search", "a fox"])
    assert calls == [[Path(sys.executable).name, "search.py", "a fox"]]


def test_the_versions_are_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for main in (command.main, embed.main):  # embed has flags that are required
        with contextlib.suppress(SystemExit):
            main(["--version"])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert re.fullmatch(rf"tandem {mm_utils.__version__}, torch 2\.\S+, transformers 5\.\S+\n", shown[0])


def test_an_unknown_command_is_named() -> None:
    with pytest.raises(SystemExit, match=r"there is no command pretrian\. Did you mean pretrain\? Run tandem --help"):
        command.main(["pretrian"])


def test_the_list_of_commands_needs_no_library() -> None:
    code = "import sys; from mm_utils.command import main; main([]); sys.exit('torch' in sys.modules or 'yaml' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert all(name in found.stdout for name in command.COMMANDS)


@pytest.mark.slow
def test_help_and_mistakes_are_answered_before_what_computes_is_imported() -> None:
    """In one process, in which every script runs as if it was started; Ctrl-C then ends it in one line."""
    code = """
import glob, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
for path in sorted(glob.glob("scripts/*.py")):
    for word, status in (("--help", 0), ("--no_such_flag", 2)):
        sys.argv = [path, word]
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            assert end.code == status, (path, word)
        assert not {"torch", "datasets", "pyarrow", "scipy"} & sys.modules.keys(), (path, word)
signal.raise_signal(signal.SIGINT)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 130, ended.stderr
    assert ended.stderr.splitlines()[-1] == "Stopped by SIGINT before the start. Nothing was written."


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


# -- accelerate's files ------------------------------------------------------------------------------------------------
ACCELERATE = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


@pytest.mark.parametrize("name", ["multi_gpu", "fsdp2"])
def test_all_gpus_are_taken_unless_a_number_is_given(name, monkeypatch):
    started = []
    monkeypatch.setattr("torch.distributed.run.run", lambda args: started.append(args.nproc_per_node))
    for more in ([], ["--num_processes", "4"]):
        words = ["--config_file", str(ROOT / f"accelerate_configs/{name}.yaml"), *more, "scripts/pretrain.py"]
        launch_command(launch_command_parser().parse_args(words))
    assert started == ["gpu", "4"]


@pytest.mark.parametrize("name", [*(path.stem for path in ACCELERATE), "default"])
def test_a_file_starts_what_a_run_can_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that which `accelerate config default` writes; or it names the package that is missing."""
    file = ROOT / f"accelerate_configs/{name}.yaml"
    environments = []
    if name == "default":
        file = tmp_path / "default_config.yaml"
        write_basic_config(save_location=str(file))
    ended = SimpleNamespace(wait=lambda: None, returncode=0)
    monkeypatch.setattr("torch.distributed.run.run", lambda _: environments.append(dict(os.environ)))
    monkeypatch.setattr("subprocess.Popen", lambda _, env: environments.append(env) or ended)
    given = launch_command_parser().parse_args(["--config_file", str(file), "scripts/pretrain.py"])
    if name.startswith("deepspeed") and not importlib.util.find_spec("deepspeed"):
        with pytest.raises(ImportError, match="DeepSpeed is not installed"):
            launch_command(given)
        return
    launch_command(given)
    [environment] = environments
    refuse_settings(environment)


# -- paths -------------------------------------------------------------------------------------------------------------
MISSING = {
    "": ["data/mine", "owner/name", "owner/name-v1.5", "bert-base-uncased", "s3://bucket/no/such", "web-{000..9}.tar"],
    "Check the path.": ["data/typo", "./mine", "../mine", "/no/such", "~/no/such", "a/b/c", "owner/", "typo.jsonl"],
    "Did you mean data/mine?": ["data/mime"],
}


@pytest.mark.parametrize(("remedy", "name"), [(remedy, name) for remedy, names in MISSING.items() for name in names])
def test_only_what_can_be_a_hub_id_may_be_missing(
    remedy: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here/data/mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")  # above which nothing else lies
    found = missing(name)
    assert bool(found) == bool(remedy)
    assert found.endswith(remedy)
    assert missing("bert-base-uncased", is_local=True) == "there is no such folder. Check the path."


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Silent:
        def head(self, address, timeout):
            asked.append(address)
            raise ConnectionError("no network")

    import datasets.config
    from huggingface_hub import constants

    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.utils.get_session", Silent)
    use_cache_without_network.cache_clear()
    use_cache_without_network()
    use_cache_without_network()
    assert asked == [constants.ENDPOINT]
    assert constants.HF_HUB_OFFLINE
    assert datasets.config.HF_HUB_OFFLINE
    use_cache_without_network.cache_clear()
