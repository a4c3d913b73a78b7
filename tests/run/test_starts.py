"""Starts of a run: what is refused, the folder and the files written there, one run at a time, and what a restart resumes."""

import importlib.util
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import yaml
from accelerate import PartialState
from transformers import TrainerControl, TrainerState

from mm_utils import cores, distributed
from mm_utils.arguments import Parsed, parse_args
from mm_utils.distributed import RunError
from mm_utils.run import output_folder, restarts
from mm_utils.run import start as starting
from mm_utils.run.launched import check_processes, launched_processes, refuse_settings
from mm_utils.run.rendezvous import rendezvous
from mm_utils.run.start import start_run
from mm_utils.training.arguments import TrainingArguments
from scripts.pretrain import FLAGS as PRETRAINING
from tests.kit.processes import PATIENCE, let_accelerate_find_ranks, run_on_ranks


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Set up the state that a script's accelerator sets up; leave no folder locked."""
    PartialState()
    yield
    output_folder.unlock()


def fork(children: list[int], body: Callable[[Callable[[str], Any]], Any]) -> tuple[int, int]:
    """Call `body(report)` in a child, which then sleeps; return its pid and the pipe of its reports."""
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


def read_report(reading: int) -> str:
    """Return a child's next report; empty once no process can write another."""
    return os.read(reading, 1000).decode()


def launched(monkeypatch: pytest.MonkeyPatch, launch: str, attempt: int = 0, run_id: str = "none") -> list[str]:
    """Set what torchelastic sets for one attempt of a launch; return the launchers' names."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/tmp/te/{run_id}_{launch}/attempt_{attempt}/0/error.json")
    return restarts.launcher_names()


def begin_training(folder: Path, step: int) -> None:
    """Record that training begins at a step."""
    arguments = SimpleNamespace(output_dir=str(folder))
    restarts.RestartRecord().on_train_begin(arguments, TrainerState(global_step=step), TrainerControl())


def message_of(check: Any, *args: Any) -> str | None:
    try:
        check(*args)
    except (RunError, ValueError) as error:
        return str(error)
    return None


def start(folder: Path | None, **values: Any) -> TrainingArguments:
    """Start a run; return its training arguments."""
    args = TrainingArguments(output_dir=None if folder is None else str(folder), **values)
    return start_run("pretrain", Parsed([args])).args


def starts(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "environment.json").read_text())


def test_a_start_writes_its_arguments_and_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain.py", "--hub_token", "hf_canaryabcdefghijkl", "--seed", "7"])
    start(tmp_path / "out", seed=7)
    start(tmp_path / "out", seed=7)
    about, _ = starts(tmp_path / "out")
    assert about["command"] == "pretrain.py --hub_token *** --seed 7"
    assert about["hosts"] == [os.uname().nodename]
    assert (about["num_processes"], about["devices"]) == (1, ["cpu"])
    assert {"time", "python", "platform", "torch", "transformers", "accelerate", "datasets", "code"} <= set(about)
    assert about["commit"] is None or len(about["commit"].removesuffix("-dirty")) == 40
    assert yaml.safe_load((tmp_path / "out/config.yaml").read_text())["seed"] == 7


# -- what is refused ----------------------------------------------------------------------------------------------------
def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "out", tmp_path / "file", tmp_path / "\0"):
        with pytest.raises(RunError, match=r"it cannot be written: .* Give a folder that can"):
            start(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(RunError, match="it is your home folder"):
        start(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_threads_are_those_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    monkeypatch.setattr(cores, "cores_per_process", lambda: 7)
    before = torch.get_num_threads()
    for variable, threads in (("3", 3), ("1", 7)):  # 1 is the launcher's, where nobody has set any
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
        starting.use_cpu_well()
        found = torch.get_num_threads()
        torch.set_num_threads(before)
        assert found == threads


def start_on_rank(root: str) -> list[Any]:
    """On each of two ranks, what starts that differ end with, and one that does not."""
    let_accelerate_find_ranks()
    os.chdir(root)
    logging.disable()
    rank = distributed.rank()
    digest = starting.code_digest
    starting.code_digest = lambda: f"digest {rank}"
    messages = [message_of(lambda: start(None))]
    starting.code_digest = digest
    messages.append(message_of(lambda: start(None, seed=rank)))
    own = ["--output_dir", f"of-{rank}", "--dataloader_num_workers", str(rank), "--image_root", str(rank)]
    messages.append(parse_args(*PRETRAINING, argv=own).common)
    args = start(None)
    begin_training(Path(str(args.output_dir)), 3)
    return [messages, args.output_dir, sorted(os.listdir("outputs")), starts(Path(str(args.output_dir)))]


def test_ranks_start_together_or_all_stop_with_their_difference(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, start_on_rank, str(tmp_path))
    [code, seed, common], folder, made, [about] = first
    assert 'the code of mm_utils is "digest 0" on rank 0 and "digest 1" on rank 1;' in code
    assert "--seed is 0 on rank 0 and 1 on rank 1; it differs between processes" in seed
    assert common
    assert second[0] == first[0]
    assert second[1] == folder == "outputs/pretrain-1"
    assert made == ["pretrain-1"]
    assert (about["num_processes"], about["devices"]) == (2, ["cpu", "cpu"])
    assert about["resumed_from"] == 3


# -- restarts -----------------------------------------------------------------------------------------------------------
def test_a_restart_resumes_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launched(monkeypatch, "a", 0)
    first = start(None)
    assert (first.output_dir, first.resume_from_checkpoint) == ("outputs/pretrain-1", None)
    Path("outputs/pretrain-1/checkpoint-5").mkdir()
    launched(monkeypatch, "a", 1)
    again = start(None)
    assert (again.output_dir, again.resume_from_checkpoint) == ("outputs/pretrain-1", "latest")
    assert Path("outputs/pretrain-1/checkpoint-5").exists()
    launched(monkeypatch, "b", 1)  # whose first attempt died before it came to its folder
    with pytest.raises(RunError, match="it already holds a run"):
        start(Path("outputs/pretrain-1"))
    other = start(None)
    assert (other.output_dir, other.resume_from_checkpoint) == ("outputs/pretrain-2", None)
    launched(monkeypatch, "c")
    assert (
        start(None).output_dir == "outputs/pretrain-2"
    )  # the start before has failed, and left nothing but its record
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert restarts.launcher_names() == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    assert restarts.launcher_names() == [f"{os.uname().nodename}:job-7"]


def test_the_checkpoint_that_a_restart_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launched(monkeypatch, "a")
    there = "there/checkpoint-4"

    def resumed(given):
        args = TrainingArguments(output_dir=str(tmp_path), resume_from_checkpoint=given)
        return output_folder.claim_folder("pretrain", args, {}, launch)[1]

    assert (resumed(None), resumed(there)) == (None, there)
    restarts.record_start(tmp_path, {}, launch)
    assert resumed(None) == "latest"
    (tmp_path / "checkpoint-9").mkdir()  # of another run, as this one has not begun to train
    assert resumed(there) == there
    begin_training(tmp_path, 4)
    assert resumed(there) == "latest"
    (tmp_path / "checkpoint-9").rmdir()
    assert resumed(there) == there
    launch = launched(monkeypatch, "b")
    assert resumed(None) is None


# -- one run at a time -------------------------------------------------------------------------------------------------


def lock_and_report(folder: Path) -> Callable[[Callable[[str], Any]], None]:
    return lambda report: report(output_folder.lock_folder(folder, 0) or "locked")


def test_a_second_run_is_refused_with_the_name_of_the_first(tmp_path: Path, children: list[int]) -> None:
    pid, reading = fork(children, lock_and_report(tmp_path))
    assert read_report(reading) == "locked\n"
    problem = output_folder.lock_folder(tmp_path, 0.1)
    assert problem is not None
    assert (
        f"--output_dir is {tmp_path}; a run is writing there: process {pid} on {os.uname().nodename}, since" in problem
    )
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert [output_folder.lock_folder(tmp_path, 0) for _ in range(2)] == [None, None]  # its own lock is no other's
    assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()


def test_a_run_that_was_done_meanwhile_is_not_replaced(tmp_path: Path, children: list[int]) -> None:
    """Two starts at once: the second waits for the lock of the first, and looks into the folder again."""

    def hold(report):
        report(output_folder.lock_folder(tmp_path, 0) or "locked")
        time.sleep(0.5)
        (tmp_path / "metrics.jsonl").write_text("{}")
        os._exit(0)

    _, reading = fork(children, hold)
    assert read_report(reading) == "locked\n"
    assert "already holds a run" in problem(tmp_path)
    assert output_folder.lock_folder(tmp_path, PATIENCE) is None


def test_the_workers_of_a_killed_run_do_not_keep_its_lock(tmp_path: Path, children: list[int]) -> None:
    def run(report):
        output_folder.lock_folder(tmp_path, 0)
        worker = os.fork()
        if worker == 0:
            time.sleep(2 * PATIENCE)
        report(str(worker))

    pid, reading = fork(children, run)
    worker = int(read_report(reading))
    children.append(worker)
    assert output_folder.lock_folder(tmp_path, 0) is not None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert psutil.Process(worker).status() != psutil.STATUS_ZOMBIE
    assert output_folder.lock_folder(tmp_path, 0) is None


# -- whose files they are -----------------------------------------------------------------------------------------------
RUNS_OWN = ("metrics.jsonl", "model.safetensors", "README.md", "config.yaml", "retrieval.png", "tokenizer.json",
            "dual_encoder/config.json", "checkpoint-4/run.json", "checkpoint-2.superseded/run.json")  # fmt: skip
OTHERS = ("IMG_1.JPG", "README.md", "config.yaml", "tokenizer.json", "dual_encoder/notes.txt")
FOREIGN = ("thesis.txt", "checkpoint-notes/thesis.txt", "checkpoint-4b", "my.model", "photos/README.md")


def write_files(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {".lock"}


def problem(folder: Path) -> str:
    """Why a start cannot have a folder; "" if it can."""
    args = TrainingArguments(output_dir=str(folder))
    return message_of(output_folder.claim_folder, "pretrain", args, {}, []) or ""


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (FOREIGN, ""),
        ((*RUNS_OWN, *FOREIGN), "it already holds a run"),
        *(((name,), f"it holds {name.partition('/')[0]}, which no run of this project wrote") for name in OTHERS),
    ],
)
def test_a_folder_with_files_is_used_if_nothing_of_others_is_replaced(
    names: Sequence[str], said: str, tmp_path: Path
) -> None:
    write_files(tmp_path, names)
    assert problem(tmp_path).startswith(f"--output_dir is {tmp_path}; {said}" if said else "")
    assert bool(problem(tmp_path)) == bool(said)
    assert files_in(tmp_path) == set(names)


FINISHED = ("metrics.jsonl", "model.safetensors", "config.json", "config.yaml", "environment.json", "README.md")
PUSHED = ("model.safetensors", "metrics.jsonl", "README.md", "last-checkpoint/trainer_state.json")
SAVED = ("metrics.jsonl", "checkpoint-4/trainer_state.json")
ANOTHER = "already holds a run. Continue it with --resume_from_checkpoint latest, or give another folder."
UNSAVED = "already holds a run. It has no checkpoint-N to continue from: give another folder."
BY_PATH = "/last-checkpoint and another --output_dir."


@pytest.mark.parametrize(
    ("names", "resume_from", "said"),
    [
        ((*FINISHED, *SAVED), "latest", ""),
        ((*FINISHED, *SAVED), "{folder}/checkpoint-4", ""),
        ((*FINISHED, "kept/trainer_state.json"), "{folder}/kept", ""),
        ((*FINISHED, *SAVED), "other/checkpoint-4", ANOTHER),
        ((*FINISHED, *SAVED), "{folder}/moved/checkpoint-4", ANOTHER),
        (("metrics.jsonl",), "other/checkpoint-4", ANOTHER),
        (FINISHED, "other/checkpoint-4", UNSAVED),
        (FINISHED, "latest", UNSAVED),
        ((*FINISHED, "checkpoint-4.superseded/run.json"), "latest", UNSAVED),
        (FINISHED, None, UNSAVED),
        (("metrics.jsonl", "environment.json"), "latest", ""),  # killed before it has saved
        (("config.yaml", "environment.json"), "other/checkpoint-4", ""),  # refused before it has begun
        ((), "other/last-checkpoint", ""),
        (PUSHED, "latest", BY_PATH),
        (PUSHED, None, BY_PATH),
        (PUSHED, "other/checkpoint-4", BY_PATH),
        (PUSHED, "{folder}/last-checkpoint", ""),
    ],
)
def test_a_folder_with_a_run_is_taken_by_that_run_alone(
    names: Sequence[str], resume_from: str | None, said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    write_files(folder, names)
    if "environment.json" in names:
        (folder / "environment.json").write_text("[{}]")
    for _ in range(2):
        args = TrainingArguments(
            output_dir=str(folder), resume_from_checkpoint=resume_from and resume_from.format(folder=folder)
        )
        found = message_of(output_folder.claim_folder, "pretrain", args, {}, []) or ""
        assert found.endswith(said)
        assert bool(found) == bool(said)
    if said:
        assert output_folder.claim_folder("pretrain", args, {}, relaunched(folder))[0] == folder


def relaunched(folder: Path) -> list[str]:
    """Note a start in a folder, and return the name of its launcher, which starts it once more."""
    restarts.record_start(folder, {}, ["a launcher"])
    return ["a launcher"]


def test_a_run_to_resume_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="of which run, --output_dir says"):
        output_folder.claim_folder("pretrain", TrainingArguments(resume_from_checkpoint="latest"), {}, [])


@pytest.mark.parametrize(
    ("folder", "config", "said"),
    [
        ("/", {}, "or the root of a disk. Give a folder of its own"),
        ("home", {}, "it is your home folder"),
        ("data", {"train_file": "data/pairs.jsonl"}, "--train_file is data/pairs.jsonl, and"),
        (".", {"train_file": "pairs.jsonl"}, "--train_file is pairs.jsonl, and"),
        ("images/run", {"dataset_name": "images"}, "--dataset_name is images"),
        ("other/../images", {"dataset_name": "images"}, "--dataset_name is images"),
        ("data/run", {"train_file": "data/pairs.jsonl", "dataset_name": "user/set", "seed": 1}, ""),
        ("images/tuned", {"model_name_or_path": "images"}, ""),
        ("data", {"train_file": "hf://data/x.parquet"}, ""),
    ],
)
def test_a_folder_of_other_things_is_no_output_folder(
    folder: str, config: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    found = output_folder.misplaced(Path(folder), config) or ""
    assert said in found
    assert bool(found) == bool(said)


# -- what launchers set --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("environment", "launched", "sees"),
    [
        ("", 1, 1),
        ("WORLD_SIZE=2 RANK=1 LOCAL_RANK=1", 2, 2),
        ("WORLD_SIZE=2", 2, 1),
        ("HOROVOD_SIZE=2 HOROVOD_RANK=1", 2, 1),
        ("OMPI_COMM_WORLD_SIZE=4 PMIX_RANK=3", 4, 1),
        ("OMPI_COMM_WORLD_SIZE=4 ACCELERATE_USE_CPU=true", 4, 4),  # which Accelerate reads
        ("PMIX_RANK=1", 2, 1),
        ("SLURM_NTASKS=8 SLURM_PROCID=0 SLURM_LOCALID=0", 1, 1),  # the script of sbatch
        ("SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_LOCALID=1", 2, 1),
        ("SLURM_NTASKS=2 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2", 2, 1),
        ("SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0", 1, 1),
        ("SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=3 WORLD_SIZE=32", 32, 32),  # torchrun on four machines
        ("SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=3 WORLD_SIZE=1", 1, 1),
    ],
)
def test_processes_that_would_train_apart_are_refused(environment: str, launched: int, sees: int) -> None:
    found = launched_processes(dict(word.split("=") for word in environment.split()))
    assert found[0] == launched
    said = message_of(check_processes, found, sees) or ""
    assert bool(said) == (launched != sees)
    if said and found[1] != "WORLD_SIZE":
        assert f"{launched} processes were launched, by {found[1]}, but each sees 1;" in said
        assert "accelerate launch" in said
        assert "launch_ray.py" in said


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4", "--micro_batch_size"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=1", ""),
        ("ACCELERATE_MIXED_PRECISION=fp8", "Set no, bf16 or fp16"),
        ("ACCELERATE_MIXED_PRECISION=bf16", ""),
        ("ACCELERATE_DYNAMO_BACKEND=inductor", "--torch_compile"),
        ("ACCELERATE_DYNAMO_BACKEND=NO", ""),  # as the launcher sets it
        ("ACCELERATE_USE_MEGATRON_LM=true", "fsdp2.yaml"),
        ("ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE=DATA_PARALLEL", "torch.distributed"),
        ("FSDP_ACTIVATION_CHECKPOINTING=true", "--gradient_checkpointing"),
        ("FSDP_ACTIVATION_CHECKPOINTING=false", ""),
        ("FSDP_IGNORED_MODULES=text_model", "all weights are sharded"),
    ],
)
def test_settings_of_accelerate_that_a_run_would_not_follow_are_refused(setting: str, said: str) -> None:
    name, _, value = setting.partition("=")
    found = message_of(refuse_settings, {name: value}) or ""
    assert found.startswith(f"{name} is {value}, " if said else "")
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.skipif(bool(importlib.util.find_spec("deepspeed")), reason="deepspeed is installed")
def test_a_package_that_a_configuration_asks_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(RunError, match="DeepSpeed is not installed"):
        starting.make_accelerator()


# -- how the processes of a start find each other -----------------------------------------------------------------------
LONG = 30.0


def prefixes(store: dist.Store, world_size: int) -> set[str]:
    """Return the prefixes that the ranks of one start get."""
    with ThreadPoolExecutor(world_size) as pool:
        return set(pool.map(lambda rank: rendezvous(store, rank, world_size, LONG), range(world_size)))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_ranks_of_a_start_get_one_prefix_and_every_start_another(world_size: int) -> None:
    store = dist.HashStore()
    found = [prefixes(store, world_size) for _ in range(3)]
    assert [len(each) for each in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3


def test_a_start_does_not_wait_for_processes_of_the_start_before() -> None:
    """The first start ends because its rank 1 is missing."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(rendezvous, store, rank, 3, 0.5) for rank in (0, 2)]
        with pytest.raises(TimeoutError, match="process 0 waited 0 s for process 1, or for others"):
            ended[0].result()
        with pytest.raises(TimeoutError, match="process 2 waited 0 s for process 0, or for others"):
            ended[1].result()
    assert len(prefixes(store, 3)) == 1


def test_rank_0_may_be_restarted_while_others_wait() -> None:
    """They drop the prefix of the rank 0 that is gone for that of the next."""
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(rendezvous, store, 1, 3, LONG)
        with pytest.raises(TimeoutError):
            rendezvous(store, 0, 3, 0.5)
        others = [pool.submit(rendezvous, store, rank, 3, LONG) for rank in (0, 2)]
        assert len({each.result() for each in [waiting, *others]}) == 1
