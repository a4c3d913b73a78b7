"""Write a CLIP in open_clip's format: `open_clip_config.json`, a file of weights, and the tokenizer.

Its towers are CLIP's, with other names for the weights, and with query, key and value as one matrix.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import ProcessorMixin

from mm_utils.data.media.medium import image_geometry
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.stock import to_dual_encoder

_NAMES = {  # parts of names of a CLIPModel's weights, and what open_clip calls them
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.patch_embedding.": "visual.conv1.",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.pre_layrnorm.": "visual.ln_pre.",
    "vision_model.encoder.layers.": "visual.transformer.resblocks.",
    "vision_model.post_layernorm.": "visual.ln_post.",
    "visual_projection.weight": "visual.proj",
    "text_model.embeddings.token_embedding.": "token_embedding.",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.encoder.layers.": "transformer.resblocks.",
    "text_model.final_layer_norm.": "ln_final.",
    "text_projection.weight": "text_projection",
    ".layer_norm1.": ".ln_1.",
    ".layer_norm2.": ".ln_2.",
    ".self_attn.": ".attn.",
    ".fc1.": ".c_fc.",
    ".fc2.": ".c_proj.",
    ".q_proj.": ".in_proj_",
}
_TRANSPOSED = ("visual.proj", "text_projection")


def write_open_clip(folder: Path, model: FusionDualEncoderModel, processor: ProcessorMixin) -> None:
    """Write a model for `open_clip.create_model_from_pretrained("local-dir:...")`; ValueError if its towers are not CLIP's."""
    stock: Any = to_dual_encoder(model) if model.config.dual_encoder_type == "clip" else None
    vision: Any = model.config.vision_config
    text: Any = model.config.text_config
    if stock is None or vision.hidden_act != text.hidden_act or vision.hidden_act not in ("gelu", "quick_gelu"):
        raise ValueError(
            f"--layout is open_clip; it is written of a CLIP, and this is a {vision.model_type} with a {text.model_type}. Choose "
            "another layout."
        )
    size, mean, std = image_geometry(processor)
    most = min(model.most_tokens(processor.tokenizer), text.max_position_embeddings)  # type: ignore[attr-defined]
    eos = text.eos_token_id
    # 2 stands in old configurations for the token of the highest number
    by_highest = eos in (2, text.vocab_size - 1)
    config = {
        "embed_dim": model.config.projection_dim,
        "quick_gelu": vision.hidden_act == "quick_gelu",
        "vision_cfg": {
            "image_size": size,
            "layers": vision.num_hidden_layers,
            "width": vision.hidden_size,
            "head_width": vision.hidden_size // vision.num_attention_heads,
            "mlp_ratio": vision.intermediate_size / vision.hidden_size,
            "patch_size": vision.patch_size,
        },
        "text_cfg": {
            "context_length": most,
            "vocab_size": text.vocab_size,
            "width": text.hidden_size,
            "heads": text.num_attention_heads,
            "layers": text.num_hidden_layers,
            "mlp_ratio": text.intermediate_size / text.hidden_size,
            **({} if by_highest else {"pool_type": "eos", "eos_id": eos}),
            **({} if text.vocab_size == 49408 else {"hf_tokenizer_name": "."}),  # CLIP's own is in open_clip
        },
    }
    seen = {"mean": mean, "std": std, "interpolation": "bicubic", "resize_mode": "shortest"}
    content = json.dumps({"model_cfg": config, "preprocess_cfg": seen}, indent=2)
    (folder / "open_clip_config.json").write_text(content + "\n", encoding="utf-8")
    own = stock.state_dict()
    weights = dict[str, Tensor]()
    for name, value in own.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:  # one matrix with keys and values
            # [3 C, C], or [3 C] of a bias
            value = torch.cat([own[name.replace(".q_proj.", f".{side}_proj.")] for side in "qkv"])
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        weights[name] = (value.T if name in _TRANSPOSED else value).contiguous()
    weights["positional_embedding"] = weights["positional_embedding"][:most].contiguous()
    # not `save_file`, whose file its owner alone may read
    (folder / "open_clip_model.safetensors").write_bytes(save(weights))
    processor.tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
