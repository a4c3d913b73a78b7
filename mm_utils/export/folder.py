"""Write an export's folder: graphs, settings, the file without torch, and a README."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm.auto import tqdm
from transformers import ProcessorMixin

from mm_utils.export.comparison import Figures, table
from mm_utils.export.graphs import Head, head_graphs, padded_graphs, tower_graphs, trace
from mm_utils.export.layouts import (
    IMMICH_NAMES,
    ends_in_pad,
    graph_path,
    immich_width,
    text_length,
    write_settings,
)
from mm_utils.export.precisions import convert
from mm_utils.export.sessions import ExportedTowers
from mm_utils.model import reading
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.text import markdown_text, publishable

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
_JS_TYPES = {"fp32": "fp32", "fp16": "fp16", "int8": "q8"}


def write_graphs(
    folder: Path,
    model: FusionDualEncoderModel,
    processor: ProcessorMixin,
    layout: str,
    precisions: Sequence[str],
    weights: Mapping[str, float],
    opset: int,
    shape: Sequence[int] | None = None,
) -> tuple[dict[str, ExportedTowers], Head | None]:
    """Write the graphs and what lies beside them; return all precisions' towers, and the head.

    Args:
        folder: an empty one.
        model: in evaluation mode, on the CPU.
        processor: of the model.
        layout, precisions: see `mm_utils.export.layouts` and `mm_utils.export.precisions`; fp32 is measured in any case.
        weights: of the head's scores; empty for no head.
        opset: the version of ONNX's operators.
        shape: of a clip or a sound, see `mm_utils.export.graphs.tower_graphs`.

    Raises:
        RunError: if torch cannot export a part.
    """
    tokenizer = processor.tokenizer
    head: Head | None = None
    if layout == "immich":
        width = immich_width(model.config.projection_dim)
        graphs = padded_graphs(model, tokenizer.pad_token_id, ends_in_pad(tokenizer), width)
    else:
        graphs = tower_graphs(model, shape)
    if weights:
        graphs |= head_graphs(model, dict(weights), shape)
        reranker = graphs["reranker"].module
        assert isinstance(reranker, Head)
        head = reranker
    found: dict[str, ExportedTowers] = {}
    with TemporaryDirectory(dir=folder) as work:
        traced = {part: Path(work, f"{part}.onnx") for part in graphs}
        for part, graph in tqdm(graphs.items(), desc="Tracing", unit=" graphs"):
            trace(graph, traced[part], opset)
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
    return found, head


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
        layout: see `mm_utils.export.layouts`.
        model, processor: what was exported.
        settings: further entries of export.json.
        figures: of torch and every precision.
    """
    width = model.config.projection_dim
    stated = {
        "model": publishable(name),
        "layout": layout,
        **settings,
        "projection_dim": width,
        "logit_scale": model.logit_scale.exp().item(),
        "logit_bias": None if model.logit_bias is None else model.logit_bias.item(),
    }
    content = json.dumps({**stated, "figures": [asdict(each) for each in figures.values()]}, indent=2)
    (folder / "export.json").write_text(content + "\n", encoding="utf-8")
    usage = USAGE[layout if model.config.medium == "image" else model.config.medium].replace(
        "NAME", IMMICH_NAMES[immich_width(width)] if layout == "immich" else ""
    )
    usage = usage.replace("WIDTH", str(immich_width(width)) if layout == "immich" else "")
    precision = list(figures)[-1]
    padding = '"max_length"' if model.config.text_padding else "true"
    usage = usage.replace("DTYPE", _JS_TYPES.get(precision, "fp32")).replace("PADDING", padding)
    if layout != "immich" and model.config.medium == "image":
        for file in (Path(__file__).with_name("without_torch.py"), Path(reading.__file__)):
            shutil.copy(file, folder)
    title = markdown_text(Path(name).name)
    text = f"# {title}, in ONNX\n\nLayout `{layout}`, opset {settings['opset']}.\n\n{usage}\n## Figures\n\n{table(figures)}\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
