"""A tracker that records its calls, and fails where asked."""

import sys
from typing import Any, ClassVar

from accelerate.tracking import GeneralTracker


class FakeTracker(GeneralTracker):
    """Records its calls; a call named in `faults` raises, or exits with "exits"."""

    name = "fake"
    requires_logging_directory = False
    calls: ClassVar[list[tuple[Any, ...]]] = []
    faults: ClassVar[dict[str, str]] = {}

    def __init__(self, project: str, **arguments: Any) -> None:
        super().__init__()
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
        fault = self.faults.get(name)
        if fault:
            raise SystemExit(fault) if fault == "exits" else ConnectionError(fault)
        self.calls.append((name, *values))
