"""Models of sounds and of clips on labelled tasks, in process, on tiny data."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoProcessor

from scripts import eval_zero_shot, finetune
from tests.kit.media_files import clip, tone
from tests.kit.models import save_model

SHORT = ["--global_batch_size", "6", "--max_steps", "4", "--logging_steps", "1", "--dataloader_num_workers", "0"]
PITCHES = {"low": 250, "high": 2500}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of sounds with fresh weights."""
    return str(save_model(tmp_path_factory.mktemp("sounds") / "model", "sound"))


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a task of pairs: is the sound as the question says?"""
    root = tmp_path_factory.mktemp("questions")
    rows: list[dict[str, Any]] = []
    for name, hertz in PITCHES.items():
        for number in range(4):
            (root / f"{name}{number}.wav").write_bytes(tone(hertz + 20 * number, each=0.4))
            for asked in PITCHES:
                answer = "yes" if asked == name else "no"
                split = "validation" if number == 3 else "train"
                row = {"audio": f"{name}{number}.wav", "question": f"is it {asked}?", "answer": answer}
                rows.append({**row, "split": split})
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--train_file", str(root / "rows.jsonl")]


@pytest.fixture(scope="module")
def finished(model: str, questions: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("finished") / "out"
    flags = ["--model_name_or_path", model, *questions, *SHORT, "--save_steps", "2", "--output_dir", str(folder)]
    return folder, finetune.main(flags)


def test_the_saved_model_says_what_was_measured(finished: tuple[Path, dict], questions: list[str]) -> None:
    folder, metrics = finished
    found = AutoModelForSequenceClassification.from_pretrained(folder)
    assert type(found).__name__ == "FusionDualEncoderForClassification"  # of the package, or of a saved folder
    assert (found.config.classifier_inputs, found.config.medium) == ("fused", "sound")
    file = Path(questions[1])
    rows = [row for row in map(json.loads, file.read_text().splitlines()) if row["split"] == "validation"]
    sounds = [str(file.parent / row["audio"]) for row in rows]
    shares = found.predict(sounds, [row["question"] for row in rows])
    assert torch.allclose(shares.sum(1), torch.ones(4))
    right = [
        found.config.id2label[each] == row["answer"] for each, row in zip(shares.argmax(1).tolist(), rows, strict=True)
    ]
    assert sum(right) / len(right) == metrics["eval_accuracy"]
    assert AutoProcessor.from_pretrained(folder).feature_extractor.window_seconds == 1.0


def test_the_card_has_code_for_sounds(finished: tuple[Path, dict], tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "sounds").mkdir()
    for number in range(3):
        (tmp_path / f"sounds/{number}.wav").write_bytes(tone(300 + 200 * number, each=0.4))
    monkeypatch.chdir(tmp_path)
    card = (finished[0] / "README.md").read_text()
    assert re.search(r"into 2 classes by the fusion head.*CLS.* on a sound and a text\.", card)
    assert "type: audio-question-answering" in card
    [code] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    printed: list[str] = []
    exec(code, {"print": lambda text: printed.append(text)})
    assert [line.split()[1] in ("yes", "no") for line in printed] == [True] * 3


@pytest.mark.parametrize("medium", ["sound", pytest.param("clip", marks=pytest.mark.slow)])
def test_a_folder_per_class(medium: str, model: str, tmp_path: Path) -> None:
    """It is learnt, and the same folder is measured without training."""
    if medium == "clip":
        pytest.importorskip("av")
        model = str(save_model(tmp_path / "model", "clip"))
    colours = {"low": "red", "high": "blue"}
    for name, hertz in PITCHES.items():
        for split, count in (("train", 6), ("validation", 2)):
            (tmp_path / "media" / split / name).mkdir(parents=True)
            for number in range(count):
                sound, shown = tone(hertz + 20 * number, each=0.4), clip([colours[name]] * 4, (32 + number, 32))
                content, suffix = (sound, "wav") if medium == "sound" else (shown, "avi")
                (tmp_path / "media" / split / name / f"{number}.{suffix}").write_bytes(content)
    data = ["--model_name_or_path", model, "--dataset_name", str(tmp_path / "media")]
    metrics = finetune.main(
        [*data, *SHORT, "--learning_rate", "1e-3", "--max_steps", "48", "--output_dir", str(tmp_path / "out")]
    )
    assert metrics["eval_accuracy"] == 1.0
    before = eval_zero_shot.main([*data, "--dataloader_num_workers", "0"])
    assert before["accuracy@1"] in (0.0, 0.25, 0.5, 0.75, 1.0)
    assert before["chance@1"] == 0.5
