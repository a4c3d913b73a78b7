"""Call a script's `main` and end with one line where a user's mistake ends it; log to stderr without secrets.

It stands apart from `mm_utils.run.start` because scripts that train nothing load it alone.
"""

import ctypes
import errno
import faulthandler
import gc
import io
import json
import logging
import os
import platform
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import datasets
import torch
import transformers
from tqdm.auto import tqdm

from mm_utils import cores, distributed
from mm_utils.arguments import end_before_the_start
from mm_utils.data.batches.workers import end_workers
from mm_utils.distributed import RunError
from mm_utils.files import errno_of
from mm_utils.text import SafeFormatter, one_line, passes_own_code, printable, redact

GRACE_SECONDS = 2.0  # in which a launcher ends the other processes of one that failed
CLEANUP_SECONDS = 6.0  # after a failure, for what Python waits for at its exit
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REMEDIES = dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "Change its permissions, or give another folder")
_REMEDIES |= dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "Give a folder, or the name of a new one")
_SHARED = "Pass a lower --dataloader_num_workers, or 0, or start the container with a larger --shm-size, and resume."


def run_script(main: Callable[[], Any], left: str = "What was not complete is not kept.") -> None:
    """Call a script's `main`; what ends it is logged in one line, or with its traceback, and the exit status is 1.

    Whatever ends it, its workers end, and after a failure so does the process, seconds later. When one of several processes has
    failed, its launcher ends the others. `left` says what a stopped script leaves on disk.
    """
    gc.enable()  # `parse_first` has turned it off
    _outlive_readers()
    _stop_at_sigterm()
    status: Any = 1
    try:
        main()
        status = 0
    except KeyboardInterrupt as stop:
        number = next(iter(stop.args), signal.SIGINT)  # SIGTERM's number, see `stop`; Ctrl-C gives none
        status = 128 + number  # 130 after Ctrl-C, 143 after SIGTERM
        if distributed.rank() == 0:
            logging.getLogger("mm_utils").warning("Stopped by %s. %s", signal.Signals(number).name, left)
        sys.exit(status)
    except SystemExit as end:
        status = end.code
        if not status and passes_own_code(end):  # whoever started the run would take it for done
            status = 1
            logging.getLogger("mm_utils").error(
                "sys.exit(0) in code of yours ended the run before its end. Set control.should_training_stop = True in a callback to "
                "end a stage, or go on with --resume_from_checkpoint latest."
            )
            sys.exit(status)
        raise
    except Exception as error:
        line = explained(error)
        _tell_launcher(line or "".join(traceback.format_exception(error)))
        if distributed.world_size() > 1:
            _give_way(error)
        elif not line:
            raise
        logger = logging.getLogger("mm_utils")
        logger.error("%s", line or f"Process {distributed.rank()} failed", exc_info=None if line else error)
        if line:
            logger.debug("Traceback:", exc_info=error)
            sys.unraisablehook = lambda *_: None  # of what was half made, such as a loader's processes
        sys.exit(1)
    finally:
        end_workers()
        _end_soon(status if status is None or isinstance(status, int) else 1)


def _stop_at_sigterm() -> None:
    """Let SIGTERM end a script as Ctrl-C does, in this process and in none that is forked."""
    process = os.getpid()
    if signal.getsignal(signal.SIGINT) is end_before_the_start:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def stop(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == process:
            raise KeyboardInterrupt(number)
        os.kill(os.getpid(), number)  # a forked process ends as it would without this handler

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, stop)


def _end_soon(status: int | None) -> None:
    """Leave little time to what Python waits for at its exit: a push that hangs, a process group whose peer is gone.

    Of a run that is done, only threads that go on are not waited for.
    """

    def end() -> None:
        main = threading.main_thread()
        main.join()  # in a test or a notebook it goes on
        time.sleep(CLEANUP_SECONDS)
        names = [each.name for each in threading.enumerate() if not each.daemon and each is not main]
        if names:
            logging.getLogger("mm_utils").warning(
                "Of the threads of this run, %s still runs and is ended now. Whoever starts one ends it in on_train_end.",
                ", ".join(names),
            )
        if status or names:
            with suppress(OSError):
                sys.stdout.flush()
            os._exit(status or 0)

    threading.Thread(target=end, daemon=True).start()
    if status and distributed.world_size() > 1:  # also where no thread of Python runs any more
        nowhere = os.open(os.devnull, os.O_WRONLY)
        faulthandler.dump_traceback_later(CLEANUP_SECONDS + 1, exit=True, file=nowhere)


def _tell_launcher(text: str) -> None:
    """Leave a message for the last lines of torchrun, and of accelerate, which uses it: they name the process that failed first."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": printable(redact(text)), "timestamp": int(time.time())}
        with suppress(OSError):
            Path(path).write_text(json.dumps(message))


class _Lasting(io.FileIO):
    """A stream whose reader may end, as that of `| head` does: what is written then is lost, and the run goes on."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError:
            return memoryview(data).nbytes


def _outlive_readers() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:  # not that of a notebook or a test
            file = _Lasting(stream.fileno(), "w", closefd=False)
            settings = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering", "write_through")}
            buffer: Any = file if stream.write_through else io.BufferedWriter(file)
            setattr(sys, name, io.TextIOWrapper(buffer, **settings))


def _give_way(error: Exception) -> None:
    """Let the process that failed first, or the first of those that fail alike, say so: the launcher then ends this one."""
    if distributed.is_lost_connection(error):
        # who lost a connection speaks last, as the process that it lost knows why
        time.sleep(3 * GRACE_SECONDS)
    elif int(os.environ.get("LOCAL_RANK", "0")):
        time.sleep(GRACE_SECONDS)


def explained(error: Exception) -> str:
    """Return what a user's mistake, a lost process, or a disk or memory that is full means in one line; else ""."""
    if isinstance(error, RunError):
        return str(error)
    if isinstance(error, (ValueError, FloatingPointError)):
        text = str(error)
        if "\nOriginal Traceback" in text:  # torch's message on an error of a data worker
            text = text.rpartition(f"\n{type(error).__name__}: ")[2]
        return "" if passes_own_code(error) else text
    number = errno_of(error)
    place = getattr(error, "filename", None)
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if number in _FULL and not place and any("multiprocessing" in file for file in files):
        return f"/dev/shm: {os.strerror(number)}. {_SHARED}"
    if number == errno.EMFILE or str(error).startswith("Too many open files"):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"Too many open files; {limit} is the limit. Raise it with ulimit -n, or pass a lower --dataloader_num_workers."
    if number in _FULL or (number in _REMEDIES and place):
        remedy = _REMEDIES.get(number, "Free some space there, or give a folder that can be written")
        return f"{place or 'A file of this run, or of a cache'}: {os.strerror(number)}. {remedy}."
    if isinstance(error, RuntimeError) and str(error).startswith("DataLoader "):  # torch raises it anywhere
        what = str(error).split(". ")[0].strip(".")  # without torch's own advice
        return f"{what}. Its memory or /dev/shm may have been full. {_SHARED}"
    from mm_utils.objectives.grad_cache import is_out_of_memory  # which a script that trains nothing does not load

    if isinstance(error, MemoryError) or number == errno.ENOMEM or is_out_of_memory(error):
        return f"The memory is full; {one_line(error)}. Give smaller batches, images or models."
    if distributed.world_size() > 1 and distributed.is_lost_connection(error):
        return (
            f"Process {distributed.rank()} lost the connection to another one, which has ended; its message or its launcher "
            f"says why. ({one_line(error, 200)})"
        )
    return ""


def set_up_logging(main: bool = True, local_main: bool = True) -> None:
    """Log to stderr with the time; other processes only warn, one a machine shows bars."""
    level = logging.INFO if main else logging.WARNING
    handler = _BesideBars()
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    sys.excepthook = _print_uncaught
    for name in ("mm_utils", "scripts", "__main__"):
        logging.getLogger(name).setLevel(level)
    transformers.logging.set_verbosity_error()
    if not local_main:
        datasets.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def use_cpu_well() -> None:
    """Use all cores, or OMP_NUM_THREADS of the launch; let the allocator keep its memory.

    glibc returns the memory of every large tensor to the kernel, which clears it again for the next one: with MobileNetV2 at
    224 px that was two thirds of the time. The numbers are M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD of malloc.h.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted == "1" and not {"ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"}.isdisjoint(os.environ):
        wanted = ""  # these launchers set 1 where nobody has set any
    torch.set_num_threads(int(wanted) if wanted.isdigit() and int(wanted) else max(1, cores.cores_per_process()))
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for option, value in ((-4, 0), (-1, -1), (-2, 2**28)):
            libc.mallopt(option, value)


class _BesideBars(logging.StreamHandler):
    """A line of the log begins a line, also where a progress bar stands."""

    def emit(self, record: logging.LogRecord) -> None:
        # Without the lock, which forked processes share: one that is killed while it logs would hold it for ever.
        with tqdm.external_write_mode(file=self.stream, nolock=True):
            if getattr(tqdm, "_instances", ()) and not self.stream.isatty():  # there no bar can be taken back
                self.stream.write("\n")
            super().emit(record)


def _print_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print Python's own report, which quotes addresses and command lines, without secrets."""
    bar = "\n" if getattr(tqdm, "_instances", ()) else ""  # a bar's line
    sys.stderr.write(bar + printable(redact("".join(traceback.format_exception(kind, error, trace)))))
