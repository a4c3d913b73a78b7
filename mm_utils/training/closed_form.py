"""Fit both projections in closed form: canonical correlation of two towers' features.

Hotelling 1936 (doi 10.1093/biomet/28.3-4.321), with four changes:

- Both covariances are shrunk by a multiple of their mean variance (Vinod 1976, doi 10.1016/0304-4076(76)90010-5), chosen out of
  fold.
- The direction of the mean is projected out in place of subtracting the mean, so the projections need no bias.
- Directions weigh as much as they correlate: the square root of the correlation is in either map.
- If the vision tower has a classifier with named classes, the names that it sees in an image, embedded by the text tower, are a
  second caption of the image. Their weight is chosen out of fold as well, and 0 is an answer.

A pretrained image-text model has maps already. What they know and what the pairs say become two blocks of one map (`stack`).

Shape letters: M images, T captions, A and B channels of image and text features, E embedding width.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

FOLDS = 4
SHRINKAGES = (30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03)  # in mean variances of a feature, in the order of trial
NAME_WEIGHTS = (0.0, 0.3, 1.0, 2.0)  # of the class names; a caption has 1
PAIR_WEIGHTS = (1.0, 0.9, 0.75, 0.6, 0.5, 0.4, 0.25, 0.0)  # of what the pairs say beside what a model knew
SCALES = tuple(2 ** (power / 2) for power in range(2, 14))  # inverse temperatures, 2 to 91

_ALIKE = 1e-10  # variance of unit features that differ by rounding alone

MapPair = tuple[Tensor, Tensor]
"""Maps from image features `[A, E]` and from text features `[B, E]` to embeddings."""


@dataclass
class Features:
    """Pooled features of pairs, one row an image or a caption, in the order of the data."""

    image_MA: Tensor
    text_TB: Tensor
    owner_T: Tensor  # place of each caption's image
    names_MB: Tensor | None = None  # text features of the class names seen in each image; None without names

    def unit(self) -> "Features":
        """Return the features at unit length, in double precision."""
        names = None if self.names_MB is None else _unit(self.names_MB)
        return Features(_unit(self.image_MA), _unit(self.text_TB), self.owner_T.cpu(), names)

    def take(self, chosen_M: Tensor) -> "Features":
        """Return the images where `chosen_M`, with their captions."""
        place_M = chosen_M.cumsum(0) - 1
        chosen_T = chosen_M[self.owner_T]
        names = None if self.names_MB is None else self.names_MB[chosen_M]
        return Features(self.image_MA[chosen_M], self.text_TB[chosen_T], place_M[self.owner_T[chosen_T]], names)

    def moments(self) -> list[Tensor]:
        """Return sums over pairs, which can be subtracted: those of captions, and those of names where there are any."""
        sums = _moments(self.image_MA, self.text_TB, self.owner_T)
        if self.names_MB is not None:
            sums += _moments(self.image_MA, self.names_MB, torch.arange(len(self.image_MA)))
        return sums


def _moments(image_MA: Tensor, text_TB: Tensor, owner_T: Tensor) -> list[Tensor]:
    """Return sums in which every image weighs 1, shared by its captions: `[]`, `[A]`, `[B]`, `[A, A]`, `[B, B]`, `[A, B]`."""
    # of an image with 5 captions, each weighs 0.2
    weight_T1 = 1 / owner_T.bincount()[owner_T, None].to(text_TB)
    image_TA = image_MA[owner_T]
    weighed_TA = weight_T1 * image_TA
    weighed_TB = weight_T1 * text_TB
    firsts = [weight_T1.sum(), weighed_TA.sum(0), weighed_TB.sum(0)]
    return [*firsts, weighed_TA.T @ image_TA, weighed_TB.T @ text_TB, weighed_TA.T @ text_TB]


class Maps:
    """The maps that fit some pairs, given as `Features.moments`."""

    def __init__(self, moments: list[Tensor]):
        weight, image_A, text_B, image_AA, text_BB, image_AB = moments[:6]
        self.image = _principal_axes(image_A, image_AA / weight)
        self.text = _principal_axes(text_B, text_BB / weight)
        crosses = [image_AB / weight]  # covariances with captions and, centred, with names
        if moments[6:]:
            weight, image_A, text_B, _, _, image_AB = moments[6:]
            crosses.append((image_AB - torch.outer(image_A, text_B) / weight) / weight)
        self.crosses = [self.image[1].T @ cross_AB @ self.text[1] for cross_AB in crosses]

    def of(self, shrinkage: float, name_weight: float, width: int) -> tuple[Tensor, Tensor]:
        """Return maps `[A, E]` and `[B, E]` to the most correlated directions, strongest first.

        Directions beyond the rank of the data are zero.
        """
        image_A, image_AA = self.image
        text_B, text_BB = self.text
        whiten_A = _whitening(image_A, shrinkage)
        whiten_B = _whitening(text_B, shrinkage)
        cross_AB = sum(weight * cross for weight, cross in zip((1, name_weight), self.crosses, strict=False))
        left_AE, correlation_E, right_BE = _singular_vectors(whiten_A[:, None] * cross_AB * whiten_B, width)
        # The sign of a direction is arbitrary: the largest entry of the text's is positive.
        sign_E = right_BE.gather(0, right_BE.abs().argmax(0, keepdim=True))[0].sign()
        strength_E = correlation_E.sqrt() * sign_E
        image_AE = image_AA @ (whiten_A[:, None] * left_AE * strength_E)
        text_BE = text_BB @ (whiten_B[:, None] * right_BE * strength_E)
        missing = (0, max(0, width - len(strength_E)))
        return F.pad(image_AE, missing), F.pad(text_BE, missing)


@dataclass
class ClosedForm:
    """A fit of both projections."""

    image_AE: Tensor  # the maps
    text_BE: Tensor
    scale: float  # inverse temperature
    shrinkage: float  # the chosen settings
    name_weight: float
    recalls: tuple[float, float]  # recall@1 text to image and image to text of pairs that the maps were not fitted to
    candidates: int  # images that these were found among
    image_mean_A: Tensor  # of the unit features
    text_mean_B: Tensor
    pair_weight: float = 1.0  # beside what a model knew; 0: its maps are the best

    @property
    def judged(self) -> str:
        """What the maps find among pairs that they were not fitted to, in words."""
        text, image = self.recalls
        what = f"recall@1 of pairs left out of the fit {text:.3f} text to image and {image:.3f} image to text"
        return f"{what}, among {self.candidates}"


def stack(known: MapPair | None, fitted: MapPair, weight: float, features: Features) -> MapPair:
    """Return maps `[A, K + E]` and `[B, K + E]` whose cosine is about 1 - weight times the known one plus weight times the fitted.

    Each block is divided by the mean norm of its outputs, so that both cosines count as the weight says. Of weight 0 or 1, one
    of the blocks is returned alone.
    """
    if known is None or weight == 1:
        return fitted
    if weight == 0:
        return known

    def blocks(old: Tensor, new: Tensor, rows: Tensor) -> Tensor:
        # the weight enters both maps, and a cosine is a product of both: so its root
        return torch.cat([math.sqrt(1 - weight) * _level(old, rows), math.sqrt(weight) * _level(new, rows)], 1)

    return blocks(known[0], fitted[0], features.image_MA), blocks(known[1], fitted[1], features.text_TB)


def _level(map_CE: Tensor, rows_NC: Tensor) -> Tensor:
    """Return a map whose outputs have a mean norm of 1; a map to zero stays."""
    norm = (rows_NC @ map_CE).norm(dim=1).mean()
    return map_CE / norm if norm > 0 else map_CE


def fit(features: Features, width: int, known: MapPair | None = None) -> ClosedForm:
    """Fit the maps to all pairs, with settings and scale best for pairs left out, in 4 folds.

    The best have the lowest InfoNCE among the images of a fold; recall, which is coarse, is only reported. If images or captions
    are all alike, the maps are zero.

    Args:
        width: of the fitted maps.
        known: maps `[A, K]` and `[B, K]` of a model that is kept, as the first block of the maps; its weight is chosen, too.

    Raises:
        ValueError: with fewer than two images a fold, or if a feature is not finite.
    """
    features = features.unit()
    given = (features.image_MA, features.text_TB, features.names_MB)
    if not all(rows.isfinite().all() for rows in given if rows is not None):
        raise ValueError(
            "the closed-form start cannot be computed; a backbone's output is not finite. Train in bf16 or fp32, or choose another "
            "backbone."
        )
    images = len(features.image_MA)
    if images < 2 * FOLDS:
        raise ValueError(
            f"{images} images are too few for the closed-form start; at least {2 * FOLDS} are needed. Give more images that can be "
            "read."
        )
    fold_M = torch.arange(images) % FOLDS
    held_out = [features.take(fold_M == fold) for fold in range(FOLDS)]
    total = features.moments()
    others = []
    for fold in held_out:
        # sums over three folds are those over all less those over one: the pairs are read once
        others.append(Maps([whole - part for whole, part in zip(total, fold.moments(), strict=True)]))
    known = None if known is None else (known[0].cpu().double(), known[1].cpu().double())

    def judge(shrinkage: float, name_weight: float, pair_weight: float = 1.0) -> tuple[float, float, float, float]:
        """Return the lowest loss, the scale that has it, and both recalls."""
        losses = []
        recalls = []
        for part, rest in zip(held_out, others, strict=True):
            maps = stack(known, rest.of(shrinkage, name_weight, width), pair_weight, features)
            loss, recall = _judge(part, *maps)
            losses.append(loss)
            recalls.append(recall)
        loss = torch.stack(losses)  # [folds, scales]
        best = int(loss.mean(0).argmin())
        return loss[:, best].mean().item(), SCALES[best], *torch.stack(recalls).mean(0).tolist()

    # One after the other: the shrinkage depends little on the names. The loss has one minimum, so beyond it none is tried.
    judged = dict[tuple[float, float], tuple[float, float, float, float]]()
    for shrinkage in SHRINKAGES:
        judged[shrinkage, 0.0] = judge(shrinkage, 0.0)
        if judged[shrinkage, 0.0] > min(judged.values()):  # of tuples: the loss is their first entry
            break
    shrinkage, _ = min(judged, key=judged.__getitem__)
    if features.names_MB is not None:
        judged |= {(shrinkage, weight): judge(shrinkage, weight) for weight in NAME_WEIGHTS[1:]}
    shrinkage, name_weight = min(judged, key=judged.__getitem__)
    best = judged[shrinkage, name_weight]
    pair_weight = 1.0
    if known is not None:
        tried = {(shrinkage, weight): judge(shrinkage, name_weight, weight) for weight in PAIR_WEIGHTS}
        _, pair_weight = min(tried, key=tried.__getitem__)
        # Beside what a model knew, what the pairs say may be shrunk more or less.
        tried |= {(other, pair_weight): judge(other, name_weight, pair_weight) for other in SHRINKAGES}
        shrinkage, pair_weight = min(tried, key=tried.__getitem__)
        best = tried[shrinkage, pair_weight]
    _, scale, *recalls = best
    fitted = Maps(total).of(shrinkage, name_weight, width)
    means = (total[1] / total[0], total[2] / total[0])  # total[0] is the number of images
    maps = stack(known, fitted, pair_weight, features)
    shown = (recalls[0], recalls[1])
    return ClosedForm(*maps, scale, shrinkage, name_weight, shown, images // FOLDS, *means, pair_weight)


def _judge(held_out: Features, image_AE: Tensor, text_BE: Tensor) -> tuple[Tensor, Tensor]:
    """Return InfoNCE at each of `SCALES`, and recall@1 both ways, with one caption an image."""
    # captions lie in the order of their images
    first_M = torch.searchsorted(held_out.owner_T, torch.arange(len(held_out.image_MA)))
    cosine_MM = _unit(held_out.text_TB[first_M] @ text_BE) @ _unit(held_out.image_MA @ image_AE).T
    target_M = torch.arange(len(cosine_MM))
    losses = [
        F.cross_entropy(scale * cosine_MM, target_M) + F.cross_entropy(scale * cosine_MM.T, target_M)
        for scale in SCALES
    ]
    recalls = [(scores.argmax(1) == target_M).double().mean() for scores in (cosine_MM, cosine_MM.T)]
    return torch.stack(losses) / 2, torch.stack(recalls)


def _principal_axes(total: Tensor, second_moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return variances, and the axes `[C, C]` in columns, without the direction of the mean."""
    direction = F.normalize(total, dim=0)
    # takes the part along the mean out of a vector
    projector = torch.eye(len(direction), dtype=direction.dtype) - torch.outer(direction, direction)
    values, vectors = torch.linalg.eigh(projector @ second_moment @ projector)
    return values.clamp(min=0), projector @ vectors


def _whitening(values: Tensor, shrinkage: float) -> Tensor:
    """Return the factors `[C]` that make variances equal, shrunk; 0 where there is none."""
    if values.sum() < _ALIKE:
        return torch.zeros_like(values)
    return (values + shrinkage * values.mean()).rsqrt()


def _singular_vectors(matrix: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return left vectors, values and right vectors of the `count` largest values.

    They come from the smaller Gram matrix, ten times as fast as a decomposition; values below 1e-7 of the largest are 0.
    """
    if matrix.shape[0] < matrix.shape[1]:
        right, values, left = _singular_vectors(matrix.T, count)
        return left, values, right
    squares, right = torch.linalg.eigh(matrix.T @ matrix)
    values = squares.clamp(min=0).sqrt().flip(0)[:count]
    right = right.flip(1)[:, :count]
    values = torch.where(values > 1e-7 * values[0], values, 0)
    left = (matrix @ right) / torch.where(values > 0, values, torch.inf)
    return left, values, right


def _unit(rows: Tensor) -> Tensor:
    return F.normalize(rows.cpu().double(), dim=-1)
