"""The tokenizer of the numbered rows, for extras too."""

from tests.data.conftest import tokenizer  # noqa: F401
