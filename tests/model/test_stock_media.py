"""CLAP folders as starts: the stock class is the reference, before training and after it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoProcessor, ClapModel

from mm_utils.checkpointing.state import write_model
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model, load_model
from mm_utils.model.modeling_fusion_dual_encoder import input_shape
from mm_utils.model.processor import load_processor_of
from tests.kit.stock_folders import TEXTS, write_clap

Folder = Callable[[str], str]
RATE = 16000
KINDS = ("clap", "clap-fused")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("stock")
    return lambda kind: (
        str(root / kind) if (root / kind).is_dir() else write_clap(root / kind, fused=kind == "clap-fused")
    )


def sounds() -> list[np.ndarray]:
    """Noise of a third of CLAP's window, of most of it, and of all."""
    rng = np.random.default_rng(0)
    return [(3000 * rng.standard_normal(int(RATE * seconds))).astype(np.int16) for seconds in (0.3, 0.7, 1.0)]


def media() -> dict[str, Any]:
    """What `encode` takes."""
    return {"sounds": [(each / 32768, RATE) for each in sounds()]}


@torch.no_grad()
def stock_embeds(name: str) -> tuple[Tensor, Tensor]:
    """The unit embeddings of media and texts by the stock class, with the folder's own processor."""
    stock, processor = AutoModel.from_pretrained(name).eval(), AutoProcessor.from_pretrained(name)
    words = processor.tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    heard = [processor.feature_extractor(each / 32768, sampling_rate=RATE, return_tensors="pt") for each in sounds()]
    features = torch.cat([each["input_features"] for each in heard])
    found = stock.get_audio_features(features, is_longer=torch.zeros(len(features), 1, dtype=torch.bool))
    texts = stock.get_text_features(words.input_ids, words.attention_mask)
    return F.normalize(found.pooler_output, dim=-1), F.normalize(texts.pooler_output, dim=-1)


def close(found: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(found, right, strict=True):
        assert theirs.std(0).mean() > 0.01  # they differ
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_those_of_the_stock_class(folder: Folder, kind: str, tmp_path: Path) -> None:
    name = folder(kind)
    model, processor, right = load_model(name).eval(), load_processor_of(name), stock_embeds(name)
    model.processor = processor
    close(model.encode(**media(), texts=TEXTS), right)
    assert model.config.medium == "sound"
    assert model.logit_scale.item() == pytest.approx(2.5)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    for again in (load_model(str(tmp_path)), AutoModel.from_pretrained(tmp_path, trust_remote_code=True)):
        close(again.encode(**media(), texts=TEXTS), right)


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_model_is_written_with_its_stock_class(folder: Folder, kind: str, tmp_path: Path) -> None:
    name = folder(kind)
    processor: Any = load_processor_of(name)
    model = build_model(ModelArguments(model_name_or_path=name), processor.tokenizer, medium="sound")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    write_model(tmp_path, model, processor)
    again, stock = load_model(str(tmp_path)), tmp_path / "dual_encoder"
    trained = again.encode(**media(), texts=TEXTS)
    assert not torch.allclose(trained[0], stock_embeds(name)[0], atol=1e-4)
    assert stock.is_dir() == (kind == "clap")  # a fused extractor does more
    if kind == "clap":
        close(trained, stock_embeds(str(stock)))
        own = ClapModel.from_pretrained(stock)
        assert own.logit_scale_a.item() == own.logit_scale_t.item() == again.logit_scale.item()
        assert AutoConfig.from_pretrained(stock).logit_scale_init_value == pytest.approx(14.285, abs=0.01)
        processor = load_processor_of(str(stock))
        start = load_model(str(stock)).eval()
        start.processor = processor
        close((start.encode(texts=TEXTS),), trained[1:])


def test_a_tower_of_a_fused_clap_is_taken(folder: Folder) -> None:
    tokenizer = load_processor_of(folder("clap")).tokenizer
    model = build_model(ModelArguments(vision_model_name_or_path=folder("clap-fused")), tokenizer, medium="sound")
    start = load_model(folder("clap-fused"))
    pixels = torch.randn(2, *input_shape(model.vision_model))
    with torch.no_grad():
        found = model.eval().vision_features(pixels, with_taps=False)[0]
        torch.testing.assert_close(found, start.eval().vision_features(pixels, with_taps=False)[0])
