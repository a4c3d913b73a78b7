"""The benchmark of searches draws pairs as it says, and compares with exact search."""

from pathlib import Path

import pytest
import torch

from benchmarks.searching import draw, main


def test_drawn_pairs_have_the_cosines_of_a_trained_model() -> None:
    image_NE, text_NE = draw(2000, 256, 1, torch.eye(256))
    assert (image_NE * text_NE).sum(1).mean() == pytest.approx(0.58, abs=0.02)
    assert (image_NE @ text_NE.T).mean() == pytest.approx(0, abs=0.01)


def test_each_search_has_a_row_of_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--images", "1500", "--width", "32", "--queries", "10", "--folder", str(tmp_path)]
    figures = main([*words, "--factories", "IVF4,Flat;nprobe=4 faiss numpy"])
    assert [each["search"] for each in figures] == ["exact", "IVF4,Flat;nprobe=4", "faiss", "numpy"]
    assert [each["recall@10"] for each in figures] == pytest.approx([1] * 5, abs=0.05)
    assert figures[0]["MB"] == pytest.approx(1500 * 64 / 1e6)
    assert "| exact |" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
