"""Turn dataclasses into command-line flags and back.

A flat YAML file is a second source of defaults. Precedence: dataclass default < ``--config file.yaml`` < command line. An
unknown key is an error in both places.
"""

import argparse
import copy
import dataclasses
import difflib
import importlib
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, overload

import yaml
from transformers.hf_argparser import HfArgumentParser

from mm_utils.command import scripts_folder
from mm_utils.text import one_line, printable, redact

T = TypeVar("T")
logger = logging.getLogger(__name__)

LAUNCH_VARIABLE = "TANDEM_LAUNCH_COMMAND"  # of a process that another launcher than accelerate has started

_YES_OR_NO = {"yes", "no", "true", "false", "t", "f", "y", "n", "1", "0"}
_OWN = ("config", "help", "help_all")
_MANY = 40  # flags, above which `--help` shows the usual ones
_MAX_YAML_BYTES = 1 << 20  # a file of flags has about a kilobyte


Decides = Literal["learning", "place", "speed", "length", "report"]
"""What a flag decides: what is learnt, where things lie (and what is compared by what it leads to, as rows and weights are), how
fast a run goes, when it ends, or what it reports."""


class FlagHelp(str):
    """The help of a flag, and what else is known about it; argparse gets all else that is in a field's metadata."""

    decides: Decides
    usual: bool
    per_machine: bool


def arg(
    default: T,
    help: str,
    *,
    decides: Decides = "learning",
    usual: bool = False,
    per_machine: bool = False,
    **metadata: Any,
) -> T:
    """Declare a dataclass field together with its ``--help`` line.

    Args:
        default, help: its default and its line in ``--help``.
        decides: a resumed run must have a flag that decides what is learnt as it was, and may change all others.
        usual: ``--help`` shows it where there are many flags.
        per_machine: the processes of a run may have it differ.
        metadata: what else argparse gets.
    """
    text = FlagHelp(help)
    text.decides, text.usual, text.per_machine = decides, usual, per_machine
    return dataclasses.field(default=default, metadata={"help": text, **metadata})


class Parsed:
    """What was parsed: an instance of each dataclass, found by its class, or the value of a flag, by its name.

    `config` is the file of `--config`; `named` has the names of the flags on the command line, and `in_config` those in the
    file.
    """

    def __init__(
        self,
        parsed: Sequence[Any],
        config: str | None = None,
        named: Collection[str] = (),
        in_config: Collection[str] = (),
    ):
        self._parsed, self.config = list(parsed), config
        self.named, self.in_config = frozenset(named), frozenset(in_config)

    @overload
    def __getitem__(self, key: type[T]) -> T: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    def __getitem__(self, key: type[T] | str) -> T | Any:
        """Return the instance of a dataclass or of a subclass, or the value of a flag.

        Raises:
            KeyError: if the script has no such flags.
        """
        if isinstance(key, str):
            return next((getattr(each, key) for each in self._parsed if key in _names(each)), None)
        for each in self._parsed:
            if isinstance(each, key):
                return each
        raise KeyError(key)

    @property
    def settings(self) -> dict[str, Any]:
        """All values by name, as ``--config`` reads them back."""
        return to_dict(*self._parsed)

    @property
    def learnt(self) -> dict[str, Any]:
        """The values that decide what is learnt, by name."""
        return {
            name: self[name] for name, field in self._fields.items() if field.metadata["help"].decides == "learning"
        }

    @property
    def common(self) -> dict[str, Any]:
        """The values that all processes of a run have, by name."""
        return {name: self[name] for name, field in self._fields.items() if not field.metadata["help"].per_machine}

    @property
    def is_trial(self) -> bool:
        """Whether these are a run's flags with those of its dry run behind them."""
        return "dry_run" in self.named and not self["dry_run"]

    def is_given(self, *names: str) -> bool:
        """Return whether the command line or the file of ``--config`` has one of some flags."""
        return not (self.named | self.in_config).isdisjoint(names)

    @property
    def defaults(self) -> dict[str, Any]:
        """The declared default of every flag by name, None for a list."""
        return {
            name: None if field.default is dataclasses.MISSING else field.default
            for name, field in self._fields.items()
        }

    def differs(self, names: str) -> bool:
        """Return whether one of some flags, separated by spaces, is not at its default; the script may lack some."""
        known = self._fields
        return any(self[name] != known[name].default for name in names.split() if name in known)

    @property
    def _fields(self) -> dict[str, dataclasses.Field]:
        return {field.name: field for each in self._parsed for field in dataclasses.fields(each)}

    def default(self, **values: Any) -> None:
        """Change flags that are not given."""
        values = {name: value for name, value in values.items() if not self.is_given(name)}
        self._parsed = [
            dataclasses.replace(each, **{name: values[name] for name in values.keys() & _names(each)})
            for each in self._parsed
        ]

    def refuse(self, names: str, reason: str) -> None:
        """Refuse flags that would have no effect, and that ask for something: those above 0 and unlike their default.

        One that only the file of ``--config`` has is logged, since the command line may have made it needless.

        Args:
            names: their names, separated by spaces; the script may lack some.
            reason: why, such as "--lora_rank is 0".

        Raises:
            ValueError: if the command line has one of them.
        """
        known = self._fields
        for field in (known[name] for name in names.split() if name in known):
            value = self[field.name]
            if not value or value == field.default:
                continue
            problem = f"--{field.name} is {value}; {reason}, and it would have no effect"
            if field.name in self.named or self.config is None:
                raise ValueError(f"{problem}. Drop it.")
            logger.warning("%s, in %s: %s", "A flag is not read", self.config, problem)


def _names(parsed: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(parsed)}


def required(help: str, **metadata: Any) -> Any:
    """Declare a flag without a default: the dataclass's ``__post_init__`` refuses None in a sentence of its own."""
    return arg(None, help, **metadata)


def parse_args(
    *arg_classes: Any,
    argv: Sequence[str] | None = None,
    doc: str | None = None,
    rest: str = "",
    recipe: str | None = None,
) -> Parsed:
    """Parse the command line into one instance of each dataclass.

    Any mistake, a ``ValueError`` of a dataclass's ``__post_init__`` included, ends the program with one line and exit
    status 2.

    Args:
        arg_classes: the dataclasses; each becomes a group of flags in ``--help``, titled by its docstring.
        argv: the words to parse; default: the command line.
        doc: the script's docstring, which becomes the description in ``--help``.
        rest: the name of a flag whose value may also be given without it, such as the text of a search.
        recipe: a file of flags that stands behind that of `--config`.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(
        [_titled(each) for each in arg_classes],
        description=doc,
        usage="%(prog)s [flags]",
        allow_abbrev=False,
        formatter_class=_Help,
    )
    parser.add_argument("--config", metavar="FILE", help="A flat YAML file of these flags; the command line wins.")
    parser.add_argument("--help-all", nargs=0, action=_HelpAll, help="Show all flags.")
    path = _take_config(parser, argv)
    in_config = [name for file in (recipe, path) if file for name in _set_defaults(parser, file)]
    words = _explicit(parser, argv)
    actions = (parser._option_string_actions.get(word.partition("=")[0]) for word in words)
    named = {action.dest for action in actions if action is not None}
    try:
        *parsed, unknown = parser.parse_args_into_dataclasses(
            words, return_remaining_strings=True, look_for_args_file=False
        )
    except ValueError as error:
        parser.error(str(error))
    parsed = parsed[: len(arg_classes)]
    if rest and unknown and not any(word.startswith("-") for word in unknown):
        text = " ".join(unknown)
        parsed = [dataclasses.replace(each, **{rest: text}) if hasattr(each, rest) else each for each in parsed]
        return Parsed(parsed, path, named, in_config)
    if unknown:
        known = _known(parser)
        flags = [word for word in unknown if word.startswith("--")] or unknown[:1]
        parser.error(" ".join(f"unknown argument {word}{_did_you_mean(word.lstrip('-'), known)}" for word in flags))
    return Parsed(parsed, path or recipe, named, in_config)


def to_dict(*parsed: Any) -> dict[str, Any]:
    """Flatten parsed dataclasses into one dict, as ``--config`` reads it back."""
    return {key: value for args in parsed for key, value in dataclasses.asdict(args).items()}


def to_words(arg_class: Any, settings: Mapping[str, Any], leave_out: Sequence[str] = ()) -> list[str]:
    """Return the command line of the fields of `arg_class` that `settings` change.

    Args:
        arg_class: a dataclass of flags.
        settings: values by name, as `to_dict` returns them; a field that is not among them is left out.
        leave_out: names of fields to leave out.
    """
    words: list[str] = []
    for each in dataclasses.fields(arg_class):
        value = settings.get(each.name)
        if value is not None and value != each.default and each.name not in leave_out:
            words += [f"--{each.name}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return words


def load_own(path: str, flag: str, base: type | None = None) -> Any:
    """Import what is given as module.name, from the current folder, an installed package or `__main__`.

    Args:
        path: what was given.
        flag: the flag that it was given by.
        base: the class that it must be a subclass of; default: it must be a function, or callable as one.

    Raises:
        ValueError: if there is no such thing.
    """
    module, _, name = path.rpartition(".")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{flag} has {path}; {error}. Put {module.partition('.')[0]}.py in the current folder, with {name} in it."
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    if base is None:
        if isinstance(found, type) or not callable(found):
            raise ValueError(f"{flag} has {path}; that is not a function. Name one.")
    elif not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(
            f"{flag} has {path}; that is not a subclass of {base.__module__}.{base.__name__}. Make it one."
        )
    return found


def in_notebook() -> bool:
    """Return whether a notebook runs this process; `sys.argv` is then that of its kernel."""
    return "kernel_launcher" in Path(sys.argv[0]).name


def launcher() -> str:
    """Return what stands before the script in the command that starts this run once more."""
    return os.environ.get(LAUNCH_VARIABLE) or processes_launcher()


def processes_launcher() -> str:
    """Return `accelerate launch` where a launcher has started this process, else `python`, as the user's shell finds them."""
    launched = "ACCELERATE_DYNAMO_BACKEND" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1
    return f"{_executable('accelerate')} launch" if launched else _executable("python")


def _executable(name: str) -> str:
    """Return what starts a program of this environment in the user's shell: its name, or its path if PATH has another."""
    own = Path(sys.executable).parent
    found = shutil.which(name)
    if own == Path() or (found and os.path.realpath(Path(found).parent) == os.path.realpath(own)):
        return name
    own = own / name if (own / name).exists() else Path(sys.executable)
    return shlex.quote(str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own))


def launch_command(script: str, words: Sequence[str], launcher: str | None = None) -> str:
    """Return the shell command that launches a script, to be pasted in the working folder.

    Args:
        script: the script's name, such as `pretrain`.
        words: its arguments.
        launcher: what stands before the script; default: `processes_launcher`.
    """
    launcher = launcher or processes_launcher()
    if launcher in ("python", "accelerate launch"):
        program, _, more = launcher.partition(" ")
        launcher = f"{_executable(program)} {more}".strip()
    path = Path(sys.argv[0]).with_name(f"{script}.py") if Path(sys.argv[0]).name else Path()
    if path.parent.name != "scripts" or not path.is_file():  # a notebook or a test has called `main`
        path = scripts_folder() / f"{script}.py"
        path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{launcher} {shlex.join([str(path), *words])}"


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        parser.shows_all = True
        parser.print_help()
        parser.exit()


class _Parser(HfArgumentParser):
    """Report a mistake in one line, without secrets and without the list of all flags."""

    shows_all = False

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {printable(redact(message))}\n")

    def format_help(self) -> str:
        """Return the help of all flags, or of the usual ones of many."""
        flags = len({action.dest for action in self._actions} - {"help", "help_all"})
        if self.shows_all or flags <= _MANY:
            return super().format_help()
        for group in self._action_groups:  # the program ends after its help
            group._group_actions[:] = [
                each for each in group._group_actions if getattr(each.help, "usual", each.dest in _OWN)
            ]
        return f"{super().format_help()}\n{flags} flags in all; --help-all shows the others, too.\n"


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keep the docstring's line breaks; show each flag once, with its default."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        options = action.option_strings
        shown = copy.copy(action)  # without the spelling --a-b of --a_b
        shown.option_strings = [
            each for each in options if each in (f"--{action.dest}", "--help-all") or "-" not in each.lstrip("-")
        ]
        return super()._format_action_invocation(shown)

    def _get_help_string(self, action: argparse.Action) -> str:
        if any(option.startswith("--no_") for option in action.option_strings):
            return f"Turn --{action.dest} off."
        text = action.help or ""
        if action.default in (None, argparse.SUPPRESS) or "%(default)" in text:
            return text
        return f"{text} (default: %(default)s)"


def _titled(arg_class: Any) -> Any:
    """Set the group title that HfArgumentParser looks for."""
    arg_class._argument_group_name = (arg_class.__doc__ or arg_class.__name__).splitlines()[0].rstrip(".")
    return arg_class


def _take_config(parser: HfArgumentParser, argv: list[str]) -> str | None:
    """Take ``--config`` out of the words; return its file."""
    found: list[str] = []
    while (at := next((at for at, word in enumerate(argv) if word.partition("=")[0] == "--config"), None)) is not None:
        _, joined, path = argv.pop(at).partition("=")
        if not joined and at == len(argv):
            parser.error("--config needs a path, e.g. --config recipes/tiny.yaml")
        found.append(path if joined else argv.pop(at))
    if len(found) > 1:
        parser.error(
            f"--config is {' and '.join(found)}; one file is read. Join them, or give the others' lines as flags."
        )
    return found[0] if found else None


def _explicit(parser: _Parser, argv: Sequence[str]) -> list[str]:
    """Return the words with ``--flag`` of yes or no as ``--flag=true``.

    Otherwise argparse would take the word behind a flag of yes or no for its value, whatever it is.
    """
    words, rest = [], list(argv)
    while rest:
        word = rest.pop(0)
        action = parser._option_string_actions.get(word)
        if action is not None and action.nargs == "?" and action.const is True:
            words.append(f"{word}={rest.pop(0) if rest and rest[0].lower() in _YES_OR_NO else 'true'}")
        else:
            words.append(word)
    return words


def _set_defaults(parser: HfArgumentParser, path: str) -> list[str]:
    """Make the values of a file the defaults; return their names."""
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
    return list(entries)


def _typed(parser: HfArgumentParser, action: argparse.Action, value: Any, place: str) -> Any:
    """Convert a YAML value by the flag's type: YAML reads `1e-3` as a string, `1` as an int."""
    if value is None:
        if action.default is not None:
            parser.error(f"{place}: {action.dest} is left empty; give a value, or delete the line")
        return None
    if action.nargs == "+":
        return value if isinstance(value, list) else [str(value)]
    if action.type is None:
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
    actions = reversed(parser._actions)  # --flag and --no_flag share a dest; argparse uses the default of the first
    return {action.dest: action for action in actions if action.dest not in ("help", "help_all", "config")}


def _did_you_mean(word: str, known: dict[str, Any]) -> str:
    close = difflib.get_close_matches(word.partition("=")[0], known, n=1)
    return f". Did you mean '--{close[0]}'? See --help." if close else ". See --help."


# -- YAML that anyone may have written ----------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A value and the number of the line of its key."""

    value: Any
    line: int


class _Loader(yaml.SafeLoader):
    """Refuse repeated keys and aliases, nine of which can stand for gigabytes.

    Tags that make objects are off anyway.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(
                None, None, "an alias; write the value out", self.peek_event().start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            earlier = seen.setdefault(str(key.value), key)
            if earlier is not key:
                problem = f"the key '{key.value}' again, after line {earlier.start_mark.line + 1}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        return super().construct_mapping(node, deep)


def read_flat_yaml(path: str) -> dict[str, Entry]:
    """Return the entries of a YAML file that holds one mapping, or nothing.

    Raises:
        ValueError: one line that names the file, and the line of the mistake where there is one.
    """
    if not Path(path).is_file():
        raise ValueError(f"--config is {path}; there is no such file")
    if Path(path).stat().st_size > _MAX_YAML_BYTES:
        raise ValueError(
            f"--config is {path}; it has more than {_MAX_YAML_BYTES:,} bytes. Give flat 'flag: value' lines"
        )
    try:
        loader = _Loader(Path(path).read_text(encoding="utf-8"))
        node = loader.get_single_node()
        values = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = "" if mark is None else f", line {mark.line + 1},"
        raise ValueError(f"{path}{place} is not valid YAML: {problem or one_line(error)}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start + 1}). Save it as UTF-8") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply; give flat 'flag: value' lines") from error
    if node is None or values is None:
        return {}
    if not isinstance(node, yaml.MappingNode) or not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; give flat 'flag: value' lines")
    lines = [key.start_mark.line + 1 for key, _ in node.value]
    return {str(key): Entry(value, line) for (key, value), line in zip(values.items(), lines, strict=True)}
