"""The Hub fails during a run: the run loses nothing and ends in time."""

import logging
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mm_utils.extras.hub.pusher import STAGING
from scripts import pretrain
from tests.kit.corpora import write_corpus
from tests.kit.hub import CUT, HubServer, MadePushers

ROOT = Path(__file__).parents[2]
FLAGS = ("--push_to_hub", "--hub_model_id", "tester/run", "--hub_strategy", "all_checkpoints")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The files of a finished run that a push needs."""
    for name in ("model.safetensors", "checkpoint-5/model.safetensors", "checkpoint-5/optimizer.safetensors"):
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 1000)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a run on few pairs with a push at every save."""
    pairs = write_corpus(tmp_path_factory.mktemp("few"))
    small = ("--image_size", "32", "--global_batch_size", "8", "--rerank_top_k", "4", "--fusion_layers", "1")
    small += ("--vision_config", "tiny", "--text_config", "tiny")
    return ["--train_file", str(pairs), *small, "--dataloader_num_workers", "0", *FLAGS]


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 403, 429, 500, CUT])
def test_training_goes_on_and_the_end_pushes_what_is_left(
    server: HubServer,
    flags: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    status: int,
) -> None:
    server.fail("/(preupload|commit)/", status)
    saving = ("--save_steps", "1", "--save_total_limit", "2", "--logging_steps", "1")
    pretrain.main([*flags, *saving, "--max_steps", "4", "--output_dir", str(tmp_path)])
    pushed = server.repos["tester/run"]
    assert pushed["model.safetensors"] == (tmp_path / "model.safetensors").read_bytes()
    assert not (tmp_path / STAGING).exists()
    for step in (3, 4):
        assert f"checkpoint-{step}/optimizer.safetensors" in pushed
    for step in (1, 2):
        assert not (tmp_path / f"checkpoint-{step}").exists(), "it has rotated away"
        in_time = f"checkpoint-{step}/optimizer.safetensors" in pushed
        assert in_time or f"checkpoint-{step}" in named_as_lost(caplog)


def named_as_lost(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(text for text in caplog.messages if "not on the Hub" in text)


@pytest.mark.slow
def test_a_hub_that_never_answers_lets_the_job_end(
    server: HubServer,
    run_dir: Path,
) -> None:
    """The interpreter must end too, although a client waits in a thread."""
    server.may_answer.clear()
    script = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from transformers import TrainerControl, TrainerState
        from mm_utils.extras.hub.pusher import HubArguments, HubPusher

        args = HubArguments(push_to_hub=True, hub_strategy="all_checkpoints")
        hub = HubPusher(args, sys.argv[1], timeout=3.0)
        event = None, TrainerState(), TrainerControl()
        checkpoint = Path(sys.argv[1], "checkpoint-5")
        began = time.monotonic()
        hub.on_train_begin(*event)
        hub.on_save(*event, checkpoint=checkpoint)
        assert not hub.push_model()
        assert time.monotonic() - began < 40
        hub.on_save(*event, checkpoint=checkpoint)
    """)
    process = [sys.executable, "-c", script, str(run_dir)]
    done = subprocess.run(process, capture_output=True, text=True, timeout=180, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "hf upload" in done.stderr
    server.may_answer.set()


def test_an_upload_that_stalls_times_out(
    server: HubServer,
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
    pusher: MadePushers,
) -> None:
    server.upload_may_end.clear()
    hub = pusher(run_dir, timeout=5.0, hub_model_id="tester/run")
    began = time.monotonic()
    assert not hub.push_model()
    assert time.monotonic() - began < 60
    assert "not done within 5 seconds" in caplog.text
    server.upload_may_end.set()
    assert hub.push_model()
    assert server.repos["tester/run"]["model.safetensors"] == (run_dir / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_hub_that_is_away_all_night_gets_everything_from_the_resumed_run(
    server: HubServer,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
    flags = [*flags, "--save_steps", "2", "--output_dir", str(tmp_path)]
    caplog.set_level(logging.WARNING)
    pretrain.main([*flags, "--max_steps", "2"])
    assert "hf upload" in caplog.text
    assert (tmp_path / "model.safetensors").is_file()
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    pretrain.main([*flags, "--max_steps", "4", "--resume_from_checkpoint", "latest"])
    assert {"checkpoint-2/run.json", "checkpoint-4/run.json", "model.safetensors"} <= set(server.repos["tester/run"])
