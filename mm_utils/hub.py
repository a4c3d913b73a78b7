"""Push a run's output folder to the Hugging Face Hub without ever endangering the run.

What is to be pushed is laid out on the disk first (`mm_utils.spool`) and stays there until it is on the Hub: a push that
fails is tried again at the next save, in growing pauses meanwhile, at the end of training, and when the run is resumed.
Each try is a process of its own (`mm_utils.upload`) with a limit on its time, so that a Hub that never answers cannot hold
the run. Call all of it on one process only.
"""

import json
import logging
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from mm_utils.arguments import arg
from mm_utils.safe_text import one_line, printable, redact
from mm_utils.spool import Entry, Spool

logger = logging.getLogger(__name__)

STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")
SLOWEST = 1e6  # bytes per second that a push may count on
LONGEST_PAUSE = 1800.0


@dataclass
class HubArguments:
    """Where and when to push. The token comes from `hf auth login` or HF_TOKEN and is never a flag."""

    push_to_hub: bool = arg(False, "Push the model to the Hugging Face Hub.")
    hub_model_id: str | None = arg(None, "Repository: 'name' or 'namespace/name'; by default output_dir's name.")
    hub_private_repo: bool = arg(False, "Create the repository as private; one that exists keeps its visibility.")
    hub_strategy: str = arg(
        "end",
        "end: push once, at the end; every_save: the model at every save; checkpoint: and the newest checkpoint as "
        "last-checkpoint; all_checkpoints: and every checkpoint under its own name.",
        choices=list(STRATEGIES),
    )

    def __post_init__(self) -> None:
        if self.hub_strategy not in STRATEGIES:
            raise ValueError(f"--hub_strategy is {self.hub_strategy!r}; unknown. Choose from {', '.join(STRATEGIES)}.")
        if self.hub_model_id is None:
            return
        try:
            validate_repo_id(self.hub_model_id)
        except HFValidationError as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ValueError(
                f"--hub_model_id is {self.hub_model_id!r}; {reason}. Give 'name' or 'namespace/name'."
            ) from error


@dataclass
class Failure:
    """Why a push is not on the Hub, and whether trying again at once may help."""

    reason: str
    transient: bool


class HubPusher:
    """Create the repository, push during training and at the end; report failures, never raise them."""

    def __init__(
        self,
        args: HubArguments,
        output_dir: str | Path,
        retry_delays: Sequence[float] = (2.0, 8.0),
        pause: float = 60.0,
        patience: float = 600.0,
    ) -> None:
        """
        Args:
            args: the flags.
            output_dir: what is pushed.
            retry_delays: seconds before each new try at the end of training, after what may pass.
            pause: seconds before the first new try during training; each further pause is twice as long.
            patience: seconds that a push may take, besides those for its bytes at 1 MB/s.
        """
        self.args = args
        self.output_dir = Path(output_dir).absolute()
        self.retry_delays, self.pause, self.patience = tuple(retry_delays), pause, patience
        self.repo_id = args.hub_model_id or _repo_name(self.output_dir)
        self.spool = Spool(self.output_dir)
        self._repo_exists = False
        self._lock = threading.Lock()  # of the three below and of what is in the spool
        self._busy: Entry | None = None
        self._worker: threading.Thread | None = None
        self._ending = False
        self._wake = threading.Event()

    def start(self) -> bool:
        """Create the repository now, so that a bad token shows at once; whether it can be pushed to.

        What an earlier start of this run could not push is pushed in the background.
        """
        if not self.args.push_to_hub:
            return False
        failure = self._call(min(30.0, self.patience))
        if failure is not None:
            logger.warning(
                "the Hub repository is %s; it cannot be opened: %s. Training goes on and the push is tried again at "
                "the end; check `hf auth whoami`",
                self.repo_id,
                failure.reason,
            )
        with self._lock:
            if waiting := self.spool.entries():
                logger.info("pushing what an earlier start of this run could not: '%s'", waiting[-1].message)
                self._go()
        return failure is None

    def push(self, message: str, blocking: bool, checkpoint: Path | None = None) -> bool:
        """Push the output folder as one commit; with `blocking`, True says that all of it is on the Hub.

        `blocking=False` is for saves during training: it returns at once, True if the push will be tried until it
        succeeds, False under strategy "end" or if it could not be laid out. The model then comes from `checkpoint`. The
        strategies that push checkpoints take `checkpoint`, or without it those in the output folder.
        """
        if not self.args.push_to_hub or (not blocking and self.args.hub_strategy == "end"):
            return False
        if checkpoint is not None and not checkpoint.is_dir():
            logger.warning("%s was removed before it could be pushed", checkpoint)
            return False
        try:
            with self._lock:
                self.spool.add(message, self.args.hub_strategy, checkpoint, under_way=not blocking)
                self.spool.tidy(self._busy)
                if not blocking:
                    self._go()
            return self._push_all() if blocking else True
        except OSError as error:
            self._report(one_line(error))
            return False

    def waiting(self) -> list[str]:
        """Messages of the pushes that are not on the Hub yet, oldest first."""
        with self._lock:
            return [entry.message for entry in self.spool.entries()]

    def command(self) -> str:
        """The shell command that pushes the output folder by hand."""
        private = " --private" if self.args.hub_private_repo else ""
        left_out = " ".join(f'--exclude "{name}"' for name in ("checkpoint-*/*", ".*", "*.tmp", "tracker.json"))
        return f"hf upload {self.repo_id} {shlex.quote(str(self.output_dir))} . {left_out}{private}"

    # -- trying -----------------------------------------------------------------------------------------------------

    def _go(self) -> None:
        """Have a thread push what waits, and try again now if it is in a pause."""
        self._wake.set()
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, daemon=True, name="hub-push")
            self._worker.start()

    def _work(self) -> None:
        """Push until nothing waits, or the end of training takes over."""
        pause = self.pause
        while True:
            self._wake.clear()
            try:
                failure = self._round(deadline=None)
            except OSError as error:
                failure = Failure(one_line(error), transient=False)
            with self._lock:
                if self._ending or not self.spool.entries():
                    self._worker = None
                    return
            if failure is None:
                pause = self.pause
                continue
            level = logging.WARNING if pause == self.pause else logging.INFO
            logger.log(level, "a push to %s failed: %s. It is kept and tried again", self.repo_id, failure.reason)
            if not self._wake.wait(pause):
                pause = min(2 * pause, LONGEST_PAUSE)

    def _push_all(self) -> bool:
        """Push what waits, a few times within one limit of time."""
        with self._lock:
            worker, self._ending = self._worker, True
            self._wake.set()
        if worker is not None:
            logger.info("waiting for the push in progress")
            worker.join()
        self._ending = False
        deadline = time.monotonic() + self.patience + sum(entry.size for entry in self.spool.entries()) / SLOWEST
        delays = list(self.retry_delays)
        while (failure := self._round(deadline)) is not None:
            if not delays or not failure.transient or time.monotonic() + delays[0] > deadline:
                self._report(failure.reason)
                return False
            logger.info("a push to %s failed: %s; trying again in %g s", self.repo_id, failure.reason, delays[0])
            time.sleep(delays.pop(0))
        return True

    def _round(self, deadline: float | None) -> Failure | None:
        """Try each push that waits once, the newest first, as long as the Hub answers; what failed, if anything."""
        tried: set[Path] = set()
        failure = None
        while failure is None or not failure.transient:
            with self._lock:
                self.spool.tidy(None)
                left = [entry for entry in self.spool.entries() if entry.path not in tried]
                if not left:
                    break
                self._busy = entry = left[-1]
            tried.add(entry.path)
            limit = self.patience + entry.size / SLOWEST
            if deadline is not None:
                limit = max(1.0, min(limit, deadline - time.monotonic()))
            found = self._call(limit, entry)
            failure = found or failure
            with self._lock:
                self._busy = None
                if found is None:
                    logger.info("pushed '%s' to %s", entry.message, self.repo_id)
                    entry.remove()
        return failure

    def _call(self, limit: float, entry: Entry | None = None) -> Failure | None:
        """Create the repository if need be and push `entry`, in a process that lives `limit` seconds at most."""
        work: dict[str, Any] = {"repo_id": self.repo_id, "private": self.args.hub_private_repo, "parent": os.getpid()}
        if entry is not None:
            # A checkpoint is replaced as a whole: files of the one before would not belong to it.
            old = ["last-checkpoint/*"] if (entry.files / "last-checkpoint").is_dir() else None
            work |= {"folder": str(entry.files), "message": entry.message, "delete_patterns": old}
        package = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        try:
            done = subprocess.run(
                [sys.executable, "-m", "mm_utils.upload"],
                input=json.dumps({**work, "create": not self._repo_exists}),
                capture_output=True,
                text=True,
                timeout=limit,
                env={**os.environ, "PYTHONPATH": path, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
                start_new_session=True,  # Ctrl-C interrupts the training, which saves and goes; not the push
            )
            answer = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            return Failure(f"not done within {limit:.0f} seconds", transient=True)
        except OSError as error:
            return Failure(one_line(error), transient=True)
        except ValueError:
            last = printable(redact(done.stderr.strip().rpartition("\n")[2]))
            return Failure(f"the client ended with status {done.returncode} {last[:200]}".rstrip(". "), transient=True)
        self.repo_id = answer["repo_id"]
        if "error" in answer:
            return Failure(answer["error"], answer["transient"])
        self._repo_exists = True
        return None

    def _report(self, reason: str) -> None:
        logger.warning(
            "the push to %s is incomplete; %s. The model is safe in %s, and the push is tried again when the run is "
            "resumed; push it later with: %s",
            self.repo_id,
            reason,
            self.output_dir,
            self.command(),
        )


def _repo_name(output_dir: Path) -> str:
    """`output_dir`'s name with what the Hub does not accept in a repository's name replaced."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", output_dir.resolve().name)
    name = re.sub(r"\.git$", "", re.sub(r"--+|\.\.+", "-", name)).strip("-.")
    return name[:96].rstrip("-.") or "model"
