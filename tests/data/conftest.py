"""A tokenizer that knows the words of `numbered_rows`, and a cache of one's own."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.data.numbered_rows import new_tokenizer


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The datasets cache of one test."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return new_tokenizer()
