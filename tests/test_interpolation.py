"""Weights between start and end: which are mixed, which are chosen, and what is left in the folder."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mm_utils.interpolation import InterpolationArguments, choose_between, interpolate

START = {"vision.weight": torch.zeros(2), "steps": torch.tensor(3), "classifier.weight": torch.full((2,), 7.0)}
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
    """An evaluation that a certain alpha does best at."""
    return lambda model, loader, accelerator: {
        "accuracy": 1 - abs(float(model.weights["vision.weight"][0]) - peak),
        "loss": 0.5,
    }


def chosen(tmp_path: Path, peak: float, **flags: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
    model: Any = Model()
    args = InterpolationArguments(wise_ft=True, **flags)
    found = choose_between(args, START, model, best_at(peak), [], ALONE, "accuracy", tmp_path)
    assert all(torch.equal(value, model.weights[name]) for name, value in torch.load(tmp_path / "weights").items())
    return found, model.weights


def test_fractions_are_mixed_and_the_classifier_is_the_ends() -> None:
    found = interpolate(START, {**END, "new.weight": torch.full((1,), 4.0)}, 0.25)
    assert {name: value.tolist() for name, value in found.items()} == {
        "vision.weight": [0.25, 0.25],
        "steps": 9,
        "classifier.weight": [5.0, 5.0],
        "new.weight": [4.0],
    }
    assert torch.equal(interpolate(START, END, 1.0)["vision.weight"], END["vision.weight"])


def test_the_best_is_kept_and_written_down(tmp_path: Path) -> None:
    found, weights = chosen(tmp_path, 0.3)
    assert found == {"accuracy": pytest.approx(1.0), "loss": 0.5, "wise_ft_alpha": 0.3}
    assert weights["vision.weight"].tolist() == pytest.approx([0.3, 0.3])
    report = json.loads((tmp_path / "wise_ft.json").read_text())
    assert (report["metric"], report["best_alpha"], report["saved_alpha"]) == ("accuracy", 0.3, 0.3)
    assert [row["alpha"] for row in report["measured"]] == [step / 10 for step in range(11)]
    assert (tmp_path / "wise_ft.png").stat().st_size > 1000


def test_a_wanted_alpha_is_kept_whatever_is_best(tmp_path: Path) -> None:
    found, weights = chosen(tmp_path, 1.0, wise_ft_alpha=0.55)
    assert found["wise_ft_alpha"] == 0.55
    assert weights["vision.weight"].tolist() == pytest.approx([0.55, 0.55])
    report = json.loads((tmp_path / "wise_ft.json").read_text())
    assert (report["best_alpha"], report["saved_alpha"], len(report["measured"])) == (1.0, 0.55, 12)


def test_errors_name_the_flag() -> None:
    with pytest.raises(ValueError, match=r"--wise_ft_alpha is 2.0; give a number in \[0, 1\]"):
        InterpolationArguments(wise_ft=True, wise_ft_alpha=2.0)
    with pytest.raises(ValueError, match=r"--wise_ft_alpha is 0.5; it goes with --wise_ft"):
        InterpolationArguments(wise_ft_alpha=0.5)
