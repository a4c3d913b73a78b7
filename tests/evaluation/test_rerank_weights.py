"""Weights of re-ranking: the likeliest ones, none for a head that does not help, and folds that do not see themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mm_utils.evaluation import retrieval
from mm_utils.evaluation.reranking import Listed, combine, fit_weights
from mm_utils.evaluation.retrieval import EvaluationArguments, RetrievalEvaluator
from tests.kit.truthful_model import ACCELERATOR, TruthfulModel

IMAGES = 150


def fitted(model: Any, top_k: int = 10) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of a fit, and the weights that it leaves in the config."""
    evaluator = RetrievalEvaluator(EvaluationArguments(rerank_top_k=top_k), fits=True)
    return evaluator(model, model.batches(50), ACCELERATOR), model.config.rerank_weights


def noisy_model(truth: float, noise: float = 1.0) -> Any:
    """A model whose match logit is `truth` for a right pair and 0 for others, and noise."""
    model: Any = TruthfulModel(IMAGES)
    right = torch.tensor(model.owner) == torch.arange(IMAGES)[:, None]
    model.logits = truth * right + noise * torch.randn(right.shape, generator=torch.Generator().manual_seed(7))
    return model


def unchanged(found: dict[str, float]) -> bool:
    reranked = {name.removeprefix("rerank_"): value for name, value in found.items() if name.startswith("rerank_")}
    assert reranked
    return reranked == {name: found[name] for name in reranked}


@pytest.mark.parametrize(("truth", "noise"), [(0.0, 0.0), (0.0, 1.0), (0.0, 30.0), (-3.0, 1.0), (0.0, torch.nan)])
def test_a_head_that_knows_nothing_or_harms_gets_no_weight(truth: float, noise: float) -> None:
    found, weights = fitted(noisy_model(truth, noise))
    assert weights == {"match": 0.0}
    assert unchanged(found)


def test_a_head_that_knows_something_gains() -> None:
    model = noisy_model(3.0)
    found, weights = fitted(model)
    assert weights["match"] > 0.3
    for direction in ("text_to_image", "image_to_text"):
        assert found[f"rerank_{direction}_recall@1"] > found[f"{direction}_recall@1"] + 0.04
    stored = RetrievalEvaluator(EvaluationArguments(rerank_top_k=10))(model, model.batches(50), ACCELERATOR)
    assert stored["rerank_text_to_image_recall@1"] > found["text_to_image_recall@1"] + 0.04


def test_weights_of_zero_turn_reranking_off() -> None:
    model = noisy_model(3.0)
    model.config.rerank_weights = {"match": 0.0}
    found = RetrievalEvaluator(EvaluationArguments(rerank_top_k=10))(model, model.batches(50), ACCELERATOR)
    assert not any(name.startswith("rerank") for name in found)
    assert model.scored == 0


def test_a_model_whose_head_was_not_trained_scores_no_pair() -> None:
    model = noisy_model(3.0)
    model.voices = ()
    found, weights = fitted(model)
    assert (weights, model.scored) == ({}, 0)
    assert not any(name.startswith("rerank") for name in found)


def listed(seed: int, truth: tuple[float, ...]) -> Listed:
    """Queries whose right candidate is drawn by softmax(cosine + sum of truth x voice), so that truth is the answer."""
    generator = torch.Generator().manual_seed(seed)
    cosine, voices = torch.randn(3000, 6, generator=generator), torch.randn(len(truth), 3000, 6, generator=generator)
    logits = cosine + torch.einsum("v,vqk->qk", torch.tensor(truth), voices)
    chosen = torch.multinomial(logits.softmax(1), 1, generator=generator)
    return Listed(cosine, voices, torch.arange(6) == chosen, torch.arange(3000))


def test_the_weights_are_the_likeliest() -> None:
    one, other = listed(1, (0.7, 0.0, 2.0)), listed(2, (0.7, 0.0, 2.0))
    found = torch.tensor(fit_weights([one, other]))
    torch.testing.assert_close(found, torch.tensor([0.7, 0.0, 2.0]), atol=0.1, rtol=0.1)

    def likelihood(weights: Tensor, scale: float) -> float:
        total = 0.0
        for each in (one, other):
            logits = scale * (each.cosine_QK + torch.einsum("v,vqk->qk", weights, each.voices_VQK))
            total += logits.log_softmax(1)[each.right_QK].double().mean().item()
        return total

    best = max(likelihood(found, scale) for scale in (0.9, 0.95, 1.0, 1.05, 1.1))
    for nudge in 0.2 * torch.cat([torch.eye(3), -torch.eye(3)]):
        nearby = (found + nudge).clamp(min=0)
        if not torch.equal(nearby, found):
            assert max(likelihood(nearby, scale) for scale in (0.9, 0.95, 1.0, 1.05, 1.1)) < best


def test_a_fold_is_ranked_with_weights_that_did_not_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []

    def note(directions: list[Listed]) -> list[float]:
        seen.append({int(key) % 2 for one in directions for key in one.group_Q})
        return [float(len(seen))]

    used: list[Tensor] = []
    combine = retrieval.rank_directions
    monkeypatch.setattr(retrieval, "fit_weights", note)
    monkeypatch.setattr(retrieval, "rank_directions", lambda *given: used.append(given[-1]) or combine(*given))
    _, weights = fitted(noisy_model(30.0))
    assert seen == [{1}, {0}, {0, 1}]
    assert used[0].tolist() == used[1].tolist() == [[1.0], [2.0]]  # fold 0 with weights of fold 1, and the other way
    assert weights == {"match": 3.0}


def test_each_fold_is_ranked_with_its_own_row_of_weights() -> None:
    scores = combine(torch.zeros(2, 3), torch.ones(1, 2, 3), torch.tensor([[1.0], [2.0]]), torch.tensor([4, 7]))
    assert scores.tolist() == [[1.0] * 3, [2.0] * 3]
