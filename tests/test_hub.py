"""What a push sends, and that one which fails loses nothing but the push."""

import logging
import shlex
from pathlib import Path

import pytest
from huggingface_hub.cli.hf import app
from transformers import TrainerControl, TrainerState

from mm_utils.hub import HubPusher, licence_of, repository_name
from scripts import pretrain
from tests.kit.hub import TOKEN, Hub

FILES = {
    "model.safetensors": b"final weights",
    "README.md": b"---\nlibrary_name: transformers\n---\n# Model\n",
    "dual_encoder/model.safetensors": b"dual weights",
    "config.yaml": b"output_dir: /home/jane/my run\n",
    "environment.json": b"{}",
    "skipped_images.jsonl": b'{"path": "/home/jane/1.jpg"}',
    "nonfinite_steps.jsonl": b'{"ids": ["/home/jane/1.jpg"]}',
    "half.safetensors.tmp": b"not done",
    ".lock": b"",
    "checkpoint-10/model.safetensors": b"weights of step 10",
    "checkpoint-10/optimizer.safetensors": b"moments of step 10",
    "checkpoint-15.tmp/model.safetensors": b"not done",
}
ROOT = {"README.md", "dual_encoder/model.safetensors", "model.safetensors"}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The output folder of a finished run, with files that must not be pushed."""
    for name, content in FILES.items():
        path = tmp_path / "my run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "my run"


def pusher(run_dir: Path, strategy: str = "end") -> HubPusher:
    return HubPusher(run_dir, None, strategy)


def save(hub: HubPusher, is_main: bool = True) -> None:
    state = TrainerState(is_world_process_zero=is_main)
    hub.on_save(None, state, TrainerControl(), checkpoint=hub.output_dir / "checkpoint-10")


def test_a_push_uploads_exact_bytes_and_nothing_unfinished(server: Hub, run_dir: Path) -> None:
    hub = pusher(run_dir)
    hub.on_train_begin(None, TrainerState(), TrainerControl())
    assert hub.repository == "tester/my-run"
    assert hub.push_model()
    assert set(server.repos["tester/my-run"]) == ROOT
    for path in ROOT:
        assert server.repos["tester/my-run"][path] == (run_dir / path).read_bytes()


def test_a_checkpoint_is_pushed_while_training_goes_on(server: Hub, run_dir: Path) -> None:
    save(pusher(run_dir, "checkpoint"), is_main=False)
    save(pusher(run_dir))  # at the end alone
    assert server.calls == []
    hub = pusher(run_dir, "checkpoint")
    server.may_answer.clear()
    save(hub)
    assert server.commits == [], "training must not wait for the upload"
    server.may_answer.set()
    hub.settle()
    checkpoint = {"last-checkpoint/model.safetensors", "last-checkpoint/optimizer.safetensors"}
    assert set(server.repos["tester/my-run"]) == checkpoint
    assert hub.push_model()
    assert set(server.repos["tester/my-run"]) == ROOT | checkpoint
    assert server.repos["tester/my-run"]["model.safetensors"] == b"final weights"


def test_a_run_survives_pushes_that_fail(
    server: Hub, tiny_flags: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.faults.append("upload_folder")
    flags = [*tiny_flags, "--save_steps", "1", "--max_steps", "2"]
    push = ["--push_to_hub", "--hub_model_id", "tester/run", "--hub_strategy", "checkpoint"]
    pretrain.main([*flags, *push, "--output_dir", str(tmp_path / "out")])
    assert "the push of checkpoint-1 to tester/run failed" in caplog.text
    assert server.repos["tester/run"]["model.safetensors"] == (tmp_path / "out/model.safetensors").read_bytes()


def test_a_bad_token_and_silence_are_named_and_the_printed_command_pushes_later(
    server: Hub, run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    server.faults.append("upload_folder")
    hub = pusher(run_dir)
    assert not hub.push_model()
    assert "refused for" in caplog.text  # the server quotes the token
    assert TOKEN not in caplog.text
    program, *words = shlex.split(caplog.text.partition("push it later with: ")[2].splitlines()[0])
    assert program == "hf"
    app(words, standalone_mode=False)
    assert set(server.repos["tester/my-run"]) == ROOT
    server.faults.append("create_repo")
    hub.on_train_begin(None, TrainerState(), TrainerControl())
    assert "check `hf auth whoami`" in caplog.text
    monkeypatch.setattr("mm_utils.hub._TIMEOUT", -1e3)  # less than the bytes take
    monkeypatch.setattr("mm_utils.hub._START_TIMEOUT", 0.5)
    server.may_answer.clear()
    assert not hub.push_model()
    assert "not done within" in caplog.text
    server.may_answer.set()


def test_folders_name_repositories(tmp_path: Path) -> None:
    assert [repository_name(tmp_path / name) for name in ("my run", "a..b.git", "--")] == ["my-run", "a-b", "model"]


@pytest.mark.parametrize(
    ("card", "licence"),
    [("---\nlicense: mit\n---\n", "mit"), ("no front matter", ""), ("---\nlicense: [\n---\n", ""), (None, "")],
)
def test_the_licence_of_a_start_is_that_of_its_card(card: str | None, licence: str, tmp_path: Path) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert licence_of(str(tmp_path)) == licence
