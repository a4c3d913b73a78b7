"""Push one folder to the Hub, in a process of its own.

Usage: `python -m mm_utils.reports.upload PARENT_PID < work.json`.

A client that waits for a server which never answers cannot be stopped from inside its process; this process can be killed.
It imports nothing slow and ends with its parent process.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from mm_utils.text import one_line

# The client's HTTP library is requests, httpx or httpx2, by version. The library's common error is the last base class of the
# client's own error that is no built-in.
CLIENT_ERROR: type[Exception] = [
    base for base in HfHubHTTPError.__mro__ if issubclass(base, Exception) and base.__module__ != "builtins"
][-1]
# RuntimeError wraps the errors of a parallel upload; LookupError and ValueError are answers that are not the Hub's.
PUSH_ERRORS: tuple[type[Exception], ...] = (CLIENT_ERROR, OSError, RuntimeError, ValueError, LookupError)


def upload(
    repo_id: str,
    private: bool,
    create: bool,
    retry_delays: Sequence[float] = (),
    folder: str | None = None,
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
                repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
            if folder is not None:
                api.upload_folder(repo_id=repo_id, folder_path=folder, **commit)
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
