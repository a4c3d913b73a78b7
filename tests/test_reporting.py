import json
import shlex
from pathlib import Path

import matplotlib
import pytest
from huggingface_hub import ModelCard
from PIL import Image

from mm_utils.model_card import CardInfo, write_model_card
from mm_utils.reporting import RetrievalExample, _read_series, draw_confusion, draw_retrieval, plot_training

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
TOKEN = "hf_abcDEFghiJKLmnoPQRstuVWXyz0123456789"


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_training_plot_has_every_panel_and_leaves_global_state_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    rows = [{"step": step, **TRAINING, **(EVALUATION if step % 50 == 0 else {})} for step in range(1, 201)]
    rows.append({"step": 200, "eval_rerank_text_to_image_recall@1": 0.9})
    panels = plot_training(write_lines(tmp_path / "metrics.jsonl", *rows), tmp_path / "training.png")
    assert panels == ["Loss", "Recall", "Learning rate", "Temperature", "Throughput", "Gradient norm"]
    assert dict(matplotlib.rcParams) == before
    with Image.open(tmp_path / "training.png") as image:
        assert image.width > image.height > 800
        assert len(image.convert("RGB").getcolors(1 << 24)) > 50


def test_panels_without_values_are_left_out(tmp_path: Path) -> None:
    metrics = write_lines(tmp_path / "metrics.jsonl", {"step": 1, "loss": 1.0, "logit_scale": 14.3, "grad_norm": None})
    assert plot_training(metrics, tmp_path / "training.png") == ["Loss", "Logit scale"]
    nothing = write_lines(tmp_path / "empty.jsonl", {"step": 1, "epoch": 0.5})
    assert plot_training(nothing, tmp_path / "none.png") == []
    assert not (tmp_path / "none.png").exists()


def test_infinite_and_zero_values_are_no_obstacle(tmp_path: Path) -> None:
    metrics = write_lines(
        tmp_path / "metrics.jsonl",
        '{"step": 1, "loss": NaN, "grad_norm": Infinity, "pairs_per_second": 0.0, "learning_rate": 0.0}',
    )
    assert plot_training(metrics, tmp_path / "training.png") == ["Learning rate", "Throughput"]


def test_later_line_counts_and_broken_lines_do_not(tmp_path: Path) -> None:
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
    assert _read_series(metrics) == {"loss": ([10, 20, 30], [3.0, 2.5, 1.0]), "eval_loss": ([20], [4.0])}


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


def test_only_the_true_image_is_framed_in_green(tmp_path: Path) -> None:
    def green(name: str, hit: int | None) -> list[int]:
        draw_retrieval([example("a caption", hit)], tmp_path / name)
        with Image.open(tmp_path / name) as image:
            pixels = image.convert("RGB").load()
            return [x for x in range(image.width) if pixels[x, 30] == (22, 163, 74)]

    assert green("none.png", None) == []
    first, third = green("first.png", 0), green("third.png", 2)
    assert first
    assert third
    assert max(first) < min(third)


def test_retrieval_refuses_what_does_not_match(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="queries is empty"):
        draw_retrieval([], tmp_path / "retrieval.png")
    with pytest.raises(ValueError, match="zip"):
        draw_retrieval([RetrievalExample("a", [], [0.5], [True])], tmp_path / "retrieval.png")
    draw_retrieval([example("three images", 1, count=3)], tmp_path / "retrieval.png")


def card(**changes: object) -> CardInfo:
    values: dict[str, object] = {
        "name": "tiny-retriever",
        "vision_model": "google/vit-base-patch16-224",
        "text_model": "bert-base-uncased",
        "num_parameters": 198_000_000,
        "dataset_name": "me/pairs",
        "dataset_rows": {"train": 29000, "validation": 1000},
        "dataset_fingerprint": "0f3a9c",
        "command": "accelerate launch scripts/pretrain.py --config recipes/tiny.yaml",
        "metrics": {"eval_text_to_image_recall@1": 0.43215},
        "chance": {"eval_text_to_image_recall@1": 0.001},
        "hyperparameters": {"learning_rate": 1e-3, "max_steps": 100},
        "hardware": "1 x CPU",
        "precision": "bf16",
        "num_processes": 2,
        "repo_id": "me/tiny-retriever",
    }
    return CardInfo(**{**values, **changes})  # type: ignore[arg-type]


def test_card_says_how_the_model_was_made_and_how_to_load_it(tmp_path: Path) -> None:
    path = write_model_card(tmp_path, card())
    loaded, text = ModelCard.load(path), path.read_text(encoding="utf-8")
    assert path.name == "README.md"
    assert loaded.data.library_name == "transformers"
    assert loaded.data.pipeline_tag == "zero-shot-image-classification"
    for part in (
        'AutoModel.from_pretrained("me/tiny-retriever", trust_remote_code=True)',
        'VisionTextDualEncoderModel.from_pretrained("me/tiny-retriever", subfolder="dual_encoder")',
        "| `eval_text_to_image_recall@1` | 0.4321 | 0.001 |",
        "| train | 29,000 |",
        "`0f3a9c`",
        "accelerate launch scripts/pretrain.py --config recipes/tiny.yaml",
        "| `learning_rate` | `0.001` |",
        "| precision | bf16 |",
        "| processes | 2 |",
        "| transformers | ",
        "198.0 million parameters",
        "## Limitations",
    ):
        assert part in text
    assert ".png" not in text


def test_card_mentions_only_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "training.png").touch()
    changes = {"has_dual_encoder": False, "has_fusion": False, "repo_id": None, "base_models": ["bert-base-uncased"]}
    path = write_model_card(tmp_path, card(**changes))
    text = path.read_text(encoding="utf-8")
    assert "VisionTextDualEncoderModel" not in text
    assert "fusion" not in text
    assert "(training.png)" in text
    assert "(retrieval.png)" not in text
    assert ModelCard.load(path).data.base_model == ["bert-base-uncased"]


def test_card_survives_any_text(tmp_path: Path) -> None:
    hostile = 'a | b\n---\n# <script> [x](y) `code` """ ``` {{ }} $x$ * _ ! \\'
    hyperparameters = {"caption": hostile, "empty": "", "none": None}
    path = write_model_card(
        tmp_path,
        card(
            name=hostile, dataset_name=hostile, command=f"run {hostile}", hyperparameters=hyperparameters, repo_id=None
        ),
    )
    text = path.read_text(encoding="utf-8")
    assert ModelCard.load(path).data.library_name == "transformers"
    title = next(line for line in text.splitlines() if line.startswith("# "))
    assert title.startswith(r"# a \| b --- \# \<script\> \[x\](y) \`code\`")
    row = next(line for line in text.splitlines() if line.startswith("| `caption`"))
    assert row.replace(r"\|", "").count("|") == 3
    assert "````bash\nrun a | b\n---" in text, "the fence must be longer than the backticks inside"


def test_card_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("TRACKER_API_KEY", "0123456789abcdef")
    planted = card(
        name=f"model {TOKEN}",
        command=shlex.join(
            ["run.py", "--hub_token", "Plain1", "--password=two Plain2", "https://me:Plain3@example.org"]
        ),
        dataset_name=f"https://me:Plain4@example.org/{TOKEN}/0123456789abcdef",
        hyperparameters={"hub_token": "words with Plain5", "note": TOKEN, "tokenizer_name": "bert", "seed": 7},
        repo_id=f"me/{TOKEN}",
    )
    text = write_model_card(tmp_path, planted).read_text(encoding="utf-8")
    assert "Plain" not in text
    assert "0123456789abcdef" not in text
    assert TOKEN[3:] not in text
    assert "`bert`" in text
    assert "`7`" in text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("classes", [2, 50, 51])
def test_confusions_are_a_matrix_or_bars(classes: int, tmp_path: Path) -> None:
    names = ["costs $5 or $10", "桌子 😀", "a" * 90, "line\nbreak"] * 13
    counts = {(0, 0): 1, (0, 1): 3, (1, 0): 2}
    draw_confusion(counts, names[:classes], tmp_path / "confusion.png")
    with Image.open(tmp_path / "confusion.png") as image:
        assert (image.width == image.height) is (classes <= 50)
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
        assert ((234, 88, 12) in colours) is (classes > 50)  # the bars


def test_a_perfect_model_has_a_picture_too(tmp_path: Path) -> None:
    for classes in (3, 60):
        counts = {(number, number): 4 for number in range(classes)}
        draw_confusion(counts, [f"class {number}" for number in range(classes)], tmp_path / f"{classes}.png")
        assert (tmp_path / f"{classes}.png").stat().st_size > 1000
