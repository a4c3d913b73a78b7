"""Stand-ins: a Hub whose repositories are in memory, and a tracker that records its calls."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from accelerate.tracking import GeneralTracker
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects

TOKEN = "hf_abcDEFghiJKLmnoPQRstuVWXyz0123456789"


class Hub:
    """Files of repositories by name; the commits; and calls that fail or wait, where a test wants it.

    A call named in `faults` fails once for each time that it is named.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.calls = []
        self.commits = []
        self.faults = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def _answer(self, call: str) -> None:
        self.calls.append(call)
        self.may_answer.wait(120)
        if call in self.faults:
            self.faults.remove(call)
            raise ConnectionError(f"refused for Bearer {TOKEN}")  # the worst that a server could say

    def create_repo(self, repo_id: str, **_: Any) -> Any:
        self._answer("create_repo")
        name = repo_id if "/" in repo_id else f"tester/{repo_id}"
        self.repos.setdefault(name, {})
        return SimpleNamespace(repo_id=name)

    def upload_folder(
        self,
        *,
        repo_id: str,
        folder_path: str | Path,
        path_in_repo: str = "",
        ignore_patterns: list[str] | None = None,
        delete_patterns: str | None = None,
        commit_message: str | None = None,
        **_: Any,
    ) -> str:
        self._answer("upload_folder")
        files = {str(path.relative_to(folder_path)): path for path in Path(folder_path).rglob("*") if path.is_file()}
        place = "" if path_in_repo in ("", ".") else f"{path_in_repo}/"
        old = {
            name: content
            for name, content in self.repos[repo_id].items()
            if not (delete_patterns and name.startswith(place))
        }
        sent = filter_repo_objects(files, ignore_patterns=ignore_patterns)
        self.repos[repo_id] = old | {place + name: files[name].read_bytes() for name in sent}
        self.commits.append(commit_message or "")
        return repo_id


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The Hub of this process."""
    hub = Hub()
    monkeypatch.setattr(HfApi, "create_repo", hub.create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", hub.upload_folder)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


class FakeTracker(GeneralTracker):
    """Records its calls; a call named in `faults` raises, or exits with "exits"."""

    name = "fake"
    requires_logging_directory = False
    calls: ClassVar[list[tuple[Any, ...]]] = []
    faults: ClassVar[dict[str, str]] = {}

    def __init__(self, project: str, **arguments: Any) -> None:
        super().__init__()
        self._call("init", project, arguments)

    @property
    def tracker(self) -> None:
        return None

    def start(self) -> None:
        self._call("start", *sys.argv[1:])

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._call("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._call("log", step, values)

    def finish(self) -> None:
        self._call("finish")

    def _call(self, name: str, *values: Any) -> None:
        fault = self.faults.get(name)
        if fault:
            raise SystemExit(fault) if fault == "exits" else ConnectionError(fault)
        self.calls.append((name, *values))
