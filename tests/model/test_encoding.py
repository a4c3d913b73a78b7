"""Groups of captions: no cheaper cut exists, and embedding them group by group is embedding them at once."""

from functools import lru_cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mm_utils.model.encoding import PASS_TOKENS, length_groups, padded_tokens
from tests.kit.objectives import global_batch, tiny_objective

sorted_lengths = st.lists(st.integers(1, 70), max_size=40).map(lambda lengths: sorted(lengths, reverse=True))


def cheapest(lengths: list[int], pass_tokens: int) -> int:
    """Over all cuts."""

    @lru_cache(None)
    def rest(start: int) -> int:
        if start == len(lengths):
            return 0
        stops = range(start + 1, len(lengths) + 1)
        return min(lengths[start] * (stop - start) + pass_tokens + rest(stop) for stop in stops)

    return rest(0)


@given(sorted_lengths, st.sampled_from(["cpu", "cuda", "mps"]))
def test_no_other_cut_is_cheaper(lengths: list[int], device: str) -> None:
    groups = length_groups(lengths, device)
    assert [row for group in groups for row in group] == list(range(len(lengths)))
    pass_tokens = PASS_TOKENS.get(device, PASS_TOKENS["cuda"])
    cost = padded_tokens(lengths, groups) + pass_tokens * len(groups)
    assert cost == max(cheapest(lengths, pass_tokens), pass_tokens)
    assert all(groups) or not lengths


def test_rows_out_of_order_stay_together() -> None:
    assert length_groups([3, 9, 4], "cpu") == [range(3)]
    assert length_groups([], "cpu") == [range(0)]


def test_little_padding_is_left() -> None:
    torch.manual_seed(0)
    lengths = torch.randn(256).mul(0.6).add(3).exp().int().clamp(3, 64).sort(descending=True).values.tolist()
    assert len(lengths) * lengths[0] > 2 * sum(lengths)
    assert padded_tokens(lengths, length_groups(lengths, "cpu")) < 1.1 * sum(lengths)


@pytest.mark.parametrize("kind", ["contrastive", "sigmoid_matching"])
def test_groups_give_the_embeddings_and_gradients_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PASS_TOKENS, "cpu", 2)
    batch = global_batch()
    order = torch.tensor(batch["lengths"]).argsort(descending=True, stable=True)
    batch = {
        name: [value[place] for place in order] if isinstance(value, list) else value[order]
        for name, value in batch.items()
    }
    found = []
    for grouped in (True, False):
        objective, widths = tiny_objective(kind), []
        objective.groups_texts = grouped
        objective.model.text_model.register_forward_hook(
            lambda module, given, out, widths=widths: widths.append(tuple(out.last_hidden_state.shape[:2]))
        )
        report = objective(batch, 0)
        report["loss"].backward()
        assert len(widths) > 3 if grouped else widths == [(9, 16)]
        gradients = {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}
        found.append({"loss": report["loss"].detach(), **gradients})
    for name, right in found[1].items():
        torch.testing.assert_close(found[0][name], right, rtol=1e-6, atol=1e-8 * float(right.abs().max() + 1e-3))
