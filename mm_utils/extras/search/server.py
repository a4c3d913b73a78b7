"""Serve a page and a JSON API that search an index, for one person on one machine.

====================  =================================================================================================
GET /                 the page, which loads nothing from elsewhere
GET /search           hits of a text: q, and optionally k, offset and rerank (0 or 1)
POST /search          hits of an image, or of a sound as a WAV file, whose bytes are the body: k, offset
GET /similar/ROW      hits of an image of the index: k, offset
GET /image/ROW        its thumbnail
GET /content/ROW      a sound as a WAV file, or a clip as an animated WebP
GET /icon.svg         the page's icon
====================  =================================================================================================

An answer is `{"total", "reranks", "more", "hits"}`, a mistake `{"error"}`. A hit has the fields of `searcher.Hit`, and `before`:
its rank without re-ranking, null where the head has not seen it. Only what is in the index is ever sent: no request names a file.

Other web pages, open in the same browser, may send requests here. They are refused by the names in Host (DNS rebinding),
Origin and Sec-Fetch-Site. Beyond this machine a token is needed, which `/?token=...` turns into a cookie.
"""

import asyncio
import base64
import functools
import hashlib
import logging
import re
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

from mm_utils.data.images import UnreadableImageError
from mm_utils.distributed import RunError
from mm_utils.extras.search.searcher import Hit, Searcher
from mm_utils.files import allow_open_files
from mm_utils.reports.pictures import animation

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as error:
    raise RunError(
        f"--serve needs a package that is not installed ({error}). pip install tandem-mm[search]"
    ) from error

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_BYTES = 20 << 20  # of a file in a request
MOST_HITS = 1000  # of an answer, over all its pages
MOST_LETTERS = 1000  # of a text
LEAST_TOKEN = 16
_COOKIE = "tandem_search"
_CONNECTIONS = 2000  # beyond these, requests are refused; up to then they wait for their turn
_UPLOADS = 4  # files that are received and decoded at a time
_SECONDS = 120  # for a file to arrive
_ICON = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><g fill="none" stroke="#3b82d6" stroke-width="2">\
<circle cx="6.5" cy="6.5" r="4.5"/><path d="m10 10 5 5" stroke-linecap="round"/></g></svg>"""


def serve(searcher: Searcher, host: str, port: int, token: str | None) -> None:
    """Serve until interrupted.

    Raises:
        ValueError: if `host` is not this machine and there is no token, or it is short.
        RunError: if the address cannot be taken.
    """
    check_access(host, token)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise RunError(f"--port is {port}; {host} cannot be served there ({error}). Give another port.") from error
    allow_open_files()
    name = f"[{host}]" if family == socket.AF_INET6 else host
    secret = "?token=..., with your token" if token else ""
    count = f"{len(searcher):,} {searcher.info.medium}s"
    logger.info("%s at http://%s:%d/%s", count, name, listener.getsockname()[1], secret)
    settings = {"log_level": "warning", "server_header": False, "limit_concurrency": _CONNECTIONS}
    uvicorn.Server(uvicorn.Config(make_app(searcher, token), **settings)).run(sockets=[listener])  # type: ignore[arg-type]


def check_access(host: str, token: str | None) -> None:
    """Raise ValueError if others could search without a secret."""
    if token is not None and (len(token) < LEAST_TOKEN or not re.fullmatch(r"[\w.~-]+", token, re.ASCII)):
        raise ValueError(
            f"--token has {len(token)} letters; give {LEAST_TOKEN} or more of A-Z, a-z, 0-9, '_', '-', '.' and '~', such as "
            f"{secrets.token_urlsafe(16)}."
        )
    if host not in LOOPBACK and token is None:
        raise ValueError(
            f"--host is {host}; others could see the images. Give --token, or serve on 127.0.0.1 and forward the port with ssh."
        )


def make_app(searcher: Searcher, token: str | None = None) -> Starlette:
    """Return the application; without a token, for requests to this machine's own names."""
    medium = searcher.info.medium
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    page = page.replace('data-medium="image"', f'data-medium="{medium}"')
    api = _Api(searcher)

    async def show(request: Request) -> Response:
        return HTMLResponse(page)

    async def icon(request: Request) -> Response:
        return Response(_ICON, media_type="image/svg+xml")

    routes = [
        Route("/", show),
        Route("/icon.svg", icon),
        Route("/search", api.text),
        Route("/search", api.file, methods=["POST"]),
        Route("/similar/{row:int}", api.similar),
        Route("/image/{row:int}", api.thumbnail),
        Route("/content/{row:int}", api.content),
    ]
    guard = Middleware(_Guard, token=token, headers=_headers(page, plays=medium == "sound"))
    return Starlette(routes=routes, middleware=[guard], exception_handlers={HTTPException: _as_json})


class _Api:
    """The answers; functions that are not `async` run in threads, and files in one of their own."""

    def __init__(self, searcher: Searcher):
        self.searcher, self.uploads = searcher, asyncio.Semaphore(_UPLOADS)
        # One thread: 40 million pixels take a quarter of a gigabyte, and each thread that has decoded keeps what it took.
        self.decoder = ThreadPoolExecutor(1)
        self.texts = functools.lru_cache(maxsize=32)(
            lambda text, rerank: searcher.search_text(text, MOST_HITS, rerank)
        )

    def text(self, request: Request) -> Response:
        query, rerank = request.query_params.get("q", "").strip(), request.query_params.get("rerank", "1") != "0"
        if not 0 < len(query) <= MOST_LETTERS:
            raise HTTPException(400, f"q has {len(query)} letters; give a text of 1 to {MOST_LETTERS}.")
        return self._page(request, self.texts(query, rerank))

    async def file(self, request: Request) -> Response:
        async with self.uploads:
            try:
                content = await asyncio.wait_for(_body(request), _SECONDS)
            except asyncio.TimeoutError as error:
                raise HTTPException(408, f"The file has not arrived in {_SECONDS} s. Shrink it.") from error
            return await asyncio.get_running_loop().run_in_executor(self.decoder, self._file, request, content)

    def similar(self, request: Request) -> Response:
        try:
            return self._page(request, self.searcher.similar(request.path_params["row"], MOST_HITS))
        except IndexError as error:
            raise HTTPException(404, f"{error}.") from error

    def thumbnail(self, request: Request) -> Response:
        try:
            return Response(self.searcher.thumbnail(request.path_params["row"]), media_type="image/jpeg")
        except IndexError as error:
            raise HTTPException(404, f"{error}.") from error

    def content(self, request: Request) -> Response:
        try:
            content = self.searcher.content(request.path_params["row"])
            if self.searcher.info.medium == "sound":
                return Response(content, media_type="audio/wav")
            return Response(animation(content), media_type="image/webp")
        except (IndexError, UnreadableImageError) as error:
            raise HTTPException(404, f"{error}.") from error

    def _file(self, request: Request, content: bytes) -> Response:
        try:
            hits = self.searcher.search_file(content, MOST_HITS)
        except UnreadableImageError as error:
            raise HTTPException(400, f"The {self.searcher.info.medium} cannot be read: {error}.") from error
        return self._page(request, hits)

    def _page(self, request: Request, hits: list[Hit]) -> Response:
        count, offset = _number(request, "k", 24, 1, 100), _number(request, "offset", 0, 0, MOST_HITS)
        reranked = sorted((hit for hit in hits if hit.reranked is not None), key=lambda hit: -hit.score)
        before = {hit.row: place for place, hit in enumerate(reranked, 1)}
        return JSONResponse(
            {
                "total": len(self.searcher),
                "reranks": self.searcher.reranks,
                "more": offset + count < len(hits),
                "hits": [{**asdict(hit), "before": before.get(hit.row)} for hit in hits[offset : offset + count]],
            }
        )


class _Guard:
    """Refuse requests that other pages or machines make, and set the headers of every answer."""

    def __init__(self, app: ASGIApp, token: str | None, headers: dict[str, str]):
        self.app, self.token = app, token
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
        """Return the answer to a request not of the page or its user; None lets it pass."""
        hosts, origins = request.headers.getlist("host"), request.headers.getlist("origin")
        if len(hosts) != 1 or (self.token is None and _hostname(hosts[0]) not in LOOPBACK):
            return _error(403, "This name is not served. Open http://127.0.0.1 with the port.")
        if any(origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}") for origin in origins):
            return _error(403, "Requests of other pages are not answered.")
        is_visit = request.url.path == "/" and request.method == "GET"
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not is_visit:
            return _error(403, "Requests of other pages are not answered.")
        return None if self.token is None else self._without_token(request, self.token)

    def _without_token(self, request: Request, token: str) -> Response | None:
        given = request.query_params.get("token") if request.url.path == "/" else None
        if given is not None and secrets.compare_digest(given.encode(), token.encode()):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(_COOKIE, token, httponly=True, samesite="strict")
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        known = (request.cookies.get(_COOKIE, ""), bearer)
        if any(secrets.compare_digest(each.encode(), token.encode()) for each in known):
            return None
        return _error(401, "The token is missing or wrong. Open /?token=... once, or send it as a Bearer token.")


async def _body(request: Request) -> bytes:
    """Read the body; raise HTTPException as soon as it is too large."""
    declared, content = request.headers.get("content-length", ""), bytearray()
    too_large = HTTPException(413, f"The file has more than {MOST_BYTES >> 20} MB. Shrink it.")
    if declared.isdecimal() and int(declared[:12]) > MOST_BYTES:
        raise too_large
    async for chunk in request.stream():
        content += chunk
        if len(content) > MOST_BYTES:
            raise too_large
    return bytes(content)


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    value = request.query_params.get(name, str(default))
    if not (value.isascii() and value.isdecimal() and len(value) < 10 and least <= int(value) <= most):
        raise HTTPException(400, f"{name} is not a number from {least} to {most}.")
    return int(value)


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname if re.fullmatch(r"[\w.:\[\]-]+", host) else None
    except ValueError:
        return None


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)


def _as_json(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)


def _headers(page: str, plays: bool) -> dict[str, str]:
    """Return every answer's headers; only the page's own code runs, sound where it `plays`."""
    allowed = {
        tag: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        )
        for tag in ("script", "style")
    }
    sound = "media-src 'self'; " if plays else ""
    return {
        "Content-Security-Policy": f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; "
        f"img-src 'self' blob:; {sound}connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-store",
    }
