"""Commands of a page: what they are, and a script that stops when it has read its arguments."""

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser as torchrun_parser

from mm_utils.arguments import parse_args
from mm_utils.launch.arguments import LaunchArguments, split_words
from mm_utils.run import flags
from mm_utils.training import feature_cache, teacher

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MADE_BY = re.compile(r"made at commit \w+ by `[^`]+`, which was removed", re.IGNORECASE)
"""Names a program that is gone."""
STARTS = r"(?:[A-Z_]+=\S+ )*(?:accelerate launch|python|torchrun|pip) "


class Command(NamedTuple):
    """A command of a page: the module of its script, None for other programs, and the script's arguments."""

    text: str
    module: str | None
    argv: list[str]
    is_distributed: bool = False


class Parsed(BaseException):
    """Raised in place of what a script does after it has read its arguments."""


def parse(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a script until it has read and checked its arguments."""
    assert command.module is not None
    module = importlib.import_module(command.module)

    def stop(*args: object, **kwargs: object) -> None:
        raise Parsed

    def parse_and_stop(*args: object, **kwargs: object) -> None:
        real(*args, **kwargs)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr("mm_utils.run.recipes._unreachable", lambda _: "")  # the tests have no network
        patch.setattr(feature_cache, "has_no_head", lambda _: False)
        for place in (module, flags, teacher):
            if hasattr(place, "check_model"):
                patch.setattr(place, "check_model", lambda *_: None)
        if hasattr(module, "start_run"):
            patch.setattr(module, "start_run", stop)
            patch.setattr("mm_utils.run.dry_run.dry_run", stop)
        elif hasattr(module, "parse_args"):
            real = module.parse_args
            patch.setattr(module, "parse_args", parse_and_stop)
        else:  # a benchmark
            real = argparse.ArgumentParser.parse_args
            patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        with pytest.raises(Parsed):
            module.main(command.argv)


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the fenced blocks and the commands in code spans, in order, each with its language."""
    text = MADE_BY.sub("", page.read_text(encoding="utf-8"))
    for found in re.finditer(rf"{BLOCK.pattern}|`({STARTS}[^`\n]+)`", text, BLOCK.flags):
        language, block, span = found.groups()
        if block is not None:
            yield language, block
        elif re.search(r"\.py\b| -m ", span):
            yield "bash", span


def command_lines(text: str) -> list[str]:
    for name, value in re.findall(r'\b([A-Z])="([^"]*)"', text):  # shorthands of a block of commands
        text = text.replace(f'{name}="{value}"', "").replace(f"${name} ", f"{value} ")
    lines = [
        line.lstrip("; ") for line in text.replace("\\\n", " ").splitlines() if not line.startswith(("#", "echo "))
    ]
    return [" ".join(line.partition("   #")[0].split()) for line in lines if line.strip()]


def launched(line: str) -> tuple[list[str], bool]:
    """Parse what stands before the script with the launcher's own parser; return the rest, and whether it is for several."""
    words = shlex.split(line)
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if words[:3] == ["ray", "job", "submit"]:
        words = words[words.index("--") + 1 :]
    if words[:2] == ["accelerate", "launch"]:
        given = launch_command_parser().parse_args(words[2:])
        assert given.config_file is None or Path(given.config_file).is_file(), line
        words = ["python", *(["-m"] if given.module else []), given.training_script, *given.training_script_args]
        return words, given.config_file is not None and "single" not in given.config_file
    if words[0] == "torchrun":
        given = torchrun_parser().parse_args(words[1:])
        return ["python", given.training_script, *given.training_script_args], True
    if "launchers/slurm.sbatch" in words:
        return ["python", *words[words.index("launchers/slurm.sbatch") + 1 :]], True
    if words[:2] == ["python", "scripts/launch_ray.py"]:
        own, script, rest = split_words(words[2:])
        parse_args(LaunchArguments, argv=own)
        assert script is not None, line
        return ["python", script, *rest], True
    return words, False


def understand(line: str) -> Command:
    """Return the script and its arguments; fail for a program that is not known, or a file that there is not."""
    words, distributed = launched(line)
    if words[0] == "kubectl" or words[:3] == ["python", "-m", "tests.golden"] or words[:2] == ["pip", "install"]:
        assert all((ROOT / word).is_file() for word in words if word.endswith((".yaml", ".txt"))), line
        return Command(line, None, [])
    if words[:3] == ["python", "-m", "pytest"]:
        assert all((ROOT / word.split("::")[0]).exists() for word in words[3:] if word.startswith("tests")), line
        return Command(line, None, [])
    if words[0] == "make":
        assert all(f"\n{word}:" in (ROOT / "Makefile").read_text(encoding="utf-8") for word in words[1:]), line
        return Command(line, None, [])
    if words[:2] == ["ray", "start"]:
        return Command(line, None, [])
    assert words[0] == "python", f"a test should know how to check: {line}"
    name, argv = (words[2], words[3:]) if words[1] == "-m" else (words[1], words[2:])
    module = name.removesuffix(".py").replace("/", ".")
    assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file(), line
    return Command(line, module, argv, distributed)
