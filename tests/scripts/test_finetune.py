"""A trained model on labelled tasks, in process, on tiny data; and what the script says to bad input."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification

from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from scripts import finetune
from tests.kit.corpora import COLOURS, SHAPES
from tests.kit.finetuning import weights
from tests.kit.hub import HubServer
from tests.kit.launches import ROOT, launch, losses

FIGURES = {"accuracy", "accuracy_low", "accuracy_high", "macro_f1", "majority"}


@pytest.fixture(scope="module")
def finished(
    finetuning_flags: list[str], questions: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, float]]:
    folder = tmp_path_factory.mktemp("finished") / "out"
    more = ["--test_file", str(questions / "test.jsonl"), "--eval_steps", "2", "--save_steps", "2"]
    return folder, finetune.main([*finetuning_flags, *more, "--output_dir", str(folder)])


def test_everything_is_left_behind(finished: tuple[Path, dict[str, float]]) -> None:
    folder, metrics = finished
    names = ("model.safetensors", "config.yaml", "metrics.jsonl", "training.png", "confusion.png", "classes.csv")
    for name in names:
        assert (folder / name).stat().st_size > 0, name
    assert json.loads((folder / "results.json").read_text()) == metrics
    assert set(metrics) == {f"{split}_{name}" for split in ("eval", "test") for name in FIGURES}
    assert metrics["eval_accuracy"] == metrics["test_accuracy"]  # of the same rows, by what was saved
    assert metrics["eval_majority"] == 0.5
    card = (folder / "README.md").read_text()
    assert "AutoModelForSequenceClassification.from_pretrained" in card
    assert "It classifies into 2 classes" in card
    assert "The validation split also chose the checkpoint, so" in card
    assert not (folder / "dual_encoder").exists()


def test_the_saved_model_is_a_stock_artefact(finished: tuple[Path, dict[str, float]]) -> None:
    folder, _ = finished
    for path in (folder, folder / "checkpoint-2"):
        model = AutoModelForSequenceClassification.from_pretrained(path)
        assert model.config.id2label == {0: "no", 1: "yes"}
        assert model.config.classifier_inputs == "fused"
    assert FusionDualEncoderModel.from_pretrained(folder).fusion is not None


def test_a_resumed_run_repeats_the_straight_one(
    finished: tuple[Path, dict[str, float]], finetuning_flags: list[str], tmp_path: Path
) -> None:
    folder, _ = finished
    more = ["--eval_steps", "2", "--save_steps", "2", "--resume_from_checkpoint", str(folder / "checkpoint-2")]
    finetune.main([*finetuning_flags, *more, "--output_dir", str(tmp_path)])
    assert losses(tmp_path) == {step: loss for step, loss in losses(folder).items() if step > 2}
    again = weights(tmp_path)
    for name, value in weights(folder).items():
        assert torch.equal(value, again[name]), name


def test_config_yaml_reruns_the_run(finished: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    folder, metrics = finished
    assert yaml.safe_load((folder / "config.yaml").read_text())["metric_for_best_model"] == "accuracy"
    assert finetune.main(["--config", str(folder / "config.yaml"), "--output_dir", str(tmp_path)]) == metrics


def test_adapters_are_merged_when_saved_and_resumed_apart(
    finetuning_flags: list[str], pretrained: str, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    lora = [
        *finetuning_flags, "--lora_rank", "2", "--freeze_vision", "--save_steps", "2", "--micro_batch_size", "3",
    ]  # fmt: skip
    finetune.main([*lora, "--output_dir", str(tmp_path / "a")])
    names = set(weights(tmp_path / "a"))
    assert not any("lora" in name or "base_layer" in name for name in names)
    before = FusionDualEncoderModel.from_pretrained(pretrained).state_dict()
    after = weights(tmp_path / "a")
    changed = {
        name
        for name, value in before.items()
        if name.startswith("text_model.") and not torch.equal(value, after[name])
    }
    assert changed
    assert all("attention" in name and name.endswith(".weight") for name in changed)
    resume = ["--resume_from_checkpoint", str(tmp_path / "a/checkpoint-2")]
    finetune.main([*lora, "--output_dir", str(tmp_path / "b"), *resume])
    again = weights(tmp_path / "b")
    for name, value in after.items():
        assert torch.equal(value, again[name]), name


def test_what_is_pushed_is_what_was_saved(finetuning_flags: list[str], tmp_path: Path, server: HubServer) -> None:
    hub = ["--push_to_hub", "--hub_model_id", "tester/classes", "--wise_ft"]
    finetune.main([*finetuning_flags, *hub, "--max_steps", "2", "--output_dir", str(tmp_path)])
    sent = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert server.sha256("tester/classes", "model.safetensors") == sent
    assert {"README.md", "confusion.png"} <= set(server.repos["tester/classes"])
    assert "config.yaml" not in server.repos["tester/classes"]  # it names folders of this machine


def test_it_learns_what_it_is_shown(finetuning_flags: list[str], questions: Path, tmp_path: Path) -> None:
    for split, size in (("train", 40), ("test", 46)):
        rows = [
            {
                "image": str(questions / f"{colour}-{shape}-{size}.png"),
                "question": "what colour is it?",
                "answer": colour,
            }
            for colour in COLOURS
            for shape in SHAPES
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--train_file", str(tmp_path / "train.jsonl"), "--validation_file", str(tmp_path / "test.jsonl")]
    longer = ["--max_steps", "60", "--eval_steps", "20", "--load_best_model_at_end", "--allow_outside_root"]
    rates = ["--learning_rate", "2e-3", "--backbone_learning_rate", "1e-3", "--class_weights", "balanced"]
    metrics = finetune.main([*finetuning_flags, *data, *longer, *rates, "--output_dir", str(tmp_path / "out")])
    assert metrics["eval_accuracy"] > 0.7
    evaluated = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert metrics["eval_accuracy"] == max(row["eval_accuracy"] for row in evaluated if "eval_accuracy" in row)


def test_texts_alone_in_parts_as_large_as_fit(pretrained: str, tmp_path: Path) -> None:
    rows = [{"text": f"a {colour} {shape}", "label": shape} for colour in COLOURS for shape in SHAPES] * 3
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--model_name_or_path", pretrained, "--train_file", str(tmp_path / "texts.jsonl")]
    short = ["--global_batch_size", "12", "--max_steps", "3", "--dataloader_num_workers", "0"]
    finetuning_flags = [*data, *short, "--micro_batch_size", "auto", "--learning_rate", "3e-3", "--ema_decay", "0.5"]
    metrics = finetune.main([*finetuning_flags, "--output_dir", str(tmp_path / "out")])
    assert 0 <= metrics["eval_accuracy"] <= 1  # of the few rows held out
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").config.classifier_inputs == "text"


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(finetuning_flags: list[str], tmp_path: Path) -> None:
    finetuning_flags = [*finetuning_flags, "--global_batch_size", "7", "--classifier_dropout", "0"]
    finetune.main([*finetuning_flags, "--output_dir", str(tmp_path / "one")])
    script, config = str(ROOT / "scripts/finetune.py"), str(ROOT / "accelerate_configs/two_processes.yaml")
    arguments = [
        "--config_file", config, script, *finetuning_flags, "--micro_batch_size", "2", "--output_dir",
        str(tmp_path / "two"),
    ]  # fmt: skip
    two = launch(arguments, tmp_path, ACCELERATE_USE_CPU="true")
    assert two.returncode == 0, two.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
