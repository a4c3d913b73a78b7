"""Load image-caption pairs from any source, as one `datasets.DatasetDict` with the columns of `mm_utils.data.prepare.on_disk`.

The splits are ``train``, ``validation`` and, if the source has one, ``test``. Raw sources are prepared first, into the datasets cache.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from datasets import Dataset, DatasetDict

from mm_utils.data.arguments import SPLITS, DataArguments, PathArguments
from mm_utils.data.prepare.cache import load_or_prepare
from mm_utils.data.prepare.on_disk import is_grouped, is_prepared, open_prepared
from mm_utils.data.rows.columns import hold_out
from mm_utils.data.rows.detect import detect
from mm_utils.data.rows.source import Source
from mm_utils.data.scenes import load_scenes
from mm_utils.places import missing

logger = logging.getLogger(__name__)


def load_pairs(args: DataArguments, *, need_train: bool = True, holds_out: bool | None = None) -> DatasetDict:
    """Load the pairs that `args` names, one row per image.

    Bad rows are set aside, with warnings that name them. With `holds_out`, by default the value of `need_train`, images are
    held out of train by the hash of their id where the source has no validation split: always the same ones. With
    ``need_train=False``, for evaluation alone, there may be no train split.

    Raises:
        ValueError: in one line, if a file or column does not exist, a file cannot be parsed or leads elsewhere, an id names two
            images, more than half of the rows of a source are bad, or train has fewer than 2 pairs.
    """
    sources = sources_of(args)
    title = ", ".join(source.title for source in sources) or "no source is given"
    if not sources:
        refuse_columns(args, "the data are the embedded scenes")
        pairs = load_scenes()
    elif args.dataset_name is not None and is_prepared(args.dataset_name):
        refuse_columns(args, "the data are a prepared set")
        pairs = open_prepared(args.dataset_name, title, allow_outside=args.allow_outside_root)
    else:
        pairs = load_or_prepare(sources, trains=need_train)
    if need_train and "train" not in pairs:
        raise ValueError(f"{title}; there is no train split, only {', '.join(pairs)}. Give pairs to train on.")
    parts = dict(pairs)
    holds_out = need_train if holds_out is None else holds_out
    if holds_out and "train" in parts and "validation" not in parts:  # no image is touched
        ids = pairs["train"].with_format("arrow")[:]["id"].to_pylist()
        parts["train"], parts["validation"] = hold_out(pairs["train"], ids)
        logger.info("%s: no validation split; %s images are held out for it", title, f"{len(parts['validation']):,}")
        if args.dataset_name is not None and is_prepared(args.dataset_name) and is_grouped(args.dataset_name):
            logger.warning(
                "%s; it was prepared with group_column=, and rows of one group may now be in train and held out. Name the split of each "
                "group in a column split, and prepare it anew",
                title,
            )
    return first_rows({split: parts[split] for split in SPLITS if split in parts}, args, title, need_train)


def refuse_columns(args: DataArguments, data: str, label_column: str | None = None) -> None:
    """Raise ValueError if a flag names a column, or where paths begin, of data that have columns of their own."""
    for name, value in {**args.columns, "image_root": args.image_root, "label_column": label_column}.items():
        if value is not None:
            raise ValueError(f"--{name} is {value}; {data}, whose columns are known. Leave it out.")


def load_split(args: DataArguments, split: str) -> Dataset:
    """Load a split for evaluation; rows held out of train are the validation split here, too."""
    pairs = load_pairs(args, need_train=split == "train", holds_out=split != "test")
    if split not in pairs:
        raise ValueError(f"--split is {split}; the data has {', '.join(pairs)}.")
    return pairs[split]


def first_rows(splits: Mapping[str, Dataset], args: DataArguments, title: str, need_train: bool = True) -> DatasetDict:
    """Keep the first rows of every split, as the flags say; ValueError if `need_train` and train has fewer than 2 pairs then."""
    kept = DatasetDict()
    for name, rows in splits.items():
        most = args.max_train_samples if name == "train" else args.max_eval_samples
        kept[name] = rows if most is None else rows.take(min(most, len(rows)))
    if need_train and len(kept["train"]) < 2:
        raise ValueError(
            f"{title}; train has {len(kept['train'])} pairs, and contrastive training needs at least 2 pairs. Add some"
            f"{'' if args.max_train_samples is None else ', or raise --max_train_samples'}."
        )
    return kept


def iterate_captions(rows: Dataset) -> Iterator[str]:
    """Yield all captions of a split, in order."""
    for batch in rows.select_columns("captions").iter(1000):
        for captions in batch["captions"]:
            yield from captions


def sources_of(args: DataArguments, **labelled: Any) -> list[Source]:
    """Return the sources that the flags name, none for the embedded scenes; `labelled` are fields of those of labelled rows."""
    fields = {**args.columns, **labelled, "paths": PathArguments(args.image_root, args.allow_outside_root)}
    if args.dataset_name:
        name = args.dataset_name
        title = f"--dataset_name is {name}"
        kind = detect(Source(name, title=title, **fields)) if os.path.isdir(name) else "datasets"
        return [Source(name, kind, name, title=title, **fields)]
    given = {split: file for split, file in args.files.items() if file}
    sources = []
    for split, file in given.items():
        title = f"--{split}_file is {file}"
        if not os.path.isfile(file) and not file.lower().endswith(".tar"):
            what = "that is a pipe or device. Write it to a file."
            if os.path.isdir(file):
                what = "that is a folder. Give it as --dataset_name."
            raise ValueError(f"{title}; {missing(file, is_local=True) or what}")
        name = file if len(set(given.values())) == len(given) else f"{file} for {split}"
        file_split = None if list(given) == ["train"] else split  # a file alone may hold rows of all splits
        sources.append(Source(file, name=name, file_split=file_split, title=title, **fields))
    return sources
