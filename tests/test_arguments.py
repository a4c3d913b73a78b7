"""Dataclass default < YAML < command line; every mistake ends with one line that names the flag."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from mm_utils.arguments import arg, parse_args, read_flat_yaml, to_dict, to_words
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.rows.source import DataArguments
from mm_utils.evaluation.retrieval import EvaluationArguments
from mm_utils.model.arguments import ModelArguments
from mm_utils.objectives.build import ObjectiveArguments
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.optim import OptimizerArguments

ALL = (
    DataArguments,
    ModelArguments,
    LoaderArguments,
    ObjectiveArguments,
    OptimizerArguments,
    TrainingArguments,
    EvaluationArguments,
)


@dataclass
class First:
    learning_rate: float = arg(0.5, "A rate.")
    name: str | None = arg(None, "A name.")
    shuffle: bool = arg(True, "On by default.")
    verbose: bool = arg(False, "Off by default.")


@dataclass
class Second:
    batch_size: int = arg(8, "A size.")
    limit: int | None = arg(3, "A limit.")

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"--batch_size is {self.batch_size}; give at least 1.")


def parse(*argv: str) -> tuple[First, Second]:
    given = parse_args(First, Second, argv=argv, doc="What it does.\n\n    a command")
    return given[First], given[Second]


def config(folder: Path, text: str) -> str:
    path = folder / "config file.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def mistake(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The last line of what parsing these ends with."""
    with pytest.raises(SystemExit) as exit:
        parse(*argv)
    assert exit.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1].partition("error: ")[2]


def test_command_line_beats_yaml_beats_default(tmp_path: Path) -> None:
    assert parse() == (First(0.5, None, True, False), Second(8, 3))
    path = config(tmp_path, "learning_rate: 0.1\nbatch_size: 4\n")
    first, second = parse("--batch_size", "2", "--config", path)
    assert (first.learning_rate, second.batch_size, second.limit) == (0.1, 2, 3)
    assert parse(f"--config={path}", "--batch_size=2") == (first, second)
    assert parse("--batch-size", "2", "--config", path) == (first, second)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("learning_rate: 1e-3", "learning_rate", 1e-3),
        ("learning_rate: 1", "learning_rate", 1.0),
        ("learning_rate: '.5'", "learning_rate", 0.5),
        ("name: 12", "name", "12"),
        ("name: null", "name", None),
        ("name: yes", "name", "True"),
        ("shuffle: false", "shuffle", False),
        ("shuffle: true", "shuffle", True),
        ("shuffle: 'no'", "shuffle", False),
        ("verbose: true", "verbose", True),
        ("verbose: 1", "verbose", True),
        ("# nothing but a comment", "name", None),
        ("", "name", None),
    ],
)
def test_yaml_values_have_the_flags_type(tmp_path: Path, line: str, name: str, value: Any) -> None:
    found = getattr(parse("--config", config(tmp_path, line))[0], name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("argv", "shuffle", "verbose"),
    [
        ([], True, False),
        (["--no_shuffle", "--verbose"], False, True),
        (["--shuffle", "false", "--verbose", "true"], False, True),
        (["--shuffle"], True, False),
    ],
)
def test_booleans(argv: list[str], shuffle: bool, verbose: bool) -> None:
    first, _ = parse(*argv)
    assert (first.shuffle, first.verbose) == (shuffle, verbose)


def test_a_key_twice_on_one_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("{seed: 1, seed: 2}\n")
    with pytest.raises(ValueError, match=r"x\.yaml, line 1, is not valid YAML: the key 'seed' again, after line 1"):
        read_flat_yaml(str(path))


def test_command_line_turns_yamls_false_on_again(tmp_path: Path) -> None:
    path = config(tmp_path, "shuffle: false\nverbose: true")
    assert parse("--config", path)[0] == First(shuffle=False, verbose=True)
    assert parse("--config", path, "--shuffle", "--verbose", "false")[0] == First()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--learning_rat", "1"], "unknown argument --learning_rat. Did you mean '--learning_rate'?"),
        (["--learnin_rate=1"], "unknown argument --learnin_rate=1. Did you mean '--learning_rate'?"),
        (["--batch", "4"], "unknown argument --batch"),
        (["--zzz"], "unknown argument --zzz. See --help."),
        (["stray"], "unknown argument stray. See --help."),
        (["--zzz", "1", "--yyy"], "unknown argument --zzz. See --help. unknown argument --yyy. See --help."),
        (["--batch_size", "two"], "argument --batch_size/--batch-size: invalid int value: 'two'"),
        (["--batch_size", "1.5"], "argument --batch_size/--batch-size: invalid int value: '1.5'"),
        (["--batch_size", "0"], "--batch_size is 0; give at least 1."),
        (["--config"], "--config needs a path"),
        (["--config", "a.yaml", "--config=b.yaml"], "--config is a.yaml and b.yaml; one file is read."),
        (["--verbose", "maybe"], "unknown argument maybe"),
        (["--config", "nowhere.yaml"], "--config is nowhere.yaml; there is no such file"),
    ],
)
def test_mistakes_on_the_command_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert mistake(capsys, *argv).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnin_rate: 1", "unknown key 'learnin_rate'. Did you mean '--learning_rate'?"),
        ("batch-size: 1", "unknown key 'batch-size'. Did you mean '--batch_size'?"),
        ("help: true", "unknown key 'help'"),
        ("config: other.yaml", "unknown key 'config'"),
        ("3: 4", "unknown key '3'"),
        ("batch_size: two", "batch_size is 'two'; expected int"),
        ("batch_size:", "batch_size is left empty; give a value, or delete the line"),
        ("batch_size: 1.5", "batch_size is 1.5; expected int"),
        ("learning_rate: fast", "learning_rate is 'fast'; expected float"),
        ("learning_rate: {a: 1}", "learning_rate is {'a': 1}; expected float"),
        ("learning_rate: [1, 2]", "learning_rate is [1, 2]; expected float"),
        ("shuffle: maybe", "shuffle is 'maybe'; expected"),
        ("- 1\n- 2", "holds a list; give flat 'flag: value' lines"),
        ("just words", "holds a str; give flat 'flag: value' lines"),
        ("a: [1", "is not valid YAML: "),
        ("batch_size: 0", "--batch_size is 0; give at least 1."),
    ],
)
def test_mistakes_in_yaml(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, text)
    line = mistake(capsys, "--config", path)
    assert message in line
    assert line.startswith((path, "--batch_size"))


def test_words_are_parsed_back_to_the_same_values() -> None:
    parsed = parse("--learning_rate", "0.25", "--name", "two words", "--no_shuffle")
    assert to_words(First, to_dict(*parsed)) == [
        *("--learning_rate", "0.25", "--name", "two words", "--shuffle", "False")
    ]
    assert parse(*to_words(First, to_dict(*parsed))) == parsed
    assert to_words(First, to_dict(*parsed), leave_out=["name", "shuffle", "learning_rate"]) == []


def shown(capsys: pytest.CaptureFixture[str], *words: str, groups: tuple[type, ...] = ALL) -> str:
    with pytest.raises(SystemExit) as exit:
        parse_args(*groups, argv=words, doc="What it does.\n\n    a command")
    assert exit.value.code == 0
    return capsys.readouterr().out


def test_help_has_the_doc_every_flag_once_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--help", groups=(First, Second))
    assert "What it does.\n\n    a command" in text
    words = " ".join(text.split())
    for part in ("A rate. (default: 0.5)", "(default: 8)", "--config FILE", "--no_shuffle Turn --shuffle off."):
        assert part in words
    assert "default: None" not in text


def test_help_of_many_arguments_shows_the_usual_ones(capsys: pytest.CaptureFixture[str]) -> None:
    usual, every = shown(capsys, "--help"), shown(capsys, "--help-all")
    assert "--global_batch_size" in usual
    assert "--max_grad_norm" not in usual
    assert all(f"--{name}" in every for name in to_dict(*(each() for each in ALL)))
    assert len(usual.splitlines()) < len(every.splitlines()) / 2


def test_to_dict_reads_back(tmp_path: Path) -> None:
    flags = ["--learning_rate", "2e-4", "--freeze_text", "--fusion_layers", "1"]
    parsed = parse_args(*ALL, argv=flags)
    assert parsed[OptimizerArguments].learning_rate == parsed["learning_rate"] == 2e-4
    path = config(tmp_path, yaml.safe_dump(parsed.settings))
    assert parse_args(*ALL, argv=["--config", path]).settings == parsed.settings


def test_words_beside_the_flags_fill_the_one_that_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    given = parse_args(First, Second, argv=["a", "--limit", "2", "--verbose", "b c"], rest="name")
    first, second = given[First], given[Second]
    assert first.verbose  # a flag of yes or no takes no other word
    assert (first.name, first.learning_rate, second.limit) == ("a b c", 0.5, 2)
    for argv, rest in ((["a", "--unknown"], "name"), (["a"], "")):
        with pytest.raises(SystemExit):
            parse_args(First, Second, argv=argv, rest=rest)
        assert "unknown argument" in capsys.readouterr().err
