"""Zero-shot classification: how often an image is nearest to the texts that name its class.

A class is the mean of the unit embeddings of its name in every template, normalised again (CLIP, arXiv 2103.00020,
section 3.1.4). The rank of an image's class is one plus the number of wrong classes that score at least as high: ties,
and scores that are no number, count against the model.

Shape letters: b images of a batch, M of all, C classes, P templates, T = C x P texts, class by class, K candidates,
L tokens, H width of the text tower, E embedding width.
"""

import csv
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import normalize
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from mm_utils import ranks
from mm_utils.arguments import arg
from mm_utils.data.labelled import LabelledImages
from mm_utils.data.raw.specs import TEMPLATES
from mm_utils.data.tokens import encode_captions, pad_captions
from mm_utils.intervals import wilson_interval
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel, KeysValues
from mm_utils.reporting import draw_confusion
from mm_utils.reranking import PAIRS
from mm_utils.safe_text import no_formula
from mm_utils.sharding import whole

logger = logging.getLogger(__name__)

TEXTS = 256  # embedded at a time
_SHOWN = 10  # classes in the log


@dataclass
class ZeroShotArguments:
    """The texts that stand for a class, and who compares them with an image."""

    templates: list[str] = field(
        default_factory=lambda: list(TEMPLATES),
        metadata={"help": "Texts with {} where the class's name goes, or a file of them, one a line."},
    )
    rerank_top_k: int = arg(
        0,
        "Also measure with the fusion head ordering the first K classes of every image anew, which takes K times as "
        "many scores an image as there are templates; 0 = do not.",
    )

    def __post_init__(self) -> None:
        """Read a file of templates, and refuse what cannot be meant, with a ValueError of one line."""
        if len(self.templates) == 1 and Path(self.templates[0]).is_file():
            lines = Path(self.templates[0]).read_text(encoding="utf-8-sig").splitlines()
            self.templates = [line.strip() for line in lines if line.strip()]
        without = [template for template in self.templates if "{}" not in template]
        if without or not self.templates:
            shown = without[0] if without else "an empty file"
            raise ValueError(f"--templates is {shown}; a template says with {{}} where the name goes. Add it.")
        if self.rerank_top_k < 0:
            raise ValueError(f"--rerank_top_k is {self.rerank_top_k}; give a number of classes, or 0 for none.")


@dataclass
class ClassTexts:
    """All classes in all templates, embedded.

    Attributes:
        embeds_CE: unit embeddings of the classes.
        mask_CPL: attention mask of the texts.
        states_CPLH: the text tower's last hidden states, which the head reads; None if it is not asked.
    """

    embeds_CE: Tensor
    mask_CPL: Tensor
    states_CPLH: Tensor | None


class Predictions(NamedTuple):
    """What was found, of every image that could be decoded, in order of the rows, on every rank: all `[M]`, int64.

    Attributes:
        row: its place in the data set.
        label: its class.
        rank: of its class among all, from 1.
        guess: its class where that is first, else the wrong one of the highest score.
    """

    row: Tensor
    label: Tensor
    rank: Tensor
    guess: Tensor


class ClassFigures(NamedTuple):
    """A line of the table of classes; accuracy is None without images, the confusion empty without mistakes."""

    name: str
    images: int
    accuracy: float | None
    most_confused_with: str
    times: int


class ZeroShotEvaluator:
    """Accuracy of the nearest class; all ranks get the same figures, however many there are.

    With `rerank_top_k`, and a model with a fusion head, also `rerank_*`: the first k classes of each image are ordered
    anew by match logit, the mean over the templates, plus scaled cosine. `predictions` keeps what the last evaluation
    found by cosine alone.
    """

    def __init__(
        self, images: LabelledImages, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, args: ZeroShotArguments
    ):
        self.images, self.templates, self.rerank_top_k = images, len(args.templates), args.rerank_top_k
        texts = [template.replace("{}", name) for name in images.classes for template in args.templates]
        self.tokens = pad_captions(encode_captions(tokenizer, texts, None, max_seq_length), tokenizer.pad_token_id)
        self.predictions: Predictions | None = None

    @torch.no_grad()
    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Classify what `loader` yields (see `mm_utils.data.loaders.Loaders.evaluation`).

        Raises:
            ValueError: if no image can be decoded.
        """
        device, reranks = accelerator.device, self.rerank_top_k > 0 and model.fusion is not None
        texts = embed_classes(model, *self.tokens, self.templates, accelerator, with_states=reranks)
        scale = whole(model.logit_scale.detach()).float().exp().squeeze()
        label_M = self.images.label_M.to(device)
        found, skipped = [torch.empty(0, 6 if reranks else 4, dtype=torch.long, device=device)], []
        progress = tqdm(loader, desc="Classifying", leave=False, disable=not accelerator.is_main_process, delay=2)
        for batch in progress:
            skipped += batch["skipped"]
            if not len(batch["rows"]):
                continue
            with accelerator.autocast():
                image_bE, keys_values = model.encode_image(batch["pixel_values"], with_keys_values=reranks)
            label_b, cosine_bC = label_M[batch["rows"]], image_bE.float() @ texts.embeds_CE.T
            columns = [batch["rows"], label_b, *judge(cosine_bC, label_b)]
            if keys_values is not None:
                with accelerator.autocast():
                    score_bC = _rerank(model, keys_values, texts, scale * cosine_bC, self.rerank_top_k)
                rank_b, guess_b = judge(score_bC, label_b)
                # A class below the first k keeps its rank, though not the guess, which is one of the first k.
                below_b = score_bC.gather(1, label_b[:, None]).isneginf().squeeze(1)
                columns += [torch.where(below_b, columns[2], rank_b), guess_b]
            found.append(torch.stack(columns, 1))
        columns_M = self._shared(torch.cat(found), skipped).unbind(1)
        self.predictions = Predictions(*columns_M[:4])
        classes = len(self.images.classes)
        metrics = accuracy_metrics(self.predictions, classes)
        if reranks:
            metrics |= accuracy_metrics(Predictions(*columns_M[:2], *columns_M[4:]), classes, "rerank_")
        counts_C = self.predictions.label.bincount()
        return {**metrics, "chance@1": 1 / classes, "majority@1": (counts_C.max() / counts_C.sum()).item()}

    def _shared(self, found: Tensor, skipped: list[str]) -> Tensor:
        """The rows of all ranks."""
        if skipped:
            logger.warning("%d images were left out: %s", len(skipped), skipped[:3])
        everything = ranks.gather(found, ranks.gather_sizes(len(found), found.device))
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
    """Embed the tokenised texts `[T, L]`; each rank does all of them."""
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


def judge(score_bC: Tensor, label_b: Tensor) -> tuple[Tensor, Tensor]:
    """Rank of each image's class, and its guess, as in `Predictions`."""
    is_wrong_bC = torch.arange(score_bC.shape[1], device=label_b.device) != label_b[:, None]
    rank_b = 1 + (~(score_bC < score_bC.gather(1, label_b[:, None])) & is_wrong_bC).sum(1)
    rival_b = score_bC.masked_fill(~is_wrong_bC, -torch.inf).argmax(1)
    return rank_b, torch.where(rank_b > 1, rival_b, label_b)


def accuracy_metrics(found: Predictions, classes: int, prefix: str = "") -> dict[str, float]:
    """Accuracy at 1 with its 95 % interval, its mean over the classes that have images, and from 6 classes on at 5."""
    right_M, images_C = found.rank == 1, found.label.bincount(minlength=classes)
    by_class_C = found.label[right_M].bincount(minlength=classes)[images_C > 0] / images_C[images_C > 0].double()
    low, high = wilson_interval(int(right_M.sum()), len(right_M))
    metrics = {
        "accuracy@1": right_M.double().mean().item(),
        "accuracy@1_low": low,
        "accuracy@1_high": high,
        "macro_accuracy@1": by_class_C.mean().item(),
    }
    if classes > 5:
        metrics["accuracy@5"] = (found.rank <= 5).double().mean().item()
    return {f"{prefix}{name}": value for name, value in metrics.items()}


def class_figures(found: Predictions, classes: list[str]) -> list[ClassFigures]:
    """The table of classes, in their order."""
    images_C = found.label.bincount(minlength=len(classes)).tolist()
    right_C = found.label[found.rank == 1].bincount(minlength=len(classes)).tolist()
    worst: dict[int, tuple[int, int]] = {}
    for (label, guess), times in confusions(found).items():
        if label != guess and times > worst.get(label, (0, 0))[1]:
            worst[label] = (guess, times)
    rows = []
    for number, name in enumerate(classes):
        guess, times = worst.get(number, (-1, 0))
        accuracy = right_C[number] / images_C[number] if images_C[number] else None
        rows.append(ClassFigures(name, images_C[number], accuracy, classes[guess] if times else "", times))
    return rows


def confusions(found: Predictions) -> dict[tuple[int, int], int]:
    """How many images of a class were taken for which one, by (class, guess), only what occurs."""
    pairs, times = torch.stack([found.label, found.guess], 1).unique(dim=0, return_counts=True)
    return {(label, guess): count for (label, guess), count in zip(pairs.tolist(), times.tolist(), strict=True)}


def report_classes(accelerator: Accelerator, evaluator: ZeroShotEvaluator, folder: str | None) -> None:
    """On the main process, say which classes are worst; with a folder, write `classes.csv` and `confusion.png`."""
    if not accelerator.is_main_process or evaluator.predictions is None:
        return
    classes, predictions = evaluator.images.classes, evaluator.predictions
    rows = class_figures(predictions, classes)
    worst = sorted((row for row in rows if row.accuracy is not None), key=lambda row: row.accuracy or 0.0)[:_SHOWN]
    lines = [f"{row.name[:32]:<34}{row.images:>7,}{row.accuracy:>9.3f}  {row.most_confused_with}" for row in worst]
    heading = f"{'least accurate classes':<34}{'images':>7}{'accuracy':>9}  most often taken for"
    logger.info("\n%s", "\n".join([heading, *lines]))
    if folder is None:
        return
    with open(Path(folder, "classes.csv"), "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(ClassFigures._fields)
        table.writerows([no_formula(cell) for cell in row] for row in rows)
    draw_confusion(confusions(predictions), classes, Path(folder, "confusion.png"))


def _rerank(
    model: FusionDualEncoderModel, keys_values: KeysValues, texts: ClassTexts, scaled_bC: Tensor, top_k: int
) -> Tensor:
    """Scores `[b, C]` of the first `top_k` classes by cosine and match logit, of the others minus infinity."""
    assert texts.states_CPLH is not None
    top_bK = scaled_bC.topk(min(top_k, scaled_bC.shape[1]), 1).indices
    templates = texts.mask_CPL.shape[1]
    image = torch.arange(len(top_bK), device=top_bK.device).repeat_interleave(top_bK.shape[1] * templates)
    text = (top_bK[..., None] * templates + torch.arange(templates, device=top_bK.device)).flatten()
    mask_TL, states_TLH = texts.mask_CPL.flatten(0, 1), texts.states_CPLH.flatten(0, 1)
    logits = []
    for low in range(0, len(text), PAIRS):
        one_text, one_image = text[low : low + PAIRS], image[low : low + PAIRS]
        layers = tuple(layer[:, one_image] for layer in keys_values)
        logits.append(model.match_pairs(layers, states_TLH[one_text], mask_TL[one_text]).float())
    match_bK = torch.cat(logits).view(*top_bK.shape, templates).mean(2)
    score_bC = torch.full_like(scaled_bC, -torch.inf)
    return score_bC.scatter_(1, top_bK, match_bK + scaled_bC.gather(1, top_bK))
