"""Mistakes that a restart would repeat: workers raise them, Ray's controller, which loads this, ends the run."""

from typing import Any

from ray.train import UserCallback


class Refused(Exception):
    """A mistake that a restart would repeat; the message says what to do."""


class EndWhenRefused(UserCallback):
    """End the run at once when a worker was refused; Ray would restart it otherwise."""

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Raise the refusal: Ray does not try again after an error of its controller."""
        for error in worker_exceptions.values():
            cause = getattr(error, "_base_exc", error)  # in Ray's wrapper is what the script raised
            if isinstance(cause, Refused):
                raise cause
