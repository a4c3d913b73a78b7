"""Let a trained image tower read images of another size: its table of positions is interpolated once, when it is loaded.

It is what the family's own class computes with `interpolate_pos_encoding=True` for every image. Towers without such a table,
convolutions or rotary positions, read any size as they are.
"""

import copy
import logging
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mm_utils.model.fusion import MOST_SPECIAL_TOKENS
from mm_utils.model.join import probe
from mm_utils.model.modeling_fusion_dual_encoder import image_backbone, input_shape

logger = logging.getLogger(__name__)


def resize(tower: Any, size: int) -> Any:
    """Return a tower that reads images, or frames, of `size` x `size` pixels with the weights of `tower`.

    Raises:
        ValueError: if what depends on the size is not a table of a square grid of positions, or the tower cannot run.
    """
    backbone = image_backbone(tower)
    what = f"--image_size is {size}; the image tower is a {backbone.config.model_type}"
    if len(input_shape(backbone)) < 3 or input_shape(backbone)[-3] != 3:
        raise ValueError(f"{what}, which reads no pixels. Drop the flag.")
    own_size = input_shape(backbone)[-1]
    if own_size == size:
        return tower
    config = copy.deepcopy(backbone.config)
    own = getattr(config, "image_size", None)
    if own is not None:
        config.image_size = [size] * len(own) if isinstance(own, (list, tuple)) else size
    made = type(backbone)._from_config(config)
    weights = backbone.state_dict()
    wanted = made.state_dict()
    for name in wanted.keys() | weights.keys():
        if name not in wanted or name not in weights or weights[name].shape != wanted[name].shape:
            is_video = len(input_shape(backbone)) > 3 and tower is backbone  # positions in time, too
            table = (
                None if is_video else _interpolated(made, name, weights.get(name), wanted.get(name), own_size, size)
            )
            if table is None:
                raise ValueError(
                    f"{what} of {own_size} pixels, and its {name} depends on the size in another way than as a square grid of "
                    "positions. Drop the flag, or choose another model."
                )
            weights[name] = table
    made.load_state_dict(weights)
    if tower is not backbone:
        tower.backbone = made
        tower.config = made.config
        made = tower
    probe(made, "vision")
    logger.info("The image tower (%s) reads %d pixels a side in place of %d", made.config.model_type, size, own_size)
    return made.train(tower.training)


def _interpolated(made: Any, name: str, table: Tensor | None, wanted: Tensor | None, *sizes: int) -> Tensor | None:
    """Return a table of positions `[(1,) n, C]` for another grid; None if it is not one with the patches last."""
    if table is None or wanted is None or "pos" not in name:
        return None
    if table.dim() not in (2, 3) or table.shape[:-2] not in ((), (1,)) or table.shape[-1] != wanted.shape[-1]:
        return None
    patch = getattr(made.config, "patch_size", None)
    before = table.shape[-2]
    after = wanted.shape[-2]
    # 224 // 16 = 14 patches a side before, 384 // 16 = 24 after
    side, new_side = [size // patch for size in sizes] if isinstance(patch, int) else map(math.isqrt, (before, after))
    special = before - side**2  # class and register tokens in front of the patches
    if special != after - new_side**2 or not 0 <= special <= MOST_SPECIAL_TOKENS or not new_side:
        return None
    rows = table.float().reshape(-1, table.shape[-1])
    grid = rows[special:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, size=(new_side, new_side), mode="bicubic", align_corners=False)
    return torch.cat([rows[:special], grid.permute(0, 2, 3, 1).flatten(0, 2)]).view_as(wanted).to(table)
