"""The plan, what is repeated, the table and picture; and one small contest."""

import json

import pytest

from benchmarks import learning
from benchmarks.learning import CLOSED_FORMS, CONTESTANTS
from benchmarks.rivals.learners import CONTESTANTS as LEARNERS
from mm_utils.distributed import RunError


def row(name: str, seed: int, recall: float) -> dict:
    test = dict.fromkeys(learning.SHOWN, recall) | {
        "mean_recall": recall,
        "half_widths": dict.fromkeys(learning.SHOWN, 0.02),
    }
    return {"contestant": name, "seed": seed, "seconds": 10.0, "test": test, "points": [[5.0, 0.1], [10.0, recall]]}


@pytest.fixture
def rivals(monkeypatch):
    """Contestants that have the seed for a recall; `ridge` fails. Returns those that were started."""
    begun = []

    def compete(name, seed, settings):
        begun.append((name, seed))
        if name == "ridge":
            return {"error": "no memory"}
        return {key: value for key, value in row(name, seed, seed / 10).items() if key not in ("contestant", "seed")}

    monkeypatch.setattr(learning, "compete", compete)
    return begun


def test_the_script_knows_all_contestants():
    assert list(LEARNERS) == CONTESTANTS.split(",")
    assert set(CLOSED_FORMS.split(",")) < set(LEARNERS)


def test_finished_contestants_are_not_repeated(tmp_path, rivals, capsys):
    flags = ["--contestants", "tuned,cca", "--output_file", str(tmp_path / "l.jsonl"), "--seeds"]
    learning.main([*flags, "1"])
    learning.main([*flags, "1,2"])
    assert rivals == [("tuned", 1), ("cca", 1), ("tuned", 2)]
    assert "| tuned | 0.150 ± 0.635 |" in (tmp_path / "l.md").read_text()
    assert "| cca | 0.100 ± 0.020 |" in (tmp_path / "l.md").read_text()  # of one run, over images
    assert (tmp_path / "l.png").stat().st_size > 0
    with pytest.raises(ValueError, match="results with other minutes"):
        learning.main([*flags, "1", "--minutes", "9"])
    capsys.readouterr()
    learning.main([*flags, "2,3", "--dry_run"])
    assert capsys.readouterr().out == "cca, seed 2\ntuned, seed 3\n"


def test_a_failure_stops_no_other(tmp_path, rivals):
    with pytest.raises(RunError, match=r"1 of 2 did not finish.*no memory"):
        learning.main(["--contestants", "ridge,tuned", "--seeds", "1", "--output_file", str(tmp_path / "l.jsonl")])
    [line] = (tmp_path / "l.jsonl").read_text().splitlines()
    assert json.loads(line)["contestant"] == "tuned"


@pytest.mark.slow
def test_a_small_contest(tmp_path, corpus):
    flags = ["--train_file", str(corpus), "--image_size", "32", "--dataloader_num_workers", "0", "--minutes", "0.03"]
    flags += ["--global_batch_size", "8", "--points", "2", "--seeds", "0", "--output_file", str(tmp_path / "l.jsonl")]
    with pytest.raises(RunError, match="no test split"):
        learning.main([*flags, "--contestants", "cca"])
    others = tmp_path / "test.jsonl"
    rows = [json.loads(line) | {"split": "test"} for line in corpus.read_text().splitlines()]
    others.write_text("".join(json.dumps(row | {"image": str(corpus.parent / row["image"])}) + "\n" for row in rows))
    flags += ["--test_file", str(others), "--allow_outside_root"]
    found = learning.main([*flags, "--contestants", "tandem_towers,ridge,tuned,transformers"])
    assert [each["contestant"] for each in found] == ["tandem_towers", "ridge", "tuned", "transformers"]
    for each in found:
        assert 0 <= each["test"]["mean_recall"] <= 1
        assert each["points"]
    assert all(each["points"][-1][0] >= 1.8 and each["steps"] >= 1 for each in found[2:])
    assert "| ridge |" in (tmp_path / "l.md").read_text()
