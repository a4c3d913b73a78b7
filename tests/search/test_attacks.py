"""Load and bombs against a served index: it answers afterwards, and its memory does not grow with them.

`python -m pytest tests/search/test_attacks.py -m slow -o log_cli=true -o log_cli_level=INFO` shows the memory of each.
"""

import functools
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest
from PIL import Image

from tests.kit.fault_images import save
from tests.search.serving import bomb

pytestmark = pytest.mark.slow
logger = logging.getLogger(__name__)
ROOT = Path(__file__).parents[2]
MB = 1 << 20


class Process:
    """`search.py --serve` on a free port, and the memory that it takes."""

    def __init__(self, index: Path):
        command = [sys.executable, "scripts/search.py", "--index_dir", str(index), "--serve", "--port", "0"]
        self.running = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True
        )
        assert self.running.stderr is not None
        said = next(line for line in self.running.stderr if "http://" in line)
        self.url = re.search(r"http://\S+:\d+", said)[0]  # type: ignore[index]
        self.port = int(self.url.rpartition(":")[2])

    @property
    def megabytes(self) -> int:
        return psutil.Process(self.running.pid).memory_info().rss // MB

    def ask(self, path: str, body: bytes | None = None) -> int | str:
        """Return the status of the answer, or the name of the error."""
        try:
            with urllib.request.urlopen(self.url + path, body, timeout=300) as answer:
                json.load(answer)
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError as error:
            return type(error.reason if isinstance(error, urllib.error.URLError) else error).__name__

    def under(self, name: str, attack: Callable[[], Counter]) -> Counter:
        """Run an attack, with the most memory during it; the server answers afterwards."""
        before, most, begun = self.megabytes, 0, time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(attack)
            while not running.done():
                most = max(most, self.megabytes)
                time.sleep(0.02)
        outcome = running.result()
        assert self.ask("/search?q=afterwards") == 200
        seconds = time.perf_counter() - begun
        outcomes = ", ".join(f"{count:,} x {status}" for status, count in outcome.most_common())
        logger.info("| %s | %s | %.1f s | %d | %d | %d |", name, outcomes, seconds, before, most, self.megabytes)
        self.growth, self.peak = self.megabytes - before, most - before
        return outcome


@pytest.fixture(scope="module")
def process(index: Path) -> Iterator[Process]:
    process = Process(index)
    buffer = save(Image.new("RGB", (64, 64), "red"), "PNG")
    for _ in range(3):  # what is loaded at the first use
        assert process.ask("/search", buffer) == 200
        assert process.ask("/search?q=warm") == 200
    yield process
    process.running.terminate()
    process.running.wait(20)


def query(process: Process, number: int) -> int | str:
    return process.ask(f"/search?k=100&q={quote(f'a red circle, number {number}')}")


def upload(process: Process, number: int, chunked: bool) -> int | str:
    """Send 100 MB of no image; return the status, or what became of the connection."""
    with socket.create_connection(("127.0.0.1", process.port), timeout=120) as connection:
        length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {100 * MB}"
        try:
            connection.sendall(f"POST /search HTTP/1.1\r\nHost: 127.0.0.1\r\n{length}\r\n\r\n".encode())
            for _ in range(100):
                connection.sendall((b"100000\r\n" if chunked else b"") + bytes(MB) + (b"\r\n" if chunked else b""))
        except OSError:
            pass
        try:
            return int(connection.recv(100).split(b" ")[1])
        except OSError:
            return "closed"


def picture(content: Callable[[], bytes]) -> Callable[[Process, int], int | str]:
    body = functools.cache(content)
    return lambda process, _: process.ask("/search", body())


def white() -> bytes:
    """A PNG of the most pixels that are decoded, in 120 kB."""
    return save(Image.new("RGB", (6300, 6300), "white"), "PNG")


INF = float("inf")
ATTACKS = {  # what is asked, how often, by how many threads; what may be answered; MB at most meanwhile, and that stay
    "1,000 queries at once": (query, 1000, 1000, {200}, INF, INF),
    "1,000 queries at once, again": (query, 1000, 1000, {200}, INF, 50),
    "8 uploads of 100 MB at once": (functools.partial(upload, chunked=False), 8, 8, {413, "closed"}, 250, 100),
    "the same, of unknown length": (functools.partial(upload, chunked=True), 8, 8, {413, "closed"}, 250, 100),
    "50 uploads of 20 MB at once": (picture(lambda: bytes(20 * MB)), 50, 50, {400}, 400, 150),
    "10 PNGs of 39.7 million pixels at once": (picture(white), 10, 10, {200}, 400, INF),
    "100 PNGs of 3.6 billion pixels at once": (picture(lambda: bomb(60_000)), 100, 50, {400}, INF, 100),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_it_answers_and_its_memory_does_not_grow(name: str, process: Process) -> None:
    ask, count, threads, statuses, peak, growth = ATTACKS[name]

    def attack() -> Counter:
        with ThreadPoolExecutor(threads) as pool:
            return Counter(pool.map(lambda number: ask(process, number), range(count)))

    assert set(process.under(name, attack)) <= statuses
    assert process.peak < peak
    assert process.growth < growth


def test_connections_that_say_nothing(process: Process) -> None:
    """They do not keep others out."""

    def hold() -> Counter:
        held = [socket.create_connection(("127.0.0.1", process.port), timeout=60) for _ in range(500)]
        for each in held:
            each.sendall(b"GET / HTTP/1.1\r\nHost: 127")
        found = Counter([process.ask("/search?q=meanwhile")])
        for each in held:
            each.close()
        return found

    assert process.under("a query beside 500 half requests", hold) == {200: 1}
    assert process.growth < 100
