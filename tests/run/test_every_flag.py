"""What is given is done or refused: every flag of a script, for every kind of start.

`test_unread_flags_are_refused` goes over the rules of `mm_utils.run.flags`. The long ones find flags that a rule lacks: one trains
a step from every kind of start, notes which fields of which dataclass are read outside of checks, and sets each of the others; one
resumes a run with another value of each field.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mm_utils.arguments import parse_args
from mm_utils.distributed import RunError
from mm_utils.run import flags
from mm_utils.run.callbacks import attach, flags_of_callbacks
from scripts import embed, finetune, pretrain, search
from tests.kit.numbered_shards import write_shards
from tests.kit.stock_folders import write_stock

TOWERS = "--vision_model_name_or_path a --text_model_name_or_path b"
RULES = [
    # what leaves them unread, the flags, what lets them be read
    ("--vision_model_name_or_path a", "vision_config=base", ""),
    ("--text_model_name_or_path a", "text_config=base vocab_size=100", ""),
    (
        "--fusion_layers 0 --objectives contrastive",
        "rerank_top_k=3",
        "",
    ),
    ("--objectives contrastive", "head_share=0.3", ""),
    (
        "",
        "image_column=a caption_column=a image_root=. allow_outside_root=true",
        "--train_file x",
    ),
    ("--dataset_name sounds", "image_column=a caption_column=a", "--dataset_name x"),
    ("", "trust_remote_code=true", "--text_model_name_or_path a"),
    ("--eval_steps 0", "metric_for_best_model=loss", "--eval_steps 2"),
    ("--train_file web-{0..1}.tar", "image_root=. allow_outside_root=true", "--train_file pairs.csv"),
    ("", "hub_model_id=a/b hub_strategy=every_save", "--push_to_hub"),
    (f"{TOWERS} --freeze_vision --cache_features", "min_crop_area=0.5 horizontal_flip=true", TOWERS),
]


def kinds_of(script: str) -> list[Any]:
    own = flags.PRETRAINING if script == "pretrain" else finetune.FLAGS
    return [*own, *flags_of_callbacks(script)]


def check(words: list[str]) -> None:
    given = parse_args(*flags.PRETRAINING, *flags_of_callbacks("pretrain"), argv=words)
    flags.check_flags(given)
    attach("pretrain", given)


@pytest.mark.parametrize(("unread", "settings", "read"), RULES)
def test_unread_flags_are_refused(
    unread: str,
    settings: str,
    read: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for each in ("mm_utils.run.flags.check_model", "mm_utils.training.teacher.check_model"):
        monkeypatch.setattr(each, lambda *_: None)
    check(unread.split())
    for setting in settings.split():
        name, _, value = setting.partition("=")
        with pytest.raises(ValueError, match=rf"^--{name} is .*, and it would have no effect\. Drop it\.$"):
            check([*unread.split(), f"--{setting}"])
        check([*read.split(), f"--{setting}"])
        (tmp_path / "run.yaml").write_text(f'{name}: "{value}"\n')
        check([*unread.split(), "--config", str(tmp_path / "run.yaml")])  # what a file has may be overruled
        assert f"{name} is " in caplog.messages[-1]


OF_OTHER_SCRIPTS = [
    (
        embed,
        "--model_name_or_path m --index_dir i --images d",
        "caption_column=a image_root=r max_eval_samples=2",
    ),
    (search, "--index_dir i words", "port=9000"),
    (search, "--index_dir i --serve", "top_k=3 json=true"),
]


@pytest.mark.parametrize(("script", "words", "settings"), OF_OTHER_SCRIPTS)
def test_scripts_that_do_not_train_refuse_what_they_leave_unread(script: Any, words: str, settings: str) -> None:
    for name, value in (setting.split("=") for setting in settings.split()):
        with pytest.raises(ValueError, match=rf"^--{name} is .*, and it would have no effect\. Drop it\.$"):
            script.main([*words.split(), f"--{name}={value}"])


# -- observed, for every kind of start -----------------------------------------------------------------------------------
STARTS = ("scratch", "backbones", "whole", "own", "resume", "stream", "cached", "finetune")
_CHECKS = {"__post_init__", "check_flags", "refuse", "to_dict", "learnt"}
OTHERS = {
    "dataset_name": "sounds", "train_file": "x.jsonl",
    "validation_file": "x.jsonl", "test_file": "x.jsonl", "image_root": ".",
    "vision_config": "small", "text_config": "small", "objectives": "sigmoid",
    "lr_scheduler_type": "linear", "optim": "sgd", "batch_size_schedule": "0:4,2:8",
    "micro_batch_size": "2", "hub_strategy": "every_save",
    "report_to": "none", "dataloader_num_workers": "1", "class_weights": "balanced",
    "classifier_inputs": "image", "max_steps": "3", "hub_model_id": "a/b",
}  # fmt: skip
ALLOWED = {
    "num_train_epochs": "--max_steps is instead of it, as --help says",
    "max_corrupt_share": "it is read once a row cannot be, see tests/reliability/test_skipped.py",
    "callbacks": "it is read before the run",
    "evaluators": "it is read before the run",
    "dry_run": "it is read before the run",
}


def other(field: Field) -> str:
    """Return a value that is neither the default nor off."""
    if field.name in OTHERS:
        return OTHERS[field.name]
    if isinstance(field.default, bool):
        return str(not field.default)
    if isinstance(field.default, (int, float)):
        return str(field.default / 2 if isinstance(field.default, float) and field.default else field.default + 2)
    return "1" if "int" in str(field.type) or "float" in str(field.type) else "other"


@contextmanager
def reads(script: str) -> Iterator[set[str]]:
    """Yield the names of the fields that are read meanwhile, apart from checks and copies."""
    found: set[str] = set()

    def watched(names: set[str]) -> Callable[[Any, str], Any]:
        def get(self: Any, name: str) -> Any:
            if name in names and name not in found:
                frame = sys._getframe(1)
                while frame is not None and frame.f_code.co_filename.endswith(("mm_utils/arguments.py",)):
                    frame = frame.f_back
                inside = frame
                while inside is not None and inside.f_code.co_name not in _CHECKS:
                    inside = inside.f_back
                if inside is None and not frame.f_code.co_filename.endswith(("dataclasses.py", "copy.py")):
                    found.add(name)
            return object.__getattribute__(self, name)

        return get

    with pytest.MonkeyPatch.context() as patch:
        for kind in kinds_of(script):
            patch.setattr(kind, "__getattribute__", watched({each.name for each in fields(kind)}), raising=False)
        yield found


class StartedError(Exception):
    """The flags have passed all checks."""


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_every_flag_is_read_or_refused(
    start: str,
    tiny_flags: list[str],
    finetuning_flags: list[str],
    pretrained: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = write_stock(tmp_path / "clip", "clip")
    short = [*tiny_flags[:2], *tiny_flags[4:], "--max_steps", "2"]
    towers = ["--vision_model_name_or_path", stock, "--text_model_name_or_path", stock]
    words = {
        "scratch": [*tiny_flags, "--max_steps", "2"],
        "backbones": [*short, *towers],
        "whole": [*short, "--model_name_or_path", stock],
        "own": [*short, "--model_name_or_path", pretrained],
        "resume": [*tiny_flags, "--save_steps", "2", "--resume_from_checkpoint", "latest"],
        "stream": ["--streaming", "--train_file", write_shards(tmp_path, "tar", [11, 9, 12]), *tiny_flags[2:]],
        "cached": [*short, *towers, "--freeze_vision", "--freeze_text", "--cache_features"],
        "finetune": finetuning_flags,
    }[start]  # fmt: skip
    script: Any = finetune if start == "finetune" else pretrain
    name = script.__name__.rpartition(".")[2]
    if start == "resume":
        script.main([*tiny_flags, "--save_steps", "2", "--output_dir", str(tmp_path / "run")])
        shutil.rmtree(tmp_path / "run/checkpoint-4")
    with reads(name) as found:
        script.main([*words, "--output_dir", str(tmp_path / "run")])

    def started(*_: Any) -> None:
        raise StartedError

    monkeypatch.setattr(script, "start_run", started)
    silent = {}
    for field in (field for kind in kinds_of(name) for field in fields(kind)):
        if field.name in found or field.name in ALLOWED:
            continue
        given = [*words, f"--{field.name}={other(field)}"]
        try:
            script.main(given)
        except (ValueError, SystemExit):
            continue
        except StartedError:
            silent[field.name] = other(field)
    assert not silent, silent


# -- a resume compares what is learnt -----------------------------------------------------------------------------------
UNTRIED = {
    "max_steps num_train_epochs": "a longer run has another schedule, as docs/reliability.md says",
    "output_dir resume_from_checkpoint dry_run push_to_hub callbacks evaluators": "they belong to one start",
    "micro_batch_size torch_compile": "halves of a batch, and compiled kernels, differ by rounding; see docs/reliability.md",
}


@pytest.fixture(scope="module")
def interrupted(tiny_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 3 steps with the checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    words = [*tiny_flags, "--max_steps", "3", "--save_steps", "2", "--eval_steps", "2", "--no_load_best_model_at_end"]
    pretrain.main([*words, "--output_dir", str(folder)])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds_of("pretrain"), ids=lambda kind: kind.__name__)
def test_a_resume_with_another_flag_is_refused_or_learns_the_same(
    kind: Any, interrupted: Path, tmp_path: Path
) -> None:
    untried = set(" ".join(UNTRIED).split())
    wanted, learnt = load_file(interrupted / "model.safetensors"), {}
    resumed = [f"--config={interrupted}/config.yaml", f"--resume_from_checkpoint={interrupted}/checkpoint-2"]
    for field in (field for field in fields(kind) if field.name not in untried):
        output = tmp_path / field.name
        try:
            pretrain.main([*resumed, "--output_dir", str(output), f"--{field.name}={other(field)}"])
        except (ValueError, SystemExit, RunError):
            continue
        found = load_file(output / "model.safetensors")
        same = found.keys() == wanted.keys() and all(torch.allclose(found[name], wanted[name]) for name in wanted)
        if not same:
            learnt[field.name] = other(field)
    assert not learnt
