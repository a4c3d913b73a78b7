"""A run leaves no secret behind, and no terminal, spreadsheet or browser obeys text that others wrote."""

import csv
import io
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import LoggerType
from hypothesis import given
from hypothesis import strategies as st

from mm_utils.arguments import arg, parse_args
from mm_utils.data.faults import Fault, excerpt
from mm_utils.finetuning.evaluator import report_classes
from mm_utils.run.start import set_up_logging
from mm_utils.text import markdown_text, no_formula, one_line, publishable, redact, shortened, without_secrets
from scripts import pretrain
from tests.kit.corpora import write_corpus
from tests.kit.hub import TOKEN, FakeTracker, Hub
from tests.kit.stock_folders import write_stock

PASSWORD = "pw-S3cr3tCanary-1"
KEY = "0123456789abcdefS3cr3tCanary2"
TYPED = "S3cr3tCanary3"
CANARIES = (TOKEN, PASSWORD, KEY, TYPED)


@contextmanager
def own_log() -> Iterator[io.StringIO]:
    """Catch what a script logs to stderr with its own handler, without those of pytest."""
    root = logging.getLogger()
    shown = io.StringIO()
    level = root.level
    hook = sys.excepthook
    root.handlers = []
    try:
        with redirect_stderr(shown):
            yield shown
    finally:
        root.setLevel(level)
        sys.excepthook = hook


def leaks(folder: Path, *texts: str) -> list[str]:
    """Return the places of canaries: bytes of any file, hidden ones and names included, and the texts."""
    places = {f"text {at}": text.encode() for at, text in enumerate(texts)}
    for path in folder.rglob("*"):
        places[str(path)] = str(path).encode() + (path.read_bytes() if path.is_file() else b"")
    return [place for place, content in places.items() if any(canary.encode() in content for canary in CANARIES)]


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put secrets into the environment; `server` sets HF_TOKEN."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("DB_PASSWORD", PASSWORD)


@pytest.mark.slow
def test_a_run_leaves_no_secret_in_any_byte(
    server: Hub,
    canaries: None,
    tiny_flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("DB_PASSWORD")  # only its place in the address shows that it is a secret
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", FakeTracker)
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType("wandb")])
    monkeypatch.setattr(FakeTracker, "calls", [])
    monkeypatch.setattr(FakeTracker, "faults", {"log": f"401 for https://api:{KEY}@wandb.example"})
    server.faults += ["upload_folder"] * 100  # quotes the token
    monkeypatch.chdir(tmp_path)
    address = f"https://someone:{PASSWORD}@example.org/pairs.jsonl"  # to the file system, a path like any other
    write_corpus(Path(address).parent)
    Path("given.yaml").write_text(yaml.safe_dump({"hub_model_id": "tester/run", "train_file": address}))
    flags = [*tiny_flags[2:], "--max_steps", "2", "--save_steps", "1", "--push_to_hub", "--hub_strategy", "checkpoint"]
    words = [*flags, "--config", "given.yaml", "--report_to", "wandb", "--output_dir", "out"]
    monkeypatch.setattr(sys, "argv", ["scripts/pretrain.py", *words, "--train_file", address, "--hub_token", TYPED])
    with own_log() as log:
        pretrain.main(words)
    captured = capfd.readouterr()
    assert "hf upload" in log.getvalue()
    assert (tmp_path / "out/README.md").read_text().count("***") >= 2
    assert leaks(tmp_path / "out", log.getvalue(), captured.out, captured.err, repr(FakeTracker.calls)) == []


def test_a_pushed_run_names_no_folder_of_this_machine(server: Hub, tiny_flags: list[str], tmp_path: Path) -> None:
    clip = write_stock(tmp_path / "clip", "clip")
    towers = ["--vision_model_name_or_path", clip, "--text_model_name_or_path", clip, "--save_steps", "2"]
    push = ["--eval_steps", "2", "--push_to_hub", "--hub_strategy", "checkpoint", "--hub_model_id", "tester/run"]
    given = [*tiny_flags[:2], *tiny_flags[4:], *towers, *push]
    data = ["--train_file", str(write_corpus(tmp_path / "data")), "--output_dir", str(tmp_path / "out")]
    pretrain.main([*given, *data])
    pushed = server.repos["tester/run"]
    assert {"README.md", "config.json", "dual_encoder/config.json", "last-checkpoint/trainer_state.json"} <= set(
        pushed
    )
    assert [name for name, content in pushed.items() if str(tmp_path).encode() in content] == []


SECRET_WORDS = [
    *(["--hub_token", TYPED], [f"--wandb_api_key={TYPED}"], [f"--lr=https://me:{TYPED}@example.org"]),
    *(["--learning_rate", TOKEN], ["--config", "secret.yaml"]),
]


@pytest.mark.parametrize("words", SECRET_WORDS)
def test_an_argument_error_is_named_without_the_secret(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @dataclass
    class Arguments:
        learning_rate: float = arg(1.0, "Rate.")

    monkeypatch.chdir(tmp_path)
    Path("secret.yaml").write_text(f"learning_rate: {TOKEN}\n")
    with pytest.raises(SystemExit):
        parse_args(Arguments, argv=words)
    shown = capsys.readouterr().err
    assert "error:" in shown
    assert TYPED not in shown
    assert TOKEN not in shown


def test_tracebacks_and_uncaught_errors_hide_secrets(canaries: None) -> None:
    with own_log() as log:
        set_up_logging()
        try:
            raise ConnectionError(f"https://someone:{PASSWORD}@example.org refused {KEY}")
        except ConnectionError as error:
            logging.getLogger("mm_utils.x").exception("it failed")
            sys.excepthook(type(error), error, error.__traceback__)
    assert log.getvalue().count("ConnectionError: https://***@example.org refused ***") == 2
    assert not any(canary in log.getvalue() for canary in CANARIES)


def test_foreign_text_cannot_imitate_a_log_message_or_move_the_cursor() -> None:
    caption = "a cat\n12:00:00 ERROR the disk is on fire\r\x1b[2J\x1b]0;title\x07\u202e gpj.tac \ud800 \x85 é 猫"
    with own_log() as log:
        set_up_logging()
        logging.getLogger("mm_utils.x").warning("Skipped a pair: %s", caption)
    shown = log.getvalue()
    assert [line for line in shown.splitlines() if re.match(r"\d\d:\d\d:\d\d ", line)] == [shown.splitlines()[0]]
    assert {letter for letter in shown if not letter.isascii()} == {"é", "猫"}
    assert "\x1b" not in shown
    assert r"\x1b[2J" in shown
    with own_log() as log:
        set_up_logging()
        logging.getLogger("mm_utils.x").warning("the column %s", "token-" * 100_000)
    assert len(log.getvalue()) < 5000


def test_a_class_named_like_a_formula_is_text_in_a_table(tmp_path: Path) -> None:
    for name in ("=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1", " =1"):
        report_classes(torch.tensor([[0, 0], [1, 0]]), [name, "cat"], tmp_path)
        with open(tmp_path / "classes.csv", newline="", encoding="utf-8") as file:
            assert [row[0] for row in csv.reader(file)][1:] == [f"'{name}", "cat"]
    assert no_formula(-1.5) == -1.5


SECRET = "https://usr:PassW0rdCanary@host.example/x"
DOORS = {
    "a fault": lambda text: Fault("image_missing", text).detail,
    "an excerpt": excerpt,
    "a shortened name": shortened,
    "an error": lambda text: one_line(ValueError(text)),
    "a cell": markdown_text,
    "what is published": publishable,
    "arguments": lambda text: str(without_secrets({"a": {"b": [text]}}, publishable)),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_secret_is_hidden_before_its_text_is_cut(door: str) -> None:
    """Wherever a cut falls, inside of the secret too."""
    for before in (*range(0, 320, 3), *range(950, 1010, 3)):
        assert "PassW" not in DOORS[door]("x" * before + " " + SECRET + " and more" * 200)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{cwd}/data/pairs.jsonl is read", "data/pairs.jsonl is read"),
        ("--train_file /mnt/disk of Jane/x", "--train_file …/disk of Jane/x"),
        ("'/mnt/jane/a.csv', /srv/b/c", "'…/a.csv', …/c"),
        ("file:///mnt/jane/a.csv", "…/a.csv"),
        ("~/a/b, a/b/c, ./a/b and 1/2 of the rows/s", "~/a/b, a/b/c, ./a/b and 1/2 of the rows/s"),
        ("https://example.org/a/b?c=/d/e", "https://example.org/a/b?c=…/e"),
        (os.path.expanduser("~/jane/a.csv"), "~/jane/a.csv"),
    ],
)
def test_what_is_published_names_no_folder_of_this_machine(text: str, shown: str) -> None:
    assert publishable(text.replace("{cwd}", os.getcwd())) == shown


NOTATIONS = [
    "token SECRET",
    "--hub_token SECRET --lr 3",
    "--hub_token \\\n  SECRET \\\n  --lr 3",
    "'--password=two SECRET words' --lr 3",
    shlex.join(["--password=it's SECRET"]),
    '--password "SECRET',
    "AWS_SECRET_ACCESS_KEY=SECRET python train.py",
    "hub_token: SECRET with spaces\nlr: 3",
    '{"token": "SECRET", "lr": 3}',
    "dataset@hf_jwt_SECRET.SECRET-SECRET_SECRET",
    "https:/me:SECRET@example.org/data.tar",
    "https://bucket.example.org/x.tar?X-Amz-Signature=SECRET&lr=3",
    "curl -H 'Authorization: Basic SECRET' example.org",
    "rsync me:SECRET@example.org/data.tar .",
]


@pytest.mark.parametrize("text", NOTATIONS)
def test_redact_removes_secrets_in_any_notation(text: str) -> None:
    secret = "hf_" + "Ab3" * 12 if text.startswith("token") else "S3cr3tValue"
    planted = redact(text.replace("SECRET", secret).replace("AWS_S3cr3tValue", "AWS_SECRET"))
    assert secret not in planted
    assert "***" in planted
    assert redact(planted) == planted


TOKENS = """
ghp_16C7e42F292c6912E7710c838347Ae178B4a github_pat_11ABCDEFG0aBcDeFgHiJkL_mNoPqRsTuVwXyZ
sk-proj-abcDEF1234567890abcDEF sk-ant-api03-abcDEF1234567890 AKIAIOSFODNN7EXAMPLE
api_org_abcdefghijklmnopqrstuvwxyzABCDEFGH AIzaSyA-1234567890abcdefghijklmnopqrstu
"""


@pytest.mark.parametrize("secret", TOKENS.split())
def test_redact_knows_the_tokens_of_common_services(secret: str) -> None:
    shown = redact(f"the server refused {secret}, with status 401").replace(",", "")
    assert shown == "the server refused *** with status 401"


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "GITLAB_PAT", "DB_PW", "DB_PASS", "HF_TOKEN"])
def test_redact_removes_values_of_secret_environment_variables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0123456789abcdef")
    assert redact("seen: 0123456789abcdef.") == "seen: ***."


HARMLESS = [
    "accelerate launch scripts/pretrain.py --text_model_name bert-base --tokenizer_name bert --num_tokens 32",
    "--push_to_hub --hub_model_id me/model --learning_rate 1e-3",
    "https://huggingface.co/me/hf_model_name",
    "--use_token --learning_rate 1e-3",
    "me@example.org",
    "12:00:00 the image is in a/b:c.png, and 3 risk-averse masks of sk-learn",
    "report the key of a row: 3 passes, patience 4",
    "the password is wrong, and HF_TOKEN is not set; http://host:8080/a@b",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_redact_keeps_everything_else(text: str) -> None:
    assert redact(text) == text


def test_an_error_is_one_short_line_without_secrets() -> None:
    error = ValueError(f"the file\nhttps://me:{PASSWORD}@example.org/x\x1b cannot be read.")
    assert one_line(error) == r"ValueError: the file https://***@example.org/x\x1b cannot be read"
    assert one_line(ValueError("word " * 100), limit=20) == "ValueError: word wo…"
    assert (shortened("abc", 3), shortened("abcd", 3)) == ("abc", "ab…")
    wrapper = RuntimeError("a thread failed")
    wrapper.__cause__ = OSError("No space left")
    assert one_line(wrapper) == "OSError: No space left"


@given(st.text(max_size=200))
def test_markdown_text_is_one_short_line_without_active_signs(text: str) -> None:
    found = markdown_text(text, 50)
    assert found.isprintable()
    assert not re.search(r"[<>]|(?<!\\)(?:\\\\)*[`*\[\]|~#$]", found)
    assert len(re.sub(r"\\(?=[^\w\s])|&(amp|lt|gt);", "", found)) <= 50
