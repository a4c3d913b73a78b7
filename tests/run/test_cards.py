from types import SimpleNamespace

import pytest

from mm_utils.run.cards import chosen_on_validation


@pytest.mark.parametrize(
    ("keeps_best", "weights", "settings", "metrics", "chosen"),
    [
        (False, None, {}, {}, ""),
        (False, {"match": 0.0}, {"wise_ft_alpha": 0.5}, {"eval_wise_ft_alpha": 0.5}, "the weights of re-ranking"),
        (True, None, {}, {}, "the checkpoint"),
        (True, {"match": 1.0}, {}, {}, "the checkpoint and the weights of re-ranking"),
        (False, None, {}, {"eval_wise_ft_alpha": 0.5}, "alpha"),
        (True, {"match": 1.0}, {}, {"eval_wise_ft_alpha": 1.0}, "the checkpoint, the weights of re-ranking and alpha"),
    ],
)
def test_what_the_measured_split_has_chosen_is_stated(keeps_best, weights, settings, metrics, chosen) -> None:
    run = SimpleNamespace(args=SimpleNamespace(keeps_best=keeps_best, choice=""), settings=settings)
    model = SimpleNamespace(fusion=object(), config=SimpleNamespace(rerank_weights=weights))
    found = chosen_on_validation(run, metrics, model)
    assert (f"also chose {chosen}, so" in found) if chosen else not found
