"""The losses that are compared are equal, and each is measured in a process of its own."""

import json

import pytest
import torch

from benchmarks import loss
from benchmarks.loss import LOSSES, LOSSES_OF_RANK, extrapolate


def test_both_are_the_same_loss():
    vectors = [torch.nn.functional.normalize(torch.randn(6, 4), dim=-1) for _ in range(2)]
    found = []
    for loss_of in LOSSES.values():
        inputs = [value.clone().requires_grad_() for value in (*vectors, torch.tensor(9.0))]
        loss = loss_of(*inputs)
        found.append([loss.detach(), *torch.autograd.grad(loss, inputs)])
    torch.testing.assert_close(found[0], found[1])


def test_a_rank_of_many_computes_the_same_in_squares_and_in_strips(monkeypatch):
    monkeypatch.setattr("mm_utils.objectives.losses.LARGE", {"cpu": (8, 2), "cuda": (8, 2)})
    vectors = [torch.nn.functional.normalize(torch.randn(9, 4), dim=-1) for _ in range(2)]
    found = []
    for loss_of in LOSSES_OF_RANK.values():
        scale = torch.tensor(9.0, requires_grad=True)
        loss = loss_of(*vectors, scale, own=3)
        found.append([loss.detach(), *torch.autograd.grad(loss, scale)])
    torch.testing.assert_close(found[0], found[1])


def test_extrapolation_grows_with_the_square():
    row = extrapolate({"pairs": 100, "seconds": 2.0, "mebibytes": 5.0}, 400)
    assert (row["seconds"], row["mebibytes"]) == (32, 80)
    assert "extrapolated from 100" in row["note"]
    assert extrapolate(None, 1024) == {"seconds": None, "mebibytes": 16, "note": "does not fit; computed"}


@pytest.mark.slow
def test_a_short_run(tmp_path, capsys):
    file = tmp_path / "loss.json"
    rows = loss.main(["--pairs", "32", "--embedding_dim", "8", "--repeats", "1", "--output_file", str(file)])
    assert [(row["loss"], row["pairs"]) for row in rows] == [("tiled", 32), ("naive", 32)]
    assert all(row["seconds"] > 0 and row["mebibytes"] >= 0 for row in rows)
    assert json.loads(file.read_text()) == rows
    assert "| 32 | naive |" in capsys.readouterr().out
