"""The tokenizer of the numbered rows."""

from tests.data.conftest import tokenizer  # noqa: F401
