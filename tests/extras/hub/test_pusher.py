import errno
import hashlib
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState

from mm_utils.arguments import parse_args
from mm_utils.extras.hub.pusher import STAGING, HubArguments, HubPusher
from mm_utils.run.doors import Doors
from mm_utils.run.flags import PRETRAINING
from tests.kit.hub import CUT, TOKEN, HubServer, MadePushers, wait_for_push

OTHER_TOKEN = "hf_anotherTokenOfAnotherPerson0123456"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The output folder of a finished run, with files that must not be pushed."""
    output_dir = tmp_path / "my run"
    for name, content in {
        "model.safetensors": b"final weights",
        "config.json": b"{}",
        "README.md": b"---\nlibrary_name: transformers\n---\n# Model\n",
        "dual_encoder/model.safetensors": b"dual weights",
        "metrics.jsonl": b'{"step": 1}\n',
        "config.yaml": b"output_dir: /home/jane/my run\n",
        "environment.json": b"[]",
        "half.safetensors.tmp": b"not done",
        ".lock": b"",
        "checkpoint-5/model.safetensors": b"weights of step 5",
        "checkpoint-5/optimizer.safetensors": b"moments of step 5",
        "checkpoint-5/config.json": b"{}",
        "checkpoint-10/model.safetensors": b"weights of step 10",
        "checkpoint-10/config.json": b"{}",
        "checkpoint-10/tokenizer.json": b"{}",
        "checkpoint-10/optimizer.safetensors": b"moments of step 10",
        "checkpoint-10/ema.safetensors": b"average of step 10",
        "checkpoint-10/trainer_state.json": b"{}",
        "checkpoint-10/run.json": b"{}",
        "checkpoint-10/manifest.json": b"{}",
        "checkpoint-15.tmp/model.safetensors": b"not done",
    }.items():
        path = output_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return output_dir


ROOT = {"README.md", "config.json", "dual_encoder/model.safetensors", "metrics.jsonl", "model.safetensors"}
MODEL_10 = {"model.safetensors", "config.json", "tokenizer.json"}
CHECKPOINT_10 = MODEL_10 | {
    *("optimizer.safetensors", "ema.safetensors", "trainer_state.json", "run.json", "manifest.json"),
}


def begin(hub: HubPusher, is_main: bool = True) -> None:
    hub.on_train_begin(None, TrainerState(is_world_process_zero=is_main), TrainerControl())


def save(hub: HubPusher, step: int, is_main: bool = True) -> None:
    state = TrainerState(is_world_process_zero=is_main)
    hub.on_save(None, state, TrainerControl(), checkpoint=hub.output_dir / f"checkpoint-{step}")


def test_a_push_uploads_exact_bytes_and_nothing_unfinished(
    server: HubServer, run_dir: Path, caplog: pytest.LogCaptureFixture, pusher: MadePushers
) -> None:
    hub = pusher(run_dir)
    begin(hub)
    assert hub.repo_id == "tester/my-run"
    assert hub.push_model()
    assert set(server.repos["tester/my-run"]) == ROOT
    for path in ROOT:
        assert server.sha256("tester/my-run", path) == hashlib.sha256((run_dir / path).read_bytes()).hexdigest()
    assert server.commits == ["End of training"]
    assert not server.private["tester/my-run"]
    assert not (run_dir / STAGING).exists()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_nothing_is_sent_unless_asked(server: HubServer, run_dir: Path, pusher: MadePushers) -> None:
    doors = Doors("pretrain")
    doors.open(parse_args(*PRETRAINING, *doors.arguments, argv=[]))
    assert HubPusher not in map(type, doors.callbacks)
    other_rank = pusher(run_dir, hub_strategy="every_save")
    begin(other_rank, is_main=False)
    save(other_rank, 10, is_main=False)
    save(pusher(run_dir, hub_strategy="end"), 10)
    assert server.requests == []


def test_a_repository_of_an_organisation_is_private_on_request(
    server: HubServer, run_dir: Path, pusher: MadePushers
) -> None:
    hub = pusher(run_dir, hub_model_id="team/retriever", hub_private_repo=True)
    assert hub.push_model()
    assert server.private["team/retriever"]
    assert "--private" in hub.command()


def test_a_bad_token_is_reported_at_the_start_and_not_tried_again_and_again(
    server: HubServer, run_dir: Path, caplog: pytest.LogCaptureFixture, pusher: MadePushers
) -> None:
    server.token = OTHER_TOKEN
    hub = pusher(run_dir)
    begin(hub)
    assert len(caplog.records) == 1
    assert "hf auth whoami" in caplog.text
    caplog.clear()
    assert not hub.push_model()
    assert "401" in caplog.text
    assert hub.command() in caplog.text
    assert (run_dir / "model.safetensors").read_bytes() == b"final weights"
    assert server.requests.count("POST /api/repos/create") == 2


def test_the_printed_command_pushes_later(server: HubServer, run_dir: Path, pusher: MadePushers) -> None:
    (run_dir / STAGING).mkdir()
    (run_dir / STAGING / "model.safetensors").write_bytes(b"left behind")
    program, *words = shlex.split(pusher(run_dir, hub_private_repo=True).command())
    assert program == "hf"
    client = [sys.executable, "-m", "huggingface_hub.cli.hf", *words]
    subprocess.run(client, check=True, capture_output=True, timeout=60)
    assert set(server.repos["tester/my-run"]) == ROOT
    assert server.private["tester/my-run"]


@pytest.mark.parametrize(
    ("path", "status"),
    [("/api/repos/create", 500), ("/preupload/", 503), ("/storage/", CUT), ("/commit/", 429)],
)
def test_a_server_error_is_retried(
    server: HubServer, run_dir: Path, path: str, status: int, pusher: MadePushers
) -> None:
    server.fail(path, status)
    assert pusher(run_dir).push_model()
    assert server.faults == []
    assert set(server.repos["tester/my-run"]) == ROOT


def test_a_lasting_server_error_ends_after_three_tries(
    server: HubServer, run_dir: Path, caplog: pytest.LogCaptureFixture, pusher: MadePushers
) -> None:
    server.fail("/commit/", 503, times=10)
    assert not pusher(run_dir).push_model()
    assert len(server.faults) == 7
    assert "hf upload tester/my-run" in caplog.text


@pytest.mark.parametrize("variable", ["HF_ENDPOINT", "HF_HUB_OFFLINE"])
def test_without_a_connection_the_command_for_later_is_named(
    server: HubServer,
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    pusher: MadePushers,
    variable: str,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv(
            variable, "1" if variable == "HF_HUB_OFFLINE" else f"http://127.0.0.1:{free.getsockname()[1]}"
        )
    hub = pusher(run_dir)
    begin(hub)
    assert not hub.push_model()
    assert "hf upload" in caplog.text
    assert variable == "HF_ENDPOINT" or "HF_HUB_OFFLINE" in caplog.text
    assert server.requests == []


def test_every_save_pushes_the_model_of_the_checkpoint_without_its_resume_state(
    server: HubServer, run_dir: Path, pusher: MadePushers
) -> None:
    hub = pusher(run_dir, hub_strategy="every_save")
    save(hub, 10)
    wait_for_push(hub)
    assert set(server.repos["tester/my-run"]) == MODEL_10
    assert server.repos["tester/my-run"]["model.safetensors"] == b"weights of step 10"
    assert (run_dir / "model.safetensors").read_bytes() == b"final weights"
    assert server.commits == ["Step 10"]


def test_last_checkpoint_is_replaced_as_a_whole(server: HubServer, run_dir: Path, pusher: MadePushers) -> None:
    hub = pusher(run_dir, hub_strategy="checkpoint")
    save(hub, 10)
    wait_for_push(hub)
    files = server.repos["tester/my-run"]
    assert files["last-checkpoint/optimizer.safetensors"] == b"moments of step 10"
    assert set(files) == MODEL_10 | {f"last-checkpoint/{name}" for name in CHECKPOINT_10}
    save(hub, 5)
    wait_for_push(hub)
    last = {path for path in server.repos["tester/my-run"] if path.startswith("last-checkpoint/")}
    names = ("model.safetensors", "optimizer.safetensors", "config.json")
    assert last == {f"last-checkpoint/{name}" for name in names}


def test_the_final_push_brings_checkpoints_that_are_missing(
    server: HubServer, run_dir: Path, pusher: MadePushers
) -> None:
    assert pusher(run_dir, hub_strategy="all_checkpoints").push_model()
    folders = {path.split("/")[0] for path in set(server.repos["tester/my-run"]) - ROOT}
    assert folders == {"checkpoint-5", "checkpoint-10"}
    assert pusher(run_dir, hub_strategy="checkpoint", hub_model_id="b").push_model()
    assert server.repos["tester/b"]["last-checkpoint/model.safetensors"] == b"weights of step 10"


@pytest.mark.parametrize("links", [True, False])
def test_a_push_in_progress_survives_rotation_and_training_goes_on(
    server: HubServer, run_dir: Path, monkeypatch: pytest.MonkeyPatch, pusher: MadePushers, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: raise_os_error(errno.EPERM))
    server.upload_may_end.clear()
    hub = pusher(run_dir, hub_strategy="all_checkpoints")
    shutil.move(run_dir / "checkpoint-10", run_dir / "later")
    save(hub, 5)
    assert server.upload_began.wait(60)
    shutil.rmtree(run_dir / "checkpoint-5")
    shutil.move(run_dir / "later", run_dir / "checkpoint-10")
    save(hub, 10)
    assert server.commits == [], "training must not wait for the upload"
    server.upload_may_end.set()
    assert hub.push_model()
    assert server.commits == ["Step 5", "End of training"]
    files = server.repos["tester/my-run"]
    assert files["checkpoint-5/optimizer.safetensors"] == b"moments of step 5"
    assert files["checkpoint-10/optimizer.safetensors"] == b"moments of step 10"
    assert files["model.safetensors"] == b"final weights"


@pytest.mark.parametrize("rotated", [False, True])
def test_a_failed_push_is_tried_again_with_the_next_save(
    server: HubServer, run_dir: Path, caplog: pytest.LogCaptureFixture, pusher: MadePushers, rotated: bool
) -> None:
    shutil.move(run_dir / "checkpoint-10", run_dir / "later")
    server.fail("/preupload/", 403)
    hub = pusher(run_dir, hub_strategy="all_checkpoints")
    save(hub, 5)
    wait_for_push(hub)
    assert "the push of checkpoint-5 to tester/my-run failed" in caplog.text
    if rotated:
        shutil.rmtree(run_dir / "checkpoint-5")
    shutil.move(run_dir / "later", run_dir / "checkpoint-10")
    save(hub, 10)
    wait_for_push(hub)
    files = server.repos["tester/my-run"]
    assert files["model.safetensors"] == b"weights of step 10"
    assert "checkpoint-10/optimizer.safetensors" in files
    assert ("checkpoint-5/optimizer.safetensors" in files) is not rotated
    assert ("not on the Hub: checkpoint-5" in caplog.text) is rotated
    caplog.clear()
    assert hub.push_model()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def raise_os_error(number: int) -> None:
    raise OSError(number, os.strerror(number))


def test_a_full_disk_is_a_failed_push(
    server: HubServer,
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    pusher: MadePushers,
) -> None:
    monkeypatch.setattr(os, "link", lambda *_: raise_os_error(errno.ENOSPC))
    monkeypatch.setattr(shutil, "copy2", lambda *_: raise_os_error(errno.ENOSPC))
    hub = pusher(run_dir, hub_strategy="every_save")
    save(hub, 10)
    wait_for_push(hub)
    assert "checkpoint-10" in caplog.text
    assert not hub.push_model()
    assert caplog.text.count("No space left") >= 2
    assert not (run_dir / STAGING).exists()


@pytest.mark.slow
def test_a_run_killed_during_a_push_ends_its_client_and_the_next_run_pushes(
    server: HubServer, run_dir: Path, pusher: MadePushers
) -> None:
    (run_dir / "model.safetensors").write_bytes(os.urandom(1 << 24))  # more than the sockets buffer
    server.upload_may_end.clear()
    script = (
        "import sys; from mm_utils.extras.hub.pusher import HubArguments, HubPusher; "
        "HubPusher(HubArguments(push_to_hub=True), sys.argv[1]).push_model()"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(run_dir)], cwd=Path(__file__).parents[2])
    try:
        assert server.upload_began.wait(120)
        [client] = children_of(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    late = time.monotonic() + 60
    while is_running(client):
        assert time.monotonic() < late
        time.sleep(0.02)
    server.upload_may_end.set()
    assert server.repos == {"tester/my-run": {}}
    assert (run_dir / STAGING).exists()
    hub = pusher(run_dir)
    begin(hub)
    assert not (run_dir / STAGING).exists()
    assert hub.push_model()
    digest = hashlib.sha256((run_dir / "model.safetensors").read_bytes()).hexdigest()
    assert server.sha256("tester/my-run", "model.safetensors") == digest
    assert set(server.repos["tester/my-run"]) == ROOT


def children_of(parent: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listed.stdout.split()]


def is_running(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


@pytest.mark.parametrize("planted", [None, 401])
def test_the_token_is_in_no_log_and_no_pushed_file(
    server: HubServer, run_dir: Path, caplog: pytest.LogCaptureFixture, planted: int | None, pusher: MadePushers
) -> None:
    caplog.set_level(logging.DEBUG)
    if planted is not None:
        server.fail("/commit/", planted, times=10)
    hub = pusher(run_dir)
    begin(hub)
    assert hub.push_model() is (planted is None)
    assert caplog.records
    assert TOKEN not in caplog.text
    assert all(TOKEN.encode() not in content for files in server.repos.values() for content in files.values())


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="--hub_strategy is 'never'; unknown"):
        HubArguments(hub_strategy="never")
    with pytest.raises(ValueError, match="--hub_model_id is 'a/b/c'"):
        HubArguments(hub_model_id="a/b/c")


@pytest.mark.parametrize(
    ("folder", "name"), [("run été 3", "run-t-3"), ("..x--y.", "x-y"), ("模型", "model"), ("a" * 200, "a" * 96)]
)
def test_the_repository_is_named_after_the_folder(tmp_path: Path, folder: str, name: str) -> None:
    assert HubPusher(HubArguments(), tmp_path / folder).repo_id == name
    HubArguments(hub_model_id=name)
