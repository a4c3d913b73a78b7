"""Graphs give torch's numbers for any batch and length, in every precision; what differs is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mm_utils.export import comparison
from mm_utils.export.comparison import ExportedTowers, Figures
from mm_utils.export.folder import PRECISIONS, ends_in_pad, graph_path
from mm_utils.export.graphs import Head, PaddedTextTower, check_packages, head_weights
from mm_utils.model.build import load_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import load_processor_of
from tests.export.conftest import WEIGHTS
from tests.kit.stock_folders import TEXTS, write_stock

PARTS = ("vision_model", "text_model", "reranker_images", "reranker")


def towers_of(folder: Path, model: FusionDualEncoderModel, precision: str = "fp32") -> ExportedTowers:
    return ExportedTowers({part: folder / graph_path("plain", part, precision) for part in PARTS}, model.config, 0, 77)


def some_texts(count: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(5, 20, (count, length), generator=generator)
    lengths = torch.arange(count) % length + 1
    return ids, (torch.arange(length) < lengths[:, None]).long()


@torch.no_grad()
@pytest.mark.parametrize(("images", "texts", "length"), [(1, 1, 2), (1, 4, 9), (5, 1, 30), (2, 3, 7)])
def test_any_number_of_images_texts_and_tokens(
    images: int, texts: int, length: int, exported: tuple[Path, Any], model: FusionDualEncoderModel
) -> None:
    towers = towers_of(exported[0], model)
    pixels = torch.randn(images, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    ids, mask = some_texts(texts, length)
    expected, keys_values = model.encode_image(pixels)
    torch.testing.assert_close(towers.encode_image(pixels)[0], expected, atol=1e-5, rtol=0)
    embeds, states = model.encode_text(ids, mask)
    torch.testing.assert_close(towers.encode_text(ids, mask)[0], embeds, atol=1e-5, rtol=0)
    assert keys_values is not None
    for text in range(texts):
        sides = (side[text : text + 1].expand(images, *side.shape[1:]) for side in (states, mask, ids))
        added = model.head_scores(keys_values, *sides)
        torch.testing.assert_close(towers.added(pixels, ids, mask)[text], added, atol=1e-4, rtol=1e-5)


def test_precisions_are_smaller_and_close(exported: tuple[Path, dict[str, Figures]]) -> None:
    folder, figures = exported
    assert list(figures) == ["torch", *PRECISIONS]
    for precision, most in (("fp32", 1e-5), ("fp16", 1e-2), ("int8", 0.03)):  # on any processor
        differences = figures[precision].differences
        assert differences.keys() == {"image", "text", "head"}
        assert max(differences["image"], differences["text"]) < most
    assert figures["int8"].differences["text"] > figures["fp32"].differences["text"]
    by_size = [figures[precision].megabytes["text_model"] for precision in ("int8", "fp16", "fp32")]
    assert by_size == sorted(by_size)
    assert {path.name for path in folder.glob("*.onnx")} == {
        f"{part}{suffix}.onnx" for part in PARTS for suffix in PRECISIONS.values()
    }


def test_an_export_that_differs_is_refused(
    exported: tuple[Path, Any], folder: Path, model: FusionDualEncoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, towers = load_processor_of(str(folder)).tokenizer, {"fp32": towers_of(exported[0], model)}
    head = Head(model, WEIGHTS)
    assert comparison.compare(model, towers, tokenizer, head)["fp32"].differences["text"] < 1e-5
    monkeypatch.setattr(comparison, "MOST_DIFFERENCE", 0.0)
    with pytest.raises(comparison.RunError, match=r"The exported image graph differs from torch by \d"):
        comparison.compare(model, towers, tokenizer, head)
    monkeypatch.undo()
    towers = {"fp32": towers_of(exported[0], model)}
    monkeypatch.setattr(towers["fp32"], "encode_text", lambda *_: (torch.full((3, 20), torch.nan), None))
    with pytest.raises(comparison.RunError, match="The exported text graph differs from torch by nan"):
        comparison.compare(model, towers, tokenizer, head)


def test_when_the_head_is_exported(model: FusionDualEncoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert head_weights(model) == head_weights(model, "yes") == WEIGHTS
    assert head_weights(model, "no") == {}
    monkeypatch.setattr(model.config, "rerank_weights", {"match": 0.0, "caption": 0.4})
    assert head_weights(model) == {"caption": 0.4}
    for none in (None, {"match": 0.0}):
        monkeypatch.setattr(model.config, "rerank_weights", none)
        assert head_weights(model) == {}
        assert head_weights(model, "yes") == {"match": 1.0, "caption": 1.0}
    monkeypatch.setattr(FusionDualEncoderModel, "voices", [])
    with pytest.raises(ValueError, match="--reranker is yes; this model has no head that was trained"):
        head_weights(model, "yes")


@torch.no_grad()
@pytest.mark.parametrize("kind", ["clip", "siglip", "chinese_clip"])
def test_texts_without_a_mask(kind: str, tmp_path: Path) -> None:
    """The mask is read off the tokens, also where a text ends in the token that pads it, as CLIP's do."""
    name = write_stock(tmp_path, kind)
    model, tokenizer = load_model(name, fusion_layers=0).eval(), load_processor_of(name).tokenizer
    assert ends_in_pad(tokenizer) == (kind != "chinese_clip")
    given = tokenizer(TEXTS, padding="max_length", max_length=64, return_tensors="pt")
    tower = PaddedTextTower(model, tokenizer.pad_token_id, ends_in_pad(tokenizer), 40)
    found = tower(given["input_ids"].int())
    expected = model.encode_text(given["input_ids"], given["attention_mask"])[0]
    torch.testing.assert_close(found[:, : expected.shape[1]], expected, atol=1e-6, rtol=0)
    assert not found[:, expected.shape[1] :].any()
    assert found.shape[1] == 40


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_packages()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(
        ValueError, match=r"needs onnxscript, which is not installed. .* pip install onnx onnxruntime onnxscript"
    ):
        check_packages()
