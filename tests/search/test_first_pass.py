"""A first pass changes which images are looked at, and never a score; a FAISS file answers for its own rows alone."""

from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch

from mm_utils.data.batches.column_cache import to_arrow
from mm_utils.search import first_pass
from mm_utils.search.first_pass import Hits, best
from mm_utils.search.index import IndexInfo, read_rows, replace_rows

WIDTH, ROWS = 48, 3000
KINDS = ["Flat", "IVF8,Flat;nprobe=8", "HNSW16;efSearch=200"]


def write(folder: Path, embeds_NE: torch.Tensor, block: int = 700) -> datasets.Dataset:
    """Write an index of embeddings alone, in tables of several sizes."""

    def tables() -> Iterator[pa.Table]:
        for low, high in ((0, 1), (1, block), *((at, at + block) for at in range(block, len(embeds_NE), block))):
            part = embeds_NE[low:high].half()
            known = {"embedding": to_arrow(part), "id": pa.array(map(str, range(low, low + len(part))))}
            yield pa.table([known.get(each.name, pa.nulls(len(part), each.type)) for each in columns], columns)

    columns = IndexInfo("", "", embeds_NE.shape[1]).columns
    folder.mkdir(exist_ok=True)
    replace_rows(folder, tables(), columns)
    rows = read_rows(folder, columns)
    assert rows is not None
    return rows


def open_find(kind: str | None, folder: Path, rows: datasets.Dataset) -> Callable[[torch.Tensor, int], Hits]:
    """A search for one query; among others it finds the same."""
    find = first_pass.open_find(kind, folder, rows)

    def one(query_E: torch.Tensor, count: int) -> Hits:
        [alone] = find(query_E[None], count)
        for together in (find(torch.stack([query_E, -query_E, query_E]), count)[place] for place in (0, 2)):
            assert dict(together) == pytest.approx(dict(alone), abs=1e-6)
        return alone

    return one


def unit(rows: int, seed: int = 0) -> torch.Tensor:
    """Unit vectors whose first dimensions vary most, as a closed form's do."""
    drawn = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(drawn / torch.arange(1, WIDTH + 1), dim=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("first_pass") / "index"
    write(place, unit(ROWS))
    return place


@pytest.fixture(scope="module")
def rows(folder: Path) -> datasets.Dataset:
    found = read_rows(folder, IndexInfo("", "", WIDTH).columns)
    assert found is not None
    return found


def test_exact_search_is_a_product_with_all(rows: datasets.Dataset, folder: Path) -> None:
    find, embeds_NE = open_find(None, folder, rows), unit(ROWS).half().float()
    for query_E in unit(5, seed=1):
        score_N = embeds_NE @ query_E
        found = find(query_E, 20)
        assert [row for row, _ in found] == score_N.argsort(descending=True)[:20].tolist()
        assert [score for _, score in found] == pytest.approx(score_N.sort(descending=True).values[:20].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_a_first_pass_finds_what_exact_search_finds_with_its_scores(
    kind: str, rows: datasets.Dataset, folder: Path
) -> None:
    exact, find = open_find(None, folder, rows), open_find(kind, folder, rows)
    shares = []
    for query_E in unit(20, seed=1):
        everything = dict(exact(query_E, ROWS))
        found, expected = find(query_E, 10), exact(query_E, 10)
        assert dict(found) == pytest.approx({row: everything[row] for row, _ in found})
        assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
        shares.append(len(dict(found).keys() & dict(expected).keys()) / 10)
    assert np.mean(shares) > 0.99


def test_equal_scores_keep_the_order_of_the_index() -> None:
    scores = torch.tensor([0.5, 0.7, 0.5, 0.7, 0.5])
    assert [best(scores, k) for k in range(6)] == [[1, 3, 0, 2, 4][:k] for k in range(6)]
    assert best(scores, 50) == [1, 3, 0, 2, 4]


# -- FAISS --------------------------------------------------------------------------------------------------------------


def faiss_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("faiss-*"))


def test_a_faiss_index_is_made_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mm_utils")
    rows = write(tmp_path, unit(500))
    open_find("IVF4,Flat", tmp_path, rows)
    [file] = faiss_files(tmp_path)
    made = file.stat().st_mtime_ns
    assert "Making a FAISS index" in caplog.text
    caplog.clear()
    for setting in ("", ";nprobe=1", ";nprobe=4"):
        open_find(f"IVF4,Flat{setting}", tmp_path, rows)
    assert (faiss_files(tmp_path), file.stat().st_mtime_ns) == ([file], made)
    assert "Making" not in caplog.text


def test_a_stale_faiss_index_never_answers(tmp_path: Path) -> None:
    """Rows that were replaced have another file, whether the old one was removed or put back."""
    old = write(tmp_path, unit(300))
    open_find("Flat", tmp_path, old)
    [stale] = faiss_files(tmp_path)
    content = stale.read_bytes()
    embeds_NE = unit(300, seed=5)
    rows = write(tmp_path, embeds_NE)
    assert faiss_files(tmp_path) == []
    stale.write_bytes(content)
    find = open_find("Flat", tmp_path, rows)
    assert [find(embed_E, 1)[0][0] for embed_E in embeds_NE[:20]] == list(range(20))
    write(tmp_path, embeds_NE)
    assert faiss_files(tmp_path) == []


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_faiss_index_is_made_anew(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows, embeds_NE = write(tmp_path, unit(300)), unit(300)
    open_find("Flat", tmp_path, rows)
    [file] = faiss_files(tmp_path)
    file.write_bytes(file.read_bytes()[:-500] if damage == "cut" else b"no index")
    find = open_find("Flat", tmp_path, rows)
    assert "is damaged" in caplog.text
    assert find(embeds_NE[7], 1)[0][0] == 7
    caplog.clear()
    open_find("Flat", tmp_path, rows)
    assert not caplog.text


@pytest.mark.parametrize("kind", ["int8", "IVF4096,Flat", "nonsense", "IVF4,Flat;nonsense=3", "IVF4,Flat;nprobe=0"])
def test_what_cannot_search_is_refused_when_it_is_opened(kind: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"--index_factory is {kind}; FAISS cannot search 300 images .*Give a string"
    ):
        open_find(kind, tmp_path, write(tmp_path, unit(300)))
