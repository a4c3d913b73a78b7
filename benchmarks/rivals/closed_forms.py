"""Contestants of `benchmarks/learning.py` without steps: correlations, ridge regression."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.rivals.judging import Judge, Towers, recalls, stock_towers
from benchmarks.rivals.loop_bench import Batch, Bench
from mm_utils.extras.starts.closed_form import FOLDS, Features, fit

PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # of ridge regression, in mean variances of a feature


def frozen_features(bench: Bench, judge: Judge) -> tuple[Towers, Features]:
    """The towers without projections, and their unit features of the training split, fp64."""
    towers = stock_towers(bench, bench.stock_model().eval(), pools_by_mean=True, projects=False)
    images, texts, owners, number = list[Tensor](), list[Tensor](), list[Tensor](), 0
    with torch.no_grad():
        for batch in judge.loaders.evaluation(bench.rows, 64):
            image_nA, text_tB = towers(batch)
            images.append(image_nA)
            texts.append(text_tB)
            owners.append(batch["caption_image"] + number)
            number += len(image_nA)
    return towers, Features(torch.cat(images), torch.cat(texts), torch.cat(owners)).unit()


def cca(bench: Bench, judge: Judge, budget: float, points: int) -> dict[str, Any]:
    """Canonical correlations."""
    towers, features = frozen_features(bench, judge)
    found = fit(features, bench.model.config.projection_dim)

    def mapped(batch: Batch) -> tuple[Tensor, Tensor]:
        image_nA, text_tB = (side.cpu().double() for side in towers(batch))
        return image_nA @ found.image_AE, text_tB @ found.text_BE

    judge(mapped)
    return {"shrinkage": found.shrinkage}


Regression = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def regress(features: Features, penalty: float) -> Regression:
    """Fit both ways; return what embeds features so that a product is the sum of cosines."""
    image_TA, text_TB = features.image_MA[features.owner_T], features.text_TB
    image_A, text_B = image_TA.mean(0), text_TB.mean(0)
    image_TA, text_TB = image_TA - image_A, text_TB - text_B

    def solve(given: Tensor, wanted: Tensor) -> Tensor:
        covariance = given.T @ given / len(given)
        shrunk = covariance + penalty * covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)
        return torch.linalg.solve(shrunk, given.T @ wanted / len(given))

    to_text_AB, to_image_BA = solve(image_TA, text_TB), solve(text_TB, image_TA)

    def embed(image_MA: Tensor, text_TB: Tensor) -> tuple[Tensor, Tensor]:
        image_MA, text_TB = image_MA - image_A, text_TB - text_B
        image = [F.normalize(side, dim=-1) for side in (image_MA @ to_text_AB, image_MA)]
        text = [F.normalize(side, dim=-1) for side in (text_TB, text_TB @ to_image_BA)]
        return torch.cat(image, dim=-1), torch.cat(text, dim=-1)

    return embed


def choose_penalty(features: Features) -> float:
    """The penalty with the highest mean recall of images left out, in four folds."""
    fold_M = torch.arange(len(features.image_MA)) % FOLDS

    def left_out(penalty: float) -> float:
        total = 0.0
        for fold in range(FOLDS):
            rest, part = features.take(fold_M != fold), features.take(fold_M == fold)
            relevant_MT = torch.arange(len(part.image_MA))[:, None] == part.owner_T
            total += recalls(*regress(rest, penalty)(part.image_MA, part.text_TB), relevant_MT)["mean_recall"]
        return total

    return max(PENALTIES, key=left_out)


def ridge(bench: Bench, judge: Judge, budget: float, points: int) -> dict[str, Any]:
    """Ridge regression both ways."""
    towers, features = frozen_features(bench, judge)
    penalty = choose_penalty(features)
    embed = regress(features, penalty)
    judge(lambda batch: embed(*(F.normalize(side.cpu().double(), dim=-1) for side in towers(batch))))
    return {"penalty": penalty}
