"""Turn dataclasses into command-line flags and back.

A flat YAML file is a second source of defaults. Precedence: dataclass default < ``--config file.yaml`` < command line. An
unknown key is an error in both places.
"""

import argparse
import dataclasses
import difflib
import gc
import importlib
import logging
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, overload

import yaml
from transformers.hf_argparser import HfArgumentParser, string_to_bool

from mm_utils.command import scripts_folder, versions
from mm_utils.places import missing
from mm_utils.text import one_line, passes_own_code, printable, redact

T = TypeVar("T")
logger = logging.getLogger(__name__)

LAUNCH_VARIABLE = "TANDEM_LAUNCH_COMMAND"  # of a process that another launcher than accelerate has started
_YES_OR_NO = {"yes", "no", "true", "false", "t", "f", "y", "n", "1", "0"}
_WIDTH = 140
_HELP_COLUMN = 35  # of a line of `--help`, and where its text begins
_KINDS: dict[Any, str] = {int: "N", float: "X"}
_MANY = 40  # flags, above which `--help` shows the usual ones
_MAX_YAML_BYTES = 1 << 20  # a file of flags has about a kilobyte
_MOST = 10**9  # of a number whose flag names no other bound
_NAMES_HERE = {  # of flags that other trainers call otherwise, where letters that are alike would mislead
    **dict.fromkeys(("batch_size", "per_device_train_batch_size"), "global_batch_size"),
    **dict.fromkeys(("gradient_accumulation_steps", "accum_freq"), "micro_batch_size"),
    **dict.fromkeys(("workers", "num_workers"), "dataloader_num_workers"),
    "epochs": "num_train_epochs",
    "lr": "learning_rate",
    "patience": "early_stopping_patience",
    "resume": "resume_from_checkpoint",
    "train_data": "train_file",
    "lock_image": "freeze_vision",
    "lock_text": "freeze_text",
    "siglip": "objectives",
    **dict.fromkeys(("model", "pretrained"), "model_name_or_path"),
}
_LAUNCHED = {"bf16", "fp16", "precision", "mixed_precision"}  # what the launcher sets
_PREPARED = {"validation_fraction", "test_fraction"}
_LEFT = {  # flags of earlier versions
    "ema_decay",
    "run_name",
    "save_total_limit",
    "adam_beta1",
    "adam_beta2",
    "overwrite_output_dir",
    "greater_is_better",
}

Decides = Literal["learning", "place", "speed", "length", "report"]
"""What a flag decides: what is learnt, where things lie (and what is compared by what it leads to, as rows and weights are), how
fast a run goes, when it ends, or what it reports."""


class FlagHelp(str):
    """The help of a flag, and what else is known about it; argparse gets all else that is in a field's metadata."""

    decides: Decides
    usual: bool
    per_machine: bool
    least: float
    most: float


def arg(
    default: T,
    help: str,
    *,
    decides: Decides = "learning",
    usual: bool = False,
    per_machine: bool = False,
    least: float = 0,
    most: float = _MOST,
    **metadata: Any,
) -> T:
    """Declare a dataclass field together with its ``--help`` line.

    Args:
        default, help: its default and its line in ``--help``.
        decides: a resumed run must have a flag that decides what is learnt as it was, and may change all others.
        usual: ``--help`` shows it where there are many flags.
        per_machine: the processes of a run may have it differ.
        least, most: of a number, the bounds, which are allowed.
        metadata: what else argparse gets.
    """
    text = FlagHelp(help)
    text.decides = decides
    text.usual = usual
    text.per_machine = per_machine
    text.least = least
    text.most = most
    return dataclasses.field(default=default, metadata={"help": text, **metadata})


def required(help: str, **metadata: Any) -> Any:
    """Declare a flag without a default, without which `parse_args` ends."""
    return arg(dataclasses.MISSING, help, **metadata)


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
        self._parsed = list(parsed)
        self.config = config
        self.named = set(named)
        self.in_config = set(in_config)
        self._fields = {field.name: field for each in parsed for field in dataclasses.fields(each)}

    @overload
    def __getitem__(self, key: type[T]) -> T: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    def __getitem__(self, key: type[T] | str) -> T | Any:
        """Return the instance of a dataclass or of a subclass, or the value of a flag, None for one that the script lacks."""
        if isinstance(key, str):
            return next((getattr(each, key) for each in self._parsed if key in each.__dataclass_fields__), None)
        return next(each for each in self._parsed if isinstance(each, key))

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
    def defaults(self) -> dict[str, Any]:
        """The declared default of every flag by name, None for a list."""
        none = dataclasses.MISSING
        return {name: None if field.default is none else field.default for name, field in self._fields.items()}

    def is_given(self, *names: str) -> bool:
        """Return whether the command line or the file of ``--config`` has one of some flags."""
        return not (self.named | self.in_config).isdisjoint(names)

    def default(self, **values: Any) -> None:
        """Change flags that are not given."""
        for place, each in enumerate(self._parsed):
            own = {name for name in values if name in each.__dataclass_fields__ and not self.is_given(name)}
            self._parsed[place] = dataclasses.replace(each, **{name: values[name] for name in own})

    @property
    def is_trial(self) -> bool:
        """Whether this is the trial of a dry run, which turns flags off behind those of its run."""
        return "dry_run" in self.named and not self["dry_run"]

    def refuse(self, names: str, reason: str) -> None:
        """Refuse flags that would have no effect, and that ask for something: those above 0 and unlike their default.

        One that only the file of ``--config`` has is logged, since the command line may have made it needless. Those of a trial
        were looked at.

        Args:
            names: their names, separated by spaces; the script may lack some.
            reason: why, such as "--lora_rank is 0".

        Raises:
            ValueError: if the command line has one of them.
        """
        for name in names.split():
            if self.is_trial or not self[name] or self[name] == self._fields[name].default:
                continue
            problem = f"--{name} is {self[name]}; {reason}, and it would have no effect"
            if name in self.named or self.config is None:
                raise ValueError(f"{problem}. Drop it.")
            logger.warning("A flag is not read, in %s: %s", self.config, problem)


class _Parser(HfArgumentParser):
    """Report a mistake in one line, without secrets and without the list of all flags."""

    shows_all = False

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {printable(redact(message))}\n")

    def format_help(self) -> str:
        """Return the help, of many flags that of the usual ones unless --help-all asks for all."""
        rare = [
            each
            for each in self._actions
            if not getattr(each.help, "usual", each.dest in ("help", "help_all", "config"))
        ]
        if not self.shows_all and len(self._actions) > _MANY:
            self.epilog = f"{len(self._actions)} flags in all; --help-all shows the others, too."
            for action in rare:
                action.help = argparse.SUPPRESS
        return super().format_help()


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keep the docstring's line breaks, name each flag once, and show its default where it has one."""

    def __init__(self, prog: str):
        width = max(_WIDTH, shutil.get_terminal_size().columns - 2)
        super().__init__(prog, max_help_position=_HELP_COLUMN, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = action.option_strings[-1:] if action.dest == "help" else action.option_strings[:1]
        takes = (
            ""
            if action.nargs == 0 or action.type is string_to_bool
            else f" {action.metavar or _KINDS.get(action.type, 'TEXT')}"
        )
        return f"{names[0]}{takes}" if names else super()._format_action_invocation(action)

    def _format_action(self, action: argparse.Action) -> str:
        return "" if action.option_strings[:1] == [f"--no_{action.dest}"] else super()._format_action(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        shown = (
            f" (default: {action.default})"
            if action.default and action.dest not in ("help", "help_all", "version")
            else ""
        )
        if action.default is True:
            shown = f" (on; --no_{action.dest} turns it off)"
        return "" if action.help is None else action.help.rstrip() + shown.replace("%", "%%")


def parse_args(
    *arg_classes: Any,
    argv: Sequence[str] | None = None,
    doc: str | None = None,
    rest: str = "",
    recipe: str | None = None,
    without: Collection[str] = (),
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
        without: the names of flags that are not taken from `recipe`.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    for kind in arg_classes:
        kind._argument_group_name = (kind.__doc__ or kind.__name__).splitlines()[0].rstrip(".")
    parser = _Parser(arg_classes, description=doc, usage="%(prog)s [flags]", allow_abbrev=False, formatter_class=_Help)
    # --flag and --no_flag share a dest; argparse uses the default of the first.
    known = {action.dest: action for action in reversed(parser._actions) if action.dest != "help"}
    files = _Parser([], add_help=False, allow_abbrev=False)
    for each in (parser, files):
        each.add_argument("--config", metavar="FILE", action="append", help="A flat YAML file of these flags.")
    parser.add_argument("--help-all", action="help", help="Show all flags.")
    parser.add_argument("--version", action="version", version=versions(), help="Show the versions.")
    parser.shows_all = "--help-all" in argv
    found, words = files.parse_known_args(argv)
    path, *others = found.config or [None]
    if others:
        parser.error(
            f"--config is {path} and {others[0]}; one file is read. Join them, or give the others' lines as flags."
        )
    off = [word for word in words if rest and _is_taken_off(word, known)]
    words = _explicit(parser, [word for word in words if word not in off])
    actions = (parser._option_string_actions.get(word.partition("=")[0]) for word in words)
    named = {action.dest for action in actions if action is not None}
    in_config = list[str]()
    try:
        for key, entry, file in _entries(path, recipe, without):
            _set_default(parser, known, key, entry, file)
            in_config.append(key)
        *parsed, unknown = parser.parse_args_into_dataclasses(
            words, return_remaining_strings=True, look_for_args_file=False
        )
        parsed = parsed[: len(arg_classes)]
        _check_values(parsed, {*named, *in_config})
    except ValueError as error:
        if passes_own_code(error):  # which a flag names
            raise
        parser.error(str(error))
    if rest and unknown + off and not any(word.startswith("-") for word in unknown):
        text = " ".join(unknown + off)
        if rest in named:
            parser.error(f"--{rest} is given, and {text!r} too; give one of them.")
        parsed = [dataclasses.replace(each, **{rest: text}) if hasattr(each, rest) else each for each in parsed]
    elif unknown:
        flags = [word for word in unknown if word.startswith("-")] or unknown[:1]
        hints = [f"unknown argument {word}{_did_you_mean(word.lstrip('-'), known)}" for word in flags]
        hints[:-1] = [hint.removesuffix(" See --help.") for hint in hints[:-1]]
        parser.error(" ".join(hints))
    return Parsed(parsed, path or recipe, named, in_config)


def _is_taken_off(word: str, known: Collection[str]) -> bool:
    """Return whether it is a word with one dash, as a search takes it off: -cat."""
    return bool(re.match(r"-[^\W\d_]", word)) and word[1:] not in {*known, "h"}


def parse_first(*arg_classes: Any, doc: str | None, argv: Sequence[str] | None = None, rest: str = "") -> None:
    """Answer `--help` and mistakes in the words before a script imports what computes, which takes seconds.

    Until `run_script` is called, Ctrl-C ends the process in one line.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_before_the_start)
    parse_args(*arg_classes, argv=argv, doc=doc, rest=rest)
    gc.disable()  # a tenth of the time of the imports; `run_script` turns it on


def end_before_the_start(number: int, frame: Any) -> None:
    """End at once: an exception may be lost in an import of a library."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"Stopped by SIGINT before the start. Nothing was written.\n")
    os._exit(128 + number)


def _entries(config: str | None, recipe: str | None, without: Collection[str]) -> Iterator[tuple[str, "Entry", str]]:
    """Yield the flags of a recipe, then those of the file of `--config`, which are stronger, with their file."""
    for file, left_out in ((recipe, without), (config, ())):
        entries = {} if file is None else read_flat_yaml(file)
        yield from ((key, entry, file or "") for key, entry in entries.items() if key not in left_out)


def _check_values(parsed: Iterable[Any], given: Collection[str]) -> None:
    """Raise ValueError for a number outside of its flag's bounds, as NaN is, and for a text that is given and empty."""
    for holder in parsed:
        for field in dataclasses.fields(holder):
            value = getattr(holder, field.name)
            flag = field.metadata["help"]
            if value == "" and field.name in given:  # as a variable of the shell that is not set would be
                raise ValueError(f"--{field.name} is empty. Give a value, or leave the flag out.")
            if isinstance(value, (int, float)) and not flag.least <= value <= flag.most:
                bound = f"at most {flag.most:,}" if value > flag.most else f"at least {flag.least:,}"
                raise ValueError(f"--{field.name} is {value}; give {bound}.")


def _explicit(parser: _Parser, argv: Sequence[str]) -> list[str]:
    """Return the words with ``--flag`` of yes or no as ``--flag=true``.

    Otherwise argparse would take the word behind a flag of yes or no for its value, whatever it is.
    """
    words = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        action = parser._option_string_actions.get(word)
        if action is not None and action.nargs == "?":
            # '--json', 'no' -> '--json=no', but '--json', 'a red door' -> '--json=true', 'a red door'
            word = f"{word}={rest.pop(0) if rest and rest[0].lower() in _YES_OR_NO else 'true'}"
        words.append(word)
    return words


def _set_default(parser: _Parser, known: Mapping[str, argparse.Action], key: str, entry: "Entry", path: str) -> None:
    """Make a value of a file the default, by the flag's type: YAML reads `1e-3` as a string, `1` as an int."""
    value = entry.value
    place = f"{path}, line {entry.line}"
    if key not in known:
        raise ValueError(f"{place}: unknown key '{key}'{_did_you_mean(key, known)}")
    action = known[key]
    takes_list = known[key].nargs == "+"
    if value is None:
        if action.default is not None:
            raise ValueError(f"{place}: {key} is left empty; give a value, or delete the line")
        return
    try:
        if isinstance(value, (list, dict)) and not (takes_list and isinstance(value, list)):
            raise argparse.ArgumentError(action, f"invalid value: {str(value)[:80]}")
        words = [str(word) for word in value] if isinstance(value, list) else [str(value)]
        action.default = parser._get_values(action, words)
        action.required = False  # type: ignore[attr-defined]
    except argparse.ArgumentError as error:
        raise ValueError(f"{place}: {error}") from error


def _did_you_mean(word: str, known: Collection[str]) -> str:
    name = word.partition("=")[0].replace("-", "_")
    if (here := _NAMES_HERE.get(name)) in known:
        return f". It is called '--{here}' here. See --help."
    if name in _LAUNCHED:
        return ". The launcher sets the precision: accelerate launch --mixed_precision bf16."
    if "sources" in known and (name == "image_root" or name.endswith("_column")):
        return f". It is written behind a source: --sources PATH,{name}=VALUE."
    if name in _PREPARED:
        return ". scripts/prepare_data.py has it: --dataset_name takes what it writes."
    if name in _LEFT:
        return ". It has left; CHANGELOG.md says what to do instead."
    close = difflib.get_close_matches(name, known, n=1)
    return f". Did you mean '--{close[0]}'? See --help." if close else ". See --help."


def to_dict(*parsed: Any) -> dict[str, Any]:
    """Flatten parsed dataclasses into one dict, as ``--config`` reads it back."""
    return {key: value for args in parsed for key, value in dataclasses.asdict(args).items()}


def to_words(arg_class: Any, settings: Mapping[str, Any], leave_out: Sequence[str] = ()) -> list[str]:
    """Return the command line of the fields of `arg_class` that `settings`, values by name, have and change."""
    words: list[str] = []
    for each in dataclasses.fields(arg_class):
        value = settings.get(each.name)
        if value is None or value == each.default or each.name in leave_out:
            continue
        if isinstance(value, bool):
            words.append(f"--{each.name}" if value else f"--no_{each.name}")
        else:
            words += [f"--{each.name}", *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return words


def load_own(path: str, flag: str, base: type | None = None) -> Any:
    """Import what a flag names as module.name, from the current folder, an installed package or `__main__`.

    Raises:
        ValueError: if there is no such thing, or it is no subclass of `base`, or without one no function.
    """
    module, _, name = path.rpartition(".")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        if passes_own_code(error):  # a mistake in the module itself
            raise
        remedy = f"Put {module.partition('.')[0]}.py in the current folder, with {name} in it."
        if module in sys.modules:
            close = difflib.get_close_matches(name, vars(sys.modules[module]), n=1)
            remedy = f"Did you mean {module}.{close[0]}?" if close else "Name what it has."
        raise ValueError(f"{flag} has {path}; {error}. {remedy}") from error
    finally:
        sys.path.remove(os.getcwd())
    is_class = isinstance(found, type)
    if (is_class or not callable(found)) if base is None else not (is_class and issubclass(found, base)):
        kind = "function" if base is None else f"subclass of {base.__module__}.{base.__name__}"
        raise ValueError(f"{flag} has {path}; that is not a {kind}. Name one.")
    return found


def in_notebook() -> bool:
    """Return whether a notebook runs this process; `sys.argv` is then that of its kernel."""
    return "kernel_launcher" in Path(sys.argv[0]).name


def python() -> str:
    """Return this interpreter as the user's shell finds it."""
    found = shutil.which("python")
    is_on_path = found is not None and Path(found).parent == Path(sys.executable).parent
    return "python" if is_on_path else shlex.quote(sys.executable)


def launcher() -> str:
    """Return what stands before the script in the command that starts this run once more.

    Of the launcher's own flags it has the number of processes, if these are on one machine.
    """
    if LAUNCH_VARIABLE in os.environ:
        return os.environ[LAUNCH_VARIABLE]
    processes = os.environ.get("WORLD_SIZE", "1")
    if "ACCELERATE_DYNAMO_BACKEND" not in os.environ and processes == "1":
        return python()
    command = "accelerate launch" if python() == "python" else f"{python()} -m accelerate.commands.launch"
    if processes == "1" or processes != os.environ.get("LOCAL_WORLD_SIZE"):
        return command
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":  # without --multi_gpu, one process would start
        return f"ACCELERATE_USE_CPU=true {command} --multi_gpu --num_processes {processes}"
    return f"{command} --num_processes {processes}"


def launch_command(script: str, words: Sequence[str], before: str | None = None) -> str:
    """Return the shell command that launches a script with some words, to be pasted in the working folder."""
    path = Path(sys.argv[0]).with_name(f"{script}.py") if Path(sys.argv[0]).name else Path()
    if path.parent.name != "scripts" or not path.is_file():  # a notebook or a test has called `main`
        path = scripts_folder() / f"{script}.py"
        path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{before or launcher()} {shlex.join([str(path), *words])}"


class Entry(NamedTuple):
    """A value and the number of the line of its key."""

    value: Any
    line: int


def read_flat_yaml(path: str) -> dict[str, Entry]:
    """Return the entries of a YAML file that holds one mapping, or nothing.

    Raises:
        ValueError: one line that names the file, and the line of the mistake where there is one.
    """
    flat = "give flat 'flag: value' lines"
    if not Path(path).is_file():
        raise ValueError(f"--config is {path}; {missing(path, is_local=True) or 'that is no file.'}")
    if Path(path).stat().st_size > _MAX_YAML_BYTES:
        raise ValueError(f"--config is {path}; it has more than {_MAX_YAML_BYTES:,} bytes; {flat}")
    entries: dict[str, Entry] = {}
    try:
        text = Path(path).read_text(encoding="utf-8")
        for token in yaml.scan(text):
            if isinstance(token, yaml.AliasToken):  # nine of them can stand for gigabytes
                raise ValueError(f"{path}, line {token.start_mark.line + 1}, is an alias; write the value out")
        node = yaml.compose(text, yaml.SafeLoader)
        if node is not None and not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{path} holds no mapping; {flat}")
        for key, value in node.value if node else ():
            name = str(key.value)
            line = key.start_mark.line + 1
            if name in entries:
                raise ValueError(f"{path}, line {line}, has the key '{name}' again, after line {entries[name].line}")
            entries[name] = Entry(yaml.SafeLoader("").construct_object(value, deep=True), line)
    except (yaml.YAMLError, UnicodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None)
        place = "" if mark is None else f", line {mark.line + 1},"
        raise ValueError(f"{path}{place} is not valid YAML in UTF-8: {problem or one_line(error)}") from error
    return entries
