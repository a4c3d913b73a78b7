"""Dataclass default < YAML < command line; every mistake ends with one line that names the flag."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import SchedulerType

from mm_utils.arguments import arg, parse_args, to_dict, to_words
from mm_utils.model import arguments
from mm_utils.model import modeling_fusion_dual_encoder as modeling
from mm_utils.model.arguments import CLASSIFIER_INPUTS, PROJECTIONS
from mm_utils.objectives.build import TERMS
from mm_utils.objectives.terms import EmbeddingTerm
from mm_utils.training.arguments import OptimizerArguments
from mm_utils.training.optim import OPTIMIZERS
from scripts.pretrain import FLAGS as PRETRAINING


@dataclass
class First:
    learning_rate: float = arg(0.5, "A rate.")
    name: str | None = arg(None, "A name.")
    shuffle: bool = arg(True, "On by default.")
    verbose: bool = arg(False, "Off by default.")


@dataclass
class Second:
    batch_size: int = arg(8, "A size.", least=1)
    limit: int | None = arg(3, "A limit.")


def parse(*argv: str) -> tuple[First, Second]:
    given = parse_args(First, Second, argv=argv, doc="What it does.\n\n    a command")
    return given[First], given[Second]


def config(folder: Path, text: str) -> str:
    path = folder / "config file.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def ended(capsys: pytest.CaptureFixture[str], status: int, *argv: str, kinds: Any = (First, Second)) -> str:
    """What parsing these prints before it ends the program."""
    with pytest.raises(SystemExit) as exit:
        parse_args(*kinds, argv=argv, doc="What it does.\n\n    a command")
    assert exit.value.code == status
    return "".join(capsys.readouterr())


def test_command_line_beats_yaml_beats_default(tmp_path: Path) -> None:
    assert parse() == (First(0.5, None, True, False), Second(8, 3))
    path = config(tmp_path, "learning_rate: 0.1\nbatch_size: 4\nshuffle: false\nverbose: true\n")
    first, second = parse("--batch_size", "2", "--config", path)
    assert (first, second) == (First(0.1, None, False, True), Second(2, 3))
    assert parse(f"--config={path}", "--batch-size=2") == (first, second)
    assert parse("--config", path, "--shuffle", "--verbose", "false")[0] == First(0.1)
    assert parse("--no_shuffle", "--verbose")[0] == First(shuffle=False, verbose=True)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("learning_rate: 1e-3", "learning_rate", 1e-3),
        ("learning_rate: 1", "learning_rate", 1.0),
        ("name: 12", "name", "12"),
        ("name: null", "name", None),
        ("shuffle: 'no'", "shuffle", False),
        ("# nothing but a comment", "name", None),
    ],
)
def test_yaml_values_have_the_flags_type(tmp_path: Path, line: str, name: str, value: Any) -> None:
    found = getattr(parse("--config", config(tmp_path, line))[0], name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--learning_rat 1", "unknown argument --learning_rat. Did you mean '--learning_rate'?"),
        ("stray", "unknown argument stray. See --help."),
        ("--batch_size two", "argument --batch_size/--batch-size: invalid int value: 'two'"),
        ("--batch_size 0", "--batch_size is 0; give at least 1."),
        ("--config a.yaml --config=b.yaml", "--config is a.yaml and b.yaml; one file is read."),
        ("--config=", "--config is ; that is no file"),
        ("--name=", "--name is empty. Give a value, or leave the flag out."),
        ("--config nowhere.yaml", "--config is nowhere.yaml; there is no such file"),
    ],
)
def test_mistakes_on_the_command_line(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(capsys, 2, *argv.split()).partition("error: ")[2].startswith(message)


def test_flags_of_other_trainers_are_answered_with_ours(capsys: pytest.CaptureFixture[str]) -> None:
    changelog = Path("CHANGELOG.md").read_text(encoding="utf-8")
    for words, answer in {
        "batch_size batch-size per_device_train_batch_size": "'--global_batch_size' here",
        "gradient_accumulation_steps accum_freq": "'--micro_batch_size' here",
        "workers num_workers": "'--dataloader_num_workers' here",
        "epochs": "'--num_train_epochs' here",
        "lock-image": "'--freeze_vision' here",
        "pretrained": "'--model_name_or_path' here",
        "lr": "'--learning_rate' here",
        "patience": "'--early_stopping_patience' here",
        "resume": "'--resume_from_checkpoint' here",
        "train-data": "'--train_file' here",
        "bf16 fp16 precision": "accelerate launch --mixed_precision",
        "validation_fraction": "scripts/prepare_data.py has it",
        "ema_decay run_name save_total_limit adam_beta2": "It has left; CHANGELOG.md",
    }.items():
        for word in words.split():
            assert answer in ended(capsys, 2, f"--{word}=1", kinds=PRETRAINING), word
            assert "CHANGELOG" not in answer or word in changelog


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnin_rate: 1", "line 1: unknown key 'learnin_rate'. Did you mean '--learning_rate'?"),
        ("config: other.yaml", "unknown key 'config'"),
        ("batch_size: two", "line 1: argument --batch_size/--batch-size: invalid int value: 'two'"),
        ("batch_size:", "batch_size is left empty; give a value, or delete the line"),
        ("learning_rate: {a: 1}", "learning-rate: invalid value: {'a': 1}"),
        ("shuffle: maybe", "--shuffle: Truthy value expected: got maybe"),
        ("{name: 1, name: 2}", "line 1, has the key 'name' again, after line 1"),
        ("- 1\n- 2", "holds no mapping; give flat 'flag: value' lines"),
        ("a: [1", "is not valid YAML in UTF-8: "),
    ],
)
def test_mistakes_in_yaml(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, text)
    line = ended(capsys, 2, "--config", path).partition("error: ")[2]
    assert message in line
    assert line.startswith(path)


def test_flags_offer_what_there_is() -> None:
    choices = {field.name: field.metadata.get("choices") for field in fields(OptimizerArguments)}
    assert (
        choices["optim"] == list(OPTIMIZERS)[: len(choices["optim"])]
    )  # an example of the docs may have added another
    assert len(choices["optim"]) == 4
    assert {*choices["lr_scheduler_type"]} == {*SchedulerType} - {"reduce_lr_on_plateau", "greedy"}
    assert tuple(TERMS) == arguments.TERMS
    assert tuple(name for name, term in TERMS.items() if issubclass(term, EmbeddingTerm)) == arguments.COMPARING
    assert (PROJECTIONS, CLASSIFIER_INPUTS) == (modeling.PROJECTIONS, modeling.CLASSIFIER_INPUTS)


def test_words_and_files_are_parsed_back_to_the_same_values(tmp_path: Path) -> None:
    parsed = parse("--learning_rate", "0.25", "--name", "two words", "--no_shuffle")
    words = to_words(First, to_dict(*parsed))
    assert words == ["--learning_rate", "0.25", "--name", "two words", "--no_shuffle"]
    assert parse(*words) == parsed
    assert to_words(First, to_dict(*parsed), leave_out=["name", "shuffle", "learning_rate"]) == []
    given = parse_args(*PRETRAINING, argv=["--learning_rate", "2e-4", "--freeze_text", "--fusion_layers", "1"])
    assert given[OptimizerArguments].learning_rate == given["learning_rate"] == 2e-4
    path = config(tmp_path, yaml.safe_dump(given.settings))
    assert parse_args(*PRETRAINING, argv=["--config", path]).settings == given.settings


def test_help_has_the_doc_every_flag_and_its_default_and_of_many_the_usual_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = ended(capsys, 0, "--help")
    assert "What it does.\n\n    a command" in text
    words = " ".join(text.split())
    assert all(part in words for part in ("A rate. (default: 0.5)", "(default: 8)", "--config FILE", "--no_shuffle"))
    usual, every = (ended(capsys, 0, word, kinds=PRETRAINING) for word in ("--help", "--help-all"))
    assert "--global_batch_size" in usual
    assert "--max_grad_norm" not in usual
    assert all(f"--{name}" in every for name in parse_args(*PRETRAINING, argv=[]).settings)
    assert len(usual.splitlines()) < len(every.splitlines()) / 2


def test_words_beside_the_flags_fill_the_one_that_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    given = parse_args(First, Second, argv=["a", "--limit", "2", "--verbose", "b c", "-hat"], rest="name")
    first = given[First]
    second = given[Second]
    assert first.verbose  # a flag of yes or no takes no other word
    assert (first.name, first.learning_rate, second.limit) == ("a b c -hat", 0.5, 2)
    for flag in ("--unknown", "-limit"):
        with pytest.raises(SystemExit):
            parse_args(First, Second, argv=["a", flag], rest="name")
        assert f"unknown argument {flag}" in capsys.readouterr().err
