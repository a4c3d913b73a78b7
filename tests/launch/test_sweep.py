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


@pytest.mark.parametrize(("metric", "order"), [("mean_recall", "31"), ("loss", "13")])
def test_the_best_comes_first(metric: str, order: str, tmp_path: Path) -> None:
    found, name = ranked(trials(tmp_path, metric))
    assert name == f"eval_{metric}"
    assert [trial.values["seed"] for trial in found] == [*order, "=2"]


def test_runs_with_a_head_are_compared_after_re_ranking(tmp_path: Path) -> None:
    found = trials(tmp_path)
    found[0].metrics["eval_rerank_mean_recall"], found[2].metrics["eval_rerank_mean_recall"] = 0.7, 0.6
    assert ranked(found) == ([found[0], found[2], found[1]], "eval_rerank_mean_recall")


def test_no_number_does_not_come_before_the_best(tmp_path: Path) -> None:
    found = trials(tmp_path)
    found.insert(1, Trial({"seed": "4"}, tmp_path / "seed-4", {"eval_mean_recall": float("nan")}))
    assert [trial.values["seed"] for trial in ranked(found)[0]] == ["3", "1", "4", "=2"]


def test_the_file(tmp_path: Path) -> None:
    found, _ = ranked(trials(tmp_path))
    rows = list(csv.DictReader(as_csv(found).splitlines()))
    assert [row["eval_loss"] for row in rows] == ["3.0", "2.0", ""]
    assert rows[2]["seed"] == "'=2"  # no formula in a spreadsheet
    assert rows[2]["problem"] == "RunError: no such file"
    assert rows[0]["folder"] == str(tmp_path / "seed-3")
