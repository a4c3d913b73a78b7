"""Push one folder to the Hub, in a process of its own.

Usage: `python -m mm_utils.extras.hub.upload PARENT_PID < work.json`.

A client that waits for a server which never answers cannot be stopped from inside its process; this process can be killed.
It imports nothing slow and ends with its parent process.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from mm_utils.text import one_line, printable, redact

# The client's HTTP library is requests, httpx or httpx2, by version. The library's common error is the last base class of the
# client's own error that is not a built-in one.
_ERRORS: list[type[Exception]] = [
    HfHubHTTPError,
    *(base for base in HfHubHTTPError.__mro__ if issubclass(base, Exception) and base.__module__ != "builtins"),
]
CLIENT_ERROR = _ERRORS[-1]
# RuntimeError wraps the errors of a parallel upload; LookupError and ValueError are answers that are not the Hub's.
PUSH_ERRORS: tuple[type[Exception], ...] = (CLIENT_ERROR, OSError, RuntimeError, ValueError, LookupError)
RETRY_DELAYS = (2.0, 8.0)  # seconds before each retry after a server error or a lost connection
_TIMEOUT = 600.0  # seconds
_MIN_BYTES_PER_SECOND = 1e6  # a slower upload times out


def upload_limit(size: int, timeout: float = _TIMEOUT) -> float:
    """Return the seconds that a push may take: `timeout`, and its bytes at 1 MB/s."""
    return timeout + size / _MIN_BYTES_PER_SECOND


def upload_apart(limit: float, **work: Any) -> tuple[str, str | None]:
    """Call `upload` in a process that is killed after `limit` seconds.

    Returns:
        The repository, with its namespace once it is created, and the reason of a failure as a line, or None.
    """
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mm_utils.extras.hub.upload", str(os.getpid())],
            input=json.dumps(work),
            capture_output=True,
            text=True,
            timeout=limit,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            start_new_session=True,  # Ctrl-C stops the training, which saves first; it must not stop the push
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return work["repo_id"], f"not done within {limit:.0f} seconds"
    except OSError as error:
        return work["repo_id"], one_line(error)
    except ValueError:
        last = printable(redact(done.stderr.strip().rpartition("\n")[2]))
        return work["repo_id"], f"the client ended with status {done.returncode} {last[:200]}".rstrip(". ")
    return answer["repo_id"], answer["error"]


def upload(
    repo_id: str,
    private: bool,
    create: bool,
    retry_delays: Sequence[float] = (),
    folder: str | None = None,
    repo_type: str = "model",
    **commit: Any,
) -> dict[str, Any]:
    """Create the repository and push a folder as one commit, with retries.

    `commit` holds further arguments of `HfApi.upload_folder`.

    Returns:
        `repo_id`, with its namespace once the repository is created, and `error`, a line or None.
    """
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT", "").rstrip("/") or None)
    delays = list(retry_delays)
    while True:
        try:
            if create:
                # None, not False: an organisation whose default is private keeps it.
                repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True, repo_type=repo_type).repo_id
            if folder is not None:
                api.upload_folder(repo_id=repo_id, folder_path=folder, repo_type=repo_type, **commit)
            return {"repo_id": repo_id, "error": None}
        except PUSH_ERRORS as error:
            if not delays or not _is_transient(error):
                return {"repo_id": repo_id, "error": one_line(error)}
        time.sleep(delays.pop(0))


def _is_transient(error: BaseException) -> bool:
    """Return True unless the Hub, or the offline mode, would refuse the same request again."""
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", 500)
    return not isinstance(error, OfflineModeIsEnabled) and (status >= 500 or status in (408, 429))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    json.dump(upload(**json.load(sys.stdin)), sys.stdout)
