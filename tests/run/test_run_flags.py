"""Flags that would do nothing are refused before anything is read; a full disk ends a script in one line."""

import errno
import logging
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from mm_utils.arguments import parse_args
from mm_utils.model.arguments import ModelArguments
from mm_utils.run import flags
from mm_utils.run.callbacks import flags_of_callbacks
from mm_utils.run.script import run_script
from scripts.finetune import FLAGS


@pytest.mark.parametrize(
    "name", ["vision_model_name_or_path", "vision_config", "text_config", "vocab_size", "projection_dim", "projection"]
)
def test_flags_of_new_models_are_refused_for_a_whole_one(name: str) -> None:
    value: Any = {"vocab_size": 100, "projection_dim": 48, "projection": "mlp"}.get(
        name, "base" if name.endswith("config") else "other"
    )
    ModelArguments(**{name: value})
    with pytest.raises(ValueError, match=f"--{name} is {value}, and --model_name_or_path is whole; a whole model has"):
        ModelArguments(model_name_or_path="whole", **{name: value})


def test_a_field_is_of_one_dataclass_alone_and_few_are_flags() -> None:
    for script, own in (("pretrain", flags.PRETRAINING), ("finetune", FLAGS)):
        found = [field for kind in (*own, *flags_of_callbacks(script)) for field in fields(kind)]
        assert len(found) == len({field.name for field in found})
        assert len(found) <= {"pretrain": 70, "finetune": 62}[script]


ANY_FILE = "A file of this run, or of a cache"


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/data/x.arrow"),
            "/data/x.arrow: No space left on device. Free",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), f"{ANY_FILE}: Disk quota exceeded. Free some"),
        (Exception("No space left on device (os error 28)"), f"{ANY_FILE}: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "/data/out"), "/data/out: Permission denied. Change its"),
        (FileExistsError(errno.EEXIST, "File exists", "/data/a.json"), "/data/a.json: File exists. Give a folder"),
        (
            MemoryError("Unable to allocate 9 TiB"),
            "The memory is full; MemoryError: Unable to allocate 9 TiB. Give smaller",
        ),
        *(
            (RuntimeError(message), f"The memory is full; RuntimeError: {message}")
            for message in (
                "DefaultCPUAllocator: can't allocate memory: you tried",
                "could not create a memory object",
            )
        ),
        (OSError(errno.EFBIG, "File too large", "/data/out"), "/data/out: File too large. Free some"),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
            "DataLoader worker (pid 7) is killed by signal: Killed. Its memory or /dev/shm may have been full: pass a lower --data",
        ),
    ],
)
def test_a_disk_or_memory_that_refuses_is_one_line_and_other_errors_keep_their_traceback(
    error: Exception, start: str, caplog: pytest.LogCaptureFixture
) -> None:
    def full() -> None:
        raise error

    def broken() -> None:
        raise OSError(errno.EIO, "Input/output error", "/data/in")

    caplog.set_level(logging.ERROR)
    with pytest.raises(SystemExit) as ended:
        run_script(full)
    assert ended.value.code == 1
    [line] = caplog.messages
    assert line.startswith(start)
    with pytest.raises(OSError, match="Input/output error"):
        run_script(broken)


def test_an_interrupted_script_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(KeyboardInterrupt) as caught:  # of which Python makes the exit status of the signal
        run_script(interrupted)
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert not capsys.readouterr().err


def test_a_resumed_run_is_compared_by_the_flags_that_decide_what_is_learnt() -> None:
    given = parse_args(*flags.PRETRAINING, argv=["--learning_rate", "0.5", "--save_steps", "3"])
    assert given.learnt.items() >= {"learning_rate": 0.5, "seed": 42, "objectives": given["objectives"]}.items()
    assert given.learnt.keys().isdisjoint(["train_file", "micro_batch_size", "max_steps", "save_steps", "dry_run"])
    kinds = [*flags.PRETRAINING, *FLAGS, *flags_of_callbacks("pretrain"), *flags_of_callbacks("finetune")]
    decided: dict[str, str] = {}
    for field in (field for kind in kinds for field in fields(kind)):
        assert decided.setdefault(field.name, field.metadata["help"].decides) == field.metadata["help"].decides


def test_a_moved_run_is_not_resumed_in_its_old_place(tmp_path: Path) -> None:
    config = tmp_path / "new/config.yaml"
    (tmp_path / "new/checkpoint-2").mkdir(parents=True)
    config.write_text(f"output_dir: {tmp_path / 'old'}\n")
    words = ["--config", str(config), "--resume_from_checkpoint", "latest"]
    with pytest.raises(ValueError, match=f"Add --output_dir {tmp_path / 'new'} to go on with it there"):
        flags.check_flags(parse_args(*flags.PRETRAINING, argv=words))
    flags.check_flags(parse_args(*flags.PRETRAINING, argv=words[:2]))  # run once more
    for place in ("new", "third"):  # as it says, or where a trial writes
        flags.check_flags(parse_args(*flags.PRETRAINING, argv=[*words, "--output_dir", str(tmp_path / place)]))
    (tmp_path / "new/checkpoint-2").rmdir()
    flags.check_flags(parse_args(*flags.PRETRAINING, argv=words))  # a recipe, on a first start


@pytest.mark.parametrize(
    ("given", "rows", "expected"),
    [({}, 300, 64), ({}, 40, 40), ({"batch_size_schedule": "0:16,9:64"}, 40, 64), ({}, 1, 64)],
)
def test_a_batch_that_nobody_sized_is_at_most_all_rows(given: dict, rows: int, expected: int) -> None:
    sizes = flags.TrainingArguments(**given).batch_sizes.at_most(rows)
    assert sizes.sizes[-1] == expected
    assert flags.TrainingArguments(**given).settled(sizes, rows, False).batch_sizes == sizes
