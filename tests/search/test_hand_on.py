"""The lines of docs/search.md that hand an index to vector databases find what the index finds."""

from pathlib import Path

import pytest

from mm_utils.search.searcher import Searcher
from tests.kit.commands import ROOT, blocks


def test_databases_find_what_the_index_finds(
    model: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lancedb")
    pytest.importorskip("qdrant_client")
    [block] = [text for language, text in blocks(ROOT / "docs/search.md") if language == "py" and "lancedb" in text]
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/mine").symlink_to(model)
    (tmp_path / "outputs/index").symlink_to(index)
    monkeypatch.chdir(tmp_path)
    names: dict[str, list[list[str]]] = {}
    exec(compile(block, "search.md", "exec"), names)
    hits = [hit.id for hit in Searcher(index, rerank_top_k=0).search_text("a red door", top_k=3)]
    assert names["found"] == [hits, hits]
