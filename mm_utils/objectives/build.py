"""Build the objective that `--objectives` names: terms with their weights."""

import importlib
import itertools
import logging
import math
import os
import sys
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from mm_utils.arguments import arg
from mm_utils.extras.altered.captions import AlteredTokens
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.contrastive import (
    Altered,
    Contrastive,
    Distillation,
    InfoNCE,
    MomentCovering,
    PairwiseSigmoid,
    RegionPointing,
    SelfDistillation,
)
from mm_utils.objectives.joint import JointObjective
from mm_utils.objectives.language import Captioning, MaskedLanguageModelling
from mm_utils.objectives.matching import Matching
from mm_utils.objectives.packing import pack_captions
from mm_utils.objectives.terms import Term

logger = logging.getLogger(__name__)

CONTRASTIVE = (InfoNCE, PairwiseSigmoid)
OTHERS = (
    *(Altered, Matching, MaskedLanguageModelling, Captioning),
    *(RegionPointing, MomentCovering, SelfDistillation, Distillation),
)
NAMES = [term.name for term in (*CONTRASTIVE, *OTHERS)]
HEADS = ("fusion.match", "fusion.bridges", "fusion.cls_token", "token_head", "caption_adapter", "region_head")
"""The parts of the model that only some terms train."""


@dataclass
class ObjectiveArguments:
    """The terms of the loss and their weights."""

    objectives: str = arg(
        "contrastive:1,captioning:1",
        "Terms and weights: contrastive (InfoNCE) or sigmoid (SigLIP); altered (an image chooses its caption among ones with words "
        "or events in another order); matching (the fusion head classifies pairs); masked_lm and captioning (it predicts words); "
        "regions (phrases point into their boxes); moments (phrases find their spans of clips and sounds); self_distillation "
        "(soft targets of averaged weights, needs --ema_decay); distillation (those of --teacher_name_or_path); or module.Class, "
        "a term of your own.",
    )
    teacher_name_or_path: str | None = arg(
        None,
        "A larger dual encoder whose similarities the towers learn as soft targets, a folder or a Hub id as of "
        "--model_name_or_path; adds distillation:1 to --objectives unless it is there. It runs once over the training data.",
    )
    matryoshka_dims: str | None = arg(
        None,
        "Train the first 32, 64 and 128 numbers of an embedding to be one, too: 32,64,128. The contrastive or sigmoid loss is "
        "then the mean over these widths and the full one.",
    )
    hard_negatives: bool = arg(True, "Matching draws its negatives by similarity; false: uniformly.")
    mlm_probability: float = arg(0.15, "Share of the tokens that masked_lm masks.")
    whole_word_masking: bool = arg(False, "masked_lm masks all pieces of a word or none.")
    pack_captions: bool = arg(
        False,
        "Encode the captions of a batch in one row of tokens, without padding, in place of groups of about one length: less "
        "computing, and fewer kernels than of several groups. For GPUs, with bf16 or fp16; not measured on one yet.",
    )
    max_logit_scale: float | None = arg(
        None,
        "Upper bound of the inverse temperature; default: 100, or where a model starts that was trained above it.",
    )

    def __post_init__(self) -> None:
        self.weights, self.widths  # noqa: B018  (complain now, not after the data is loaded)
        if not 0 < self.mlm_probability < 1:
            raise ValueError(f"--mlm_probability is {self.mlm_probability}; give a share of the tokens in (0, 1).")

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each term, by name."""
        weights = {}
        for term in self.objectives.split(","):
            name, _, weight = term.strip().partition(":")
            try:
                weights[name] = float(weight or 1)
            except ValueError:
                raise ValueError(f"--objectives has {term!r}; write name:weight, e.g. matching:0.5.") from None
        if self.teacher_name_or_path:
            weights.setdefault(Distillation.name, 1.0)
        elif weights.get(Distillation.name):
            raise ValueError(
                f"--objectives is {self.objectives!r}; distillation learns from a teacher, and there is none. Give "
                "--teacher_name_or_path."
            )
        contrastive = [term.name for term in CONTRASTIVE if weights.get(term.name)]
        unknown = [name for name in weights if name not in NAMES and "." not in name]
        if unknown:
            raise ValueError(
                f"--objectives has {unknown[0]!r}; there is no such term. Choose of {', '.join(NAMES)}, or write module.Class."
            )
        if len(contrastive) != 1 or not all(0 <= weight < math.inf for weight in weights.values()):
            raise ValueError(
                f"--objectives is {self.objectives!r}; give contrastive:W or sigmoid:W with W above 0, and others with W of at "
                "least 0."
            )
        return {name: weight for name, weight in weights.items() if weight}

    @property
    def widths(self) -> list[int]:
        """The widths of `--matryoshka_dims`."""
        given = [word.strip() for word in (self.matryoshka_dims or "").split(",")] if self.matryoshka_dims else []
        if not all(word.isdecimal() and int(word) for word in given) or len(set(given)) < len(given):
            raise ValueError(
                f"--matryoshka_dims is {self.matryoshka_dims}; give different numbers of dimensions from 1 on, e.g. 32,64,128."
            )
        return [int(word) for word in given]

    @property
    def reads_regions(self) -> bool:
        """True if batches must hold regions, or moments (`mm_utils.extras.grounding.regions`)."""
        return bool(self._reading_regions)

    @property
    def _reading_regions(self) -> list[str]:
        return [name for name in self.weights if _class(name).reads_regions]

    def highest_scale(self, model: FusionDualEncoderModel) -> float:
        """Return the upper bound of the inverse temperature; SigLIP's checkpoints are at about 118."""
        return self.max_logit_scale or max(100.0, model.logit_scale.exp().item())

    def check(self, streaming: bool, cache_features: bool, patch_dropout: float) -> None:
        """Raise ValueError if regions or a teacher are asked for and the data lacks their needs."""
        if streaming and Distillation.name in self.weights:
            raise ValueError(
                f"--teacher_name_or_path is {self.teacher_name_or_path}; a teacher runs once over all rows, and --streaming "
                "has them never at hand. Drop one of them."
            )
        reasons = {
            "streaming": streaming and "reads no regions",
            "cache_features": cache_features and "keeps no regions",
            "patch_dropout": patch_dropout and "leaves no grid of patches",
        }
        for flag, reason in reasons.items():
            if reason and (names := self._reading_regions):
                raise ValueError(f"--objectives asks for {names[0]}, and --{flag} {reason}. Drop one of them.")


def build_objective(
    model: FusionDualEncoderModel,
    args: ObjectiveArguments,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> JointObjective:
    """Build the objective; add to the model what terms need, freeze what none trains.

    Raises:
        ValueError: if a term is not found, or needs a part that the model cannot have, such as a fusion head.
    """
    weights = {_term(name, args, seed, tokenizer): weight for name, weight in args.weights.items()}
    if not any(isinstance(term, PairwiseSigmoid) for term in weights):
        model.remove_logit_bias()
    for term in weights:
        if term.pairs_per_image and model.fusion is None:
            raise ValueError(
                f"--objectives asks for {term.name}, and the model has no fusion head. Set --fusion_layers above 0."
            )
        term.prepare(model)
    objective = JointObjective(model, weights)
    if args.pack_captions and not (objective.groups_texts and pack_captions(model)):
        logger.warning(
            "--pack_captions is true; a %s cannot be packed, so its captions go in groups of about one length",
            type(model.text_model).__name__,
        )
    if model.fusion is not None:
        model.fusion.requires_grad_(objective.pairs_per_image > 0)
    trained = {head for term in weights for head in term.heads}
    # DDP would wait for the gradients of parts that no term trains.
    for name, part in itertools.chain(model.named_modules(), model.named_parameters()):
        if name in HEADS:
            part.requires_grad_(name in trained)
    return objective


def _term(name: str, args: ObjectiveArguments, seed: int, tokenizer: PreTrainedTokenizerBase | None) -> Term:
    if name == Matching.name:
        return Matching(seed, hard=args.hard_negatives)
    if name == Altered.name:
        assert tokenizer is not None
        return Altered(AlteredTokens(tokenizer).of, seed)
    if name == MaskedLanguageModelling.name:
        assert tokenizer is not None
        return MaskedLanguageModelling(tokenizer, seed, args.mlm_probability, args.whole_word_masking)
    found = _class(name)
    return found(seed, args.widths) if issubclass(found, Contrastive) else found(seed)


def _class(name: str) -> type[Term]:
    known: dict[str, type[Term]] = {term.name: term for term in (*CONTRASTIVE, *OTHERS)}
    return known.get(name) or _own_term(name)


def _own_term(path: str) -> type[Term]:
    """Import a term given as module.Class, from the current folder or an installed package."""
    module, _, name = path.rpartition(".")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"--objectives has {path}; {error}. Put {module.partition('.')[0]}.py in the current folder, with a class {name}."
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    if not (isinstance(found, type) and issubclass(found, Term)):
        raise ValueError(f"--objectives has {path}; that is no subclass of mm_utils.objectives.Term. Make it one.")
    found.name = found.name or name
    return found
