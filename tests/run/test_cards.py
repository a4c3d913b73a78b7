from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mm_utils.run.finish import chosen_on_validation, independent_queries


@pytest.mark.parametrize(
    ("keeps_best", "weights", "metrics", "chosen"),
    [
        (False, None, {}, ""),
        (False, {"match": 0.0}, {}, "the weights of re-ranking"),
        (True, None, {}, "the checkpoint"),
        (True, {"match": 1.0}, {}, "the checkpoint and the weights of re-ranking"),
        (False, None, {"eval_wise_ft_alpha": 0.5}, "alpha"),
        (True, {"match": 1.0}, {"eval_wise_ft_alpha": 1.0}, "the checkpoint, the weights of re-ranking and alpha"),
    ],
)
def test_what_the_measured_split_has_chosen_is_stated(keeps_best, weights, metrics, chosen) -> None:
    run = SimpleNamespace(args=SimpleNamespace(keeps_best=keeps_best))
    model = SimpleNamespace(fusion=object(), config=SimpleNamespace(rerank_weights=weights))
    found = chosen_on_validation(run, metrics, "", model)
    assert (f"also chose {chosen}, so" in found) if chosen else not found


@pytest.mark.parametrize(("groups", "counted"), [(30, 30), (20, 20), (19, 0)])
def test_intervals_count_groups_of_equal_captions(groups: int, counted: int) -> None:
    split: Any = SimpleNamespace(group_M=torch.arange(60) % groups)
    said, queries = independent_queries(split, 60, "sound")
    assert queries == counted
    assert ("group of sounds with equal captions" in said) if counted else f"{groups} independent groups" in said
    assert independent_queries(None, 5, "sound") == ("95 % intervals in brackets, counting one query per sound", 5)
