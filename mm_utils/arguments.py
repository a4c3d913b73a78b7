"""Turn dataclasses into command-line flags, with a flat YAML file as a second source of defaults.

Precedence: dataclass default < ``--config file.yaml`` < command line. An unknown key is an error in both places.
"""

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from transformers import HfArgumentParser

from mm_utils.flat_yaml import read_flat_yaml
from mm_utils.safe_text import printable, redact

T = TypeVar("T")


def arg(default: T, help: str, **metadata: Any) -> T:
    """Declare a dataclass field together with its ``--help`` line."""
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


class _Parser(HfArgumentParser):
    """What it complains of may hold a secret."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(redact(message)))


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keep the docstring's line breaks; show each flag's default once."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.default in (None, argparse.SUPPRESS) or "%(default)" in text:
            return text
        return f"{text} (default: %(default)s)"


def parse_args(*arg_classes: Any, argv: Sequence[str] | None = None, doc: str | None = None) -> tuple[Any, ...]:
    """Parse `argv` (default: the command line) into one instance of each dataclass in `arg_classes`.

    `doc` (the script's docstring) becomes the description in ``--help``. Any mistake, a ``ValueError`` of a
    dataclass's ``__post_init__`` included, ends the program with one line and exit status 2.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(arg_classes, description=doc, allow_abbrev=False, formatter_class=_Help)
    parser.add_argument("--config", metavar="FILE", help="A flat YAML file of these flags; the command line wins.")
    path = _take_config(parser, argv)
    if path is not None:
        _set_defaults(parser, path)
    try:
        *parsed, unknown = parser.parse_args_into_dataclasses(
            argv, return_remaining_strings=True, look_for_args_file=False
        )
    except ValueError as error:
        parser.error(str(error))
    if unknown:
        parser.error(f"unknown argument {unknown[0]}{_did_you_mean(unknown[0].lstrip('-'), _known(parser))}")
    return tuple(parsed[: len(arg_classes)])


def to_dict(*parsed: Any) -> dict[str, Any]:
    """Flatten parsed dataclasses into one dict, as ``--config`` reads it back."""
    return {key: value for args in parsed for key, value in dataclasses.asdict(args).items()}


def _take_config(parser: HfArgumentParser, argv: list[str]) -> str | None:
    for at, word in enumerate(argv):
        if word.startswith("--config="):
            del argv[at]
            return word.partition("=")[2]
        if word == "--config":
            if at + 1 == len(argv):
                parser.error("--config needs a path, e.g. --config recipes/tiny.yaml")
            path = argv[at + 1]
            del argv[at : at + 2]
            return path
    return None


def _set_defaults(parser: HfArgumentParser, path: str) -> None:
    try:
        entries = read_flat_yaml(path)
    except ValueError as error:
        parser.error(str(error))
    known = _known(parser)
    for key, (value, line) in entries.items():
        place = f"{path}, line {line}"
        if key not in known:
            parser.error(f"{place}: unknown key '{key}'{_did_you_mean(key, known)}")
        known[key].default, known[key].required = _typed(parser, known[key], value, place), False


def _typed(parser: HfArgumentParser, action: argparse.Action, value: Any, place: str) -> Any:
    """YAML reads `1e-3` as a string and `1` as an int: convert by the flag's own type, as the command line does."""
    if value is None or action.type is None or (isinstance(value, list) and action.nargs == "+"):
        return value
    expected = getattr(action.type, "__name__", "a value")
    if isinstance(value, (list, dict)):
        parser.error(f"{place}: {action.dest} is {str(value)[:80]}; expected {expected}")
    try:
        typed = action.type(str(value)) if callable(action.type) else value
    except (ValueError, argparse.ArgumentTypeError):
        parser.error(f"{place}: {action.dest} is {value!r}; expected {expected}")
    if action.choices is not None and typed not in action.choices:
        parser.error(f"{place}: {action.dest} is {value!r}; choose from {', '.join(map(str, action.choices))}")
    return typed


def _known(parser: HfArgumentParser) -> dict[str, argparse.Action]:
    actions = reversed(parser._actions)  # --flag and --no_flag share a dest; argparse heeds the default of the first
    return {action.dest: action for action in actions if action.dest not in ("help", "config")}


def _did_you_mean(word: str, known: dict[str, Any]) -> str:
    close = difflib.get_close_matches(word.partition("=")[0], known, n=1)
    return f". Did you mean '--{close[0]}'?" if close else ". See --help."
