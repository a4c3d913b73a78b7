"""Texts end to end, and in groups of about one length: what a text tower gives of them alone."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel

from mm_utils.model import packing
from mm_utils.model.compile import compile_layers
from mm_utils.model.encoding import tokens_computed
from mm_utils.model.packing import end_to_end, packs
from tests.kit.objectives import global_batch, tiny_model, tiny_objective

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
TOWERS = {
    "bert": {},
    "roberta": {"max_position_embeddings": 40},
    "xlm-roberta": {"max_position_embeddings": 40},
    "camembert": {"max_position_embeddings": 40},
    "electra": {"embedding_size": 16},
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 48},
    "clip_text_model": {"eos_token_id": 49, "projection_dim": 32},
    "clip_text_model, an old one": {"eos_token_id": 2, "projection_dim": 32},
}
LENGTHS = [9, 9, 7, 4, 4, 4, 1]


@pytest.fixture(autouse=True)
def prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass costs little, so that a few texts are several groups."""
    monkeypatch.setitem(packing.PASS_TOKENS, "cpu", 2)
    monkeypatch.setitem(packing.ATTENTION_TOKENS, "cpu", 2)


def tower_of(name: str) -> Any:
    kind = name.split(",")[0]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL | {"hidden_dropout_prob": 0.0, "dropout": 0.0} | TOWERS[name])
    for field in ("attention_probs_dropout_prob", "attention_dropout"):
        if hasattr(config, field):
            setattr(config, field, 0.0)
    return AutoModel.from_config(config).double().train()


def texts_of(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Random tokens, the last of a text its end, and the mask."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(3, 48, mask.shape, generator=torch.Generator().manual_seed(1))
    ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = 49
    return ids * mask + (1 - mask), mask  # 1 is the padding of RoBERTa


def read(tower: Any, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Pooled output, all states at tokens, and the gradients of a sum of them."""
    tower.zero_grad()
    output = tower(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    states = torch.stack([output.last_hidden_state, *output.hidden_states], 2)[mask.bool()]  # [T, layers, C]
    found = {"states": states}
    if output.get("pooler_output") is not None:
        found["pooled"] = output.pooler_output
    weight = torch.linspace(-1, 1, states.shape[2], dtype=states.dtype)
    sum((value.square() * weight).sum() for value in found.values()).backward()
    gradients = {name: each.grad for name, each in tower.named_parameters() if each.grad is not None}
    return found | {name: gradient.clone() for name, gradient in gradients.items()}


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("lengths", [LENGTHS, [4, 9, 1]], ids=["sorted", "in any order"])
@pytest.mark.parametrize("name", TOWERS)
def test_texts_end_to_end_are_the_texts_padded(name: str, lengths: list[int], checkpointed: bool) -> None:
    tower = tower_of(name)
    ids, mask = texts_of(lengths)
    right = read(tower, ids, mask)
    if checkpointed:
        tower.gradient_checkpointing_enable({"use_reentrant": False})
    seen = []
    packing.encoder_of(tower).register_forward_hook(
        lambda module, given, out: seen.append(out.last_hidden_state.shape)
    )
    with end_to_end(tower, lengths, ids.device):
        found = read(tower, ids, mask)
    assert seen == [(1, sum(lengths), 32)]  # before the padding is put back
    assert found.keys() == right.keys()
    for part, value in right.items():
        torch.testing.assert_close(found[part], value, rtol=1e-9, atol=1e-11, msg=part)
    after = read(tower, ids, mask)  # and no later pass is changed
    assert torch.equal(after["states"], right["states"])


def test_compiled_layers_attend_in_one_group() -> None:
    """Each number of groups would be compiled anew, in the middle of a run."""
    model = tiny_model()
    counts = []
    for _ in range(2):
        with end_to_end(model.text_model, LENGTHS, torch.device("cpu")):
            counts.append(len(packing._packing.get()[1]))
        compile_layers(model)
    assert counts == [4, 1]


def test_threads_read_other_texts_through_one_tower() -> None:
    tower = tower_of("bert").eval()
    kinds = [[9, 8, 2], [5, 1], [7, 7, 3, 3]] * 8

    def states(lengths: list[int]) -> Tensor:
        ids, mask = texts_of(lengths)
        with torch.no_grad(), end_to_end(tower, lengths, ids.device):
            return tower(input_ids=ids, attention_mask=mask).last_hidden_state

    right = [states(lengths) for lengths in kinds]
    with ThreadPoolExecutor(4) as threads:
        for found, expected in zip(threads.map(states, kinds), right, strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("way", ["end to end", "in groups"])
@pytest.mark.parametrize("kind", ["contrastive", "sigmoid_matching"])
def test_a_step_is_that_of_texts_padded(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "PACKED_ON", {"cpu"} if way == "end to end" else set())
    batch = global_batch()
    order = torch.tensor(batch["lengths"]).argsort(descending=True, stable=True)
    batch["lengths"] = [batch["lengths"][place] for place in order]
    batch |= {name: value[order] for name, value in batch.items() if isinstance(value, torch.Tensor)}
    found = []
    for grouped in (True, False):
        objective = tiny_objective(kind)
        objective.groups_texts = grouped
        passes: list[tuple[int, ...]] = []
        layer = objective.model.text_model.encoder.layer[0]
        layer.register_forward_pre_hook(lambda module, given, passes=passes: passes.append(tuple(given[0].shape[:2])))
        report = objective(batch, 0)
        report["loss"].backward()
        if not grouped:
            assert passes == [(9, 16)]
        elif way == "end to end":
            assert passes == [(1, sum(batch["lengths"]))]
        else:
            assert len(passes) > 3
        gradients = {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}
        found.append({"loss": report["loss"].detach(), **gradients})
    for name, right in found[1].items():
        torch.testing.assert_close(found[0][name], right, rtol=1e-6, atol=1e-8 * float(right.abs().max() + 1e-3))


def test_padding_is_counted_where_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setitem(packing.PASS_TOKENS, "cpu", 100)
    assert tokens_computed(model, LENGTHS, "cpu") == 38
    monkeypatch.setattr(packing, "PACKED_ON", set())
    assert tokens_computed(model, LENGTHS, "cpu") == 63  # one group, seven times nine
    monkeypatch.setitem(packing.PASS_TOKENS, "cpu", 2)
    assert tokens_computed(model, LENGTHS, "cpu") == 38  # each length is a group
    assert tokens_computed(model, [], "cpu") == 0


def test_a_tower_that_reads_positions_between_its_layers_keeps_its_groups() -> None:
    model = tiny_model()
    assert packs(model, "cpu")
    assert not packs(model, "cuda")  # not measured there
    model.text_model = AutoModel.from_config(AutoConfig.for_model("mpnet", **SMALL))
    assert not packs(model, "cpu")
    model = tiny_model()
    model.text_model.set_attn_implementation("eager")
    assert not packs(model, "cpu")
    model = tiny_model()
    model.text_model.config.chunk_size_feed_forward = 3
    assert not packs(model, "cpu")
