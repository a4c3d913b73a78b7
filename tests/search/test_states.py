"""An index that keeps what the fusion head reads re-ranks as from the images, and without them."""

import json
import shutil
from pathlib import Path

import datasets
import pytest

from mm_utils.distributed import RunError
from mm_utils.model.build import load_model
from mm_utils.search.searcher import Searcher
from mm_utils.search.updating import tap_shapes
from scripts import embed
from tests.search.conftest import make_embedder, update, write_photos

QUERY = "a red circle, number 1"


def flags(model: Path, photos: Path, index: Path, *more: str) -> list[str]:
    names = ("--model_name_or_path", str(model), "--images", str(photos), "--index_dir", str(index))
    return [*names, "--dataloader_num_workers", "0", *more]


@pytest.fixture(scope="module")
def kept(reranking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `photos` and an `index` that keeps the states."""
    folder = tmp_path_factory.mktemp("states")
    write_photos(folder / "photos", range(12))
    embed.main(flags(reranking_model, folder / "photos", folder / "index", "--keep_fusion_states"))
    return folder


def test_the_order_is_that_of_the_files(kept: Path, reranking_model: Path) -> None:
    update(kept / "plain", reranking_model, kept / "photos")
    plain, stored = (Searcher(kept / name, device="cpu", rerank_top_k=8) for name in ("plain", "index"))
    for query in (QUERY, "a blue square", "number 7"):
        expected, hits = plain.search_text(query, 12), stored.search_text(query, 12)
        assert [hit.id for hit in hits] == [hit.id for hit in expected]
        assert [hit.reranked for hit in hits[:8]] == pytest.approx([hit.reranked for hit in expected[:8]], abs=0.02)


def test_neither_files_nor_the_vision_tower_are_needed(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(kept / "index", tmp_path / "index")
    searcher = Searcher(tmp_path / "index", device="cpu")
    before = searcher.search_text(QUERY)
    monkeypatch.setattr(searcher, "_image", lambda row: pytest.fail("an image was opened"))
    monkeypatch.setattr(searcher._model.vision_model, "forward", lambda *args, **kwargs: pytest.fail("the tower ran"))
    assert searcher.search_text(QUERY) == before
    assert before[0].reranked is not None


def test_the_column_has_the_size_that_a_dry_run_names(
    kept: Path, reranking_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mm_utils")
    embed.main(flags(reranking_model, kept / "photos", tmp_path / "new", "--keep_fusion_states", "--dry_run"))
    info = json.loads((kept / "index/index.json").read_text())
    size = 2 * datasets.load_from_disk(str(kept / "index")).features["states"].length
    assert f"takes {size / 1e3:,.1f} kB an image" in caplog.text
    assert info["states"] == tap_shapes(load_model(str(reranking_model)), make_embedder(reranking_model).medium)


def test_later_runs_keep_them_unasked(kept: Path, reranking_model: Path, tmp_path: Path) -> None:
    for name in ("photos", "index"):
        shutil.copytree(kept / name, tmp_path / name)
    info = json.loads((tmp_path / "index/index.json").read_text())
    write_photos(tmp_path / "photos", range(12, 14))
    assert embed.main(flags(reranking_model, tmp_path / "photos", tmp_path / "index"))["embedded"] == 2
    rows = datasets.load_from_disk(str(tmp_path / "index"))
    assert len(rows) == 14
    assert "states" in rows.column_names
    assert json.loads((tmp_path / "index/index.json").read_text())["states"] == info["states"]


def test_an_index_without_them_is_refused(
    index: Path, photos: Path, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(index, tmp_path / "index")
    for more in ((), ("--dry_run",)):
        with pytest.raises(RunError, match=r"made without.*new --index_dir"):
            embed.main(flags(model, photos, tmp_path / "index", "--keep_fusion_states", *more))
