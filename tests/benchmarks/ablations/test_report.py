"""Means, differences and intervals against NumPy, tables of Student's distribution and simulated runs."""

import numpy as np
import pytest
from PIL import Image

from benchmarks.ablations.report import draw, interval, report, summarise


def record(variant: str, seed: int, **figures: float) -> dict:
    return {"variant": variant, "seed": seed, "figures": figures, "seconds": 10.0 + seed, "parameters": 1234}


@pytest.mark.parametrize(
    ("count", "quantile"), [(2, 12.706), (3, 4.303), (10, 2.262), (11, 2.228), (30, 2.045), (121, 1.980)]
)
def test_the_interval_is_students(count, quantile):
    values = np.random.default_rng(count).normal(size=count)
    mean, half = interval(values.tolist())
    assert mean == pytest.approx(values.mean())
    assert half == pytest.approx(quantile * values.std(ddof=1) / np.sqrt(count), rel=3e-4)


def test_one_value_has_no_interval():
    assert interval([0.5]) == (0.5, None)


def test_three_seeds_cover_the_truth_in_95_of_100_cases():
    draws = np.random.default_rng(0).normal(5, 2, (4000, 3)).tolist()
    covered = [abs(mean - 5) <= (half or 0) for mean, half in map(interval, draws)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.012)


def test_differences_are_taken_seed_by_seed():
    """What a seed does to all variants alike is not in them: both vary by 1, their difference by 0.02."""
    values = {"base": [1.0, 2.0, 3.0], "other": [1.11, 2.10, 3.09]}
    records = [record(name, seed, x=value) for name, row in values.items() for seed, value in enumerate(row)]
    other = summarise(records, list(values), ["x"])["other"]
    assert other["metrics"]["x"]["half_width"] > 2
    difference = other["metrics"]["x"]["difference"]
    assert difference["mean"] == pytest.approx(0.1)
    assert difference["half_width"] == pytest.approx(4.3027 * 0.01 / np.sqrt(3), rel=1e-4)
    assert other["seconds"] == 11


def test_what_is_missing_is_left_out():
    records = [record("base", 0, x=0.1, y=0.2), record("base", 1, x=0.3, y=0.2), record("other", 1, x=0.4)]
    summary = summarise(records, ["base", "other", "never"], ["x", "y"])
    assert list(summary) == ["base", "other"]
    assert summary["other"]["metrics"].keys() == {"x"}
    assert summary["other"]["metrics"]["x"]["difference"] == {"mean": pytest.approx(0.1), "half_width": None}
    assert "difference" not in summary["base"]["metrics"]["x"]


def test_without_the_first_variant_there_are_means_and_no_differences():
    summary = summarise([record("b", 0, x=0.1), record("c", 0, x=0.2)], ["a", "b", "c"], ["x"])
    assert all("difference" not in of["metrics"]["x"] for of in summary.values())
    assert "Difference" not in report(summary, ["x"])


def test_the_report_marks_what_its_interval_sets_apart():
    values = {"base": (0.5, 0.5), "better": (0.6, 0.602), "alike": (0.4, 0.7)}
    records = [
        record(name, seed, **{"text_to_image_recall@1": value})
        for name, row in values.items()
        for seed, value in enumerate(row)
    ]
    metrics = ["text_to_image_recall@1", "order_accuracy"]
    text = report(summarise(records, list(values), metrics), metrics)
    assert "| variant | text to image R@1 | order accuracy | seconds | parameters |" in text
    assert "| base | 0.500 ± 0.000 |  | 10 | 1,234 |" in text
    assert "| better | **+0.101 ± 0.013** |  |" in text
    assert "| alike | +0.050 ± 1.906 |  |" in text
    assert "over up to 2 seeds" in text
    assert "Of 2 differences, 0.1 are bold by chance" in text


def test_one_seed_says_so():
    text = report(summarise([record("a", 0, x=0.5), record("b", 0, x=0.6)], ["a", "b"], ["x"]), ["x"])
    assert "| b | +0.100 |" in text
    assert "| a | 0.000 |" in report(summarise([record("a", 0, x=-1e-5)], ["a"], ["x"]), ["x"])
    assert "±" not in text
    assert "**" not in text
    assert text.endswith("One seed: there is no interval, and no difference here can be distinguished from chance.")


def test_the_picture_has_a_panel_for_each_metric_that_was_measured(tmp_path):
    records = [record(name, seed, x=0.5 + seed, y=seed) for name in "ab" for seed in (0, 1)]
    widths = []
    for metrics in (["x"], ["x", "y", "absent"]):
        draw(summarise(records, ["a", "b"], metrics), metrics, tmp_path / "picture.png")
        widths.append(Image.open(tmp_path / "picture.png").width)
    assert widths[1] - widths[0] == pytest.approx(2.6 * 150, abs=2)
