"""Means, differences and intervals against NumPy, tables of Student's distribution and simulated runs."""

import numpy as np
import pytest

from benchmarks.ablations.report import interval, report, summarise


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
