"""A saved folder opens in stock tools with the same embeddings, or says why not; three methods for people."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoProcessor, pipeline

from mm_utils.finetuning.arguments import ClassifierArguments
from mm_utils.finetuning.classifier import build_classifier
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import load_processor
from mm_utils.model.stock import to_dual_encoder
from tests.kit.fault_images import TEXTS as AWKWARD

TEXTS = ["a red square left of a blue circle", "two green stars", *(text for text in AWKWARD if len(text) < 99)]
PICTURES = [
    Image.effect_mandelbrot((90, 60), (-2, -1, 1, 1), 20 + 9 * i).convert("L").convert("RGB") for i in range(5)
]
WEIGHTS = {"match": 0.0, "caption": 0.4}
PLACES = (".", "dual_encoder", "fine_tuned")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    args = ModelArguments()
    processor = load_processor(args, TEXTS * 20)
    torch.manual_seed(0)
    model = build_model(args, processor.tokenizer)
    model.add_token_head(captions=True)
    model.config.rerank_weights = WEIGHTS
    for part, place in ((model, path), (to_dual_encoder(model), path / "dual_encoder")):
        part.save_pretrained(place)
        processor.save_pretrained(place)
    tuned = ClassifierArguments(str(path), classifier_inputs="pair")
    build_classifier(tuned, ["no", "yes"], has_texts=True).save_pretrained(path / "fine_tuned")
    processor.save_pretrained(path / "fine_tuned")
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> FusionDualEncoderModel:
    return FusionDualEncoderModel.from_pretrained(folder).eval()


def inputs(folder: Path) -> Any:
    return AutoProcessor.from_pretrained(folder)(text=TEXTS, images=PICTURES, padding=True, return_tensors="pt")


@torch.no_grad()
def plain_embeds(folder: Path, model: FusionDualEncoderModel) -> tuple[Tensor, Tensor]:
    return (
        model.encode_image(inputs(folder)["pixel_values"])[0],
        torch.cat([model.encode(texts=text) for text in TEXTS]),
    )


def test_encode_takes_pictures_and_paths_in_any_batches(
    folder: Path, model: FusionDualEncoderModel, tmp_path: Path
) -> None:
    paths = []
    for number, picture in enumerate(PICTURES):
        paths.append(str(tmp_path / f"{number}.png"))
        picture.save(paths[-1])
    expected = plain_embeds(folder, model)
    model.train()
    for images, batch_size in ((PICTURES, 32), (paths, 2), (paths, 1)):
        found = model.encode(images=images, texts=TEXTS, batch_size=batch_size)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(model.encode(images=paths[1]), expected[0][1:2], atol=1e-5, rtol=0)
    cosines = model.similarity(expected[1] * 3, expected[0])
    torch.testing.assert_close(cosines, F.cosine_similarity(expected[1][:, None], expected[0][None], dim=-1))
    with pytest.raises(ValueError, match=r"Pass images=\.\.\., texts=\.\.\., or both"):
        model.encode()


@torch.no_grad()
@pytest.mark.parametrize("weights", [WEIGHTS, {"match": 0.0, "caption": 0.0}, None])
def test_rerank_adds_what_the_head_says(
    folder: Path, model: FusionDualEncoderModel, weights: dict[str, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pair by itself."""
    monkeypatch.setattr(model.config, "rerank_weights", weights)
    processor = AutoProcessor.from_pretrained(folder)
    expected = []
    given = processor(text=TEXTS[:1], return_tensors="pt")
    ids = given["input_ids"]
    mask = given["attention_mask"]
    for picture in PICTURES:
        image, keys_values = model.encode_image(processor(images=[picture], return_tensors="pt")["pixel_values"])
        head = model.caption_scores(keys_values, ids, mask) * (weights or {}).get("caption", 0.0)
        expected.append(((image * model.encode_text(ids, mask)[0]).sum() + head / model.logit_scale.exp()).item())
    found = model.rerank(TEXTS[0], PICTURES, batch_size=2)
    assert [place for place, _ in found] == sorted(range(len(PICTURES)), key=lambda place: -expected[place])
    assert [score for _, score in sorted(found)] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("place", PLACES)
def test_zero_shot_classification_by_the_pipeline(folder: Path, model: FusionDualEncoderModel, place: str) -> None:
    classify = pipeline("zero-shot-image-classification", str(folder / place), trust_remote_code=True)
    found = classify(PICTURES[1], candidate_labels=TEXTS, hypothesis_template="{}")
    image, text = plain_embeds(folder, model)
    expected = (model.logit_scale.exp() * text @ image[1]).softmax(0).tolist()
    assert {hit["label"]: hit["score"] for hit in found} == pytest.approx(
        dict(zip(TEXTS, expected, strict=True)), abs=1e-4
    )


@pytest.mark.parametrize("place", [".", "fine_tuned"])
def test_features_by_the_pipelines(folder: Path, model: FusionDualEncoderModel, place: str) -> None:
    image, text = plain_embeds(folder, model)
    for task, given, expected in (
        ("image-feature-extraction", PICTURES[2], image[2]), ("feature-extraction", TEXTS[2], text[2])
    ):  # fmt: skip
        found = pipeline(task, str(folder / place), trust_remote_code=True)(given)
        torch.testing.assert_close(torch.tensor(found)[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("place", PLACES)
def test_sentence_transformers(folder: Path, model: FusionDualEncoderModel, place: str) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    opened = sentence_transformers.SentenceTransformer(str(folder / place), trust_remote_code=True, device="cpu")
    for given, expected in zip((PICTURES, TEXTS), plain_embeds(folder, model), strict=True):
        found = opened.encode(given, convert_to_tensor=True, normalize_embeddings=True)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=r"use rerank of the model itself|Unrecognized configuration class"):
        sentence_transformers.CrossEncoder(str(folder / place), trust_remote_code=True)
