"""Download images from public addresses only, so that data files cannot forge requests.

A name in a data file may resolve to this machine, to the local network or to a cloud's metadata service, also by a
redirect, and may resolve differently when asked twice. Therefore every address of a name must be public, and the
connection goes to the very address that was checked.
"""

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from contextlib import suppress
from urllib.parse import urljoin, urlsplit

from mm_utils.data.faults import Fault
from mm_utils.data.paths import Limits
from mm_utils.files import retry

_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_CHUNK = 1 << 16
_PAUSE = 0.5  # seconds before the second attempt; doubled before each further one


class _PassingError(Exception):
    """A failure that may not happen again."""


def download(url: str, limits: Limits) -> bytes:
    """Return the bytes at a public http(s) address.

    Passing failures, such as status 503, are retried up to `limits.attempts` times; `limits.seconds` is for all attempts
    together.

    Raises a `Fault`: url_not_allowed (another scheme), private_address, or download_failed (no connection, a status
    that is not 200, too many bytes, seconds or redirects).
    """
    deadline = time.monotonic() + limits.seconds
    passing = (_PassingError, OSError, http.client.HTTPException)
    pauses = [_PAUSE * 2**attempt for attempt in range(limits.attempts - 1)]

    def follow() -> bytes:
        place = url
        for _ in range(limits.redirects + 1):
            if isinstance(answer := _get(place, limits, deadline), bytes):
                return answer
            place = urljoin(place, answer)
        raise Fault("download_failed", f"{url}: more than {limits.redirects} redirects")

    try:
        return retry(follow, lambda error: isinstance(error, passing), pauses, deadline)
    except passing as error:
        raise Fault("download_failed", f"{url}: {str(error) or type(error).__name__}") from error


def _get(url: str, limits: Limits, deadline: float) -> bytes | str:
    """Return the body, or the address that a redirect names."""
    scheme, host, port, target = _split(url)
    address = _public_address(host, port, url)
    left = deadline - time.monotonic()
    if left <= 0:
        raise Fault("download_failed", f"{url}: {limits.seconds:g} s are over")
    stream = socket.create_connection((address, port), timeout=left)
    if scheme == "https":
        stream = ssl.create_default_context().wrap_socket(stream, server_hostname=host, do_handshake_on_connect=False)
    # A socket's timeout is per packet; a server that sends a byte a second would hold the process for hours.
    over = threading.Event()
    watch = threading.Timer(max(0.0, deadline - time.monotonic()), _hang_up, [stream, over])
    watch.daemon = True
    watch.start()
    try:
        if isinstance(stream, ssl.SSLSocket):
            stream.do_handshake()
        connection = http.client.HTTPConnection(host, port)
        connection.sock = stream
        named = f"[{host}]" if ":" in host else host
        usual = port == {"http": 80, "https": 443}[scheme]
        headers = {"Host": named if usual else f"{named}:{port}", "User-Agent": "tandem", "Connection": "close"}
        connection.request("GET", target, headers={**headers, "Accept-Encoding": "identity"})
        answer = _read(connection.getresponse(), url, limits)
    finally:
        watch.cancel()
        stream.close()
    if over.is_set():  # a body of unknown length looks whole wherever it ends
        raise Fault("download_failed", f"{url}: {limits.seconds:g} s are over")
    return answer


def _read(response: http.client.HTTPResponse, url: str, limits: Limits) -> bytes | str:
    if response.status in _REDIRECTS and response.headers.get("Location"):
        return str(response.headers["Location"])
    if response.status in _PASSING:
        raise _PassingError(f"status {response.status}")
    if response.status != 200:
        raise Fault("download_failed", f"{url}: status {response.status}")
    body = bytearray()
    while chunk := response.read(_CHUNK):
        body += chunk
        if len(body) > limits.max_bytes:
            raise Fault("download_failed", f"{url}: more than {limits.max_bytes:,} bytes")
    if response.length:
        raise _PassingError(f"{response.length:,} bytes are missing at the end")
    return bytes(body)


def _hang_up(stream: socket.socket, over: threading.Event) -> None:
    over.set()
    with suppress(OSError):  # closed in the meantime
        stream.shutdown(socket.SHUT_RDWR)


def _split(url: str) -> tuple[str, str, int, str]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise Fault("download_failed", f"{url}: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise Fault("url_not_allowed", f"{url}; only http and https addresses are fetched")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not target.isascii() or not target.isprintable() or " " in target:
        raise Fault("download_failed", f"{url}: it holds characters that an address must escape")
    return parts.scheme, host, port or (443 if parts.scheme == "https" else 80), target


def _public_address(host: str, port: int, url: str) -> str:
    try:
        found = [str(item[4][0]) for item in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except UnicodeError as error:
        raise Fault("download_failed", f"{url}: {host} is not a host name") from error
    private = next((address for address in found if not _is_public(address)), None)
    if private is not None:
        raise Fault("private_address", f"{url}: {host} is {private}")
    return found[0]


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if inner is not None:
            return _is_public(str(inner))
        if ip.teredo is not None or ip.is_site_local:  # fec0::/10, which `is_global` takes for public
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_link_local or ip.is_private)
