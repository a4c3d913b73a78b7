"""Serve a page and a JSON API that search an index, for one person on one machine.

docs/search.md has the requests and their answers. No request names a file.

Other web pages, open in the same browser, may send requests here. They are refused by the names in Host (DNS rebinding),
Origin and Sec-Fetch-Site. For another machine, forward the port with ssh.
"""

import asyncio
import base64
import hashlib
import logging
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL import UnidentifiedImageError

from mm_utils.data.media.pictures import animation
from mm_utils.distributed import RunError
from mm_utils.files import allow_open_files
from mm_utils.model.reading import UnreadableError
from mm_utils.search.searcher import Filter, Hit, Searcher

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as error:
    raise RunError(
        f"--serve needs a package that is not installed ({error}). pip install starlette uvicorn"
    ) from error

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # names by which this machine is asked
MOST_BYTES = 20 << 20  # of a file in a request
MOST_HITS = 1000  # of an answer, over all its pages
MOST_LETTERS = 1000  # of a text
_PATIENCE = 5  # seconds for what runs when the server is ended


def serve(searcher: Searcher, port: int) -> None:
    """Serve this machine until interrupted; RunError if the port cannot be taken."""
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        raise RunError(f"--port is {port}; it cannot be served there ({error}). Give another port.") from error
    allow_open_files()
    count = f"{len(searcher):,} {searcher.info.medium}s"
    logger.info("%s at http://127.0.0.1:%d/", count, listener.getsockname()[1])
    uvicorn.Server(make_config(searcher)).run(sockets=[listener])


def make_config(searcher: Searcher) -> uvicorn.Config:
    """Return the settings of the server: of requests to this machine's own names."""
    medium = searcher.info.medium
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    page = page.replace('data-medium="image"', f'data-medium="{medium}"')
    api = _Api(searcher)
    answers: dict[str, Any] = {
        "search": api.text,
        "similar/{row}": api.similar,
        "image/{row}": api.thumbnail,
        "large/{row}": api.large,
        "content/{row}": api.content,
    }
    routes = [Route("/", lambda request: HTMLResponse(page)), Route("/search", api.file, methods=["POST"])]
    routes += [Route(f"/{path}", answer) for path, answer in answers.items()]
    mistakes: dict[Any, Any] = dict.fromkeys((HTTPException, IndexError, ValueError), _as_json)
    guard = Middleware(_Guard, headers=_headers(page))
    app = Starlette(routes=routes, middleware=[guard], exception_handlers=mistakes)
    said = {"log_level": "warning", "server_header": False}
    return uvicorn.Config(app, http="h11", ws="none", timeout_graceful_shutdown=_PATIENCE, **said)  # type: ignore[arg-type]


class _Api:
    """The answers: functions that are not `async` run in threads, and files in one of their own."""

    def __init__(self, searcher: Searcher):
        self.searcher = searcher
        # One thread: 40 million pixels take a quarter of a gigabyte, and each thread that has decoded keeps what it took.
        self.decoder = ThreadPoolExecutor(1)

    def within(self, request: Request) -> Searcher:
        """Return a searcher of what the request's filter lets through."""
        part = {name: request.query_params.get(name, "").strip() for name in ("folder", "since", "until")}
        try:
            return self.searcher.within(Filter(**part))
        except ValueError as error:
            raise HTTPException(400, str(error).removeprefix("--")) from error

    def text(self, request: Request) -> Response:
        searcher, query = self.within(request), request.query_params.get("q", "").strip()
        if not 0 < len(query) <= MOST_LETTERS:
            raise HTTPException(400, f"q has {len(query)} letters; give a text of 1 to {MOST_LETTERS}.")
        hits = searcher.search_text(query, _wanted(request), request.query_params.get("rerank", "1") != "0")
        return _page(request, searcher, hits)

    async def file(self, request: Request) -> Response:
        content = await _body(request)
        return await asyncio.get_running_loop().run_in_executor(self.decoder, self._file, request, content)

    def _file(self, request: Request, content: bytes) -> Response:
        searcher = self.within(request)
        try:
            return _page(request, searcher, searcher.search_file(content, _wanted(request)))
        except UnreadableError as error:
            reason = re.sub("^(embedded image|the file): ", "", str(error))
            if isinstance(error.__cause__, UnidentifiedImageError):
                reason = "it is not an image, or in an unknown format. Choose a JPEG, PNG or WebP file"
            raise HTTPException(400, f"The {searcher.info.medium} cannot be read: {reason}.") from error

    def similar(self, request: Request) -> Response:
        searcher = self.within(request)
        return _page(request, searcher, searcher.similar(self._row(request), _wanted(request)))

    def thumbnail(self, request: Request) -> Response:
        return Response(self.searcher.stored(self._row(request), "thumbnail"), media_type="image/jpeg")

    async def large(self, request: Request) -> Response:
        loop, row = asyncio.get_running_loop(), self._row(request)
        return Response(await loop.run_in_executor(self.decoder, self.searcher.large, row), media_type="image/jpeg")

    def content(self, request: Request) -> Response:
        content = self.searcher.stored(self._row(request), "content")
        if self.searcher.info.medium == "sound":
            return Response(content, media_type="audio/wav")
        return Response(animation(content), media_type="image/webp")

    def _row(self, request: Request) -> int:
        """Return the row that an address names; IndexError if it is none."""
        row = request.path_params["row"]
        if not (row.isascii() and row.isdecimal() and len(row) < 12):
            raise IndexError("there is no such row")
        return int(row)


def _page(request: Request, searcher: Searcher, hits: list[Hit]) -> Response:
    end = _wanted(request) - 1
    shown, more = [asdict(hit) for hit in hits[_offset(request) : end]], end < min(len(hits), MOST_HITS)
    return JSONResponse({"total": searcher.searched, "reranks": searcher.reranks, "more": more, "hits": shown})


class _Guard:
    """Refuse requests that other pages or machines make, and set the headers of every answer."""

    def __init__(self, app: ASGIApp, headers: dict[str, str]):
        self.app = app
        self.headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *self.headers]
            await send(message)

        answer = self.refusal(Request(scope))
        await (self.app if answer is None else answer)(scope, receive, send_with_headers)

    def refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that is not of the page or its user; None lets it pass."""
        hosts, origins = request.headers.getlist("host"), request.headers.getlist("origin")
        if len(hosts) != 1 or _hostname(hosts[0]) not in LOOPBACK:
            return _error(403, "This name is not served. Open http://127.0.0.1 with the port.")
        is_visit = request.url.path == "/" and request.method == "GET"
        is_own = is_visit or request.headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        if not is_own or any(origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}") for origin in origins):
            return _error(403, "Requests of other pages are not answered.")
        return None


async def _body(request: Request) -> bytes:
    """Read the body; raise HTTPException as soon as it is too large, or broken off."""
    declared, content = request.headers.get("content-length", ""), bytearray()
    too_large = HTTPException(413, f"The file has more than {MOST_BYTES >> 20} MB. Shrink it.")
    if declared.isdecimal() and int(declared[:12]) > MOST_BYTES:
        raise too_large
    try:
        async for chunk in request.stream():
            content += chunk
            if len(content) > MOST_BYTES:
                raise too_large
    except ClientDisconnect as error:
        raise HTTPException(400, "The file was broken off.") from error
    return bytes(content)


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    value = request.query_params.get(name, str(default))
    if not (value.isascii() and value.isdecimal() and len(value) < 10 and least <= int(value) <= most):
        raise HTTPException(400, f"{name} is not a number from {least} to {most}.")
    return int(value)


def _offset(request: Request) -> int:
    return _number(request, "offset", 0, 0, MOST_HITS)


def _wanted(request: Request) -> int:
    """Return how many hits are looked for: those of the page and of the pages before it, and one more."""
    return _offset(request) + _number(request, "k", 24, 1, 100) + 1


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname if re.fullmatch(r"[\w.:\[\]-]+", host) else None
    except ValueError:
        return None


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)


def _as_json(request: Request, error: Exception) -> Response:
    """Answer an error in a line: a row that is not there, or an index that is damaged where it is read."""
    if isinstance(error, HTTPException):
        return _error(error.status_code, error.detail)
    if isinstance(error, IndexError):
        return _error(404, f"{error}.")
    logger.error("%s", error)
    return _error(500, str(error))


def _headers(page: str) -> dict[str, str]:
    """Return every answer's headers; only the page's own code runs."""
    allowed = {
        tag: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        )
        for tag in ("script", "style")
    }
    return {
        "Content-Security-Policy": f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        f"img-src 'self' blob: data:; media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-store",
    }
