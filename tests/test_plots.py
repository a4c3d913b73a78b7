"""Curves of a run, pictures of what it finds, confusions: every panel, any caption, no global state."""

import json
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure
from PIL import Image

from mm_utils import plots
from mm_utils.finetuning import confusion
from mm_utils.plots import RetrievalExample, draw_retrieval, plot_training

TRAINING = {
    "loss": 2.0,
    "contrastive_loss": 1.5,
    "matching_loss": 0.5,
    "learning_rate": 1e-3,
    "temperature": 0.07,
    "pairs_per_second": 100.0,
    "data_wait": 0.1,
    "grad_norm": 1.0,
}
EVALUATION = {f"eval_{way}_recall@{k}": k / 20 for way in ("text_to_image", "image_to_text") for k in (1, 5, 10)}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn, instead of files."""
    drawn: list[Figure] = []
    for module in (plots, confusion):
        monkeypatch.setattr(module, "save_figure", lambda figure, path: drawn.append(figure))
    return drawn


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_a_picture_has_every_panel_and_leaves_global_state_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    rows = [{"step": step, **TRAINING, **(EVALUATION if step % 50 == 0 else {})} for step in range(1, 201)]
    rows.append({"step": 200, "eval_rerank_text_to_image_recall@1": 0.9})
    panels = plot_training(write_lines(tmp_path / "metrics.jsonl", *rows), tmp_path / "training.png")
    assert ", ".join(panels) == (
        "Recall, Loss, Learning rate, Temperature, Pairs per second, Waiting for data, Gradient norm"
    )
    assert dict(matplotlib.rcParams) == before
    with Image.open(tmp_path / "training.png") as image:
        assert image.width > image.height > 800
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50


NAN = '{"step": 1, "loss": NaN, "grad_norm": Infinity, "pairs_per_second": 0.0, "learning_rate": 0.0}'
POINTS = [{"step": 10, **TRAINING, **EVALUATION}, *({"step": step, "eval_mean_recall": 0.4} for step in (0, 10))]
PANELS: list[tuple[list[object], list[str]]] = [
    ([{"step": 1, "loss": 1.0, "logit_scale": 14.3, "grad_norm": None}], ["Loss", "Logit scale"]),  # without values
    ([{"step": 1, "epoch": 0.5}], []),
    ([NAN], ["Learning rate", "Pairs per second"]),
    (POINTS, ["Recall", "Mean recall"]),  # single points, beside others
]


@pytest.mark.parametrize(("rows", "panels"), PANELS)
def test_panels_that_would_show_nothing_are_left_out(rows: list[object], panels: list[str], tmp_path: Path) -> None:
    assert plot_training(write_lines(tmp_path / "metrics.jsonl", *rows), tmp_path / "training.png") == panels
    assert (tmp_path / "training.png").exists() == bool(panels)


def test_a_full_disk_costs_the_picture_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "training.png").symlink_to("/dev/full")
    rows = [{"step": step, **TRAINING} for step in range(3)]
    plot_training(write_lines(tmp_path / "metrics.jsonl", *rows), tmp_path / "training.png")
    assert caplog.messages[-1].startswith(f"{tmp_path}/training.png cannot be written: No space left on device. ")


def test_the_later_of_two_lines_counts_and_broken_lines_are_skipped(tmp_path: Path, figures: list[Figure]) -> None:
    metrics = write_lines(
        tmp_path / "metrics.jsonl",
        {"step": 10, "loss": 3.0},
        {"step": 20, "loss": 2.0},
        {"step": 30, "loss": 9.0},
        '{"step": 40, "lo',  # killed here, resumed from step 10
        {"step": 20, "loss": 2.5},
        {"step": 20, "eval_loss": 4.0},
        {"step": 30, "loss": 1.0},
        "[1, 2]",
        {"loss": 7.0},
        '{"step": 40, "loss": 0.',
    )
    plot_training(metrics, tmp_path / "training.png")
    lines = {line.get_label(): (*line.get_xdata(), *line.get_ydata()) for line in figures[0].axes[0].lines}
    assert lines == {"total": (10, 20, 30, 3.0, 2.5, 1.0), "eval": (20, 4.0)}


def example(caption: str, hit: int | None, count: int = 5) -> RetrievalExample:
    images = [Image.new(mode, size) for mode, size in zip(("RGB", "L", "RGBA", "P", "1"), SIZES, strict=True)][:count]
    return RetrievalExample(caption, images, [0.5] * count, [rank == hit for rank in range(count)])


SIZES = [(30, 20), (20, 30), (1, 900), (64, 64), (5, 5)]


@pytest.mark.filterwarnings("error")
def test_retrieval_grid_shows_any_caption(tmp_path: Path) -> None:
    captions = [
        "costs $5 or \\frac{1 or $10",
        "Một con mèo đen",
        "桌子上的红色圆圈 😀",
        "line\nbreak\x00\ud800",
        "word " * 90,
        "",
    ]
    draw_retrieval([example(caption, rank) for rank, caption in enumerate(captions)], tmp_path / "retrieval.png")
    with Image.open(tmp_path / "retrieval.png") as image:
        assert image.height > 1000
