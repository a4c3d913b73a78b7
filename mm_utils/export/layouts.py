"""Where an export's files lie, and the small files that each reader looks for.

plain            vision_model.onnx, text_model.onnx, reranker_images.onnx, reranker.onnx, preprocessor_config.json,
                 tokenizer.json and tokenizer_config.json
transformers.js  the same graphs in onnx/, and a config.json by which its CLIP classes load them
immich           visual/model.onnx, textual/model.onnx and the settings of an open_clip model, as the machine-learning service
                 of Immich reads them. It knows models by name and their embeddings by width, so that embeddings get zeros up
                 to the next width that it knows, which changes no cosine, and the folder has to get that model's name.
open_clip        open_clip_config.json, open_clip_model.safetensors and the tokenizer, without graphs
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from mm_utils.data.media.medium import image_geometry
from mm_utils.distributed import RunError
from mm_utils.files import atomic_folder, is_about
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel

LAYOUTS = ("plain", "transformers.js", "immich", "open_clip")
PRECISIONS = {"fp32": "", "fp16": "_fp16", "int8": "_quantized"}
"""What each precision adds to the names of files, as transformers.js expects it."""
IMMICH_NAMES = {
    512: "ViT-B-32__openai",
    640: "RN50x4__openai",
    768: "ViT-L-14__openai",
    1024: "RN50__openai",
    1152: "ViT-SO400M-14-SigLIP-384__webli",
}
IMMICH_LENGTH = 77  # tokens that Immich pads every text to, as open_clip does
_IMMICH_FOLDERS = {"vision_model": "visual", "text_model": "textual"}


def check_output(output_dir: str) -> None:
    """Raise ValueError if there is something at the place of the export."""
    folder = Path(output_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--output_dir is {output_dir}; it is not empty. Give a new folder, or remove this one.")


@contextmanager
def written(output_dir: str) -> Iterator[Path]:
    """Yield a folder that becomes `output_dir` at the end.

    Raises:
        RunError: if the disk is full or read-only.
    """
    try:
        with atomic_folder(Path(output_dir)) as folder:
            yield folder
    except OSError as error:
        if not is_about(error, Path(output_dir).parent):
            raise
        raise RunError(
            f"--output_dir is {output_dir}; it cannot be written: {error.strerror or error}. Free some space, or give another folder."
        ) from error


def export_open_clip(output_dir: str, model: FusionDualEncoderModel, processor: ProcessorMixin) -> dict[str, Any]:
    """Write a CLIP in open_clip's format; it has no graphs to compare, hence no figures."""
    from mm_utils.model.open_clip import write_open_clip

    with written(output_dir) as folder:
        write_open_clip(folder, model, processor)
    return {}


def graph_path(layout: str, part: str, precision: str) -> Path:
    """Return where a graph lies in the folder."""
    if layout == "immich":
        return Path(_IMMICH_FOLDERS[part], "model.onnx")
    return Path("onnx" if layout == "transformers.js" else "", f"{part}{PRECISIONS[precision]}.onnx")


def immich_width(width: int) -> int:
    """Return the width that embeddings get for Immich.

    Raises:
        ValueError: if it knows none that is large enough.
    """
    for known in IMMICH_NAMES:
        if known >= width:
            return known
    raise ValueError(
        f"--layout is immich; it stores at most {max(IMMICH_NAMES)} numbers, and embeddings here have {width}."
    )


def text_length(model: FusionDualEncoderModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many tokens of a text are read where padding is of one length."""
    if model.config.text_padding:
        return model.config.text_padding["length"]
    most = getattr(model.config.text_config, "max_position_embeddings", IMMICH_LENGTH)
    return min(IMMICH_LENGTH, most, tokenizer.model_max_length)


def ends_in_pad(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether every text ends in the token that fills texts, as CLIP's do."""
    return tokenizer("a")["input_ids"][-1] == tokenizer.pad_token_id


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
    tokenizer.model_max_length = model.most_tokens(tokenizer)  # as many as are read of a text elsewhere
    tokenizer.save_pretrained(folder / "textual" if layout == "immich" else folder)
    if layout == "immich":
        size, mean, std = image_geometry(processor)
        settings = {"size": [size, size], "mode": "RGB", "mean": mean, "std": std, "interpolation": "bicubic"}
        _write(folder / "visual/preprocess_cfg.json", {**settings, "resize_mode": "shortest"})
        config = {
            "embed_dim": immich_width(model.config.projection_dim),
            "vision_cfg": {"image_size": size},
            "text_cfg": {"context_length": text_length(model, tokenizer)},
        }
        _write(folder / "config.json", config)
        return
    own = processor.feature_extractor if model.config.medium == "sound" else processor.image_processor
    own.save_pretrained(folder)
    if layout == "transformers.js":
        scale = model.logit_scale.item()
        width = model.config.projection_dim
        _write(
            folder / "config.json", {"model_type": "clip", "projection_dim": width, "logit_scale_init_value": scale}
        )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
