"""Call a script's `main` and end with one line where a user's mistake ends it; log to stderr without secrets.

It stands apart from `mm_utils.run.start` because scripts that train nothing load it alone.
"""

import errno
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import datasets
import transformers

from mm_utils import distributed
from mm_utils.distributed import RunError
from mm_utils.files import errno_of
from mm_utils.reliability import failures
from mm_utils.text import SafeFormatter, one_line, printable, redact

EXIT_SECONDS = 60.0  # for what libraries do at the exit of a process, such as a tracker that sends the rest of its log
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDIES = dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "Change its permissions, or give another folder")
_REMEDIES |= dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "Give a folder, or the name of a new one")


def run_script(main: Callable[[], Any]) -> None:
    """Call a script's `main`; a user's mistake ends with one line and exit status 1.

    With several processes, the first that fails says why and ends the others: see `mm_utils.reliability.failures`.
    """
    monitor, status = failures.start_monitor(), 1
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_Log, streams)  # type: ignore[assignment]
    try:
        main()
        if workers := sys.modules.get("mm_utils.data.batches.workers"):  # only who has loaded it has any
            workers.end_workers()
    except KeyboardInterrupt:
        status = 130
        sys.excepthook = lambda *_: None  # the exit status stays that of the signal, without Python's report
        raise
    except Exception as error:
        _report(monitor, error)
        monitor.fail()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        monitor.finish()
        raise
    else:
        status = 0
        monitor.finish()
    finally:
        if getattr(main, "__module__", "") == "__main__":  # not where a notebook or a test has called it
            threading.Thread(target=_limit_exit, args=(status,), daemon=True, name="exit").start()
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = streams


def _limit_exit(status: int) -> None:
    """End the process with its status if libraries keep it longer than `EXIT_SECONDS`, and name them."""
    main = threading.main_thread()
    main.join()  # until the interpreter begins to exit: it waits for threads, and then calls what is registered with `atexit`
    time.sleep(EXIT_SECONDS)
    waiting = {thread.ident for thread in threading.enumerate() if not thread.daemon} | {main.ident}
    names = list[str]()
    for ident, frame in sys._current_frames().items():
        modules = [each.f_globals.get("__name__", "").split(".")[0] for each, _ in traceback.walk_stack(frame)]
        own = [name for name in modules if name not in sys.stdlib_module_names] if ident in waiting else []
        names += own[-1:]  # where its work began
    logging.getLogger(__name__).warning(
        "%s kept the finished process for %g seconds, so it ends now, with status %d",
        " and ".join(dict.fromkeys(names)) or "A library",
        EXIT_SECONDS,
        status,
    )
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)


class _Log:
    """The standard output or error: closed, a broken pipe or a file on a full disk, it costs what is shown and not the run.

    Attributes:
        lost: the error by which something was lost, if it was.
    """

    def __init__(self, stream: Any):
        self.lost = OSError(errno.EBADF, "it is closed") if stream is None else None
        self._stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def write(self, text: str) -> int:
        self._do(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._do(self._stream.flush)

    def _do(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except (OSError, ValueError) as error:  # a ValueError says that a library has closed it
            self.lost = error if isinstance(error, OSError) else OSError(errno.EBADF, str(error))
            # What waits in its buffer goes nowhere, so that it fails no later line and no exit.
            with suppress(OSError, ValueError), open(os.devnull, "w", encoding="utf-8") as nowhere:
                kept, at = os.dup(self._stream.fileno()), self._stream.fileno()
                os.dup2(nowhere.fileno(), at)
                self._stream.flush()
                os.dup2(kept, at)
                os.close(kept)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_out_of_memory(error: Exception) -> bool:
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    from mm_utils.objectives.grad_cache import is_out_of_memory  # only who has loaded torch has such an error

    return is_out_of_memory(error)


def _report(monitor: failures.FailureMonitor, error: Exception) -> None:
    """Log a user's mistake or a full disk in one line, and anything else with its traceback."""
    logger, line = logging.getLogger("mm_utils"), ""
    if isinstance(error, (RunError, ValueError, FloatingPointError)):
        line = str(error)
    elif (number := errno_of(error)) in _FULL or (number in _REMEDIES and getattr(error, "filename", None)):
        place = getattr(error, "filename", None) or "A file of this run, or of a cache"
        remedy = _REMEDIES.get(number, "Free some space there, or give a folder that can be written")
        line = f"{place}: {os.strerror(number)}. {remedy}."
    elif _is_out_of_memory(error):
        line = f"The memory is full; {one_line(error)}. Give smaller batches, images or models."
    elif monitor.is_alone:
        raise error
    if monitor.report(error):
        logger.error("%s", line or f"Process {distributed.rank()} failed", exc_info=None if line else error)
        if line:
            logger.debug("Traceback:", exc_info=error)


def set_up_logging(main: bool = True, local_main: bool = True) -> None:
    """Log to stderr with the time; other processes only warn, one a machine shows bars."""
    level = logging.INFO if main else logging.WARNING
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    sys.excepthook = _print_uncaught
    for name in ("mm_utils", "scripts", "__main__"):
        logging.getLogger(name).setLevel(level)
    transformers.logging.set_verbosity_error()
    if not local_main:
        datasets.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def _print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print Python's own report, which quotes addresses and command lines, without secrets."""
    sys.stderr.write(printable(redact("".join(traceback.format_exception(kind, error, trace)))))
