"""What a term of the loss reads of rows besides media and captions, on its way into examples and batches."""

from collections.abc import Sequence
from typing import Any, ClassVar

import datasets
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mm_utils.data.media.medium import Shown


class ColumnReader:
    """How columns of the rows become part of an example and of a batch. It has no state: all of a class are equal.

    Rows without its `columns`, such as those of a stream, are not read.
    """

    columns: ClassVar[frozenset[str]]
    optional: ClassVar[bool] = False  # whether rows may lack the columns
    in_evaluation: ClassVar[bool] = True

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def source(self, rows: datasets.Dataset) -> str:
        """Return the column of the data set that everything is made of; a resumed run must have the same."""
        raise NotImplementedError

    def prepare(
        self, rows: datasets.Dataset, split: str, tokenizer: PreTrainedTokenizerBase, max_seq_length: int
    ) -> datasets.Dataset:
        """Return tokenised rows with the columns that examples are made of, computed once.

        Raises:
            ValueError: if the rows of this split lack what must be there, or if a value is wrong.
        """
        return rows

    def example(self, row: dict[str, Any], shown: Shown | None, seed: int | None) -> dict[str, Any]:
        """Return fields of an example.

        Args:
            row: the columns of a row.
            shown: the part of the medium; None where stored features of a frozen tower stand for it.
            seed: the run's seed, for draws that also depend on `row["epoch"]` and `row["id"]`; None in evaluation.
        """
        raise NotImplementedError

    def collate(self, examples: Sequence[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
        """Return tensors of a batch, the first dimension being the example; there may be no example."""
        raise NotImplementedError
