"""Re-ranking: pairs, memory, priors of captions; weights: the likeliest ones, none for a head that does not help, and folds apart."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mm_utils.evaluation import retrieval
from mm_utils.evaluation.embeddings import embed_split, image_shares
from mm_utils.evaluation.reranking import Listed, combine, fit_weights
from mm_utils.evaluation.retrieval import EvaluationArguments, RetrievalEvaluator
from tests.kit.truthful_model import ACCELERATOR, TruthfulModel, lists_by_sorting


def ranks_by_sorting(*scores: Any) -> list[int]:
    """Further right items do not push the first one down, so its rank counts only wrong ones."""
    return [hits.index(True) + 1 for hits in lists_by_sorting(*scores)]


@pytest.mark.parametrize(("image_bytes", "batches_held"), [(1, 1), (11, 3), (1000, 5)])
def test_keys_and_values_that_do_not_fit_are_computed_again(image_bytes: int, batches_held: int) -> None:
    """Five batches of 8 bytes per image, each further one of which is encoded exactly once more."""
    model = TruthfulModel.with_noise(3)
    batches = model.batches(5, unreadable=(6, 7, 22))
    split = embed_split(model, batches, ACCELERATOR, 8 * image_bytes)
    assert split.batches_held == batches_held
    shares = [(share, keys_values[0]) for share, keys_values in image_shares(model, split, batches, ACCELERATOR)]
    assert split.keys_values is None
    assert model.seen == 40 - sum(len(batch["rows"]) for batch in batches[:batches_held])
    assert [image for share, _ in shares for image in share] == list(range(20))
    assert all(layer.shape[1] == len(share) for share, layer in shares)


class Writer(TruthfulModel):
    """The log probability of caption t given image i is `log_probs[i, t]`."""

    voices = ("match", "caption")

    def caption_scores(self, keys_values: tuple[Tensor, ...], input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        assert attention_mask.shape == input_ids.shape
        return self.log_probs[keys_values[0][0, :, 0, 0, 0].long(), input_ids[:, 1]]


def test_the_prior_of_a_caption_is_subtracted() -> None:
    model: Any = Writer(23)
    generator = torch.Generator().manual_seed(3)
    texts, scale = len(model.owner), model.logit_scale.exp().item()
    model.logits = torch.randn(23, texts, generator=generator)
    model.log_probs = 4 * torch.randn(23, texts, generator=generator) - 30 * torch.rand(texts, generator=generator)
    model.config.rerank_weights = {"caption": 0.5, "match": 2}
    measure = RetrievalEvaluator(EvaluationArguments(rerank_top_k=texts))
    measure(model, model.batches(5), ACCELERATOR)
    of_head = 0.5 * (model.log_probs - model.log_probs.logsumexp(0)) + 2 * model.logits
    right, cosine = torch.tensor(model.owner)[:, None] == torch.arange(23), model.text @ model.image.T
    expected = (
        ranks_by_sorting(cosine, right, of_head.T, texts, scale),
        ranks_by_sorting(cosine.T, right.T, of_head, texts, scale),
    )
    for direction, ranks_Q in zip(("text_to_image", "image_to_text"), expected, strict=True):
        assert measure.directions[direction].reranked_Q.tolist() == ranks_Q


# -- weights ----------------------------------------------------------------------------------------------------------
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


@pytest.mark.parametrize(("truth", "noise"), [(0.0, 1.0), (-3.0, 1.0), (0.0, torch.nan)])
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


@pytest.mark.parametrize("stored", [{"match": 0.0}, {}], ids=["of no weight", "not trained"])
def test_a_head_without_weight_scores_no_pair(stored: dict[str, float]) -> None:
    model = noisy_model(3.0)
    model.config.rerank_weights = stored
    found = RetrievalEvaluator(EvaluationArguments(rerank_top_k=10))(model, model.batches(50), ACCELERATOR)
    assert not any(name.startswith("rerank") for name in found)
    assert model.scored == 0


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
