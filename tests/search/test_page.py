"""The page in a browser: text, images, similar ones, re-ranking; by mouse and keyboard, seen and read aloud; and no attack."""

import base64
import copy
import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mm_utils.data.images import open_image
from mm_utils.search.narrowed import Filter
from mm_utils.search.searcher import Hit
from tests.kit.corpora import COLOURS, SHAPES, draw
from tests.kit.fault_images import save
from tests.search.serving import EVIL_CAPTION, EVIL_NAME, Served, served

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
expect = playwright.expect
expect.set_options(timeout=20_000)
KINDS = [(colour, shape) for shape in SHAPES for colour in COLOURS]
RERANKED = 10
START = "Write what the image shows, or drop or paste an image on this page."


class ColourSearcher:
    """Searches 40 pictures: the towers see their colours, and the head their shapes, too.

    Rows come shape by shape: of each kind 5, first circles in all colours, then squares. The first picture has a hostile
    caption and a hostile name.
    """

    info, reranks, floor, folder = SimpleNamespace(medium="image"), True, -0.2, ""

    def __init__(self) -> None:
        self.kinds = [kind for kind in KINDS for _ in range(5)]
        self.ids = [f"{colour}/{shape}-{row}.png" for row, (colour, shape) in enumerate(self.kinds)]
        self.captions = [[f"a {colour} {shape}", f"picture {row}"] for row, (colour, shape) in enumerate(self.kinds)]
        self.ids[0], self.captions[0] = EVIL_NAME, [EVIL_CAPTION]

    def __len__(self) -> int:
        return len(self.kinds)

    def search_text(self, text: str, top_k: int, rerank: bool) -> list[Hit]:
        order = self._order(next((colour for colour in COLOURS if colour in text), ""))
        if not rerank:
            return self._hits(order[:top_k])
        head = {row: score + 20.0 * (self.kinds[row][1] in text) for row, score in order[:RERANKED]}
        first = sorted(order[:RERANKED], key=lambda each: -head[each[0]])
        return self._hits([*first, *order[RERANKED:]][:top_k], head)

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
        rows = range(0, 40, 40 // count)[:count]
        return [
            {"row": row, "id": self.ids[row], "path": f"/photos/{self.ids[row]}", "captions": self.captions[row]}
            for row in rows
        ]

    def within(self, given: Filter) -> "ColourSearcher":
        new = copy.copy(self)
        new.folder = given.folder
        return new

    @property
    def searched(self) -> int:
        return sum(name.startswith(self.folder) for name in self.ids)

    def large(self, row: int) -> bytes:
        return encoded(*self.kinds[row], "JPEG", 480)

    def thumbnail(self, row: int) -> bytes:
        return encoded(*self.kinds[row], "JPEG")

    def _order(self, colour: str) -> list[tuple[int, float]]:
        rows = [row for row, name in enumerate(self.ids) if name.startswith(self.folder)]
        scores = [(row, 0.9 * (self.kinds[row][0] == colour) - 0.01 * row) for row in rows]
        return sorted(scores, key=lambda each: -each[1])

    def _hits(self, order: list[tuple[int, float]], head: dict[int, float] | None = None) -> list[Hit]:
        return [
            Hit(row, rank, score, (head or {}).get(row), self.ids[row], f"/photos/{self.ids[row]}", self.captions[row])
            for rank, (row, score) in enumerate(order, 1)
        ]


def encoded(colour: str, shape: str, kind: str = "PNG", side: int = 48) -> bytes:
    return save(draw(colour, shape).resize((side, side)), kind)


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser.new_context()
        browser.close()


@pytest.fixture(scope="module")
def site() -> Iterator[Served]:
    yield from served(ColourSearcher())


class Visit:
    """A tab that remembers what it asked for and complained about."""

    def __init__(self, context: Any, site: Served):
        self.home, self.tab = f"http://127.0.0.1:{site.port}", context.new_page()
        self.tab.set_default_timeout(20_000)
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.tab.on("request", lambda request: self.asked.append(f"{request.method} {request.url}"))
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.begin()

    def begin(self) -> None:
        """Open the page anew, as a visitor who has seen nothing."""
        self.tab.emulate_media(color_scheme="light")
        self.tab.set_viewport_size({"width": 1000, "height": 700})
        self.tab.unroute_all()
        self.tab.goto(self.home)
        self.asked.clear()
        self.complaints.clear()

    def find(self, text: str) -> None:
        self.tab.get_by_role("searchbox").fill(text)
        self.tab.get_by_role("button", name="Search", exact=True).click()
        self.finds("24 of 40 images, best first.")

    def finds(self, status: str) -> None:
        expect(self.tab.get_by_role("status")).to_have_text(status)

    def titles(self, count: int = 3) -> list[str]:
        return [image.get_attribute("alt") for image in self.tab.locator("#hits img").all()[:count]]

    def facts(self, number: int) -> dict[str, str]:
        """What a card says of its scores, by name."""
        card = self.tab.locator("#hits li").nth(number - 1)
        return dict(zip(*(card.locator(tag).all_inner_texts() for tag in ("dt", "dd")), strict=True))

    def hand_over(self, kind: str, content: bytes, name: str, zeros: int = 0) -> None:
        """Drop a file on the page, or paste it; `zeros` bytes of 0 follow its content."""
        self.tab.evaluate(
            """([kind, content, name, zeros]) => {
                const data = new DataTransfer(), bytes = Uint8Array.from(atob(content), each => each.charCodeAt(0));
                if (name) data.items.add(new File([bytes, new Uint8Array(zeros)], name, {type: "image/png"}));
                const event = kind === "paste" ? new ClipboardEvent(kind, {clipboardData: data, bubbles: true, cancelable: true})
                                               : new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true});
                document.body.dispatchEvent(event);
            }""",
            [kind, base64.b64encode(content).decode(), name, zeros],
        )


@pytest.fixture(scope="module")
def opened(context: Any, site: Served) -> Visit:
    return Visit(context, site)


@pytest.fixture
def visit(opened: Visit) -> Iterator[Visit]:
    """A visit that asks nobody else, logs nothing, and runs no script of a caption."""
    opened.begin()
    yield opened
    addresses = [request.split(" ")[1] for request in opened.asked]
    assert addresses
    assert all(each.startswith((f"{opened.home}/", f"blob:{opened.home}/")) for each in addresses)
    assert opened.complaints == []
    assert opened.tab.title() != "hacked"


# -- searching ----------------------------------------------------------------------------------------------------------


def test_a_text_finds_its_picture_first_and_re_ranking_is_told_and_turned_off(visit: Visit) -> None:
    visit.finds(START)
    visit.tab.get_by_role("searchbox").fill("a green square")
    visit.tab.keyboard.press("Enter")
    visit.finds("24 of 40 images, best first.")
    assert visit.tab.title() == "a green square – Search images"
    expect(visit.tab.locator("#hits img").first).to_have_js_property("naturalWidth", 48)
    visit.tab.reload()
    visit.finds("24 of 40 images, best first.")
    expect(visit.tab.get_by_role("searchbox")).to_have_value("a green square")
    assert visit.titles() == ["a green square"] * 3
    assert visit.facts(1) == {"similarity": "0.650", "re-ranked": "20.650", "place": "6 → 1"}
    assert visit.facts(6) == {"similarity": "0.850", "re-ranked": "0.850", "place": "1 → 6"}
    assert visit.facts(11) == {"similarity": "0.000"}
    visit.tab.get_by_role("checkbox", name="re-ranked").uncheck()
    expect(visit.tab.locator("#hits img").first).to_have_attribute("alt", "a green circle")
    assert visit.facts(1) == {"similarity": "0.850"}
    assert visit.titles(6) == ["a green circle"] * 5 + ["a green square"]
    visit.tab.get_by_role("button", name="More").click()
    visit.finds("40 of 40 images, best first.")


def test_a_dropped_file(visit: Visit) -> None:
    visit.hand_over("drop", encoded("yellow", "circle"), "sun.png")
    visit.finds("40 of 40 images, best first.")
    assert visit.titles(10) == ["a yellow circle"] * 5 + ["a yellow square"] * 5
    expect(visit.tab.locator("#asked")).to_have_text("Like sun.png")
    expect(visit.tab.locator("#asked-image")).to_have_js_property("naturalWidth", 48)


def test_mistakes_are_said(visit: Visit) -> None:
    visit.hand_over("drop", b"", "")
    visit.finds("That is not a file. Drop, paste or choose the file of an image.")
    visit.hand_over("drop", b"", "large.png", 20 * 2**20 + 1)
    visit.finds("The image has more than 20 MB. Shrink it.")
    assert not [each for each in visit.asked if each.startswith("POST")]
    assert visit.complaints == []
    visit.hand_over("paste", b"no image", "broken.png")
    visit.finds(
        "The image cannot be read: it is not an image, or in an unknown format. Choose a JPEG, PNG or WebP file."
    )
    expect(visit.tab.locator("#asked-image")).to_be_hidden()
    visit.tab.get_by_role("searchbox").press("Enter")
    visit.finds(START)
    visit.tab.route("**/search?**", lambda route: route.fulfill(status=503, body="Service Unavailable"))
    visit.tab.get_by_role("searchbox").fill("red")
    visit.tab.keyboard.press("Enter")
    visit.finds("The search has failed (503). Try again.")
    visit.tab.route("**/search?**", lambda route: route.abort())
    visit.tab.keyboard.press("Enter")
    visit.finds("The search does not answer. Is it still served?")
    visit.complaints.clear()  # the browser logs each of the last three


def test_a_click_opens_the_picture_large(visit: Visit) -> None:
    visit.find("a blue square")
    visit.tab.get_by_role("button", name="Open number 1, a blue square").click()
    dialog = visit.tab.get_by_role("dialog")
    expect(dialog.locator("img")).to_have_js_property("naturalWidth", 480)
    assert dialog.locator(".path").inner_text().startswith("/photos/blue/square-")
    visit.tab.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    visit.tab.get_by_role("button", name="Open number 1, a blue square").click()
    dialog.get_by_role("button", name="Similar").click()
    expect(visit.tab.locator("#asked")).to_have_text("Like a blue square")


def test_a_filter_narrows_every_query_and_stays_in_the_address(visit: Visit) -> None:
    visit.find("a blue square")
    visit.tab.get_by_role("button", name="Filter").click()
    visit.tab.get_by_label("Folder").fill("green/")
    visit.tab.get_by_label("Folder").press("Enter")
    visit.finds("10 of 10 images, best first.")
    assert set(visit.titles(10)) == {"a green circle", "a green square"}
    visit.tab.get_by_role("button", name="Similar to number 1,").click()
    visit.finds("9 of 10 images, best first.")
    visit.tab.reload()
    visit.finds("9 of 10 images, best first.")
    expect(visit.tab.get_by_label("Folder")).to_have_value("green/")
    visit.tab.get_by_label("Changed from").fill("2024-05-31")
    visit.finds("9 of 10 images, best first.")
    assert "folder=green%2F&since=2024-05-31" in visit.tab.url
    visit.tab.go_back()
    expect(visit.tab.get_by_label("Changed from")).to_have_value("")
    visit.tab.get_by_label("Folder").fill("")
    visit.tab.get_by_label("Folder").press("Enter")
    visit.finds("24 of 40 images, best first.")


# -- without a mouse, in the dark, on a phone ---------------------------------------------------------------------------


def test_keys_alone(visit: Visit) -> None:
    focused = visit.tab.locator("*:focus")
    expect(visit.tab.get_by_role("searchbox")).to_be_focused()
    visit.tab.keyboard.type("a green square")
    visit.tab.keyboard.press("Enter")
    visit.finds("24 of 40 images, best first.")
    press = visit.tab.keyboard.press
    for name in (
        "Search",
        "Search by image…",
        "Filter",
        "re-ranked",
        "Open number 1, a green square",
        "Similar to number 1, a green square",
    ):
        press("Tab")
        expect(
            visit.tab.get_by_label(name, exact=True).or_(visit.tab.get_by_role("button", name=name, exact=True))
        ).to_be_focused()
        assert focused.evaluate("each => getComputedStyle(each.closest('.file') || each).outlineStyle") == "solid"
    press("Enter")
    expect(visit.tab.locator("#asked")).to_have_text("Like a green square")
    expect(visit.tab.locator("#hits img").first).to_have_attribute("alt", "a green circle")
    expect(visit.tab.get_by_role("status")).to_be_focused()
    press("Tab")
    assert "Open number 1," in focused.get_attribute("aria-label")


# -- attacks ------------------------------------------------------------------------------------------------------------


def test_scripts_in_captions_and_names_are_text(visit: Visit) -> None:
    visit.find("a red circle")
    card = visit.tab.locator("#hits li").filter(has_text=EVIL_NAME)
    expect(card.locator(".caption")).to_have_text(EVIL_CAPTION)
    expect(card.locator(".path")).to_have_text(EVIL_NAME)
    card.get_by_role("button", name="Open").click()
    expect(visit.tab.locator("#large-title")).to_contain_text(EVIL_CAPTION)
    visit.tab.get_by_role("dialog").get_by_role("button", name="Similar").click()
    expect(visit.tab.locator("#asked")).to_have_text(f"Like {EVIL_CAPTION}")
    visit.hand_over("drop", encoded("red", "circle"), EVIL_NAME)
    expect(visit.tab.locator("#asked")).to_have_text(f"Like {EVIL_NAME}")
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
