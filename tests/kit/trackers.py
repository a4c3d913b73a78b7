"""A tracker that records its calls, and fails or hangs where asked."""

import sys
import threading
from typing import Any, ClassVar

from accelerate.tracking import GeneralTracker

never = threading.Event()


class FakeTracker(GeneralTracker):
    """Records its calls; a call named in `faults` raises, exits with "exits" or, with "hang", does not return while the test runs."""

    name = "fake"
    requires_logging_directory = False
    calls: ClassVar[list[tuple[Any, ...]]] = []
    faults: ClassVar[dict[str, str]] = {}
    raised: ClassVar[list[str]] = []

    def __init__(self, project: str, **arguments: Any) -> None:
        super().__init__()
        # The lists of this test: a call that hung in an earlier test returns later and goes on.
        self.own_calls, self.own_faults, self.own_raised = self.calls, self.faults, self.raised
        self._call("init", project, arguments)

    @property
    def tracker(self) -> None:
        return None

    def start(self) -> None:
        self._call("start", *sys.argv[1:])

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._call("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._call("log", step, values)

    def finish(self) -> None:
        self._call("finish")

    def _call(self, name: str, *values: Any) -> None:
        fault = self.own_faults.get(name)
        if fault == "hang":
            never.wait(300)
        elif fault:
            self.own_raised.append(name)
            raise SystemExit(fault) if fault == "exits" else ConnectionError(fault)
        self.own_calls.append((name, *values))
