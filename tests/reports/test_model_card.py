import json
import shlex
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from mm_utils.reports.model_card import CardInfo, write_model_card

TOKEN = "hf_abcDEFghiJKLmnoPQRstuVWXyz0123456789"


def card(**changes: object) -> CardInfo:
    values: dict[str, object] = {
        "name": "tiny-retriever",
        "model": "me/tiny-retriever",
        "vision_model": "google/vit-base-patch16-224",
        "text_model": "bert-base-uncased",
        "num_parameters": 198_000_000,
        "dataset_name": "me/pairs",
        "dataset_rows": {"train": 29000, "validation": 1000},
        "dataset_fingerprint": "0f3a9c",
        "command": "accelerate launch scripts/pretrain.py --config recipes/tiny.yaml",
        "table": (["recall among the first", "1"], [["text to image, encoders alone", "0.432"]]),
        "metrics": {"eval_text_to_image_recall@1": 0.43215},
        "hyperparameters": {"learning_rate": 1e-3, "max_steps": 100},
        "hardware": "1 x CPU",
        "precision": "bf16",
        "num_processes": 2,
        "dual_encoder": "VisionTextDualEncoderModel",
    }
    return CardInfo(**{**values, **changes})  # type: ignore[arg-type]


def test_card_says_how_the_model_was_made_and_how_to_load_it(tmp_path: Path) -> None:
    path = write_model_card(tmp_path, card())
    loaded, text = ModelCard.load(path), path.read_text(encoding="utf-8")
    assert path.name == "README.md"
    assert loaded.data.library_name == "transformers"
    assert loaded.data.pipeline_tag == "feature-extraction"
    for part in (
        'folder = "me/tiny-retriever"\n',
        "AutoModel.from_pretrained(folder, trust_remote_code=True)",
        'VisionTextDualEncoderModel.from_pretrained(folder, subfolder="dual_encoder")',
        "| text to image, encoders alone | 0.432 |",
        "<details><summary>All metrics</summary>",
        "| `eval_text_to_image_recall@1` | 0.4321 |",
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


def test_card_shows_what_small_embeddings_keep(tmp_path: Path) -> None:
    recalls = {f"recall@{k}": {"value": k / 20, "half_width_95": 0.01} for k in (1, 5, 10)}
    rows = [{"dimensions": 64, "code": "int8", "bytes": 64, **recalls}]
    (tmp_path / "embedding_sizes.json").write_text(json.dumps(rows))
    (tmp_path / "embedding_sizes.png").touch()
    text = write_model_card(tmp_path, card()).read_text(encoding="utf-8")
    assert "| 64 | int8 | 64 | 0.050 ± 0.010 | 0.500 ± 0.010 |" in text
    assert "(embedding_sizes.png)" in text


def test_card_mentions_only_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "training.png").touch()
    changes = {
        "dual_encoder": "",
        "has_fusion": False,
        "pipeline_tag": None,
        "base_models": ["bert-base-uncased"],
    }
    path = write_model_card(tmp_path, card(**changes))
    text = path.read_text(encoding="utf-8")
    assert "VisionTextDualEncoderModel" not in text
    assert "fusion" not in text
    assert "match_pairs" not in text
    assert ModelCard.load(path).data.pipeline_tag is None
    assert "(training.png)" in text
    assert "(retrieval.png)" not in text
    assert ModelCard.load(path).data.base_model == ["bert-base-uncased"]


def test_card_survives_any_text(tmp_path: Path) -> None:
    hostile = 'a | b\n---\n# <script> [x](y) `code` """ ``` {{ }} $x$ * _ ! \\'
    hyperparameters = {"caption": hostile, "empty": "", "none": None}
    path = write_model_card(
        tmp_path,
        card(
            name=hostile,
            dataset_name=hostile,
            command=f"run {hostile}",
            hyperparameters=hyperparameters,
            model=hostile,
        ),
    )
    text = path.read_text(encoding="utf-8")
    assert ModelCard.load(path).data.library_name == "transformers"
    title = next(line for line in text.splitlines() if line.startswith("# "))
    assert title.startswith(r"# a \| b --- \# &lt;script&gt; \[x\](y) \`code\`")
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
        model=f"me/{TOKEN}",
    )
    text = write_model_card(tmp_path, planted).read_text(encoding="utf-8")
    assert "Plain" not in text
    assert "0123456789abcdef" not in text
    assert TOKEN[3:] not in text
    assert "`bert`" in text
    assert "`7`" in text
