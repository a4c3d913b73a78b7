"""Signals that ask a run to stop: it finishes its step, saves, and exits with 128 + the signal's number.

SIGTERM comes from `kubectl delete`, `scancel` and launchers, SIGINT from the keyboard, SIGUSR1 from Slurm (`--signal=USR1@120`)
some time before its limit. A handler only takes a note, as anything more may meet the middle of anything; the training loop
looks at the note after every step, together with the other ranks, so all stop after the same one.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
_SAME = 2.0  # seconds; one that comes again within them is the same one, sent on by a launcher
_LONGEST = 60  # seconds that a data worker lives on after a signal, for the step that is to be finished
_NOTE = b"\nA signal asks the run to stop: it ends this step, saves and exits. Send it again to leave at once.\n"


class Interrupted(SystemExit):
    """The run was asked to stop and has saved.

    Args:
        number: of the signal; the exit status is 128 + it, as shells have it.
    """

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.number).name}"


class Interruption:
    """Within its context, signals are noted in `number`; a second one, later than at once, has its default effect.

    Data workers that are forked inside, which keyboards and launchers signal too, live on for a while; those that SIGTERM
    ends, as torch has it, are replaced by their loader. Outside the main thread, where handlers cannot be set, nothing is
    noted.
    """

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0
        self._process = os.getpid()
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: one of C's
        self._former = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.number:
            self.number, self._since = number, now
            if os.getpid() == self._process:
                with suppress(OSError):  # the keyboard's signal may have ended the reader, such as `tee`, before
                    os.write(2, _NOTE)
            else:
                signal.alarm(_LONGEST)
        elif number == self.number and now - self._since > _SAME:  # a launcher that ends has its children sent another
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
