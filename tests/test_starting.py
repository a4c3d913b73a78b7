"""Several starts of one run: its lock, its list of starts, restarts by a launcher, and launchers that end."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from accelerate import PartialState

from mm_utils import starting
from mm_utils.ablation import Run, execute

if sys.platform == "win32":
    pytest.skip("POSIX processes", allow_module_level=True)

ROOT = Path(__file__).parents[1]
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl and /proc are of Linux")
PATIENCE = 90.0  # seconds, for a machine that is busy


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """The processes' state, which a script has by its accelerator; no folder stays locked."""
    PartialState()
    yield
    starting.unlock()


@pytest.fixture
def children() -> Iterator[list[int]]:
    """Processes to end with the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def fork(children: list[int], body: Callable[[Callable[[str], Any]], Any]) -> tuple[int, int]:
    """Call `body(say)` in a child, which sleeps after that: its pid, and where what it said can be read."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.close(reading)
            body(lambda text: os.write(writing, f"{text}\n".encode()))
            time.sleep(2 * PATIENCE)
        finally:
            os._exit(0)
    os.close(writing)
    children.append(pid)
    return pid, reading


def heard(reading: int) -> str:
    """The next of what a child said; empty once nobody is left to say anything."""
    return os.read(reading, 1000).decode()


def wait_until(holds: Callable[[], bool]) -> bool:
    late = time.monotonic() + PATIENCE
    while time.monotonic() < late:
        if holds():
            return True
        time.sleep(0.05)
    return False


def is_alive(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _mentions(path: Path, word: str) -> bool:
    return word in path.read_text()


# -- the lock -----------------------------------------------------------------------------------------------------------


def lock_and_say(folder: Path) -> Callable[[Callable[[str], Any]], None]:
    return lambda say: say(starting.lock_folder(folder, 0) or "locked")


def test_a_second_run_is_told_of_the_first(tmp_path: Path, children: list[int]) -> None:
    pid, reading = fork(children, lock_and_say(tmp_path))
    assert heard(reading) == "locked\n"
    problem = starting.lock_folder(tmp_path, 0.1)
    assert problem is not None
    assert (
        f"--output_dir is {tmp_path}; a run is writing there: process {pid} on {os.uname().nodename}, since" in problem
    )
    assert "\n" not in problem
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert starting.lock_folder(tmp_path, 0) is None
    assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()


def test_a_run_waits_for_the_one_that_is_ending(tmp_path: Path, children: list[int]) -> None:
    def hold(say: Callable[[str], Any]) -> None:
        say(starting.lock_folder(tmp_path, 0) or "locked")
        time.sleep(0.7)
        os._exit(0)

    _, reading = fork(children, hold)
    assert heard(reading) == "locked\n"
    begin = time.monotonic()
    assert starting.lock_folder(tmp_path, PATIENCE) is None
    assert time.monotonic() - begin > 0.2


def test_the_workers_of_a_killed_run_do_not_keep_its_lock(tmp_path: Path, children: list[int]) -> None:
    def run(say: Callable[[str], Any]) -> None:
        starting.lock_folder(tmp_path, 0)
        worker = os.fork()
        if worker == 0:
            time.sleep(2 * PATIENCE)
        say(str(worker))

    pid, reading = fork(children, run)
    worker = int(heard(reading))
    children.append(worker)
    assert starting.lock_folder(tmp_path, 0) is not None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert is_alive(worker)
    assert starting.lock_folder(tmp_path, 0) is None


def test_one_process_starts_again_in_its_folder_and_goes_on_to_another(tmp_path: Path, children: list[int]) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    assert starting.lock_folder(first, 0) is None
    assert starting.lock_folder(first, 0) is None
    assert "a run is writing there" in heard(fork(children, lock_and_say(first))[1])
    assert starting.lock_folder(second, 0) is None
    assert heard(fork(children, lock_and_say(first))[1]) == "locked\n"
    assert "a run is writing there" in heard(fork(children, lock_and_say(second))[1])


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(starting.fcntl, "lockf", refuse)
    assert starting.lock_folder(tmp_path, 0) is None


# -- the list of starts, and restarts -----------------------------------------------------------------------------------


def launched(monkeypatch: pytest.MonkeyPatch, launch: str, attempt: int = 0, run_id: str = "none") -> list[str]:
    """What torchelastic sets for one attempt of a launch."""
    monkeypatch.setattr(starting, "end_with_launcher", lambda: None)  # there is none
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/te/{run_id}_{launch}/attempt_{attempt}/0/error.json")
    return starting.this_launch()


def test_a_launch_has_one_name_whatever_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    first = launched(monkeypatch, "a", 0)
    assert len(first) == 1
    assert launched(monkeypatch, "a", 2) == first
    assert launched(monkeypatch, "b", 0) != first
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert starting.this_launch() == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    assert starting.this_launch() == [f"{os.uname().nodename}:job-7"]
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert starting.this_launch() == []


def test_starts_are_listed_and_those_of_a_launch_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starting.record_start(tmp_path, {"python": "3.10"}, [])
    starting.note_start(tmp_path, 0)
    launch = launched(monkeypatch, "a")
    starting.record_start(tmp_path, {"python": "3.11"}, launch)
    starts = json.loads((tmp_path / "environment.json").read_text())
    assert [start["python"] for start in starts] == ["3.10", "3.11"]
    assert starts[0]["resumed_from"] == 0
    assert starting.earlier_starts(tmp_path, launch) == starts[1:]
    assert starting.earlier_starts(tmp_path, []) == []
    assert [path.name for path in tmp_path.iterdir()] == ["environment.json"]


@pytest.mark.parametrize("text", ["", "[{", "{}", "[1, 2]", "\0"])
def test_a_damaged_list_is_begun_anew(text: str, tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text(text)
    assert starting.earlier_starts(tmp_path) == []
    starting.record_start(tmp_path, {"a": 1}, [])
    starting.note_start(tmp_path, 3)
    assert [start["resumed_from"] for start in starting.earlier_starts(tmp_path)] == [3]


def test_what_a_restart_goes_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launched(monkeypatch, "a")
    assert starting.resume_name(None, tmp_path, launch) is None
    assert starting.resume_name("there/checkpoint-4", tmp_path, launch) == "there/checkpoint-4"
    starting.record_start(tmp_path, {}, launch)
    assert starting.resume_name(None, tmp_path, launch) == "latest"
    (tmp_path / "checkpoint-9").mkdir()  # of another run, as this one has not begun to train
    assert starting.resume_name("there/checkpoint-4", tmp_path, launch) == "there/checkpoint-4"
    starting.note_start(tmp_path, 4)
    assert starting.resume_name("there/checkpoint-4", tmp_path, launch) == "latest"
    (tmp_path / "checkpoint-9").rmdir()
    assert starting.resume_name("there/checkpoint-4", tmp_path, launch) == "there/checkpoint-4"
    assert starting.resume_name(None, tmp_path, launched(monkeypatch, "b")) is None


def start_at(folder: Path, launch: list[str], step: int | None) -> None:
    starting.record_start(folder, {}, launch)
    if step is not None:
        starting.note_start(folder, step)


@pytest.mark.parametrize(
    ("steps", "stops"),
    [
        ((0, 0, 0), True),
        ((0, 4, 4, 4), True),
        ((4, None, 4), True),
        ((4, None, None, 4), True),
        ((0, 4, 4), False),
        ((0, 4, 8), False),
        ((0, 0, 4), False),
        ((0, None, 4), False),
    ],
)
def test_restarts_that_gain_no_step_end(
    steps: tuple[int | None, ...], stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt, step in enumerate(steps[:-1]):
        start_at(tmp_path, launched(monkeypatch, "a", attempt), step)
    launch = launched(monkeypatch, "a", len(steps) - 1)
    if stops:
        with pytest.raises(
            ValueError, match=rf"no step was gained in 2 restarts: each went on from step {steps[-1]}\."
        ):
            start_at(tmp_path, launch, steps[-1])
    else:
        start_at(tmp_path, launch, steps[-1])
    assert starting.earlier_starts(tmp_path)[-1]["resumed_from"] == steps[-1]


def test_a_person_may_start_as_often_as_they_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for launch in "abcd":
        start_at(tmp_path, launched(monkeypatch, launch), 4)
    for _ in range(4):  # the number of nodes changed: no restart is counted
        start_at(tmp_path, launched(monkeypatch, "e"), 4)


def test_without_a_list_nothing_is_noted(tmp_path: Path) -> None:
    starting.note_start(tmp_path, 4)
    assert list(tmp_path.iterdir()) == []


# -- launchers that end -------------------------------------------------------------------------------------------------


@LINUX
def test_a_child_ends_with_its_parent(children: list[int]) -> None:
    def parent(say: Callable[[str], Any]) -> None:
        me, child = os.getpid(), os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, lambda *_: (say("SIGTERM"), os._exit(0)))
            starting.end_with(me)
            say(str(os.getpid()))
            time.sleep(2 * PATIENCE)

    pid, reading = fork(children, parent)
    children.append(int(heard(reading)))
    os.kill(pid, signal.SIGKILL)
    assert heard(reading) == "SIGTERM\n"


@LINUX
def test_a_parent_that_ended_before_is_noticed(children: list[int]) -> None:
    def orphan(say: Callable[[str], Any]) -> None:
        signal.signal(signal.SIGTERM, lambda *_: say("SIGTERM"))
        starting.end_with(2**22 + 1)  # no process has this number

    assert heard(fork(children, orphan)[1]) == "SIGTERM\n"


@LINUX
def test_launchers_are_known_by_their_command(tmp_path: Path, children: list[int]) -> None:
    for name, known in (("torchrun", True), ("accelerate", True), ("pretrain.py", False), ("accelerate.sh", False)):
        (tmp_path / name).write_text("import time\ntime.sleep(600)\n")
        process = subprocess.Popen([sys.executable, str(tmp_path / name), "launch"])
        children.append(process.pid)
        command = Path(f"/proc/{process.pid}/cmdline")
        assert wait_until(partial(_mentions, command, name))
        assert starting._is_launcher(process.pid) == known
    assert not starting._is_launcher(2**22 + 1)


@LINUX
def test_a_process_that_lost_its_launcher_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(starting, "_command", lambda _: ["/sbin/init"])
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    starting.end_with_launcher()  # started by hand, whose shell has ended
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    with pytest.raises(ValueError, match="launcher of this process has ended"):
        starting.end_with_launcher()
    monkeypatch.setattr(starting, "_command", lambda _: ["/usr/bin/python3", "my_launcher.py"])
    starting.end_with_launcher()  # of a container


@LINUX
@pytest.mark.parametrize("words", ["python {}", "sh -c 'python {}; true'"], ids=["directly", "by a launcher"])
def test_the_runs_of_an_ablation_end_with_it(words: str, tmp_path: Path, children: list[int]) -> None:
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(
        "import ctypes, os, signal, sys, time\n"
        "ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n"  # as scripts do under a launcher
        f"open('{tmp_path}/pid', 'w').write(str(os.getpid()) + '.')\n"
        "time.sleep(600)\n"
    )
    run = Run("base", 0, {}, tmp_path / "base")
    launcher = words.format(stand_in).replace("'python", f"'{sys.executable}")
    pid, _ = fork(children, lambda _: execute(run, launcher))
    pid_file = tmp_path / "pid"
    assert wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("."))
    started = int(pid_file.read_text()[:-1])
    children.append(started)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert wait_until(lambda: not is_alive(started))


def test_forked_processes_tokenize_with_one_thread(children: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    starting.fork_without_tokenizer_threads()
    _, reading = fork(children, lambda say: say(os.environ["TOKENIZERS_PARALLELISM"]))
    assert heard(reading) == "false\n"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


@LINUX
@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launched_process_ends_with_the_launcher(
    number: signal.Signals, tmp_path: Path, children: list[int]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time\nfrom mm_utils.run import make_accelerator\n"
        f"make_accelerator()\nopen('{tmp_path}/pid', 'w').write(f'{{os.getpid()}}.')\ntime.sleep(600)\n"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", str(script)]
    launcher = subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL)
    children.append(launcher.pid)
    pid_file = tmp_path / "pid"
    assert wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("."))
    child = int(pid_file.read_text()[:-1])
    children.append(child)
    launcher.send_signal(number)
    assert wait_until(lambda: not is_alive(child))


@pytest.mark.faults
@pytest.mark.slow
def test_a_launcher_that_restarts_finds_the_folder_and_ends_when_nothing_is_gained(
    tmp_path: Path, children: list[int]
) -> None:
    """The first attempt saves at step 2 and dies, as do all that follow."""
    script = tmp_path / "train.py"
    script.write_text(
        "import json, os\n"
        "from pathlib import Path\n"
        "from mm_utils.run import run_script, start_run\n"
        "from mm_utils.starting import note_start\n"
        "from mm_utils.training_arguments import TrainingArguments\n"
        "def main():\n"
        "    args = TrainingArguments(overwrite_output_dir=True)\n"
        "    start_run('pretrain', args)\n"
        "    folder = Path(args.output_dir)\n"
        "    found = [path.name for path in folder.glob('checkpoint-*')]\n"
        "    with open('attempts.jsonl', 'a') as file:\n"
        "        file.write(json.dumps([str(folder), args.resume_from_checkpoint, found]) + '\\n')\n"
        "    note_start(folder, 2)\n"
        "    (folder / 'checkpoint-2').mkdir(exist_ok=True)\n"
        "    os._exit(9)\n"
        "run_script(main)\n"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--rdzv_backend",
        "c10d",
        "--rdzv_endpoint",
        "localhost:0",
    ]
    (tmp_path / "outputs" / "pretrain-1").mkdir(parents=True)  # another run's
    launcher = subprocess.Popen(
        [*command, "--max_restarts", "2", str(script)],
        cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    children.append(launcher.pid)
    _, messages = launcher.communicate(timeout=10 * PATIENCE)
    assert launcher.returncode != 0
    attempts = [json.loads(line) for line in (tmp_path / "attempts.jsonl").read_text().splitlines()]
    assert attempts[0] == ["outputs/pretrain-2", None, []]
    assert attempts[1:] == [["outputs/pretrain-2", "latest", ["checkpoint-2"]]] * 2
    assert "no step was gained in 2 restarts: each went on from step 2." in messages
    starts = json.loads((tmp_path / "outputs" / "pretrain-2" / "environment.json").read_text())
    assert [start["restarts"] for start in starts] == [0, 1, 2]
