"""Small folders of the stock dual encoders, as their authors save them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoProcessor,
    BertTokenizer,
    ChineseCLIPProcessor,
    ClapFeatureExtractor,
    ClapProcessor,
    CLIPImageProcessor,
    CLIPProcessor,
    CLIPTokenizer,
    GemmaTokenizer,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
    SiglipProcessor,
)

from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import load_processor_of

KINDS = ("clip", "siglip", "chinese_clip")
SIDE = 32
PATCH = 8
TEXTS = ["red", "a red circle, number 3", "one square in yellow and green and blue and red", "a circle"]
TOWER = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789,:"


def clip_tokenizer() -> CLIPTokenizer:
    """CLIP's byte-pair tokenizer with single letters and a few merges; it pads with its end."""
    letters = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
    merged = [("r", "ed</w>"), ("e", "d</w>"), ("c", "i")]
    words = [*letters, "ed</w>", "red</w>", "ci", "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={word: place for place, word in enumerate(words)},
        merges=[merged[1], merged[0], merged[2]],
        model_max_length=77,
    )


def _letter_tokenizer(special: tuple[str, ...], text: str, **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of letters behind its special tokens; `text` is where those of a text stand."""
    letters = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate((*special, *LETTERS))}, unk_token="<unk>")
    )
    letters.normalizer = normalizers.Lowercase()
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    ends = [(word, special.index(word)) for word in special if word in text]
    letters.post_processor = processors.TemplateProcessing(single=text, special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>", unk_token="<unk>", **options)


def siglip_tokenizer(side: str = "right") -> PreTrainedTokenizerFast:
    """It ends texts in </s>, which also pads, and returns no mask, as SigLIP's does."""
    options = {"pad_token": "</s>", "model_max_length": 64, "padding_side": side, "model_input_names": ["input_ids"]}
    return _letter_tokenizer(("<unk>", "</s>"), "$A </s>", **options)


def gemma_tokenizer() -> GemmaTokenizer:
    """It ends texts in <eos>, and knows capitals, as that of a SigLIP 2 of one size does."""
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *LETTERS, *LETTERS.upper()]
    places = {word: place for place, word in enumerate(dict.fromkeys(words))}
    ends = {"add_bos_token": False, "add_eos_token": True, "padding_side": "right", "model_max_length": 64}
    return GemmaTokenizer(vocab=places, merges=[], **ends)


def chinese_tokenizer() -> BertTokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    return BertTokenizer(vocab={word: place for place, word in enumerate(words)}, model_max_length=512)


def write_stock(folder: Path, kind: str, **text: Any) -> str:
    """Write a random model of a kind with its processor; `text` are fields of its text config."""
    images = {"image_size": SIDE, "patch_size": PATCH, "num_channels": 3}
    if kind == "clip":
        tokenizer = clip_tokenizer()
        end = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id, "pad_token_id": 1}
        text = {**TOWER, **end, "max_position_embeddings": 77, **text}
        config = {"projection_dim": 24, "logit_scale_init_value": 3.0}
        made = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
        made = CLIPProcessor(made, tokenizer)
    elif kind == "chinese_clip":
        tokenizer = chinese_tokenizer()
        text = {**TOWER, "hidden_dropout_prob": 0.1, "max_position_embeddings": 128, **text}
        config = {"projection_dim": 24}
        made = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
        made = ChineseCLIPProcessor(made, tokenizer)
    else:
        tokenizer = gemma_tokenizer() if kind == "siglip2" else siglip_tokenizer()
        kind = "siglip"
        text = {**TOWER, "projection_size": 32, "max_position_embeddings": 64, "pad_token_id": 1, **text}
        config = {}
        made = SiglipProcessor(SiglipImageProcessor(size={"height": SIDE, "width": SIDE}), tokenizer)
    text["vocab_size"] = len(tokenizer)
    stock = AutoConfig.for_model(kind, text_config=text, vision_config={**TOWER, **images}, **config)
    scales = {"logit_scale": 2.0, **({"logit_bias": -3.5} if "siglip" in kind else {})}
    return _write(folder, stock, scales, made)


def write_clap(folder: Path, fused: bool = False, **audio: Any) -> str:
    """Write a random ClapModel with its processor, which takes a second of 16 kHz in loops."""
    special = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    options = {"bos_token": "<s>", "mask_token": "<mask>"}
    options |= {"pad_token": "<pad>", "model_max_length": 100}
    tokenizer = _letter_tokenizer(special, "<s> $A </s>", **options)
    audio = {
        "spec_size": 64, "num_mel_bins": 16, "patch_size": 4, "patch_stride": [4, 4], "window_size": 4, "depths": [1, 1],
        "num_attention_heads": [1, 2], "patch_embeds_hidden_size": 8, "hidden_size": 16, "enable_fusion": fused, **audio,
    }  # fmt: skip
    text = {**TOWER, "vocab_size": len(tokenizer), "max_position_embeddings": 102, "hidden_dropout_prob": 0.1}
    config = AutoConfig.for_model("clap", audio_config=audio, text_config=text, projection_dim=24)
    extractor = ClapFeatureExtractor(
        feature_size=16, sampling_rate=16000, hop_length=160, max_length_s=1, frequency_max=8000,
        truncation="fusion" if fused else "rand_trunc",
    )  # fmt: skip
    scales = {"logit_scale_a": 2.0, "logit_scale_t": 3.0}
    return _write(folder, config, scales, ClapProcessor(extractor, tokenizer))


def _write(folder: Path, config: Any, scales: dict[str, float], processor: Any) -> str:
    torch.manual_seed(0)
    model = AutoModel.from_config(config)
    with torch.no_grad():  # fresh weights are so small that all texts look alike
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, scale in scales.items():
            model.get_parameter(name).fill_(scale)
        for name, value in model.named_buffers():
            if name.endswith("running_mean"):
                value.fill_(-40.0)  # decibels
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def noise(count: int = 3) -> list[Image.Image]:
    pixels = np.random.default_rng(0).integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)
    return [Image.fromarray(each) for each in pixels]


def stock_logits(folder: Path | str, texts: list[str] = TEXTS) -> torch.Tensor:
    """`logits_per_image` of the stock class, with the folder's own processor, as its documentation says."""
    stock = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    unmasked = "siglip" in stock.config.model_type
    padding = {"padding": "max_length", "max_length": 64} if unmasked else {"padding": True}
    inputs = {
        **processor.tokenizer(texts, truncation=True, return_tensors="pt", **padding),
        **processor.image_processor(noise(), return_tensors="pt"),
    }
    assert ("attention_mask" in inputs) != unmasked
    with torch.no_grad():
        return stock(**inputs).logits_per_image


def our_logits(model: FusionDualEncoderModel, folder: Path | str, texts: list[str] = TEXTS) -> torch.Tensor:
    """The same by our model, with captions padded to the longest of the batch."""
    processor = load_processor_of(str(folder))
    inputs = processor(text=texts, images=noise(), padding=True, return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**inputs).logits_per_image


def close(found: torch.Tensor, right: torch.Tensor) -> None:
    assert right.std() > 0.05  # texts and images differ
    torch.testing.assert_close(found, right, rtol=0, atol=1e-5)
