"""Curves of a run and pictures of what it finds: every panel, any caption."""

import json
from pathlib import Path

import pytest
from PIL import Image

from mm_utils.plots import RetrievalExample, draw_retrieval, plot_training

TRAINING = {"loss": 2.0, "contrastive_loss": 1.5, "matching_loss": 0.5, "learning_rate": 1e-3, "grad_norm": 1.0}
RECALLS = {f"eval_{way}_recall@{k}": k / 20 for way in ("text_to_image", "image_to_text") for k in (1, 5, 10)}
LONG = [{"step": step, **TRAINING, **(RECALLS if step % 50 == 0 else {})} for step in range(1, 201)]
NAN = '{"step": 1, "loss": NaN, "grad_norm": Infinity, "pairs_per_second": 0.0, "learning_rate": 0.0}'
POINTS = [{"step": 10, **TRAINING, **RECALLS}, *({"step": step, "eval_mean_recall": 0.4} for step in (0, 10))]


@pytest.mark.parametrize(
    ("rows", "panels"),
    [
        (LONG, "Recall, Loss, Learning rate, Gradient norm"),
        ([{"step": 1, "loss": 1.0, "logit_scale": 14.3, "grad_norm": None}], "Loss, Logit scale"),  # without values
        ([{"step": 1, "epoch": 0.5}], ""),
        ([NAN], "Learning rate, Pairs per second"),
        (POINTS, "Recall, Mean recall"),  # single points, beside others
        (['{"step": 40, "lo', "[1, 2]", {"loss": 7.0}, {"step": 1, "loss": 7.0}], "Loss"),  # killed while it wrote
    ],
)
def test_a_picture_has_the_panels_that_have_values(rows: list[object], panels: str, tmp_path: Path) -> None:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert ", ".join(plot_training(tmp_path / "metrics.jsonl", tmp_path / "training.png")) == panels
    assert (tmp_path / "training.png").exists() == bool(panels)


def test_a_full_disk_costs_the_picture_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "training.png").symlink_to("/dev/full")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **TRAINING}))
    plot_training(tmp_path / "metrics.jsonl", tmp_path / "training.png")
    assert caplog.messages[-1].startswith(f"{tmp_path}/training.png cannot be written: No space left on device. ")


@pytest.mark.filterwarnings("error")
def test_retrieval_grid_shows_any_caption(tmp_path: Path) -> None:
    captions = ["costs $5 or \\frac{1 or $10", "Một con mèo đen", "桌子 😀", "line\nbreak\x00\ud800", "word " * 90, ""]
    modes = {"RGB": (30, 20), "L": (20, 30), "RGBA": (1, 900), "P": (64, 64), "1": (5, 5)}
    images = [Image.new(mode, size) for mode, size in modes.items()]
    examples = [RetrievalExample(text, images, [0.5] * 5, [False, True, False, False, False]) for text in captions]
    draw_retrieval(examples, tmp_path / "retrieval.png")
    with Image.open(tmp_path / "retrieval.png") as image:
        assert image.height > 1000
