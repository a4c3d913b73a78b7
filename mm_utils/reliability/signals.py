"""Stop a run on a signal: finish the step, save, exit with 128 + the signal's number.

SIGTERM comes from `kubectl delete`, `scancel` and launchers, SIGINT from the keyboard, SIGUSR1 from Slurm (`--signal=USR1@120`)
some time before its limit. The handler only records the signal, as it may interrupt the program anywhere; the training loop
compares the records of all ranks after every step, so all stop after the same step.
"""

import logging
import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
_REPEAT_SECONDS = 2.0  # the same signal within them is the first one again, forwarded by a launcher
_MESSAGE = b"\nA signal asks the run to stop: it ends this step or evaluation, saves and exits. Send it again to leave at once.\n"


class Interruption:
    """Record signals within its context; a repeated signal has its default effect.

    Data workers that are forked inside get the signals of keyboards and launchers, too, and survive them; torch ends those whose
    main process is gone. Outside the main thread, as under Ray, no handlers can be set, and nothing is recorded.

    Attributes:
        number: the first signal's number, or 0.
    """

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0
        self._process = os.getpid()
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._record) for number in _SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: a handler of C code
        self._former = {}

    def _record(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.number:
            self.number = number
            self._since = now
            if os.getpid() == self._process:
                with suppress(OSError):  # the keyboard's signal may have ended the reader, such as `tee`, before
                    # not by the logger: the program that is interrupted may hold its lock
                    os.write(2, _MESSAGE)
        # Another number comes from launchers that end
        elif number == self.number and now - self._since > _REPEAT_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class Leaving(Interruption):
    """End the process at the first signal, and say how to go on: where a resumed run does again what is being done."""

    def __init__(self, command: str):
        super().__init__()
        self.command = command

    def _record(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        self.number = number
        raise SystemExit(128 + number)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.number:
            logger.warning("Stopped by a signal, after the last step of a stage. Resume: %s", self.command)
