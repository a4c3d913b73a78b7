"""A dry run takes the path of the real run, leaves nothing, and reports faults, time, memory and disk."""

import logging
import math
import re
from pathlib import Path

import pytest

from mm_utils.data import training_data
from mm_utils.distributed import RunError
from mm_utils.objectives.joint import JointObjective
from mm_utils.run import dry_run
from mm_utils.run.finish import finish_run
from scripts import pretrain
from tests.kit.corpora import breaking_images, write_corpus


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Run without pictures, which take longer than all else."""
    monkeypatch.setattr(pretrain, "finish_run", lambda *_: None)
    monkeypatch.setattr(dry_run, "LOADER_SECONDS", 0.4)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def run_dry(flags: list[str], folder: Path) -> dict[str, float]:
    return pretrain.main([*flags, "--output_dir", str(folder), "--dry_run"])


@pytest.fixture(scope="module")
def forecast(tiny_flags, tmp_path_factory):
    """The figures of a dry run, what lay beside its output folder before and after, and what was removed meanwhile."""
    folder = tmp_path_factory.mktemp("dry")
    (folder / "kept").write_text("kept")
    before = files(folder)
    flags = [*tiny_flags, "--max_steps", "40", "--global_batch_size", "12", "--save_steps", "10", "--eval_steps", "20"]
    return run_dry(flags, folder / "outputs" / "mine"), before, files(folder)


def test_nothing_is_left_behind(forecast):
    _, before, after = forecast
    assert after == before


def test_the_figures_describe_the_whole_run(forecast):
    found = forecast[0]
    assert all(name.startswith("dry_run_") and isinstance(value, float) for name, value in found.items())
    assert found["dry_run_steps"] == 40
    assert found["dry_run_evaluations"] == 2 + 1  # and of the best, if they are not the last
    assert found["dry_run_checkpoints"] == 4
    assert found["dry_run_training_hours"] * 3600 == pytest.approx(40 * 12 / found["dry_run_pairs_per_second"])
    assert 0 < found["dry_run_peak_memory_gib"] < found["dry_run_free_memory_gib"]
    assert found["dry_run_unreadable_share"] == 0


def test_the_disk_is_that_of_a_real_run(forecast, tiny_flags, tmp_path):
    found = forecast[0]
    whole = ["--head_share", "0"]  # so that one step has the moments of all weights
    pretrain.main([*tiny_flags, *whole, "--max_steps", "1", "--save_steps", "1", "--output_dir", str(tmp_path)])
    size = sum(path.stat().st_size for path in (tmp_path / "checkpoint-1").rglob("*"))
    assert found["dry_run_checkpoints_gb"] == pytest.approx(4 * size / 1e9, rel=0.02)  # two, one in writing, the best
    rest = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) - size
    assert found["dry_run_model_gb"] == pytest.approx(rest / 1e9, rel=0.1)


def test_a_report_says_what_was_measured(tiny_flags, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(pretrain, "finish_run", finish_run)
    with caplog.at_level(logging.INFO):
        run_dry(tiny_flags, tmp_path / "my out")
    text = caplog.text
    assert "train: 16 images, validation: 8 images" in text
    assert re.search(r"speed +[\d.e+]+ pairs/s \(measured\); the loader", text)
    assert "Everything is in" not in text


def test_memory_is_unknown_where_the_largest_batch_was_too_slow_to_try(tiny_flags, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(dry_run, "STEP_SECONDS", 0.0)
    with caplog.at_level(logging.INFO):
        found = run_dry([*tiny_flags, "--global_batch_size", "16"], tmp_path)
    assert "extrapolated from 4 pairs to 16" in caplog.text
    assert math.isnan(found["dry_run_peak_memory_gib"])
    assert "memory      unknown: a step of 16 pairs was too slow to try" in caplog.text
    assert found["dry_run_training_hours"] * 3600 == pytest.approx(4 * 16 / found["dry_run_pairs_per_second"])


TOWERS = ["--objectives", "sigmoid", "--fusion_layers", "0", "--rerank_top_k", "0"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--freeze_vision", "--freeze_text", "--cache_features"],
        ["--micro_batch_size", "auto", "--ema_decay", "0.5"],
        [*TOWERS, "--batch_size_schedule", "0:4,2:16"],
        ["--eval_steps", "1", "--early_stopping_patience", "1", "--load_best_model_at_end", "--max_steps", "1"],
    ],
    ids=["cached", "parts", "schedule", "early-stopping"],
)
def test_a_dry_run_of_each_kind_of_run(flags, tiny_flags, tmp_path):
    found = run_dry([*tiny_flags, *flags], tmp_path)
    assert found["dry_run_hours"] > 0
    assert not files(tmp_path)


# -- what it finds ------------------------------------------------------------------------------------------------------


def test_broken_images_are_named_with_an_estimate_for_the_whole(tiny_flags, tmp_path, caplog, monkeypatch):
    path = write_corpus(tmp_path / "data")
    broken = ["red-circle-0.png", "blue-square-1.png"]
    monkeypatch.setattr(training_data, "load_pairs", breaking_images(tmp_path / "data/images", broken))
    found = run_dry([*tiny_flags, "--train_file", str(path)], tmp_path / "out")
    assert found["dry_run_unreadable_share"] == 2 / 16
    assert "2 of 16 training images cannot be decoded, so perhaps 2 of 16" in caplog.text
    assert "blue-square-1.png" in caplog.text


def test_a_loss_that_is_not_finite_ends_it(tiny_flags, tmp_path, monkeypatch):
    forward = JointObjective.forward

    def broken(self, batch, step):
        report = forward(self, batch, step)
        return {**report, "loss": report["loss"] * float("nan")}

    monkeypatch.setattr(JointObjective, "forward", broken)
    with pytest.raises(FloatingPointError, match="loss is nan in step 1 of the dry run"):
        run_dry(tiny_flags, tmp_path)


def test_a_full_disk_and_a_small_memory_are_warned_of_and_nothing_is_pushed(
    tiny_flags, tmp_path, caplog, monkeypatch, server
):
    usage = dry_run.shutil.disk_usage(tmp_path)._replace(free=3 * 10**7)
    monkeypatch.setattr(dry_run.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(dry_run, "available_bytes", lambda _: 2**30 // 100)
    run_dry([*tiny_flags, "--push_to_hub", "--hub_model_id", "tester/run"], tmp_path)
    assert not server.repos
    assert f"The disk of {tmp_path} has 0.03 GB left" in caplog.text
    assert "0.01 GiB are free. Set --micro_batch_size auto" in caplog.text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--train_file", "no_such.jsonl"], "no such file"),
        (["--global_batch_size", "500"], "--global_batch_size is 500, and the training split has 16 images"),
        (["--resume_from_checkpoint", "nowhere"], "--resume_from_checkpoint is nowhere"),
        (["--metric_for_best_model", "accuracy"], "--metric_for_best_model is accuracy"),
    ],
)
def test_mistakes_are_those_of_a_real_run(flags, message, tiny_flags, tmp_path):
    with pytest.raises((ValueError, RunError), match=message):
        run_dry([*tiny_flags, *flags], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_holds_a_run_or_cannot_be_written_is_refused(tiny_flags, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}")
    with pytest.raises(RunError, match="already holds a run"):
        run_dry(tiny_flags, tmp_path)
    with pytest.raises(RunError, match="cannot be written"):
        run_dry(tiny_flags, tmp_path / "metrics.jsonl" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


# -- real launches ------------------------------------------------------------------------------------------------------
