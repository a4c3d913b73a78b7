"""A tokenizer that knows the words of `numbered_rows`."""

import pytest
from transformers import PreTrainedTokenizerFast

from tests.kit.numbered_rows import new_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return new_tokenizer()
