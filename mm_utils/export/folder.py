"""Write an export's folder: graphs in each precision, settings that each reader looks for, the file without torch, a README.

plain            vision_model.onnx, text_model.onnx, reranker_images.onnx, reranker.onnx, preprocessor_config.json,
                 tokenizer.json and tokenizer_config.json
transformers.js  the same graphs in onnx/, and a config.json by which its CLIP classes load them
immich           visual/model.onnx, textual/model.onnx and the settings of an open_clip model, as the machine-learning service
                 of Immich reads them. It knows models by name and their embeddings by width, so that embeddings get zeros up
                 to the next width that it knows, which changes no cosine, and the folder has to get that model's name.
open_clip        open_clip_config.json, open_clip_model.safetensors and the tokenizer, without graphs
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from mm_utils.data.media.medium import image_geometry
from mm_utils.distributed import RunError
from mm_utils.export.comparison import ExportedTowers, Figures, table, text_length
from mm_utils.export.graphs import OPSET, Head, graphs_of, quiet, trace
from mm_utils.files import atomic_folder, is_about
from mm_utils.model import reading
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.text import markdown_text, publishable

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
_IMMICH_FOLDERS = {"vision_model": "visual", "text_model": "textual"}
_JS_TYPES = {"fp32": "fp32", "fp16": "fp16", "int8": "q8"}
USAGE = {
    "plain": """`without_torch.py`, with `reading.py` beside it, embeds images and texts with numpy, onnxruntime, tokenizers and Pillow alone:

```bash
pip install numpy onnxruntime pillow tokenizers
python without_torch.py "a red door" photos/*.jpg
```
""",
    "sound": """`vision_model.onnx` takes what the feature extractor of `preprocessor_config.json` makes of samples, which is not in the
graph: `transformers.AutoFeatureExtractor` makes it with numpy alone. A sound is the middle `window_seconds`, or all of it, and silence
if the extractor's `padding` does not repeat it. Where the extractor makes four channels, take the first.
""",
    "clip": """`vision_model.onnx` takes `clip_frames` frames of a clip at equal distances, `[clips, frames, 3, S, S]`, each resized and
normalised by the image processor of `preprocessor_config.json`.
""",
    "transformers.js": """```js
import { AutoProcessor, AutoTokenizer, CLIPTextModelWithProjection, CLIPVisionModelWithProjection, RawImage } from "@huggingface/transformers";

const name = "FOLDER";  // below env.localModelPath, or on the Hub
const tokenizer = await AutoTokenizer.from_pretrained(name);
const processor = await AutoProcessor.from_pretrained(name);
const texts = await CLIPTextModelWithProjection.from_pretrained(name, { dtype: "DTYPE" });
const images = await CLIPVisionModelWithProjection.from_pretrained(name, { dtype: "DTYPE" });
const { text_embeds } = await texts(tokenizer(["a red door"], { padding: PADDING, truncation: true }));
const { image_embeds } = await images(await processor(await RawImage.read("photo.jpg")));
```

Embeddings have unit length. `without_torch.py`, with `reading.py` beside it, does the same in Python, without torch.
""",
    "immich": """Put this folder into the model cache of Immich's machine-learning service under the name of a model that it knows, with
embeddings of WIDTH numbers:

```bash
docker cp . immich_machine_learning:/cache/clip/NAME
```

Then choose `NAME` under Machine Learning, Smart Search, and run the job Smart Search for all images. With
`MACHINE_LEARNING_MODEL_REVISION` other than `main`, the folder is `/cache/clip/NAME/REVISION`.
""",
}


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
        with atomic_folder(Path(output_dir), "--output_dir") as folder:
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
    if width > max(IMMICH_NAMES):
        raise ValueError(
            f"--layout is immich; it stores at most {max(IMMICH_NAMES)} numbers, and embeddings here have {width}."
        )
    return min(known for known in IMMICH_NAMES if known >= width)


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
        texts, width = {"context_length": text_length(model, tokenizer)}, immich_width(model.config.projection_dim)
        config = {"embed_dim": width, "vision_cfg": {"image_size": size}, "text_cfg": texts}
        _write(folder / "config.json", config)
        return
    own = processor.feature_extractor if model.config.medium == "sound" else processor.image_processor
    own.save_pretrained(folder)
    if layout == "transformers.js":
        sizes = {"projection_dim": model.config.projection_dim, "logit_scale_init_value": model.logit_scale.item()}
        _write(folder / "config.json", {"model_type": "clip", **sizes})


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def convert(source: Path, target: Path, precision: str) -> None:
    """Write the fp32 graph `source` as `target` in a precision; inputs and outputs stay fp32.

    int8 is onnxruntime's dynamic quantisation: weights of matrix products and embeddings are int8, one scale per column; the inputs
    of products are rounded to uint8 with the scale of the moment, which is one for the whole batch. Weights have 7 of the 8 bits: x86
    processors without VNNI add two products in 16 bits, which overflow otherwise (a difference from torch of 0.22 in place of 0.009).
    Convolutions stay in fp32, and products that narrow, the second of each MLP: docs/export.md has the figures.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with quiet():
        if precision == "fp32":
            shutil.copy(source, target)
            return
        model = onnx.load(source)
        if precision == "fp16":
            onnx.save(convert_float_to_float16(model, keep_io_types=True), target)
            return
        shapes = {weight.name: weight.dims for weight in model.graph.initializer}
        products = [(node.name, shapes.get(node.input[1])) for node in model.graph.node if node.op_type == "MatMul"]
        quantize_dynamic(
            model,
            target,
            op_types_to_quantize=["MatMul", "Gemm", "Gather"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            reduce_range=True,
            nodes_to_exclude=[name for name, shape in products if shape is not None and shape[0] > shape[1]],
        )


def write_graphs(
    folder: Path,
    model: FusionDualEncoderModel,
    processor: ProcessorMixin,
    layout: str,
    precisions: Sequence[str],
    weights: Mapping[str, float],
    shape: Sequence[int] | None = None,
) -> tuple[dict[str, ExportedTowers], Head | None]:
    """Write the graphs and what lies beside them; return all precisions' towers, and the head.

    Args:
        folder: an empty one.
        model: in evaluation mode, on the CPU.
        processor: of the model.
        layout, precisions: of `LAYOUTS` and `PRECISIONS`; fp32 is measured in any case.
        weights: of the head's scores; empty for no head.
        shape: of a clip or a sound, see `mm_utils.export.graphs.graphs_of`.

    Raises:
        RunError: if torch cannot export a part.
    """
    tokenizer, immich = processor.tokenizer, None
    if layout == "immich":
        width = immich_width(model.config.projection_dim)
        immich = tokenizer.pad_token_id, ends_in_pad(tokenizer), width
    graphs = graphs_of(model, dict(weights), shape, immich)
    found: dict[str, ExportedTowers] = {}
    with TemporaryDirectory(dir=folder) as work:
        traced = {part: Path(work, f"{part}.onnx") for part in graphs}
        for part, graph in tqdm(graphs.items(), desc="Tracing", unit=" graphs"):
            trace(graph, traced[part])
        for precision in dict.fromkeys(["fp32", *precisions]):
            paths = traced
            if precision in precisions:
                paths = {part: folder / graph_path(layout, part, precision) for part in graphs}
                for part, path in paths.items():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    convert(traced[part], path, precision)
            found[precision] = ExportedTowers(
                paths, model.config, tokenizer.pad_token_id, text_length(model, tokenizer)
            )
            if precision not in precisions:  # measured, but not written
                found[precision].megabytes = {}
    write_settings(folder, layout, model, processor)
    return found, graphs["reranker"].module if weights else None  # type: ignore[return-value]


def write_report(
    folder: Path,
    name: str,
    layout: str,
    model: FusionDualEncoderModel,
    processor: ProcessorMixin,
    settings: Mapping[str, Any],
    figures: Mapping[str, Figures],
) -> None:
    """Write export.json, README.md and, where it serves, the file that needs no torch.

    Args:
        folder: of the export.
        name: of the model.
        layout: of `LAYOUTS`.
        model, processor: what was exported.
        settings: further entries of export.json.
        figures: of torch and every precision.
    """
    width = model.config.projection_dim
    stated = {
        "model": publishable(name),
        "layout": layout,
        "opset": OPSET,
        **settings,
        "projection_dim": width,
        "logit_scale": model.logit_scale.exp().item(),
        "logit_bias": None if model.logit_bias is None else model.logit_bias.item(),
    }
    content = json.dumps({**stated, "figures": [asdict(each) for each in figures.values()]}, indent=2)
    (folder / "export.json").write_text(content + "\n", encoding="utf-8")
    known = immich_width(width) if layout == "immich" else 0
    words = {
        "NAME": IMMICH_NAMES.get(known, ""),
        "WIDTH": str(known),
        "DTYPE": _JS_TYPES.get(list(figures)[-1], "fp32"),
        "PADDING": '"max_length"' if model.config.text_padding else "true",
    }
    usage = USAGE[layout if model.config.medium == "image" else model.config.medium]
    usage = re.sub("|".join(words), lambda word: words[word[0]], usage)
    if layout != "immich" and model.config.medium == "image":
        for file in (Path(__file__).with_name("without_torch.py"), Path(reading.__file__)):
            shutil.copy(file, folder)
    title = markdown_text(Path(name).name)
    text = f"# {title}, in ONNX\n\nLayout `{layout}`, opset {OPSET}.\n\n{usage}\n## Figures\n\n{table(figures)}\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
