"""Each term against its definition, and batches in parts; `tests/contracts/test_terms.py` divides, pads and orders them."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from torch.nn.functional import softplus

from mm_utils import distributed
from mm_utils.model.arguments import ObjectiveArguments
from mm_utils.model.fusion import KeysValues, target_mask
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.build import build_objective
from mm_utils.objectives.captioning import Captioning
from mm_utils.objectives.grad_cache import TooManyPairsError, backward_that_fits
from mm_utils.objectives.losses import gather_batch, same_pair
from mm_utils.objectives.matching import Matching
from mm_utils.objectives.objective import JointObjective, Objective
from mm_utils.objectives.workload import Workload
from tests.kit.objectives import (
    ALONE,
    PAIRS,
    assert_same,
    global_batch,
    measured,
    share_of,
    step,
    step_in_parts,
    tiny_model,
    tiny_objective,
)
from tests.kit.processes import run_on_ranks


def work_of_two_steps(width: int) -> list[dict[str, float]]:
    """Rank r takes 0.1 (r + 1) s of step; its captions have 40 + 10 r and 4 tokens."""
    workload = Workload()
    cpu = torch.device("cpu")
    rank = distributed.rank()
    for _ in range(2):
        workload.begin(cpu)
        time.sleep(0.1 * (rank + 1))
        workload.end(cpu, 2 * width or 44 + 10 * rank, 44 + 10 * rank)
    return [workload.over_ranks(cpu), workload.over_ranks(cpu)]


@pytest.mark.parametrize(("width", "tokens"), [(0, 1.0), (64, 256 / 98)])
def test_the_log_says_how_the_work_is_shared(width: int, tokens: float) -> None:
    assert work_of_two_steps(width)[0] == {"tokens_per_real": pytest.approx(64 / 22 if width else 1)}
    for first, then in run_on_ranks(2, work_of_two_steps, width):
        assert first == {"tokens_per_real": pytest.approx(tokens), "slowest_rank": pytest.approx(4 / 3, abs=0.2)}
        assert then == {}


def refusal_of_a_total_of_own_rows() -> str:
    objective = tiny_objective("contrastive_matching")
    term = matching_of(objective)
    plan_of_all = term.plan

    def plan(batch: Any, *rest: Any) -> Any:
        plan = plan_of_all(batch, *rest)
        plan.total = torch.tensor(len(batch["ids"]))
        return plan

    term.plan = plan
    low, high = ((0, 3), (3, 8))[distributed.rank()]
    with pytest.raises(ValueError, match="returns a total of") as raised:
        step(objective, share_of(global_batch(), low, high), 0)
    return str(raised.value)


def test_a_total_that_is_not_that_of_all_ranks_is_refused() -> None:
    for said in run_on_ranks(2, refusal_of_a_total_of_own_rows):
        assert "a total of 3 and 5 on 2 processes; it is the number of rows on all of them" in said


def test_negatives_follow_the_step_and_the_seed() -> None:
    objective = tiny_objective("contrastive_matching")
    value = [step(objective, global_batch(), number)["report"]["matching_loss"] for number in (0, 0, 1, 2)]
    assert value[0] == value[1]
    assert len(set(value)) == 3
    matching_of(objective).seed = 2**31
    assert step(objective, global_batch(), 0)["report"]["matching_loss"] != value[0]


def matching_of(objective: JointObjective) -> Matching:
    return next(term for term in objective.weights if isinstance(term, Matching))


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("kind", ["", "negatives", "negatives of one image"])
def test_matching_is_the_cross_entropy_of_its_pairs(kind: str, number: int) -> None:
    """All matches, and each image and each text with a wrong partner, if there is one.

    An image's negative takes half of the weight of its wrong text, or all of it where no other is wrong.
    """
    objective = tiny_objective("contrastive_matching")
    batch = global_batch(kind)
    pairs = []
    if kind.endswith("one image"):
        batch["ids"][:, 0] = 5
    encoded = objective.encode(batch)
    model = objective.model
    known = same_pair(batch["ids"], batch["ids"])
    shared = gather_batch(encoded.embeds["image"], encoded.embeds["text"], batch["ids"])
    has_one = batch["negative_attention_mask"].any(1) if kind else torch.zeros(PAIRS, dtype=torch.bool)
    drawn = matching_of(objective).draw(shared, encoded.scale.detach(), number)
    for place, (text, image, negative) in enumerate(zip(*(each.tolist() for each in (*drawn, has_one)), strict=True)):
        weight = 1 / max(1, (text >= 0) + negative)
        pairs += [(place, "", place, -1, 1.0)]
        pairs += [(place, "", text, 1, weight)] * (text >= 0) + [(image, "", place, 1, 1.0)] * (image >= 0)
        pairs += [(place, "negative_", place, 1, weight)] * negative
        assert text < 0 or not known[place, text]
        assert image < 0 or not known[image, place]
    losses = []
    for image, prefix, text, sign, weight in pairs:
        ids = batch[f"{prefix}input_ids"][text, None]
        mask = batch[f"{prefix}attention_mask"][text, None]
        keys_values = tuple(layer[:, image, None] for layer in encoded.keys_values)
        logit = model.match_pairs(keys_values, model.encode_text(ids, mask)[1], mask).float()
        losses.append(weight * softplus(sign * logit).item())
    total = sum(pair[-1] for pair in pairs)
    assert total == (PAIRS + 7 if kind.endswith("one image") else 3 * PAIRS)
    assert step(objective, batch, number)["report"]["matching_loss"] == pytest.approx(sum(losses) / total, rel=1e-5)


def test_build_objective() -> None:
    model = tiny_model()
    both = build_objective(model, ObjectiveArguments("contrastive:1,matching:1"), 0)
    assert [term.name for term in both.weights] == ["contrastive", "matching"]
    assert all(parameter.requires_grad for parameter in model.parameters())
    build_objective(model, ObjectiveArguments("contrastive"), 0)
    assert not any(parameter.requires_grad for parameter in model.fusion.parameters())
    sigmoid = build_objective(model, ObjectiveArguments("sigmoid:2"), 0)
    assert list(sigmoid.weights.values()) == [2]
    assert (model.logit_bias.item(), model.logit_scale.exp().item()) == (-10, pytest.approx(10))
    model.logit_bias.data.fill_(-3.0)
    build_objective(model, ObjectiveArguments("sigmoid"), 0)
    assert model.logit_bias.item() == -3  # what was learnt stays
    build_objective(model, ObjectiveArguments("contrastive"), 0)
    assert "logit_bias" not in model.state_dict()
    with pytest.raises(ValueError, match=r"no fusion head\. Set --fusion_layers"):
        build_objective(tiny_model(fusion_layers=0), ObjectiveArguments(), 0)


def caption_logits(
    model: FusionDualEncoderModel, keys_values: KeysValues, ids: torch.Tensor, mask: torch.Tensor, before: torch.Tensor
) -> torch.Tensor:
    assert model.token_head is not None
    words = model.text_model.get_input_embeddings()
    return model.token_head(model.caption_states(keys_values, ids, mask)[before], words.weight)


def test_captioning_sees_what_came_before_and_nothing_else() -> None:
    objective = tiny_objective("captioning")
    batch = {name: value for name, value in global_batch().items() if not name.startswith("all_")}
    model = objective.model
    ids = batch["input_ids"]
    mask = batch["attention_mask"]
    _, keys_values = model.encode_image(batch["pixel_values"])
    before = caption_logits(model, keys_values, ids, mask, mask.bool())
    changed = ids.clone()
    changed[:, 2] = ids[:, 2] % 49 + 1  # another word
    after = caption_logits(model, keys_values, changed, mask, mask.bool())
    same = (before - after).abs().amax(-1) < 1e-12
    places = mask.nonzero()[:, 1]
    assert same[places < 2].all()
    assert not same[places >= 2].any()
    losses = []
    for row, length in enumerate(batch["lengths"]):
        one = tuple(layer[:, row : row + 1] for layer in keys_values)
        for place in range(1, length):
            words = ids[row : row + 1, :place]
            last = torch.zeros_like(words, dtype=torch.bool)
            last[0, -1] = True
            logits = caption_logits(model, one, words, torch.ones_like(words), last)
            losses.append(torch.nn.functional.cross_entropy(logits, ids[row, place][None]))
    report = step(objective, batch, 0)["report"]
    assert report["captioning_loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    each = torch.stack(losses).split([length - 1 for length in batch["lengths"]])
    scores = model.caption_scores(keys_values, ids, mask)
    assert scores.tolist() == pytest.approx([-part.sum().item() for part in each], rel=1e-5)


def test_all_captions_of_an_image_are_targets() -> None:
    objective = tiny_objective("captioning")
    batch = global_batch()
    _, keys_values = objective.model.encode_image(batch["pixel_values"])
    total = 0.0
    for column in range(3):
        ids = batch["all_input_ids"][:, column]
        mask = batch["all_attention_mask"][:, column]
        rows = mask.any(1)
        own = tuple(layer[:, rows] for layer in keys_values)
        total -= objective.model.caption_scores(own, ids[rows], mask[rows]).sum().item()
    targets = batch["all_attention_mask"][..., 1:].sum().item()
    assert step(objective, batch, 0)["report"]["captioning_loss"] == pytest.approx(total / targets, rel=1e-5)


def test_captioning_predicts_the_words_that_occur(monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gradients are those of a softmax over these words, written out; others have the probability of chance."""
    monkeypatch.setattr("mm_utils.objectives.captioning._LARGE", 50)
    model = tiny_model()
    batch = global_batch()
    head_of = Captioning()
    rows = Dataset.from_dict({"input_ids": [[[2, *range(5, 15)], [20, 3]], [[21, 20]]]})
    head_of.prepare(model)
    model.double()
    assert model.token_head is not None
    head_of.read_captions(model, rows)
    known = [2, 3, *range(5, 15), 20, 21]
    assert model.token_head.known().nonzero()[:, 0].tolist() == known

    mask = batch["attention_mask"]
    ids = torch.tensor(known)[batch["input_ids"] % len(known)]
    _, keys_values = model.encode_image(batch["pixel_values"])
    is_target, before = target_mask(mask)
    logits = caption_logits(model, keys_values, ids, mask, before)
    assert not logits.softmax(-1).sum(0)[~model.token_head.known()].any()
    target = [known.index(word) for word in ids[is_target].tolist()]
    right = torch.nn.functional.cross_entropy(logits[:, known].float(), torch.tensor(target), reduction="sum")
    among, places = model.target_logits(keys_values, ids, mask, before.nonzero(as_tuple=True))
    found = torch.nn.functional.cross_entropy(among.float(), places, reduction="sum")
    weights = [*model.token_head.parameters(), model.text_model.get_input_embeddings().weight]
    torch.testing.assert_close(found, right)
    gradients = (torch.autograd.grad(value, weights, retain_graph=True) for value in (found, right))
    for value, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(value, expected)

    unknown = ids.clone()
    unknown[:, 2] = 33
    last = mask.clone()
    last[:, 3:] = 0  # the unknown word is the last
    gone = model.caption_scores(keys_values, ids, mask * (torch.arange(16) < 2))
    with_unknown = model.caption_scores(keys_values, unknown, last)
    torch.testing.assert_close(with_unknown, gone - math.log(len(known)))

    more = Captioning()
    more.prepare(model)
    more.read_captions(model, Dataset.from_dict({"input_ids": [[[30]]]}))
    assert model.token_head.known().nonzero()[:, 0].tolist() == sorted([*known, 30])
    more.read_captions(model, Dataset.from_dict({"input_ids": [[[*range(26)]]]}))
    assert model.token_head.known().all()


def test_distillation_is_a_cross_entropy_with_the_teachers_softmax() -> None:
    objective = tiny_objective("distillation")
    batch = global_batch()
    report = objective(batch, 0)
    with torch.no_grad():
        embeds = objective.encode(batch).embeds
        scale = objective.model.logit_scale.exp()
    total = torch.zeros(())
    for one, other in (("image", "text"), ("text", "image")):
        given = 4.0 * batch[f"teacher_{one}"] @ batch[f"teacher_{other}"].T
        logits = scale * embeds[one] @ embeds[other].T
        same = same_pair(batch["ids"], batch["ids"]) & ~torch.eye(PAIRS, dtype=torch.bool)
        q = given.masked_fill(same, -torch.inf).softmax(1)
        log_p = logits.masked_fill(same, -torch.inf).log_softmax(1)
        total = total - (q * log_p.masked_fill(same, 0.0)).sum(1).mean() / 2
    assert report["distillation_loss"].item() == pytest.approx(total.item(), rel=1e-6)
    assert report["loss"].item() == pytest.approx((report["contrastive_loss"] + 0.5 * total).item(), rel=1e-6)


def test_terms_of_ones_own_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "terms_of_mine.py").write_text(
        "from mm_utils.objectives import EmbeddingTerm\n"
        "class Mine(EmbeddingTerm):\n"
        "    def of_batch(self, image_NE, text_NE, scale, batch):\n"
        "        return (image_NE - text_NE).square().sum(1).mean()\n"
        "class Wide(EmbeddingTerm):\n"
        "    def of_batch(self, image_NE, text_NE, scale, batch):\n"
        "        return (image_NE - text_NE).square().sum(1)\n"
        "class Deaf(EmbeddingTerm):\n"
        "    def of_batch(self, image_NE, text_NE, scale, batch):\n"
        "        return image_NE.detach().mean()\n"
    )
    monkeypatch.chdir(tmp_path)
    objective = build_objective(tiny_model(), ObjectiveArguments("contrastive,terms_of_mine.Mine:2"), 0)
    report = step(objective, global_batch(), 0)["report"]
    embeds = objective.encode(global_batch()).embeds
    distance = (embeds["image"] - embeds["text"]).square().sum(1).mean().item()
    assert report["Mine_loss"] == pytest.approx(distance)
    assert report["loss"] == pytest.approx(report["contrastive_loss"] + 2 * report["Mine_loss"])
    wide = build_objective(tiny_model(), ObjectiveArguments("contrastive,terms_of_mine.Wide"), 0)
    with pytest.raises(
        ValueError, match=r"of_batch of .*Wide returns a tensor of \[\d+\]; a loss is a tensor of one number"
    ):
        step(wide, global_batch(), 0)
    deaf = build_objective(tiny_model(), ObjectiveArguments("contrastive,terms_of_mine.Deaf"), 0)
    with pytest.raises(ValueError, match=r"of_batch of terms_of_mine\.Deaf returns a loss without a gradient"):
        step(deaf, global_batch(), 0)
    for path in ("terms_of_mine.Other", "nowhere.Mine", "os.path"):
        with pytest.raises(ValueError, match=f"--objectives has {path}"):
            build_objective(tiny_model(), ObjectiveArguments(f"contrastive,{path}"), 0)


# -- parts of a batch change memory and time, never the gradient -------------------------------------------------------
def test_no_activation_outlives_its_part():
    """The largest number of pairs in one forward with gradient is the part's."""
    objective = tiny_objective("contrastive")
    sizes = []

    def note(module, given, out):
        if torch.is_grad_enabled():
            sizes.append(len(out.last_hidden_state))

    objective.model.vision_model.register_forward_hook(note)
    step_in_parts(objective, global_batch(), 2)
    assert max(sizes) == 2
    assert sum(sizes) == PAIRS


def with_batch_norm() -> JointObjective:
    objective = tiny_objective("contrastive")
    objective.model.vision_model.register_module("norm", nn.BatchNorm2d(3, dtype=torch.double))
    objective.model.vision_model.register_forward_pre_hook(
        lambda module, _, named: ((), named | {"pixel_values": module.norm(named["pixel_values"])}), with_kwargs=True
    )
    return objective.train()


def test_batch_norms_count_every_part_once():
    objective = with_batch_norm()
    batch = global_batch()
    norm = objective.model.vision_model.norm
    step_in_parts(objective, batch, 5)
    once = nn.BatchNorm2d(3, dtype=torch.double)
    for part in (batch["pixel_values"][4:], batch["pixel_values"][:4]):  # the last part is embedded first to stay
        once(part)
    assert norm.num_batches_tracked == 2
    torch.testing.assert_close(norm.running_var, once.running_var)
    assert norm.track_running_stats


class Full:
    """Runs out of memory when more than `most` pairs are embedded with gradient, in the `fails`-th such pass or later."""

    def __init__(self, objective: JointObjective, most: int, fails: int = 0):
        self.encode = objective.encode
        self.most = most
        self.left = fails
        objective.encode = self  # type: ignore[method-assign]

    def __call__(self, batch: dict[str, Any], *given: bool) -> Any:
        if torch.is_grad_enabled() and len(batch["ids"]) > self.most:
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return self.encode(batch, *given)


def until_it_fits(objective: JointObjective, batch: dict[str, Any], size: int | None) -> dict[str, Any]:
    report, size = backward_that_fits(ALONE, objective, batch, 5, size, objective.zero_grad)
    return {**measured(objective, report), "size": size}


@pytest.mark.parametrize("fails", [0, 1])
def test_a_step_that_ran_out_of_memory_is_repeated_in_halves(fails):
    kind = "contrastive_matching"
    objective = tiny_objective(kind)
    Full(objective, 2, fails)
    found = until_it_fits(objective, global_batch(), 4)
    assert found["size"] == 2
    assert_same(found, step_in_parts(tiny_objective(kind), global_batch(), None))


@pytest.mark.parametrize(("size", "message"), [(1, "with a single pair"), (None, "--micro_batch_size auto")])
def test_a_step_that_never_fits_names_the_remedy(size, message):
    objective = tiny_objective("contrastive")
    Full(objective, 0)
    with pytest.raises(TooManyPairsError, match=message):
        until_it_fits(objective, global_batch() | {"rows": torch.arange(PAIRS)}, size)


def test_an_own_objective_that_computes_a_step_as_a_whole_says_what_parts_need():
    class Own(Objective):
        def forward(self, batch, step):
            return {"loss": self.model.logit_scale.exp()}

    own = Own(tiny_objective("contrastive").model)
    step_in_parts(own, global_batch(), None)
    with pytest.raises(
        ValueError, match=r"Own has no method encode; .*Drop --micro_batch_size, or write encode, plan"
    ):
        step_in_parts(own, global_batch(), 4)


def test_every_part_drops_out_again_what_it_did() -> None:
    objective = tiny_objective("contrastive")
    seen = []
    dropout = objective.model.text_model.embeddings.dropout = nn.Dropout(0.5)
    dropout.register_forward_hook(lambda module, given, out: seen.append(out == 0))
    objective.train()
    step_in_parts(objective, global_batch(), 3, seed=11)
    first, second, _, again, again_second = seen  # parts of 3 rows; the last is embedded once
    assert not torch.equal(first[:, :3], second[:, :3])
    assert torch.equal(first, again)
    assert torch.equal(second, again_second)
