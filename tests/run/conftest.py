"""Fixtures of the tests of starts."""

from collections.abc import Iterator

import pytest
from accelerate import PartialState

from mm_utils.run import output_folder


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Set up the state that a script's accelerator sets up; leave no folder locked."""
    PartialState()
    yield
    output_folder.unlock()
