import hashlib
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from mm_utils.hub import HubArguments, HubPusher, redact
from tests.hub_server import HubServer, serve

TOKEN = "hf_abcDEFghiJKLmnoPQRstuVWXyz0123456789"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The stand-in, with the client pointed at it; the suite's HF_HUB_OFFLINE=1 was read when the client was imported."""
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
        "checkpoint-5/optimizer.bin": b"moments of step 5",
        "checkpoint-5/config.json": b"{}",
        "checkpoint-10/model.safetensors": b"weights of step 10",
        "checkpoint-10/optimizer.bin": b"moments of step 10",
        "checkpoint-10/random_states_0.pkl": b"random states of step 10",
        "checkpoint-15.tmp/model.safetensors": b"not done",
    }.items():
        path = output_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return output_dir


ROOT = {"README.md", "config.json", "dual_encoder/model.safetensors", "metrics.jsonl", "model.safetensors"}


def pusher(output_dir: Path, **arguments: object) -> HubPusher:
    return HubPusher(HubArguments(push_to_hub=True, **arguments), output_dir, retry_delays=(0.01, 0.01))


def online() -> dict[str, str]:
    """The environment of a client of its own, in which nothing is patched."""
    return {**os.environ, "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}


def test_push_uploads_the_very_bytes_and_nothing_unfinished(server: HubServer, run_dir: Path) -> None:
    hub = pusher(run_dir)
    assert hub.start()
    assert hub.repo_id == "tester/my-run"
    assert hub.push("End of training", blocking=True)
    assert set(server.repos["tester/my-run"]) == ROOT
    for path in ROOT:
        assert server.sha256("tester/my-run", path) == hashlib.sha256((run_dir / path).read_bytes()).hexdigest()
    assert server.commits == ["End of training"]
    assert not server.private["tester/my-run"]
    assert not list(run_dir.glob(".push-*"))


def test_nothing_is_sent_unless_asked(server: HubServer, run_dir: Path) -> None:
    hub = HubPusher(HubArguments(), run_dir)
    assert not hub.start()
    assert not hub.push("End of training", blocking=True)
    assert not pusher(run_dir).push("step 10", blocking=False)  # strategy "end"
    assert server.requests == []


def test_private_repository_in_an_organisation(server: HubServer, run_dir: Path) -> None:
    hub = pusher(run_dir, hub_model_id="team/retriever", hub_private_repo=True)
    assert hub.push("End of training", blocking=True)
    assert server.private["team/retriever"]
    assert "--private" in hub.command()


def test_existing_repository_is_reused(server: HubServer, run_dir: Path) -> None:
    assert pusher(run_dir).push("first", blocking=True)
    (run_dir / "model.safetensors").write_bytes(b"better weights")
    assert pusher(run_dir).push("second", blocking=True)
    assert server.repos["tester/my-run"]["model.safetensors"] == b"better weights"


def test_bad_token_is_reported_early_and_training_goes_on(
    server: HubServer, run_dir: Path, caplog: pytest.LogCaptureFixture
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


def test_printed_command_pushes_later(server: HubServer, run_dir: Path) -> None:
    (run_dir / ".push-killed").mkdir()
    (run_dir / ".push-killed" / "model.safetensors").write_bytes(b"left behind")
    program, *words = shlex.split(pusher(run_dir, hub_private_repo=True).command())
    assert program == "hf"
    client = [sys.executable, "-m", "huggingface_hub.cli.hf", *words]
    subprocess.run(client, env=online(), check=True, capture_output=True, timeout=60)
    assert set(server.repos["tester/my-run"]) == ROOT
    assert server.private["tester/my-run"]


@pytest.mark.parametrize(
    ("path", "status"), [("/api/repos/create", 500), ("/preupload/", 503), ("/storage/", 500), ("/commit/", 429)]
)
def test_server_error_is_tried_again(server: HubServer, run_dir: Path, path: str, status: int) -> None:
    server.fail(path, status)
    assert pusher(run_dir).push("End of training", blocking=True)
    assert server.faults == []
    assert set(server.repos["tester/my-run"]) == ROOT


def test_refused_upload_of_one_file_is_reported(
    server: HubServer, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.fail("/storage/", 403, times=10)
    assert not pusher(run_dir).push("End of training", blocking=True)
    assert "403" in caplog.text
    assert server.commits == []


def test_lasting_server_error_ends_after_three_tries(
    server: HubServer, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.fail("/commit/", 503, times=10)
    assert not pusher(run_dir).push("End of training", blocking=True)
    assert len(server.faults) == 7
    assert "hf upload tester/my-run" in caplog.text


def test_unreachable_server_costs_a_few_seconds(
    server: HubServer, run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    began = time.monotonic()
    hub = pusher(run_dir)
    assert not hub.start()
    assert not hub.push("End of training", blocking=True)
    assert time.monotonic() - began < 5
    assert "hf upload" in caplog.text


def test_offline_mode_is_a_failed_push(
    server: HubServer, run_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert not pusher(run_dir).push("End of training", blocking=True)
    assert "HF_HUB_OFFLINE" in caplog.text
    assert server.requests == []


def test_every_save_pushes_the_model_of_the_checkpoint(server: HubServer, run_dir: Path) -> None:
    hub = pusher(run_dir, hub_strategy="every_save")
    assert hub.push("step 10", blocking=False, checkpoint=run_dir / "checkpoint-10")
    hub.wait()
    assert set(server.repos["tester/my-run"]) == ROOT
    assert server.repos["tester/my-run"]["model.safetensors"] == b"weights of step 10"
    assert (run_dir / "model.safetensors").read_bytes() == b"final weights"


def test_checkpoint_strategy_replaces_last_checkpoint_as_a_whole(server: HubServer, run_dir: Path) -> None:
    hub = pusher(run_dir, hub_strategy="checkpoint")
    assert hub.push("step 10", blocking=False, checkpoint=run_dir / "checkpoint-10")
    hub.wait()
    files = server.repos["tester/my-run"]
    assert files["last-checkpoint/optimizer.bin"] == b"moments of step 10"
    assert "last-checkpoint/random_states_0.pkl" in files
    assert hub.push("step 5", blocking=True, checkpoint=run_dir / "checkpoint-5")
    last = {path for path in server.repos["tester/my-run"] if path.startswith("last-checkpoint/")}
    assert last == {f"last-checkpoint/{name}" for name in ("model.safetensors", "optimizer.bin", "config.json")}


def test_final_push_brings_checkpoints_that_were_skipped(server: HubServer, run_dir: Path) -> None:
    assert pusher(run_dir, hub_strategy="all_checkpoints").push("End of training", blocking=True)
    checkpoints = {path.split("/")[0] for path in server.repos["tester/my-run"]} - {
        path.split("/")[0] for path in ROOT
    }
    assert checkpoints == {"checkpoint-5", "checkpoint-10"}
    assert pusher(run_dir, hub_strategy="checkpoint", hub_model_id="b").push("End of training", blocking=True)
    assert server.repos["tester/b"]["last-checkpoint/model.safetensors"] == b"weights of step 10"


def test_background_push_is_alone_and_survives_rotation(server: HubServer, run_dir: Path) -> None:
    server.upload_may_end.clear()
    hub = pusher(run_dir, hub_strategy="all_checkpoints")
    began = time.monotonic()
    assert hub.push("step 5", blocking=False, checkpoint=run_dir / "checkpoint-5")
    assert time.monotonic() - began < 2, "training must not wait for the upload"
    assert server.upload_began.wait(10)
    assert not hub.push("step 10", blocking=False, checkpoint=run_dir / "checkpoint-10")
    for path in (run_dir / "checkpoint-5").iterdir():
        path.unlink()
    (run_dir / "checkpoint-5").rmdir()
    server.upload_may_end.set()
    assert hub.push("End of training", blocking=True)
    assert server.commits == ["step 5", "End of training"]
    assert server.repos["tester/my-run"]["checkpoint-5/optimizer.bin"] == b"moments of step 5"
    assert server.repos["tester/my-run"]["model.safetensors"] == b"final weights"


def test_push_killed_half_way_can_be_repeated(server: HubServer, run_dir: Path) -> None:
    (run_dir / "model.safetensors").write_bytes(os.urandom(1 << 24))  # more than the sockets buffer
    server.upload_may_end.clear()
    script = (
        "import sys; from mm_utils.hub import HubArguments, HubPusher; "
        "HubPusher(HubArguments(push_to_hub=True), sys.argv[1]).push('End of training', blocking=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(run_dir)], env=online(), cwd=Path(__file__).parents[1]
    )
    try:
        assert server.upload_began.wait(60)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    server.upload_may_end.set()
    assert server.repos == {"tester/my-run": {}}
    assert list(run_dir.glob(".push-*"))
    assert pusher(run_dir).push("End of training", blocking=True)
    digest = hashlib.sha256((run_dir / "model.safetensors").read_bytes()).hexdigest()
    assert server.sha256("tester/my-run", "model.safetensors") == digest
    assert set(server.repos["tester/my-run"]) == ROOT
    assert not list(run_dir.glob(".push-*"))


@pytest.mark.parametrize("planted", [None, 401, 503])
def test_token_is_in_no_log_and_no_pushed_file(
    server: HubServer, run_dir: Path, caplog: pytest.LogCaptureFixture, planted: int | None
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


@pytest.mark.parametrize(
    "text",
    [
        "token SECRET",
        "--hub_token SECRET --lr 3",
        "--hub-token=SECRET",
        "--hub_token \\\n  SECRET \\\n  --lr 3",
        "-api_key SECRET",
        "--wandb_api_key 'two SECRET words'",
        "'--password=two SECRET words' --lr 3",
        shlex.join(["--password", "it's SECRET"]),
        shlex.join(["--password=it's SECRET"]),
        '--password "SECRET',
        "AWS_SECRET_ACCESS_KEY=SECRET python train.py",
        "hub_token: SECRET with spaces\nlr: 3",
        '{"token": "SECRET", "lr": 3}',
        "Namespace(api_key='SECRET', lr=3)",
        "https://me:SECRET@example.org/data.tar",
        "s3://SECRET@bucket/x",
        "https://example.org/data?token=SECRET&lr=3",
        "Authorization: Bearer SECRET",
        "dataset@hf_jwt_SECRET.SECRET-SECRET_SECRET",
    ],
)
def test_redact_removes_secrets_wherever_they_stand(text: str) -> None:
    secret = "hf_" + "Ab3" * 12 if text.startswith("token") else "S3cr3tValue"
    planted = redact(text.replace("SECRET", secret).replace("AWS_S3cr3tValue", "AWS_SECRET"))
    assert secret not in planted
    assert "***" in planted
    assert redact(planted) == planted


def test_redact_knows_the_values_of_secret_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert redact("seen: 0123456789abcdef.") == "seen: ***."


@pytest.mark.parametrize(
    "text",
    [
        "accelerate launch scripts/pretrain.py --text_model_name bert-base --tokenizer_name bert --num_tokens 32",
        "--push_to_hub --hub_model_id me/model --learning_rate 1e-3",
        "https://huggingface.co/me/hf_model_name",
        "--use_token --learning_rate 1e-3",
        "me@example.org",
    ],
)
def test_redact_leaves_the_rest_alone(text: str) -> None:
    assert redact(text) == text


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
