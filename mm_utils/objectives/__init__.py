"""What is optimised: terms of a loss, and the objective that adds them up."""

from mm_utils.objectives.terms import EmbeddingTerm, RowSums, Term, TermOnRows

__all__ = ["EmbeddingTerm", "RowSums", "Term", "TermOnRows"]
