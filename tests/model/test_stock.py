"""CLIP, SigLIP, Siglip2 and Chinese CLIP folders as starts: the stock class is the reference, before and after."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoProcessor

from mm_utils.data.batches.tokens import encode_captions, pad_captions
from mm_utils.data.media.medium import image_geometry
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model, load_model
from mm_utils.model.dual_encoder import to_dual_encoder
from mm_utils.model.encoding import encode_in_groups
from mm_utils.model.modeling_fusion_dual_encoder import _pad_unmasked
from mm_utils.model.processor import load_processor_of
from mm_utils.model.stock import stock_processor
from mm_utils.objectives.build import ObjectiveArguments, build_objective
from tests.kit.stock_folders import KINDS, TEXTS, close, noise, our_logits, siglip_tokenizer, stock_logits, write_stock

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("stock")
    return lambda kind: root / kind if (root / kind).is_dir() else Path(write_stock(root / kind, kind))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("length", [5, 9])
def test_padding_that_is_read_like_words(side: str, length: int) -> None:
    """Against lists: the tokens of a text, wherever they stand, together at one side, and the rest padding."""
    ids = torch.arange(1, 36).view(5, 7) + 100
    masks = ["1111111", "1110000", "0001111", "0101001", "0000000"]
    mask = torch.tensor([[int(bit) for bit in mask] for mask in masks])
    padded, columns = _pad_unmasked(ids, mask, length, side, 9)
    assert padded.shape == (5, max(length, 7))
    for row, found, column, bits in zip(ids.tolist(), padded.tolist(), columns, mask.tolist(), strict=True):
        kept = [token for token, bit in zip(row, bits, strict=True) if bit]
        rest = [9] * (max(length, 7) - len(kept))
        assert found == (rest + kept if side == "left" else kept + rest)
        assert [found[place] for place, bit in zip(column, bits, strict=True) if bit] == kept
        assert len(set(column.tolist())) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_stock_class_whatever_the_padding(folder, kind):
    model, right = load_model(str(folder(kind)), fusion_layers=1), stock_logits(folder(kind))
    close(our_logits(model, folder(kind)), right)
    for place, text in enumerate(TEXTS):  # alone, without padding
        close(our_logits(model, folder(kind), [text]), right[:, place : place + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_captions_in_groups_of_a_length_give_the_embeddings_of_the_stock_class(folder, kind):
    """The path of training: token ids, padded to the longest caption of a group."""
    model, tokenizer = load_model(str(folder(kind))).eval(), load_processor_of(str(folder(kind))).tokenizer
    texts = sorted(TEXTS * 5, key=len, reverse=True)
    captions = encode_captions(tokenizer, texts, 64)
    ids, mask = pad_captions(captions, tokenizer.pad_token_id)
    with torch.no_grad():
        image = model.encode_image(
            load_processor_of(str(folder(kind)))(images=noise(), return_tensors="pt").pixel_values
        )
        text, states = encode_in_groups(model, ids, mask, [len(caption) for caption in captions])
        scored = model.match_pairs(
            [each[:, :1].expand(-1, len(ids), *each.shape[2:]) for each in image[1]], states, mask
        )
        alone = model.encode_text(ids[-1:, : len(captions[-1])], mask[-1:, : len(captions[-1])])[1]
    logits = model.logit_scale.exp() * image[0] @ text.T + (0 if model.logit_bias is None else model.logit_bias)
    close(logits.detach(), stock_logits(folder(kind), texts))
    assert scored.isfinite().all()
    torch.testing.assert_close(states[-1:, : alone.shape[1]], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_is_saved_loaded_and_written_as_its_own_class(folder, kind, tmp_path):
    model = build_model(ModelArguments(model_name_or_path=str(folder(kind)), fusion_layers=1), None).eval()
    with torch.no_grad():  # as if trained
        for parameter in model.parameters():
            parameter.mul_(1.01)
    processor = load_processor_of(str(folder(kind)))
    model.save_pretrained(tmp_path / "run")
    processor.save_pretrained(tmp_path / "run")
    again = load_model(str(tmp_path / "run"))
    right = our_logits(model, folder(kind))
    close(our_logits(again, tmp_path / "run"), right)
    stock = to_dual_encoder(again)
    stock.save_pretrained(tmp_path / "stock")
    stock_processor(processor, stock.config).save_pretrained(tmp_path / "stock")
    written, before = (AutoConfig.from_pretrained(path) for path in (tmp_path / "stock", folder(kind)))
    assert written.architectures == before.architectures
    assert (
        load_file(tmp_path / "stock/model.safetensors").keys() == load_file(folder(kind) / "model.safetensors").keys()
    )
    close(stock_logits(tmp_path / "stock"), right)
    classes = {type(AutoProcessor.from_pretrained(path)) for path in (tmp_path / "stock", folder(kind))}
    assert len(classes) == 1
    close(our_logits(load_model(str(tmp_path / "stock")), tmp_path / "stock"), right)  # a start again


@pytest.mark.parametrize("kind", KINDS)
def test_weights_temperature_bias_and_image_values_are_taken(folder, kind):
    name = str(folder(kind))
    model = build_model(ModelArguments(model_name_or_path=name, fusion_layers=1), None)
    assert model.logit_scale.item() == pytest.approx(2.0)
    assert (model.logit_bias is None) == ("siglip" not in kind)
    assert model.logit_bias is None or model.logit_bias.item() == -3.5
    assert model.config.fusion_layers == 1
    assert build_model(ModelArguments(model_name_or_path=name, fusion_layers=0), None).fusion is None
    side, mean, _ = image_geometry(load_processor_of(name))
    assert side == 32
    assert mean == pytest.approx([0.5] * 3 if "siglip" in kind else [0.48145466, 0.4578275, 0.40821073])


def test_sigmoid_keeps_a_trained_bias_and_temperature(folder):
    model = build_model(ModelArguments(model_name_or_path=str(folder("siglip"))), None)
    build_objective(model, ObjectiveArguments("sigmoid"), 0)
    assert (model.logit_scale.item(), model.logit_bias.item()) == (pytest.approx(2.0), -3.5)
    model.logit_scale.data.fill_(4.77)  # that of published checkpoints, above the usual bound
    objective = build_objective(model, ObjectiveArguments("contrastive"), 0)
    assert objective.highest_scale == pytest.approx(math.exp(4.77))
    assert to_dual_encoder(model).logit_bias.item() == 0


@pytest.mark.parametrize("side", ["left", "right"])
def test_siglip_reads_padding_on_the_side_of_its_tokenizer(folder, tmp_path, side):
    AutoModel.from_pretrained(folder("siglip")).save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(folder("siglip")).save_pretrained(tmp_path)
    siglip_tokenizer(side).save_pretrained(tmp_path)
    close(our_logits(load_model(str(tmp_path)), tmp_path), stock_logits(tmp_path))
    assert torch.allclose(stock_logits(folder("siglip")), stock_logits(tmp_path)) == (side == "right")
