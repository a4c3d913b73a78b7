"""Answers equal a plain product over all images; the fusion head reorders only where training found that it helps."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mm_utils.data.batches.tokens import encode_captions, pad_captions
from mm_utils.data.images import open_image
from mm_utils.data.media.medium import image_geometry
from mm_utils.distributed import RunError
from mm_utils.model.build import load_model
from mm_utils.model.processor import load_processor_of
from mm_utils.model.reading import center_square
from mm_utils.search.searcher import Searcher
from scripts import embed, eval_retrieval, search
from tests.kit.stock_folders import KINDS, write_stock
from tests.search.conftest import update, write_photos

QUERY = "a red circle, number 1"


@pytest.fixture(scope="module")
def searcher(index: Path) -> Searcher:
    return Searcher(index, device="cpu")


def plain(model: Path, photos: Path, query: str = QUERY) -> tuple[dict[str, float], dict[str, float]]:
    """Return by id the cosine of every picture with the query, and its score after re-ranking."""
    loaded, processor = load_model(str(model)).eval(), load_processor_of(str(model))
    side, mean, std = image_geometry(processor)
    names = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))
    squares = [center_square(Image.open(photos / name).convert("RGB"), side) / 255 for name in names]
    pixels = (torch.stack(squares) - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    ids, mask = pad_captions(encode_captions(processor.tokenizer, [query], 64), 0)
    with torch.no_grad():
        images, keys_values = loaded.encode_image(pixels)
        text, states = loaded.encode_text(ids, mask)
        cosine = (images @ text[0]).tolist()
        count = len(names)
        added = loaded.head_scores(
            keys_values, states.expand(count, -1, -1), mask.expand(count, -1), ids.expand(count, -1)
        )
    scale = loaded.logit_scale.exp().item()
    combined = [one + more / scale for one, more in zip(cosine, added.tolist(), strict=True)]
    return dict(zip(names, cosine, strict=True)), dict(zip(names, combined, strict=True))


def test_text_is_scored_as_by_the_model(searcher: Searcher, model: Path, photos: Path) -> None:
    cosine, _ = plain(model, photos)
    hits = searcher.search_text(QUERY, 30)
    assert {hit.id: hit.score for hit in hits} == pytest.approx(cosine, abs=2e-3)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert [hit.rank for hit in hits] == list(range(1, 31))
    assert all(hit.reranked is None for hit in hits)
    assert not searcher.reranks
    assert searcher.search_text(QUERY, 7) == hits[:7]


def test_an_image_finds_itself_first(searcher: Searcher, photos: Path) -> None:
    for row in (0, 13, 29):
        own = searcher.search_text(QUERY, 30)[0]
        hits = searcher.search_image(open_image({"bytes": None, "path": own.path}), 3)
        assert (hits[0].row, hits[0].score) == (own.row, pytest.approx(1, abs=1e-3))
        near = searcher.similar(row, 29)
        assert row not in [hit.row for hit in near]
        assert len(near) == 29
    with pytest.raises(IndexError, match="no row 30"):
        searcher.similar(30)
    with pytest.raises(IndexError):
        searcher.thumbnail(-1)


@pytest.fixture
def reranking(reranking_model: Path, photos: Path, index: Path) -> Searcher:
    return Searcher(index, str(reranking_model), rerank_top_k=8, device="cpu")


def test_the_head_reorders_the_first_hits(reranking: Searcher, reranking_model: Path, photos: Path) -> None:
    _, combined = plain(reranking_model, photos)
    before, hits = reranking.search_text(QUERY, 30, rerank=False), reranking.search_text(QUERY, 30)
    assert reranking.reranks
    assert {hit.id for hit in hits[:8]} == {hit.id for hit in before[:8]}
    assert [hit.id for hit in hits[8:]] == [hit.id for hit in before[8:]]
    assert [hit.id for hit in hits[:8]] == sorted((hit.id for hit in before[:8]), key=lambda name: -combined[name])
    assert [hit.reranked for hit in hits[:8]] == pytest.approx([combined[hit.id] for hit in hits[:8]], abs=4e-3)
    assert [hit.id for hit in hits] != [hit.id for hit in before]
    assert reranking.search_text(QUERY, 3) == hits[:3]


def test_a_file_that_is_gone_is_reranked_by_its_thumbnail(reranking_model: Path, tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", range(6))
    update(tmp_path / "index", reranking_model, tmp_path / "photos")
    found = Searcher(tmp_path / "index", device="cpu")
    before = {hit.id: hit.reranked for hit in found.search_text(QUERY)}
    (tmp_path / "photos/0/000.png").unlink()
    os.replace(tmp_path / "photos/1/001.png", tmp_path / "photos/0/002.png")  # another picture in its place
    after = {hit.id: hit.reranked for hit in found.search_text(QUERY)}
    assert after == pytest.approx(before, abs=0.5)
    assert after["0/000.png"] != before["0/000.png"]
    assert after["0/004.png"] == before["0/004.png"]


def test_recall_is_that_of_the_evaluation(model: Path, corpus: Path, own_cache: Path, tmp_path: Path) -> None:
    data = ["--model_name_or_path", str(model), "--train_file", str(corpus), "--dataloader_num_workers", "0"]
    expected = eval_retrieval.main([*data, "--rerank_top_k", "0"])
    embed.main([*data, "--index_dir", str(tmp_path / "index"), "--split", "validation"])
    found = Searcher(tmp_path / "index", device="cpu")
    queries = [(row["id"], caption) for row in found._rows for caption in row["captions"]]
    ranks = np.array(
        [next(hit.rank for hit in found.search_text(text, 99) if hit.id == name) for name, text in queries]
    )
    for k in (1, 5):
        # the tiny model's scores are close; rounding to float16 may swap one pair
        assert (ranks <= k).mean() == pytest.approx(expected[f"text_to_image_recall@{k}"], abs=1.5 / len(ranks))


def test_a_model_that_has_changed_is_refused(index: Path, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "changed")
    changed = load_model(str(tmp_path / "changed"))
    changed.visual_projection.weight.data.add_(0.1)
    changed.save_pretrained(tmp_path / "changed")
    with pytest.raises(RunError, match="made with other weights"):
        Searcher(index, str(tmp_path / "changed"), device="cpu")


# -- the script ---------------------------------------------------------------------------------------------------------


def test_the_script_prints_a_table_and_json(index: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search.main(["--index_dir", str(index), QUERY, "--top_k", "3"])
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["rank", "score", "image"]
    assert [line.split()[0] for line in table[1:]] == ["1", "2", "3"]
    search.main(["--index_dir", str(index), "--query", QUERY, "--top_k", "3", "--json"])
    hits = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [hit["path"] for hit in hits] == [line.split()[2] for line in table[1:]]
    search.main(["--index_dir", str(index), "--image", str(photos / "0/004.png"), "--json"])
    assert json.loads(capsys.readouterr().out.splitlines()[0])["id"] == "0/004.png"


@pytest.mark.parametrize("kind", KINDS)
def test_a_stock_model_searches_as_it_came(kind: str, photos: Path, tmp_path: Path) -> None:
    start = Path(write_stock(tmp_path / "start", kind))
    update(tmp_path / "index", start, photos)
    found = Searcher(tmp_path / "index", device="cpu")
    assert not found.reranks
    own = found.search_text("a " * 200, 1)[0]
    assert found.search_image(open_image({"bytes": None, "path": own.path}), 1)[0].score == pytest.approx(1, abs=2e-3)
