"""Retrieval between media that share captions: ranks as counted one by one, only where there is a partner."""

import torch
from datasets import Dataset

from mm_utils.evaluation.embeddings import Embeddings, Texts
from mm_utils.extras.several_media.evaluators import between_media


def split_of(embeds: torch.Tensor, rows: list[int]) -> Embeddings:
    ids, nothing = torch.tensor(rows), torch.empty(0, dtype=torch.long)
    return Embeddings(embeds, torch.empty(0, 4), ids, nothing, ids, Texts(nothing, nothing))


def test_ranks_are_those_counted_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    captions = {
        "image": [["A fox"], ["an owl", "a bird"], ["a crow"], ["a  FOX "], ["a lamp"]],
        "sound": [["a fox"], ["a bird"], ["rain"], ["an owl"], ["a fox barks", "a fox"], ["wind"]],
        "clip": [["nothing of these"]],
    }
    rows = {medium: Dataset.from_dict({"captions": each}) for medium, each in captions.items()}
    order = {"image": [3, 0, 1, 2, 4], "sound": [0, 1, 2, 3, 4, 5], "clip": [0]}  # as gathered from ranks
    splits = {
        medium: split_of(
            torch.nn.functional.normalize(torch.randn(len(places), 4, generator=generator), dim=1), places
        )
        for medium, places in order.items()
    }
    found = between_media(splits, rows)
    assert not any("clip" in name for name in found)
    plain = {
        medium: [{" ".join(text.lower().split()) for text in captions[medium][at]} for at in order[medium]]
        for medium in ("image", "sound")
    }
    for one, other in (("image", "sound"), ("sound", "image")):
        ranks, shares = [], []
        for query, texts in zip(splits[one].image_ME, plain[one], strict=True):
            right = [bool(texts & each) for each in plain[other]]
            if not any(right):
                continue
            scores = (splits[other].image_ME @ query).tolist()
            best = max(score for score, is_right in zip(scores, right, strict=True) if is_right)
            wrong = [score for score, is_right in zip(scores, right, strict=True) if not is_right]
            ranks.append(1 + sum(score >= best for score in wrong))
            shares.append(sum(right) / len(right))
        name = f"between_{one}_to_{other}"
        assert found[f"{name}_queries"] == len(ranks) == {"image": 3, "sound": 4}[one]
        for k in (1, 5, 10):
            assert found[f"{name}_recall@{k}"] == sum(rank <= k for rank in ranks) / len(ranks)
        assert abs(found[f"{name}_chance@1"] - sum(shares) / len(shares)) < 1e-6
