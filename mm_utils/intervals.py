"""95 % intervals of shares and means: how much a figure would vary with other images of the same kind."""

import math

import torch
from torch import Tensor

_NORMAL_95 = 1.959964  # 97.5 % of a normal distribution lie below


def wilson_interval(right: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927, doi 10.2307/2276774), sound for few images and shares near 0 or 1."""
    share, width = right / total, _NORMAL_95**2 / total
    half = _NORMAL_95 * math.sqrt(share * (1 - share) / total + width / (4 * total))
    low, high = (share + width / 2 - half) / (1 + width), (share + width / 2 + half) / (1 + width)
    return max(0.0, low), min(1.0, high)


def mean_interval(value_Q: Tensor, image_key_Q: Tensor) -> tuple[float, float]:
    """Mean of Q values in [-1, 1], and half the width of its 95 % interval.

    Captions of one image are not independent, so images are what is drawn: the variance is that of a ratio of sums over
    images (Cochran, Sampling Techniques, 1977, section 6.3), which a bootstrap over images approaches without its noise.
    Where all images agree it would be 0, and three in the number of images is given instead (the rule of three).
    """
    value_Q = value_Q.double()
    _, place_Q, count_M = image_key_Q.unique(return_inverse=True, return_counts=True)
    images, mean = len(count_M), value_Q.mean()
    rest_M = torch.zeros(images, dtype=value_Q.dtype, device=value_Q.device).index_add_(0, place_Q, value_Q - mean)
    variance = (rest_M**2).sum().item() * images / max(1, images - 1) / len(value_Q) ** 2
    return mean.item(), _NORMAL_95 * math.sqrt(variance) if variance > 0 else min(1.0, 3 / images)
