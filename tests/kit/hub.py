"""Stand in for the Hub with the part of its API that creating a repository and uploading a folder call."""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

CUT = 0  # in place of a status: close the connection after half of the request


class HubServer(ThreadingHTTPServer):
    """Repositories in memory, behind one valid token; faults can be planted per path."""

    daemon_threads = True

    def __init__(self, token: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token = token
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.kinds: dict[str, str] = {}
        self.commits: list[str] = []
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.faults: list[tuple[str, int]] = []
        self.upload_may_end, self.may_answer = threading.Event(), threading.Event()
        self.upload_may_end.set()
        self.may_answer.set()

    def fail(self, path: str, status: int, times: int = 1) -> None:
        """Answer the next `times` requests whose path matches the pattern `path` with `status`, or `CUT` them."""
        self.faults += [(path, status)] * times

    def take_fault(self, path: str) -> int | None:
        """Return and use up the status planted for `path`."""
        for fault in self.faults:
            if re.search(fault[0], path):
                self.faults.remove(fault)
                return fault[1]
        return None

    def sha256(self, repo: str, path: str) -> str:
        """Return the SHA-256 of a file in a repository."""
        return hashlib.sha256(self.repos[repo][path]).hexdigest()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback when a killed client closes its connection."""


@contextmanager
def serve(token: str) -> Iterator[HubServer]:
    """Run the stand-in on a free port of the loopback interface."""
    server = HubServer(token)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.upload_may_end.set()
        server.may_answer.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        if self.command == "PUT":
            self.server.upload_may_end.wait(30)
        self.server.may_answer.wait(120)
        planted = self.server.take_fault(path)
        if planted == CUT:
            self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        body = self._body()
        signed = path.startswith("/storage/")  # like a pre-signed URL: it carries no token
        if planted is not None:
            # Echoing the secret is the worst that a server could do: the client quotes this text in its errors.
            self._answer(planted, {"error": f"planted for {self.headers.get('Authorization')}"})
        elif not signed and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._answer(401, {"error": "Invalid username or password."})
        else:
            self._route(path, body)

    do_POST = do_HEAD = do_PUT = do_GET

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _route(self, path: str, body: bytes) -> None:
        for methods, pattern, handler in (
            ("GET", "/api/whoami-v2", lambda _: {"type": "user", "name": "tester", "orgs": []}),
            ("POST", "/api/validate-yaml", lambda _: {"errors": [], "warnings": []}),
            ("POST", "/api/repos/create", self._create),
            ("POST", "/api/(?:models|datasets)/REPO/preupload/main", self._preupload),
            ("POST", "/api/(?:models|datasets)/REPO/commit/main", self._commit),
            ("GET", "/api/(?:models|datasets)/REPO/tree/main", self._tree),
            ("GET", "/api/(?:models|datasets)/REPO(?:/revision/main)?", self._info),
            ("POST", r"/(?:datasets/)?REPO\.git/info/lfs/objects/batch", self._lfs_batch),
            ("GET HEAD", "/REPO/resolve/[^/]+/(?P<file>.+)", self._file),
            ("PUT", "/storage/(?P<oid>[0-9a-f]{64})", self._lfs_put),
        ):
            match = re.fullmatch(pattern.replace("REPO", "(?P<repo>[^/]+/[^/]+)"), path)
            if self.command in methods and match is not None:
                groups = match.groupdict()
                if "repo" in groups and groups["repo"] not in self.server.repos:
                    self._answer(404, {"error": "Repository not found"})
                elif (answer := handler(body, **groups)) is not None:
                    self._answer(200, answer)
                return
        self._answer(404, {"error": f"the stand-in has no {self.command} {path}"})

    def _create(self, body: bytes) -> dict[str, str] | None:
        asked = json.loads(body)
        repo, kind = f"{asked['organization'] or 'tester'}/{asked['name']}", asked.get("type", "model")
        url = {"url": f"{self.server.endpoint}/{'datasets/' if kind == 'dataset' else ''}{repo}"}
        if repo in self.server.repos:
            return self._answer(409, {"error": "You already created this model repo", **url})
        self.server.repos[repo], self.server.kinds[repo] = {}, kind
        self.server.private[repo] = asked.get("visibility") == "private" or asked.get("private") is True
        return url

    def _info(self, body: bytes, repo: str) -> dict[str, Any]:
        return {"id": repo, "sha": "0" * 40, "siblings": []}

    def _file(self, body: bytes, repo: str, file: str) -> None:
        data = self.server.repos[repo].get(file)
        if data is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
        else:
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data or b"")

    def _tree(self, body: bytes, repo: str) -> list[dict[str, Any]]:
        files = self.server.repos[repo].items()
        return [{"type": "file", "path": path, "size": len(data), "oid": ""} for path, data in files]

    def _preupload(self, body: bytes, repo: str) -> dict[str, Any]:
        paths = [file["path"] for file in json.loads(body)["files"]]
        modes = ["lfs" if path.endswith((".safetensors", ".bin", ".arrow")) else "regular" for path in paths]
        files = zip(paths, modes, strict=True)
        return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in files]}

    def _lfs_batch(self, body: bytes, repo: str) -> dict[str, Any]:
        objects = json.loads(body)["objects"]
        for entry in objects:
            if entry["oid"] not in self.server.blobs:
                entry["actions"] = {"upload": {"href": f"{self.server.endpoint}/storage/{entry['oid']}"}}
        return {"transfer": "basic", "objects": objects}

    def _lfs_put(self, body: bytes, oid: str) -> dict[str, Any] | None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self._answer(400, {"error": "the content does not match its digest"})
        self.server.blobs[oid] = body
        return {}

    def _commit(self, body: bytes, repo: str) -> dict[str, str]:
        files = dict(self.server.repos[repo])
        summary = ""
        for line in body.splitlines():
            key, value = (entry := json.loads(line))["key"], entry["value"]
            if key == "header":
                summary = value["summary"]
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        self.server.repos[repo] = files
        self.server.commits.append(summary)
        oid = hashlib.sha1(body).hexdigest()
        return {"commitUrl": f"{self.server.endpoint}/{repo}/commit/{oid}", "commitOid": oid}


TOKEN = "hf_abcDEFghiJKLmnoPQRstuVWXyz0123456789"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A stand-in for the Hub that clients use here, where HF_HUB_OFFLINE=1 was read at the import, and in new processes."""
    import huggingface_hub

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serve(TOKEN) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server
