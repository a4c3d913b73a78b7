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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from mm_utils import spool
from mm_utils.hub import HubArguments, HubPusher
from tests.hub_server import CUT, HubServer, serve

TOKEN = "hf_abcDEFghiJKLmnoPQRstuVWXyz0123456789"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The stand-in, with clients pointed at it, here, where HF_HUB_OFFLINE=1 was read at the import, and in new processes."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serve(TOKEN) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """What a run leaves behind, secrets of the shell not included."""
    output_dir = tmp_path / "my run"
    for name, content in {
        "model.safetensors": b"final weights",
        "config.json": b"{}",
        "README.md": b"---\nlibrary_name: transformers\n---\n# Model\n",
        "dual_encoder/model.safetensors": b"dual weights",
        "metrics.jsonl": b'{"step": 1}\n',
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
        "tracker.json": b"{}",
        "checkpoint-15.tmp/model.safetensors": b"not done",
    }.items():
        path = output_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return output_dir


ROOT = {"README.md", "config.json", "dual_encoder/model.safetensors", "metrics.jsonl", "model.safetensors"}
CHECKPOINT_10 = {
    *("model.safetensors", "config.json", "tokenizer.json", "optimizer.safetensors", "ema.safetensors"),
    *("trainer_state.json", "run.json", "manifest.json"),
}
# The model of a checkpoint comes with its tokenizer, without the stock encoder that an earlier run left.
UNDER_WAY = ROOT - {"dual_encoder/model.safetensors"} | {"tokenizer.json"}


MadePushers = Callable[..., HubPusher]


@pytest.fixture
def pusher() -> Iterator[MadePushers]:
    """Makes pushers of an output folder, whose threads end with the test."""
    made = []

    def make(output_dir: Path, pause: float = 60.0, patience: float = 60.0, **arguments: Any) -> HubPusher:
        args = HubArguments(push_to_hub=True, **arguments)
        made.append(HubPusher(args, output_dir, retry_delays=(0.01, 0.01), pause=pause, patience=patience))
        return made[-1]

    yield make
    for hub in made:
        shutil.rmtree(hub.output_dir, ignore_errors=True)
        hub._wake.set()
        if (worker := hub._worker) is not None:
            worker.join(120)


def wait_for(happened: Callable[[], object], seconds: float = 60.0) -> None:
    late = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < late, "it did not happen"
        time.sleep(0.02)


def all_pushed(hub: HubPusher) -> None:
    wait_for(lambda: not hub.waiting())


def test_push_uploads_the_very_bytes_and_nothing_unfinished(
    server: HubServer, run_dir: Path, pusher: MadePushers
) -> None:
    hub = pusher(run_dir)
    assert hub.start()
    assert hub.repo_id == "tester/my-run"
    assert hub.push("End of training", blocking=True)
    assert set(server.repos["tester/my-run"]) == ROOT
    for path in ROOT:
        assert server.sha256("tester/my-run", path) == hashlib.sha256((run_dir / path).read_bytes()).hexdigest()
    assert server.commits == ["End of training"]
    assert not server.private["tester/my-run"]
    assert hub.waiting() == []


def test_nothing_is_sent_unless_asked(server: HubServer, run_dir: Path, pusher: MadePushers) -> None:
    hub = HubPusher(HubArguments(), run_dir)
    assert not hub.start()
    assert not hub.push("End of training", blocking=True)
    assert not pusher(run_dir).push("step 10", blocking=False)  # strategy "end"
    assert server.requests == []


def test_private_repository_in_an_organisation(server: HubServer, run_dir: Path, pusher: MadePushers) -> None:
    hub = pusher(run_dir, hub_model_id="team/retriever", hub_private_repo=True)
    assert hub.push("End of training", blocking=True)
    assert server.private["team/retriever"]
    assert "--private" in hub.command()


def test_existing_repository_is_reused(server: HubServer, run_dir: Path, pusher: MadePushers) -> None:
    assert pusher(run_dir).push("first", blocking=True)
    (run_dir / "model.safetensors").write_bytes(b"better weights")
    assert pusher(run_dir).push("second", blocking=True)
    assert server.repos["tester/my-run"]["model.safetensors"] == b"better weights"


def test_bad_token_is_reported_early_and_training_goes_on(
    server: HubServer, run_dir: Path, caplog: pytest.LogCaptureFixture, pusher: MadePushers
) -> None:
    server.token = "hf_anotherTokenOfAnotherPerson0123456"
    hub = pusher(run_dir)
    assert not hub.start()
    assert len(caplog.records) == 1
    assert "hf auth whoami" in caplog.text
    caplog.clear()
    assert not hub.push("End of training", blocking=True)
    assert "401" in caplog.text
    assert hub.command() in caplog.text
    assert (run_dir / "model.safetensors").read_bytes() == b"final weights"
    assert server.requests.count("POST /api/repos/create") == 2, "a refused token must not be tried again and again"


def test_printed_command_pushes_later(server: HubServer, run_dir: Path, pusher: MadePushers) -> None:
    (run_dir / ".hub/1/files").mkdir(parents=True)
    (run_dir / ".hub/1/files/model.safetensors").write_bytes(b"left behind")
    program, *words = shlex.split(pusher(run_dir, hub_private_repo=True).command())
    assert program == "hf"
    client = [sys.executable, "-m", "huggingface_hub.cli.hf", *words]
    subprocess.run(client, check=True, capture_output=True, timeout=60)
    assert set(server.repos["tester/my-run"]) == ROOT
    assert server.private["tester/my-run"]


@pytest.mark.parametrize(
    ("path", "status"),
    [("/api/repos/create", 500), ("/preupload/", 503), ("/storage/", 500), ("/storage/", CUT), ("/commit/", 429)],
)
def test_server_error_is_tried_again(
    server: HubServer, run_dir: Path, path: str, status: int, pusher: MadePushers
) -> None:
    server.fail(path, status)
    assert pusher(run_dir).push("End of training", blocking=True)
    assert server.faults == []
    assert set(server.repos["tester/my-run"]) == ROOT


def test_refused_upload_of_one_file_is_reported(
    server: HubServer, run_dir: Path, caplog: pytest.LogCaptureFixture, pusher: MadePushers
) -> None:
    server.fail("/storage/", 403, times=10)
    assert not pusher(run_dir).push("End of training", blocking=True)
    assert "403" in caplog.text
    assert server.commits == []


def test_lasting_server_error_ends_after_three_tries(
    server: HubServer, run_dir: Path, caplog: pytest.LogCaptureFixture, pusher: MadePushers
) -> None:
    server.fail("/commit/", 503, times=10)
    assert not pusher(run_dir).push("End of training", blocking=True)
    assert len(server.faults) == 7
    assert "hf upload tester/my-run" in caplog.text


def test_unreachable_server_is_a_failed_push(
    server: HubServer,
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    pusher: MadePushers,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    hub = pusher(run_dir)
    assert not hub.start()
    assert not hub.push("End of training", blocking=True)
    assert "hf upload" in caplog.text


def test_offline_mode_is_a_failed_push(
    server: HubServer,
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    pusher: MadePushers,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not pusher(run_dir).push("End of training", blocking=True)
    assert "HF_HUB_OFFLINE" in caplog.text
    assert server.requests == []


def test_every_save_pushes_the_model_of_the_checkpoint(server: HubServer, run_dir: Path, pusher: MadePushers) -> None:
    hub = pusher(run_dir, hub_strategy="every_save")
    assert hub.push("step 10", blocking=False, checkpoint=run_dir / "checkpoint-10")
    all_pushed(hub)
    assert set(server.repos["tester/my-run"]) == UNDER_WAY
    assert server.repos["tester/my-run"]["model.safetensors"] == b"weights of step 10"
    assert (run_dir / "model.safetensors").read_bytes() == b"final weights"


def test_checkpoint_strategy_replaces_last_checkpoint_as_a_whole(
    server: HubServer, run_dir: Path, pusher: MadePushers
) -> None:
    hub = pusher(run_dir, hub_strategy="checkpoint")
    assert hub.push("step 10", blocking=False, checkpoint=run_dir / "checkpoint-10")
    all_pushed(hub)
    files = server.repos["tester/my-run"]
    assert files["last-checkpoint/optimizer.safetensors"] == b"moments of step 10"
    assert set(files) == UNDER_WAY | {f"last-checkpoint/{name}" for name in CHECKPOINT_10}
    assert hub.push("step 5", blocking=True, checkpoint=run_dir / "checkpoint-5")
    last = {path for path in server.repos["tester/my-run"] if path.startswith("last-checkpoint/")}
    assert last == {
        f"last-checkpoint/{name}" for name in ("model.safetensors", "optimizer.safetensors", "config.json")
    }


def test_final_push_brings_checkpoints_that_were_skipped(
    server: HubServer, run_dir: Path, pusher: MadePushers
) -> None:
    assert pusher(run_dir, hub_strategy="all_checkpoints").push("End of training", blocking=True)
    checkpoints = {path.split("/")[0] for path in server.repos["tester/my-run"]} - {
        path.split("/")[0] for path in ROOT
    }
    assert checkpoints == {"checkpoint-5", "checkpoint-10"}
    assert pusher(run_dir, hub_strategy="checkpoint", hub_model_id="b").push("End of training", blocking=True)
    assert server.repos["tester/b"]["last-checkpoint/model.safetensors"] == b"weights of step 10"


def test_background_push_survives_rotation(server: HubServer, run_dir: Path, pusher: MadePushers) -> None:
    server.upload_may_end.clear()
    hub = pusher(run_dir, hub_strategy="all_checkpoints")
    assert hub.push("step 5", blocking=False, checkpoint=run_dir / "checkpoint-5")
    assert server.upload_began.wait(60)
    shutil.rmtree(run_dir / "checkpoint-5")
    assert hub.push("step 10", blocking=False, checkpoint=run_dir / "checkpoint-10")
    assert server.commits == [], "training must not wait for the upload"
    server.upload_may_end.set()
    assert hub.push("End of training", blocking=True)
    assert server.commits[0] == "step 5"
    assert server.commits[-1] == "End of training"
    assert server.repos["tester/my-run"]["checkpoint-5/optimizer.safetensors"] == b"moments of step 5"
    assert server.repos["tester/my-run"]["checkpoint-10/optimizer.safetensors"] == b"moments of step 10"
    assert server.repos["tester/my-run"]["model.safetensors"] == b"final weights"


def test_a_newer_push_replaces_an_older_one_that_waits(server: HubServer, run_dir: Path, pusher: MadePushers) -> None:
    server.token = "hf_anotherTokenOfAnotherPerson0123456"
    hub = pusher(run_dir, hub_strategy="checkpoint")
    assert hub.push("step 5", blocking=False, checkpoint=run_dir / "checkpoint-5")
    assert hub.push("step 10", blocking=False, checkpoint=run_dir / "checkpoint-10")
    wait_for(lambda: hub.waiting() == ["step 10"])
    server.token = TOKEN
    assert hub.push("End of training", blocking=True)
    assert server.commits[-1] == "End of training"
    assert "step 5" not in server.commits


def test_a_checkpoint_that_was_not_pushed_comes_later_without_its_old_model(
    server: HubServer, run_dir: Path, pusher: MadePushers
) -> None:
    server.fail("/preupload/", 403)
    hub = pusher(run_dir, hub_strategy="all_checkpoints")
    assert hub.push("step 5", blocking=False, checkpoint=run_dir / "checkpoint-5")
    wait_for(lambda: not server.faults)
    shutil.rmtree(run_dir / "checkpoint-5")
    assert hub.push("step 10", blocking=False, checkpoint=run_dir / "checkpoint-10")
    all_pushed(hub)
    files = server.repos["tester/my-run"]
    assert files["checkpoint-5/optimizer.safetensors"] == b"moments of step 5"
    assert files["model.safetensors"] == b"weights of step 10"
    assert sorted(server.commits) == ["step 10", "step 5"]


def test_what_waits_is_bounded(
    server: HubServer,
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    pusher: MadePushers,
) -> None:
    monkeypatch.setattr(spool, "MOST_WAITING", 2)
    server.token = "hf_anotherTokenOfAnotherPerson0123456"
    hub = pusher(run_dir, hub_strategy="all_checkpoints")
    for step in (20, 30, 40, 50):
        shutil.copytree(run_dir / "checkpoint-10", run_dir / f"checkpoint-{step}")
        hub.push(f"step {step}", blocking=False, checkpoint=run_dir / f"checkpoint-{step}")
        shutil.rmtree(run_dir / f"checkpoint-{step}")
    # Besides the newest, and one that is being tried at this moment.
    wait_for(lambda: hub.waiting() == ["step 40", "step 50"])
    assert "checkpoint-20: never pushed" in caplog.text


def test_what_waits_leaves_the_run_its_disk(
    run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = spool.Spool(run_dir)
    for step in (5, 10):
        waiting.add(f"step {step}", "all_checkpoints", run_dir / f"checkpoint-{step}", under_way=True)
        waiting.tidy(busy=None)
    assert [entry.message for entry in waiting.entries()] == ["step 5", "step 10"]
    usage = shutil.disk_usage(run_dir)._replace(free=waiting.entries()[-1].size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    waiting.tidy(busy=None)
    assert [entry.message for entry in waiting.entries()] == ["step 10"]
    assert "checkpoint-5: never pushed" in caplog.text


def test_a_disk_that_is_full_is_a_failed_push(
    server: HubServer,
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    pusher: MadePushers,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copy2", full)
    hub = pusher(run_dir, hub_strategy="every_save")
    assert not hub.push("step 10", blocking=False, checkpoint=run_dir / "checkpoint-10")
    assert not hub.push("End of training", blocking=True)
    assert "No space left" in caplog.text
    assert hub.waiting() == []


def test_a_broken_spool_is_passed_over(server: HubServer, run_dir: Path, pusher: MadePushers) -> None:
    for name, content in {"1/push.json": "", "2/push.json": "[]", "3/files/x": "y", "x/push.json": "{}"}.items():
        path = run_dir / ".hub" / name
        path.parent.mkdir(parents=True)
        path.write_text(content)
    hub = pusher(run_dir)
    assert hub.start()
    assert hub.push("End of training", blocking=True)
    assert server.commits == ["End of training"]


def test_a_failed_push_is_tried_again_in_a_pause(
    server: HubServer, run_dir: Path, caplog: pytest.LogCaptureFixture, pusher: MadePushers
) -> None:
    server.fail("/preupload/", 403, times=3)
    hub = pusher(run_dir, pause=0.05, hub_strategy="every_save")
    assert hub.push("step 10", blocking=False, checkpoint=run_dir / "checkpoint-10")
    all_pushed(hub)
    assert server.commits == ["step 10"]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, "a Hub that is away all night must not fill the log"


@pytest.mark.faults
@pytest.mark.slow
def test_push_killed_half_way_is_done_by_the_next_start(server: HubServer, run_dir: Path, pusher: MadePushers) -> None:
    (run_dir / "model.safetensors").write_bytes(os.urandom(1 << 24))  # more than the sockets buffer
    server.upload_may_end.clear()
    script = (
        "import sys; from mm_utils.hub import HubArguments, HubPusher; "
        "HubPusher(HubArguments(push_to_hub=True), sys.argv[1]).push('End of training', blocking=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(run_dir)], cwd=Path(__file__).parents[1])
    try:
        assert server.upload_began.wait(120)
        [client] = children_of(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    wait_for(lambda: not is_running(client))
    server.upload_may_end.set()
    assert server.repos == {"tester/my-run": {}}
    hub = pusher(run_dir)
    assert hub.waiting() == ["End of training"]
    assert hub.start()
    all_pushed(hub)
    digest = hashlib.sha256((run_dir / "model.safetensors").read_bytes()).hexdigest()
    assert server.sha256("tester/my-run", "model.safetensors") == digest
    assert set(server.repos["tester/my-run"]) == ROOT
    assert pusher(run_dir).push("again", blocking=True)
    assert set(server.repos["tester/my-run"]) == ROOT


def children_of(parent: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listed.stdout.split()]


def is_running(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


@pytest.mark.parametrize("planted", [None, 401, 503])
def test_token_is_in_no_log_and_no_pushed_file(
    server: HubServer, run_dir: Path, caplog: pytest.LogCaptureFixture, planted: int | None, pusher: MadePushers
) -> None:
    caplog.set_level(logging.DEBUG)
    if planted is not None:
        server.fail("/commit/", planted, times=10)
    hub = pusher(run_dir)
    hub.start()
    assert hub.push("End of training", blocking=True) is (planted is None)
    assert caplog.records
    assert TOKEN not in caplog.text
    assert all(TOKEN.encode() not in content for files in server.repos.values() for content in files.values())


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="--hub_strategy is 'never'; unknown"):
        HubArguments(hub_strategy="never")
    with pytest.raises(ValueError, match="--hub_model_id is 'a/b/c'"):
        HubArguments(hub_model_id="a/b/c")


@pytest.mark.parametrize(
    ("folder", "name"), [("run été 3", "run-t-3"), ("..x--y.", "x-y"), ("模型", "model"), ("a" * 200, "a" * 96)]
)
def test_repository_is_named_after_the_folder(tmp_path: Path, folder: str, name: str) -> None:
    assert HubPusher(HubArguments(), tmp_path / folder).repo_id == name
    HubArguments(hub_model_id=name)
