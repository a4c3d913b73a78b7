"""Re-ranking against its definition: invariances, memory, cost, and any number of processes."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mm_utils import distributed
from mm_utils.evaluation import embeddings, reranking, retrieval
from mm_utils.evaluation.embeddings import embed_split, image_shares
from mm_utils.evaluation.reranking import PairScores
from mm_utils.evaluation.retrieval import EvaluationArguments, RetrievalEvaluator
from tests.kit.ranks import run_on_ranks
from tests.kit.truthful_model import ACCELERATOR, TruthfulModel, figures_of_lists, lists_by_sorting, ranks_by_sorting

DIRECTIONS = ("text_to_image", "image_to_text")


def evaluator(top_k: int, weights: dict[str, float] | None = None) -> RetrievalEvaluator:
    return RetrievalEvaluator(EvaluationArguments(rerank_top_k=top_k), weights=weights)


# -- against the definition ---------------------------------------------------------------------------------------------
@given(
    st.integers(1, 40), st.integers(0, 2**20), st.sampled_from([0.5, 1.0, 3.0]), st.integers(1, 60), st.integers(1, 30)
)
@settings(max_examples=25)
def test_every_number_of_candidates_equals_the_definition(
    top_k: int, seed: int, weight: float, pairs: int, block: int
) -> None:
    model = TruthfulModel.with_noise(seed)
    measure = evaluator(top_k, {"match": weight})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reranking, "PAIRS", pairs)
        patch.setattr(embeddings, "BLOCK", block)
        found = measure(model, model.batches(5), ACCELERATOR)
    cosine, right = model.text @ model.image.T, torch.tensor(model.owner)[:, None] == torch.arange(23)
    scale = model.logit_scale.exp().item() / weight
    for direction, matrix, head, is_right in (
        ("text_to_image", cosine, model.logits.T, right),
        ("image_to_text", cosine.T, model.logits, right.T),
    ):
        ranks, last = measure.directions[direction], min(top_k, matrix.shape[1])
        assert ranks.reranked_Q.tolist() == ranks_by_sorting(matrix, is_right, head, last, scale)
        figures = figures_of_lists(lists_by_sorting(matrix, is_right, head, last, scale))
        assert {name: found[f"rerank_{direction}_{name}"] for name in figures} == pytest.approx(figures)


def test_pairs_that_were_not_scored_count_as_minus_infinity() -> None:
    scores = PairScores(torch.tensor([7, 3, 5]), torch.tensor([[0.7, -0.3, 0.5]]))
    [found] = scores(torch.tensor([[3, 4], [7, 9]]))
    assert found.isneginf().tolist() == [[False, True], [False, True]]
    assert found[:, 0].tolist() == pytest.approx([-0.3, 0.7])


@pytest.mark.parametrize("spoiled", ["cosine", "match"])
def test_nan_counts_against_the_head(spoiled: str) -> None:
    model: Any = TruthfulModel()
    if spoiled == "cosine":
        model.image[:] = torch.nan
    else:
        model.logits = torch.full((23, len(model.owner)), torch.nan)
    measure = evaluator(4)
    found = measure(model, model.batches(5), ACCELERATOR)
    for direction in DIRECTIONS:
        assert found[f"rerank_{direction}_recall@1"] == 0
        ranks = measure.directions[direction]
        assert (ranks.reranked_Q >= ranks.cosine_Q.clamp(max=3 if direction == "image_to_text" else 4)).all()


# -- heads that know something, and heads that do not -------------------------------------------------------------------


def test_ties_count_against_the_head_too() -> None:
    model: Any = TruthfulModel(truth=0.0)
    model.image = torch.eye(6)[torch.arange(23) % 6]
    model.text = model.image[torch.tensor(model.owner)]
    found = evaluator(1000)(model, model.batches(5), ACCELERATOR)
    assert found["text_to_image_recall@1"] == found["rerank_text_to_image_recall@1"] == 0
    assert found["image_to_text_mean_rank"] == found["rerank_image_to_text_mean_rank"] > 4


def test_every_pair_is_scored_once() -> None:
    model: Any = TruthfulModel()
    evaluator(5)(model, model.batches(5), ACCELERATOR)
    by_text = (model.text @ model.image.T).topk(5, 1).indices
    by_image = (model.image @ model.text.T).topk(5, 1).indices
    pairs = {(int(image), text) for text, images in enumerate(by_text) for image in images}
    pairs |= {(image, int(text)) for image, texts in enumerate(by_image) for text in texts}
    assert model.scored == len(pairs)


# -- memory and cost ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("image_bytes", "batches_held"), [(1, 1), (10, 2), (11, 3), (1000, 5)])
def test_keys_and_values_that_do_not_fit_are_computed_again(
    image_bytes: int, batches_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five batches of 8 bytes per image: the scores stay, and each further image is encoded exactly once more."""
    model = TruthfulModel.with_noise(3)
    batches = model.batches(5, unreadable=(6, 7, 22))
    whole = evaluator(6)(model, batches, ACCELERATOR)
    images = model.seen
    assert images == 20
    scored, model.scored, model.seen = model.scored, 0, 0
    monkeypatch.setattr(retrieval, "CACHE_GB", 8 * image_bytes / 1e9)
    part = evaluator(6)(model, batches, ACCELERATOR)
    assert part == whole
    assert model.scored == scored
    split = embed_split(model, batches, ACCELERATOR, 8 * image_bytes)
    assert split.batches_held == batches_held
    held = sum(len(batch["rows"]) for batch in batches[:batches_held])
    assert model.seen == images + (images - held) + images
    shares = [(share, keys_values[0]) for share, keys_values in image_shares(model, split, batches, ACCELERATOR)]
    assert split.keys_values is None
    assert [image for share, _ in shares for image in share] == list(range(20))
    assert all(layer.shape[1] == len(share) for share, layer in shares)


# -- caption scores -----------------------------------------------------------------------------------------------------
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
    measure = evaluator(texts, {"caption": 0.5, "match": 2})
    measure(model, model.batches(5), ACCELERATOR)
    of_head = 0.5 * (model.log_probs - model.log_probs.logsumexp(0)) + 2 * model.logits
    right, cosine = torch.tensor(model.owner)[:, None] == torch.arange(23), model.text @ model.image.T
    expected = (
        ranks_by_sorting(cosine, right, of_head.T, texts, scale),
        ranks_by_sorting(cosine.T, right.T, of_head, texts, scale),
    )
    for direction, ranks_Q in zip(DIRECTIONS, expected, strict=True):
        assert measure.directions[direction].reranked_Q.tolist() == ranks_Q


# -- number of processes ------------------------------------------------------------------------------------------------
CASES: list[dict[str, Any]] = [
    {"images": 23, "batch_size": 5},
    {"images": 23, "batch_size": 2, "cache": 40e-9},  # five images fit
    {"images": 23, "batch_size": 5, "unreadable": (0, 1, 2, 3, 12), "cache": 1e-9},
    {"images": 23, "batch_size": 3, "unreadable": tuple(range(12))},  # nothing left for the first of two
    {"images": 1, "batch_size": 4},  # nothing for some rank from the beginning
    {"images": 2, "batch_size": 1},
]


def evaluate_cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for case in CASES:
        model = TruthfulModel.with_noise(5, case["images"])
        batches = model.batches(case["batch_size"], case.get("unreadable", ()))
        measure = evaluator(5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(retrieval, "CACHE_GB", case.get("cache", 8.0))
            figures = measure(model, batches, ACCELERATOR)
        ranks_of = {direction: ranks.reranked_Q.tolist() for direction, ranks in measure.directions.items()}
        found.append({**figures, **ranks_of})
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_the_number_of_processes_changes_nothing(world: int) -> None:
    assert distributed.world_size() == 1
    assert run_on_ranks(world, evaluate_cases) == [evaluate_cases()] * world


def test_the_order_of_rows_and_the_size_of_batches_change_nothing() -> None:
    model = TruthfulModel.with_noise(2)
    batches = model.batches(5)
    expected = evaluator(6)(model, batches, ACCELERATOR)
    for other in (batches[::-1], model.batches(2), model.batches(64)):
        assert evaluator(6)(model, other, ACCELERATOR) == pytest.approx(expected, rel=1e-12)
