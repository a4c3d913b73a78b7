"""Labelled sounds and clips from every kind of source: stored as prepared sets store them, once; bad input is named."""

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from PIL import Image

from mm_utils.data.media import COLUMNS
from mm_utils.data.media.riff import read_avi, read_wav
from mm_utils.data.prepare import ingest
from mm_utils.data.scenes import load_scenes
from mm_utils.data.sets import SETS
from mm_utils.data.sets.events import load_clips
from mm_utils.data.sets.questions import TASKS
from mm_utils.finetuning import labels
from mm_utils.finetuning.labels import LabelledArguments, LabelledTask, TaskArguments, load_labelled, load_task
from tests.kit.media_files import COLOURS, clip, media_rows, tone


def write(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def load(file: str, medium: str = "sound", **flags: Any) -> LabelledTask:
    return load_task(TaskArguments(train_file=file, **flags), medium)


def samples(task: LabelledTask, split: str = "train") -> list[np.ndarray]:
    return [read_wav(image["bytes"])[0] for image in task.splits[split]["image"]]


def folders(root: Path, names: dict[str, bytes]) -> str:
    for name, content in names.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return str(root)


@pytest.fixture
def tones(tmp_path: Path) -> list[dict[str, Any]]:
    """Four files of two tones each, with a question about each tone."""
    rows = []
    for number in range(4):
        (tmp_path / f"{number}.wav").write_bytes(tone(300, 300 + 300 * number))
        for start, end in ((None, 0.5), (0.5, 1.0)):
            answer = "yes" if start and number else "no"
            rows.append({"audio": f"{number}.wav", "start": start, "end": end, "question": "other?", "answer": answer})
    return rows


def test_parts_of_files_are_stored_and_held_out_by_file(tones: list[dict[str, Any]], tmp_path: Path) -> None:
    task = load(write(tmp_path, tones))
    assert (task.classes, task.has_images, task.has_texts) == (["no", "yes"], True, True)
    assert [len(task.splits[split]) for split in ("train", "validation")] == [6, 2]
    whole = {number: read_wav(tone(300, 300 + 300 * number))[0] for number in range(4)}
    found = [*samples(task), *samples(task, "validation")]
    expected = [part for each in whole.values() for part in (each[:8000], each[8000:])]
    assert sorted(map(bytes, found)) == sorted(map(bytes, expected))
    [held] = [number for number, each in whole.items() if bytes(each[8000:]) == bytes(samples(task, "validation")[1])]
    assert bytes(samples(task, "validation")[0]) == bytes(whole[held][:8000])


def test_files_are_decoded_once_until_they_change(
    tones: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, tones)
    before = samples(load(file))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("decoded again")

    with monkeypatch.context() as patch:
        patch.setattr(ingest, "Worker", refuse)
        assert list(map(bytes, samples(load(file)))) == list(map(bytes, before))
        (tmp_path / "1.wav").write_bytes(tone(100, 200))
        with pytest.raises(AssertionError, match="decoded again"):
            load(file)
    changed = {bytes(each) for each in [*samples(load(file)), *samples(load(file), "validation")]}
    assert bytes(read_wav(tone(100))[0]) in changed


def test_frames_with_their_times(tmp_path: Path) -> None:
    colours = ("red", "blue", "lime")
    for colour in colours:
        Image.new("RGB", (40, 32), colour).save(tmp_path / f"{colour}.png")
    order = [("red", "blue"), ("blue", "red"), ("lime", "red"), ("red", "lime")]
    rows = [{"frames": [f"{name}.png" for name in names], "times": [0, 1], "label": names[0]} for names in order * 2]
    file = write(tmp_path, rows)
    task = load(file, "clip", validation_file=file)
    assert task.classes == ["blue", "lime", "red"]
    stored, fps = read_avi(task.splits["train"][1]["image"]["bytes"])
    first, last = (np.asarray(Image.open(io.BytesIO(stored[at]))).mean((0, 1)).argmax() for at in (0, -1))
    assert (first, last, fps) == (2, 0, 4.0)


@pytest.mark.parametrize("medium", ["sound", "clip"])
def test_equal_captions_of_a_prepared_set_are_a_class(medium: str, tmp_path: Path) -> None:
    made = [tone(100 * number) for number in range(1, 5)] if medium == "sound" else [clip([name]) for name in COLOURS]
    captions = [["a dog barks", "barking"], ["rain falls"]] * 2
    rows = media_rows(medium, made, captions=captions, content_id=list("abcd"))
    rows = rows.rename_columns({"image": COLUMNS[medium]})
    DatasetDict(train=rows, validation=rows.select([1])).save_to_disk(str(tmp_path))
    (tmp_path / "report.json").write_text(json.dumps({"format": "tandem-pairs"}))
    task = load_task(TaskArguments(dataset_name=str(tmp_path)), medium)
    assert (task.classes, task.has_texts) == (["a dog barks", "rain falls"], False)
    assert task.splits["train"]["label"] == [0, 1, 0, 1]
    assert task.splits["validation"]["label"] == [1]
    assert [image["bytes"] for image in task.splits["train"]["image"]] == made


def test_mistakes_name_the_file_the_line_the_column_and_the_remedy(
    tones: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "text.wav").write_text("no sound")
    sound = {key: tones[0][key] for key in ("audio", "answer")}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("sound", {"image": "a.png", "label": 1}, "column image holds images, and the model is for sounds. Give sounds, or"),
        ("sound", {"image": "a.png", "question": "q", "label": 1}, "column image holds images, and the model is for"),
        ("sound", {"path": "a.png", "label": 1}, "column path holds images, and the model is for sounds"),
        ("image", {"audio": "0.wav", "label": 1}, "column audio holds sounds, and the model is for images"),
        ("image", {"audio": "0.wav", "question": "q", "answer": 1}, "column audio holds sounds, and the model is for"),
        ("clip", {"audio": "0.wav", "label": 1}, "column audio holds sounds, and the model is for clips"),
        ("sound", {"audio": "none.wav", "label": 1}, r"usable \(line 1, column audio: .*none.wav"),
        ("sound", {"audio": "", "label": 1}, r"usable \(line 1, column audio: the cell of the sound is empty"),
        ("sound", {"audio": "text.wav", "label": 1}, r"column audio: .*The file is not a known sound or video. Convert it"),
        ("sound", {**sound, "start": "soon"}, r"column audio: 'soon' is not a time in seconds"),
        ("sound", {**sound, "answer": None}, r"usable \(line 1, column answer: it has no label\)"),
        ("sound", {"audio": "0.wav"}, "no label column was recognised. The columns are: audio. Set --label_column"),
        ("sound", {"label": 1}, "no sound column and no text column was recognised. The columns are: label. Set"),
    ]  # fmt: skip
    for number, (medium, row, message) in enumerate(cases):
        file = write(tmp_path, [row, row], f"{number}.jsonl")
        with pytest.raises(ValueError, match=f"--train_file is {file}; .*{message}") as caught:
            load(file, medium)
        assert "\n" not in str(caught.value)
    load(write(tmp_path, [*tones, {**tones[0], "audio": "text.wav"}]))
    assert "1 of 9 rows are left out (line 9, column audio: " in caplog.text


def test_data_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "load_scenes", partial(load_scenes, num_train=4, num_eval=2, cache_dir=tmp_path))
    with pytest.raises(ValueError, match="--task is scenes:describes; it holds images, and the model is for sounds"):
        load_task(TaskArguments(max_train_samples=4), "sound")
    root = folders(tmp_path / "media", {f"{name}/{copy}.wav": tone(200) for name in "ab" for copy in range(2)})
    for medium in ("image", "clip"):
        message = (
            f"--dataset_name is .*media; it holds sounds, and the model is for {medium}s. Give {medium}s, or --model"
        )
        with pytest.raises(ValueError, match=message):
            load_task(TaskArguments(dataset_name=root), medium)
        with pytest.raises(ValueError, match=message):
            load_labelled(LabelledArguments(dataset_name=root), medium)


def test_a_sound_that_cannot_be_read_is_left_out_of_an_evaluation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = {f"{name}/{copy}.wav": tone(200) for name in "ab" for copy in range(2)} | {"a/0.wav": b"nothing"}
    found = load_labelled(LabelledArguments(dataset_name=folders(tmp_path / "media", names)), "sound")
    assert found.label_M.tolist() == [0, 1, 1]
    assert "1 of 4 rows are left out (file a/0.wav, " in caplog.text


def test_what_comes_first_is_asked_of_the_embedded_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small() -> DatasetDict:
        return load_clips(num_train=12, num_eval=4, cache_dir=tmp_path)

    rows = small()["train"]
    asked: Dataset = rows
    examples = list(TASKS["clips:first"](asked))
    assert [row for row, *_ in examples] == list(range(12))
    for row, text, answer in examples:
        first = min(rows[row]["moments"], key=lambda moment: moment["span"][0])
        assert (text, first["phrase"].split()[1]) == ("what comes first?", answer)
    monkeypatch.setitem(SETS, "clips", small)
    task = load_task(TaskArguments(task="clips:describes"), "clip")
    assert task.classes == ["no", "yes"]
    assert [len(task.splits[split]) for split in ("train", "validation", "test")] == [24, 8, 8]
