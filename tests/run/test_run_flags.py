"""Flags that would do nothing are refused before anything is read; a full disk ends a script in one line."""

import errno
import logging
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest

from mm_utils.arguments import is_rare, parse_args
from mm_utils.reliability import failures
from mm_utils.run import flags
from mm_utils.run.doors import Doors
from mm_utils.run.script import run_script

OTHER = {
    "vocab_size": "100",
    "image_size": "64",
    "projection_dim": "48",
    "vision_pooling": "cls",
    "text_pooling": "cls",
}


@pytest.mark.parametrize("name", flags.OF_NEW_MODELS)
def test_flags_of_new_models_are_refused_for_a_whole_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "check_model", lambda *_: None)
    value = OTHER.get(name, "base" if name.endswith("config") else "other")
    for argv in ([f"--{name}", value], ["--model_name_or_path", "whole"]):
        flags.check_flags(parse_args(*flags.PRETRAINING, argv=argv))
    given = parse_args(*flags.PRETRAINING, argv=["--model_name_or_path", "whole", f"--{name}", value])
    with pytest.raises(ValueError, match=f"--{name} is {value}, and --model_name_or_path is whole; a whole model has"):
        flags.check_flags(given)


def test_a_field_is_of_one_dataclass_alone() -> None:
    for script, own in (("pretrain", flags.PRETRAINING), ("finetune", flags.FINETUNING)):
        names = [
            field.name for kind in (*own, *Doors(script).arguments) for field in fields(kind) if not is_rare(field)
        ]
        assert len(names) == len(set(names))


def test_a_full_disk_is_one_line_and_other_errors_keep_their_traceback(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = SimpleNamespace(is_alone=True, report=lambda _: True, fail=lambda: sys.exit(1), finish=lambda: None)
    monkeypatch.setattr(failures, "start_monitor", lambda: alone)

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/data/out/index.arrow")

    def broken() -> None:
        raise OSError(errno.EIO, "Input/output error", "/data/in")

    caplog.set_level(logging.ERROR)
    with pytest.raises(SystemExit) as ended:
        run_script(full)
    assert ended.value.code == 1
    [line] = caplog.messages
    assert line.startswith("/data/out/index.arrow: No space left on device. Free some space")
    with pytest.raises(OSError, match="Input/output error"):
        run_script(broken)
