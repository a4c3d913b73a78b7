"""Another text tower joins the image side of a whole model, which stays bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoProcessor, BertConfig, BertModel

from mm_utils.data.media.medium import read_by
from mm_utils.distributed import RunError
from mm_utils.model.adapt import multiply_patches, use_channels_last
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model, load_model
from mm_utils.model.dual_encoder import to_dual_encoder
from mm_utils.model.processor import load_processor, load_processor_of
from mm_utils.search.index import IndexInfo, check_same_model, model_fingerprint
from scripts import pretrain
from tests.kit.stock_folders import KINDS, chinese_tokenizer, noise, write_clap, write_stock


def write_bert(folder: Path) -> str:
    """Write a random BERT, 40 channels wide, with its tokenizer."""
    torch.manual_seed(1)
    tokenizer = chinese_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=40, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def words(tmp_path: Path) -> str:
    return write_bert(tmp_path / "words")


def pixels(folder: str) -> torch.Tensor:
    return load_processor_of(folder)(images=noise(), return_tensors="pt").pixel_values  # type: ignore[operator]


@pytest.mark.parametrize(("kind", "images"), [*((kind, 10_000) for kind in KINDS), ("clip", 0)])
def test_training_leaves_the_embeddings_of_images_bit_for_bit(
    kind: str, images: int, words: str, tiny_flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mm_utils.training.starts.IMAGES", images)
    start, out = write_stock(tmp_path / "start", kind), str(tmp_path / "out")
    towers = ["--model_name_or_path", start, "--text_model_name_or_path", words]
    rate = ["--learning_rate", "0.01", "--objectives", "contrastive,matching", "--max_steps", "2"]
    rate += ["--load_best_model_at_end", "false"]  # the start in closed form may be the best
    pretrain.main([*tiny_flags[:2], *tiny_flags[4:], *towers, *rate, "--output_dir", out])
    before, after = load_model(start).eval(), load_model(out).eval()
    assert after.config.text_config.model_type == "bert"
    assert load_processor_of(out).tokenizer.vocab_size == chinese_tokenizer().vocab_size  # type: ignore[attr-defined]
    with torch.no_grad():
        found, right = (model.encode_image(pixels(start), with_keys_values=False)[0] for model in (after, before))
        assert torch.equal(found, right)
        if kind != "siglip2":  # whose tower the stock class cannot feed
            stock = AutoModel.from_pretrained(f"{out}/dual_encoder").eval()
            image = stock.get_image_features(pixel_values=pixels(start)).pooler_output
            torch.testing.assert_close(torch.nn.functional.normalize(image, dim=-1), right, rtol=0, atol=1e-5)
            assert AutoProcessor.from_pretrained(f"{out}/dual_encoder")(text="red").input_ids
    learnt = AutoModel.from_pretrained(words).state_dict()["embeddings.word_embeddings.weight"]
    assert not torch.equal(after.text_model.state_dict()["embeddings.word_embeddings.weight"], learnt)


def test_an_index_of_the_whole_model_is_searched_with_the_new_text_tower(words: str, tmp_path: Path) -> None:
    start, other = write_stock(tmp_path / "start", "clip"), write_stock(tmp_path / "other", "clip", hidden_act="relu")
    args = ModelArguments(model_name_or_path=start, text_model_name_or_path=words)
    processor: Any = load_processor(args, [])
    model, medium = build_model(args, processor.tokenizer), read_by(processor)
    own = load_model(start, fusion_layers=0)
    info = IndexInfo(start, model_fingerprint(own, read_by(load_processor_of(start))), 24)
    check_same_model(info, model, medium, "new", tmp_path)
    changed = IndexInfo(other, model_fingerprint(model, medium), 24)
    with torch.no_grad():
        model.get_parameter("visual_projection.weight").mul_(1.01)
    for wrong in (info, changed):
        with pytest.raises(RunError, match="was made with other weights"):
            check_same_model(wrong, model, medium, "new", tmp_path)


@pytest.mark.parametrize("medium", ["sound", "clip"])
def test_sounds_and_clips_get_another_text_tower_too(medium: str, words: str, tmp_path: Path) -> None:
    name = write_clap(tmp_path / medium) if medium == "sound" else write_stock(tmp_path / medium, "clip")
    args = ModelArguments(model_name_or_path=name, text_model_name_or_path=words, fusion_layers=1)
    processor: Any = load_processor(args, [], medium)
    model = build_model(args, processor.tokenizer, medium=medium).eval()
    shape = (2, 1, 101, 16) if medium == "sound" else (2, 4, 3, 32, 32)
    media = torch.randn(shape)
    model.save_pretrained(tmp_path / "run")
    alone, trained = (load_model(name, medium=medium).eval() for _ in range(2))
    use_channels_last(trained.vision_model)
    multiply_patches(trained.vision_model)  # as in training, where sums have another order than by convolutions
    with torch.no_grad():
        for each, right in ((model, trained), (load_model(str(tmp_path / "run")).eval(), alone)):
            assert torch.equal(each.encode_image(media)[0], right.encode_image(media)[0])
            assert each.encode_text(*2 * [torch.ones(1, 3, dtype=torch.long)])[0].shape == (1, 24)
    if medium == "sound":
        with pytest.raises(ValueError, match="CLAP's own text tower, and this model another"):
            to_dual_encoder(model)
