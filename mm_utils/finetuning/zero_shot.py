"""Zero-shot classification by the nearest of the texts that name the classes.

The embedding of a class is the mean of the unit embeddings of its name in every template, normalised again (CLIP, arXiv
2103.00020, section 3.1.4). Ranks are counted as in `mm_utils.evaluation.embeddings`: ties and NaN count against the model.

Shape letters: b images of a batch, M of all, C classes, P templates, T = C x P texts, class by class, K candidates,
L tokens, H width of the text tower, E embedding width.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import normalize, one_hot
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from mm_utils import distributed
from mm_utils.arguments import arg
from mm_utils.data.batches.tokens import encode_captions, pad_captions
from mm_utils.data.media import Image, medium_of
from mm_utils.distributed import full_tensor
from mm_utils.evaluation.embeddings import best_rank
from mm_utils.evaluation.metrics import share_with_interval
from mm_utils.evaluation.reranking import PAIRS, stored_weights
from mm_utils.finetuning.confusion import report_classes
from mm_utils.finetuning.labels import LabelledImages
from mm_utils.model.fusion import KeysValues
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.text import shortened

logger = logging.getLogger(__name__)

TEXTS = 256  # texts embedded at a time
_SHOWN = 10  # classes in the log


@dataclass
class ZeroShotArguments:
    """Texts that stand for the classes, and re-ranking of the classes."""

    templates: list[str] | None = field(
        default=None,
        metadata={
            "help": "Texts with {} in place of the class's name, or one file with a text per line; default: those of the "
            f"benchmark, else '{Image.templates[0]}' and two like it, or such of clips and sounds."
        },
    )
    rerank_top_k: int = arg(
        0,
        "Also measure after the fusion head reorders the first K classes of every row, at the cost of K x templates pairs "
        "per row; 0 = do not.",
    )

    def __post_init__(self) -> None:
        if self.templates is not None and len(self.templates) == 1 and Path(self.templates[0]).is_file():
            lines = Path(self.templates[0]).read_text(encoding="utf-8-sig").splitlines()
            self.templates = [
                line.strip().replace("{c}", "{}") for line in lines if line.strip()
            ]  # as CLIP_benchmark has it
        without = [template for template in self.templates or () if "{}" not in template]
        if without or self.templates == []:
            shown = without[0] if without else "an empty file"
            raise ValueError(f"--templates is {shown}; a template says with {{}} where the name goes. Add it.")
        if self.rerank_top_k < 0:
            raise ValueError(f"--rerank_top_k is {self.rerank_top_k}; give a number of classes, or 0 for none.")


class ClassTexts(NamedTuple):
    """All classes in all templates, embedded."""

    embeds_CE: Tensor  # unit embeddings of the classes
    mask_CPL: Tensor  # attention mask of the texts
    states_CPLH: Tensor | None  # input of the fusion head, from `encode_text`; None without re-ranking


class Predictions(NamedTuple):
    """Results of the rows that could be decoded, in row order, on all ranks: int64 `[M]`."""

    row: Tensor  # its place in the data set
    label: Tensor  # its class
    rank: Tensor  # rank of its class among all, from 1
    guess: Tensor  # its class if that is first, else the wrong class of the highest score


class ZeroShotEvaluator:
    """Measure the accuracy of the nearest class; all ranks get the same metrics.

    With re-ranking and a model with a fusion head, also measure `rerank_*`: the first classes of each image are reordered by
    scaled cosine + the head's weighted scores, averaged over the templates. How likely a caption is plays no part, because what
    the names of the classes are worth by themselves is not known.

    Attributes:
        predictions: results of the last evaluation, by cosine alone.
    """

    def __init__(
        self, images: LabelledImages, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, args: ZeroShotArguments
    ):
        usual = medium_of(images.rows.features).templates
        templates = args.templates or images.templates or usual
        by_class = [[template.replace("{}", name) for template in templates] for name in images.classes]
        if images.texts is not None:
            if args.templates:
                raise ValueError("--templates is given; the captions of a prepared set are its prompts. Drop it.")
            by_class = images.texts
        if unknown := unknown_names(tokenizer, images.classes, max_seq_length):
            logger.warning(
                "%d of %d classes have words that the tokenizer does not know, and are not found by them: %s. Give other names.",
                *(len(unknown), len(images.classes), shortened(", ".join(unknown), 200)),
            )
        self.images, self.templates, self.reranked_classes = images, len(by_class[0]), args.rerank_top_k
        texts = [text for of_class in by_class for text in of_class]
        self.tokens = pad_captions(encode_captions(tokenizer, texts, max_seq_length), tokenizer.pad_token_id)
        self.predictions: Predictions | None = None

    @torch.no_grad()
    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Classify the batches of `mm_utils.data.batches.loaders.Loaders.evaluation`.

        Raises:
            ValueError: if no image can be decoded.
        """
        weights = {name: weight for name, weight in stored_weights(model).items() if name != "caption"}
        reranks = self.reranked_classes > 0 and model.fusion is not None and bool(weights)
        if self.reranked_classes and not weights:
            logger.info(
                "Re-ranking is off: no match logit helped on the validation split (rerank_weights in config.json)."
            )
        device = accelerator.device
        texts = embed_classes(model, *self.tokens, self.templates, accelerator, with_states=reranks)
        scale = full_tensor(model.logit_scale.detach()).float().exp().squeeze()
        label_M = self.images.label_M.to(device)
        found, skipped = [torch.empty(0, 6 if reranks else 4, dtype=torch.long, device=device)], []
        for batch in tqdm(loader, desc="Classifying", leave=False, disable=not accelerator.is_main_process, delay=2):
            skipped += batch["skipped"]
            if not len(batch["rows"]):
                continue
            with accelerator.autocast():
                image_bE, keys_values = model.encode_image(batch["pixel_values"], with_keys_values=reranks)
            label_b, cosine_bC = label_M[batch["rows"]], image_bE.float() @ texts.embeds_CE.T
            columns = [batch["rows"], label_b, *rank_and_guess(cosine_bC, label_b)]
            if keys_values is not None:
                with accelerator.autocast():
                    score_bC = _rerank(model, weights, keys_values, texts, scale * cosine_bC, self.reranked_classes)
                rank_b, guess_b = rank_and_guess(score_bC, label_b)
                # A class below the first k keeps its rank by cosine, but the guess is one of the first k.
                below_b = score_bC.gather(1, label_b[:, None]).isneginf().squeeze(1)
                columns += [torch.where(below_b, columns[2], rank_b), guess_b]
            found.append(torch.stack(columns, 1))
        columns_M = _gather(torch.cat(found), skipped).unbind(1)
        self.predictions = Predictions(*columns_M[:4])
        classes = len(self.images.classes)
        metrics = accuracy_metrics(self.predictions, classes)
        if reranks:
            metrics |= accuracy_metrics(Predictions(*columns_M[:2], *columns_M[4:]), classes, "rerank_")
        counts_C = self.predictions.label.bincount()
        return {**metrics, "chance@1": 1 / classes, "majority@1": (counts_C.max() / counts_C.sum()).item()}


def unknown_names(tokenizer: PreTrainedTokenizerBase, names: Sequence[str], max_seq_length: int) -> list[str]:
    """Return the names that hold a word the tokenizer does not know, or nothing that it reads."""
    bare, *found = encode_captions(tokenizer, ["", *names], max_seq_length)
    known = bare.count(tokenizer.unk_token_id)  # CLIP's is also the one that ends every text
    return [
        name
        for name, ids in zip(names, found, strict=True)
        if ids == bare or ids.count(tokenizer.unk_token_id) > known
    ]


def _gather(found: Tensor, skipped: list[str]) -> Tensor:
    """Gather the results of all ranks, in order of the rows."""
    if skipped:
        logger.warning("%d images were left out: %s", len(skipped), skipped[:3])
    everything = distributed.gather(found, distributed.gather_sizes(len(found), found.device))
    if not len(everything):
        raise ValueError("no image could be decoded; the first reasons are: " + "; ".join(skipped[:3]))
    return everything


@torch.no_grad()
def embed_classes(
    model: FusionDualEncoderModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    templates: int,
    accelerator: Accelerator,
    with_states: bool = False,
) -> ClassTexts:
    """Embed the tokenised texts `[T, L]`; each rank embeds all of them."""
    input_ids, attention_mask = input_ids.to(accelerator.device), attention_mask.to(accelerator.device)
    embeds, states = [], []
    for low in range(0, len(input_ids), TEXTS):
        with accelerator.autocast():
            text_tE, states_tLH = model.encode_text(input_ids[low : low + TEXTS], attention_mask[low : low + TEXTS])
        embeds.append(text_tE.float())
        states += [states_tLH] if with_states else []
    by_class = (-1, templates)
    embeds_CE = normalize(torch.cat(embeds).unflatten(0, by_class).mean(1), dim=-1)
    states_CPLH = torch.cat(states).unflatten(0, by_class) if with_states else None
    return ClassTexts(embeds_CE, attention_mask.unflatten(0, by_class), states_CPLH)


def _rerank(
    model: FusionDualEncoderModel,
    weights: dict[str, float],
    keys_values: KeysValues,
    texts: ClassTexts,
    scaled_bC: Tensor,
    top_k: int,
) -> Tensor:
    """Return scaled cosine + mean weighted score of the first `top_k` classes, else -infinity."""
    assert texts.states_CPLH is not None
    top_bK = scaled_bC.topk(min(top_k, scaled_bC.shape[1]), 1).indices
    templates = texts.mask_CPL.shape[1]
    image = torch.arange(len(top_bK), device=top_bK.device).repeat_interleave(top_bK.shape[1] * templates)
    text = (top_bK[..., None] * templates + torch.arange(templates, device=top_bK.device)).flatten()
    mask_TL, states_TLH = texts.mask_CPL.flatten(0, 1), texts.states_CPLH.flatten(0, 1)
    logits = []
    for low in range(0, len(text), PAIRS):
        of_text, of_image = text[low : low + PAIRS], image[low : low + PAIRS]
        layers = tuple(layer[:, of_image] for layer in keys_values)
        mask = mask_TL[of_text]
        scores_PV = model.voice_scores(list(weights), layers, states_TLH[of_text], mask, mask)
        logits.append(scores_PV @ scores_PV.new_tensor(list(weights.values())))
    head_bK = torch.cat(logits).view(*top_bK.shape, templates).mean(2)
    score_bC = torch.full_like(scaled_bC, -torch.inf)
    return score_bC.scatter_(1, top_bK, head_bK + scaled_bC.gather(1, top_bK))


def rank_and_guess(score_bC: Tensor, label_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rank of each row's class, and its guess, as in `Predictions`."""
    is_right_bC = one_hot(label_b, score_bC.shape[1]).bool()
    rank_b = best_rank(score_bC, is_right_bC)
    rival_b = score_bC.masked_fill(is_right_bC, -torch.inf).argmax(1)
    return rank_b, torch.where(rank_b > 1, rival_b, label_b)


def accuracy_metrics(found: Predictions, classes: int, prefix: str = "") -> dict[str, float]:
    """Return accuracy at 1 with its interval, its mean over classes; with 6 classes also at 5."""
    right_M, images_C = found.rank == 1, found.label.bincount(minlength=classes)
    by_class_C = found.label[right_M].bincount(minlength=classes)[images_C > 0] / images_C[images_C > 0].double()
    metrics = share_with_interval(f"{prefix}accuracy@1", right_M)
    metrics[f"{prefix}macro_accuracy@1"] = by_class_C.mean().item()
    if classes > 5:
        metrics[f"{prefix}accuracy@5"] = (found.rank <= 5).double().mean().item()
    return metrics


# -- report -----------------------------------------------------------------------------------------------------------


def accuracy_lines(metrics: dict[str, float]) -> list[str]:
    """Return accuracies with their intervals, beside chance and the most frequent class, as lines of a screen."""
    lines = [
        f"  accuracy{title:<28}{metrics[name]:.3f} ({metrics[f'{name}_low']:.2f} to {metrics[f'{name}_high']:.2f})"
        for name, title in (("accuracy@1", ""), ("rerank_accuracy@1", ", re-ranked"))
        if name in metrics
    ]
    chance, majority = metrics["chance@1"], metrics["majority@1"]
    return ["", *lines, f"  {'by chance':<36}{chance:.3f}; always the most frequent class {majority:.3f}"]


def report_classes_of(evaluator: ZeroShotEvaluator, folder: str | None) -> None:
    """Log the least accurate classes of the last evaluation, and write the files of `report_classes`."""
    assert evaluator.predictions is not None
    pairs = torch.stack([evaluator.predictions.label, evaluator.predictions.guess], 1)
    rows = report_classes(pairs.cpu(), evaluator.images.classes, folder)
    worst = sorted((row for row in rows if row.rows), key=lambda row: row.recall or 0.0)[:_SHOWN]
    lines = [f"{row.name[:32]:<34}{row.rows:>7,}{row.recall:>9.3f}  {row.most_confused_with}" for row in worst]
    heading = f"{'least accurate classes':<34}{'rows':>7}{'accuracy':>9}  most often taken for"
    logger.info("\n%s", "\n".join([heading, *lines]))
