"""A dry run takes the path of the real run, leaves nothing, and reports time, memory and disk."""

import logging
import re
from pathlib import Path

import datasets
import pytest

from mm_utils.run import dry_run
from scripts import pretrain


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(dry_run, "LOADER_SECONDS", 0.2)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def run_dry(flags: list[str], folder: Path) -> dict[str, float]:
    return pretrain.main([*flags, "--output_dir", str(folder), "--dry_run"])


def test_the_figures_are_those_of_a_real_run_and_nothing_is_left_behind(tiny_flags, tmp_path, caplog):
    (tmp_path / "kept").write_text("kept")
    before = files(tmp_path)
    flags = [*tiny_flags, "--max_steps", "40", "--global_batch_size", "12", "--save_steps", "10", "--eval_steps", "20"]
    whole = ["--head_share", "0"]  # so that one step has the moments of all weights
    with caplog.at_level(logging.INFO):
        found = run_dry([*flags, *whole], tmp_path / "outputs" / "mine")
    assert files(tmp_path) == before
    assert "train: 16 images, validation: 8 images" in caplog.text
    assert re.search(r"speed +[\d.e+]+ pairs/s; the loader", caplog.text)
    assert "Everything is in" not in caplog.text
    assert caplog.text.count("their figures are not those of the run") == 1
    assert all(name.startswith("dry_run_") and isinstance(value, float) for name, value in found.items())
    assert found["dry_run_steps"] == 40
    assert found["dry_run_evaluations"] == 2 + 1  # and of the best, if they are not the last
    assert found["dry_run_checkpoints"] == 4
    assert found["dry_run_training_hours"] * 3600 == pytest.approx(40 * 12 / found["dry_run_pairs_per_second"])
    assert found["dry_run_peak_memory_gib"] > 0
    folder = tmp_path / "run"
    pretrain.main([*tiny_flags, *whole, "--max_steps", "1", "--save_steps", "1", "--output_dir", str(folder)])
    size = sum(path.stat().st_size for path in (folder / "checkpoint-1").rglob("*"))
    rest = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) - size
    expected = (4 * size + rest) / 1e9  # two checkpoints, one in writing, the best
    assert found["dry_run_disk_gb"] == pytest.approx(expected, rel=0.05)


def test_each_stage_is_tried_and_only_the_rows_of_the_run_count(tiny_flags, tmp_path, monkeypatch):
    taken = []

    def seconds(probe, stage):
        taken[:] = map(len, probe.stages)
        return (1000.0, 3000.0)[stage]  # beside which the loader takes no time

    monkeypatch.setattr(dry_run._Probe, "step_seconds", seconds)
    length = ["--max_steps", "-1", "--num_train_epochs", "12", "--max_train_samples", "8", "--global_batch_size", "4"]
    found = run_dry([*tiny_flags, *length, "--head_share", "0.25"], tmp_path)
    assert taken == [dry_run.STEPS, dry_run.STEPS]
    assert found["dry_run_steps"] == 24
    assert found["dry_run_training_hours"] * 3600 == pytest.approx(18 * 1000 + 6 * 3000, rel=1e-3)


def test_features_of_a_dry_run_are_computed_each_time_and_none_are_kept(tiny_flags, tmp_path, own_cache):
    flags = [*tiny_flags, "--freeze_vision", "--freeze_text", "--cache_features"]
    for _ in range(2):
        assert run_dry(flags, tmp_path)["dry_run_features_hours"] > 1e-6
    assert not list(Path(datasets.config.HF_DATASETS_CACHE).glob("tandem_features/*"))


TOWERS = ["--objectives", "sigmoid", "--fusion_layers", "0", "--rerank_top_k", "0"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--freeze_vision", "--freeze_text", "--cache_features"],
        ["--micro_batch_size", "auto"],
        [*TOWERS, "--batch_size_schedule", "0:4,2:16"],
        ["--eval_steps", "1", "--early_stopping_patience", "1", "--load_best_model_at_end", "--max_steps", "1"],
    ],
    ids=["cached", "parts", "schedule", "early-stopping"],
)
def test_a_dry_run_of_each_kind_of_run(flags, tiny_flags, tmp_path, monkeypatch):
    monkeypatch.setattr(dry_run, "SLOW_STEP", 0.0)  # one step, of the largest batch
    assert run_dry([*tiny_flags, *flags], tmp_path)["dry_run_hours"] > 0
    assert not files(tmp_path)


def test_a_full_disk_is_warned_of_and_nothing_is_pushed(tiny_flags, tmp_path, caplog, monkeypatch, server):
    usage = dry_run.shutil.disk_usage(tmp_path)._replace(free=3 * 10**7)
    monkeypatch.setattr(dry_run.shutil, "disk_usage", lambda _: usage)
    run_dry([*tiny_flags, "--push_to_hub", "--hub_model_id", "tester/run"], tmp_path)
    assert not server.repos
    assert f"The disk of {tmp_path} has no room" in caplog.text
