"""The page in a browser: text, images, similar ones, re-ranking, a filter; by mouse and keyboard; and no attack."""

import base64
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.search.conftest import EVIL_CAPTION, EVIL_NAME, Served

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
expect = playwright.expect
expect.set_options(timeout=20_000)


class Visit:
    """A tab that remembers what it asked for and complained about."""

    def __init__(self, context: Any, page: Served):
        self.home = f"http://127.0.0.1:{page.port}"
        self.tab = context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.tab.on("request", lambda request: self.asked.append(f"{request.method} {request.url}"))
        for event in ("console", "pageerror", "dialog"):
            self.tab.on(event, lambda said: self.complaints.append(getattr(said, "text", str(said))))
        self.tab.goto(self.home)

    def find(self, text: str) -> None:
        self.tab.get_by_role("searchbox").fill(text)
        self.tab.keyboard.press("Enter")

    def finds(self, status: str, rows: list[int] | None = None) -> None:
        """Expect a status, and the first pictures to be those of rows."""
        expect(self.tab.get_by_role("status")).to_have_text(status)
        if rows is not None:
            shown = [image.get_attribute("src") for image in self.tab.locator("#hits img").all()]
            assert [int(re.search(r"/image/(\d+)", src)[1]) for src in shown][: len(rows)] == rows  # type: ignore[index]

    def hand_over(self, kind: str, content: bytes, name: str, zeros: int = 0) -> None:
        """Drop a file on the page, or paste it; `zeros` bytes of 0 follow its content."""
        self.tab.evaluate(
            """([kind, content, name, zeros]) => {
                const data = new DataTransfer(), bytes = Uint8Array.from(atob(content), each => each.charCodeAt(0));
                if (name) data.items.add(new File([bytes, new Uint8Array(zeros)], name, {type: "image/png"}));
                const how = {clipboardData: data, dataTransfer: data, bubbles: true, cancelable: true};
                document.body.dispatchEvent(kind === "paste" ? new ClipboardEvent(kind, how) : new DragEvent(kind, how));
            }""",
            [kind, base64.b64encode(content).decode(), name, zeros],
        )


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser.new_context()
        browser.close()


@pytest.fixture
def visit(context: Any, page: Served) -> Iterator[Visit]:
    """A visit that asks nobody else, logs nothing, and runs no script of a caption."""
    visit = Visit(context, page)
    yield visit
    addresses = [request.split(" ")[1] for request in visit.asked]
    assert all(each.startswith((f"{visit.home}/", f"blob:{visit.home}/", "data:,")) for each in addresses)
    assert visit.complaints == []
    assert visit.tab.title() != "hacked"
    visit.tab.close()


def test_a_text_is_asked_by_keys_alone_and_re_ranking_is_told(visit: Visit, page: Served) -> None:
    hits = page.searcher.search_text("a green square", 40)
    visit.finds("Write what the image shows, or dog -cat to leave out cats, or drop or paste an image on this page.")
    expect(visit.tab.locator("#hits li")).to_have_count(40)  # some of the index, in its order and without scores
    expect(visit.tab.locator(".scores").first).to_have_text("")
    expect(visit.tab.get_by_role("searchbox")).to_be_focused()
    visit.tab.keyboard.type("a green square")
    visit.tab.keyboard.press("Enter")
    visit.finds("40 of 40 images, best first.", [hit.row for hit in hits])
    expect(visit.tab.locator("#hits img").first).not_to_have_js_property("naturalWidth", 0)
    expect(visit.tab.get_by_role("searchbox")).to_have_value("a green square")
    assert visit.tab.title() == "a green square – Search images"
    scores = (("score", hits[0].score), ("re-ranked", hits[0].reranked))
    said = "1: " + ", ".join(f"{name} {score:.2f}" for name, score in scores)
    expect(visit.tab.locator(".scores").first).to_have_text(said)
    visit.tab.locator(".similar").first.focus()
    visit.tab.keyboard.press("Enter")
    visit.finds("39 of 40 images, best first.")
    expect(visit.tab.locator("#asked")).to_have_text(f"Like image {hits[0].row}")
    visit.tab.go_back()
    expect(visit.tab.get_by_role("searchbox")).to_have_value("a green square")


def test_files_and_mistakes(visit: Visit, page: Served) -> None:
    own = page.searcher.search_text("x", 1)[0]
    visit.hand_over("drop", Path(own.path).read_bytes(), "sun.png")
    visit.finds("39 of 40 images, best first.", [page.searcher.similar(own.row)[0].row])
    expect(visit.tab.locator("#asked")).to_have_text(f"Like sun.png, which is in the index: {own.path}")
    visit.hand_over("drop", b"", "")
    visit.finds("That is not a file. Drop, paste or choose the file of an image.")
    visit.hand_over("drop", b"", "large.png", 20 * 2**20 + 1)
    visit.finds("The image has more than 20 MB. Shrink it.")
    assert (sum(each.startswith("POST") for each in visit.asked), visit.complaints) == (1, [])
    visit.hand_over("paste", b"no image", "broken.png")
    wrong = "it is not an image, or in an unknown format. Choose a JPEG, PNG or WebP file."
    visit.finds(f"The image cannot be read: {wrong}")
    expect(visit.tab.locator("#asked-image")).to_be_hidden()
    visit.tab.route("**/search?**", lambda route: route.fulfill(status=503, body="Service Unavailable"))
    visit.find("red")
    visit.finds("The search has failed (503). Try again.")
    visit.tab.route("**/search?**", lambda route: route.abort())
    visit.tab.get_by_role("button", name="Search", exact=True).click()
    visit.finds("The search does not answer. Is it still served?")
    visit.complaints.clear()  # the browser logs each of the last three


def test_a_filter_stays_in_the_address(visit: Visit, page: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(page.searcher, "_level", 2.0)
        visit.find("a blue square")
        visit.finds("40 of 40 images, best first. Perhaps nothing fits: texts without meaning score as high.")
    visit.tab.get_by_text("Filter").click()
    visit.tab.get_by_label("Folder").fill("1/")
    visit.tab.get_by_label("Folder").press("Enter")
    visit.finds("19 of 19 images, best first.")
    visit.tab.get_by_label("Taken from").fill("2001-05-31")
    visit.tab.get_by_role("button", name="Search", exact=True).click()
    visit.tab.wait_for_url("**folder=1%2F&since=2001-05-31**")
    visit.finds("1 of 1 images, best first. 18 have no day and are left out.")
    visit.tab.go_back()
    expect(visit.tab.get_by_label("Taken from")).to_have_value("")
    expect(visit.tab.get_by_label("Folder")).to_have_value("1/")


def test_scripts_in_captions_and_names_are_text(visit: Visit, page: Served) -> None:
    """Also in the address. If one became markup after all, the policy would stop it."""
    page_of = page.searcher.search_text(EVIL_CAPTION, 40)
    visit.tab.goto(f"{visit.home}/?q={EVIL_CAPTION}")
    visit.finds("40 of 40 images, best first.")
    card = visit.tab.locator("#hits li").nth([hit.id for hit in page_of].index(EVIL_NAME))
    expect(card.locator(".caption")).to_have_text(EVIL_CAPTION)
    expect(card.locator(".path")).to_contain_text(EVIL_NAME)
    card.get_by_role("link", name="Open").click()
    layer = visit.tab.get_by_role("dialog")
    expect(layer.get_by_role("img")).not_to_have_js_property("naturalWidth", 0)
    expect(layer).to_contain_text(EVIL_CAPTION)
    expect(layer).to_contain_text(EVIL_NAME)
    visit.tab.keyboard.press("Escape")
    expect(layer).to_be_hidden()
    card.get_by_role("link", name="Open").press("Enter")
    layer.get_by_role("link", name="Similar").click()
    visit.finds("39 of 40 images, best first.")
    visit.tab.go_back()
    visit.finds("40 of 40 images, best first.")
    assert visit.tab.locator("script").count() == 1
    assert visit.tab.locator("img[onerror]").count() == 0
    visit.tab.evaluate("text => document.querySelector('#status').insertAdjacentHTML('beforeend', text)", EVIL_CAPTION)
    expect(visit.tab.locator("img[onerror]")).to_have_js_property("complete", True)  # the policy stops `eval`, too
    assert visit.complaints
    assert all("Content Security Policy" in complaint or "404" in complaint for complaint in visit.complaints)
    visit.complaints.clear()
