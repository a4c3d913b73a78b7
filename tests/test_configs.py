"""Every file in `accelerate_configs/` and `recipes/` is what its reader takes."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command, launch_command_parser

from mm_utils.run import flags

ROOT = Path(__file__).parents[1]
ACCELERATE = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_accelerate_reads_the_file(path):
    config = load_config_from_file(str(path))
    assert (config.num_processes == 1) == (config.distributed_type.value == "NO")


@pytest.mark.parametrize("name", ["multi_gpu", "fsdp2"])
def test_all_gpus_are_taken_unless_a_number_is_given(name, monkeypatch):
    started = []
    monkeypatch.setattr("torch.distributed.run.run", lambda args: started.append(args.nproc_per_node))
    for more in ([], ["--num_processes", "4"]):
        words = ["--config_file", str(ROOT / f"accelerate_configs/{name}.yaml"), *more, "scripts/pretrain.py"]
        launch_command(launch_command_parser().parse_args(words))
    assert started == ["gpu", "4"]


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_the_command_in_the_file_names_the_file(path):
    assert f"accelerate_configs/{path.name}" in path.read_text()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipes_command_takes_it(path, monkeypatch):
    first = path.read_text().splitlines()[0]
    script = first.split("scripts/")[1].split(".py")[0]
    module = __import__(f"scripts.{script}", fromlist=["main"])

    class Parsed(Exception):
        pass

    def stop(name, *parsed, **kwargs):
        raise Parsed

    monkeypatch.setattr(module, "start_run", stop)
    monkeypatch.setattr(flags, "check_model", lambda *_: None)  # clip.yaml and sounds.yaml name models of the Hub
    with pytest.raises(Parsed):
        module.main(["--config", str(path)])
    assert yaml.safe_load(path.read_text())
