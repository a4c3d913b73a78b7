"""Embed images, clips or sounds into an index, which scripts/search.py searches by text or by what is like them; or classify them.

A folder of images, with all folders in it; run it again after changes, and only new and changed images are embedded:
    python scripts/embed.py --model_name_or_path outputs/mine --images photos/ --index_dir outputs/index

The class of every picture in a folder, as a table, by a classifier that scripts/finetune.py trained:
    python scripts/embed.py --model_name_or_path outputs/classes --images photos/ --output_file classes.csv

A prepared data set with its captions, or any other source that scripts/pretrain.py takes:
    python scripts/embed.py --model_name_or_path outputs/mine --dataset_name data/mine --index_dir outputs/index
"""

import logging
from dataclasses import dataclass, fields
from pathlib import Path

from mm_utils.arguments import arg, launch_command, parse_args, parse_first, required
from mm_utils.data.arguments import EvaluatedDataArguments, LoaderArguments


@dataclass
class EmbedArguments:
    """The model, the index, and a folder of images, clips or sounds."""

    model_name_or_path: str = required("The model: a run's folder, a checkpoint, or a Hub id.")
    index_dir: str | None = arg(None, "The folder of the index; a new one, or one that is brought up to date.")
    output_file: str | None = arg(
        None,
        "With a classifier of scripts/finetune.py, in place of an index: a CSV with path, class and probability of each file of --images.",
    )
    images: str | None = arg(
        None, "A folder of images, with all folders in it, instead of pairs. For a model of clips or sounds, of these."
    )
    split: str | None = arg(None, "Of a source of pairs, embed this split alone: train, validation or test.")
    dataloader_num_workers: str = arg("auto", "Processes that decode media, per rank; auto = one per spare core.")

    def __post_init__(self) -> None:
        if self.output_file is None and self.index_dir is None:
            raise ValueError(
                "--index_dir is missing; it is the folder of the index. Give one, or a classifier's --output_file."
            )
        if self.output_file and (self.index_dir or not self.images):
            raise ValueError(
                f"--output_file is {self.output_file}; it takes the classes of --images, in place of an --index_dir. Give the "
                "folder of images alone."
            )
        if self.images and self.split:
            raise ValueError(f"--split is {self.split}; a folder of images has no splits. Drop one of the two.")


FLAGS = (EmbedArguments, EvaluatedDataArguments)

if __name__ == "__main__":
    parse_first(*FLAGS, doc=__doc__)

from mm_utils import distributed
from mm_utils.data.batches.loaders import EVALUATION_BATCH, make_loaders
from mm_utils.data.batches.tokens import unread_captions
from mm_utils.data.pairs import load_pairs
from mm_utils.finetuning.classifier import open_classifier
from mm_utils.finetuning.folder import classify_folder
from mm_utils.model.build import open_model
from mm_utils.run.start import make_accelerator, run_script
from mm_utils.search.index import SKIPPED
from mm_utils.search.listing import folder_listing, pair_listing
from mm_utils.search.updating import Embedder, update_index

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> dict[str, int]:
    """Run the script and return the numbers of images; `argv` lets tests and notebooks call it."""
    # 1. Arguments: dataclass defaults < --config file < command line.
    given = parse_args(*FLAGS, argv=argv, doc=__doc__)
    args = given[EmbedArguments]
    data_args = given[EvaluatedDataArguments]
    model_name = str(args.model_name_or_path)
    source = data_args.dataset_name or data_args.train_file
    if args.images and source:
        raise ValueError(f"--images is {args.images}, and {source} is given too; images have one source. Drop one.")
    if args.images:
        unread = " ".join(field.name for field in fields(EvaluatedDataArguments) if field.name != "allow_outside_root")
        given.refuse(unread, "--images are media without captions")
    workers = LoaderArguments(dataloader_num_workers=args.dataloader_num_workers)
    accelerator = make_accelerator()

    # 2. Model.
    model = open_classifier(model_name) if args.output_file else open_model(model_name)[0]
    processor = model.processor
    loaders = make_loaders(workers, accelerator.device, processor)
    medium = loaders.medium

    # 3. Media: a folder is listed once, as it may change meanwhile; pairs are the same for all processes.
    if args.images:
        allows = data_args.allow_outside_root
        listing = distributed.on_first(lambda: folder_listing(str(args.images), allows, medium.kind))
    else:
        with distributed.first_then_others():
            pairs = load_pairs(data_args, need_train=False)
        if args.split and args.split not in pairs:
            raise ValueError(f"--split is {args.split}; the data has {', '.join(pairs)}.")
        listing = pair_listing({name: rows for name, rows in pairs.items() if args.split in (None, name)})
        loaders.check_medium(listing.rows)
        for said in unread_captions(
            listing.rows, processor.tokenizer, model.most_tokens(processor.tokenizer), "The captions"
        ):
            logger.warning("%s", said)

    # 4. Classify all, or embed what is new.
    embedder = Embedder(model.to(accelerator.device), medium, EVALUATION_BATCH, workers.num_workers)
    if args.output_file:
        done = classify_folder(args.output_file, listing, embedder, accelerator)
        counts = f"{done['classified']:,} {medium.kind}s have a class; {done['skipped']:,} could not be read"
        logger.info("%s: %s", args.output_file, counts)
        accelerator.end_training()
        return done
    folder = Path(str(args.index_dir))
    done = update_index(folder, model_name, listing, embedder, accelerator)

    # 5. Report.
    counts = (
        f"{done['images']:,} {medium.kind}s; {done['embedded']:,} embedded, {done['kept']:,} unchanged, "
        f"{done['removed']:,} removed, {done['skipped']:,} left out"
    )
    logger.info("%s: %s%s", folder, counts, f", see {folder / SKIPPED}" if done["skipped"] else "")
    logger.info("Search it: %s", launch_command("search", ["--index_dir", str(folder), "--serve"], "python"))
    accelerator.end_training()
    return done


if __name__ == "__main__":
    run_script(main, "What was written is kept: the same command goes on there.")
