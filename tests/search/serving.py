"""A served index, requests that no browser would send, and texts and files that an attacker would."""

import http.client
import json
import threading
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from mm_utils.search.server import PageServer

EVIL_CAPTION = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"
EVIL_NAME = "<img src=x onerror=document.title='hacked'>.png"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)

    @property
    def hits(self) -> list[dict]:
        return self.json["hits"]


class Served(NamedTuple):
    port: int
    searcher: Any

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Answer:
        """Send a request whose path is not normalised; `host` is a header like others."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        length = {} if body is None else {"content-length": str(len(body))}
        for name, value in ({"host": f"127.0.0.1:{self.port}"} | length | headers).items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders(body)
        answer = connection.getresponse()
        found = Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        connection.close()
        return found


def served(searcher: Any) -> Iterator[Served]:
    with PageServer(searcher, 0) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield Served(running.server_port, searcher)
        running.shutdown()


def bomb(side: int) -> bytes:
    """A PNG of white pixels: a few kB that decode to a gigabyte."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = chunk(b"IHDR", side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
