"""open_clip's format, read as a start and written by export, against its published layout and against open_clip itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from mm_utils.model.build import check_model, load_model
from mm_utils.model.processor import load_processor_of
from scripts import export, pretrain
from tests.kit.stock_folders import TEXTS, clip_tokenizer, noise, our_logits, write_stock

pytestmark = pytest.mark.usefixtures("own_cache")


def layout(tokenizer: Any) -> dict[str, Any]:
    vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "mlp_ratio": 2.0}
    text = {"context_length": 77, "vocab_size": len(tokenizer), "width": 24, "heads": 2, "layers": 2}
    model = {"embed_dim": 20, "quick_gelu": True, "vision_cfg": vision, "text_cfg": text}
    return {"model_cfg": model, "preprocess_cfg": {"mean": [0.4] * 3, "std": [0.2] * 3}}


def layers(prefix: str, width: int, hidden: int, count: int) -> dict[str, tuple[int, ...]]:
    norms = {f"{norm}.{kind}": (width,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
    attention = {"in_proj_weight": (3 * width, width), "in_proj_bias": (3 * width,), "out_proj.weight": (width, width)}
    mlp = {
        "c_fc.weight": (hidden, width),
        "c_fc.bias": (hidden,),
        "c_proj.weight": (width, hidden),
        "c_proj.bias": (width,),
    }
    each = norms | {f"attn.{name}": shape for name, shape in attention.items()} | {"attn.out_proj.bias": (width,)}
    each |= {f"mlp.{name}": shape for name, shape in mlp.items()}
    return {f"{prefix}.{place}.{name}": shape for place in range(count) for name, shape in each.items()}


def random_weights(tokenizer: Any) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "visual.class_embedding": (32,), "visual.conv1.weight": (32, 3, 8, 8), "visual.positional_embedding": (17, 32),
        "visual.ln_pre.weight": (32,), "visual.ln_pre.bias": (32,), "visual.ln_post.weight": (32,),
        "visual.ln_post.bias": (32,), "visual.proj": (32, 20), "token_embedding.weight": (len(tokenizer), 24),
        "positional_embedding": (77, 24), "ln_final.weight": (24,), "ln_final.bias": (24,), "text_projection": (24, 20),
        "logit_scale": (), **layers("visual.transformer.resblocks", 32, 64, 2), **layers("transformer.resblocks", 24, 96, 2),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return {name: 0.3 * torch.randn(shape, generator=generator) + ("ln_" in name) for name, shape in shapes.items()}


NAMES = {"ln_1": "norm1", "ln_2": "norm2", "attn": "self_attn", "mlp.c_fc": "linear1", "mlp.c_proj": "linear2"}


def blocks(weights: dict[str, Tensor], prefix: str, heads: int, states: Tensor, mask: Tensor | None = None) -> Tensor:
    """Residual blocks as the layout says: torch's own, with normalisation first and quick GELU."""
    for place in range(2):
        own = {
            name.partition(f"{prefix}.{place}.")[2]: value
            for name, value in weights.items()
            if name.startswith(f"{prefix}.{place}.")
        }
        for theirs, ours in NAMES.items():
            own = {name.replace(theirs, ours): value for name, value in own.items()}
        hidden = own["linear1.bias"].numel()
        block = nn.TransformerEncoderLayer(
            states.shape[-1],
            heads,
            hidden,
            0.0,
            lambda x: x * torch.sigmoid(1.702 * x),
            batch_first=True,
            norm_first=True,
        )
        block.load_state_dict(own)
        states = block.eval()(states, src_mask=mask)
    return states


@torch.no_grad()
def plain(weights: dict[str, Tensor], pixels: Tensor, ids: Tensor) -> Tensor:
    """`logits_per_image` of the published layout, written out."""
    patches = F.conv2d(pixels, weights["visual.conv1.weight"], stride=8).flatten(2).transpose(1, 2)
    first = weights["visual.class_embedding"].expand(len(pixels), 1, -1)
    states = torch.cat([first, patches], 1) + weights["visual.positional_embedding"]
    states = F.layer_norm(states, (32,), weights["visual.ln_pre.weight"], weights["visual.ln_pre.bias"])
    states = blocks(weights, "visual.transformer.resblocks", 2, states)[:, 0]
    image = (
        F.layer_norm(states, (32,), weights["visual.ln_post.weight"], weights["visual.ln_post.bias"])
        @ weights["visual.proj"]
    )
    length = ids.shape[1]
    mask = torch.full((length, length), -torch.inf).triu(1)
    states = weights["token_embedding.weight"][ids] + weights["positional_embedding"][:length]
    states = blocks(weights, "transformer.resblocks", 2, states, mask)
    states = F.layer_norm(states, (24,), weights["ln_final.weight"], weights["ln_final.bias"])
    text = states[torch.arange(len(ids)), ids.argmax(1)] @ weights["text_projection"]
    return weights["logit_scale"].exp() * F.normalize(image, dim=1) @ F.normalize(text, dim=1).T


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place, tokenizer = tmp_path / "theirs", clip_tokenizer()
    place.mkdir()
    (place / "open_clip_config.json").write_text(json.dumps(layout(tokenizer)))
    save_file(random_weights(tokenizer), place / "open_clip_model.safetensors")
    tokenizer.save_pretrained(place)
    return place


def inputs(folder: Path) -> tuple[Tensor, Tensor]:
    read = load_processor_of(str(folder))(text=TEXTS, images=noise(), padding=True, return_tensors="pt")  # type: ignore[operator]
    return read.pixel_values, read.input_ids


def test_a_folder_is_read_as_its_layout_says_and_trained(folder: Path, tiny_flags: list[str], tmp_path: Path) -> None:
    right = plain(load_file(folder / "open_clip_model.safetensors"), *inputs(folder))
    torch.testing.assert_close(our_logits(load_model(str(folder)), folder), right, rtol=0, atol=1e-5)
    check_model(str(folder))
    run = [*tiny_flags[:2], *tiny_flags[4:], "--model_name_or_path", str(folder), "--objectives", "contrastive"]
    run += ["--max_steps", "1", "--fusion_layers", "0", "--rerank_top_k", "0"]
    pretrain.main([*run, "--output_dir", str(tmp_path / "out")])
    assert (tmp_path / "out/dual_encoder/config.json").is_file()


def test_export_writes_the_same_weights_again(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export.main(["--model_name_or_path", str(folder), "--output_dir", str(out), "--layout", "open_clip"])
    own, again = (load_file(each / "open_clip_model.safetensors") for each in (folder, out))
    assert own.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in own.items())
    written = json.loads((out / "open_clip_config.json").read_text())
    text = written["model_cfg"]["text_cfg"]
    assert {**text, **layout(clip_tokenizer())["model_cfg"]["text_cfg"]} == text
    torch.testing.assert_close(our_logits(load_model(str(out)), out), our_logits(load_model(str(folder)), folder))
    siglip = ["--model_name_or_path", write_stock(tmp_path / "siglip", "siglip"), "--output_dir", str(tmp_path / "no")]
    with pytest.raises(ValueError, match="it is written of a CLIP, and this is a siglip_vision_model"):
        export.main([*siglip, "--layout", "open_clip"])


def test_open_clip_itself_computes_the_same_both_ways(folder: Path, tmp_path: Path) -> None:
    open_clip = pytest.importorskip("open_clip")
    out = tmp_path / "out"
    start = write_stock(tmp_path / "clip", "clip")
    export.main(["--model_name_or_path", start, "--output_dir", str(out), "--layout", "open_clip"])
    for place in (folder, out):
        theirs = open_clip.create_model_from_pretrained(f"local-dir:{place}", return_transform=False).eval()
        pixels, ids = inputs(place)
        with torch.no_grad():
            image, text, scale = theirs(pixels, F.pad(ids, (0, 77 - ids.shape[1])))
        torch.testing.assert_close(
            our_logits(load_model(str(place)), place), scale * image @ text.T, rtol=0, atol=1e-5
        )
