"""Call a script's `main` and end with one line where a user's mistake ends it; log to stderr without secrets.

It stands apart from `mm_utils.run.start` because scripts that train nothing load it alone.
"""

import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import datasets
import transformers

from mm_utils import distributed
from mm_utils.distributed import RunError
from mm_utils.files import errno_of
from mm_utils.reliability import failures
from mm_utils.text import SafeFormatter, one_line, printable, redact

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REMEDIES = dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "Change its permissions, or give another folder")
_REMEDIES |= dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "Give a folder, or the name of a new one")


def run_script(main: Callable[[], Any]) -> None:
    """Call a script's `main`; a user's mistake ends with one line and exit status 1.

    With several processes, the first that fails says why and ends the others: see `mm_utils.reliability.failures`.
    """
    monitor = failures.start_monitor()
    try:
        main()
        if "torch" in sys.modules:  # only who has loaded it has any
            from mm_utils.data.batches.workers import end_workers

            end_workers()
    except KeyboardInterrupt:
        sys.excepthook = lambda *_: None  # the exit status stays that of the signal, without Python's report
        raise
    except Exception as error:
        _report(monitor, error)
        monitor.fail()
    except SystemExit:
        monitor.finish()
        raise
    else:
        monitor.finish()


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
    elif isinstance(error, RuntimeError) and str(error).startswith("DataLoader "):  # torch raises it anywhere
        what = str(error).split(". ")[0].strip(".")  # without torch's own advice
        line = (
            f"{what}. Its memory or /dev/shm may have been full: pass a lower --dataloader_num_workers, or 0, or start the "
            "container with a larger --shm-size, and resume."
        )
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
