"""Find captions that a trained model takes for those of other images, as hard negatives to train on.

The prepared data set again, with the column `negatives`; negatives.json says how many were found, and left out, and why:
    python scripts/mine_negatives.py --model_name_or_path outputs/mine --dataset_name data/mine \\
        --output_dir data/mined

A model that has not seen the pairs finds better ones than one that was trained on them, such as a stock CLIP:
    python scripts/mine_negatives.py --model_name_or_path openai/clip-vit-base-patch32 \\
        --dataset_name data/mine --output_dir data/mined
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from mm_utils.arguments import arg, launch_command, parse_args, parse_first, required, to_dict
from mm_utils.data.arguments import DataArguments, LoaderArguments, MiningArguments


@dataclass
class MineArguments:
    """The model, the pairs, and where they go."""

    model_name_or_path: str = required("The model: a run's folder, a checkpoint, or a Hub id.")
    dataset_name: str = required("A folder that scripts/prepare_data.py wrote; only its train split is mined.")
    output_dir: str = required("The new data set goes here; --dataset_name of a training script reads it.")
    dataloader_num_workers: str = arg("auto", "Processes that decode media, per rank; auto = one per spare core.")
    max_seq_length: int = arg(64, "Captions are cut to this many tokens; two of them are special.", least=3)


FLAGS = (MineArguments, MiningArguments)

if __name__ == "__main__":
    parse_first(*FLAGS, doc=__doc__)

from datasets import DatasetDict

from mm_utils import distributed
from mm_utils.data.batches.loaders import EVALUATION_BATCH, make_loaders
from mm_utils.data.batches.tokens import tokenize_splits
from mm_utils.data.pairs import load_pairs
from mm_utils.data.prepare.on_disk import is_prepared
from mm_utils.evaluation.embeddings import embed_split
from mm_utils.mining import choose, same_pictures, write_mined
from mm_utils.model.build import open_model
from mm_utils.run.start import make_accelerator, run_script

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> dict[str, int]:
    """Run the script and return how many negatives were found; `argv` lets tests and notebooks call it."""
    # 1. Arguments: dataclass defaults < --config file < command line.
    given = parse_args(*FLAGS, argv=argv, doc=__doc__)
    args, mining = given[MineArguments], given[MiningArguments]
    if not is_prepared(args.dataset_name):
        raise ValueError(
            f"--dataset_name is {args.dataset_name}; it was not prepared. Give it to scripts/prepare_data.py."
        )
    if Path(args.output_dir).exists():
        raise ValueError(f"--output_dir is {args.output_dir}; it exists. Give a new folder.")
    accelerator = make_accelerator()

    # 2. Model.
    model, processor = open_model(args.model_name_or_path)

    # 3. Data: what training would hold out of train for validation is held out here, too.
    with distributed.first_then_others():
        pairs = load_pairs(DataArguments(dataset_name=args.dataset_name))
        own = DatasetDict(train=pairs["train"])
        rows = tokenize_splits(own, processor.tokenizer, args.max_seq_length)["train"]
    loader_args = LoaderArguments(args.max_seq_length, dataloader_num_workers=args.dataloader_num_workers)
    loaders = make_loaders(loader_args, accelerator.device, processor)

    # 4. Mine.
    loader = loaders.evaluation(rows, EVALUATION_BATCH)
    split = embed_split(accelerator.unwrap_model(accelerator.prepare(model)), loader, accelerator)
    mined = choose(split, rows, same_pictures(rows, accelerator), mining)

    # 5. Write the data set, and the report.
    settings = to_dict(args, mining)
    distributed.on_first(lambda: write_mined(pairs, mined, args.dataset_name, Path(args.output_dir), settings))
    # Matching alone reads negatives, and needs a head, which recipes between frozen encoders leave out.
    words = ["--dataset_name", args.output_dir, "--objectives", "contrastive:1,matching:1", "--fusion_layers", "2"]
    logger.info("Train on it: %s", launch_command("pretrain", words))
    accelerator.end_training()
    return {"images": len(rows), "negatives": sum(map(len, mined.negatives))}


if __name__ == "__main__":
    run_script(main)
