"""Every file in `accelerate_configs/` and `recipes/` is what its reader takes."""

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command, launch_command_parser

from tests.kit.commands import ROOT, Command, parse

ACCELERATE = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", ACCELERATE, ids=lambda path: path.stem)
def test_accelerate_reads_the_file(path):
    config = load_config_from_file(str(path))
    assert (config.num_processes == 1) == (config.distributed_type.value == "NO")
    assert f"accelerate_configs/{path.name}" in path.read_text()  # its command


@pytest.mark.parametrize("name", ["multi_gpu", "fsdp2"])
def test_all_gpus_are_taken_unless_a_number_is_given(name, monkeypatch):
    started = []
    monkeypatch.setattr("torch.distributed.run.run", lambda args: started.append(args.nproc_per_node))
    for more in ([], ["--num_processes", "4"]):
        words = ["--config_file", str(ROOT / f"accelerate_configs/{name}.yaml"), *more, "scripts/pretrain.py"]
        launch_command(launch_command_parser().parse_args(words))
    assert started == ["gpu", "4"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipes_command_takes_it(path, monkeypatch):
    script = path.read_text().splitlines()[0].split("scripts/")[1].split(".py")[0]
    parse(Command("", f"scripts.{script}", ["--config", str(path)]), monkeypatch)
    assert yaml.safe_load(path.read_text())
