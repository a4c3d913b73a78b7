"""Serve a page and a JSON API that search an index, for one person on one machine.

docs/search.md has the requests and their answers. No request names a file.

Other web pages, open in the same browser, may send requests here. They are refused by the names in Host (DNS rebinding),
Origin and Sec-Fetch-Site. For another machine, forward the port with ssh.
"""

import base64
import hashlib
import json
import logging
import re
import sys
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from PIL import UnidentifiedImageError

from mm_utils.distributed import RunError
from mm_utils.model.reading import UnreadableError
from mm_utils.search.searcher import Hit, Searcher

logger = logging.getLogger(__name__)

MOST_BYTES = 20 << 20  # of a file in a request
MOST_HITS = 1000  # of an answer
MOST_LETTERS = 1000  # of a text
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")  # names by which this machine is asked
_ROW = re.compile(r"GET /(similar|image|large|content)/(\d{1,11})", re.ASCII)


def serve(searcher: Searcher, port: int) -> None:
    """Serve this machine until interrupted; RunError if the port cannot be taken."""
    try:
        server = PageServer(searcher, port)
    except (OSError, OverflowError) as error:
        raise RunError(f"--port is {port}; it cannot be served there ({error}). Give another port.") from error
    with server:
        count = f"{len(searcher):,} {searcher.info.medium}s"
        logger.info("%s at http://127.0.0.1:%d/", count, server.server_port)
        server.serve_forever()


class PageServer(ThreadingHTTPServer):
    """A server of this machine alone; `port` 0 is any free one."""

    allow_reuse_port = False  # two servers of one port would each get some of the requests

    def __init__(self, searcher: Searcher, port: int):
        page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        self.page = page.replace('data-medium="image"', f'data-medium="{searcher.info.medium}"').encode()
        self.page_headers = _headers(page)
        self.searcher = searcher
        self.decoding = threading.Lock()  # 40 million pixels take a quarter of a gigabyte
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that has gone."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Refused(Exception):
    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds in which a browser may say nothing

    def do_GET(self) -> None:
        """Answer the page, or a request of it."""
        try:
            self._check_who_asks()
            kind, content = self._answer()
            self._send(200, kind, content)
        except _Refused as error:
            self.send_error(error.status, str(error))
        except IndexError as error:
            self.send_error(404, f"{error}.")
        except ValueError as error:  # an index that is damaged where it is read
            logger.error("%s", error)
            self.send_error(500, str(error))

    do_POST = do_GET

    def _check_who_asks(self) -> None:
        """Refuse a request that is not of the page or its user."""
        host = self.headers.get("host", "")
        if not _HOST.fullmatch(host):
            raise _Refused(403, "This name is not served. Open http://127.0.0.1 with the port.")
        is_visit = self.command == "GET" and self.path.partition("?")[0] == "/"
        # none: the person opened it, by the address line or a bookmark; old browsers do not say
        is_own = is_visit or self.headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        if not is_own or self.headers.get("origin") not in (None, f"http://{host}", f"https://{host}"):
            raise _Refused(403, "Requests of other pages are not answered.")

    def _answer(self) -> tuple[str, bytes]:
        """Return the type and the content of an answer."""
        path, _, asked = self.path.partition("?")
        self.asked = dict(parse_qsl(asked))
        searcher = self.server.searcher
        what = f"{self.command} {path}"
        if what == "POST /search":
            return self._hits(self._body())
        if what == "GET /":
            return "text/html; charset=utf-8", self.server.page
        if what == "GET /search":
            text = self.asked.get("q", "").strip()
            if not 0 < len(text) <= MOST_LETTERS:
                raise _Refused(400, f"q has {len(text)} letters; give a text of 1 to {MOST_LETTERS}.")
            return self._hits(text)
        if what == "GET /browse":
            hits = [{**asdict(hit), "score": None} for hit in searcher.browse(self._count())]
            return "application/json", json.dumps({"total": len(searcher), "hits": hits}).encode()
        found = _ROW.fullmatch(what)
        if found is None:
            raise _Refused(404, "There is nothing at this address.")
        row = int(found[2])
        if found[1] == "similar":
            return self._hits(row)
        if found[1] == "content":
            kind = "audio/wav" if searcher.info.medium == "sound" else "video/x-msvideo"
            return kind, searcher.stored(row, "content")
        if found[1] == "image":
            return "image/jpeg", searcher.stored(row, "thumbnail")
        with self.server.decoding:
            return ("image/webp" if searcher.info.medium == "clip" else "image/jpeg"), searcher.large(row)

    def _hits(self, query: str | int | bytes) -> tuple[str, bytes]:
        """Return the hits of a text, a row or a file."""
        count = self._count()
        part = {name: self.asked.get(name, "").strip() for name in ("folder", "since", "until")}
        try:
            searcher = self.server.searcher.within(**part)
        except ValueError as error:
            raise _Refused(400, str(error).removeprefix("--")) from error
        own: list[Hit] = []
        if isinstance(query, str):
            hits = searcher.search_text(query, count)
        elif isinstance(query, int):
            hits = searcher.similar(query, count)
        else:
            try:
                with self.server.decoding:
                    own, hits = searcher.look_up(query, count)
            except UnreadableError as error:
                reason = re.sub("^(embedded image|the file): ", "", str(error))
                if isinstance(error.__cause__, UnidentifiedImageError):
                    reason = "it is not an image, or in an unknown format. Choose a JPEG, PNG or WebP file"
                raise _Refused(400, f"The {searcher.info.medium} cannot be read: {reason}.") from error
        answer = {
            "total": searcher.searched,
            "undated": searcher.undated,
            "own": list(map(asdict, own)),
            "hits": list(map(asdict, hits)),
        }
        return "application/json", json.dumps(answer).encode()

    def _count(self) -> int:
        count = self.asked.get("k", "24")
        # int() would also take ' 7 ', '1_0' and digits of other scripts
        if not re.fullmatch("[0-9]{1,4}", count) or not 1 <= int(count) <= MOST_HITS:
            raise _Refused(400, f"k is not a number from 1 to {MOST_HITS}.")
        return int(count)

    def _body(self) -> bytes:
        length = self.headers.get("content-length", "")
        if not re.fullmatch("[0-9]{1,99}", length):
            raise _Refused(411, "The length of the file is missing. Send it as Content-Length.")
        if int(length) > MOST_BYTES:
            raise _Refused(413, f"The file has more than {MOST_BYTES >> 20} MB. Shrink it.")
        return self.rfile.read(int(length))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a mistake, and end the connection, as the rest of the request may not have been read."""
        self.close_connection = True
        self._send(code, "application/json", json.dumps({"error": message or "This cannot be answered."}).encode())

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response_only(status)
        own = {"Content-Type": kind, "Content-Length": str(len(content))}
        own |= {"Connection": "close"} if self.close_connection else {}
        for name, value in (own | self.server.page_headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


def _headers(page: str) -> dict[str, str]:
    """Return every answer's headers; only the page's own code runs."""
    allowed = {"script": "", "style": ""}
    for tag, text in re.findall(r"<(script|style)>(.*?)</\1>", page, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed[tag] += f"'sha256-{digest}' "
    return {
        "Content-Security-Policy": f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        f"img-src 'self' blob: data:; media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-store",
    }
