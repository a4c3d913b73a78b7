"""The page in a browser: text, images, similar ones, re-ranking, a filter; by mouse and keyboard; and no attack."""

import base64
import copy
import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mm_utils.data.images import open_image
from mm_utils.search.searcher import Filter, Hit
from tests.kit.corpora import COLOURS, SHAPES, draw
from tests.kit.fault_images import save
from tests.search.serving import EVIL_CAPTION, EVIL_NAME, Served, served

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
expect = playwright.expect
expect.set_options(timeout=20_000)
RERANKED = 10


class ColourSearcher:
    """Searches 40 pictures: the towers see their colours, and the head their shapes, too.

    Rows come shape by shape: of each kind 5, first circles in all colours, then squares. The first picture has a hostile caption and a
    hostile name, and the second stands for a copy, too.
    """

    info, reranks, floor, folder = SimpleNamespace(medium="image"), True, -0.2, ""

    def __init__(self) -> None:
        self.kinds = [(colour, shape) for shape in SHAPES for colour in COLOURS for _ in range(5)]
        self.ids = [f"{colour}/{shape}-{row}.png" for row, (colour, shape) in enumerate(self.kinds)]
        self.captions = [[f"a {colour} {shape}", f"picture {row}"] for row, (colour, shape) in enumerate(self.kinds)]
        self.ids[0], self.captions[0] = EVIL_NAME, [EVIL_CAPTION]

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def searched(self) -> int:
        return sum(name.startswith(self.folder) for name in self.ids)

    def within(self, part: Filter) -> "ColourSearcher":
        new = copy.copy(self)
        new.folder = part.folder
        return new

    def search_text(self, text: str, top_k: int, rerank: bool) -> list[Hit]:
        order = self._order(next((colour for colour in COLOURS if colour in text), ""))
        head = {row: score + 20.0 * (self.kinds[row][1] in text) for row, score in order[:RERANKED] if rerank}
        first = sorted(order[: len(head)], key=lambda each: -head[each[0]])
        return self._hits([*first, *order[len(head) :]][:top_k], head)

    def search_file(self, file: bytes, top_k: int) -> list[Hit]:
        image = open_image({"bytes": file, "path": None})
        middle = image.getpixel((image.width // 2, image.height // 2))
        colour = min(COLOURS, key=lambda name: sum(abs(a - b) for a, b in zip(COLOURS[name], middle, strict=True)))
        return self._hits(self._order(colour)[:top_k])

    def similar(self, row: int, top_k: int) -> list[Hit]:
        return self._hits([each for each in self._order(self.kinds[row][0]) if each[0] != row][:top_k])

    def row_of(self, name: str, row: int) -> int:
        return self.ids.index(name)

    def some(self, count: int) -> list[dict[str, Any]]:
        return [{"row": row, "id": self.ids[row], "path": "", "captions": self.captions[row]} for row in range(count)]

    def large(self, row: int) -> bytes:
        return encoded(*self.kinds[row], "JPEG", 480)

    def stored(self, row: int, column: str) -> bytes:
        return encoded(*self.kinds[row], "JPEG")

    def _order(self, colour: str) -> list[tuple[int, float]]:
        rows = [row for row, name in enumerate(self.ids) if name.startswith(self.folder)]
        return sorted(
            ((row, 0.9 * (self.kinds[row][0] == colour) - 0.01 * row) for row in rows), key=lambda hit: -hit[1]
        )

    def _hits(self, order: list[tuple[int, float]], head: dict[int, float] | None = None) -> list[Hit]:
        hits = []
        for rank, (row, score) in enumerate(order, 1):
            known = self.ids[row], f"/photos/{self.ids[row]}", self.captions[row], ["a copy.png"] if row == 1 else []
            hits.append(Hit(row, rank, score, (head or {}).get(row), *known))
        return hits


def encoded(colour: str, shape: str, kind: str = "PNG", side: int = 48) -> bytes:
    return save(draw(colour, shape).resize((side, side)), kind)


class Visit:
    """A tab that remembers what it asked for and complained about."""

    def __init__(self, context: Any, site: Served):
        self.home, self.tab = f"http://127.0.0.1:{site.port}", context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.tab.on("request", lambda request: self.asked.append(f"{request.method} {request.url}"))
        for event in ("console", "pageerror", "dialog"):
            self.tab.on(event, lambda said: self.complaints.append(getattr(said, "text", str(said))))
        self.tab.goto(self.home)

    def find(self, text: str) -> None:
        self.tab.get_by_role("searchbox").fill(text)
        self.tab.keyboard.press("Enter")
        self.finds("24 of 40 images, best first.")

    def finds(self, status: str) -> None:
        expect(self.tab.get_by_role("status")).to_have_text(status)

    def press(self, name: str, exact: bool = True) -> None:
        self.tab.get_by_role("button", name=name, exact=exact).click()

    def titles(self, count: int = 3) -> list[str]:
        return [image.get_attribute("alt") for image in self.tab.locator("#hits img").all()[:count]]

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


@pytest.fixture(scope="module")
def site() -> Iterator[Served]:
    yield from served(ColourSearcher())


@pytest.fixture
def visit(context: Any, site: Served) -> Iterator[Visit]:
    """A visit that asks nobody else, logs nothing, and runs no script of a caption."""
    visit = Visit(context, site)
    yield visit
    addresses = [request.split(" ")[1] for request in visit.asked]
    assert all(each.startswith((f"{visit.home}/", f"blob:{visit.home}/", "data:,")) for each in addresses)
    assert visit.complaints == []
    assert visit.tab.title() != "hacked"
    visit.tab.close()


def test_a_text_is_asked_by_keys_alone_and_re_ranking_is_told_and_turned_off(visit: Visit) -> None:
    visit.finds("Write what the image shows, or drop or paste an image on this page.")
    expect(visit.tab.get_by_role("searchbox")).to_be_focused()
    visit.tab.keyboard.type("a green square")
    visit.tab.keyboard.press("Enter")
    visit.finds("24 of 40 images, best first.")
    expect(visit.tab.locator("#hits img").first).to_have_js_property("naturalWidth", 48)
    visit.tab.reload()
    visit.finds("24 of 40 images, best first.")
    expect(visit.tab.get_by_role("searchbox")).to_have_value("a green square")
    assert visit.tab.title() == "a green square – Search images"
    assert visit.titles() == ["a green square"] * 3
    ranks = visit.tab.locator(".rank")
    assert ranks.nth(0).get_attribute("title") == "similarity 0.650, re-ranked 20.650"
    assert ranks.nth(10).get_attribute("title") == "similarity 0.000"
    assert visit.tab.locator(".rank[title*='a copy.png']").inner_text() == "12 +1"
    visit.tab.get_by_role("checkbox", name="re-ranked").uncheck()
    expect(visit.tab.locator("#hits img").first).to_have_attribute("alt", "a green circle")
    assert visit.titles(6) == ["a green circle"] * 5 + ["a green square"]
    visit.press("More")
    visit.finds("40 of 40 images, best first.")
    similar = visit.tab.get_by_role("button", name="Similar to number 1, a green circle", exact=True)
    similar.focus()
    visit.tab.keyboard.press("Enter")
    expect(visit.tab.locator("#asked")).to_contain_text("Like circle-")
    expect(visit.tab.get_by_role("status")).to_be_focused()
    visit.tab.go_back()
    expect(visit.tab.get_by_role("searchbox")).to_have_value("a green square")


def test_files_and_mistakes(visit: Visit) -> None:
    visit.hand_over("drop", encoded("yellow", "circle"), "sun.png")
    visit.finds("40 of 40 images, best first.")
    assert visit.titles(10) == ["a yellow circle"] * 5 + ["a yellow square"] * 5
    expect(visit.tab.locator("#asked")).to_have_text("Like sun.png")
    expect(visit.tab.locator("#asked-image")).to_have_js_property("naturalWidth", 48)
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
    visit.tab.get_by_role("searchbox").fill("red")
    visit.tab.keyboard.press("Enter")
    visit.finds("The search has failed (503). Try again.")
    visit.tab.route("**/search?**", lambda route: route.abort())
    visit.press("Search")
    visit.finds("The search does not answer. Is it still served?")
    visit.complaints.clear()  # the browser logs each of the last three


def test_a_picture_is_opened_large_and_a_filter_stays_in_the_address(visit: Visit) -> None:
    visit.find("a blue square")
    visit.press("Open number 1, a blue square")
    dialog = visit.tab.get_by_role("dialog")
    expect(dialog.locator("img")).to_have_js_property("naturalWidth", 480)
    assert dialog.locator("#large-path").inner_text().startswith("/photos/blue/square-")
    visit.tab.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    visit.press("Filter")
    visit.tab.get_by_label("Folder").fill("green/")
    visit.tab.get_by_label("Folder").press("Enter")
    visit.finds("10 of 10 images, best first.")
    visit.press("Similar to number 1,", exact=False)
    visit.finds("9 of 10 images, best first.")
    visit.tab.get_by_label("Changed from").fill("2024-05-31")
    visit.finds("9 of 10 images, best first.")
    assert "folder=green%2F&since=2024-05-31" in visit.tab.url
    visit.tab.go_back()
    expect(visit.tab.get_by_label("Changed from")).to_have_value("")
    expect(visit.tab.get_by_label("Folder")).to_have_value("green/")


def test_scripts_in_captions_and_names_are_text(visit: Visit) -> None:
    visit.find("a red circle")
    card = visit.tab.locator("#hits li").filter(has_text=EVIL_CAPTION)
    expect(card.locator(".caption")).to_have_text(EVIL_CAPTION)
    card.get_by_role("button", name="Open").click()
    expect(visit.tab.locator("#large-title")).to_contain_text(EVIL_CAPTION)
    expect(visit.tab.locator("#large-path")).to_contain_text(EVIL_NAME)
    visit.tab.get_by_role("dialog").get_by_role("button", name="Similar").click()
    expect(visit.tab.locator("#asked")).to_have_text(f"Like {EVIL_NAME}")
    visit.hand_over("drop", encoded("red", "circle"), EVIL_NAME)
    visit.tab.goto(f"{visit.home}/?q={EVIL_CAPTION}")
    visit.finds("24 of 40 images, best first.")
    assert visit.tab.locator("script").count() == 1
    assert visit.tab.locator("img[onerror]").count() == 0


def test_an_injected_script_would_not_run(visit: Visit) -> None:
    """If a text became markup after all, the policy would stop it."""
    visit.tab.evaluate("text => document.querySelector('#status').insertAdjacentHTML('beforeend', text)", EVIL_CAPTION)
    expect(visit.tab.locator("img[onerror]")).to_have_js_property("complete", True)  # the policy stops `eval`, too
    assert visit.tab.title() == "Search images"
    assert any("Content Security Policy" in complaint for complaint in visit.complaints)
    visit.complaints.clear()
