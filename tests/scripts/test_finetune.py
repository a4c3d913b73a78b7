"""A trained model on labelled tasks, in process, on tiny data; test_runs.py has what such a run leaves and resumes."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from scripts import eval_zero_shot, finetune
from tests.kit.hub import Hub
from tests.kit.media_files import tone
from tests.kit.models import save_model


def test_what_is_pushed_is_what_was_saved(finetuning_flags: list[str], tmp_path: Path, server: Hub) -> None:
    hub = ["--push_to_hub", "--hub_model_id", "tester/classes", "--wise_ft"]
    finetune.main([*finetuning_flags, *hub, "--max_steps", "2", "--output_dir", str(tmp_path)])
    assert server.repos["tester/classes"]["model.safetensors"] == (tmp_path / "model.safetensors").read_bytes()
    assert {"README.md", "classes.csv"} <= set(server.repos["tester/classes"])
    assert "config.yaml" not in server.repos["tester/classes"]  # it names folders of this machine


# -- sounds and clips ---------------------------------------------------------------------------------------------------
SHORT = ["--global_batch_size", "6", "--max_steps", "4", "--logging_steps", "1", "--dataloader_num_workers", "0"]
PITCHES = {"low": 250, "high": 2500}


@pytest.fixture(scope="module")
def sound_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of sounds with fresh weights."""
    return str(save_model(tmp_path_factory.mktemp("sounds") / "model", "sound"))


def test_a_task_of_sounds_is_measured_and_its_card_has_code_for_it(
    sound_model: str, tmp_path: Path, monkeypatch
) -> None:
    """Is the sound as the question says?"""
    folder, sounds, rows = tmp_path / "out", tmp_path / "sounds", []
    sounds.mkdir()
    for name, hertz in PITCHES.items():
        for number in range(4):
            (sounds / f"{name}{number}.wav").write_bytes(tone(hertz + 20 * number, each=0.4))
            row = {"audio": f"sounds/{name}{number}.wav", "split": "validation" if number == 3 else "train"}
            rows += [
                {**row, "question": f"is it {asked}?", "answer": "yes" if asked == name else "no"} for asked in PITCHES
            ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--model_name_or_path", sound_model, "--train_file", str(tmp_path / "rows.jsonl"), *SHORT]
    metrics = finetune.main([*flags, "--save_steps", "2", "--output_dir", str(folder)])
    found = AutoModelForSequenceClassification.from_pretrained(folder)
    assert (found.config.classifier_inputs, found.config.medium) == ("fused", "sound")
    held = [row for row in rows if row["split"] == "validation"]
    shares = found.predict([str(tmp_path / row["audio"]) for row in held], [row["question"] for row in held])
    right = [
        found.config.id2label[each] == row["answer"] for each, row in zip(shares.argmax(1).tolist(), held, strict=True)
    ]
    assert sum(right) / len(right) == metrics["eval_accuracy"]
    monkeypatch.chdir(tmp_path)
    card = (folder / "README.md").read_text()
    assert re.search(r"into 2 classes by the fusion head.*CLS.* on a sound and a text\.", card)
    assert "type: audio-question-answering" in card
    [code] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    printed: list[str] = []
    exec(code, {"print": lambda text: printed.append(text)})
    assert [line.split()[1] in ("yes", "no") for line in printed] == [True] * 8


def test_a_folder_per_class(sound_model: str, tmp_path: Path) -> None:
    """It is learnt, and the same folder is measured without training."""
    for name, hertz in PITCHES.items():
        for split, count in (("train", 6), ("validation", 2)):
            (tmp_path / "media" / split / name).mkdir(parents=True)
            for number in range(count):
                path = tmp_path / "media" / split / name / f"{number}.wav"
                path.write_bytes(tone(hertz + 20 * number, each=0.4))
    data = ["--model_name_or_path", sound_model, "--dataset_name", str(tmp_path / "media")]
    metrics = finetune.main(
        [*data, *SHORT, "--learning_rate", "1e-3", "--max_steps", "48", "--output_dir", str(tmp_path / "out")]
    )
    assert metrics["eval_accuracy"] == 1.0
    before = eval_zero_shot.main([*data, "--dataloader_num_workers", "0"])
    assert before["accuracy@1"] in (0.0, 0.25, 0.5, 0.75, 1.0)
    assert before["chance@1"] == 0.5
