"""Every mistake ends in one line that names the flag, the file or the line, and what to do instead.

`MISTAKES` are found in the words alone, which end a script with exit status 2; `FOUND_LATER` when files or models are looked at.
"""

import dataclasses
import importlib
import json
import re
import shlex
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from mm_utils.arguments import parse_args
from mm_utils.distributed import RunError
from scripts import pretrain

MISTAKES = [
    ("scripts.eval_retrieval", "", "required: --model_name_or_path"),
    ("scripts.eval_zero_shot", "--model_name_or_path x --split dev2", "--split is dev2; a split is train"),
    ("scripts.eval_zero_shot", "--model_name_or_path x --dataset_name y --templates '{}' 'a photo'", "--templates is a photo; a template says"),
    ("scripts.search", "--index_dir x --query blue red", "--query is given, and 'red' too; give one of them"),
    ("scripts.pretrain", "--train_file ''", "--train_file is empty. Give a value, or leave the flag out."),
    ("scripts.pretrain", "--text_config pyproject.toml", "pyproject.toml is no JSON"),
    ("scripts.eval_zero_shot", f"--model_name_or_path x --dataset_name y --templates {'a' * 300}", "a template says with {}"),  # no name of a file
    ("scripts.embed", "--model_name_or_path x --index_dir x --images x --split test", "has no splits"),
    ("scripts.export", "--model_name_or_path x --output_dir y --layout tf", "--layout is tf; choose one of plain, immich, open_clip"),
    ("scripts.export", "--model_name_or_path x --output_dir y --precision fp16", "--precision is fp16; give fp32 or int8."),
    ("scripts.pretrain", "--model_name_or_path whole --text_config base", "--text_config is base, and --model_name_or_path is whole"),
    ("scripts.pretrain", "--learning_rte 1", "Did you mean '--learning_rate'?"),
    ("scripts.pretrain", "--objectives contrasitve", "there is no such term. Choose of contrastive, sigmoid, captioning, matching"),
    ("scripts.pretrain", "--objectives captioning:1", "no term of it compares images and texts"),
    ("scripts.pretrain", "--objectives contrastive,sigmoid", "share one temperature"),
    ("scripts.pretrain", "--objectives contrastive:-1", "a weight is a finite number"),
    ("scripts.pretrain", "--objectives contrastive:1,contrastive:2", "it has contrastive twice"),
    ("scripts.pretrain", "--objectives contrastive,distillation", "Give --teacher_name_or_path"),
    ("scripts.pretrain", "--optim lion", "--optim"),
    ("scripts.pretrain", "--vision_config huge", "--vision_config is 'huge'; give tiny, small, base"),
    ("scripts.pretrain", "--global_batch_size 1", "at least 2 pairs"),
    ("scripts.pretrain", "--micro_batch_size 0", "--micro_batch_size is 0; give at least 1, 'auto'"),
    ("scripts.pretrain", "--early_stopping_patience 1", "--eval_steps"),
    ("scripts.pretrain", "'--add_tokens=<en> <de>'", "--add_tokens has '<en> <de>'; a token holds no blank"),
    ("scripts.pretrain", "--evaluators math.pi", "--evaluators has math.pi; that is not a function"),
    ("scripts.prepare_data", "", "--sources is empty"),
    ("scripts.prepare_data", "--sources x --output_dir y --caption_column z", "It is written behind a source: --sources PATH,caption_column=VALUE."),
    ("scripts.prepare_data", "--sources x --output_dir s3://b/set", "--output_dir is s3://b/set; a folder of this machine is written"),
    ("scripts.prepare_data", "--sources x --output_dir y --validation_fraction 0.5 --test_fraction 0.5", "leave nothing to train on"),
    ("scripts.pretrain", "--dataloader_num_workers many", "--dataloader_num_workers is many; give a number of processes from 0 to 1024, or auto"),
    ("scripts.launch_ray", "--num_workers 0", "--num_workers is 0"),
    ("scripts.launch_ray", "--tune seed=1,2 --num_workers 1:2", "--tune is seed=1,2, and --num_workers is 1:2"),
    ("scripts.launch_ray", "--tune path=a/b,a-b", "is not a new flag with different values"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "flags", "message"), MISTAKES)
def test_mistakes_in_the_flags_end_with_status_2(
    name: str, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main(shlex.split(flags))
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


NEEDED = {  # what a script asks for before it looks at numbers
    "prepare_data": "--sources x --output_dir y",
    "embed": "--model_name_or_path x --index_dir y",
    "export": "--model_name_or_path x --output_dir y",
    "search": "--index_dir x",
} | dict.fromkeys(["eval_retrieval", "eval_zero_shot", "finetune"], "--model_name_or_path x")


@pytest.mark.parametrize("name", sorted(path.stem for path in Path("scripts").glob("*.py")))
def test_every_number_has_a_least_and_a_most(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(*kinds, **_):
        hints = {field: hint for kind in kinds for field, hint in get_type_hints(kind).items()}
        fields = {field.name: field for kind in kinds for field in dataclasses.fields(kind)}
        for flag, field in fields.items():
            if not {int, float} & {hints[flag], *get_args(hints[flag])}:
                continue
            least = field.metadata["help"].least
            most = field.metadata["help"].most
            assert field.default is None or least <= field.default <= most
            (tmp_path / "config.yaml").write_text(f"{flag}: .nan\n")
            for words in (f"--{flag}={least - 1}", f"--{flag}={most + 1}", f"--config={tmp_path}/config.yaml"):
                with pytest.raises(SystemExit) as ended:
                    parse_args(*kinds, argv=[*NEEDED.get(name, "").split(), words])
                assert (ended.value.code, f"--{flag}" in capsys.readouterr().err) == (2, True), words
        raise SystemExit("seen")

    script = importlib.import_module(f"scripts.{name}")
    monkeypatch.setattr(script, "parse_with_recipe" if name == "pretrain" else "parse_args", refuses)
    with pytest.raises(SystemExit, match="seen"):
        script.main([])


FOUND_LATER = [  # pretrain's words behind those of a tiny run, and what the line has
    ("--train_file no_such.jsonl", "no such file"),
    ("--report_to no_such_tracker", "--report_to is no_such_tracker; installed are"),
    ("--push_to_hub --hub_model_id a/b/c", "--hub_model_id is 'a/b/c'"),
    ("--caption_column captoins", "captions"),
    ("--max_train_samples 1", "needs at least 2 pairs"),
    ("--batch_size_schedule 0:4,2:500", "--global_batch_size is 500, and the training split has 16 images"),
    ("--resume_from_checkpoint nowhere", "--resume_from_checkpoint is nowhere"),
    ("--metric_for_best_model accuracy", "accuracy; this evaluation does not measure it. Choose of text"),
    ("--fusion_layers 0", "--fusion_layers"),
    ("--wise_ft", "--wise_ft is set; the run does not start from a model"),
]


@pytest.mark.parametrize("words", ["", " --dry_run"], ids=["run", "dry-run"])
@pytest.mark.parametrize(("flags", "message"), FOUND_LATER)
def test_mistakes_found_while_running_name_the_remedy(
    flags: str, message: str, words: str, tiny_flags: list[str], tmp_path: Path
) -> None:
    with pytest.raises((ValueError, RunError, OSError), match=re.escape(message)) as caught:
        pretrain.main([*tiny_flags, "--output_dir", str(tmp_path / "out"), *shlex.split(flags + words)])
    assert "\n" not in str(caught.value)


MODELS = [
    ("outputs/mien", "there is no such folder. Did you mean outputs/mine? Give the folder of a run"),
    ("./nowhere/at/all", "there is no such folder. Give the folder of a run, or a Hub id such as owner/name"),
    ("outputs/stopped", "this folder holds no model. Give a checkpoint in it, such as outputs/stopped/checkpoint-12"),
    ("outputs", "this folder holds no model. Give the folder of a run that has ended"),
    ("adapter", "this folder holds an adapter of PEFT and not its model"),
    ("open_clip", "this folder holds a model of open_clip"),
    ("sentences", "this folder holds a SentenceTransformer. Give the model in it: sentences/0_CLIPModel"),
    ("a vit", "give scripts/pretrain.py --vision_model_name_or_path 'a vit'"),
    ("bert", "give scripts/pretrain.py --text_model_name_or_path bert"),
    ("llava", "--vision_model_name_or_path llava and --text_model_name_or_path llava"),
]


@pytest.mark.parametrize(("name", "message"), MODELS)
def test_a_model_that_is_none_is_answered_with_what_to_give(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = {"outputs/mine": "fusion-dual-encoder", "a vit": "vit", "bert": "bert", "llava": "llava"}
    for folder, kind in kinds.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text(json.dumps({"model_type": kind}))
    files = "adapter/adapter_config.json open_clip/open_clip_config.json sentences/modules.json sentences/0_CLIPModel/config.json"
    for file in files.split():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}")
    for step in (2, 12):
        (tmp_path / f"outputs/stopped/checkpoint-{step}").mkdir(parents=True)
    with pytest.raises(ValueError, match=rf"^--model_name_or_path is {name}; .*{re.escape(message)}"):
        pretrain.main(["--model_name_or_path", name])
