"""Build the objective that `--objectives` names: terms with their weights."""

import itertools
import logging
from collections.abc import Mapping
from typing import Any

import datasets

from mm_utils.arguments import load_own
from mm_utils.data.batches.column_reader import ColumnReader
from mm_utils.model.arguments import COMPARES_NOTHING, ObjectiveArguments
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.captioning import Captioning
from mm_utils.objectives.contrastive import Distillation, InfoNCE, PairwiseSigmoid
from mm_utils.objectives.grounding.terms import MomentCovering, RegionPointing
from mm_utils.objectives.matching import Matching
from mm_utils.objectives.objective import JointObjective
from mm_utils.objectives.terms import EmbeddingTerm, Term

logger = logging.getLogger(__name__)

_TERMS = (InfoNCE, PairwiseSigmoid, Captioning, Matching, RegionPointing, MomentCovering, Distillation)
TERMS: dict[str, type[Term]] = {term.name: term for term in _TERMS}
HEADS = {head for term in _TERMS for head in term.heads}
"""The parts of the model that only some terms train."""


def readers_of(args: ObjectiveArguments) -> list[ColumnReader]:
    """Return what the terms read of rows besides media and captions."""
    return list(dict.fromkeys(reader for name in args.weights for reader in term_class(name).readers))


def check_terms(args: ObjectiveArguments, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if no term compares images and texts, or one cannot be trained with the other flags, given by name."""
    if not any(issubclass(term_class(name), EmbeddingTerm) for name in args.weights):
        raise ValueError(COMPARES_NOTHING.format(args.objectives))
    for name in args.weights:
        term = term_class(name)
        refuses = dict(term.refuses)
        if not all(reader.optional for reader in term.readers):
            refuses.setdefault("streaming", "reads media and captions alone")
        for given, reason in refuses.items():
            # 'projection mlp' -> 'projection', 'mlp'; 'cache_features' -> 'cache_features', ''
            flag, _, value = given.partition(" ")
            if settings.get(flag) == value if value else settings.get(flag):
                raise ValueError(f"--objectives has {name}, and --{given} {reason}. Drop one of them.")


def build_objective(
    model: FusionDualEncoderModel,
    args: ObjectiveArguments,
    seed: int,
    rows: datasets.Dataset | None = None,
) -> JointObjective:
    """Build the objective; add to the model what terms need, freeze what none trains.

    `rows` are the tokenised training rows; None for a stream.

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
    found: type[Term] = load_own(name, "--objectives", Term)
    found.name = found.name or found.__name__
    return found
