"""The page and the API answer their user, and nobody else: names, origins, paths, sizes and texts that an attacker would send."""

import io
import re
from pathlib import Path

import pytest
from accelerate import Accelerator
from PIL import Image

from mm_utils.search import server
from mm_utils.search.listing import pair_listing
from mm_utils.search.searcher import Searcher
from mm_utils.search.updating import update_index
from scripts import search
from tests.kit.media_files import clip, media_rows, tone
from tests.kit.models import save_model
from tests.search.conftest import EVIL_CAPTION, Served, bomb, make_embedder, served

# -- answers ------------------------------------------------------------------------------------------------------------


def test_a_text_is_answered(page: Served) -> None:
    answer = page.ask("/search?q=a+red+circle&k=25").json
    assert [hit["row"] for hit in answer["hits"]] == [hit.row for hit in page.searcher.search_text("a red circle", 25)]
    assert answer["total"] == 40


def test_an_image_and_its_neighbours(page: Served) -> None:
    own = page.searcher.search_text("x", 1)[0]
    content = Path(own.path).read_bytes()
    answer = page.ask("/search?k=3", "POST", content, origin=f"http://127.0.0.1:{page.port}")
    assert [hit["row"] for hit in answer.json["own"]] == [own.row]
    assert own.row not in [hit["row"] for hit in answer.hits]
    near = page.ask(f"/similar/{own.row}?k=3").hits
    assert [hit["row"] for hit in near] == [hit.row for hit in page.searcher.similar(own.row, 3)]
    for path in (f"/image/{own.row}", f"/large/{own.row}"):
        assert Image.open(io.BytesIO(page.ask(path).body)).format == "JPEG"
    assert {hit["id"][0] for hit in page.ask("/search?folder=1", "POST", content).hits} == {"1"}
    assert {hit["id"][0] for hit in page.ask("/similar/4?folder=1").hits} == {"1"}


@pytest.mark.parametrize("medium", ["sound", "clip"])
def test_sounds_and_clips_are_played(medium: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", medium)
    media = [tone(pitch, 0) for pitch in (200, 900)] if medium == "sound" else [clip(["red", "lime"]), clip(["blue"])]
    listing = pair_listing({"train": media_rows(medium, media)})
    embedder = make_embedder(folder)
    update_index(tmp_path / "index", str(folder), listing, embedder, Accelerator(cpu=True))
    searcher = Searcher(tmp_path / "index", device="cpu")
    running = served(searcher)
    site = next(running)
    found = site.ask("/content/0")
    start = site.ask("/")
    assert f'data-medium="{medium}"' in start.body.decode()
    kind = "audio/wav" if medium == "sound" else "video/x-msvideo"
    assert (found.headers["content-type"], found.body) == (kind, media[0])
    if medium == "sound":
        assert site.ask("/search?k=3", "POST", media[1]).json["own"][0]["row"] == 1
    else:
        moving = site.ask("/large/0")
        assert moving.headers["content-type"] == "image/webp"
        with Image.open(io.BytesIO(moving.body)) as film:
            assert (film.n_frames, film.info["loop"]) == (2, 0)
    wrong = site.ask("/search", "POST", b"<script>")
    assert (wrong.status, f"The {medium} cannot be read" in wrong.json["error"]) == (400, True)
    assert next(running, None) is None


def test_the_page_loads_nothing_from_elsewhere(page: Served) -> None:
    answer = page.ask("/")
    text = answer.body.decode()
    assert len(answer.body) <= 60_000
    assert not re.search(r"https?:|//|url\(|@import| on\w+=", text)
    assert "innerHTML" not in text
    assert " style=" not in text
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


MISTAKES = {
    400: ("", "?q=", "?q=+%20", f"?q={'x' * 1001}", "?q=x&k=0", "?q=x&k=1001", "?q=x&k=-1", f"?q=x&k={'9' * 20}", "?q=x&k=%D9%A3",
          "?q=x&until=2024-13"),
    404: ("similar/40", f"image/{'9' * 20}", f"image/{'9' * 5000}", "similar/-1", "content/%D9%A3",
          "content/1", "nothing", "image/../../../../etc/passwd", "image/..%2f..%2f..%2fetc%2fpasswd", "image//etc/passwd",
          "image/0/../../index.json", "image/0%00.jpg", "image/%2e%2e/%2e%2e/etc/hostname", "etc/passwd", "/etc/passwd",
          "index.json", "page.html", "static/../mm_utils/search/server.py"),
}  # fmt: skip


@pytest.mark.parametrize("status", MISTAKES)
def test_mistakes_are_answered_in_json_and_no_path_leads_to_a_file(page: Served, status: int) -> None:
    for path in MISTAKES[status]:
        answer = page.ask(f"/search{path}" if status == 400 else f"/{path}")
        assert (answer.status, bool(answer.json["error"])) == (status, True), path
        assert b"root:" not in answer.body
        assert len(answer.body) < 200


# -- attacks ------------------------------------------------------------------------------------------------------------

HOSTS = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil.example@127.0.0.1",
]
HOSTS += ["127.0.0.1@evil.example", "192.168.0.1", "0.0.0.0", "", "[::1", "localhost#.evil.example"]
ORIGINS = [
    "http://evil.example",
    "null",
    "",
    "http://127.0.0.1",
    "http://localhost:1",
    "http://127.0.0.1.evil.example",
]


@pytest.mark.parametrize("host", HOSTS)
def test_another_name_is_refused(page: Served, host: str) -> None:
    """A page of evil.example whose name was made to lead here (DNS rebinding) sends its own name."""
    for path in ("/", "/search?q=x", "/image/0"):
        answer = page.ask(path, host=host)
        assert answer.status == 403 or (answer.status == 400 and not host)
        assert b"hits" not in answer.body


@pytest.mark.parametrize("origin", [*ORIGINS, "file://"])
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
    endless = page.ask("/search", "POST", None, transfer_encoding="chunked")
    assert (endless.status, endless.headers["connection"]) == (411, "close")


@pytest.mark.parametrize(
    "content",
    [bomb(9_000), bomb(60_000), b"", b"no image", b"<svg onload='x'/>", b"\xff\xd8\xff" + bytes(100)],
    ids=["large", "bomb", "empty", "text", "svg", "broken"],
)
def test_bombs_and_other_things_are_no_images(page: Served, content: bytes) -> None:
    answer = page.ask("/search", "POST", content)
    assert answer.status == 400
    assert "cannot be read" in answer.json["error"]


def test_texts_stay_data(page: Served) -> None:
    hits = page.ask("/search?q=x&k=100").hits
    assert {hit["captions"][0] for hit in hits} == {EVIL_CAPTION}
    assert page.ask("/search?q=x").headers["content-type"] == "application/json"
    assert b"<script>document" not in page.ask("/?q=<script>document.title=1</script>").body


def test_the_script_serves_this_machine_alone(
    index: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = []

    monkeypatch.setattr(server.PageServer, "serve_forever", lambda self: addresses.append(self.socket.getsockname()))
    with caplog.at_level("INFO", "mm_utils"):
        search.main(["--index_dir", str(index), "--serve", "--port", "0"])
    [(host, port)] = addresses
    assert host == "127.0.0.1"
    assert f"30 images at http://127.0.0.1:{port}/" in caplog.text
