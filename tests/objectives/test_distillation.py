"""A teacher's embeddings: read in training as it returns them, computed once, part of what a run is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.images import open_image
from mm_utils.data.training_data import TrainingData
from mm_utils.model.arguments import ModelArguments, ObjectiveArguments
from mm_utils.model.build import build_model, load_model
from mm_utils.model.processor import load_processor_of
from mm_utils.objectives.build import build_objective
from mm_utils.objectives.contrastive import Distillation
from mm_utils.objectives.objective import JointObjective
from mm_utils.training.feature_cache import cache_features
from mm_utils.training.teacher import distill
from scripts import pretrain
from tests.kit.numbered_rows import SIZE, new_tokenizer, rows_of, training_data
from tests.kit.processes import losses, weights
from tests.kit.stock_folders import write_stock

BROKEN = (2, 7)
WITHOUT_HEAD = ["--objectives", "contrastive:1", "--fusion_layers", "0", "--rerank_top_k", "0"]
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A CLIP of 32 pixels with a tokenizer of letters."""
    return write_stock(tmp_path_factory.mktemp("teacher"), "clip")


def student(teacher: str, **fields: Any) -> tuple[TrainingData, JointObjective]:
    torch.manual_seed(0)
    model = build_model(ModelArguments(image_size=SIZE, fusion_layers=0, **fields), new_tokenizer())
    data = training_data(tokenize_captions(rows_of(12, BROKEN), new_tokenizer(), 16), pairs=4)
    return data, build_objective(model, ObjectiveArguments("contrastive", teacher), 0)


def opened(teacher: str, **fields: Any) -> tuple[TrainingData, float | None]:
    """The data with the teacher's embeddings, and its scale, as the term gets it."""
    data, objective = student(teacher, **fields)
    if fields:
        data = cache_features(data, objective, Accelerator(cpu=True))
    data = distill(data, objective, teacher, Accelerator(cpu=True))
    [scale] = [term.scale for term in objective.weights if isinstance(term, Distillation)]
    return data, scale


def as_the_teacher(folder: str) -> tuple[Tensor, dict[str, Tensor], float]:
    """Embeddings of all images that can be decoded, by row; of captions, by the words; and the scale."""
    model = load_model(folder, fusion_layers=0)
    rows = rows_of(12, BROKEN)
    model.processor = load_processor_of(folder)
    images = torch.zeros(12, model.config.projection_dim)
    there = [row for row in range(12) if row not in BROKEN]
    images[there] = model.encode(images=[open_image(rows[row]["image"]) for row in there])
    captions = sorted({caption for row in rows["captions"] for caption in row})
    return images, dict(zip(captions, model.encode(texts=captions), strict=True)), model.logit_scale.exp().item()


@pytest.mark.parametrize("fields", [{}, {"freeze_vision": True}, {"freeze_vision": True, "freeze_text": True}])
def test_a_batch_holds_what_the_teacher_gives(teacher: str, fields: dict[str, Any]) -> None:
    (data, scale) = opened(teacher, **fields)
    words = new_tokenizer()
    images, texts, right = as_the_teacher(teacher)
    assert scale == pytest.approx(right)
    seen = list(data.train_batches(0, 6))
    assert sum(len(batch["rows"]) for batch in seen) == 24
    for batch in seen:
        assert ("pixel_values" in batch) == (not fields)
        torch.testing.assert_close(batch["teacher_image"].float(), images[batch["rows"]], rtol=0, atol=1e-3)
        captions = [words.decode(ids, skip_special_tokens=True) for ids in batch["input_ids"]]
        right = torch.stack([texts[caption] for caption in captions])
        torch.testing.assert_close(batch["teacher_text"].float(), right, rtol=0, atol=1e-3)
        assert BROKEN[0] not in batch["rows"]


def test_a_run_learns_from_its_teacher_and_goes_on_with_no_other(
    teacher: str, tiny_flags: list[str], tmp_path: Path
) -> None:
    run = [*tiny_flags, *WITHOUT_HEAD, "--save_steps", "2"]
    flags = [*run, "--teacher_name_or_path", teacher]
    pretrain.main([*flags, "--output_dir", str(tmp_path / "out")])
    rows = (tmp_path / "out/metrics.jsonl").read_text()
    assert rows.count("distillation_loss") == 4
    resume = ["--resume_from_checkpoint", str(tmp_path / "out/checkpoint-2")]
    pretrain.main([*flags, "--micro_batch_size", "3", *resume, "--output_dir", str(tmp_path / "again")])
    assert losses(tmp_path / "again") == pytest.approx(
        {step: loss for step, loss in losses(tmp_path / "out").items() if step > 2}, rel=1e-4
    )
    others = weights(tmp_path / "out")
    for name, value in weights(tmp_path / "again").items():
        torch.testing.assert_close(others[name], value, rtol=0, atol=1e-4, msg=name)
    other = write_stock(tmp_path / "other", "siglip")
    with pytest.raises(
        ValueError, match=r"since it was written, teacher was \w+ and is \w+, so it would not be the same"
    ):
        pretrain.main([*run, "--teacher_name_or_path", other, *resume, "--output_dir", str(tmp_path / "refused")])


def test_a_sentence_transformer_of_images_and_texts_teaches(teacher: str, tmp_path: Path) -> None:
    """Its embeddings are those of `encode`."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    saved = str(tmp_path / "st")
    sentence_transformers.SentenceTransformer(teacher, device="cpu").save_pretrained(saved)
    name = f"st:{saved}"
    rows = rows_of(12, BROKEN)
    again, _ = opened(name)
    theirs = sentence_transformers.SentenceTransformer(saved, device="cpu")
    there = [row for row in range(12) if row not in BROKEN]
    given = [open_image(rows[row]["image"]) for row in there], [rows[row]["captions"][0] for row in there]
    for column, items in zip(("teacher_image", "teacher_text"), given, strict=True):
        values = [again.rows("train")[row][column] for row in there]
        first = torch.tensor(values if column == "teacher_image" else [value[0] for value in values])
        right = theirs.encode(items, convert_to_tensor=True, normalize_embeddings=True)
        torch.testing.assert_close(first.view_as(right), right, rtol=0, atol=2e-3)
