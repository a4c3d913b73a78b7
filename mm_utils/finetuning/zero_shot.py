"""Zero-shot classification by the nearest of the texts that name the classes.

The embedding of a class is the mean of the unit embeddings of its name in every template, normalised again (CLIP, arXiv
2103.00020, section 3.1.4). Ranks are counted as in `mm_utils.evaluation.embeddings`: ties and NaN count against the model.

Shape letters: b images of a batch, M of all, C classes, E embedding width.
"""

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset, concatenate_datasets
from torch import Tensor
from torch.nn.functional import normalize, one_hot
from transformers import PreTrainedTokenizerBase

from mm_utils.data.arguments import SPLIT_NAMES, DataArguments
from mm_utils.data.batches.tokens import Reach, encode_captions, pad_captions, unread
from mm_utils.data.media import medium_of
from mm_utils.data.prepare.cache import load_labelled_rows
from mm_utils.data.prepare.ingest import rows_of
from mm_utils.data.rows.detect import detect
from mm_utils.data.rows.media_folders import WORDNET_ID, class_key, class_names, readable
from mm_utils.data.rows.records import Record
from mm_utils.data.rows.source import Source
from mm_utils.evaluation.embeddings import best_rank, check_embeddings
from mm_utils.evaluation.metrics import evaluation_module, share_with_interval
from mm_utils.finetuning.arguments import ZeroShotArguments
from mm_utils.finetuning.evaluator import gather_rows
from mm_utils.finetuning.labels import (
    check_single,
    first_of_classes,
    hold_labelled_out,
    is_number,
    label_of,
    labelled_sources,
    warn_of_alike,
)
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.text import shortened

logger = logging.getLogger(__name__)

TEXTS = 256  # texts embedded at a time


@dataclass
class LabelledImages:
    """A labelled split."""

    rows: Dataset  # in the schema that `mm_utils.data.batches.loaders.Loaders.evaluation` reads, without captions
    label_M: Tensor  # the class of each row, int64
    classes: list[str]  # names of all classes, also of those without an image
    split: str


class ZeroShotEvaluator:
    """Measure the accuracy of the nearest class; all ranks get the same metrics."""

    def __init__(
        self, images: LabelledImages, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, args: ZeroShotArguments
    ):
        templates = args.templates or medium_of(images.rows.features).templates
        if unknown := unknown_names(tokenizer, images.classes, max_seq_length):
            logger.warning(
                "%d of %d classes have words that the tokenizer does not know, and are not found by them: %s. Give other names.",
                len(unknown),
                len(images.classes),
                shortened(", ".join(unknown), 200),
            )
        self.images = images
        self.templates = len(templates)
        # class by class, as `_embed_classes` takes them apart
        texts = [template.replace("{}", name) for name in images.classes for template in templates]
        for said in unread(tokenizer, texts, max_seq_length, "The texts of the classes"):
            logger.warning("%s", said)
        self.tokens = pad_captions(encode_captions(tokenizer, texts, max_seq_length), tokenizer.pad_token_id)

    @torch.no_grad()
    def __call__(
        self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator
    ) -> tuple[dict[str, float], Tensor]:
        """Classify the batches of `mm_utils.data.batches.loaders.Loaders.evaluation`.

        Returned are the metrics, and class and predicted class of every row that could be read, `[M, 2]`.
        """
        embeds_CE = self._embed_classes(model, accelerator)
        label_M = self.images.label_M.to(accelerator.device)

        def classify(batch: dict[str, Any]) -> list[Tensor]:
            with accelerator.autocast():
                image_bE, _ = model.encode_image(batch["pixel_values"], with_keys_values=False)
            check_embeddings("images", image_bE)
            label_b = label_M[batch["rows"]]
            return [label_b, *rank_and_guess(image_bE.float() @ embeds_CE.T, label_b)]

        _, label_M, rank_M, guess_M = gather_rows(loader, accelerator, classify, 4).cpu()
        metrics = accuracy_metrics(label_M, rank_M, len(self.images.classes))
        return metrics, torch.stack([label_M, guess_M], 1)

    def _embed_classes(self, model: FusionDualEncoderModel, accelerator: Accelerator) -> Tensor:
        """Embed all texts, on each rank; return the unit embeddings of the classes `[C, E]`."""
        input_ids, attention_mask = self.tokens
        embeds = []
        for ids, mask in zip(input_ids.split(TEXTS), attention_mask.split(TEXTS), strict=True):
            with accelerator.autocast():
                text_tE, _ = model.encode_text(ids.to(accelerator.device), mask.to(accelerator.device))
            embeds.append(text_tE.float())
        text_tE = torch.cat(embeds)
        check_embeddings("class names", text_tE)
        # [C x templates, E] -> [C, templates, E]
        return normalize(text_tE.unflatten(0, (-1, self.templates)).mean(1), dim=-1)


def unknown_names(tokenizer: PreTrainedTokenizerBase, names: Sequence[str], max_seq_length: int) -> list[str]:
    """Return the names that hold a word the tokenizer does not know, or nothing that it reads."""
    bare, *found = encode_captions(tokenizer, ["", *names], max_seq_length)
    reach = Reach.of(tokenizer, max_seq_length)
    return [name for name, ids in zip(names, found, strict=True) if ids == bare or reach.unknown_words(ids)]


def rank_and_guess(score_bC: Tensor, label_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rank of each row's class among all, from 1, and its class if that is first, else the best wrong one."""
    is_right_bC = one_hot(label_b, score_bC.shape[1]).bool()
    rank_b = best_rank(score_bC, is_right_bC)
    rival_b = score_bC.masked_fill(is_right_bC, -torch.inf).argmax(1)
    return rank_b, torch.where(rank_b > 1, rival_b, label_b)


def accuracy_metrics(label_M: Tensor, rank_M: Tensor, classes: int) -> dict[str, float]:
    """Return accuracy at 1 with its interval, its mean over classes; with 6 classes also at 5; by chance, and of the largest class."""
    right_M = rank_M == 1
    images_C = label_M.bincount(minlength=classes)
    found = evaluation_module("retrieval_recall", "ranks").compute(ranks=rank_M.numpy(), k=(1, 5))
    # a class without an image has no accuracy
    by_class_C = label_M[right_M].bincount(minlength=classes)[images_C > 0] / images_C[images_C > 0].double()
    metrics = share_with_interval("accuracy@1", found["recall@1"], len(rank_M)) | {
        "macro_accuracy@1": by_class_C.mean().item()
    }
    if classes > 5:
        metrics["accuracy@5"] = found["recall@5"]
    return {**metrics, "chance@1": 1 / classes, "majority@1": (images_C.max() / images_C.sum()).item()}


def load_labelled(args: DataArguments, labels: ZeroShotArguments, medium: str = "image") -> LabelledImages:
    """Load the split that the arguments name, of the kind of media that the model is for.

    A validation split that is asked for and is not there has the rows that fine-tuning holds out.

    Raises:
        ValueError: in one line, if there is no such split or column, no image, a label that is not a class, or a class
            without a name.
    """
    if labels.classes is not None and not os.path.isfile(labels.classes):
        raise ValueError(f"--classes is {labels.classes}; there is no such file. Write one with a name a line.")
    sources = labelled_sources(args, labels, medium)
    if not sources:
        raise ValueError(
            "--dataset_name is missing; it says what is measured. Give a labelled data set, or a folder of one."
        )
    there = defaultdict[str, set[str]](set)  # the sources of each split
    labels_of_all = set[str]()
    for source in sources:
        for row in rows_of(source):
            if isinstance(row, Record):
                there[row.split or "train"].add(source.name)
                labels_of_all |= {label_of(row.answers)} if row.answers else set()
    split, read = _choose_split(labels.split, there)
    sources = [replace(source, only=read) for source in sources if source.name in there[read] or not labels_of_all]
    title = f"{sources[0].title}, split {read}"
    rows, known = load_labelled_rows(sources)
    if split != read:
        rows = hold_labelled_out(rows, title)["validation"]
    check_single(rows["answers"], title)
    names = [label_of(answers) for answers in rows["answers"]]
    has_folders = os.path.isdir(sources[0].path) and detect(sources[0]) == "classes"  # whose names may be numbers
    if not known and (has_folders or not all(map(is_number, labels_of_all))):
        known = tuple(sorted(labels_of_all))  # also of classes that this split has no row of
    given = class_names(Source(labels.classes, title="", classes=labels.classes)) if labels.classes else {}
    known = known or tuple(sorted(filter(str.isdecimal, given), key=int))
    classes = _readable_names(known, given, labels.classes, title)
    number_of = {name: place for place, name in enumerate(known)}
    unknown = next((row for row, name in enumerate(names) if name not in number_of), None)
    if unknown is not None:
        raise ValueError(
            f"{title}, row {unknown}: the label is {names[unknown]}; the {len(classes)} classes are {known[0]} to {known[-1]}. "
            "Name all of them in --classes."
        )
    count = len(rows)
    label_M = torch.tensor([number_of[name] for name in names])
    # The schema that evaluations read, without captions.
    beside = {"id": [f"row {row}" for row in range(count)], "image_key": list(range(count))}
    empty: dict[str, list[Any]] = {"input_ids": [[]] * count, "caption_keys": [[]] * count}
    built = concatenate_datasets([rows.select_columns(["image"]), Dataset.from_dict({**beside, **empty})], axis=1)
    places = first_of_classes(label_M.tolist(), args.max_eval_samples)
    return LabelledImages(built.select(places), label_M[places], classes, split)


def _choose_split(wanted: str | None, there: Collection[str]) -> tuple[str, str]:
    """Return the split to measure, and the one whose rows are read: of train those of a validation split that is not there."""
    usual = ["validation", "test", "train"]  # the labels of a test split are often withheld
    if wanted is None:
        split = next((each for each in usual if each in there), "train")
        return split, split
    split = SPLIT_NAMES[wanted.lower()]
    if split == "validation" and split not in there and "train" in there:
        return split, "train"
    if there and split not in there:
        raise ValueError(f"--split is {wanted}; the data has {', '.join(sorted(there))}. Choose one of them.")
    return split, split


def _readable_names(known: Sequence[str], given: dict[str, str], file: str | None, title: str) -> list[str]:
    """Return class names for texts: the first synonym, unless another class shares it.

    Args:
        known: the labels of the data.
        given: the names that `file` has for those, or else in their order; see `class_names`.
    """
    found = list(known)
    if file is not None:
        in_order = [given[str(place)] for place in range(len(given)) if str(place) in given]
        missing = [name for name in known if class_key(name) not in given]
        is_same = {*map(readable, known)} <= {*given.values()}  # a list of what the data says itself
        if known and not missing:
            found = [given[class_key(name)] for name in known]
            if others := [name for key, name in given.items() if key not in {*map(class_key, known)}]:
                why = f"classes without a row here are no choice ({len(others):,}, such as {others[0]})"
                logger.warning("%s, --classes %s; %s", title, file, why)
        elif not is_same:
            # a file that names some of them is one of keys, not of places
            if not len(missing) == len(known) == len(in_order) > 0:
                raise ValueError(
                    f"the names of the classes are those of {file}; it has {len(given)} names for {len(known)} classes and none for "
                    f"{missing[0] if missing else 'label 0'}. Write lines 'id name', or a name a line for every class from 0 on."
                )
            found = in_order
            logger.warning(
                "%s; %s names the classes in their order, %s as %s. Write lines 'id name' if that is not so",
                title,
                file,
                known[0],
                found[0],
            )
    coded = next(filter(WORDNET_ID.fullmatch, found), None)
    if not found or coded:
        shown = f"its class {coded} is a WordNet id" if coded else "its labels are numbers"
        raise ValueError(f"{title}; {shown}, not a name. Set --classes to lines 'id name', or a name a line.")
    full = [readable(name) for name in found]
    first = Counter(name.split(",")[0] for name in full)
    # ImageNet's 'maillot' and 'maillot, tank suit' keep their whole names
    names = [short if first[short := name.split(",")[0]] == 1 else name for name in full]
    if "" in names or len(names) < 2:
        shown = f"class {names.index('')} has no name" if "" in names else f"it has {len(names)} of at least 2 classes"
        raise ValueError(f"{title}; {shown}. Give them in --classes, or other data.")
    warn_of_alike(names, title)
    return names


# -- report -----------------------------------------------------------------------------------------------------------


def accuracy_lines(metrics: dict[str, float]) -> list[str]:
    """Return the accuracy with its interval, beside chance and the most frequent class, as lines of a screen."""
    chance = metrics["chance@1"]
    majority = metrics["majority@1"]
    low = metrics["accuracy@1_low"]
    high = metrics["accuracy@1_high"]
    return [
        "",
        f"  {'accuracy':<36}{metrics['accuracy@1']:.3f} ({low:.2f} to {high:.2f})",
        f"  {'by chance':<36}{chance:.3f}; always the most frequent class {majority:.3f}",
    ]
