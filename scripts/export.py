"""Export a trained model to ONNX, for programs without torch: both towers and, where it helps, the re-ranking head.

Graphs in fp32 and with 8-bit weights, compared with torch on a data set:
    python scripts/export.py --model_name_or_path outputs/mine --output_dir outputs/onnx --precision fp32,int8 \\
        --dataset_name data/mine

For a web page (transformers.js), or for the photo library Immich:
    python scripts/export.py --model_name_or_path outputs/mine --output_dir outputs/web --layout transformers.js
    python scripts/export.py --model_name_or_path outputs/mine --output_dir outputs/immich --layout immich
"""

import sys

from mm_utils.places import check_words

if __name__ == "__main__":
    check_words("export.py", sys.argv[1:])  # before the libraries load, which takes 8 s

# isort: split
import logging
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator

from mm_utils.arguments import arg, parse_args, required
from mm_utils.data.batches.loaders import LoaderArguments, make_loaders
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.pairs import load_pairs
from mm_utils.data.rows.source import EvaluatedDataArguments
from mm_utils.export.folder import LAYOUTS, PRECISIONS, check_output, export_open_clip, written
from mm_utils.export.graphs import check_packages, head_weights
from mm_utils.model.build import check_model, load_model
from mm_utils.model.processor import load_processor_of
from mm_utils.run.start import run_script, set_up_logging

logger = logging.getLogger(__name__)


@dataclass
class ExportArguments:
    """The model, and the folder that is made of it."""

    model_name_or_path: str = required("The model: a run's folder, a checkpoint, a stock CLIP, or a Hub id.")
    output_dir: str = required("The folder to write, a new one.")
    precision: str = arg("fp32", "fp32, fp16 and int8, or several of them, e.g. fp32,int8.")
    layout: str = arg(
        "plain",
        "How files are named and laid: plain, transformers.js, immich, or open_clip (torch weights of a CLIP).",
    )
    reranker: str = arg(
        "auto",
        "Export the head, too: yes, no, or auto: where training found that it helps (rerank_weights in config.json).",
    )
    split: str = arg("validation", "The split of a data set to compare recall on: train, validation or test.")

    def __post_init__(self) -> None:
        for name in ("model_name_or_path", "output_dir"):
            if getattr(self, name) is None:
                raise ValueError(f"--{name} is missing; give a folder.")
        wrong = [each for each in self.precisions if each not in PRECISIONS]
        if wrong or len(set(self.precisions)) < len(self.precisions):
            raise ValueError(f"--precision is {self.precision}; give {', '.join(PRECISIONS)}, each once, with commas.")
        for name, choices in (("layout", LAYOUTS), ("reranker", ("auto", "yes", "no"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"--{name} is {getattr(self, name)}; choose one of {', '.join(choices)}.")
        if self.layout == "immich" and len(self.precisions) > 1:
            raise ValueError(f"--precision is {self.precision}; the layout immich has room for one. Give one.")
        graphs = {"precision": "fp32", "reranker": "auto", "split": "validation"}
        for name, usual in graphs.items():
            if self.layout == "open_clip" and getattr(self, name) != usual:
                raise ValueError(f"--{name} is {getattr(self, name)}; --layout open_clip writes no graphs. Drop it.")
        if self.layout == "immich" and self.reranker == "yes":
            raise ValueError("--reranker is yes; Immich has no re-ranking. Give another --layout.")

    @property
    def precisions(self) -> list[str]:
        """The precisions, in the order given."""
        return self.precision.split(",")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the script and return the figures by precision; `argv` lets tests and notebooks call it."""
    # 1. Arguments: dataclass defaults < --config file < command line.
    given = parse_args(ExportArguments, EvaluatedDataArguments, argv=argv, doc=__doc__)
    args, data_args = given[ExportArguments], given[EvaluatedDataArguments]
    model_name, output_dir = str(args.model_name_or_path), str(args.output_dir)
    if args.layout != "open_clip":
        check_packages()
    from mm_utils.export.comparison import add_recall, compare, table
    from mm_utils.export.folder import write_graphs, write_report

    check_model(model_name)
    check_output(output_dir)
    set_up_logging()
    accelerator, loader = Accelerator(cpu=True), None
    if accelerator.num_processes > 1:
        raise ValueError(
            f"{accelerator.num_processes} processes were launched; one exports. Start it without a launcher."
        )

    # 2. Model, and data to compare on.
    processor = load_processor_of(model_name)
    model = load_model(model_name, fusion_layers=0).float().eval()
    if args.layout == "open_clip":
        return export_open_clip(output_dir, model, processor)
    if model.config.medium != "image" and args.layout != "plain":
        raise ValueError(
            f"--layout is {args.layout}; it is for images, and this model reads {model.config.medium}s. Drop it."
        )
    weights = head_weights(model, "no" if args.layout == "immich" else args.reranker)
    loaders = make_loaders(LoaderArguments(dataloader_num_workers="0"), accelerator.device, processor)
    shape = None if model.config.medium == "image" else tuple(loaders.blank(1).shape[1:])
    if data_args.dataset_name or data_args.train_file:
        pairs = load_pairs(data_args, need_train=args.split == "train", hold_out=args.split != "test")
        if args.split not in pairs:
            raise ValueError(f"--split is {args.split}; the data has {', '.join(pairs)}.")
        rows = tokenize_captions(pairs[args.split], processor.tokenizer, loaders.arguments.max_seq_length)
        loader = loaders.evaluation(rows, 1)  # as a search asks; int8 depends on what else is in a batch

    # 3. Export, compare, and only then put the folder in its place.
    with written(output_dir) as folder:
        towers, head = write_graphs(folder, model, processor, args.layout, args.precisions, weights, shape)
        figures = compare(model, towers, processor.tokenizer, head, shape)
        if loader is not None:
            add_recall(figures, {"torch": model, **towers}, loader, accelerator)
        settings = {
            "split": args.split if loader is not None else None,
            "rerank_weights": weights,
        }
        write_report(folder, model_name, args.layout, model, processor, settings, figures)

    # 4. Report.
    logger.info("%s\n%s", output_dir, table(figures))
    return figures


if __name__ == "__main__":
    run_script(main)
