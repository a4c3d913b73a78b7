"""Tiny models of every family of backbones."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    ViTImageProcessor,
)

from mm_utils.model.arguments import ModelArguments
from mm_utils.model.build import build_model
from mm_utils.model.join import join_backbones
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import load_processor


def save_model(folder: Path, medium: str) -> Path:
    """Write a model of fresh weights, whose head counts."""
    args = ModelArguments(fusion_layers=1, image_size=32)
    seconds = 1.0 if medium == "sound" else None
    processor = load_processor(args, ["a low tone", "something turns red"] * 10, medium, seconds)
    torch.manual_seed(0)
    model = build_model(args, processor.tokenizer, medium=medium)
    model.config.rerank_weights = {"match": 1.0}
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def write_towers(
    folder: Path, kind: str, classes: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> dict[str, str]:
    """Write a vision backbone that knows named classes, and a text backbone; return their folders, by flag."""
    torch.manual_seed(0)
    config = copy.deepcopy(VISION[kind])
    config.id2label = dict(enumerate(classes))
    AutoModelForImageClassification.from_config(config).save_pretrained(folder / "vision")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / "vision")
    AutoModel.from_config(AutoConfig.for_model("bert", **TOWER, vocab_size=len(tokenizer))).save_pretrained(
        folder / "text"
    )
    tokenizer.save_pretrained(folder / "text")
    return {f"{name}_model_name_or_path": str(folder / name) for name in ("vision", "text")}


VOCABULARY = 50
END = VOCABULARY - 1
TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
IMAGE = {"image_size": 32, "patch_size": 8}
BERT = {**TOWER, "vocab_size": VOCABULARY}


VISION = {
    name: AutoConfig.for_model(kind, **values)
    for name, kind, values in (
        ("vit", "vit", TOWER | IMAGE),
        ("dinov2", "dinov2", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, **IMAGE}),
        ("resnet", "resnet", {"embedding_size": 16, "hidden_sizes": [16, 24, 32, 40], "depths": [1] * 4,
                              "layer_type": "basic", "image_size": 32}),
        ("convnext", "convnext", {"hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4, "image_size": 32,
                                  "layer_scale_init_value": 1.0}),
        ("siglip", "siglip_vision_model", TOWER | IMAGE),
        ("mobilenet", "mobilenet_v2", {"depth_multiplier": 0.25, "image_size": 32}),
        ("swin", "swin", {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "image_size": 32, "window_size": 4,
                          "patch_size": 4}),
        ("clip", "clip_vision_model", TOWER | IMAGE),
    )
}  # fmt: skip
TEXT = {
    name: AutoConfig.for_model(kind, **values)
    for name, kind, values in (
        ("bert", "bert", BERT),
        ("distilbert", "distilbert", {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": VOCABULARY}),
        ("roberta", "roberta", BERT),
        ("modernbert", "modernbert", {**BERT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
                                      "sep_token_id": 2}),
        ("xlm-roberta", "xlm-roberta", BERT),
        ("electra", "electra", {**BERT, "embedding_size": 16}),
        ("deberta", "deberta-v2", {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                                   "position_buckets": 8, "position_biased_input": False}),
        ("clip", "clip_text_model", {**BERT, "max_position_embeddings": 16, "bos_token_id": END - 1, "eos_token_id": END,
                                     "pad_token_id": 1}),
    )
}  # fmt: skip
# SigLIP's text tower is not an AutoModel: see test_build.py
Batch = dict[str, Tensor]


def backbone(config: PreTrainedConfig) -> torch.nn.Module:
    """Weights larger than an initialisation's, so that attention is far from uniform and a lost mask shows."""
    model = AutoModel.from_config(copy.deepcopy(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "relative" not in name:
                parameter.normal_(std=0.15)
            elif parameter.dim() == 4:
                torch.nn.init.kaiming_normal_(parameter)
    return model


def build(vision: str = "vit", text: str = "bert", seed: int = 0, **config) -> FusionDualEncoderModel:
    """A tiny model in evaluation mode, its batch norms calibrated, its match logits no longer 0."""
    torch.manual_seed(seed)
    towers = backbone(VISION[vision]), backbone(TEXT[text])
    model = join_backbones(*towers, **{"projection_dim": 16, **config})
    if model.fusion is not None:
        torch.nn.init.xavier_uniform_(model.fusion.match.weight)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        with torch.no_grad():
            model.vision_model.train()(batch_for(model)["pixel_values"])
    for norm in norms:
        norm.momentum = 0.1
    return model.eval()


def batch_for(model: FusionDualEncoderModel, lengths: tuple[int, ...] = (7, 3, 5, 9)) -> Batch:
    """Texts of several lengths, padded; each ends in the token that CLIP pools."""
    generator = torch.Generator().manual_seed(1)
    rows = len(lengths)
    longest = max(lengths)
    position = torch.arange(longest).expand(rows, -1)
    length = torch.tensor(lengths)[:, None]
    ids = torch.randint(3, END - 1, (rows, longest), generator=generator)
    ids[position == length - 1] = END
    ids[position >= length] = model.text_model.config.pad_token_id
    pixels = torch.randn(rows, 3, 32, 32, generator=generator).to(model.dtype)
    return {"input_ids": ids, "pixel_values": pixels, "attention_mask": (position < length).long()}


EMBEDS = ("image_embeds", "text_embeds")


@torch.no_grad()
def outputs(
    model: torch.nn.Module, batch: Batch, names: tuple[str, ...] = (*EMBEDS, "match_logits")
) -> dict[str, Tensor]:
    """What a model returns of a batch, by name."""
    output = model(**batch)
    return {name: output[name] for name in names}


LAYERS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
WAVES = {**LAYERS, "conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}  # fmt: skip
TOWERS = {
    "videomae": {**LAYERS, "image_size": 16, "patch_size": 8, "num_frames": 8, "tubelet_size": 2},
    "timesformer": {**LAYERS, "image_size": 16, "patch_size": 8, "num_frames": 8},
    "vivit": {**LAYERS, "image_size": 16, "num_frames": 8, "tubelet_size": [2, 8, 8]},
    "vjepa2": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2, "crop_size": 16,
               "patch_size": 8, "frames_per_clip": 8, "tubelet_size": 2, "pred_hidden_size": 12,
               "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1},
    "audio-spectrogram-transformer": {**LAYERS, "max_length": 96, "num_mel_bins": 32, "patch_size": 16,
                                      "frequency_stride": 10, "time_stride": 10},
    "wav2vec2": WAVES,
    "hubert": WAVES,
    "whisper": {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
                "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 16,
                "max_source_positions": 50, "vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
                "decoder_start_token_id": 1},
    "clap_audio_model": {"spec_size": 32, "num_mel_bins": 8, "patch_size": 4, "patch_stride": [4, 4], "window_size": 4,
                         "patch_embeds_hidden_size": 8, "hidden_size": 16, "depths": [1, 1], "num_attention_heads": [1, 2]},
    "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 4, "layer_scale_init_value": 1.0,
                 "num_channels": 1, "image_size": [128, 16]},
    "vit": {**LAYERS, "image_size": 16, "patch_size": 8},
}  # fmt: skip
