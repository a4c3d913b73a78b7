"""A CLIP is written in open_clip's format, against its published layout and against open_clip itself."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from mm_utils.model.processor import load_processor_of
from scripts import export
from tests.kit.stock_folders import TEXTS, noise, stock_logits, write_stock

NAMES = {"ln_1": "norm1", "ln_2": "norm2", "attn": "self_attn", "mlp.c_fc": "linear1", "mlp.c_proj": "linear2"}
Weights = dict[str, Tensor]


def blocks(weights: Weights, prefix: str, states: Tensor, mask: Tensor | None = None) -> Tensor:
    """Residual blocks as the layout says: torch's own, with normalisation first and quick GELU."""
    for place in range(3):
        start = f"{prefix}.{place}."
        own = {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}
        for theirs, ours in NAMES.items():
            own = {name.replace(theirs, ours): value for name, value in own.items()}
        gelu = {"activation": lambda x: x * torch.sigmoid(1.702 * x)}
        block = nn.TransformerEncoderLayer(32, 2, 64, 0.0, **gelu, batch_first=True, norm_first=True)
        block.load_state_dict(own)
        states = block.eval()(states, src_mask=mask)
    return states


@torch.no_grad()
def plain(weights: Weights, pixels: Tensor, ids: Tensor) -> Tensor:
    """`logits_per_image` of the published layout, written out."""

    def normalised(states: Tensor, name: str) -> Tensor:
        return F.layer_norm(states, (32,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    patches = F.conv2d(pixels, weights["visual.conv1.weight"], stride=8).flatten(2).transpose(1, 2)
    first = weights["visual.class_embedding"].expand(len(pixels), 1, -1)
    states = normalised(torch.cat([first, patches], 1) + weights["visual.positional_embedding"], "visual.ln_pre")
    states = blocks(weights, "visual.transformer.resblocks", states)[:, 0]
    image = normalised(states, "visual.ln_post") @ weights["visual.proj"]
    length = ids.shape[1]
    states = weights["token_embedding.weight"][ids] + weights["positional_embedding"][:length]
    states = blocks(weights, "transformer.resblocks", states, torch.full((length, length), -torch.inf).triu(1))
    text = normalised(states, "ln_final")[torch.arange(len(ids)), ids.argmax(1)] @ weights["text_projection"]
    return weights["logit_scale"].exp() * F.normalize(image, dim=1) @ F.normalize(text, dim=1).T


def test_export_writes_what_open_clip_reads(tmp_path: Path) -> None:
    start, out = write_stock(tmp_path / "clip", "clip"), tmp_path / "out"
    export.main(["--model_name_or_path", start, "--output_dir", str(out), "--layout", "open_clip"])
    read: Any = load_processor_of(start)
    read = read(text=TEXTS, images=noise(), padding=True, return_tensors="pt")
    right = stock_logits(start)
    weights = load_file(out / "open_clip_model.safetensors")
    torch.testing.assert_close(plain(weights, read.pixel_values, read.input_ids), right, rtol=0, atol=1e-5)
    config = json.loads((out / "open_clip_config.json").read_text())
    assert config["preprocess_cfg"]["resize_mode"] == "shortest"
    if find_spec("open_clip"):
        import open_clip

        theirs = open_clip.create_model_from_pretrained(f"local-dir:{out}", return_transform=False).eval()
        with torch.no_grad():
            image, text, scale = theirs(read.pixel_values, F.pad(read.input_ids, (0, 77 - read.input_ids.shape[1])))
        torch.testing.assert_close(scale * image @ text.T, right, rtol=0, atol=1e-5)
    siglip = ["--model_name_or_path", write_stock(tmp_path / "siglip", "siglip"), "--output_dir", str(tmp_path / "no")]
    with pytest.raises(ValueError, match="it is written of a CLIP, and this is a siglip_vision_model"):
        export.main([*siglip, "--layout", "open_clip"])
