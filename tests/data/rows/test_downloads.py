"""Only public addresses are reached, only so much is read, and what may pass is tried again."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from mm_utils.data.faults import Fault
from mm_utils.data.paths import Limits
from mm_utils.data.rows import downloads
from mm_utils.data.rows.downloads import download
from mm_utils.data.rows.records import RecordBuilder, UrlImage
from mm_utils.data.rows.source import PathArguments, Source

BODY = b"an image" * 100


class Handler(BaseHTTPRequestHandler):
    """Answers by the first part of the path; counts the requests."""

    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.requests.append(self.path)
        _, kind, *rest = self.path.partition("?")[0].split("/", 2)
        if kind == "to":
            self.answer(302, b"", Location=rest[0])
        elif kind == "loop":
            self.answer(301, b"", Location="/loop")
        elif kind == "busy":
            self.answer(200 if len(self.requests) > 2 else 503, BODY)
        elif kind == "cut":
            self.answer(200, BODY[:-5], **{"Content-Length": str(len(BODY))})
        elif kind == "slow":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    time.sleep(0.05)
        else:
            self.answer(200 if kind == "ok.jpg" else 404, BODY)

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server on this machine, whose address alone counts as public."""
    monkeypatch.setattr(Handler, "requests", [])
    monkeypatch.setattr("mm_utils.data.rows.downloads._PAUSE", 0.0)
    strict = downloads._is_public
    monkeypatch.setattr(downloads, "_is_public", lambda address: address == "127.0.0.1" or strict(address))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def failure(url: str, **limits: float) -> Fault:
    with pytest.raises(Fault) as fault:
        download(url, Limits(**limits))  # type: ignore[arg-type]
    return fault.value


def test_an_image_is_fetched(server: str) -> None:
    assert download(f"{server}/ok.jpg?size=2", Limits()) == BODY
    assert UrlImage(f"{server}/ok.jpg").read(Limits()) == BODY


def test_redirects_are_followed_up_to_a_limit(server: str) -> None:
    assert download(f"{server}/to//ok.jpg", Limits()) == BODY
    assert failure(f"{server}/loop").reason == "download_failed"
    assert Handler.requests.count("/loop") == 4


@pytest.mark.parametrize(
    "target", ["http://169.254.169.254/meta", "http://localhost.:1/", "http://10.0.0.1/", "//[::1]/"]
)
def test_a_redirect_into_a_private_network_is_not_followed(
    server: str, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    real = socket.getaddrinfo
    fake = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", 1))]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: fake if "localhost" in host else real(host, *a, **k)
    )
    assert failure(f"{server}/to/{target}").reason == "private_address"


PRIVATE = [
    *("127.0.0.1", "127.255.0.3", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
    *("100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
    *("::1", "::", "fe80::1", "fc00::1", "fec0::1", "feff::1", "fd12::1", "ff02::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "2001:0:1::1"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_refused_before_a_connection(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("connected"))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: [(family, socket.SOCK_STREAM, 6, "", (address, 80))])
    assert failure("http://a.example/b.jpg").reason == "private_address"


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert downloads._is_public(address)


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "127.1", "localhost"])
def test_other_spellings_of_this_machine_are_refused(host: str) -> None:
    assert failure(f"http://{host}/a.jpg").reason in ("private_address", "download_failed")


def test_one_private_address_among_public_ones_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: found)
    assert failure("http://a.example/").reason == "private_address"


def test_the_name_is_looked_up_once_and_the_checked_address_is_used(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["127.0.0.1", "10.0.0.1"])
    asked = []

    def rebinding(host: str, port: int, *a: Any, **k: Any) -> list[Any]:
        if host != "a.example":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    assert download(f"http://a.example:{server.rpartition(':')[2]}/ok.jpg", Limits()) == BODY
    assert asked == ["a.example"]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a.b/c", "gopher://a.b", "//a.b/c", "http:///x"])
def test_other_schemes_are_refused(url: str) -> None:
    assert failure(url).reason == "url_not_allowed"


@pytest.mark.parametrize("url", ["http://[::1", "http://a.b:99999/", "http://a.b/c d", "http://a.b/\r\nX: y"])
def test_an_address_that_is_none_is_a_fault(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: pytest.fail("looked up"))
    assert failure(url).reason == "download_failed"


def test_a_download_is_limited_in_bytes_and_seconds(server: str) -> None:
    assert "more than 99 bytes" in failure(f"{server}/ok.jpg", max_bytes=99).detail
    assert failure(f"{server}/slow", seconds=0.3).reason == "download_failed"


def test_errors_that_may_pass_are_retried(server: str) -> None:
    assert download(f"{server}/busy", Limits(attempts=3)) == BODY
    Handler.requests.clear()
    assert "503" in failure(f"{server}/busy", attempts=2).detail
    Handler.requests.clear()
    assert "404" in failure(f"{server}/absent").detail
    assert len(Handler.requests) == 1
    Handler.requests.clear()
    assert "missing at the end" in failure(f"{server}/cut").detail
    assert len(Handler.requests) == 3


@pytest.mark.parametrize("signed", ["?X-Amz-Signature=SECRET&w=1", "?sv=1&sig=SECRET"])
def test_an_id_has_no_signature_of_its_address(signed: str) -> None:
    builder = RecordBuilder(Source("."), PathArguments(allow_download=True), ".")
    image, key = builder.image(f"https://b.example/k.jpg{signed}")
    assert image.name.endswith(signed)
    assert str(key).startswith("https://b.example/k.jpg?")
    assert "SECRET" not in str(key)
