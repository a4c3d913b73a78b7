"""The `evaluate` metric, what training gained, and re-ranking; figures: tests/contracts/test_metrics.py."""

import math
import re
from pathlib import Path
from typing import Any

import evaluate
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid, normalize

import mm_utils
from mm_utils.distributed import RunError
from mm_utils.evaluation import retrieval
from mm_utils.evaluation.arguments import EvaluationArguments
from mm_utils.evaluation.embeddings import Embeddings, embed_split, image_shares
from mm_utils.evaluation.metrics import summarise_ranks
from mm_utils.evaluation.recall_gain import BEFORE, CLOSED_FORM, recall_gained
from mm_utils.evaluation.reranking import Listed, fit_weights, rank_directions
from mm_utils.evaluation.retrieval import RetrievalEvaluator, in_turn, keep_weights
from mm_utils.objectives.contrastive import InfoNCE, PairwiseSigmoid
from mm_utils.objectives.validation_loss import ValidationLoss
from tests.kit.jsonl import write_lines
from tests.kit.processes import run_on_ranks
from tests.kit.truthful_model import ACCELERATOR, TruthfulModel, lists_by_sorting, split_of


def test_the_evaluate_metrics_agree() -> None:
    folder = Path(mm_utils.__file__).parent
    metric = evaluate.load(str(folder / "retrieval_recall"))
    model = TruthfulModel(30)
    ranking = (model.text @ model.image.T).argsort(1, descending=True)
    rank_Q = (ranking == torch.tensor(model.owner)[:, None]).long().argmax(1) + 1
    found = metric.compute(predictions=ranking, references=[[image] for image in model.owner])
    assert found == pytest.approx(summarise_ranks(rank_Q) | {})
    found = metric.compute(predictions=[[3, 1, 2], [2, 3, 1], [5]], references=[[1], [1, 3], [9]], k=[1, 2])
    assert found == pytest.approx({"recall@1": 0, "recall@2": 2 / 3, "mean_rank": 2, "median_rank": 2})
    classes = evaluate.load(str(folder / "accuracy_and_f1"))
    found = classes.compute(predictions=[0, 1, 1, 0], references=[0, 1, 0, -1])
    assert found == {"accuracy": 0.5, "macro_f1": pytest.approx((1 / 2 + 2 / 3) / 2)}


def validation_loss(batch_size: int, bias: float | None) -> float:
    model = TruthfulModel()
    model.logit_bias = None if bias is None else torch.tensor(bias)
    measure = RetrievalEvaluator()
    measure(model, model.batches(5, (3,)), ACCELERATOR)
    term = InfoNCE() if bias is None else PairwiseSigmoid()
    return ValidationLoss([term], measure, batch_size)(model, [], ACCELERATOR)["loss"]


@pytest.mark.parametrize("bias", [None, -3.0])
@pytest.mark.parametrize(("batch_size", "starts"), [(8, (0, 8, 14)), (100, (0,))])
def test_the_loss_of_validation_is_that_of_whole_batches(
    batch_size: int, starts: tuple[int, ...], bias: float | None
) -> None:
    model = TruthfulModel()
    images = [image for image in range(23) if image != 3]
    order = torch.tensor(images)[torch.randperm(22, generator=torch.Generator().manual_seed(0))].tolist()
    losses = []
    for start in starts:
        part = order[start : start + batch_size]
        logits = (
            model.logit_scale.exp() * model.image[part] @ model.text[[model.owner.index(image) for image in part]].T
        )
        right = torch.arange(len(part))
        both = (cross_entropy(logits, right) + cross_entropy(logits.T, right)) / 2
        losses.append(
            both if bias is None else -logsigmoid((logits + bias) * (2 * torch.eye(len(part)) - 1)).sum(1).mean()
        )
    expected = pytest.approx(torch.stack(losses).mean().item())
    assert validation_loss(batch_size, bias) == expected
    if start and bias is None:
        assert run_on_ranks(3, validation_loss, batch_size, bias) == [expected] * 3


def gap_by_the_docs() -> float:
    text = Path(mm_utils.__file__).parents[1].joinpath("docs/objectives.md").read_text(encoding="utf-8")
    names = {}
    exec(
        next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "def centroid_gap" in block),
        names,
    )
    model = TruthfulModel()
    found = names["centroid_gap"](model, model.batches(5, (3,)), ACCELERATOR)
    return float(found["centroid_gap"])


def test_the_evaluator_of_the_docs_is_the_same_on_any_number_of_processes() -> None:
    assert run_on_ranks(2, gap_by_the_docs) == [pytest.approx(gap_by_the_docs())] * 2


@pytest.mark.parametrize("value", [{"recall": 0.4}, {"own": "good"}, {"own": None}])
def test_a_metric_is_a_number_and_has_one_source(value: dict[str, Any]) -> None:
    nothing = None
    assert in_turn(lambda *_: {"recall": 0.5}, lambda *_: {"own": 1})(nothing, [], nothing) == {
        "recall": 0.5,
        "own": 1,
    }
    measure = in_turn(lambda *_: {"recall": 0.5}, lambda *_: value)
    with pytest.raises(ValueError, match=next(iter(value))):
        measure(nothing, [], nothing)
    with pytest.raises(ValueError, match=r"test_retrieval.* returns None; figures are a dict of numbers by name"):
        in_turn(lambda *_: nothing)(nothing, [], nothing)


# -- what training gained -----------------------------------------------------------------------------------------------
def noisy(images: int, noise: float, seed: int = 0) -> Embeddings:
    drawn = torch.Generator().manual_seed(seed)
    image = torch.randn(images, 16, generator=drawn)
    other = torch.randn(images, 16, generator=drawn)
    return split_of(normalize(image, dim=1), normalize(image + noise * other, dim=1), list(range(images)))


def mean_recall(split: Embeddings) -> float:
    ranks = [ranks.cosine_Q for ranks in rank_directions(split).values()]
    return sum((rank_Q <= k).double().mean().item() for rank_Q in ranks for k in (1, 5, 10)) / 6


CASES = [
    # images, noise before (None: from scratch), noise after, saved step, what is said
    (200, None, 0.8, None, r"^mean recall 0\.\d{3}, by chance 0\.027: \+0\.\d{3} ± 0\.\d{3}\.$"),
    (200, None, 1e6, None, r"by chance 0\.027: by this figure, nothing was learnt\. Encoders from scratch"),
    (200, 1.6, 0.8, 9, r"before training, 0\.\d{3} after: \+0\.\d{3} ± 0\.\d{3}\.$"),
    (200, 0.8, 0.8, 9, r"after: [+-]0\.\d{3} ± 0\.\d{3}, within noise\. More pairs"),
    (
        200,
        0.8,
        0.8,
        0,
        r"before training, by chance 0.\d+; nothing later was better: training added nothing, and the model",
    ),
    (
        200,
        CLOSED_FORM,
        0.8,
        0,
        r"by the closed form, by chance 0.\d+; nothing later .* the closed form is saved as it was\.",
    ),
    (200, 0.8, 1.6, 9, r"after: -0\.\d{3} ± 0\.\d{3}: training lost\. Lower"),
    (29, 1.6, 0.8, 9, r"^mean recall 0\.\d{3} ± 0\.\d{3}, by chance 0\.\d{3}\.$"),
]


@pytest.mark.parametrize(("images", "before", "after", "saved", "said"), CASES)
@pytest.mark.parametrize("is_paired", [True, False])
def test_a_gain_is_stated_beside_its_noise(
    images: int,
    before: float | str | None,
    after: float,
    saved: int | None,
    said: str,
    is_paired: bool,
    tmp_path: Path,
) -> None:
    evaluator = RetrievalEvaluator()
    name = None if before is None else BEFORE
    if isinstance(before, str):  # of the same noise
        name = before
        before = after
    rows = []
    evaluator.split = noisy(images, after)
    evaluator.directions = rank_directions(evaluator.split)
    if before is not None:
        start = noisy(images, before, seed=1)
        evaluator.first = {name: ranks.cosine_Q for name, ranks in rank_directions(start).items()}
        rows = [{"step": 0, "eval_mean_recall": mean_recall(start)}]
    rows.append({"step": 9, "eval_mean_recall": mean_recall(evaluator.split)})
    rows += [{"step": 9, "saved_step": saved}] if saved is not None else []
    write_lines(tmp_path / "metrics.jsonl", rows)
    found = recall_gained(
        evaluator,
        tmp_path / "metrics.jsonl",
        "image",
        is_paired=is_paired,
        start_name=name,
    )
    assert re.search(said, found.sentence), found.sentence


@pytest.mark.parametrize("side", ["encode_text", "project_image"])
@pytest.mark.parametrize("value", [math.nan, 0.0])
def test_no_figure_comes_of_embeddings_that_are_not_finite_or_zero(
    side: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TruthfulModel.with_noise(3)
    right = getattr(model, side)

    def damaged(*given, **options):
        embeds, rest = right(*given, **options)
        return embeds * value, rest

    monkeypatch.setattr(model, side, damaged)
    with pytest.raises(RunError, match=r"embeddings of (images|texts) are not finite, or zero; no figure"):
        embed_split(model, model.batches(5), ACCELERATOR)


def test_equal_captions_are_no_gain(tmp_path: Path) -> None:
    evaluator = RetrievalEvaluator()
    evaluator.split = noisy(40, 0.8)
    evaluator.split.text_key_T = torch.zeros(40, dtype=torch.long)
    evaluator.directions = rank_directions(evaluator.split)
    said = recall_gained(evaluator, tmp_path / "metrics.jsonl", "image", is_paired=False, start_name=None)
    assert said.sentence == "mean recall 1.000, by chance 1.000."


# -- re-ranking --------------------------------------------------------------------------------------------------------
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
    model = Writer(23)
    generator = torch.Generator().manual_seed(3)
    texts = len(model.owner)
    scale = model.logit_scale.exp().item()
    model.logits = torch.randn(23, texts, generator=generator)
    model.log_probs = 4 * torch.randn(23, texts, generator=generator) - 30 * torch.rand(texts, generator=generator)
    model.config.rerank_weights = {"caption": 0.5, "match": 2}
    measure = RetrievalEvaluator(EvaluationArguments(rerank_top_k=texts))
    measure(model, model.batches(5), ACCELERATOR)
    of_head = 0.5 * (model.log_probs - model.log_probs.logsumexp(0)) + 2 * model.logits
    right = torch.tensor(model.owner)[:, None] == torch.arange(23)
    cosine = model.text @ model.image.T
    expected = (
        ranks_by_sorting(cosine, right, of_head.T, texts, scale),
        ranks_by_sorting(cosine.T, right.T, of_head, texts, scale),
    )
    for direction, ranks_Q in zip(("text_to_image", "image_to_text"), expected, strict=True):
        assert measure.directions[direction].reranked_Q.tolist() == ranks_Q


# -- weights ----------------------------------------------------------------------------------------------------------
COUNT = 150


def fitted(model: Any, top_k: int = 10) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of a fit, and its weights, which are kept by whoever asks for it and not by measuring."""
    evaluator = RetrievalEvaluator(EvaluationArguments(rerank_top_k=top_k), fits=True)
    metrics = evaluator(model, model.batches(50), ACCELERATOR)
    assert model.config.rerank_weights is None
    keep_weights(model, [evaluator])
    return metrics, model.config.rerank_weights


def noisy_model(truth: float, noise: float = 1.0) -> Any:
    """A model whose match logit is `truth` for a right pair and 0 for others, and noise."""
    model = TruthfulModel(COUNT)
    right = torch.tensor(model.owner) == torch.arange(COUNT)[:, None]
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
    cosine = torch.randn(3000, 6, generator=generator)
    voices = torch.randn(len(truth), 3000, 6, generator=generator)
    logits = cosine + torch.einsum("v,vqk->qk", torch.tensor(truth), voices)
    chosen = torch.multinomial(logits.softmax(1), 1, generator=generator)
    return Listed(cosine, voices, torch.arange(6) == chosen, torch.arange(3000))


def test_the_weights_are_the_likeliest() -> None:
    one = listed(1, (0.7, 0.0, 2.0))
    other = listed(2, (0.7, 0.0, 2.0))
    found = torch.tensor(fit_weights([one, other]))
    torch.testing.assert_close(found, torch.tensor([0.7, 0.0, 2.0]), atol=0.1, rtol=0.1)


def test_a_fold_is_ranked_with_weights_that_did_not_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(directions):
        seen.append({int(key) % 2 for one in directions for key in one.group_Q})
        return [float(len(seen))]

    used = []
    combine = retrieval.rank_directions
    monkeypatch.setattr(retrieval, "fit_weights", note)
    monkeypatch.setattr(retrieval, "rank_directions", lambda *given: used.append(given[-1]) or combine(*given))
    _, weights = fitted(noisy_model(30.0))
    assert seen == [{1}, {0}, {0, 1}]
    assert [weights.tolist() for weights in used] == [
        [[1.0], [2.0]]
    ]  # fold 0 with weights of fold 1, and the other way
    assert weights == {"match": 3.0}
