"""Call a script's `main` and end with one line where a user's mistake ends it; log to stderr without secrets.

It stands apart from `mm_utils.run.start` because scripts that train nothing load it alone.
"""

import logging
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import datasets
import transformers

from mm_utils import distributed
from mm_utils.distributed import RunError
from mm_utils.reliability import failures
from mm_utils.text import SafeFormatter, printable, redact


def run_script(main: Callable[[], Any]) -> None:
    """Call a script's `main`; a user's mistake ends with one line and exit status 1.

    With several processes, the first that fails says why and ends the others: see `mm_utils.reliability.failures`.
    """
    monitor = failures.start_monitor()
    try:
        main()
        if workers := sys.modules.get("mm_utils.data.batches.workers"):  # only who has loaded it has any
            workers.end_workers()
    except (RunError, ValueError, FloatingPointError) as error:
        if monitor.report(error):
            logging.getLogger("mm_utils").error("%s", error)
            logging.getLogger("mm_utils").debug("Traceback:", exc_info=True)
        monitor.fail()
    except Exception as error:
        if monitor.is_alone:
            raise
        if monitor.report(error):
            logging.getLogger("mm_utils").exception("Process %d failed", distributed.rank())
        monitor.fail()
    except SystemExit:
        monitor.finish()
        raise
    else:
        monitor.finish()


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
