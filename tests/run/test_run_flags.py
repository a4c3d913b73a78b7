"""Flags: those that a run does not read are refused, a resume compares those that decide what is learnt, and few there are."""

import errno
import logging
import shutil
from dataclasses import Field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mm_utils.arguments import parse_args, read_flat_yaml
from mm_utils.distributed import RunError
from mm_utils.run import flags, recipes
from mm_utils.run.script import explained, run_script
from scripts import embed, finetune, pretrain, search
from tests.kit.jsonl import read_lines
from tests.kit.processes import ROOT
from tests.kit.stock_folders import write_stock

KINDS = {"pretrain": pretrain.FLAGS, "finetune": finetune.FLAGS}


def test_a_field_is_of_one_dataclass_alone_and_few_are_flags() -> None:
    decided = {}
    for script, most in (("pretrain", 70), ("finetune", 62)):
        found = [field for kind in KINDS[script] for field in fields(kind)]
        assert len(found) == len({field.name for field in found}) <= most
        for field in found:
            assert decided.setdefault(field.name, field.metadata["help"].decides) == field.metadata["help"].decides
    given = parse_args(*pretrain.FLAGS, argv=["--learning_rate", "0.5", "--save_steps", "3"])
    assert given.learnt.items() >= {"learning_rate": 0.5, "seed": 42, "objectives": given["objectives"]}.items()
    assert given.learnt.keys().isdisjoint(["train_file", "micro_batch_size", "max_steps", "save_steps", "dry_run"])


def test_a_whole_model_without_a_head_is_trained_without_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "fusion-dual-encoder", "fusion_layers": 0}')
    for words, objectives in (([], "contrastive:1"), (["--objectives", "sigmoid:1"], "sigmoid:1")):
        given = parse_args(*pretrain.FLAGS, argv=["--model_name_or_path", str(tmp_path), *words])
        flags.check_flags(given)
        assert (given["objectives"], given["fusion_layers"]) == (objectives, 0)


# -- what is not read ---------------------------------------------------------------------------------------------------
TOWERS = "--vision_model_name_or_path a --text_model_name_or_path b"
RULES = [
    # what leaves them unread, the flags, what lets them be read
    ("--vision_model_name_or_path a", "vision_config=base", ""),
    ("--text_model_name_or_path a", "text_config=base vocab_size=100", ""),
    ("--fusion_layers 0 --objectives contrastive", "rerank_top_k=3", ""),
    ("--objectives contrastive", "head_share=0.3", ""),
    ("", "image_column=a caption_column=a image_root=. allow_outside_root=true", "--train_file x"),
    ("--eval_steps 0", "metric_for_best_model=loss", "--eval_steps 2"),
    ("--train_file web-{0..1}.tar", "image_root=. allow_outside_root=true", "--train_file pairs.csv"),
    ("", "hub_model_id=a/b hub_strategy=checkpoint", "--push_to_hub"),
    (f"{TOWERS} --freeze_vision --cache_features", "min_crop_area=0.5 horizontal_flip=true", TOWERS),
]
UNREAD = r"^--{} is .*, and it would have no effect\. Drop it\.$"


def check(words: list[str]) -> None:
    given = parse_args(*KINDS["pretrain"], argv=words)
    flags.check_flags(given)


@pytest.mark.parametrize(("unread", "settings", "read"), RULES)
def test_unread_flags_are_refused(
    unread: str,
    settings: str,
    read: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("mm_utils.run.flags.check_model", lambda *_: None)
    check(unread.split())
    for setting in settings.split():
        name, _, value = setting.partition("=")
        with pytest.raises(ValueError, match=UNREAD.format(name)):
            check([*unread.split(), f"--{setting}"])
        check([*read.split(), f"--{setting}"])
        (tmp_path / "run.yaml").write_text(f'{name}: "{value}"\n')
        check([*unread.split(), "--config", str(tmp_path / "run.yaml")])  # what a file has may be overruled
        assert f"{name} is " in caplog.messages[-1]


@pytest.mark.parametrize(
    ("script", "words", "settings"),
    [
        (embed, "--model_name_or_path m --index_dir i --images d", "caption_column=a image_root=r max_eval_samples=2"),
        (search, "--index_dir i words", "port=9000"),
        (search, "--index_dir i --serve", "top_k=3 json=true"),
    ],
)
def test_scripts_that_do_not_train_refuse_what_they_leave_unread(script: Any, words: str, settings: str) -> None:
    for name, value in (setting.split("=") for setting in settings.split()):
        with pytest.raises(ValueError, match=UNREAD.format(name)):
            script.main([*words.split(), f"--{name}={value}"])


# -- a resume compares what is learnt -----------------------------------------------------------------------------------
OTHERS = {
    "dataset_name": "a/set", "train_file": "x.jsonl", "validation_file": "x.jsonl", "test_file": "x.jsonl",
    "image_root": ".", "vision_config": "small", "text_config": "small", "objectives": "sigmoid",
    "lr_scheduler_type": "linear", "optim": "sgd", "batch_size_schedule": "0:4,2:8", "hub_strategy": "checkpoint",
    "report_to": "none", "dataloader_num_workers": "1", "hub_model_id": "a/b", "vision_device": "cpu",
}  # fmt: skip
UNTRIED = {
    "max_steps num_train_epochs": "a longer run has another schedule, as docs/reliability.md says",
    "output_dir resume_from_checkpoint dry_run push_to_hub callbacks evaluators": "they belong to one start",
    "micro_batch_size torch_compile": "halves of a batch, and compiled kernels, differ by rounding; see docs/reliability.md",
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


@pytest.fixture(scope="module")
def interrupted(tiny_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 3 steps with the checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    words = [*tiny_flags, "--max_steps", "3", "--save_steps", "2", "--eval_steps", "2", "--no_load_best_model_at_end"]
    pretrain.main([*words, "--output_dir", str(folder)])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS["pretrain"], ids=lambda kind: kind.__name__)
def test_a_resume_with_another_flag_is_refused_or_learns_the_same(
    kind: Any, interrupted: Path, tmp_path: Path
) -> None:
    wanted = load_file(interrupted / "model.safetensors")
    learnt = {}
    resumed = [f"--config={interrupted}/config.yaml", f"--resume_from_checkpoint={interrupted}/checkpoint-2"]
    for field in (field for field in fields(kind) if field.name not in " ".join(UNTRIED).split()):
        output = tmp_path / field.name
        try:
            pretrain.main([*resumed, "--output_dir", str(output), f"--{field.name}={other(field)}"])
        except (ValueError, SystemExit, RunError):
            continue
        found = load_file(output / "model.safetensors")
        if found.keys() != wanted.keys() or not all(torch.allclose(found[name], wanted[name]) for name in wanted):
            learnt[field.name] = other(field)
    assert not learnt


def test_a_moved_run_is_not_resumed_in_its_old_place(tmp_path: Path) -> None:
    config = tmp_path / "new/config.yaml"
    (tmp_path / "new/checkpoint-2").mkdir(parents=True)
    config.write_text(f"output_dir: {tmp_path / 'old'}\n")
    words = ["--config", str(config), "--resume_from_checkpoint", "latest"]
    with pytest.raises(ValueError, match=f"Add --output_dir {tmp_path / 'new'} to go on with it there"):
        flags.check_flags(parse_args(*pretrain.FLAGS, argv=words))
    for others in (words[:2], [*words, "--output_dir", str(tmp_path / "new")]):  # run once more, or as it says
        flags.check_flags(parse_args(*pretrain.FLAGS, argv=others))


# -- how a script ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/data/x"), "/data/x: Disk quota exceeded. Free some"),
        (Exception("No space left on device (os error 28)"), "A file of this run, or of a cache: No space left on"),
        (PermissionError(errno.EACCES, "Permission denied", "/data/out"), "/data/out: Permission denied. Change its"),
        (FileExistsError(errno.EEXIST, "File exists", "/data/a.json"), "/data/a.json: File exists. Give a folder"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "The memory is full; RuntimeError: DefaultCPU"),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
            "DataLoader worker (pid 7) is killed by "
            "signal: Killed. Its memory or /dev/shm may have been full. Pass a lower --data",
        ),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files; "),
        (OSError(errno.EIO, "Input/output error", "/data/in"), ""),
    ],
)
def test_a_disk_or_memory_that_refuses_is_explained_in_one_line(error: Exception, start: str) -> None:
    line = explained(error)
    assert line.startswith(start)
    assert bool(line) == bool(start)


def test_a_script_ends_with_one_line_or_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def raising(error):
        def main():
            raise error

        return main

    caplog.set_level(logging.ERROR)
    with pytest.raises(SystemExit) as ended:
        run_script(raising(ValueError("--a is b; c. Do d.")))
    assert (ended.value.code, caplog.messages) == (1, ["--a is b; c. Do d."])
    with pytest.raises(OSError, match="Input/output error"):
        run_script(raising(OSError(errno.EIO, "Input/output error", "/data/in")))
    caplog.set_level(logging.WARNING)
    caplog.clear()
    for error, name, status in ((KeyboardInterrupt(), "SIGINT", 130), (KeyboardInterrupt(15), "SIGTERM", 143)):
        with pytest.raises(SystemExit) as ended:
            run_script(raising(error), "All is kept.")
        assert (ended.value.code, caplog.messages[-1]) == (status, f"Stopped by {name}. All is kept.")


# -- what a run starts from --------------------------------------------------------------------------------------------
IMAGES = '{"image": "a.png", "caption": "a dog"'
SOUNDS = '{"audio": "a.wav", "caption": "a dog"'
CLIPS = '{"video": "a.mp4", "caption": "a dog"'
GERMAN = '{"image": "a.png", "caption": "ein Hund mit einem Ball"'
STARTS = " ".join(recipes.STARTS)


FROZEN = "--freeze_vision --freeze_text"
TWO = "--vision_model_name_or_path some/vit --text_model_name_or_path some/bert"


@pytest.mark.parametrize(
    ("words", "row", "recipe", "left_out"),
    [
        ("", IMAGES, "photographs", ""),
        ("", GERMAN, "multilingual", ""),
        ("", SOUNDS, "sounds", ""),
        ("", CLIPS, "photographs", ""),
        ("--streaming --max_steps 9", IMAGES, "clip", "cache_features num_train_epochs"),
        ("--max_steps 9 --fusion_layers 2", IMAGES, "photographs", "num_train_epochs objectives"),
        ("--objectives contrastive:1,captioning:1", IMAGES, "photographs", "fusion_layers"),
        ("--horizontal_flip", IMAGES, "photographs", "cache_features"),
        ("--lora_rank 4", IMAGES, "photographs", "freeze_vision freeze_text cache_features backbone_learning_rate"),
        ("--vision_config small", IMAGES, None, ""),
        ("--model_name_or_path some/clip", IMAGES, "clip", STARTS),
        ("--model_name_or_path some/clip", SOUNDS, "sounds", STARTS),
        (f"--model_name_or_path some/clip {FROZEN}", IMAGES, "photographs", STARTS),
        (f"--model_name_or_path some/clip {FROZEN}", SOUNDS, None, ""),
        ("--model_name_or_path some/head", IMAGES, None, ""),
        (TWO, IMAGES, "two_encoders", STARTS),
        (f"{TWO} {FROZEN}", CLIPS, "two_encoders", STARTS),
        ("--model_name_or_path some/clip --text_model_name_or_path some/bert", IMAGES, None, ""),
        (f"{TWO} --freeze_vision", IMAGES, None, ""),
        (f"--config {ROOT}/recipes/clip.yaml --model_name_or_path some/clip", IMAGES, None, ""),
        ("", None, None, ""),
    ],
)
def test_what_a_run_starts_from_decides_its_recipe(words, row, recipe, left_out, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(recipes, "_unreachable", lambda _: "")
    layers = {"some/head": 2}
    monkeypatch.setattr(recipes, "check_model", lambda name: SimpleNamespace(fusion_layers=layers.get(name, 0)))
    if row is not None:
        for name in ("a.png", "a.wav", "a.mp4"):
            (tmp_path / name).touch()
        (tmp_path / "rows.jsonl").write_text(row + "}\n", encoding="utf-8")
        words = f"{words} --train_file {tmp_path / 'rows.jsonl'}"
    found = recipes.recipe_for(parse_args(*pretrain.FLAGS, argv=words.split()))
    assert found.path == (recipe and str(ROOT / f"recipes/{recipe}.yaml"))
    assert found.without == set(left_out.split())
    assert bool(found.reason) == (recipe is not None or TWO in words)


@pytest.mark.parametrize(
    ("captions", "is_english"),
    [
        (["A dog runs on the beach.", "Two men at a café"], True),
        (["red kayak 2-seat", "SKU-10001 paddle, blue"], True),
        ([], True),
        (["Ein Hund rennt am Strand."], False),
        (["một con chó chạy trên bãi biển"], False),
        (["一只狗在海滩上奔跑"], False),
        (["A dog runs on the beach."] * 3 + ["Ein Hund mit einem Ball"], True),
    ],
)
def test_captions_that_are_not_english(captions: list[str], is_english: bool) -> None:
    assert recipes.is_english(captions) == is_english


def test_what_cannot_be_had_is_said_in_three_lines(corpus: Path) -> None:
    with pytest.raises(ValueError, match=r"^--train_file is gone\.jsonl; there is no such file\. Check the path\.$"):
        pretrain.main(["--train_file", "gone.jsonl"])
    said = r"\S+photographs.yaml applies\.\nIt takes laion/CLIP\S+, which is not on this machine.*\.\nGive a copy of it by --model_name_or_path FOLDER, "
    with pytest.raises(ValueError, match=said):
        pretrain.main(["--train_file", str(corpus)])


def test_a_run_takes_its_start_from_the_hub(corpus: Path, tmp_path: Path, monkeypatch, caplog) -> None:
    """The model lies in the cache of the Hub, and its towers are frozen; the command line wins over the recipe."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    clip = Path(write_stock(tmp_path / "clip", "clip"))
    recipe = ROOT / "recipes/photographs.yaml"
    name = str(read_flat_yaml(str(recipe))["model_name_or_path"].value)
    cached = tmp_path / "cache" / f"models--{name.replace('/', '--')}"
    shutil.copytree(clip, cached / "snapshots" / "0")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0")
    words = ["--train_file", str(corpus), "--num_train_epochs", "2", "--output_dir", str(tmp_path / "out")]
    with caplog.at_level(logging.INFO):
        pretrain.main([*words, "--dataloader_num_workers", "0"])
    assert (
        f"No start is named, so this run takes {recipe}: model_name_or_path {name}, freeze_vision True" in caplog.text
    )
    config = {name: entry.value for name, entry in read_flat_yaml(str(tmp_path / "out/config.yaml")).items()}
    assert config["model_name_or_path"] == name
    assert (config["freeze_vision"], config["freeze_text"], config["num_train_epochs"]) == (True, True, 2)
    rows = read_lines(tmp_path / "out/metrics.jsonl")
    assert any(row["step"] == 0 and "eval_mean_recall" in row for row in rows)


def test_a_resume_compares_every_flag_that_changes_what_is_learnt() -> None:
    wanted = (
        "seed learning_rate backbone_learning_rate head_share weight_decay optim lr_scheduler_type warmup_ratio max_grad_norm "
        "objectives min_crop_area horizontal_flip max_seq_length wise_ft metric_for_best_model load_best_model_at_end"
    )
    assert set(wanted.split()) <= parse_args(*pretrain.FLAGS, argv=[]).learnt.keys()
