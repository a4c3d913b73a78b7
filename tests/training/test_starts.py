"""Runs that start from a closed form, or that are interpolated with their start: on any number of processes, nothing ends below it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer, VisionTextDualEncoderModel

from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.training_data import TrainingData
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import train_tokenizer
from mm_utils.objectives.build import ObjectiveArguments, build_objective
from mm_utils.training import closed_form
from mm_utils.training.starts import interpolate, paired_features, start_projections, weights_of_start
from scripts import pretrain
from tests.kit.corpora import COLOURS, SHAPES
from tests.kit.models import write_towers
from tests.kit.numbered_rows import new_tokenizer, rows_of, training_data
from tests.kit.processes import logged, run_on_ranks
from tests.kit.processes import rows_of as logged_rows
from tests.kit.processes import weights as saved_weights


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    tokenizer = train_tokenizer([f"a {colour} {shape}, number one" for colour in COLOURS for shape in SHAPES], 200)
    return write_towers(tmp_path_factory.mktemp("towers"), "vit", [*COLOURS, *SHAPES], tokenizer)


def joined(towers: dict[str, str], **changes: Any) -> FusionDualEncoderModel:
    torch.manual_seed(0)
    args = ModelArguments(**towers, fusion_layers=0, **changes)  # type: ignore[arg-type]
    return build_model(args, train_tokenizer(["a"], 100))


def data_of(towers: dict[str, str], images: int = 12) -> TrainingData:
    """Images of which two cannot be decoded, each with 1 to 4 captions."""
    processor: Any = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(towers["text_model_name_or_path"]))
    rows = tokenize_captions(rows_of(images, broken=[2, 7]), processor.tokenizer, 16)
    return training_data(rows, 4, processor=processor, size=32)


def test_a_residual_projection_starts_from_the_same_cosines(towers: dict[str, str]) -> None:
    Accelerator(cpu=True)
    data, cosines = data_of(towers), []
    [batch] = data.loaders.evaluation(data.splits["train"], 20)
    for projection in ("linear", "mlp"):
        model = joined(towers, projection=projection)
        start_projections(100, towers["vision_model_name_or_path"], data, model, Accelerator())
        model.eval().double()
        with torch.no_grad():
            image_ME, _ = model.encode_image(batch["pixel_values"].double())
            cosines.append(image_ME @ model.encode_text(batch["input_ids"], batch["attention_mask"])[0].T)
    torch.testing.assert_close(*cosines, rtol=0, atol=1e-4)
    assert cosines[0].std() > 0.1


def test_images_are_fitted_to_texts_that_are_frozen(towers: dict[str, str]) -> None:
    """The images' map is that of the fit to the texts' embeddings, which stay."""
    Accelerator(cpu=True)
    data, model, name = data_of(towers), joined(towers), towers["vision_model_name_or_path"]
    before = model.text_projection.requires_grad_(False).weight.clone()
    features = paired_features(model, 100, data, Accelerator(), name)
    start_projections(100, name, data, model, Accelerator())
    assert torch.equal(model.text_projection.weight, before)
    [batch] = data.loaders.evaluation(data.splits["train"], 20)
    with torch.no_grad():
        image_ME, _ = model.eval().encode_image(batch["pixel_values"])
        text_TE, _ = model.encode_text(batch["input_ids"], batch["attention_mask"])
    torch.testing.assert_close(features.text_TB, text_TE)
    unit, found = features.unit(), closed_form.fit(features, model.config.projection_dim)
    expected_ME = unit.image_MA @ found.image_AE @ found.text_BE.T
    torch.testing.assert_close(torch.nn.functional.normalize(expected_ME, dim=-1).float(), image_ME)


def start_on_rank(towers: dict[str, str]) -> list[Any]:
    """The temperature, what the maps give of all features, and these: single directions of equal strength may turn into each other."""
    Accelerator(cpu=True)
    data, model, name = data_of(towers), joined(towers), towers["vision_model_name_or_path"]
    start_projections(100, name, data, model, Accelerator())
    found = paired_features(model, 100, data, Accelerator(), name)
    with torch.no_grad():
        scores = model.visual_projection(found.image_MA) @ model.text_projection(found.text_TB).T
    return [model.logit_scale.detach(), scores, found.image_MA, found.text_TB, found.owner_T, found.names_MB]


def test_the_start_is_the_same_on_any_number_of_processes(towers: dict[str, str]) -> None:
    alone = start_on_rank(towers)
    assert len(alone[2]) == len(alone[5]) == 10
    for found in run_on_ranks(2, start_on_rank, towers):
        assert torch.equal(found[0], alone[0])
        for one, other in zip(alone, found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


# -- whole runs ---------------------------------------------------------------------------------------------------------


def flags_of(towers: dict[str, str], tiny_flags: list[str], folder: Path, *more: str) -> list[str]:
    paths = [word for name, value in towers.items() for word in (f"--{name}", value)]
    return [*tiny_flags, *paths, "--output_dir", str(folder), "--learning_rate", "0.5", *more]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_begins_with_its_baseline_and_does_not_end_below_it(
    frozen: bool, towers: dict[str, str], tiny_flags: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The learning rate destroys towers and projections, and those of the start are saved, with a head that was trained."""
    more = ["--freeze_vision", "--freeze_text"] if frozen else []
    metrics = pretrain.main(flags_of(towers, tiny_flags, tmp_path / "run", *more))
    found = logged(tmp_path / "run", "eval_mean_recall")
    assert list(found) == [0, 1, 2, 3, 4]
    assert metrics["eval_mean_recall"] == max(found.values()) == found[0]
    saved = FusionDualEncoderModel.from_pretrained(tmp_path / "run").state_dict()
    begin = 0 if frozen else 2  # of the head's stage
    first = FusionDualEncoderModel.from_pretrained(tmp_path / "run" / f"checkpoint-{begin}").state_dict()
    head = {name for name in first if name.startswith(("fusion.", "token_head.", "caption_adapter."))}
    assert all(torch.equal(saved[name], first[name]) for name in first.keys() - head)
    assert not all(torch.equal(saved[name], first[name]) for name in head)
    *_, evaluated, chosen = logged_rows(tmp_path / "run")
    assert evaluated["step"] == 4  # the evaluation behind the pictures is not logged twice
    assert (chosen["saved_part"], chosen["saved_projections_step"]) == ("head", begin)
    sentence = f"Saved is the model with the fusion head of step {chosen['saved_step']}, the best of"
    assert sentence in caplog.text
    assert sentence in (tmp_path / "run" / "README.md").read_text()
    assert ("trained from the first step on, without --head_share" in caplog.text) == frozen


# -- weights between the start and the end --------------------------------------------------------------------------------


def tiny(**fields: Any) -> FusionDualEncoderModel:
    return build_model(ModelArguments(image_size=16, **fields), new_tokenizer())


def test_a_head_that_was_never_trained_is_not_interpolated() -> None:
    new, objectives = tiny(fusion_layers=1), ObjectiveArguments("contrastive:1,captioning:1")
    towers = {*("vision_model", "text_model", "visual_projection", "text_projection", "logit_scale")}
    assert {name.split(".")[0] for name in weights_of_start(new)} == towers
    added = build_objective(new, objectives, 0).added
    assert {name.split(".")[0] for name in weights_of_start(new, added)} == towers
    assert {name.split(".")[0] for name in weights_of_start(new)} >= {"fusion", "caption_adapter"}
    again = build_objective(new, objectives, 0).added  # a model whose head was trained
    assert weights_of_start(new, again).keys() == weights_of_start(new).keys()


@pytest.fixture(scope="module")
def begun(tiny_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "out"
    pretrain.main([*tiny_flags, "--learning_rate", "3e-3", "--output_dir", str(folder)])
    return folder


def test_pre_training_saves_the_best_weights_between_its_start_and_its_end(
    begun: Path, tiny_flags: list[str], tmp_path: Path
) -> None:
    model = ["--model_name_or_path", str(begun), "--learning_rate", "1e-2", "--save_steps", "2"]
    run = [*tiny_flags[:2], *tiny_flags[4:], *model]
    pretrain.main([*run, "--eval_steps", "0", "--output_dir", str(tmp_path / "plain")])
    flags = [*run, "--wise_ft", "--eval_steps", "0"]
    metrics = pretrain.main([*flags, "--output_dir", str(tmp_path / "wise")])
    start, end, found = (saved_weights(folder) for folder in (begun, tmp_path / "plain", tmp_path / "wise"))
    report = json.loads((tmp_path / "wise/wise_ft.json").read_text())
    for name, value in interpolate(start, end, report["saved_alpha"]).items():
        torch.testing.assert_close(found[name], value, msg=name)
    assert [row["alpha"] for row in report["measured"]] == [0, 0.25, 0.5, 0.75, 1]
    recalls = [row["mean_recall"] for row in report["measured"]]
    assert recalls[0] == logged_rows(begun)[-1]["eval_mean_recall"]
    assert recalls[-1] == logged_rows(tmp_path / "plain")[-1]["eval_mean_recall"]
    assert metrics["eval_mean_recall"] == recalls[int(4 * report["saved_alpha"])] == max(recalls)
    stock = VisionTextDualEncoderModel.from_pretrained(tmp_path / "wise/dual_encoder").state_dict()
    assert torch.equal(stock["visual_projection.weight"], found["visual_projection.weight"])
    resume = ["--resume_from_checkpoint", str(tmp_path / "wise/checkpoint-2")]
    assert pretrain.main([*flags, *resume, "--output_dir", str(tmp_path / "again")]) == metrics
