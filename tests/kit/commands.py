"""Commands of a page: what they are, and a script that stops when it has read its arguments."""

import argparse
import importlib
from typing import NamedTuple

import pytest

from mm_utils.run import flags


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

    def stop(*args, **kwargs):
        raise Parsed

    def parse_and_stop(*args, **kwargs):
        real(*args, **kwargs)
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr("mm_utils.run.recipes.sources_of", lambda _: [])  # the tests have not the data
        for place in (module, flags):
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
