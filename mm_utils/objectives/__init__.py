"""What is optimised: terms of a loss, and the objective that adds them up."""

from mm_utils.objectives.terms import EmbeddingTerm, RowTerm, Term

__all__ = ["EmbeddingTerm", "RowTerm", "Term"]
