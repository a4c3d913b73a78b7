"""The table of a sweep: best first, by the metric that the runs call best, failed trials last."""

import csv
from pathlib import Path

import pytest
import yaml

from mm_utils.launch.sweep import Trial, as_csv, ranked


def trials(folder: Path, metric: str = "mean_recall") -> list[Trial]:
    found = [
        Trial({"seed": "1"}, folder / "seed-1", {"eval_mean_recall": 0.25, "eval_loss": 2.0}),
        Trial({"seed": "=2"}, folder / "seed-2", {}, "RunError: no such file"),
        Trial({"seed": "3"}, folder / "seed-3", {"eval_mean_recall": 0.5, "eval_loss": 3.0}),
    ]
    for trial in found:
        trial.folder.mkdir()
    settings = {"metric_for_best_model": metric}
    (folder / "seed-3/config.yaml").write_text(yaml.safe_dump(settings))
    return found


NAN = float("nan")


@pytest.mark.parametrize(
    ("metric", "more", "name", "order"),
    [
        ("mean_recall", {}, "eval_mean_recall", "31"),
        ("loss", {}, "eval_loss", "13"),
        ("mean_recall", {"eval_rerank_mean_recall": (0.7, 0.6)}, "eval_rerank_mean_recall", "13"),  # with a head
        ("mean_recall", {"eval_mean_recall": (0.25, NAN)}, "eval_mean_recall", "13"),  # no number is not the best
    ],
)
def test_the_best_comes_first(
    metric: str, more: dict[str, tuple[float, float]], name: str, order: str, tmp_path: Path
) -> None:
    found = trials(tmp_path, metric)
    for figure, values in more.items():
        found[0].metrics[figure], found[2].metrics[figure] = values
    found, chosen = ranked(found)
    assert (chosen, [trial.values["seed"] for trial in found]) == (name, [*order, "=2"])


def test_the_file(tmp_path: Path) -> None:
    found, _ = ranked(trials(tmp_path))
    rows = list(csv.DictReader(as_csv(found).splitlines()))
    assert [row["eval_loss"] for row in rows] == ["3.0", "2.0", ""]
    assert rows[2]["seed"] == "'=2"  # no formula in a spreadsheet
    assert rows[2]["problem"] == "RunError: no such file"
    assert rows[0]["folder"] == str(tmp_path / "seed-3")
