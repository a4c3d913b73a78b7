"""The weights between the start and the end of training: which they are, which are chosen, and what a run writes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import VisionTextDualEncoderModel

from mm_utils.arguments import parse_args
from mm_utils.evaluation.retrieval import RetrievalEvaluator
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.build import ObjectiveArguments, build_objective
from mm_utils.run.callbacks import attach, flags_of_callbacks
from mm_utils.run.flags import PRETRAINING
from mm_utils.training.starts.interpolation import TENTHS, choose_between, interpolate, weights_of_start
from scripts import pretrain
from tests.kit.launches import rows_of, weights
from tests.kit.numbered_rows import new_tokenizer

START = {"vision.weight": torch.zeros(2), "steps": torch.tensor(3)}
END = {"vision.weight": torch.ones(2), "steps": torch.tensor(9), "classifier.weight": torch.full((2,), 5.0)}
ALONE: Any = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None)


class Model:
    """Holds a state dict."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {name: value.clone() for name, value in END.items()}

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights

    def load_state_dict(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def save_pretrained(self, folder: Path) -> None:
        torch.save(self.weights, folder / "weights")


def best_at(peak: float) -> Any:
    """An evaluation whose best alpha is `peak`."""
    return lambda model, loader, accelerator: {
        "accuracy": 1 - abs(float(model.weights["vision.weight"][0]) - peak),
        "loss": 0.5,
    }


def chosen(tmp_path: Path, peak: float) -> tuple[dict[str, float], dict[str, Tensor]]:
    model: Any = Model()
    found = choose_between(START, model, best_at(peak), [], ALONE, "accuracy", tmp_path, TENTHS)
    assert all(torch.equal(value, model.weights[name]) for name, value in torch.load(tmp_path / "weights").items())
    return found, model.weights


def test_weights_are_interpolated_where_there_are_two() -> None:
    found = interpolate(START, {**END, "new.weight": torch.full((1,), 4.0)}, 0.25)
    assert {name: value.tolist() for name, value in found.items()} == {
        "vision.weight": [0.25, 0.25],
        "steps": 9,
        "classifier.weight": [5.0, 5.0],
        "new.weight": [4.0],
    }
    assert torch.equal(interpolate(START, END, 1.0)["vision.weight"], END["vision.weight"])


def test_the_best_weights_are_saved_and_reported(tmp_path: Path) -> None:
    found, weights = chosen(tmp_path, 0.3)
    assert found == {"accuracy": pytest.approx(1.0), "loss": 0.5, "wise_ft_alpha": 0.3}
    assert weights["vision.weight"].tolist() == pytest.approx([0.3, 0.3])
    report = json.loads((tmp_path / "wise_ft.json").read_text())
    assert (report["metric"], report["saved_alpha"]) == ("accuracy", 0.3)
    assert [row["alpha"] for row in report["measured"]] == [step / 10 for step in range(11)]


@pytest.mark.parametrize(
    ("measured", "greater_is_better", "alpha"),
    [
        ({"loss": [3, 2, 1]}, False, 1.0),
        ({"recall": [1, 2, 3], "rerank_recall": [2, 3, 1]}, True, 0.5),  # after re-ranking, as the model is used
    ],
)
def test_what_chooses_alpha(
    measured: dict[str, list[float]], greater_is_better: bool, alpha: float, tmp_path: Path
) -> None:
    def evaluate(model: Any, *rest: Any) -> dict[str, float]:
        place = round(2 * float(model.weights["vision.weight"][0]))
        return {name: values[place] for name, values in measured.items()}

    name, model, alphas = next(iter(measured)), Model(), (0.0, 0.5, 1.0)
    found = choose_between(START, model, evaluate, [], ALONE, name, tmp_path, alphas, None, greater_is_better)  # type: ignore[arg-type]
    assert found["wise_ft_alpha"] == alpha


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


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("", True),
        ("--vision_model_name_or_path a", True),
        ("--vision_model_name_or_path a --text_model_name_or_path b --streaming", True),
        ("--vision_model_name_or_path a --text_model_name_or_path b", False),
        ("--model_name_or_path a", False),
    ],
)
def test_a_run_that_starts_from_no_model_is_refused(flags: str, refused: bool) -> None:
    given = parse_args(*PRETRAINING, *flags_of_callbacks("pretrain"), argv=[*flags.split(), "--wise_ft"])
    if not refused:
        attach("pretrain", given)
        return
    with pytest.raises(
        ValueError, match=r"--wise_ft is set; the run does not start from a model.*Give --model_name_or_path"
    ):
        attach("pretrain", given)


@pytest.fixture(scope="module")
def started(tiny_flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "out"
    pretrain.main([*tiny_flags, "--learning_rate", "3e-3", "--output_dir", str(folder)])
    return folder


def test_pre_training_saves_the_best_weights_between_its_start_and_its_end(
    started: Path, tiny_flags: list[str], tmp_path: Path
) -> None:
    model = ["--model_name_or_path", str(started), "--learning_rate", "1e-2", "--save_steps", "2"]
    run = [*tiny_flags[:2], *tiny_flags[4:], *model]
    pretrain.main([*run, "--eval_steps", "0", "--output_dir", str(tmp_path / "plain")])
    flags = [*run, "--wise_ft", "--eval_steps", "0"]
    metrics = pretrain.main([*flags, "--output_dir", str(tmp_path / "wise")])
    start, end, found = (weights(folder) for folder in (started, tmp_path / "plain", tmp_path / "wise"))
    report = json.loads((tmp_path / "wise/wise_ft.json").read_text())
    for name, value in interpolate(start, end, report["saved_alpha"]).items():
        torch.testing.assert_close(found[name], value, msg=name)
    assert [row["alpha"] for row in report["measured"]] == [0, 0.25, 0.5, 0.75, 1]
    recalls = [row["mean_recall"] for row in report["measured"]]
    assert recalls[0] == rows_of(started)[-1]["eval_mean_recall"]
    assert recalls[-1] == rows_of(tmp_path / "plain")[-1]["eval_mean_recall"]
    assert metrics["eval_mean_recall"] == recalls[int(4 * report["saved_alpha"])] == max(recalls)
    stock = VisionTextDualEncoderModel.from_pretrained(tmp_path / "wise/dual_encoder").state_dict()
    assert torch.equal(stock["visual_projection.weight"], found["visual_projection.weight"])
    resume = ["--resume_from_checkpoint", str(tmp_path / "wise/checkpoint-2")]
    assert pretrain.main([*flags, *resume, "--output_dir", str(tmp_path / "again")]) == metrics


def test_the_start_is_measured_once_and_the_end_is_of_a_later_step(
    started: Path, tiny_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ["--model_name_or_path", str(started), "--learning_rate", "1e-2", "--wise_ft"]
    flags = [*tiny_flags[:2], *tiny_flags[4:], *model]
    forecast = pretrain.main([*flags, "--dry_run", "--output_dir", str(tmp_path)])
    assert forecast["dry_run_evaluations"] == 4 + 1 + 5 + 1  # the best, five alphas, and the chosen one again
    real, calls = RetrievalEvaluator.__call__, list[int]()
    monkeypatch.setattr(RetrievalEvaluator, "__call__", lambda *given: calls.append(1) or real(*given))
    pretrain.main([*flags, "--output_dir", str(tmp_path)])
    [chosen] = [row for row in rows_of(tmp_path) if "saved_step" in row]
    assert len(calls) == 11 - (chosen["saved_step"] == 4 and "saved_projections_step" not in chosen)
    evaluated = [row["step"] for row in rows_of(tmp_path) if "eval_mean_recall" in row]
    assert evaluated == [1, 2, 3, 4]
