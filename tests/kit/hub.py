"""Stand in for the Hub with the part of its API that creating a repository and uploading a folder call."""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

CUT = 0  # in place of a status: close the connection after half of the request
TOKEN = "hf_abcDEFghiJKLmnoPQRstuVWXyz0123456789"


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
        self.blobs: dict[str, bytes] = {}
        self.commits, self.requests = list[str](), list[str]()
        self.faults: list[tuple[str, int]] = []
        self.upload_may_end, self.may_answer = threading.Event(), threading.Event()
        self.upload_may_end.set()
        self.may_answer.set()

    def fail(self, path: str, status: int, times: int = 1) -> None:
        """Answer the next `times` requests whose path matches the pattern `path` with `status`, or `CUT` them."""
        self.faults += [(path, status)] * times

    def sha256(self, repo: str, path: str) -> str:
        """Return the SHA-256 of a file in a repository."""
        return hashlib.sha256(self.repos[repo][path]).hexdigest()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback when a killed client closes its connection."""


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
        planted = next((fault for fault in self.server.faults if re.search(fault[0], path)), None)
        if planted is not None:
            self.server.faults.remove(planted)
        size = int(self.headers.get("Content-Length", 0))
        if planted is not None and planted[1] == CUT:
            self.rfile.read(size // 2)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        body = (
            self._chunks() if self.headers.get("Transfer-Encoding", "").lower() == "chunked" else self.rfile.read(size)
        )
        signed = path.startswith("/storage/")  # like a pre-signed URL: it carries no token
        if planted is not None:
            # Echoing the secret is the worst that a server could do: the client quotes this text in its errors.
            self._answer(planted[1], {"error": f"planted for {self.headers.get('Authorization')}"})
        elif not signed and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._answer(401, {"error": "Invalid username or password."})
        else:
            self._route(path, body)

    do_POST = do_HEAD = do_PUT = do_GET

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, content: Any, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _route(self, path: str, body: bytes) -> None:  # noqa: C901 - one branch a call
        server, repos = self.server, self.server.repos
        found = re.match(r"/(?:api/(?:models|datasets)/|datasets/)?([^/]+/[^/]+?)(?:\.git)?(?:/(.*))?$", path)
        repo, rest = (found[1], found[2] or "") if found else ("", "")
        if path == "/api/whoami-v2":
            self._answer(200, {"type": "user", "name": "tester", "orgs": []})
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.startswith("/storage/"):
            server.blobs[hashlib.sha256(body).hexdigest()] = body
            self._answer(200, {})
        elif repo not in repos:
            self._answer(404, {"error": "Repository not found"})
        elif rest.startswith("resolve/"):
            data, commit = repos[repo].get(rest.split("/", 2)[2]), {"X_Repo_Commit": "0" * 40}
            if data is None:
                self._answer(404, b"", X_Error_Code="EntryNotFound")
            else:
                self._answer(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', **commit)
        elif rest == "preupload/main":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = ["lfs" if path.endswith((".safetensors", ".bin", ".arrow")) else "regular" for path in paths]
            files = [
                {"path": path, "uploadMode": mode, "shouldIgnore": False}
                for path, mode in zip(paths, modes, strict=True)
            ]
            self._answer(200, {"files": files})
        elif rest == "info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            for entry in objects:
                if entry["oid"] not in server.blobs:
                    entry["actions"] = {"upload": {"href": f"{server.endpoint}/storage/{entry['oid']}"}}
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif rest == "commit/main":
            self._commit(body, repo)
        elif rest.startswith("tree/"):
            self._answer(
                200, [{"type": "file", "path": at, "size": len(d), "oid": ""} for at, d in repos[repo].items()]
            )
        else:
            self._answer(200, {"id": repo, "sha": "0" * 40, "siblings": []})

    def _create(self, asked: dict[str, Any]) -> None:
        repo, kind = f"{asked['organization'] or 'tester'}/{asked['name']}", asked.get("type", "model")
        url = {"url": f"{self.server.endpoint}/{'datasets/' if kind == 'dataset' else ''}{repo}"}
        if repo in self.server.repos:
            return self._answer(409, {"error": "You already created this model repo", **url})
        self.server.repos[repo], self.server.kinds[repo] = {}, kind
        self.server.private[repo] = asked.get("visibility") == "private" or asked.get("private") is True
        return self._answer(200, url)

    def _commit(self, body: bytes, repo: str) -> None:
        files = dict(self.server.repos[repo])
        for line in body.splitlines():
            key, value = (entry := json.loads(line))["key"], entry["value"]
            if key == "header":
                self.server.commits.append(value["summary"])
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.server.blobs[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
        self.server.repos[repo] = files
        oid = hashlib.sha1(body).hexdigest()
        self._answer(200, {"commitUrl": f"{self.server.endpoint}/{repo}/commit/{oid}", "commitOid": oid})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A stand-in for the Hub that clients use here, where HF_HUB_OFFLINE=1 was read at the import, and in new processes."""
    import huggingface_hub

    for name, value in {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setenv(name, str(int(value)))
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = HubServer(TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.upload_may_end.set()
    server.may_answer.set()
    server.shutdown()
    server.server_close()
