"""Recall of small embeddings against plain definitions, the table and the files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from mm_utils.evaluation.embeddings import Embeddings
from mm_utils.evaluation.metrics import retrieval_metrics
from mm_utils.evaluation.reranking import rank_directions
from mm_utils.extras.measured import sizes as module
from mm_utils.extras.measured.embedding_codes import rotate
from mm_utils.extras.measured.sizes import draw_sizes, recall_over_bytes, report_sizes
from tests.kit.truthful_model import ACCELERATOR, MAIN_PROCESS, split_of

WIDTH = 40


def noisy_split(noise: float = 3.0, images: int = 120, captions: int = 2) -> Embeddings:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(images, WIDTH, generator=generator) * torch.linspace(2, 0.5, WIDTH)
    owner = [place for place in range(images) for _ in range(captions)]
    text = image[owner] + noise * torch.randn(len(owner), WIDTH, generator=generator)
    return split_of(normalize(image, dim=1), normalize(text, dim=1), owner)


def owners(split: Embeddings) -> Tensor:
    return (split.caption_key_T[:, None] == split.image_key_M).long().argmax(1)


def found_in(split: Embeddings, **wanted: Any) -> dict[str, Any]:
    [row] = [row for row in recall_over_bytes(split) if all(row[name] == value for name, value in wanted.items())]
    return row


def recall(score_TM: Tensor, owner_T: Tensor, k: int) -> float:
    own = score_TM.gather(1, owner_T[:, None])
    return float(((score_TM >= own).sum(1) <= k).double().mean())


def test_full_width_is_the_evaluations_own_figure() -> None:
    split = noisy_split()
    metrics = retrieval_metrics(split, rank_directions(split))
    row = found_in(split, dimensions=WIDTH, code="fp32")
    assert 0.2 < row["recall@1"]["value"] < 0.9
    for k in (1, 5, 10):
        assert row[f"recall@{k}"]["value"] == metrics[f"text_to_image_recall@{k}"]
    assert 0 < row["recall@1"]["half_width_95"] < 0.2


def test_every_width_and_code_with_its_bytes() -> None:
    found = {(row["dimensions"], row["code"]): row["bytes"] for row in recall_over_bytes(noisy_split())}
    assert found == {
        **{(width, "fp32"): 4 * width for width in (40, 32, 16)},
        **{(width, "fp16"): 2 * width for width in (40, 32, 16)},
        **{(width, "int8"): width for width in (40, 32, 16)},
        **{(40, "binary"): 5, (32, "binary"): 4, (16, "binary"): 2},
    }


def test_a_smaller_width_is_the_first_numbers() -> None:
    split = noisy_split()
    image, text = (normalize(each[:, :16], dim=1) for each in (split.image_ME, split.text_TE))
    row = found_in(split, dimensions=16, code="fp32")
    for k in (1, 10):
        assert row[f"recall@{k}"]["value"] == recall(text @ image.T, owners(split), k)


def test_signs_find_candidates_that_the_querys_numbers_order() -> None:
    split = noisy_split(noise=4.0)
    text, image = (torch.from_numpy(rotate(each.numpy())) for each in (split.text_TE, split.image_ME))
    distance = ((text > 0)[:, None] != (image > 0)[None]).sum(2)
    near = distance.topk(40, 1, largest=False).indices
    score = text @ torch.where(image > 0, 1.0, -1.0).T
    kept = torch.full_like(score, -torch.inf).scatter(1, near, score.gather(1, near))
    row = found_in(split, dimensions=WIDTH, code="binary")
    for k in (1, 10):
        assert row[f"recall@{k}"]["value"] == recall(kept, owners(split), k)
    in_sight = near.eq(owners(split)[:, None]).any(1).double().mean().item()
    assert row["recall@10"]["value"] <= in_sight < 1


def test_smaller_codes_lose_little_then_more() -> None:
    values = [found_in(noisy_split(), dimensions=WIDTH, code=code)["recall@1"]["value"] for code in module.BYTES]
    fp32, fp16, int8, binary = values
    assert fp16 == pytest.approx(fp32, abs=0.01)
    assert int8 == pytest.approx(fp32, abs=0.05)
    assert binary < fp32 - 0.05


def test_of_many_queries_some_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUERIES", 24)
    split = noisy_split(noise=0.1)
    row = found_in(split, dimensions=WIDTH, code="fp32")
    assert row["recall@1"]["value"] == recall(split.text_TE[::10] @ split.image_ME.T, owners(split)[::10], 1)


def test_the_files(tmp_path: Path) -> None:
    split = noisy_split()
    report_sizes(ACCELERATOR, split, tmp_path)
    report_sizes(MAIN_PROCESS, None, tmp_path)
    assert not list(tmp_path.iterdir())
    report_sizes(MAIN_PROCESS, split, tmp_path)
    rows = json.loads((tmp_path / "embedding_sizes.json").read_text())
    assert rows == recall_over_bytes(split)
    draw_sizes(rows, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size > 10_000
