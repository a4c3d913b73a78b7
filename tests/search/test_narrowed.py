"""A part of an index, by folder and date: by the class, the command line and the API; and images that occur twice."""

import datetime
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from mm_utils.search.narrowed import Filter, table_of_copies
from mm_utils.search.searcher import Searcher
from scripts import search
from tests.search.conftest import update, write_photos
from tests.search.serving import Served, served

QUERY = "a red circle"
FILTERS = [  # a filter, and which of the 30 pictures it lets through: picture n lies in folder n % 2, changed on day n of May
    (Filter("1"), lambda n: n % 2 == 1),
    (Filter("/0/"), lambda n: n % 2 == 0),
    (Filter(since="2024-05-10"), lambda n: n >= 9),
    (Filter(until="2024-05-10"), lambda n: n <= 9),
    (Filter(since="2024-05-03", until="2024-05-03"), lambda n: n == 2),
    (Filter("1", "2024-05", "2024-05-20"), lambda n: n % 2 == 1 and n <= 19),
    (Filter(since="2024", until="2024-05"), lambda n: True),
    (Filter(until="2023"), lambda n: False),
    (Filter("00"), lambda n: False),
]


@pytest.fixture(scope="module")
def dated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The index of 30 pictures with dates, of which the last is the first in half its size."""
    folder = tmp_path_factory.mktemp("dated")
    write_photos(folder / "photos", range(29))
    with Image.open(folder / "photos/0/008.png") as image:
        image.resize((image.width * 3, image.height * 3)).save(folder / "photos/1/029.png")
    for path in folder.glob("photos/*/*.png"):
        when = datetime.datetime(2024, 5, 1 + int(path.stem), 23, 59).timestamp()
        os.utime(path, (when, when))
    update(folder / "index", model, folder / "photos")
    return folder / "index"


@pytest.fixture(scope="module")
def searcher(dated: Path) -> Searcher:
    return Searcher(dated, device="cpu")


@pytest.fixture(scope="module")
def site(searcher: Searcher) -> Iterator[Served]:
    yield from served(searcher)


@pytest.mark.parametrize(("given", "fits"), FILTERS, ids=[str(given) for given, _ in FILTERS])
def test_a_part_is_searched_as_the_whole_is(
    given: Filter, fits, searcher: Searcher, site: Served, dated: Path, capsys
):
    whole = searcher.search_text(QUERY, 30)
    right = [(hit.id, hit.score) for hit in whole if fits(int(hit.id[2:5]))]
    part = searcher.within(given)
    assert part.searched == len(right)
    for hits, expected in ((part.search_text(QUERY, 30), right), (part.search_text(QUERY, 2), right[:2])):
        assert [hit.id for hit in hits] == [name for name, _ in expected]
        assert [hit.score for hit in hits] == pytest.approx([score for _, score in expected], abs=1e-6)
    assert [hit.id for hit in part.similar(3, 30)] == [
        hit.id for hit in searcher.similar(3, 30) if fits(int(hit.id[2:5]))
    ]
    assert part.floor == searcher.floor
    words = [word for name, value in vars(given).items() if value for word in (f"--{name}", value)]
    asked = "&".join(f"{name}={value}" for name, value in vars(given).items() if value)
    found = site.ask(f"/search?q=a+red+circle&k=30&{asked}").json
    assert ([hit["id"] for hit in found["hits"]], found["total"]) == ([name for name, _ in right], len(right))
    if right:
        search.main(["--index_dir", str(dated), QUERY, "--json", "--top_k", "30", *words])
        assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == [name for name, _ in right]
    else:
        with pytest.raises(ValueError, match=r"lets no image of .* through"):
            search.main(["--index_dir", str(dated), QUERY, *words])


def test_a_filter_goes_with_every_query_and_ends_with_the_answer(site: Served, dated: Path) -> None:
    picture = (dated.parent / "photos/0/004.png").read_bytes()
    assert {hit["id"][0] for hit in site.ask("/search?folder=1", "POST", picture).hits} == {"1"}
    assert {hit["id"][0] for hit in site.ask("/similar/4?folder=1").hits} == {"1"}
    assert {hit["id"][0] for hit in site.ask("/similar/4").hits} == {"0", "1"}


@pytest.mark.parametrize("wrong", ["yesterday", "2024-13", "2024-02-30", "24-01-01", "0000", "9999-12-31"])
def test_a_date_of_another_form_is_named(wrong: str, site: Served, dated: Path) -> None:
    with pytest.raises(ValueError, match=f"--since is {wrong}; .* Give a day such as 2024-05-31"):
        search.main(["--index_dir", str(dated), QUERY, "--since", wrong])
    answer = site.ask(f"/search?q=a&until={wrong}")
    assert (answer.status, answer.json["error"][:9]) == (400, "until is ")


def test_rows_without_a_file_have_no_date(searcher: Searcher) -> None:
    stored = searcher._rows.map(lambda row: {"mtime_ns": 0})
    assert not Filter(since="1970").mask(stored).any()
    assert not Filter(until="2030").mask(stored).any()


def test_pictures_that_occur_twice_are_listed(dated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search.main(["--index_dir", str(dated), "--copies", "--json"])
    groups = [[each["id"] for each in json.loads(line)] for line in capsys.readouterr().out.splitlines()]
    assert ["0/008.png", "1/029.png"] in groups
    search.main(["--index_dir", str(dated), "--copies"])
    shown = capsys.readouterr().out
    assert f"{len(groups)} pictures occur {sum(map(len, groups))} times" in shown
    assert table_of_copies([]) == ["No picture occurs twice"]
    assert str(dated.parent / "photos/1/029.png") in shown
    search.main(["--index_dir", str(dated), "--copies", "--folder", "1", "--json"])
    assert "0/008.png" not in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"--top_k is 3; --copies compares"):
        search.main(["--index_dir", str(dated), "--copies", "--top_k", "3"])
    with pytest.raises(ValueError, match=r"--folder is 1; the page and its API have their own"):
        search.main(["--index_dir", str(dated), "--serve", "--folder", "1"])
