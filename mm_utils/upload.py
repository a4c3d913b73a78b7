"""One push to the Hub, in a process of its own: `python -m mm_utils.upload` reads what to do as JSON from its input.

A client that waits for a server which never answers cannot be stopped from within its process; this process can be killed.
It imports nothing slow, and ends with the process that started it.
"""

import json
import os
import sys
import threading
import time
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from mm_utils.safe_text import one_line

# The client speaks HTTP through requests, httpx or httpx2, by version: their common error is the last base class of
# its own error that is not a built-in.
CLIENT_ERROR: type[Exception] = [
    base for base in HfHubHTTPError.__mro__ if issubclass(base, Exception) and base.__module__ != "builtins"
][-1]
# RuntimeError wraps what a parallel upload raised; LookupError and ValueError are answers that are not the Hub's.
PUSH_ERRORS: tuple[type[Exception], ...] = (CLIENT_ERROR, OSError, RuntimeError, ValueError, LookupError)


def upload(
    repo_id: str,
    folder: str | None = None,
    message: str = "",
    private: bool = False,
    create: bool = True,
    delete_patterns: list[str] | None = None,
) -> dict[str, Any]:
    """Create the repository and push a folder as one commit.

    Returns:
        `repo_id`, in full if it exists; where something failed, `error`, a line, and whether that is `transient`: whether
        trying again may help.
    """
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT", "").rstrip("/") or None)
    try:
        if create:
            # None, not False: an organisation whose default is private keeps it.
            repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
        if folder is not None:
            api.upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message=message, delete_patterns=delete_patterns
            )
    except PUSH_ERRORS as error:
        return {"repo_id": repo_id, "error": one_line(error), "transient": _is_transient(error)}
    return {"repo_id": repo_id}


def _is_transient(error: BaseException) -> bool:
    """Whether trying again may help: a server error, too many requests, a timeout, a lost connection."""
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OfflineModeIsEnabled) or not isinstance(error, (CLIENT_ERROR, ConnectionError, TimeoutError)):
        return False
    response = getattr(error, "response", None)
    return response is None or response.status_code in (408, 429) or response.status_code >= 500


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    work = json.load(sys.stdin)
    threading.Thread(target=_end_with, args=(work.pop("parent"),), daemon=True).start()
    json.dump(upload(**work), sys.stdout)
