"""A trained model is evaluated and fine-tuned, in process; test_runs.py has what such a run leaves and resumes."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from mm_utils.files import SUMS_FILE
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from scripts import embed, eval_retrieval, eval_zero_shot, finetune
from tests.kit.corpora import COLOURS, SHAPES, draw
from tests.kit.hub import Hub
from tests.kit.jsonl import write_lines
from tests.kit.media_files import tone
from tests.kit.models import save_model
from tests.kit.processes import losses
from tests.kit.reading import write_tar
from tests.kit.stock_folders import write_stock


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
    folder = tmp_path / "out"
    sounds = tmp_path / "my_sounds"
    rows = []
    sounds.mkdir()
    for name, hertz in PITCHES.items():
        for number in range(4):
            (sounds / f"{name}{number}.wav").write_bytes(tone(hertz + 20 * number, each=0.4))
            row = {"audio": f"my_sounds/{name}{number}.wav", "split": "validation" if number == 3 else "train"}
            rows += [
                {**row, "question": f"is it {asked}?", "answer": "yes" if asked == name else "no"} for asked in PITCHES
            ]
    write_lines(tmp_path / "rows.jsonl", rows)
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
    assert re.search(r"into 2 classes .*no, yes.* by the fusion head.*CLS.* on a sound and a text\.", card)
    [code] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    printed = []
    exec(code, {"print": lambda text: printed.append(text)})
    assert [line.split()[1] in ("yes", "no") for line in printed] == [True] * 8


def test_a_folder_per_class(sound_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is learnt, files get the classes that are learnt, and the same folder is measured without training."""
    for name, hertz in PITCHES.items():
        for split, count in (("train", 6), ("validation", 2)):
            (tmp_path / "media" / split / name).mkdir(parents=True)
            for number in range(count):
                path = tmp_path / "media" / split / name / f"{number}.wav"
                path.write_bytes(tone(hertz + 20 * number, each=0.4))
    data = ["--model_name_or_path", sound_model, "--dataset_name", str(tmp_path / "media")]
    with caplog.at_level("INFO"):
        metrics = finetune.main(
            [*data, *SHORT, "--learning_rate", "1e-3", "--max_steps", "48", "--output_dir", str(tmp_path / "out")]
        )
    assert "--images FOLDER_OF_NEW_SOUNDS --output_file" in caplog.text
    assert metrics["eval_accuracy"] == 1.0
    (tmp_path / "media/0.wav").write_bytes(b"RIFF")
    table = tmp_path / "new/classes.csv"
    own = ["--model_name_or_path", str(tmp_path / "out"), "--images", str(tmp_path / "media")]
    assert embed.main([*own, "--output_file", str(table)]) == {"classified": 16, "skipped": 1}
    head, broken, *rows = list(csv.reader(table.read_text().splitlines()))
    assert (head, broken) == (["path", "class", "probability"], ["0.wav", "", ""])
    assert "0.wav has no class: " in caplog.text
    shares = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").predict(
        [str(tmp_path / "media" / path) for path, *_ in rows]
    )
    assert [name for _, name, _ in rows] == [Path(path).parent.name for path, *_ in rows]
    assert [float(share) for *_, share in rows] == pytest.approx(shares.max(1).values.tolist(), abs=1e-4)
    with pytest.raises(ValueError, match=r"is .*model; that is no classifier\. Train one with scripts/finetune\.py"):
        embed.main(["--model_name_or_path", sound_model, *own[2:], "--output_file", str(table)])
    with pytest.raises(ValueError, match=r"is a classifier of sounds, without a text encoder"):
        embed.main([*own, "--index_dir", str(tmp_path / "index")])
    assert eval_zero_shot.main([*data, "--dataloader_num_workers", "0"])["chance@1"] == 0.5


@pytest.mark.parametrize("inputs", ["fused", "pair", "image"])
def test_frozen_towers_run_once_and_what_is_learnt_is_the_same(
    inputs: str, pretrained: str, folders: str, finetuning_flags: list[str], tmp_path: Path, monkeypatch
) -> None:
    of_folders = ["--model_name_or_path", pretrained, "--dataset_name", folders, *SHORT]
    flags = [
        *(of_folders if inputs == "image" else finetuning_flags),
        "--classifier_inputs",
        inputs,
        "--eval_steps",
        "2",
    ]
    flags += ["--freeze_vision", "--freeze_text", "--learning_rate", "1e-2"]
    shown = []
    run = FusionDualEncoderModel.vision_features

    def noted(self, pixels, with_taps=True):
        shown.append(len(pixels))
        return run(self, pixels, with_taps)

    monkeypatch.setattr(FusionDualEncoderModel, "vision_features", noted)
    found = []
    runs = []
    for own in (["--min_crop_area", "1"], ["--cache_features"]):
        folder = tmp_path / own[0].strip("-")
        _ = shown.clear()
        metrics = finetune.main([*flags, *own, "--output_dir", str(folder)])
        found.append([*losses(folder).values(), *metrics.values()])
        runs.append(sum(shown))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert len({*found[0][:4]}) == 4
    rows = 24 if inputs == "image" else 64
    assert rows <= runs[1] < rows + 8 < runs[0]  # and some blanks, for the shapes


# -- evaluation --------------------------------------------------------------------------------------------------------
@pytest.fixture
def flags(pretrained: str, corpus: Path, tmp_path: Path) -> list[str]:
    """The folder of a model after a few steps, whose head re-ranks."""
    model = shutil.copytree(pretrained, tmp_path / "model", ignore=shutil.ignore_patterns(SUMS_FILE))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rerank_weights": {"caption": 1.0}}))
    data = ["--train_file", str(corpus), "--dataloader_num_workers", "0"]
    return ["--model_name_or_path", str(model), *data, "--rerank_top_k", "4"]


def test_all_figures_are_left_with_their_intervals(flags: list[str], tmp_path: Path) -> None:
    found = eval_retrieval.main([*flags, "--output_dir", str(tmp_path / "out")])
    written = json.loads((tmp_path / "out/metrics.json").read_text())
    beside = {name for name in written if name.endswith("_half_width_95") or name.startswith("rerank_gain_")}
    assert {name: value for name, value in written.items() if name not in beside} == found
    for direction in ("text_to_image", "image_to_text"):
        for measure in ("recall@1", "recall@5", "recall@10"):
            name = f"{direction}_{measure}"
            assert written[f"rerank_gain_{name}"] == pytest.approx(found[f"rerank_{name}"] - found[name])
            assert all(0 < written[f"{stage}{name}_half_width_95"] < 1 for stage in ("", "rerank_", "rerank_gain_"))


def test_the_screen_has_recalls_and_warns_of_training_rows(flags: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        found = eval_retrieval.main([*flags, "--split", "train"])
    assert "The split is train;" in caplog.text
    [shown] = [message for message in caplog.messages if "Retrieval on the" in message]
    assert f"R@1 {found['text_to_image_recall@1']:.3f} (" in shown
    assert "by chance" in shown
    assert "mean_rank" not in caplog.text


def test_reranking_without_a_head_is_refused(corpus: Path, tmp_path: Path) -> None:
    asked = ["--model_name_or_path", write_stock(tmp_path, "clip"), "--rerank_top_k", "32"]
    with pytest.raises(ValueError, match="--rerank_top_k is 32; the model has no fusion head"):
        eval_retrieval.main([*asked, "--train_file", str(corpus)])


# -- classes -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder a kind of picture, 3 images of sizes that the corpus does not have."""
    root = tmp_path_factory.mktemp("classes")
    for colour in COLOURS:
        for shape in SHAPES:
            (root / f"{colour}_{shape}").mkdir()
            for size in (42, 46, 50):
                draw(colour, shape, size).save(root / f"{colour}_{shape}/{size}.png")
    return str(root)


@pytest.fixture
def classes(pretrained: str, folders: str) -> list[str]:
    templates = ["--templates", "a {}, number 0", "number 1: one {}"]
    others = ["--dataset_name", folders, "--dataloader_num_workers", "0"]
    return ["--model_name_or_path", pretrained, *others, *templates]


def test_a_folder_of_clip_benchmark_gives_the_same_figures(classes: list[str], folders: str, tmp_path: Path) -> None:
    """The same images in tar shards, with the files of names and templates beside them."""
    names = sorted(path.name for path in Path(folders).iterdir())
    members = []
    for label, name in enumerate(names):
        for image in sorted(Path(folders, name).iterdir()):
            key = f"s{len(members) // 2:07d}"
            members += [(f"{key}.png", image.read_bytes()), (f"{key}.cls", str(label).encode())]
    (tmp_path / "test").mkdir()
    write_tar(tmp_path / "test/0.tar", members)
    (tmp_path / "classnames.txt").write_text("".join(f"{name}\n" for name in names))
    (tmp_path / "templates.txt").write_text("a {c}, number 0\nnumber 1: one {c}\n")
    beside = ["--classes", f"{tmp_path}/classnames.txt", "--templates", f"{tmp_path}/templates.txt"]
    found = eval_zero_shot.main([*classes, "--dataset_name", str(tmp_path), *beside])
    assert found == pytest.approx(eval_zero_shot.main([*classes, "--output_dir", str(tmp_path / "out")]))
    assert found["chance@1"] == found["majority@1"] == 1 / 8
    assert json.loads((tmp_path / "out/metrics.json").read_text()) == pytest.approx(found)
    assert len((tmp_path / "out/classes.csv").read_text().splitlines()) == 9
