"""The page and the API answer their user, and nobody else: names, origins, paths, sizes and texts that an attacker would send."""

import io
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
import uvicorn
from accelerate import Accelerator
from PIL import Image

from mm_utils.search import server
from mm_utils.search.listing import Listing, folder_listing, list_folder
from mm_utils.search.searcher import Searcher
from mm_utils.search.updating import update_index
from scripts import search
from tests.search.conftest import make_embedder, write_photos
from tests.search.serving import EVIL_CAPTION, EVIL_NAME, Served, bomb, served


@pytest.fixture(scope="module")
def searcher(reranking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Searcher:
    """An index of 40 pictures, whose captions, and one of whose names, would run a script on a careless page."""
    folder = tmp_path_factory.mktemp("served")
    write_photos(folder / "photos", range(39))
    (folder / "photos/0/000.png").rename(folder / "photos" / EVIL_NAME)
    write_photos(folder / "photos", range(1))
    listing = folder_listing(str(folder / "photos"), *list_folder(str(folder / "photos")))
    rows = {"image": listing.rows["image"][:], "captions": [[EVIL_CAPTION]] * len(listing.ids)}
    listing = Listing(listing.ids, datasets.Dataset.from_dict(rows, listing.rows.features))
    update_index(
        folder / "index", str(reranking_model), listing, make_embedder(reranking_model), Accelerator(cpu=True)
    )
    return Searcher(folder / "index", device="cpu", rerank_top_k=8)


@pytest.fixture(scope="module")
def page(searcher: Searcher) -> Iterator[Served]:
    yield from served(searcher)


# -- answers ------------------------------------------------------------------------------------------------------------


def test_pages_of_an_answer_join_to_the_whole(page: Served) -> None:
    expected = [hit.row for hit in page.searcher.search_text("a red circle", 40)]
    first, second = page.ask("/search?q=a+red+circle&k=25"), page.ask("/search?q=a+red+circle&k=25&offset=25")
    assert [hit["row"] for hit in first.hits + second.hits] == expected
    assert (first.json["total"], first.json["more"], second.json["more"]) == (40, True, False)
    assert first.json["reranks"]
    plain = page.ask("/search?q=a+red+circle&k=40&rerank=0").hits
    assert [hit["row"] for hit in plain] == [
        hit.row for hit in page.searcher.search_text("a red circle", 40, rerank=False)
    ]
    assert all(hit["reranked"] is None for hit in plain)


def test_an_image_and_its_neighbours(page: Served) -> None:
    own = page.searcher.search_text("x", 1)[0]
    content = Path(own.path).read_bytes()
    found = page.ask("/search?k=3", "POST", content, origin=f"http://127.0.0.1:{page.port}")
    assert found.hits[0]["row"] == own.row
    near = page.ask(f"/similar/{own.row}?k=3&id={own.id}").hits
    assert [hit["row"] for hit in near] == [hit.row for hit in page.searcher.similar(own.row, 3)]
    thumbnail = page.ask(f"/image/{own.row}")
    assert thumbnail.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(thumbnail.body)).format == "JPEG"


def test_hits_are_weak_from_the_last_above_the_floor_on(page: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert -1 <= page.searcher.floor <= 1
    scores = [hit.score for hit in page.searcher.search_text("x", 40)]
    monkeypatch.setitem(page.searcher.__dict__, "floor", sorted(scores)[20])
    weak = [hit["weak"] for hit in page.ask("/search?q=x&k=40").hits]
    last = max(place for place, score in enumerate(scores) if score > sorted(scores)[20])
    assert weak == [place > last for place in range(40)]
    assert not any(hit["weak"] for hit in page.ask("/similar/3").hits)


def test_the_page_loads_nothing_from_elsewhere(page: Served) -> None:
    answer = page.ask("/")
    text = answer.body.decode()
    assert answer.status == 200
    assert len(answer.body) <= 60_000
    assert not re.search(r"https?:|//|url\(|@import", text)
    assert "innerHTML" not in text
    assert " style=" not in text
    assert not re.search(r" on\w+=", text)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/search", 400),
        ("/search?q=", 400),
        ("/search?q=" + "x" * 1001, 400),
        ("/search?q=x&k=0", 400),
        ("/search?q=x&k=101", 400),
        ("/search?q=x&offset=-1", 400),
        ("/search?q=x&offset=99999999999999999999", 400),
        ("/search?q=x&k=%D9%A3", 400),
        ("/similar/40", 404),
        ("/similar/3?id=another", 404),
        ("/image/99999999999999999999", 404),
        ("/image/" + "9" * 5000, 404),
        ("/similar/-1", 404),
        ("/content/%D9%A3", 404),
        ("/nothing", 404),
    ],
)
def test_mistakes_are_answered_in_json(page: Served, path: str, status: int) -> None:
    answer = page.ask(path)
    assert answer.status == status
    assert answer.json["error"]


# -- attacks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/image/../../../../etc/passwd",
        "/image/..%2f..%2f..%2fetc%2fpasswd",
        "/image//etc/passwd",
        "/image/0/../../index.json",
        "/image/-1",
        "/image/0%00.jpg",
        "/image/%2e%2e/%2e%2e/etc/hostname",
        "/etc/passwd",
        "//etc/passwd",
        "/index.json",
        "/page.html",
        "/static/../mm_utils/search/server.py",
    ],
)
def test_no_path_leads_to_a_file(page: Served, path: str) -> None:
    answer = page.ask(path)
    assert answer.status == 404
    assert b"root:" not in answer.body
    assert len(answer.body) < 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.example@127.0.0.1",
        "127.0.0.1@evil.example",
        "192.168.0.1",
        "0.0.0.0",
        "",
        "[::1",
        "localhost#.evil.example",
    ],
)
def test_another_name_is_refused(page: Served, host: str) -> None:
    """A page of evil.example whose name was made to lead here (DNS rebinding) sends its own name."""
    for path in ("/", "/search?q=x", "/image/0"):
        answer = page.ask(path, host=host)
        assert answer.status == 403 or (answer.status == 400 and not host)
        assert b"hits" not in answer.body


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "",
        "http://127.0.0.1",
        "http://localhost:1",
        "http://127.0.0.1.evil.example",
        "file://",
    ],
)
def test_other_pages_are_refused(page: Served, origin: str) -> None:
    for path, method in (("/search?q=x", "GET"), ("/search", "POST"), ("/image/0", "GET")):
        assert page.ask(path, method, b"x" if method == "POST" else None, origin=origin).status == 403


def test_images_are_not_embedded_in_other_pages(page: Served) -> None:
    """An image element of another page sends no Origin."""
    assert page.ask("/image/0", sec_fetch_site="cross-site", sec_fetch_mode="no-cors").status == 403
    assert page.ask("/search?q=x", sec_fetch_site="same-site", sec_fetch_mode="no-cors").status == 403
    assert page.ask("/image/0", sec_fetch_site="same-origin").status == 200
    assert page.ask("/", sec_fetch_site="cross-site", sec_fetch_mode="navigate").status == 200
    assert page.ask("/image/0").headers["cross-origin-resource-policy"] == "same-origin"


def test_too_large_an_upload_is_refused_early(page: Served) -> None:
    declared = page.ask("/search", "POST", b"x", **{"content-length": str(server.MOST_BYTES + 1)})
    assert declared.status == 413
    connection = socket.create_connection(("127.0.0.1", page.port), timeout=30)
    connection.sendall(b"POST /search HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    block, sent = b"100000\r\n" + bytes(1 << 20) + b"\r\n", 0
    try:
        for _ in range(40):
            connection.sendall(block)
            sent += 1
    except OSError:
        pass
    connection.settimeout(10)
    try:
        assert b" 413 " in connection.recv(100)
    except ConnectionResetError:
        assert sent < 40
    connection.close()


@pytest.mark.parametrize(
    "content",
    [bomb(9_000), bomb(60_000), b"", b"no image", b"<svg onload='x'/>", b"\xff\xd8\xff" + bytes(100)],
    ids=["large", "bomb", "empty", "text", "svg", "broken"],
)
def test_bombs_and_other_things_are_no_images(page: Served, content: bytes) -> None:
    answer = page.ask("/search", "POST", content)
    assert answer.status == 400
    assert "cannot be read" in answer.json["error"]


def test_a_slow_file_and_half_a_request_do_no_harm(
    searcher: Searcher, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Others are answered meanwhile; a file that does not arrive is refused; one that is broken off leaves no traceback."""
    monkeypatch.setattr(server, "_SECONDS", 1)
    running = served(searcher)
    site = next(running)
    head = f"POST /search HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\n"
    opened = [socket.create_connection(("127.0.0.1", site.port), timeout=30) for _ in range(48)]
    for number, each in enumerate(opened):
        each.sendall((f"{head}Content-Length: 1000\r\n\r\nabc" if number < 8 else head).encode())
    opened[7].close()
    assert site.ask("/search?q=meanwhile").status == 200
    assert b" 408 " in opened[0].recv(100)
    assert site.ask("/search", "POST", b"no image").status == 400
    for each in opened:
        each.close()
    time.sleep(0.5)
    next(running, None)
    assert capfd.readouterr().err == ""


def test_texts_stay_data(page: Served) -> None:
    hits = page.ask("/search?q=x&k=100").hits
    assert {hit["captions"][0] for hit in hits} == {EVIL_CAPTION}
    assert page.ask("/search?q=x").headers["content-type"] == "application/json"
    assert b"<script>document" not in page.ask("/?q=<script>document.title=1</script>").body


def test_the_script_serves_this_machine_alone(
    index: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = []

    def run(self: uvicorn.Server, sockets: list[socket.socket]) -> None:
        addresses.extend(each.getsockname() for each in sockets)

    monkeypatch.setattr(uvicorn.Server, "run", run)
    with caplog.at_level("INFO", "mm_utils"):
        search.main(["--index_dir", str(index), "--serve", "--port", "0"])
    [(host, port)] = addresses
    assert host == "127.0.0.1"
    assert f"30 images at http://127.0.0.1:{port}/" in caplog.text
