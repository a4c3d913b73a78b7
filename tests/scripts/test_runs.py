"""One table of starts: each run leaves all that it promises, is resumed bit for bit, and opens in stock tools."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoProcessor

from mm_utils.model.adapt import attention_layers
from mm_utils.model.build import load_model
from scripts import finetune, pretrain
from tests.kit.corpora import draw
from tests.kit.jsonl import write_lines
from tests.kit.media_files import clip, tone
from tests.kit.models import save_model
from tests.kit.numbered_shards import write_shards
from tests.kit.processes import losses, rows_of
from tests.kit.stock_folders import KINDS, close, our_logits, stock_logits, write_stock

STARTS = ["scratch", "frozen", "clip", "siglip adapters", "stream", "sound", "classes"]
SLOW = [kind for kind in KINDS if kind not in STARTS] + ["towers", "clip adapters", "video"]
CHOSEN = ["--load_best_model_at_end", "false"]  # else the start may be the best


class Finished(NamedTuple):
    """A run to its end with a checkpoint half-way: its start, its flags but for the folder, the folder and its metrics."""

    start: str
    flags: list[str]
    folder: Path
    metrics: dict[str, float]

    def again(self, folder: Path, *more: str) -> dict[str, float]:
        script = finetune if self.start == "classes" else pretrain
        return script.main([*self.flags, "--output_dir", str(folder), *more])


def media(folder: Path, kind: str) -> list[str]:
    """Flags of pairs of sounds or clips, and of a model of them."""
    column, suffix = {"sound": ("audio", "wav"), "video": ("video", "avi")}[kind]
    rows = []
    for number in range(24):
        sound = tone(300 + 60 * number, each=0.4)
        shown = clip(("red", "lime") * 2, (32 + number, 32))
        content = sound if kind == "sound" else shown
        (folder / f"{number}.{suffix}").write_bytes(content)
        split = "validation" if number % 3 == 2 else "train"
        rows.append({column: f"{number}.{suffix}", "caption": f"something of number {number}", "split": split})
    write_lines(folder / "pairs.jsonl", rows)
    model = save_model(folder / "model", "sound" if kind == "sound" else "clip")
    return ["--train_file", str(folder / "pairs.jsonl"), "--model_name_or_path", str(model)]


def flags_of(start: str, folder: Path, tiny: list[str], request: pytest.FixtureRequest) -> list[str]:
    """The flags of a start; `tiny` are those of a run from scratch: data, size of images, length, encoders."""
    data = tiny[:2]
    length = tiny[4:-4]
    short = ["--max_steps", "4"]
    kind, _, adapters = start.partition(" ")
    if start == "scratch":
        return tiny
    if start == "classes":
        test = str(request.getfixturevalue("questions") / "test.jsonl")
        return [*request.getfixturevalue("finetuning_flags"), "--test_file", test]
    if start == "stream":
        return ["--streaming", "--train_file", write_shards(folder / "shards", "tar", [11, 9, 12]), *tiny[2:]]
    if start in ("sound", "video"):
        return [*media(folder, start), *length, *short, *CHOSEN]
    stock = write_stock(folder / "stock", kind if kind in KINDS else "clip")
    if start in ("towers", "frozen"):
        towers = ["--vision_model_name_or_path", stock, "--text_model_name_or_path", stock]
        frozen = ["--freeze_vision", "--freeze_text", "--cache_features"]
        frozen = frozen if start == "frozen" else ["--freeze_vision", "false", "--freeze_text", "false"]
        return [*data, *length, *towers, *frozen, *CHOSEN]
    objective = f"{'sigmoid' if 'siglip' in kind else 'contrastive'},matching"
    lora = ["--lora_rank", "2", "--freeze_text", "--learning_rate", "0.01"] if adapters else []
    own = ["--objectives", objective, "--wise_ft", "false"]  # of few images, the start is saved
    return [*data, *length, "--model_name_or_path", stock, *own, *lora, *CHOSEN]


@pytest.fixture(scope="module", params=[*STARTS, *(pytest.param(start, marks=pytest.mark.slow) for start in SLOW)])
def finished(
    request: pytest.FixtureRequest, tiny_flags: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    if request.param == "video":
        pytest.importorskip("av")
    folder = tmp_path_factory.mktemp("run")
    flags = [*flags_of(request.param, folder, tiny_flags, request), "--save_steps", "2", "--eval_steps", "2"]
    if request.param == "scratch":
        return Finished("scratch", flags, *request.getfixturevalue("scratch_run"))
    run = Finished(request.param, flags, folder / "out", {})
    return run._replace(metrics=run.again(run.folder))


def test_everything_is_left_behind(finished: Finished) -> None:
    folder = finished.folder
    metrics = finished.metrics
    is_task = finished.start == "classes"
    own = ("classes.csv", "results.json") if is_task else ("retrieval.png",)
    files = ["model.safetensors", "config.json", "metrics.jsonl", "training.png", "environment.json"]
    for name in (*files, "checkpoint-2/run.json", *own):
        assert (folder / name).stat().st_size > 0, name
    assert yaml.safe_load((folder / "config.yaml").read_text())["global_batch_size"] == 8
    rows = [row for row in rows_of(folder) if "loss" in row]
    expected = {"loss", "grad_norm", "learning_rate", "pairs_per_second", "data_wait", "peak_memory_gib"}
    assert expected | (set() if is_task or finished.start == "frozen" else {"tokens_per_real"}) <= set(rows[0])
    card = ModelCard.load(folder / "README.md").data
    text = (folder / "README.md").read_text()
    assert "| precision | fp32 |" in text
    assert f"python scripts/{'finetune' if is_task else 'pretrain'}.py" in text
    assert any(tag == "classification" if is_task else tag.endswith("-text-retrieval") for tag in card.tags)
    if finished.start in ("scratch", "classes"):
        assert "The validation split also chose the checkpoint" in text
    if is_task:
        figures = {"accuracy", "accuracy_low", "accuracy_high", "macro_f1", "majority"}
        assert set(metrics) == {f"{split}_{name}" for split in ("eval", "test") for name in figures}
        assert json.loads((folder / "results.json").read_text()) == metrics
        assert metrics["eval_accuracy"] == metrics["test_accuracy"]  # of the same rows, by what was saved
    else:
        assert metrics["eval_text_to_image_chance@1"] == 1 / (6 if finished.start == "stream" else 8)


def test_a_resumed_run_repeats_the_straight_one_bit_for_bit(finished: Finished, tmp_path: Path) -> None:
    """From a copy of its checkpoint, alone and under the name that a push gives it."""
    copy = shutil.copytree(finished.folder / "checkpoint-2", tmp_path / "fetched/last-checkpoint")
    again = finished.again(tmp_path / "again", "--resume_from_checkpoint", str(copy))
    assert again == finished.metrics
    assert losses(tmp_path / "again") == {step: loss for step, loss in losses(finished.folder).items() if step > 2}
    one, other = (load_file(folder / "model.safetensors") for folder in (finished.folder, tmp_path / "again"))
    assert one.keys() == other.keys()
    assert not [name for name, value in one.items() if not torch.equal(value, other[name])]


def test_it_opens_in_stock_tools(finished: Finished) -> None:
    folder = finished.folder
    start = finished.start
    for path in (folder, folder / "checkpoint-2"):
        if start == "classes":
            model = AutoModelForSequenceClassification.from_pretrained(path)
            assert (model.config.id2label, model.config.classifier_inputs) == ({0: "no", 1: "yes"}, "fused")
        else:
            assert AutoModel.from_pretrained(path).config.model_type == "fusion-dual-encoder"
    if start == "classes":
        return
    if start in ("sound", "video"):
        assert AutoModel.from_pretrained(folder, trust_remote_code=True).encode(texts=["a tone"]).shape[0] == 1
        return
    stock = folder / "dual_encoder"
    name = AutoConfig.from_pretrained(stock).architectures[0]
    assert f'{name}.from_pretrained(folder, subfolder="dual_encoder")' in (folder / "README.md").read_text()
    pictures = [draw("red", "circle", 40), draw("blue", "square", 32)]
    close(our_logits(load_model(str(folder)), folder), stock_logits(stock))
    made = [AutoProcessor.from_pretrained(path)(images=pictures, return_tensors="pt") for path in (folder, stock)]
    assert torch.equal(*(each["pixel_values"] for each in made))


@pytest.mark.parametrize(
    "finished",
    ["frozen", "siglip adapters", pytest.param("clip adapters", marks=pytest.mark.slow)],
    indirect=True,
)
def test_what_was_frozen_or_adapted_is_as_it_was(finished: Finished) -> None:
    after = load_model(str(finished.folder))
    if finished.start == "frozen":
        before = load_file(finished.folder / "checkpoint-2/model.safetensors")
        towers = {name for name in before if name.startswith(("vision_model.", "text_model."))}
        assert all(torch.equal(before[name], after.state_dict()[name]) for name in towers)
        assert not torch.equal(before["visual_projection.weight"], after.visual_projection.weight)
        return
    start = load_model(str(finished.folder.parent / "stock")).state_dict()
    changed = {
        name for name, value in start.items() if "_model." in name and not torch.equal(value, after.state_dict()[name])
    }
    assert changed == {f"vision_model.{layer}.weight" for layer in attention_layers(after.vision_model)}
    steps = [after.state_dict()[name] - start[name] for name in changed]
    assert max(int(torch.linalg.matrix_rank(step, rtol=1e-3)) for step in steps) <= 2
