"""mteb runs a task on a saved model, and finds the accuracy that the embeddings give."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict

from scripts import pretrain
from tests.kit.corpora import COLOURS, SHAPES, draw

mteb = pytest.importorskip("mteb")
abstasks = pytest.importorskip("mteb.abstasks")

LABELS = [f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES]


class Drawings(abstasks.AbsTaskZeroShotClassification):
    """The 8 kinds of picture of the tiny corpus, at two sizes."""

    metadata = mteb.TaskMetadata(
        name="Drawings",
        description="Which colour and shape?",
        dataset={"path": "none", "revision": "none"},
        type="ZeroShotClassification",
        category="i2t",
        modalities=["image", "text"],
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="accuracy",
    )

    def load_data(self, *_: Any, **__: Any) -> None:
        pictures = [draw(colour, shape, size) for colour in COLOURS for shape in SHAPES for size in (40, 50)]
        rows = {"image": pictures, "label": [place // 2 for place in range(16)]}
        self.dataset, self.data_loaded = DatasetDict({"test": Dataset.from_dict(rows)}), True

    def get_candidate_labels(self) -> list[str]:
        return LABELS


def test_a_task_finds_the_accuracy_of_the_embeddings(tiny_flags: list[str], tmp_path: Path) -> None:
    from mm_utils.evaluation.mteb_model import MtebModel

    pretrain.main([*tiny_flags, "--output_dir", str(tmp_path / "run")])
    model, task = MtebModel(str(tmp_path / "run")), Drawings()
    result = mteb.evaluate(model, tasks=[task], cache=None, show_progress_bar=False, num_proc=1)
    score = result.task_results[0].scores["test"][0]["accuracy"]

    task.load_data()
    rows = task.dataset["test"]
    images, texts = model.model.encode(rows["image"][:], LABELS)
    guesses = (images @ texts.T).argmax(1)
    assert score == pytest.approx((guesses == torch.tensor(rows["label"][:])).float().mean().item())

    both = model.encode([{"image": rows["image"][:2], "text": LABELS[:2]}])
    assert torch.allclose(both, torch.nn.functional.normalize(images[:2] + texts[:2]), atol=1e-6)
    assert torch.allclose(model.get_text_embeddings([{"text": LABELS[:1]}, {"text": LABELS[1:]}]), texts, atol=1e-5)
    assert torch.allclose(model.get_image_embeddings([{"image": rows["image"][:]}]), images, atol=1e-6)
