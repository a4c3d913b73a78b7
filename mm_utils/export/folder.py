"""Write an export's folder: graphs, settings that each reader looks for, the file without torch, a README.

plain            vision_model.onnx and text_model.onnx in onnx/, preprocessor_config.json, tokenizer.json, tokenizer_config.json, and
                 a config.json by which the CLIP classes of transformers.js load them
immich           visual/model.onnx, textual/model.onnx and the settings of an open_clip model, as the machine-learning service
                 of Immich reads them. It knows models by name and their embeddings by width, so that embeddings get zeros up
                 to the next width that it knows, which changes no cosine, and the folder has to get that model's name.
open_clip        open_clip_config.json, open_clip_model.safetensors and the tokenizer, without graphs
"""

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import ProcessorMixin

from mm_utils.data.media.medium import image_geometry
from mm_utils.distributed import RunError
from mm_utils.export.graphs import MOST_DIFFERENCE, OPSET, differences, graphs_of, trace, write_int8
from mm_utils.files import writable_folder, write_json
from mm_utils.model import reading
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.pretrained import cut_texts_at
from mm_utils.text import markdown_table, markdown_text, publishable

IMMICH_NAMES = {
    512: "ViT-B-32__openai",
    640: "RN50x4__openai",
    768: "ViT-L-14__openai",
    1024: "RN50__openai",
    1152: "ViT-SO400M-14-SigLIP-384__webli",
}
_IMMICH_LENGTH = 77  # tokens that Immich pads every text to, as open_clip does
USAGE = {
    "plain": """```bash
python without_torch.py "a red door" photos/*.jpg
```

ranks images with numpy, onnxruntime, tokenizers and Pillow alone. The CLIP classes of transformers.js load this folder with `dtype` DTYPE and texts padded by PADDING: docs/export.md of the project has the lines.""",
    "immich": """Put this folder into the model cache of Immich's machine-learning service under the name of a model that it knows, with
embeddings of WIDTH numbers: `docker cp . immich_machine_learning:/cache/clip/NAME`. Then choose `NAME` under Machine Learning, Smart Search, and
run the job Smart Search for all images.""",
}


def check_output(output_dir: str) -> None:
    """Raise ValueError if there is something at the place of the export, or nothing can be written there."""
    folder = Path(output_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--output_dir is {output_dir}; it is not empty. Give a new folder, or remove this one.")
    writable_folder(str(folder.parent), "--output_dir")


def immich_width(width: int) -> int:
    """Return the width that embeddings get for Immich; ValueError if it knows none that is large enough."""
    if width > max(IMMICH_NAMES):
        raise ValueError(
            f"--layout is immich; it stores at most {max(IMMICH_NAMES)} numbers, and embeddings here have {width}."
        )
    return min(known for known in IMMICH_NAMES if known >= width)  # 256 -> 512


def ends_in_pad(tokenizer: Any) -> bool:
    """Return whether every text ends in the token that fills texts, as CLIP's do."""
    return tokenizer("a")["input_ids"][-1] == tokenizer.pad_token_id


def export(
    folder: Path,
    name: str,
    model: FusionDualEncoderModel,
    processor: ProcessorMixin,
    layout: str,
    precision: str,
    shape: Sequence[int] | None = None,
) -> dict[str, float]:
    """Write graphs, settings, the file without torch and a README; return the differences from torch by part.

    Args:
        folder: an empty one.
        name: of the model.
        model: in evaluation mode, on the CPU.
        processor: of the model.
        layout, precision: as scripts/export.py takes them.
        shape: of a clip or a sound, see `graphs_of`.

    Raises:
        RunError: if torch cannot export a part, or fp32 differs from torch by more than `MOST_DIFFERENCE`.
    """
    tokenizer = processor.tokenizer
    immich = None
    if layout == "immich":
        immich = tokenizer.pad_token_id, ends_in_pad(tokenizer), immich_width(model.config.projection_dim)
    graphs = graphs_of(model, shape, immich)
    paths = {part: folder / "onnx" / f"{part}.onnx" for part in graphs}
    if layout == "immich":
        paths = {part: folder / name / "model.onnx" for part, name in zip(graphs, ("visual", "textual"), strict=True)}
    for part, graph in tqdm(graphs.items(), desc="Tracing", unit=" graphs"):
        paths[part].parent.mkdir(exist_ok=True)
        trace(graph, paths[part])
    apart = differences(graphs, paths)
    for part, difference in apart.items():
        if not difference <= MOST_DIFFERENCE:  # so that NaN is refused, too
            raise RunError(
                f"The exported {part} differs from torch by {difference:.1e}; at most {MOST_DIFFERENCE:.0e} is right. Nothing "
                "was written. Try other versions of torch and onnxruntime."
            )
    if precision == "int8":
        suffix = "" if immich else "_quantized"  # as transformers.js expects it
        paths = {part: write_int8(path, f"{path.stem}{suffix}") for part, path in paths.items()}
        apart = differences(graphs, paths)
    write_settings(folder, layout, model, processor)
    kind = model.config.medium
    width = model.config.projection_dim
    bias = None if model.logit_bias is None else model.logit_bias.item()
    stated = {"model": publishable(name), "layout": layout, "precision": precision, "opset": OPSET}
    stated |= {
        "projection_dim": width,
        "logit_scale": model.logit_scale.exp().item(),
        "logit_bias": bias,
    }
    write_json(folder / "export.json", {**stated, "differences": apart})
    known = immich_width(width) if layout == "immich" else 0
    words = {
        "NAME": IMMICH_NAMES.get(known, ""),
        "WIDTH": str(known),
        "DTYPE": "`q8`" if precision == "int8" else "`fp32`",
        "PADDING": '`"max_length"`' if model.config.text_padding else "`true`",
    }
    usage = re.sub("|".join(words), lambda word: words[word[0]], USAGE[layout])
    if kind != "image":
        usage = f"The first input has the {kind}s as `preprocessor_config.json` makes them: docs/media.md of the project says how."
    elif layout != "immich":
        (folder / "without_torch.py").write_text(alone(), encoding="utf-8")
    rows = [
        [path.relative_to(folder).as_posix(), f"{path.stat().st_size / 1e6:.1f} MB", f"{apart[part]:.0e}"]
        for part, path in paths.items()
    ]
    title = markdown_text(Path(name).name)
    table = markdown_table(["graph", "size", "difference from torch"], rows)
    text = f"# {title}, in ONNX\n\nLayout `{layout}`, opset {OPSET}.\n\n{usage}\n\n## Figures\n\n{table}\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
    return apart


def alone() -> str:
    """Return `without_torch.py` as one file: with the rules by which pictures are opened, in place of their import."""
    source = Path(__file__).with_name("without_torch.py").read_text(encoding="utf-8")
    pictures = inspect.getsource(reading).partition("# -- files of sound and video")[0]
    return re.sub(r"from mm_utils.model.reading import .*\n", lambda _: pictures, source)


def write_settings(folder: Path, layout: str, model: FusionDualEncoderModel, processor: ProcessorMixin) -> None:
    """Write the files beside the graphs.

    Raises:
        ValueError: if the tokenizer cannot be saved as tokenizer.json, which everybody reads.
    """
    tokenizer = processor.tokenizer
    if not tokenizer.is_fast:
        raise ValueError(
            f"The tokenizer is a {type(tokenizer).__name__}, which cannot be saved as tokenizer.json. Choose a model with a "
            "tokenizer of the tokenizers package."
        )
    most = model.most_tokens(tokenizer)
    cut_texts_at(tokenizer, most)  # as many as are read of a text elsewhere
    tokenizer.save_pretrained(folder / "textual" if layout == "immich" else folder)
    if layout == "immich":
        size, mean, std = image_geometry(processor)
        settings = {"size": [size, size], "mode": "RGB", "mean": mean, "std": std, "interpolation": "bicubic"}
        write_json(folder / "visual/preprocess_cfg.json", {**settings, "resize_mode": "shortest"})
        padding = model.config.text_padding
        width = immich_width(model.config.projection_dim)
        texts = {"context_length": padding["length"] if padding else min(_IMMICH_LENGTH, most)}
        write_json(folder / "config.json", {"embed_dim": width, "vision_cfg": {"image_size": size}, "text_cfg": texts})
        return
    own = processor.feature_extractor if model.config.medium == "sound" else processor.image_processor
    own.save_pretrained(folder)
    if model.config.medium == "image":
        sizes = {"projection_dim": model.config.projection_dim, "logit_scale_init_value": model.logit_scale.item()}
        write_json(folder / "config.json", {"model_type": "clip", **sizes})
