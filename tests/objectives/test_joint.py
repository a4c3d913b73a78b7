"""The gradient of a whole objective does not depend on how the global batch is divided among processes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import softplus

from mm_utils import distributed
from mm_utils.model.fusion import KeysValues, target_mask
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives import EmbeddingTerm
from mm_utils.objectives.build import ObjectiveArguments, build_objective
from mm_utils.objectives.captioning import Captioning, token_cross_entropy
from mm_utils.objectives.joint import JointObjective
from mm_utils.objectives.losses import GlobalBatch, gather_batch, info_nce, same_pair
from mm_utils.objectives.masked_language import MaskedLanguageModelling
from mm_utils.objectives.matching import Matching, Pairs
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.stages import stages_of
from tests.kit.objectives import (
    KINDS,
    PAIRS,
    SPLITS,
    TERMS,
    dense_info_nce,
    global_batch,
    same_gradients,
    share_of,
    step,
    tiny_model,
    tiny_objective,
    tiny_tokenizer,
)
from tests.kit.ranks import run_on_ranks


def steps_on_this_rank(splits: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    found = []
    for number, kind in enumerate(KINDS):
        sizes = splits[number % len(splits)]
        low = sum(sizes[: distributed.rank()])
        mine = share_of(global_batch(kind), low, low + sizes[distributed.rank()])
        found.append({"kind": kind, "step": number} | step(tiny_objective(kind), mine, number))
    return found


def test_gradients_and_values_do_not_depend_on_the_processes() -> None:
    by_rank = run_on_ranks(3, steps_on_this_rank, SPLITS[3])
    for by_case in zip(*by_rank, strict=True):
        kind, number = by_case[0]["kind"], by_case[0]["step"]
        alone = step(tiny_objective(kind), global_batch(kind), number)
        for found in by_case:
            assert found["report"] == by_case[0]["report"]  # to the last bit: ranks must not decide differently
            assert found["report"] == pytest.approx(alone["report"], rel=1e-6, abs=3e-7)
        names = alone["gradients"]
        average = {name: torch.stack([found["gradients"][name] for found in by_case]).mean(0) for name in names}
        same_gradients(average, alone["gradients"])
        assert alone["gradients"]["model.logit_scale"].abs() > 1e-4


def test_padding_changes_nothing() -> None:
    batch = global_batch()
    longer = batch | {
        name: torch.nn.functional.pad(batch[name], (0, 8), value=0) for name in ("input_ids", "attention_mask")
    }
    short, long = (step(tiny_objective("contrastive_matching"), each, 0) for each in (batch, longer))
    assert short["report"] == pytest.approx(long["report"], rel=1e-6)
    expected = {name: value for name, value in short["gradients"].items() if "position_embeddings" not in name}
    same_gradients(long["gradients"], expected)


def test_negatives_do_not_depend_on_the_order_of_the_batch() -> None:
    """So a batch may be sorted, and ranks may hold whichever rows of it."""
    batch, objective = global_batch(), tiny_objective("contrastive_matching")
    places = torch.tensor([4, 0, 8, 2, 6, 1, 7, 3, 5])
    mixed = {
        name: [value[place] for place in places] if isinstance(value, list) else value[places]
        for name, value in batch.items()
    }
    found, right = step(objective, mixed, 3), step(objective, batch, 3)
    assert found["report"] == pytest.approx(right["report"], rel=1e-6)
    same_gradients(found["gradients"], right["gradients"], of_largest=1e-7)


def test_negatives_follow_the_step_and_the_seed() -> None:
    objective = tiny_objective("contrastive_matching")
    value = [step(objective, global_batch(), number)["report"]["matching_loss"] for number in (0, 0, 1, 2)]
    assert value[0] == value[1]
    assert len(set(value)) == 3
    matching_of(objective).seed = 2**31
    assert step(objective, global_batch(), 0)["report"]["matching_loss"] != value[0]


def matching_of(objective: JointObjective) -> Matching:
    return next(term for term in objective.weights if isinstance(term, Matching))


@pytest.mark.parametrize("number", range(8))
def test_matching_pairs(number: int) -> None:
    """Every pair as a positive, and each image and each text once with a wrong partner that is not a known positive."""
    objective, batch = tiny_objective("contrastive_matching"), global_batch()
    encoded = objective.encode(batch)
    shared = gather_batch(encoded.embeds["image"], encoded.embeds["text"], batch["ids"])
    plan = matching_of(objective).plan(batch, shared, encoded.scale.detach(), number)
    image, text, is_match, weight = plan.pairs
    assert (weight == 1).all()
    assert plan.total == len(image) == len(text) == 3 * PAIRS
    everyone = list(range(PAIRS))
    assert image[is_match].tolist() == text[is_match].tolist() == everyone
    assert image[PAIRS : 2 * PAIRS].tolist() == text[2 * PAIRS :].tolist() == everyone
    assert not same_pair(batch["ids"], batch["ids"])[image[~is_match], text[~is_match]].any()


def test_the_negative_of_an_image_is_one_more_wrong_text() -> None:
    """It takes half of the weight of the wrong text; all else is as without it."""
    objective, batch = tiny_objective("contrastive_matching"), global_batch()
    with_negatives = global_batch("negatives")
    plans, values = [], []
    for each in (batch, with_negatives):
        encoded = objective.encode(each)
        shared = gather_batch(encoded.embeds["image"], encoded.embeds["text"], each["ids"])
        plans.append(matching_of(objective).plan(each, shared, encoded.scale.detach(), 4))
        parts = encoded, each, plans[-1], 0
        values.append(matching_of(objective).part(objective.model, *parts))
    assert plans[0].total == plans[1].total == 3 * PAIRS
    plain, plan = (Pairs(*map(torch.from_numpy, each.pairs)) for each in plans)
    count, has_one = 3 * PAIRS, with_negatives["negative_attention_mask"].any(1)
    for name in ("image_P", "text_P", "is_match_P"):
        assert torch.equal(getattr(plan, name)[:count], getattr(plain, name))
    assert torch.equal(plan.image_P[count:], has_one.nonzero()[:, 0])
    assert torch.equal(plan.weight_P[PAIRS : 2 * PAIRS], 1 - has_one.float() / 2)
    assert torch.equal(plan.weight_P[count:], torch.full((7,), 0.5))
    assert plan.weight_P.sum() == count

    def losses(texts: Tensor, mask: Tensor, images: Tensor) -> Tensor:
        _, states = objective.model.encode_text(texts, mask)
        keys_values = tuple(layer[:, images] for layer in encoded.keys_values)
        return softplus(objective.model.match_pairs(keys_values, states, mask).float())

    wrong = losses(batch["input_ids"][plain.text_P], batch["attention_mask"][plain.text_P], plain.image_P)
    own = losses(
        *(with_negatives[f"negative_{name}"][has_one] for name in ("input_ids", "attention_mask")),
        plan.image_P[count:],
    )
    replaced = wrong[PAIRS : 2 * PAIRS][has_one]
    difference = (own - replaced).sum() / 2
    assert (values[1][0] - values[0][0]).item() == pytest.approx(difference.item(), rel=1e-4)


def test_an_image_without_a_wrong_text_in_the_batch_has_its_negative() -> None:
    batch = global_batch("negatives")
    batch["ids"][:, 0] = 5
    found = step(tiny_objective("contrastive_matching"), batch, 0)
    encoded = tiny_objective("contrastive_matching").encode(batch)
    shared = gather_batch(encoded.embeds["image"], encoded.embeds["text"], batch["ids"])
    plan = Matching().plan(batch, shared, encoded.scale.detach(), 0)
    assert (plan.pairs.weight_P == 1).all()
    assert plan.total == len(plan.pairs.image_P) == PAIRS + 7
    assert math.isfinite(found["report"]["matching_loss"])


def test_negatives_look_alike() -> None:
    """At a scale of 40, a neighbour on the circle is drawn, where it is not excluded; uniformly, hardly ever."""
    angle = torch.arange(64) / 64 * 2 * math.pi
    circle = torch.stack([angle.cos(), angle.sin()], 1)
    shared = gather_batch(circle, circle, torch.arange(128).view(64, 2))
    batch = {"input_ids": torch.ones(64, 3).long(), "attention_mask": torch.ones(64, 3).long()}

    plan = Matching().plan(batch, shared, torch.tensor(40.0), 0)
    pairs = Pairs(*map(torch.from_numpy, plan.pairs))
    away = (pairs.image_P - pairs.text_P)[~pairs.is_match_P].abs()
    assert torch.minimum(away, 64 - away).float().mean().item() < 4  # 16 in expectation if drawn uniformly


def test_a_batch_without_a_readable_image() -> None:
    for kind in KINDS:
        found = step(tiny_objective(kind), share_of(global_batch(kind), 0, 0), 0)
        assert found["report"]["loss"] == 0
        assert all(not values.any() for values in found["gradients"].values())


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


@pytest.mark.parametrize("kind", KINDS)
def test_every_trained_parameter_gets_a_gradient(kind: str) -> None:
    """DDP waits for those of all of them."""
    objective = tiny_objective(kind)
    objective(global_batch(kind), 0)["loss"].backward()
    missing = [name for name, value in objective.named_parameters() if value.requires_grad and value.grad is None]
    assert [name for name in missing if "text_model.pooler" not in name] == []


def plain_global_loss(model: FusionDualEncoderModel, batch: dict[str, Any]) -> Tensor:
    image_NE, _ = model.encode_image(batch["pixel_values"], with_keys_values=False)
    text_NE, _ = model.encode_text(batch["input_ids"], batch["attention_mask"])
    scale = model.logit_scale.exp()
    shared = gather_batch(image_NE, text_NE, batch["ids"])
    own = torch.pdist(image_NE).square().mul(-2).exp().mean().log() + 0.1 * scale.log()
    return info_nce(image_NE, text_NE, scale, shared) + 0.3 * own


def test_a_term_of_ones_own_is_what_it_says() -> None:
    objective, batch = tiny_objective("own"), global_batch()
    found = step(objective, batch, 0)
    model = tiny_model(fusion_layers=0)
    loss = plain_global_loss(model, batch)
    loss.backward()
    assert found["report"]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert "Uniformity_loss" in found["report"]
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found["gradients"][f"model.{name}"], parameter.grad, rtol=1e-5, atol=1e-7)


def test_masked_lm_is_the_cross_entropy_of_what_it_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mm_utils.objectives.masked_language.PROBABILITY", 0.4)
    objective, batch = tiny_objective("masked_lm"), global_batch()
    model, term = objective.model, next(t for t in objective.weights if isinstance(t, MaskedLanguageModelling))
    shared = gather_batch(*(objective.encode(batch).embeds[name] for name in ("image", "text")), batch["ids"])
    plan = term.plan(batch, shared, torch.tensor(1.0), 5)
    asked, seen, real = plan.is_target, plan.input_ids, batch["input_ids"]
    assert plan.total == asked.sum() > 10
    assert not (asked & (batch["attention_mask"] == 0)).any()
    assert not (asked & (real < 5)).any()  # special tokens
    assert torch.equal(seen[~asked], real[~asked])
    assert (seen[asked] == 4).float().mean() > 0.5
    _, keys_values = model.encode_image(batch["pixel_values"])
    _, states = model.encode_text(seen, batch["attention_mask"])
    fused = model.fusion(keys_values, states, batch["attention_mask"])[:, 1:]
    words = model.text_model.get_input_embeddings().weight
    losses = [
        torch.nn.functional.cross_entropy(model.token_head(fused[row, place][None], words), real[row, place][None])
        for row, place in asked.nonzero()
    ]
    report = step(objective, batch, 5)["report"]
    assert report["masked_lm_loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert set(report) >= {"masked_lm_loss", "masked_lm_accuracy"}


def test_masks_follow_the_step() -> None:
    tokenizer, generator = tiny_tokenizer(), torch.Generator().manual_seed(0)
    ids = torch.randint(5, 50, (400, 12), generator=generator)
    ids[:, 0] = 2
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "ids": torch.arange(800).view(400, 2)}
    shared = gather_batch(torch.ones(400, 2), torch.ones(400, 2), batch["ids"])

    def asked(step: int) -> Tensor:
        term = MaskedLanguageModelling(tokenizer, 0)
        return term.plan(batch, shared, torch.tensor(1.0), step).is_target

    first = asked(0)
    assert torch.equal(first, asked(0))
    assert not torch.equal(first, asked(1))
    assert first[:, 1:].float().mean().item() == pytest.approx(0.15, abs=0.015)


def caption_logits(
    model: FusionDualEncoderModel, keys_values: KeysValues, ids: torch.Tensor, mask: torch.Tensor, before: torch.Tensor
) -> torch.Tensor:
    assert model.token_head is not None
    words: Any = model.text_model.get_input_embeddings()
    return model.token_head(model.caption_states(keys_values, ids, mask)[before], words.weight)


def test_captioning_sees_what_came_before_and_nothing_else() -> None:
    objective = tiny_objective("captioning")
    batch = {name: value for name, value in global_batch().items() if not name.startswith("all_")}
    model, ids, mask = objective.model, batch["input_ids"], batch["attention_mask"]
    _, keys_values = model.encode_image(batch["pixel_values"])
    before = caption_logits(model, keys_values, ids, mask, mask.bool())
    changed = ids.clone()
    changed[:, 2] = 7
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
    objective, batch = tiny_objective("captioning"), global_batch()
    _, keys_values = objective.model.encode_image(batch["pixel_values"])
    total = 0.0
    for column in range(3):
        ids, mask = batch["all_input_ids"][:, column], batch["all_attention_mask"][:, column]
        rows = mask.any(1)
        own = tuple(layer[:, rows] for layer in keys_values)
        total -= objective.model.caption_scores(own, ids[rows], mask[rows]).sum().item()
    targets = batch["all_attention_mask"][..., 1:].sum().item()
    assert step(objective, batch, 0)["report"]["captioning_loss"] == pytest.approx(total / targets, rel=1e-5)


def test_captioning_predicts_the_words_that_occur(monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gradients are those of a softmax over these words, written out; others have the probability of chance."""
    monkeypatch.setattr("mm_utils.objectives.captioning._LARGE", 50)
    model, batch = tiny_model(), global_batch()
    head_of, rows = Captioning(), Dataset.from_dict({"input_ids": [[[2, *range(5, 15)], [20, 3]], [[21, 20]]]})
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
    found, _ = token_cross_entropy(*model.target_logits(keys_values, ids, mask, before.nonzero(as_tuple=True)))
    weights = [*model.token_head.parameters(), model.text_model.get_input_embeddings().weight]
    torch.testing.assert_close(found, right)
    gradients = (torch.autograd.grad(value, weights, retain_graph=True) for value in (found, right))
    for value, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(value, expected)

    scores = model.caption_scores(keys_values, ids, mask)
    unknown = ids.clone()
    unknown[:, 2] = 33
    last = mask.clone()
    last[:, 3:] = 0  # the unknown word is the last
    gone = model.caption_scores(keys_values, ids, mask * (torch.arange(16) < 2))
    with_unknown = model.caption_scores(keys_values, unknown, last)
    torch.testing.assert_close(with_unknown, gone - math.log(len(known)))
    assert scores.isfinite().all()

    more = Captioning()
    more.prepare(model)
    more.read_captions(model, Dataset.from_dict({"input_ids": [[[30]]]}))
    assert model.token_head.known().nonzero()[:, 0].tolist() == sorted([*known, 30])
    more.read_captions(model, Dataset.from_dict({"input_ids": [[[*range(26)]]]}))
    assert model.token_head.known().all()


@pytest.mark.parametrize("kind", ["captioning", "matching_with_negatives"])
def test_a_stage_trains_its_part_as_all_at_once_would(kind: str) -> None:
    """Of the encoders' stage the head's terms are left out; in the head's, the encoders get no gradient."""
    objective, batch = tiny_objective(kind), global_batch(kind)
    stages = stages_of(objective, TrainingArguments(max_steps=10), 0.5, 9)
    expected = step(tiny_objective(kind), batch, 3)["gradients"]
    for stage in stages:
        stage.freeze_others(objective)
        found = step(objective, batch, 3)
        term = TERMS[kind].split(",")[1].split(":")[0]
        assert (f"{term}_loss" in found["report"]) == (stage.name == "head")
        assert {name for name, value in found["gradients"].items() if value.any()} <= stage.trains
        assert all(parameter.grad is None for parameter in objective.parameters() if not parameter.requires_grad)
    same_gradients(*({name: given[name] for name in stages[1].trains} for given in (found["gradients"], expected)))


def test_distillation_is_a_cross_entropy_with_the_teachers_softmax() -> None:
    objective, batch = tiny_objective("distillation"), global_batch()
    report = objective(batch, 0)
    with torch.no_grad():
        embeds, scale = objective.encode(batch).embeds, objective.model.logit_scale.exp()
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
    )
    monkeypatch.chdir(tmp_path)
    objective = build_objective(tiny_model(), ObjectiveArguments("contrastive,terms_of_mine.Mine:2"), 0)
    report = step(objective, global_batch(), 0)["report"]
    assert report["loss"] == pytest.approx(report["contrastive_loss"] + 2 * report["Mine_loss"])
    for path in ("terms_of_mine.Other", "nowhere.Mine", "os.path"):
        with pytest.raises(ValueError, match=f"--objectives has {path}"):
            build_objective(tiny_model(), ObjectiveArguments(f"contrastive,{path}"), 0)


class OwnInfoNCE(EmbeddingTerm):
    """InfoNCE by its definition, as a user would write it."""

    def of_batch(self, image_NE: Tensor, text_NE: Tensor, scale: Tensor, batch: GlobalBatch) -> Tensor:
        return dense_info_nce(image_NE, text_NE, scale, batch.ids_N2)
