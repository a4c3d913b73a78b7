"""Build the objective that `--objectives` names: terms with their weights."""

import itertools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from mm_utils.arguments import arg, load_own
from mm_utils.data.batches.column_reader import ColumnReader
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.captioning import Captioning
from mm_utils.objectives.contrastive import Distillation, InfoNCE, PairwiseSigmoid
from mm_utils.objectives.grounding.terms import MomentCovering, RegionPointing
from mm_utils.objectives.joint import JointObjective
from mm_utils.objectives.masked_language import MaskedLanguageModelling
from mm_utils.objectives.matching import Matching
from mm_utils.objectives.terms import EmbeddingTerm, Term

logger = logging.getLogger(__name__)

_TERMS = (
    *(InfoNCE, PairwiseSigmoid, Captioning, Matching, MaskedLanguageModelling),
    *(RegionPointing, MomentCovering, Distillation),
)
TERMS: dict[str, type[Term]] = {term.name: term for term in _TERMS}
HEADS = ("fusion.match", "fusion.bridges", "fusion.cls_token", "token_head", "caption_adapter", "region_head")
"""The parts of the model that only some terms train."""


@dataclass
class ObjectiveArguments:
    """The terms of the loss and their weights."""

    objectives: str = arg(
        "contrastive:1,captioning:1",
        "Terms and weights: contrastive (InfoNCE) or sigmoid (SigLIP); matching (the fusion head classifies pairs); masked_lm and "
        "captioning (it predicts words); regions (phrases point into their boxes); moments (phrases find their spans of clips and "
        "sounds); distillation (soft targets of --teacher_name_or_path); or module.Class, a term of your own.",
        usual=True,
    )
    teacher_name_or_path: str | None = arg(
        None,
        "A larger dual encoder whose similarities the towers learn as soft targets, a folder or a Hub id as of "
        "--model_name_or_path, or st:FOLDER of a SentenceTransformer of images and texts; adds distillation:1 to --objectives unless it is there. It runs once over the training data.",
        decides="place",
    )

    def __post_init__(self) -> None:
        self.weights  # noqa: B018  (complain now, not after the data is loaded)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each term, by name."""
        weights = {}
        for term in self.objectives.split(","):
            name, _, weight = term.strip().partition(":")
            if name in weights:
                raise ValueError(f"--objectives is {self.objectives!r}; it has {name} twice. Keep one of them.")
            try:
                weights[name] = float(weight or 1)
            except ValueError:
                raise ValueError(f"--objectives has {term!r}; write name:weight, e.g. matching:0.5.") from None
        if self.teacher_name_or_path:
            weights.setdefault("distillation", 1.0)
        elif weights.get("distillation"):
            raise ValueError(
                f"--objectives is {self.objectives!r}; distillation learns from a teacher, and there is none. Give "
                "--teacher_name_or_path."
            )
        found = {name: weight for name, weight in weights.items() if weight}
        if not all(0 <= weight < math.inf for weight in weights.values()):
            raise ValueError(f"--objectives is {self.objectives!r}; a weight is a finite number of at least 0.")
        if {"contrastive", "sigmoid"} <= found.keys():
            raise ValueError(
                f"--objectives is {self.objectives!r}; contrastive and sigmoid share one temperature. Drop one of them."
            )
        terms = {name: term_class(name) for name in weights}
        if not any(issubclass(terms[name], EmbeddingTerm) for name in found):
            raise ValueError(
                f"--objectives is {self.objectives!r}; no term of it compares images and texts. Add contrastive, sigmoid, or an "
                "EmbeddingTerm of your own, with a weight above 0."
            )
        return found

    @property
    def readers(self) -> list[ColumnReader]:
        """What the terms read of rows besides media and captions."""
        return list(dict.fromkeys(reader for name in self.weights for reader in term_class(name).readers))

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError if a term cannot be trained with the other flags, given by name."""
        for name in self.weights:
            term = term_class(name)
            refuses = dict(term.refuses)
            if not all(reader.optional for reader in term.readers):
                refuses.setdefault("streaming", "reads media and captions alone")
            for given, reason in refuses.items():
                flag, _, value = given.partition(" ")
                if settings.get(flag) == value if value else settings.get(flag):
                    raise ValueError(f"--objectives has {name}, and --{given} {reason}. Drop one of them.")


def build_objective(
    model: FusionDualEncoderModel,
    args: ObjectiveArguments,
    seed: int,
    rows: datasets.Dataset | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> JointObjective:
    """Build the objective; add to the model what terms need, freeze what none trains.

    `rows` are the tokenised training rows; None for a stream. Only `masked_lm` needs the tokenizer of the texts.

    Raises:
        ValueError: if a term is not found, or needs a part that the model cannot have, such as a fusion head.
    """
    weights = {term_class(name)(seed): weight for name, weight in args.weights.items()}
    if not any(term.has_bias for term in weights):
        model.remove_logit_bias()
    before = {name for name in model.state_dict() if model.voices or not name.startswith("fusion.")}
    for term in weights:
        if term.pairs_per_image and model.fusion is None:
            raise ValueError(
                f"--objectives asks for {term.name}, and the model has no fusion head. Set --fusion_layers above 0 "
                "where backbones are joined; an earlier run without a head gets one by its folder dual_encoder/ as --model_name_or_path."
            )
        term.tokenizer = tokenizer
        term.prepare(model)
        if rows is not None:
            term.read_captions(model, rows)
    objective = JointObjective(model, weights, seed, frozenset(model.state_dict()) - before)
    if model.fusion is not None:
        model.fusion.requires_grad_(objective.pairs_per_image > 0)
    trained = {head for term in weights for head in term.heads}
    # DDP would wait for the gradients of parts that no term trains.
    for name, part in itertools.chain(model.named_modules(), model.named_parameters()):
        if name in HEADS:
            part.requires_grad_(name in trained)
    return objective


def term_class(name: str) -> type[Term]:
    """Return the class of a term: one of `TERMS`, or module.Class from the current folder or a package.

    Raises:
        ValueError: if there is none, with what to do.
    """
    if name in TERMS:
        return TERMS[name]
    if "." not in name:
        raise ValueError(
            f"--objectives has {name!r}; there is no such term. Choose of {', '.join(TERMS)}, or write module.Class."
        )
    found: type[Term] = load_own(name, "--objectives", Term)
    found.name = found.name or found.__name__
    return found
