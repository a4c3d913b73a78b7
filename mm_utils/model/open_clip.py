"""Models in open_clip's format, read and written: `open_clip_config.json` and a file of weights.

Read are models of open_clip's own two towers, a vision transformer and a causal text transformer, which are those of CLIP; each
weight has another name, and query, key and value are one matrix. A folder is converted once into that of a `CLIPModel`, in the
datasets cache. Towers of timm, and text towers of transformers with their two-layer projection, are refused by name.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, ProcessorMixin

from mm_utils.data.media.medium import image_geometry
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.pretrained import explained
from mm_utils.model.stock import to_dual_encoder
from mm_utils.stored import key_of, stamp, stored

CONFIG = "open_clip_config.json"
WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors", "model.safetensors")
_NAMES = {  # how names of weights begin, and the same of a CLIPModel
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.": "vision_model.embeddings.patch_embedding.",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "visual.proj": "visual_projection.weight",
    "token_embedding.": "text_model.embeddings.token_embedding.",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "transformer.resblocks.": "text_model.encoder.layers.",
    "ln_final.": "text_model.final_layer_norm.",
    "text_projection": "text_projection.weight",
}
_PARTS = {
    ".ln_1.": ".layer_norm1.",
    ".ln_2.": ".layer_norm2.",
    ".attn.": ".self_attn.",
    ".c_fc.": ".fc1.",
    ".c_proj.": ".fc2.",
}
_TRANSPOSED = ("visual.proj", "text_projection")
_READ = {  # the fields that a CLIP has, too, and those that change nothing here
    *(
        "layers",
        "width",
        "head_width",
        "heads",
        "mlp_ratio",
        "patch_size",
        "image_size",
        "context_length",
        "vocab_size",
    ),
    *("pool_type", "eos_id", "pad_id", "patch_dropout", "output_tokens", "hf_tokenizer_name", "tokenizer_kwargs"),
    *("tokenizer_mode", "timm_model_pretrained"),
}
_DEFAULTS = {"proj_type": "linear", "pos_embed_type": "learnable", "block_type": "default"}


def opened(name: str) -> str:
    """Return the folder of a model in the format of transformers; one of open_clip's is converted once.

    Raises:
        ValueError: if it has other towers than a CLIP, no safetensors, or no tokenizer.
    """
    folder = Path(name)
    if not (folder / CONFIG).is_file() or (folder / "config.json").is_file():
        return name
    weights = next((folder / each for each in WEIGHTS if (folder / each).is_file()), None)
    if weights is None:
        raise ValueError(
            f"{name} is in open_clip's format, without {WEIGHTS[0]}; pickles, which can run any code, are not read. Write one "
            "with open_clip's push_to_hf_hub, where nothing can be lost."
        )
    with explained(f"{name} is in open_clip's format", name):
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in (".json", ".txt", ".model"))
    key = key_of("open_clip", content, stamp(weights), weights.resolve(), [(path.name, stamp(path)) for path in files])
    return str(stored("open_clip", key, partial(_convert, folder=folder, content=content, file=weights)))


def _convert(place: Path, folder: Path, content: dict[str, Any], file: Path) -> None:
    config: Any = _config(str(folder), content["model_cfg"])
    with explained(f"{folder} is in open_clip's format; its tokenizer is missing or damaged", str(folder)):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizer.model_max_length = config.text_config.max_position_embeddings
    with explained(f"{folder} is in open_clip's format", str(folder)):
        model = CLIPModel(config)
        model.load_state_dict(_to_clip(load_file(file)))
    model.save_pretrained(place)
    seen, side = content.get("preprocess_cfg", {}), config.vision_config.image_size
    own: Any = {f"image_{each}": seen[each] for each in ("mean", "std") if each in seen}
    images = CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side}, **own)
    CLIPProcessor(images, tokenizer).save_pretrained(place)


def _config(name: str, given: dict[str, Any]) -> CLIPConfig:
    """Return CLIP's configuration; ValueError if the towers are others."""
    vision, text = given["vision_cfg"], given["text_cfg"]
    for part, values in (("vision_cfg", vision), ("text_cfg", text)):
        for field, value in values.items():
            usual = value in (None, False, _DEFAULTS.get(field)) or field in _READ
            if not usual or (field == "layers" and not isinstance(value, int)):
                raise ValueError(
                    f"{name} is in open_clip's format, and its {part} has {field} {value}; read are its own vision and text "
                    "transformers. Look for the same model in transformers' format."
                )
    if text.get("pool_type", "argmax") not in ("argmax", "eos") or vision.get("pool_type", "tok") != "tok":
        raise ValueError(f"{name} is in open_clip's format, and pools otherwise than CLIP. Look for another model.")
    act = "quick_gelu" if given.get("quick_gelu") else "gelu"
    wide, narrow = vision.get("width", 768), text.get("width", 512)
    return CLIPConfig(
        projection_dim=given["embed_dim"],
        vision_config={
            **{"hidden_size": wide, "num_hidden_layers": vision.get("layers", 12), "hidden_act": act},
            "num_attention_heads": wide // vision.get("head_width", 64),
            "intermediate_size": int(wide * vision.get("mlp_ratio", 4.0)),
            "image_size": vision.get("image_size", 224),
            "patch_size": vision.get("patch_size", 16),
        },
        text_config={
            **{"hidden_size": narrow, "num_hidden_layers": text.get("layers", 12), "hidden_act": act},
            "num_attention_heads": text.get("heads", 8),
            "intermediate_size": int(narrow * text.get("mlp_ratio", 4.0)),
            "max_position_embeddings": text.get("context_length", 77),
            "vocab_size": text.get("vocab_size", 49408),
            # By 2, of configurations of 2021, a text is pooled at its highest token, as open_clip does.
            "eos_token_id": text.get("eos_id", 2) if text.get("pool_type") == "eos" else 2,
        },
    )


def _renamed(name: str, to_clip: bool) -> str:
    """Return a weight's name in a CLIPModel, or the other way."""
    starts, parts = ([pair if to_clip else pair[::-1] for pair in table.items()] for table in (_NAMES, _PARTS))
    start, other = next((pair for pair in starts if name.startswith(pair[0])), ("", ""))
    name = other + name.removeprefix(start)
    for one, replacement in parts:
        name = name.replace(one, replacement)
    return name


def _to_clip(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return open_clip's weights under CLIP's names."""
    found = dict[str, Tensor]()
    for name, value in weights.items():
        name = name.removeprefix("text.")  # of its class with a text tower apart
        if name in ("attn_mask", "logit_bias"):
            continue
        value = value.squeeze() if name == "logit_scale" else value.T if name in _TRANSPOSED else value
        ours = _renamed(name, True)
        sides = [ours.replace("in_proj_", f"{side}_proj.") for side in "qkv"] if "in_proj_" in ours else [ours]
        parts = value.chunk(3) if len(sides) == 3 else [value]
        found |= {side: part.contiguous() for side, part in zip(sides, parts, strict=True)}
    return found


def write_open_clip(folder: Path, model: FusionDualEncoderModel, processor: ProcessorMixin) -> None:
    """Write a model for `open_clip.create_model_from_pretrained("local-dir:...")`; ValueError if its towers are not CLIP's."""
    stock: Any = to_dual_encoder(model) if model.config.dual_encoder_type == "clip" else None
    vision, text = (getattr(model.config, f"{side}_config") for side in ("vision", "text"))
    if stock is None or vision.hidden_act != text.hidden_act or vision.hidden_act not in ("gelu", "quick_gelu"):
        raise ValueError(
            f"--layout is open_clip; it is written of a CLIP, and this is a {vision.model_type} with a {text.model_type}. Choose "
            "another layout."
        )
    size, mean, std = image_geometry(processor)
    eos = text.eos_token_id
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
            "context_length": text.max_position_embeddings,
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
    (folder / CONFIG).write_text(content + "\n", encoding="utf-8")
    own, weights = stock.state_dict(), dict[str, Tensor]()
    for name, value in own.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            value = torch.cat([own[name.replace(".q_proj.", f".{side}_proj.")] for side in "qkv"])
        theirs = _renamed(name.replace(".q_proj.", ".in_proj_"), False)
        weights[theirs] = (value.T if theirs in _TRANSPOSED else value).contiguous()
    save_file(weights, folder / WEIGHTS[0])
    processor.tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]
