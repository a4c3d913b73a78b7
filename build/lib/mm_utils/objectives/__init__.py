"""What is optimised: terms of a loss, and the objective that adds them up."""

from mm_utils.objectives.build import ObjectiveArguments, build_objective
from mm_utils.objectives.joint import JointObjective, Objective
from mm_utils.objectives.terms import EmbeddingTerm, RowTerm, Term

__all__ = [
    "EmbeddingTerm",
    "JointObjective",
    "Objective",
    "ObjectiveArguments",
    "RowTerm",
    "Term",
    "build_objective",
]
