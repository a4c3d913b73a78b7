"""The card of a model, its curves, and pictures of what it finds: every panel, any text, no secret."""

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from PIL import Image

from mm_utils.plots import RetrievalExample, _draw_lines, draw_retrieval, new_figure, plot_training
from mm_utils.reports.model_card import CardInfo, encoder, search_code, write_model_card


def towers(name: str, medium: str = "image") -> str:
    return f"{encoder(medium, name, False)} and {encoder('text', name, True)}"


def card(**changes: object) -> CardInfo:
    values = {
        "name": "tiny-retriever",
        "about": towers("google/vit"),
        "usage": search_code("me/tiny-retriever", "image", True, "VisionTextDualEncoderModel", "a dog"),
        "medium": "image",
        "dataset_name": "me/pairs",
        "dataset_rows": {"train": 29000, "validation": 1000},
        "dataset_fingerprint": "0f3a9c",
        "command": "accelerate launch scripts/pretrain.py --config recipes/tiny.yaml",
        "table": (["recall among the first", "1"], [["text to image, encoders alone", "0.432"]]),
        "table_note": "Measured.",
        "metrics": {"eval_text_to_image_recall@1": 0.43215, "eval_image_spread": 0.7},
        "hyperparameters": {"learning_rate": 1e-3, "max_steps": 100},
        "environment": {"hardware": "1 x CPU", "precision": "bf16", "processes": 2},
        "tags": ("image-text-retrieval",),
        "limits": "Its scores rank candidates.",
        "pipeline_tag": "feature-extraction",
        "datasets": ["me/pairs"],
        "base_models": ["me/base"],
    }
    return CardInfo(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("medium", "column", "call"),
    [
        ("image", "image", 'model.encode(images=pictures, texts=["a \\"dog\\""])'),
        ("clip", "video", 'model.encode(clips=clips, texts=["a \\"dog\\""])'),
        ("sound", "audio", 'model.encode(sounds=sounds, texts=["a \\"dog\\""])'),
    ],
)
def test_card_speaks_of_its_medium(medium: str, column: str, call: str, tmp_path: Path) -> None:
    about = towers("a", medium)
    usage = search_code("m", medium, False, "", 'a "dog"')
    path = write_model_card(
        tmp_path, card(medium=medium, about=about, usage=usage, tags=(f"{column}-text-retrieval",))
    )
    loaded = ModelCard.load(path).data
    text = path.read_text(encoding="utf-8")
    assert loaded.tags == [f"{column}-text-retrieval", *([column] if medium != "image" else []), "custom_code"]
    code = text.partition("```python\n")[2].partition("```")[0]
    compile(code, "card", "exec")
    assert call in code
    assert f"`eval_text_to_{medium}_recall@1`" in text
    if medium != "image":
        assert not {"image", "images", "pictures"} & set(re.findall(r"[a-z]+", text.partition("## Results")[0]))


def test_card_shows_any_text_literally(tmp_path: Path) -> None:
    hostile = 'a | b\n---\n# <script> [x](javascript:y) `code` """ ``` {{ }} $x$ * _ ! \\ \x1b[31m \u202e'
    texts = ["name", "dataset_name", "dataset_fingerprint"]
    given = dict.fromkeys(texts, hostile) | {"environment": {"hardware": hostile}}
    given |= {
        "about": towers(hostile),
        "usage": search_code(hostile, "image", True, "", hostile),
    }
    given |= {"dataset_rows": {hostile: 3}, "metrics": {hostile: 0.5}, "base_models": [hostile]}
    hyperparameters = {"caption": hostile, hostile: 1, "empty": "", "none": None}
    table = ([hostile, hostile], [[hostile, hostile]])
    made = card(command=f"run {hostile}", hyperparameters=hyperparameters, table=table, **given)
    path = write_model_card(tmp_path, made)
    text = path.read_text(encoding="utf-8")
    assert not {"\x1b", "\u202e"} & set(text)
    assert ModelCard.load(path).data.library_name == "transformers"
    title = next(line for line in text.splitlines() if line.startswith("# "))
    assert title.startswith(r"# a \| b --- \# &lt;script&gt; \[x\](javascript:y) \`code\`")
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} <= {3, 4}
    assert "````bash\nrun a | b\n---" in text, "the fence must be longer than the backticks inside"
    body = re.sub(r"^(`{3,}).*?^\1$", "", text.split("---\n", 2)[2], flags=re.MULTILINE | re.DOTALL)
    body = re.sub(r"(`+) .*? \1|`[^`]+`", "", body)  # code is shown as it is
    assert not re.search(r"(?<!\\)<script|(?<!\\)\]\(javascript", body)


# -- pictures ----------------------------------------------------------------------------------------------------------
TRAINING = {"loss": 2.0, "contrastive_loss": 1.5, "matching_loss": 0.5, "learning_rate": 1e-3, "grad_norm": 1.0}
RECALLS = {f"eval_{way}_recall@{k}": k / 20 for way in ("text_to_image", "image_to_text") for k in (1, 5, 10)}
LONG = [{"step": step, **TRAINING, **(RECALLS if step % 50 == 0 else {})} for step in range(1, 201)]
NAN = '{"step": 1, "loss": NaN, "grad_norm": Infinity, "pairs_per_second": 0.0, "learning_rate": 0.0}'
POINTS = [{"step": 10, **TRAINING, **RECALLS}, *({"step": step, "eval_mean_recall": 0.4} for step in (0, 10))]


@pytest.mark.parametrize(
    ("rows", "panels"),
    [
        (LONG, "Loss, Learning rate, Gradient norm"),
        ([{"step": 1, "loss": 1.0, "logit_scale": 14.3, "grad_norm": None}], "Loss"),  # without values
        ([{"step": 1, "epoch": 0.5}], ""),
        ([NAN], ""),
        (POINTS, "Mean recall, Loss"),
        (['{"step": 40, "lo', "[1, 2]", {"loss": 7.0}, {"step": 1, "loss": 7.0}], "Loss"),  # killed while it wrote
    ],
)
def test_a_picture_has_the_panels_that_have_values(rows: list[object], panels: str, tmp_path: Path) -> None:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert ", ".join(plot_training(tmp_path / "metrics.jsonl", tmp_path / "training.png")) == panels
    assert (tmp_path / "training.png").exists() == bool(panels)


def test_lines_that_coincide_are_drawn_once() -> None:
    ax = new_figure(2, 2).add_subplot()
    series = {"a": ([1, 2], [0.5, 0.6]), "b": ([1, 2], [0.5, 0.60001]), "c": ([1, 2], [0.5, 0.7])}
    ends = _draw_lines(ax, series, {name: name for name in series})
    assert [label for _, label, _ in ends] == ["a, b 0.600", "c 0.700"]
    assert (len(ax.lines), ax.get_xlabel()) == (2, "step")


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
    examples.append(RetrievalExample("not among them", images, [0.5] * 5, [False] * 5, own=images[0]))
    draw_retrieval(examples, tmp_path / "retrieval.png", "what they are")
    with Image.open(tmp_path / "retrieval.png") as image:
        assert image.height > 1000
