"""Dropout whose masks are functions of row and step."""

import torch

from mm_utils.model.row_noise import RowDropout, row_keys, set_row_keys


def drawn(layer: RowDropout, keys: torch.Tensor | None, rows: slice = slice(None)) -> torch.Tensor:
    values = torch.arange(1.0, 1 + 6 * 20 * 4, 4).view(6, 20)
    set_row_keys(layer, None if keys is None else keys[rows])
    return layer(values[rows])


def test_masks_follow_the_row_and_the_step_and_not_the_batch() -> None:
    ids = torch.tensor([[3, 1], [7, 2], [9, 2], [3, 2], [5, 5], [7, 1]])
    keys, other_step = row_keys(ids, 10), row_keys(ids, 11)
    assert len({*keys.tolist(), *other_step.tolist()}) == 12
    layer = RowDropout(0.4)
    whole = drawn(layer, keys)
    assert torch.equal(drawn(layer, keys, slice(2, 5)), whole[2:5])
    assert torch.equal(drawn(layer, keys), whole)
    assert not torch.equal(drawn(layer, other_step), whole)
    assert not torch.equal(drawn(layer, None), drawn(layer, None))
    layer.eval()
    assert (drawn(layer, keys) != 0).all()


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    layer = RowDropout(0.3)
    set_row_keys(layer, row_keys(torch.arange(500), 4))
    found = layer(torch.ones(500, 64))
    assert abs((found == 0).float().mean().item() - 0.3) < 0.01
    assert abs(found.mean().item() - 1) < 0.02
    assert torch.equal(RowDropout(0.0)(found), found)
