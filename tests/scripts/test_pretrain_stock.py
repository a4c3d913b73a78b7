"""The main job from stock models: trained, resumed, evaluated, and opened again in the class it came from."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoProcessor

from mm_utils.model.adapt import attention_layers
from mm_utils.model.build import load_model
from scripts import eval_retrieval, pretrain
from tests.kit.corpora import draw
from tests.kit.stock_folders import KINDS, TEXTS, close, our_logits, stock_logits, write_stock

QUICK = ("clip", "siglip2")


@pytest.mark.parametrize(
    "kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in QUICK)]
)
def test_a_stock_model_is_trained_resumed_and_written_as_it_came(kind, tiny_flags, corpus, tmp_path):
    start, whole, resumed = (str(tmp_path / name) for name in ("start", "whole", "resumed"))
    write_stock(Path(start), kind)
    objective = "sigmoid,matching" if "siglip" in kind else "contrastive,matching"
    flags = [
        *tiny_flags[:2], *tiny_flags[4:], "--model_name_or_path", start, "--objectives", objective, "--max_steps", "2",
    ]  # fmt: skip
    flags += ["--save_steps", "1", "--load_best_model_at_end", "false"]  # the start is the best
    metrics = pretrain.main([*flags, "--output_dir", whole])
    checkpoint = f"{whole}/checkpoint-1"
    assert pretrain.main([*flags, "--output_dir", resumed, "--resume_from_checkpoint", checkpoint]) == metrics
    model = load_model(whole)
    assert model.config.fusion_layers == 1
    for name, value in load_model(resumed).state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    logits = stock_logits(f"{whole}/dual_encoder")
    close(our_logits(model, whole), logits)
    assert not torch.allclose(logits, stock_logits(start), atol=1e-3)
    name = type(AutoModel.from_pretrained(start)).__name__
    assert AutoConfig.from_pretrained(f"{whole}/dual_encoder").architectures == [name]
    assert f'{name}.from_pretrained(folder, subfolder="dual_encoder")' in Path(whole, "README.md").read_text()
    pictures = [draw("red", "circle", 40), draw("blue", "square", 32)]
    ours, theirs = (AutoProcessor.from_pretrained(folder) for folder in (whole, f"{whole}/dual_encoder"))
    assert "attention_mask" in ours(text=TEXTS, padding=True)
    if kind != "siglip2":
        assert torch.equal(*(made(images=pictures, return_tensors="pt").pixel_values for made in (ours, theirs)))
    for folder in (start, f"{whole}/dual_encoder"):
        found = eval_retrieval.main(["--model_name_or_path", folder, "--train_file", str(corpus)])
        assert not any("rerank" in name for name in found)  # it has no head, and none is made up
    same = {f"eval_{name}": value for name, value in found.items()}
    assert same == pytest.approx(
        {name: value for name, value in metrics.items() if name.removeprefix("eval_") in found}, rel=1e-4
    )


def test_siglips_frozen_text_tower_which_reads_padding_runs_once_and_gives_the_same(tiny_flags, tmp_path):
    start = write_stock(tmp_path / "start", "siglip")
    flags = [
        *tiny_flags[:2], *tiny_flags[4:], "--model_name_or_path", start, "--objectives", "sigmoid,matching",
        "--max_steps", "2", "--freeze_text",
    ]  # fmt: skip
    for name, cache in (("plain", []), ("cached", ["--cache_features"])):
        pretrain.main([*flags, *cache, "--output_dir", str(tmp_path / name)])
    plain, cached = (
        [json.loads(line).get("loss") for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("plain", "cached")
    )
    assert [loss for loss in cached if loss] == pytest.approx([loss for loss in plain if loss], rel=2e-3)


@pytest.mark.parametrize(
    ("kind", "objective"),
    [pytest.param("clip", "contrastive,matching", marks=pytest.mark.slow), ("siglip", "sigmoid,matching")],
)
def test_adapters_of_a_stock_model_are_trained_resumed_and_merged(kind, objective, tiny_flags, tmp_path):
    """The vision tower by adapters, the text tower not at all; the head and the scalars as ever."""
    pytest.importorskip("peft")
    start = write_stock(tmp_path / "start", kind)
    flags = [*tiny_flags[:2], *tiny_flags[4:], "--model_name_or_path", start, "--max_steps", "2", "--save_steps", "1"]
    flags += [
        "--lora_rank", "2", "--freeze_text", "--learning_rate", "0.01", "--ema_decay", "0.5",
        "--load_best_model_at_end", "false", "--objectives", objective,
    ]  # fmt: skip
    whole, resumed = str(tmp_path / "whole"), str(tmp_path / "resumed")
    metrics = pretrain.main([*flags, "--output_dir", whole])
    checkpoint = ["--resume_from_checkpoint", f"{whole}/checkpoint-1"]
    assert pretrain.main([*flags, *checkpoint, "--output_dir", resumed]) == metrics
    before, after = (load_model(folder).state_dict() for folder in (start, whole))
    changed = {name for name, value in before.items() if "fusion." not in name and not torch.equal(value, after[name])}
    towers = {name for name in changed if "_model." in name}
    assert towers == {f"vision_model.{layer}.weight" for layer in attention_layers(load_model(start).vision_model)}
    assert changed - towers >= {"logit_scale"}
    ranks = [torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3) for name in towers]
    assert max(ranks) <= 2
    close(our_logits(load_model(whole), whole), stock_logits(f"{whole}/dual_encoder"))
