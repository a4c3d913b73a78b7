"""Export the two towers of a trained model to ONNX, for programs without torch.

Graphs in fp32, or with 8-bit weights, compared with torch:
    python scripts/export.py --model_name_or_path outputs/mine --output_dir outputs/onnx
    python scripts/export.py --model_name_or_path outputs/mine --output_dir outputs/int8 --precision int8

For the photo library Immich:
    python scripts/export.py --model_name_or_path outputs/mine --output_dir outputs/immich --layout immich
"""

import importlib.util
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from mm_utils.arguments import arg, parse_args, parse_first, required

LAYOUTS = ("plain", "immich", "open_clip")
PRECISIONS = ("fp32", "int8")


@dataclass
class ExportArguments:
    """The model, and the folder that is made of it."""

    model_name_or_path: str = required("The model: a run's folder, a checkpoint, a stock CLIP, or a Hub id.")
    output_dir: str = required("The folder to write, a new one.")
    precision: str = arg("fp32", "Of the graphs' weights: fp32 or int8.")
    layout: str = arg(
        "plain",
        "How files are named and laid: plain (also for transformers.js), immich, or open_clip (torch weights of a CLIP).",
    )

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"--precision is {self.precision}; give {' or '.join(PRECISIONS)}.")
        if self.layout not in LAYOUTS:
            raise ValueError(f"--layout is {self.layout}; choose one of {', '.join(LAYOUTS)}.")
        if self.layout == "open_clip" and self.precision != "fp32":
            raise ValueError("--layout is open_clip; it has no graphs, hence no --precision. Drop it.")


FLAGS = (ExportArguments,)

if __name__ == "__main__":
    parse_first(*FLAGS, doc=__doc__)

from mm_utils.data.arguments import LoaderArguments
from mm_utils.data.batches.loaders import make_loaders
from mm_utils.export.folder import check_output, export
from mm_utils.export.open_clip import write_open_clip
from mm_utils.files import atomic_folder
from mm_utils.model.build import open_model
from mm_utils.run.script import run_script, set_up_logging

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the script and return the differences from torch by graph; `argv` lets tests and notebooks call it."""
    # 1. Arguments: dataclass defaults < --config file < command line.
    args = parse_args(*FLAGS, argv=argv, doc=__doc__)[ExportArguments]
    model_name = str(args.model_name_or_path)
    output_dir = str(args.output_dir)
    packages = ("onnx", "onnxruntime", "onnxscript") if args.layout != "open_clip" else ()
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ValueError(f"The export needs {', '.join(missing)}. Install with: pip install {' '.join(packages)}")
    check_output(output_dir)
    set_up_logging()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("Several processes were launched; one exports. Start it without a launcher.")

    # 2. Model.
    model, processor = open_model(model_name)
    kind = model.float().config.medium
    if args.layout == "open_clip":
        with atomic_folder(Path(output_dir), "--output_dir") as folder:
            write_open_clip(folder, model, processor)
        logger.info("%s: open it with open_clip.create_model_and_transforms('local-dir:%s')", output_dir, output_dir)
        return {}
    if kind != "image" and args.layout != "plain":
        raise ValueError(f"--layout is {args.layout}; it is for images, and this model reads {kind}s. Drop it.")
    if model.fusion is not None and any((model.config.rerank_weights or {}).values()):
        logger.info(
            "The fusion head stays behind: exported towers rank without it; scripts/search.py re-ranks with it."
        )
    loaders = make_loaders(LoaderArguments(dataloader_num_workers="0"), model.device, processor)
    shape = None if kind == "image" else tuple(loaders.blank(1).shape[1:])

    # 3. Export, compare, and only then put the folder in its place.
    with atomic_folder(Path(output_dir), "--output_dir") as folder:
        found = export(folder, model_name, model, processor, args.layout, args.precision, shape)

    # 4. Report.
    apart = ", ".join(f"{part} {value:.0e}" for part, value in found.items())
    logger.info("%s: %s differs from torch by %s", output_dir, args.precision, apart)
    return found


if __name__ == "__main__":
    run_script(main)
