"""The flag that tries a run in place of running it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mm_utils.arguments import Parsed, arg
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.callbacks import RunCallback


@dataclass
class DryRunArguments:
    """A trial before the run."""

    dry_run: bool = arg(
        False, "Try the run on a few pairs, log what it will take in time, memory and disk, and leave nothing."
    )


class DryRun(RunCallback):
    """Run the script on a few pairs in place of the run."""

    flag = "dry_run"
    arguments = DryRunArguments

    def __init__(self, given: Parsed):
        self.given = given

    @classmethod
    def attach(cls, given: Parsed) -> "DryRun":
        """Return the callback, which reads all flags."""
        return cls(given)

    def instead(self, script: str, main: Callable[..., Any], argv: Sequence[str] | None) -> dict[str, float]:
        """Return the forecast."""
        from mm_utils.extras.dry_run.dry_run import dry_run

        return dry_run(main, script, argv, self.given[TrainingArguments], self.given.settings)
